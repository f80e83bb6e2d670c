"""Runs one launch: coordinator and ranks, from the first start to the verdict.

Theory of operation
-------------------
One loop in the main thread. It sleeps until a signal comes (a child's end is one), the front is gone (`guard`), or a
tenth of a second has passed, and then looks at everything there is. Other threads only move output and events.

* The ranks are started when the coordinator listens.
* When a rank ends other than well, what remains of its replica is ended: a replica is atomic. If no replica has joined
  the run yet, none ever will, since all wait for each other: the whole run is ended, and the message names the culprit.
* A dead replica is started again as `restarts` says, in a new life with the same number; the verdict is about the last one.
* A replica that was told to go leaves in order: its ranks may take as long as the run waits for a silent one.
* When the first rank has finished, the others get `2 * failure_timeout + grace` seconds. After that, whoever has not
  committed the last step as a member of the last view is ended; who has may take as long as it needs (to save, say).
* SIGINT and SIGTERM (and SIGHUP, SIGQUIT) are passed on to the ranks; after `grace` seconds, or when a second signal
  comes, they are killed. At SIGTERM the replicas end together (`training.leaving`), if they get the time.
* With `--join` there is no coordinator of ours, and one replica only.
* Whether planned faults happened is read from the proofs that the injectors leave; the verdict is `verdict.judge`'s.

It owns its process: every child of it is taken for one of the run. Run it through `launch`.
"""
from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final

from recover.events import (
    FAULT_INJECTED,
    LAUNCH_END,
    LAUNCH_RANK_END,
    LAUNCH_RANK_START,
    LAUNCH_START,
    REPLICA_LOST,
    EventLog,
)
from recover.faults import Done, done_path, read_done
from recover.launch import keeper as keeping
from recover.launch.glimpse import Glimpse
from recover.launch.guard import FORWARDED, guard
from recover.launch.mpi import Seats
from recover.launch.options import Options, Where, free_ports, rank_environment
from recover.launch.output import Output
from recover.launch.reaper import Child, Children
from recover.launch.replicas import Rank, Replica
from recover.launch.restarts import Again, Restarts
from recover.launch.verdict import LEFT, NO_COORDINATOR, Verdict, describe, judge

LOOK: Final = 0.1
REST_GRACE: Final = 1.0
"""Seconds that the other ranks of a dead replica get to say goodbye."""
FRONT_GONE: Final = 137


def launch(options: Options, coordinator_command: Sequence[str] = keeping.COMMAND) -> int:
    """Run a launch in processes of its own and return its exit code (see `verdict`). Blocks; needs the main thread."""
    return guard(lambda front: Supervisor(options, coordinator_command, front).run())


