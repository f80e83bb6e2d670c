"""What a run's events say about it, folded one event at a time.

Theory of operation. Every process of a run writes its own file of events, one JSON object per line. `Tail` reads what
was added to any of them since it last looked. `Progress` is the state that a live view or a table shows: a pure fold
over events, in any order between files (all survivors report the same step, so the same event comes several times).

Rules:

1. The first receipt of a step gives its loss and who computed what; later ones of the same step only add their
   replica's hash. Differences between them are for the audit to judge; here they are only kept apart by replica.
2. A replica is lost when a view leaves it out (or when somebody says so); each is one `Loss`, wherever it is told. Who
   ends the run or leaves of its own accord is not lost.
3. A recovery belongs to the losses of the view that it made. Survivors time their own phases: the slowest counts.
   Detection is measured from the moment of the planned kill where that was recorded (same clock: one host), else it is
   what the survivors took it to be.
4. Files are read up to their last complete line. A killed process may leave a torn line behind: it stays unread.
5. Lines and looks are bounded, so that a broken file can't eat the reader's memory.
"""
from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LINE_LIMIT = 1 << 20        # bytes: a longer line is no event
LOOK_LIMIT = 8 << 20        # bytes of one file read at one look
RATE_STEPS = 8              # steps over which the speed is measured

PHASES = ("detect", "exchange", "reform", "recompute", "redo", "commit")

Event = Mapping[str, Any]


@dataclass
class Loss:
    """A replica that the others went on without."""

    replica: int
    step: int | None = None                 # the step that was being worked on
    cause: str = ""
    phases: dict[str, float] = field(default_factory=dict)      # seconds, the slowest survivor's
    recomputed: int = 0                     # microbatches of its work that survivors computed again, over all of them
    discarded: int = 0                      # microbatches whose work was thrown away; the goal is 0
    struck_ns: int | None = None            # when the plan killed it
    noticed_ns: int | None = None           # when the first survivor said so

    @property
    def detection(self) -> float | None:
        """Seconds from the death to the first that is known of it; None if nobody measured it."""
        if self.struck_ns is not None and self.noticed_ns is not None:
            return max(0, self.noticed_ns - self.struck_ns) / 1e9
        return self.phases.get("detect")

    @property
    def recovery(self) -> float | None:
        """Seconds from there until the sums were whole again; None if nobody measured it."""
        timed = [self.phases[phase] for phase in PHASES[1:] if phase in self.phases]
        return sum(timed) if timed else None


@dataclass
class Step:
    """One committed step, as the receipts tell it."""

    index: int
    loss: float
    who: tuple[int, ...]                    # microbatch -> the replica that computed it; -1: nobody
    divisor: float
    time_ns: int
    hashes: dict[int, str] = field(default_factory=dict)        # replica -> hash of its state after the step

    @property
    def quotas(self) -> dict[int, int]:
        """replica -> microbatches that it contributed."""
        return dict(sorted(Counter(member for member in self.who if member >= 0).items()))


