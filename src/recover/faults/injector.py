"""Makes the planned faults of one rank happen, each once, and leaves proof of it.

Theory of operation
-------------------
* The training loop calls `at(place, step, index)` wherever a fault may be planned. Without a plan that is a call and
  one test of an empty tuple; `planned` tells the reduction at which bucket to hold back.
* Before it acts, the injector appends one line to the *done file* and syncs it: a process that has just killed itself
  can't report. The launcher compares that file with the plan; an entry without a line did not happen, and a test whose
  fault never happened proves nothing, so the run fails.
* What is in the done file under this run's id is not done again: a replica that was started anew is not killed anew.
* The file is written by several processes: one `write(2)` of less than a page each to a file opened for appending.
"""
from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from recover.config import Environment
from recover.faults.plan import Fault, FaultPlan

DONE_FILE: Final = "faults-done.jsonl"
HANG: Final = 24 * 3600.0
"""How long `hang` sleeps, in seconds: longer than any run waits for anybody, and yet bounded."""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the done file; `at` counts nanoseconds since 1970, `step` is where it happened."""

    run_id: str
    number: int
    replica: int
    rank: int
    step: int
    place: str
    action: str
    pid: int
    at: int


def done_path(events: Path | None, plan: Path) -> Path:
    """Where the proofs go: the directory of events, else a file beside the plan."""
    return plan.with_name(plan.name + ".done.jsonl") if events is None else events / DONE_FILE


def read_done(path: Path, run_id: str) -> list[Done]:
    """The proofs of one run. Lines that are torn or not ours are skipped: they prove nothing."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            done = msgspec.json.decode(line, type=Done)
        except msgspec.DecodeError:
            continue
        if done.run_id == run_id:
            found.append(done)
    return found


Act = Callable[[], None]


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hang() -> None:
    time.sleep(HANG)


class Injector:
    """The faults of one rank.

    `act` adds to or replaces the actions by name: `cut` comes from the owner of the connections, and must be given if
    an entry asks for it (ValueError otherwise). `Injector()` never does anything.
    """

    def __init__(self, faults: Sequence[Fault] = (), *, run_id: str = "run", done: Path | None = None,
                 act: Mapping[str, Act] | None = None) -> None:
        self._acts: dict[str, Act] = {"kill": _kill, "stop": _stop, "hang": _hang, **(act or {})}
        self._run_id, self._done = run_id, done
        past = {entry.number for entry in read_done(done, run_id)} if done is not None else set()
        self._pending = tuple(fault for fault in faults if fault.number not in past)
        for fault in self._pending:
            if fault.action not in self._acts:
                raise ValueError(f"fault plan, {fault}: nothing here knows how to {fault.action}")

    @property
    def pending(self) -> tuple[Fault, ...]:
        """What has not happened yet."""
        return self._pending

    def at(self, place: str, step: int, index: int | None = None) -> None:
        """This rank passes `place` in `step`: a fault that is planned for here happens now, and may never return."""
        if not self._pending:
            return
        for fault in self._pending:
            if fault.place == place and fault.step in (None, step) and fault.index == index:
                self._happen(fault, step)

    def planned(self, place: str, step: int) -> int | None:
        """The lowest index at which a fault is planned for `place` in `step`; None if there is none."""
        if not self._pending:
            return None
        return min((fault.index for fault in self._pending if fault.place == place and fault.step in (None, step)
                    and fault.index is not None), default=None)

    def _happen(self, fault: Fault, step: int) -> None:
        self._pending = tuple(other for other in self._pending if other is not fault)
        self._prove(fault, step)
        self._acts[fault.action]()

    def _prove(self, fault: Fault, step: int) -> None:
        if self._done is None:
            return
        place = fault.place if fault.index is None else f"{fault.place}:{fault.index}"
        line = msgspec.json.encode(Done(
            run_id=self._run_id, number=fault.number, replica=fault.replica, rank=fault.rank, step=step, place=place,
            action=fault.action, pid=os.getpid(), at=time.time_ns()))
        self._done.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self._done, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, line + b"\n")
            os.fsync(file)
        finally:
            os.close(file)


def injector_for(environment: Environment, act: Mapping[str, Act] | None = None) -> Injector:
    """The injector of this rank as its environment says; without a plan one that does nothing. ValueError as `load`."""
    if environment.faults is None:
        return Injector()
    faults = FaultPlan.load(environment.faults).for_rank(environment.replica, environment.rank)
    return Injector(faults, run_id=environment.run_id, done=done_path(environment.events, environment.faults), act=act)