class Supervisor:
    """One launch, in the process that belongs to it."""

    def __init__(self, options: Options, coordinator_command: Sequence[str] = keeping.COMMAND,
                 front: int | None = None) -> None:
        self._private = Path(tempfile.mkdtemp(prefix="recover-"))        # mode 0700
        self._options = options = self._settle(options)
        assert options.events is not None
        self._events = options.events.absolute()
        self._front = front
        self._children = Children()
        self._output = Output()
        self._log = EventLog(self._events, options.run_id, None, None, role="launcher")
        self._keeper: keeping.Keeper | keeping.Guest = keeping.Guest(options.join) if options.join else keeping.Keeper(
            options, self._children, self._output, self._log, self._private, coordinator_command)
        self._replicas: dict[int, Replica] = {}
        self._restarts = Restarts(options.restart)
        self._again: dict[int, float] = {}          # replica -> when it is started again
        self._seats: Seats | None = None            # where the backend needs them
        self._signals: list[int] = []
        self._interrupted: int | None = None
        self._joined = False
        self._finish_by: float | None = None        # when to look whether the others have finished too
        self._proofs_size = 0
        self._proofs: list[Done] = []

    def _settle(self, options: Options) -> Options:
        """Fill in what was left to us: a token for this run only, a directory of events that goes away again."""
        token, events = options.token_file, options.events
        if token is None:
            token = self._private / "token"
            token.touch(mode=0o600)
            token.write_text(secrets.token_hex(32))
        if events is None:
            events = self._private / "events"
        return replace(options, token_file=token.absolute(), events=events.absolute())

    def run(self) -> int:
        """The whole launch; returns the exit code."""
        wake = self._listen_to_signals()
        if self._options.backend == "ulfm":
            self._seats = Seats(self._options.replicas * self._options.ranks_per_replica)
        self._log.emit(LAUNCH_START, replicas=self._options.replicas, command=self._options.command,
                       ranks_per_replica=self._options.ranks_per_replica, coordinator=self._options.listen)
        try:
            while not self._done():
                if self._wait(wake):
                    return FRONT_GONE
                self._step()
            self._watch_faults()
            verdict, missed = self._judge()
            self._stop_coordinator(wake)
            self._log.emit(LAUNCH_END, exit_code=verdict.code, message=verdict.message, missed_faults=missed)
            self._output.say(verdict.message)
            return verdict.code
        finally:
            for child in self._children.alive:
                self._children.end(child, 0)
            if self._seats is not None:
                self._seats.close()
            self._log.close()
            self._output.close()
            shutil.rmtree(self._private, ignore_errors=True)

    # -- the loop

    def _listen_to_signals(self) -> int:
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)

        def note(number: int, frame: FrameType | None) -> None:
            if number != signal.SIGCHLD:
                self._signals.append(number)

        for number in (*FORWARDED, signal.SIGCHLD):
            signal.signal(number, note)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        return reading

    def _wait(self, wake: int) -> bool:
        """Sleep until there is something to look at; True if the front is gone."""
        watched = [wake] if self._front is None else [wake, self._front]
        ready, _, _ = select.select(watched, [], [], LOOK)
        if wake in ready:
            os.read(wake, 4096)
        return self._front in ready

    def _step(self) -> None:
        while self._signals:
            self._interrupt(self._signals.pop(0))
        for child in self._children.reap():
            self._over(child)
        self._children.enforce()
        self._watch_faults()
        self._keeper.tick()
        if self._keeper.address is not None and not self._replicas and self._interrupted is None:
            self._start_all(self._keeper.address)
        for replica in [replica for replica, due in self._again.items() if due <= time.monotonic()]:
            del self._again[replica]
            self._start(self._replicas[replica], *free_ports(1))
        if self._finish_by is not None and time.monotonic() >= self._finish_by:
            self._end_stragglers()

    def _done(self) -> bool:
        if not self._replicas:
            return self._keeper.failed is not None or self._interrupted is not None
        return not self._again and all(replica.over for replica in self._replicas.values())

    def _start_all(self, address: str) -> None:
        if self._options.join is None:
            self._output.say(f"run {self._options.run_id}, coordinator at {address}")
        numbers = self._options.numbers
        for number, port in zip(numbers, free_ports(len(numbers)), strict=True):     # all at once: no two get the same
            self._replicas[number] = Replica(number, self._events, self._options.run_id)
            self._start(self._replicas[number], port)

    def _start(self, replica: Replica, port: int) -> None:
        """A life of a replica begins; `port` is for its own torch.distributed."""
        options, number = self._options, replica.number
        assert options.token_file is not None and self._keeper.address is not None
        where = Where(coordinator=self._keeper.address, token_file=options.token_file, events=self._events,
                      master_ports={number: port})
        replica.ranks, replica.starts = [], replica.starts + 1
        for position in range(options.ranks_per_replica):
            name = f"r{number}" if options.ranks_per_replica == 1 else f"r{number}.{position}"
            child = self._start_rank(name, rank_environment(options, where, number, position),
                                     number * options.ranks_per_replica + position)
            replica.ranks.append(Rank(number, position, child, self._output.follow_child(child.process, f"[{name}] ")))
            self._log.emit(LAUNCH_RANK_START, replica=number, rank=position, pid=child.pid)
        pids = " ".join(str(rank.child.pid) for rank in replica.ranks)
        what = "process" if len(replica.ranks) == 1 else "processes"
        self._output.say(f"replica {number}{'' if replica.starts == 1 else ' starts again'}: {what} {pids}")

    def _ranks(self) -> Iterator[Rank]:
        for replica in self._replicas.values():
            yield from replica.ranks

    def _start_rank(self, name: str, environ: dict[str, str], number: int) -> Child:
        """Start one rank, the `number`-th of the run, in its seat if it needs one."""
        if self._seats is not None:
            environ |= self._seats.environment(number)
        child = self._children.start(name, self._options.command, environ)
        if self._seats is not None:
            self._seats.take(number, child.pid)
        return child

    # -- ends

    def _interrupt(self, number: int) -> None:
        again = self._interrupted is not None
        self._interrupted = self._interrupted or number
        name = signal.Signals(number).name
        self._output.say(f"{name} again: killing the ranks" if again else
                         f"{name}: passed on to the ranks, which have {self._options.grace:g} seconds to end")
        self._again.clear()
        for rank in self._ranks():
            self._children.end(rank.child, 0 if again else self._options.grace, number)

    def _over(self, child: Child) -> None:
        if self._keeper.owns(child):
            self._keeper.over()
            return
        rank = next(rank for rank in self._ranks() if rank.child is child)
        assert child.code is not None
        self._log.emit(LAUNCH_RANK_END, replica=rank.replica, rank=rank.rank, pid=child.pid, exit_code=child.code,
                       ended=child.ended)
        if child.code == 0:
            self._finished()
        elif not child.ended:
            self._lost(rank, child.code)
        if self._replicas[rank.replica].over:
            self._consider(self._replicas[rank.replica])

    def _consider(self, replica: Replica) -> None:
        """A life of a replica is over: another one, or not."""
        held = any(other.holds() for other in self._replicas.values() if other is not replica)
        going_on = self._interrupted is None and self._finish_by is None and self._keeper.failed is None
        answer = self._restarts.over(replica.life(), going_on=going_on, held=held or self._options.join is not None)
        if isinstance(answer, Again):
            self._again[replica.number] = time.monotonic() + answer.pause
            self._output.say(f"replica {replica.number} starts again in {answer.pause:g} seconds (start {answer.count} of "
                             f"{self._options.restart} without a committed step)")
        elif answer.reason and self._anybody_joined():
            self._output.say(f"replica {replica.number} is not started again: {answer.reason}")
        if not going_on:
            self._again.clear()
        elif not held and self._options.join is None and self._options.restart:
            self._forsake()

    def _forsake(self) -> None:
        """Nobody is left who holds the parameters: whoever was started again since would wait for ever, or begin anew."""
        self._again.clear()
        for other in self._replicas.values():
            if not other.over and other.starts > 1:
                self._output.say(f"replica {other.number} has nobody left to get the parameters from: ended")
                for rank in other.ranks:
                    self._children.end(rank.child, min(REST_GRACE, self._options.grace))

    def _finished(self) -> None:
        self._again.clear()                         # nobody would be left to join
        if self._finish_by is None:
            self._finish_by = time.monotonic() + 2 * self._options.failure_timeout + self._options.grace

    def _lost(self, rank: Rank, code: int) -> None:
        who = f"replica {rank.replica}" if self._options.ranks_per_replica == 1 else \
            f"rank {rank.rank} of replica {rank.replica}"
        self._output.say(f"{who} (process {rank.child.pid}) {describe(code)}")
        if code != LEFT:
            self._log.emit(REPLICA_LOST, severity="WARN", lost=rank.replica, cause="signal" if code < 0 else "exit",
                           noticed_by="launcher", evidence=f"process {rank.child.pid} {describe(code)}",
                           position=rank.rank)
        for other in self._replicas[rank.replica].ranks:
            if code == LEFT:                        # as a whole, in order
                self._children.expect(other.child, self._options.failure_timeout + self._options.grace)
            else:
                self._children.end(other.child, min(REST_GRACE, self._options.grace))
        if not self._anybody_joined():
            for other in self._ranks():
                self._children.end(other.child, min(REST_GRACE, self._options.grace))

    def _end_stragglers(self) -> None:
        self._finish_by = time.monotonic() + 1.0
        seen = {replica.number: replica.glimpse() for replica in self._replicas.values()}
        done = [seen[replica.number] for replica in self._replicas.values() if replica.finished]
        for rank in self._ranks():
            if rank.child.code is not None or rank.child.ended or _is_level(rank.replica, seen[rank.replica], done):
                continue
            self._output.say(f"replica {rank.replica} is not among those that finished the run: ended")
            self._children.end(rank.child, self._options.grace)

    def _stop_coordinator(self, wake: int) -> None:
        self._keeper.stop(self._options.grace)
        until = time.monotonic() + self._options.grace + 1
        while self._children.alive and time.monotonic() < until and not self._wait(wake):
            for child in self._children.reap():
                self._over(child)
            self._children.enforce()

    # -- what happened

    def _anybody_joined(self) -> bool:
        self._joined = self._joined or any(replica.ever_joined() for replica in self._replicas.values())
        return self._joined

    def _watch_faults(self) -> None:
        """Turn new proofs of injected faults into events."""
        if self._options.faults is None:
            return
        path = done_path(self._events, self._options.faults)
        size = path.stat().st_size if path.exists() else 0
        if size == self._proofs_size:
            return
        self._proofs_size = size
        proofs = read_done(path, self._options.run_id)
        for done in proofs[len(self._proofs):]:
            self._log.emit(FAULT_INJECTED, severity="WARN", step=done.step, at=done.at, number=done.number,
                           replica=done.replica, rank=done.rank, place=done.place, action=done.action, pid=done.pid,
                           injected_unix_nano=done.at)
        self._proofs = proofs

    def _judge(self) -> tuple[Verdict, tuple[str, ...]]:
        happened = {done.number for done in self._proofs}
        missed = tuple(str(fault) for fault in self._options.plan.faults if fault.number not in happened)
        ends = [replica.end() for replica in self._replicas.values()]
        verdict = judge(ends, missed, interrupted=self._interrupted, coordinator=self._keeper.failed)
        return verdict, () if verdict.code == NO_COORDINATOR else missed


def _is_level(replica: int, seen: Glimpse, done: Sequence[Glimpse]) -> bool:
    """Whether a replica that still runs committed the last step as a member of the last view."""
    last = max((one.last_step for one in done if one.last_step is not None), default=None)
    return last is not None and seen.last_step is not None and seen.last_step >= last \
        and any(one.members is not None and replica in one.members for one in done if one.last_step == last)