@dataclass
class Progress:
    """`follow` folds events into it; everything else reads."""

    steps: dict[int, Step] = field(default_factory=dict)
    receipts: dict[int, set[int]] = field(default_factory=dict)         # replica -> steps that it has receipts for
    offences: list[str] = field(default_factory=list)                   # receipts that are not whole
    members: tuple[int, ...] = ()                                       # of the newest view
    known: set[int] = field(default_factory=set)                        # whoever was in any view
    left: set[int] = field(default_factory=set)                         # ended the run, or left it
    losses: dict[int, Loss] = field(default_factory=dict)
    final_hashes: dict[int, str] = field(default_factory=dict)
    newest: tuple[int, ...] = ()                                        # id of the newest view
    _struck: dict[int, int] = field(default_factory=dict)
    _lost_in: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    _timed: list[tuple[tuple[int, ...], Event]] = field(default_factory=list)

    def follow(self, event: Event) -> None:
        """Take in one event; unknown ones, and those that lack what they should have, change nothing."""
        handler = {
            "recover.step.receipt": self._receipt,
            "recover.view.new": self._view,
            "recover.replica.lost": self._lost,
            "recover.recovery": self._recovery,
            "recover.run.end": self._end,
            "recover.fault.injected": self._injected,
        }.get(event.get("event", ""))
        attributes = event.get("attributes")
        if handler is None or not isinstance(attributes, Mapping):
            return
        try:
            handler(event, attributes)
        except (KeyError, TypeError, ValueError) as error:
            self.offences.append(f"{event.get('event')} of replica {event.get('replica')} is malformed: {error!r}")

    @property
    def last(self) -> Step | None:
        return self.steps[max(self.steps)] if self.steps else None

    @property
    def alive(self) -> tuple[int, ...]:
        """Who was in and is not lost; whoever ended the run counts, too."""
        return tuple(sorted(self.known - set(self.losses)))

    @property
    def recomputed(self) -> int:
        return sum(loss.recomputed for loss in self.losses.values())

    @property
    def discarded(self) -> int:
        return sum(loss.discarded for loss in self.losses.values())

    @property
    def state_hash(self) -> str | None:
        """The one hash of weights and optimizer state at the end; None if there is none or survivors differ."""
        hashes = set(self.final_hashes.values()) or set(self.last.hashes.values() if self.last else ())
        return hashes.pop() if len(hashes) == 1 else None

    def seconds_per_step(self) -> float | None:
        """Over the last few steps; None until there are two."""
        recent = [self.steps[index] for index in sorted(self.steps)[-RATE_STEPS - 1:]]
        if len(recent) < 2 or recent[-1].time_ns <= recent[0].time_ns:
            return None
        return (recent[-1].time_ns - recent[0].time_ns) / 1e9 / (len(recent) - 1)

    def unwhole(self, steps: int, microbatches: int) -> list[str]:
        """What keeps this from being a run in which every survivor summed its microbatches at every step."""
        found = list(self.offences)
        for replica in self.alive:
            gaps = sorted(set(range(steps)) - self.receipts.get(replica, set()))
            if gaps:
                found.append(f"replica {replica} has no receipt for step {gaps[0]} ({len(gaps)} missing of {steps})")
        for step in self.steps.values():
            if len(step.who) != microbatches:
                found.append(f"step {step.index} summed {len(step.who)} microbatches instead of {microbatches}")
        return found or ([] if self.steps else ["there are no receipts"])

    def _receipt(self, event: Event, attributes: Event) -> None:
        index, replica = int(attributes.get("step", event.get("step"))), int(event["replica"])
        who, divisor = tuple(int(member) for member in attributes["who"]), float(attributes["divisor"])
        if -1 in who:
            self.offences.append(f"step {index}: replica {replica} lacks microbatch {who.index(-1)}")
        if not divisor > 0:
            self.offences.append(f"step {index}: replica {replica} divided by {divisor}")
        step = self.steps.get(index)
        if step is None:
            loss = attributes["loss"]       # null stands for NaN and inf
            step = Step(index, math.nan if loss is None else float(loss), who, divisor,
                        int(event.get("time_unix_nano", 0)))
            self.steps[index] = step
        elif len(step.who) != len(who):
            self.offences.append(f"step {index}: replica {replica} summed {len(who)} microbatches, "
                                 f"another {len(step.who)}")
        self.receipts.setdefault(replica, set()).add(index)
        if attributes.get("state_hash"):
            step.hashes[replica] = str(attributes["state_hash"])
        self.known.add(replica)
        if not self.members:
            self.members = tuple(attributes.get("members", ()))
            self.known.update(self.members)

    def _view(self, event: Event, attributes: Event) -> None:
        view = _view_id(attributes.get("view", event.get("view")))
        members = tuple(int(member) for member in attributes["members"])
        if view and view <= self.newest:        # another survivor told of it before, or an old one late
            for member in self._lost_in.get(view, ()):
                if member in self.losses:
                    self._note(member, event)
            return
        gone = [member for member in self.members if member not in members and member not in self.left]
        self.newest, self.members = view, members
        self.known.update(members)
        for member in gone:
            self._note(member, event)
        self._lost_in[view] = gone
        self._match()

    def _lost(self, event: Event, attributes: Event) -> None:
        if attributes.get("cause") == "leave":
            self._went(int(attributes["lost"]))
            return
        loss = self._note(int(attributes["lost"]), event)
        loss.cause = loss.cause or str(attributes.get("cause", ""))

    def _injected(self, event: Event, attributes: Event) -> None:
        if attributes["action"] == "kill":      # told by the launcher: who kills himself can't
            replica = int(attributes["replica"])
            self._struck[replica] = int(attributes["injected_unix_nano"])
            if replica in self.losses:
                self.losses[replica].struck_ns = self._struck[replica]

    def _went(self, replica: int) -> None:
        self.left.add(replica)
        self.losses.pop(replica, None)

    def _recovery(self, event: Event, attributes: Event) -> None:
        self._timed.append((_view_id(attributes.get("view", event.get("view"))), event))
        self._match()

    def _end(self, event: Event, attributes: Event) -> None:
        if attributes["status"] in ("finished", "left"):
            self._went(int(event["replica"]))
        if attributes["status"] == "finished" and attributes.get("state_hash"):
            self.final_hashes[int(event["replica"])] = str(attributes["state_hash"])

    def _note(self, replica: int, event: Event) -> Loss:
        loss = self.losses.setdefault(replica, Loss(replica, struck_ns=self._struck.get(replica)))
        time_ns, step = event.get("time_unix_nano"), event.get("step")
        if time_ns is not None and (loss.noticed_ns is None or int(time_ns) < loss.noticed_ns):
            loss.noticed_ns = int(time_ns)
        if loss.step is None and step is not None:
            loss.step = int(step)
        return loss

    def _match(self) -> None:
        """Give recoveries to the losses of their view; those whose view is not known yet wait."""
        waiting = []
        for view, event in self._timed:
            if view in self._lost_in:
                self._time([self.losses[member] for member in self._lost_in[view] if member in self.losses], event)
            else:
                waiting.append((view, event))
        self._timed = waiting

    @staticmethod
    def _time(losses: list[Loss], event: Event) -> None:
        attributes = event["attributes"]
        phases = attributes["phases"]
        for position, loss in enumerate(losses):
            for phase in PHASES:
                if isinstance(phases.get(phase), int | float):
                    loss.phases[phase] = max(loss.phases.get(phase, 0.0), float(phases[phase]))
            if loss.step is None and event.get("step") is not None:
                loss.step = int(event["step"])
            if position == 0:       # several died at once: what was recomputed for them is counted once
                loss.recomputed += int(attributes.get("recomputed", 0))
                loss.discarded += int(attributes.get("discarded", 0))


