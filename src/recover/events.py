"""What happened in a run, as typed lines of JSON.

Theory of operation
-------------------
* Every process writes one file of its own, `events-<who>-<pid>.jsonl`, so that no two writers ever share a file and a
  replica that was started again never appends to what its predecessor left half written.
* `emit` only enqueues: a thread of its own encodes and writes. The queue is bounded; when it is full (a disk that
  stalls) an ordinary event is dropped and counted, and the next line that is written says in `dropped` how many are
  missing before it. Receipts have as much room again, so that chatter never pushes out a receipt. Training never waits.
* A batch is written with one `write(2)` and no buffer in between: what was written is with the operating system, hence
  survives a SIGKILL of this process. A batch that was torn by one shows as a last line without line feed: readers skip
  that line, and only that one (`read`).
* A *receipt* says what one committed step was made of. Receipts of one file form a chain: each carries the digest of
  its predecessor, and its own digest covers everything else in it. With a key the digest is an HMAC: nobody without the
  key can forge one. Without a key it finds accidents and careless edits only; the replicas' receipts, which must agree,
  are then the defence (see `recover.report.audit`).
* A forked child (a loader's worker) inherits the log but not its thread: there every call does nothing.

The mapping to OpenTelemetry is mechanical: `event` is the event name, `time_unix_nano` and `severity` go by the same
names, `run_id`, `replica`, `rank`, `view` and `step` are resource or log attributes, `attributes` is what it says.
"""
from __future__ import annotations

import atexit
import hashlib
import hmac
import os
import queue
import re
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, Protocol

import msgspec

SCHEMA: Final = 1
CAPACITY: Final = 4096
MAX_LINE: Final = 16 << 20
"""Readers give up on longer lines (bytes)."""

Severity = Literal["DEBUG", "INFO", "WARN", "ERROR"]
Cause = Literal["eof", "heartbeat", "hung", "cut", "exit", "signal", "stall", "leave"]
View = tuple[int, int]

RUN_START: Final = "recover.run.start"
RUN_JOINED: Final = "recover.run.joined"
RUN_END: Final = "recover.run.end"
RUN_RESUMED: Final = "recover.run.resumed"
CHECKPOINT_SAVED: Final = "recover.checkpoint.saved"
CHECKPOINT_FAILED: Final = "recover.checkpoint.failed"
VIEW_NEW: Final = "recover.view.new"
REPLICA_LOST: Final = "recover.replica.lost"
RECOVERY: Final = "recover.recovery"
RECEIPT: Final = "recover.step.receipt"
FAULT_INJECTED: Final = "recover.fault.injected"
LAUNCH_START: Final = "recover.launch.start"
LAUNCH_RANK_START: Final = "recover.launch.rank.start"
LAUNCH_RANK_END: Final = "recover.launch.rank.end"
LAUNCH_END: Final = "recover.launch.end"
COORDINATOR_START: Final = "recover.coordinator.start"
COORDINATOR_END: Final = "recover.coordinator.end"


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One line of an event file."""

    schema: int
    event: str
    time_unix_nano: int
    monotonic_ns: int
    severity: Severity
    run_id: str
    replica: int | None
    rank: int | None
    view: View | None
    step: int | None
    dropped: int = 0        # events missing right before this one
    attributes: dict[str, Any] = {}


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """This rank is about to join: the settings that all replicas must share."""

    microbatches: int
    replicas: int
    ranks_per_replica: int = 1
    seed: int = 0
    reduction: str = "fast"
    policy: str = "balanced"


class RunJoined(msgspec.Struct, frozen=True, kw_only=True):
    """This rank is in a view for the first time (`view` says which)."""

    members: tuple[int, ...] = ()


class RunResumed(msgspec.Struct, frozen=True, kw_only=True):
    """A run with checkpoints begins after `steps` steps, 0 unless it goes on from one. `attempt` names this start of all
    replicas; `state_hash`: of this rank's state as it was kept, if it was hashed then."""

    steps: int
    attempt: str
    state_hash: str | None = None


class CheckpointSaved(msgspec.Struct, frozen=True, kw_only=True):
    """The state after `steps` steps is on the disk. Seconds that training waited for the copy, and that the writing took beside
    it; `first`: false if another replica had written the same."""

    steps: int
    bytes: int
    copy: float
    write: float
    first: bool = True


class CheckpointFailed(msgspec.Struct, frozen=True, kw_only=True):
    """The state after `steps` steps was not kept, and why."""

    steps: int
    message: str


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """This rank ends its part of the run; `members` are those of its last view."""

    status: Literal["finished", "left", "evicted", "failed"]
    last_step: int | None = None
    final_loss: float | None = None
    state_hash: str | None = None
    members: tuple[int, ...] = ()
    message: str = ""