def _view_id(value: object) -> tuple[int, ...]:
    """(incarnation, counter); () if there is none."""
    return tuple(int(part) for part in value) if isinstance(value, list | tuple) else ()


class Tail:
    """Reads what was added to the event files of `directory` since it last looked."""

    def __init__(self, directory: Path, pattern: str = "events-*.jsonl") -> None:
        self._directory = directory
        self._pattern = pattern
        self._offsets: dict[Path, int] = {}
        self.skipped = 0                    # lines that are no events

    def read(self) -> list[dict[str, Any]]:
        """The new events of all files by their time; [] if there are none (or no directory yet)."""
        events = [event for path in sorted(self._directory.glob(self._pattern)) for event in self._new(path)]
        return sorted(events, key=lambda event: event.get("time_unix_nano", 0))

    def _new(self, path: Path) -> Iterable[dict[str, Any]]:
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(LOOK_LIMIT)
        end = data.rfind(b"\n") + 1
        if not end and len(data) > LINE_LIMIT:      # no event is that long: skip what there is of it
            self.skipped += 1
            self._offsets[path] = offset + len(data)
            return
        self._offsets[path] = offset + end
        for line in data[:end].splitlines():
            event = _decode(line)
            if event is None:
                self.skipped += 1
            else:
                yield event


def _decode(line: bytes) -> dict[str, Any] | None:
    if len(line) > LINE_LIMIT:
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) else None


def replay(directory: Path) -> Progress:
    """The state after all events of `directory`."""
    progress, tail = Progress(), Tail(directory)
    while events := tail.read():
        for event in events:
            progress.follow(event)
    return progress