class ViewNew(msgspec.Struct, frozen=True, kw_only=True):
    """A new view is in force on this rank."""

    members: tuple[int, ...]
    joined: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()


class ReplicaLost(msgspec.Struct, frozen=True, kw_only=True):
    """A replica is gone: which, why, who noticed, and the evidence in words (errno, exit code, seconds of silence)."""

    lost: int
    cause: Cause
    noticed_by: str
    evidence: str = ""
    position: int | None = None     # the rank of that replica, where it is known


class Phases(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds spent in each phase of a recovery, in their order."""

    detect: float = 0.0
    exchange: float = 0.0
    reform: float = 0.0
    recompute: float = 0.0
    redo: float = 0.0
    commit: float = 0.0


class Recovery(msgspec.Struct, frozen=True, kw_only=True):
    """A recovery is over: its phases, the microbatches that were lost, and how many of them this replica recomputed."""

    phases: Phases
    lost: tuple[int, ...] = ()
    recomputed: int = 0
    discarded: int = 0              # microbatches done here whose work was thrown away; the goal is 0
    redone: int = 0                 # buckets
    forwarded: int = 0              # buckets


class FaultInjected(msgspec.Struct, frozen=True, kw_only=True):
    """A planned fault happened; `number` counts the plan's entries from 1."""

    number: int
    replica: int
    rank: int
    place: str
    action: str
    pid: int
    injected_unix_nano: int


class LaunchStart(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher starts a run."""

    replicas: int
    ranks_per_replica: int
    command: tuple[str, ...]
    coordinator: str


class LaunchRankStart(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's process was started."""

    replica: int
    rank: int
    pid: int


class LaunchRankEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's process is over: `exit_code`, or the negative number of the signal; `ended` if the launcher did it."""

    replica: int
    rank: int
    pid: int
    exit_code: int
    ended: bool = False


class LaunchEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's verdict."""

    exit_code: int
    message: str
    missed_faults: tuple[str, ...] = ()


class CoordinatorStart(msgspec.Struct, frozen=True, kw_only=True):
    """A coordinator listens (or was started, in the launcher's words)."""

    incarnation: int
    address: str
    pid: int


class CoordinatorEnd(msgspec.Struct, frozen=True, kw_only=True):
    """A coordinator is over."""

    incarnation: int
    exit_code: int


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one committed step was made of. Published after the fence of the step, hence equal on all replicas."""

    step: int
    view: View
    members: tuple[int, ...]
    who: tuple[int, ...]            # the member that contributed microbatch i; -1: nobody (shrinking policies only)
    divisor: float                  # B, or the step's global weight
    loss: float | None              # null stands for NaN and inf, which JSON lacks
    loss_bits: str                  # the float64 of the loss, big endian, as 16 hexadecimal digits
    checksums: tuple[int, ...] | None = None    # per bucket of this rank, of the reduced bits; each below 2**63
    state_hash: str | None = None   # of parameters and optimizer state after the update
    policy_constant: bool = True
    skipped: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET    # microbatches left out on purpose, alike on all replicas
    previous: str = ""              # digest of the receipt before it in this file
    digest: str = ""


KNOWN: Final[dict[str, type[msgspec.Struct]]] = {
    RUN_START: RunStart, RUN_JOINED: RunJoined, RUN_END: RunEnd, RUN_RESUMED: RunResumed,
    CHECKPOINT_SAVED: CheckpointSaved, CHECKPOINT_FAILED: CheckpointFailed, VIEW_NEW: ViewNew, REPLICA_LOST: ReplicaLost,
    RECOVERY: Recovery, RECEIPT: Receipt, FAULT_INJECTED: FaultInjected, LAUNCH_START: LaunchStart,
    LAUNCH_RANK_START: LaunchRankStart, LAUNCH_RANK_END: LaunchRankEnd, LAUNCH_END: LaunchEnd,
    COORDINATOR_START: CoordinatorStart, COORDINATOR_END: CoordinatorEnd,
}
"""The attributes of each known event. Others may be emitted too; their attributes are free."""


# ---------------------------------------------------------------- receipts: pure

def loss_bits(loss: float) -> str:
    """The float64 as 16 hexadecimal digits, for comparing to the bit."""
    return struct.pack(">d", loss).hex()


def make_receipt(*, step: int, view: View, members: Sequence[int], who: Sequence[int], divisor: float, loss: float,
                 checksums: Sequence[int] | None = None, state_hash: str | None = None,
                 policy_constant: bool = True, skipped: Sequence[int] = ()) -> Receipt:
    """An unsealed receipt from plain values (see `Receipt` for what they mean)."""
    finite = loss - loss == 0
    return Receipt(step=step, view=(view[0], view[1]), members=tuple(members), who=tuple(who), divisor=float(divisor),
                   loss=float(loss) if finite else None, loss_bits=loss_bits(loss),
                   checksums=None if checksums is None else tuple(checksums), state_hash=state_hash,
                   policy_constant=policy_constant, skipped=tuple(skipped) if skipped else msgspec.UNSET)


def _digest(receipt: Receipt, key: bytes) -> str:
    canonical = msgspec.json.encode(msgspec.structs.replace(receipt, digest=""), order="sorted")
    return hmac.new(key, canonical, "sha256").hexdigest() if key else hashlib.sha256(canonical).hexdigest()


def seal(receipt: Receipt, previous: str, key: bytes = b"") -> Receipt:
    """The receipt with its place in the chain and its digest (HMAC-SHA256 with a key, else SHA-256)."""
    # Through JSON once, so that what is digested is exactly what a reader will get (an int given for a float, ...).
    plain = msgspec.json.encode(msgspec.structs.replace(receipt, previous=previous))
    receipt = msgspec.json.decode(plain, type=Receipt)
    return msgspec.structs.replace(receipt, digest=_digest(receipt, key))


def verify(receipt: Receipt, previous: str, key: bytes = b"") -> str | None:
    """None if the seal holds and the receipt follows `previous`; else what is wrong, in words."""
    if receipt.previous != previous:
        return "the receipt does not follow the one before it in this file (missing, inserted or reordered)"
    if not hmac.compare_digest(receipt.digest, _digest(receipt, key)):
        return "the digest does not fit the receipt (altered after it was written, or sealed with another key)"
    return None


# ---------------------------------------------------------------- writing

class Log(Protocol):
    """What training, membership and the launcher need of a log."""

    def emit(self, event: str, *, severity: Severity = "INFO", view: View | None = None, step: int | None = None,
             at: int | None = None, **attributes: Any) -> None: ...

    def receipt(self, receipt: Receipt, key: bytes = b"") -> None: ...

    def close(self, timeout: float = 2.0) -> None: ...


class NullLog:
    """A log for runs without a directory."""

    def emit(self, event: str, *, severity: Severity = "INFO", view: View | None = None, step: int | None = None,
             at: int | None = None, **attributes: Any) -> None:
        """Nothing."""

    def receipt(self, receipt: Receipt, key: bytes = b"") -> None:
        """Nothing."""

    def close(self, timeout: float = 2.0) -> None:
        """Nothing."""


class EventLog:
    """The log of one process: `emit` and `receipt` never wait for the disk and may be called from any thread.

    `replica` and `rank` say whose log it is; None for a process that belongs to no replica, which then names its
    `role` ("launcher", "coordinator"). OSError if the directory can't be made or written.
    """

    def __init__(self, directory: Path | str, run_id: str, replica: int | None, rank: int | None,
                 capacity: int = CAPACITY, role: str = "rank") -> None:
        assert capacity > 0
        self._origin = (run_id, replica, rank)
        self._capacity = capacity
        self._pid = os.getpid()
        self._lock = threading.Lock()           # orders receipts of different threads; never held while writing
        self._previous = ""
        self._dropped = 0
        self._counting = threading.Lock()       # around the count alone
        self._closed = False
        self._queue: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        who = role if replica is None else f"replica{replica}-rank{rank}"
        self.path = directory / f"events-{who}-{self._pid}.jsonl"
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._thread = threading.Thread(target=self._write, name="recover-events", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def emit(self, event: str, *, severity: Severity = "INFO", view: View | None = None, step: int | None = None,
             at: int | None = None, **attributes: Any) -> None:
        """Enqueue one event; `at` is when it happened (nanoseconds since 1970) if that was not now.

        Attributes must not be changed afterwards: they are encoded later, by another thread.
        """
        self._put(event, severity, view, step, attributes, self._capacity, at)

    def receipt(self, receipt: Receipt, key: bytes = b"") -> None:
        """Seal a receipt as the next one of this file and enqueue it. TypeError for values that JSON can't hold."""
        with self._lock:
            sealed = seal(receipt, self._previous, key)
            attributes = {key: value for key, value in msgspec.structs.asdict(sealed).items() if value is not msgspec.UNSET}
            if self._put(RECEIPT, "INFO", sealed.view, sealed.step, attributes, 2 * self._capacity):
                self._previous = sealed.digest

    def close(self, timeout: float = 2.0) -> None:
        """Write what is enqueued, for at most `timeout` seconds. Idempotent; later events are ignored."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._queue.put(None)
        self._thread.join(timeout)

    def _put(self, event: str, severity: Severity, view: View | None, step: int | None, attributes: dict[str, Any],
             room: int, at: int | None = None) -> bool:
        if self._closed or os.getpid() != self._pid:
            return False
        if self._queue.qsize() >= room:         # a few too many when threads race: bounded all the same
            self._count(1)
            return False
        run_id, replica, rank = self._origin
        self._queue.put(Line(schema=SCHEMA, event=event, time_unix_nano=at or time.time_ns(),
                             monotonic_ns=time.monotonic_ns(), severity=severity, run_id=run_id, replica=replica,
                             rank=rank, view=view, step=step, attributes=attributes))
        return True

    # -- the writer's thread

    def _write(self) -> None:
        lines: list[Line | None] = []
        while None not in lines:
            lines = [self._queue.get()]
            while len(lines) < 256 and lines[-1] is not None and not self._queue.empty():
                lines.append(self._queue.get())
            self._append([line for line in lines if line is not None])
        os.close(self._file)

    def _append(self, lines: list[Line]) -> None:
        with self._counting:
            dropped = dropped_before = self._dropped
            self._dropped = 0
        encoded = []
        for line in lines:
            encoded.append(_encode(msgspec.structs.replace(line, dropped=dropped)))
            dropped = 0
        data = memoryview(b"".join(encoded))
        try:
            while data:
                data = data[os.write(self._file, data):]
        except OSError:                         # a full disk costs events, never the run; the next line says how many
            self._count(dropped_before + len(lines))

    def _count(self, missing: int) -> None:
        with self._counting:
            self._dropped += missing


def _encode(line: Line) -> bytes:
    try:
        return msgspec.json.encode(line, enc_hook=repr) + b"\n"
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        shown = {"unencodable": f"{error}: {line.attributes!r}"[:4096]}
        return msgspec.json.encode(msgspec.structs.replace(line, attributes=shown)) + b"\n"


def open_log(directory: Path | str | None, run_id: str, replica: int | None, rank: int | None,
             role: str = "rank") -> EventLog | NullLog:
    """An `EventLog`, or a `NullLog` without a directory."""
    return NullLog() if directory is None else EventLog(directory, run_id, replica, rank, role=role)


# ---------------------------------------------------------------- reading

class Entry(NamedTuple):
    """A line with its place: `number` counts from 1."""

    path: Path
    number: int
    line: Line


class BadLine(ValueError):
    """A line that no writer of this format left behind, and that is not the torn last one."""

    def __init__(self, path: Path, number: int, reason: str) -> None:
        super().__init__(f"{path.name}, line {number}: {reason}")
        self.path, self.number, self.reason = path, number, reason


def files(directory: Path | str) -> list[Path]:
    """The event files of a directory, sorted by name."""
    return sorted(Path(directory).glob("events-*.jsonl"))


def read(path: Path) -> Iterator[Entry]:
    """The lines of a file in order. A last line without line feed is torn and skipped; a bad one raises BadLine."""
    decoder = msgspec.json.Decoder(Line)
    with path.open("rb") as file:
        number = 0
        while data := file.readline(MAX_LINE + 1):
            number += 1
            if len(data) > MAX_LINE:
                raise BadLine(path, number, f"longer than {MAX_LINE} bytes")
            if not data.endswith(b"\n"):
                return
            try:
                line = decoder.decode(data)
            except msgspec.DecodeError as error:        # ValidationError is one too
                raise BadLine(path, number, str(error)) from None
            if line.schema != SCHEMA:
                raise BadLine(path, number, f"schema {line.schema}: this version reads {SCHEMA}")
            yield Entry(path, number, line)


def attributes_of(line: Line) -> msgspec.Struct | None:
    """The typed attributes of a known event, None for others. msgspec.ValidationError if they do not fit."""
    kind = KNOWN.get(line.event)
    return None if kind is None else msgspec.convert(line.attributes, kind)


# ---------------------------------------------------------------- schema

def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a line: `docs/events.schema.json` holds it, and a test says when it is stale."""
    kinds: list[type[msgspec.Struct]] = [Line, *KNOWN.values()]
    references, components = msgspec.json.schema_components(kinds, ref_template="#/$defs/{name}")
    for component in components.values():               # docstrings as prose, without the source's line breaks
        if "description" in component:
            component["description"] = re.sub(r"\s+", " ", component["description"])
    cases = [{"if": {"properties": {"event": {"const": event}}},
              "then": {"properties": {"attributes": reference}}}
             for event, reference in zip(KNOWN, references[1:], strict=True)]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "One line of a ReCoVer event file",
            "allOf": [references[0], *cases], "$defs": components}


def json_schema_text() -> str:
    """`json_schema` as the text of a file."""
    return msgspec.json.format(msgspec.json.encode(json_schema(), order="sorted"), indent=2).decode() + "\n"
