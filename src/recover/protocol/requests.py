"""What a position asks of the world around it, and what it hears back.

`Position.run()` is a generator: it yields one of these requests, and is resumed with the answer that the docstring
names. The training loop answers with torch and sockets, the simulation with a scheduler; the control flow in between is
the same code. A collective "fails" when it raises `PeerLost` for the one who answers; its answer is then None or False.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from recover.protocol.messages import Report, Speed, Vector, View, ViewId


@dataclass(frozen=True)
class Begin:
    """A step begins: `work` is owed, `shadow` is computed but not counted (yet). Answer: None."""

    step: int
    work: frozenset[int]
    shadow: frozenset[int]


@dataclass(frozen=True)
class Compute:
    """Compute these microbatches (one, or a chunk of up to `Position.chunk`) and accumulate them. Answer: None.

    `recomputed`: how many of them were taken over from the dead. `last`: they are the last ones owed, so that each bucket
    not reduced yet may be launched (behind the fence of the step before) as soon as its gradients are final.
    """

    step: int
    indices: tuple[int, ...]
    last: bool
    recomputed: int


@dataclass(frozen=True)
class Relayout:
    """Lay out the buckets as step 0 taught: its fence has passed, and step 1 has not begun. Answer: how many."""


@dataclass(frozen=True)
class Agree:
    """Positions of this replica tell each other `value`. Answer: the list of all values, by position."""

    kind: str
    value: object


@dataclass(frozen=True)
class Form:
    """Find out at which step the run begins, and take over the first parameters from `root` (its same position).

    Answer: `Formed`, or None (failed).
    """

    root: int


@dataclass(frozen=True)
class Formed:
    """The first parameters are here: those after `start` steps (0 unless a checkpoint was resumed, the same for all members
    of the view), and how many buckets their layout has."""

    start: int
    buckets: int


@dataclass(frozen=True)
class PostFence:
    """Contribute `says` to the fence of `step`; don't wait. Answer: None."""

    step: int
    says: Speed


@dataclass(frozen=True)
class AwaitFence:
    """Wait for the fence of `step`, posted before. Answer: member -> Speed, or None (failed)."""

    step: int


@dataclass(frozen=True)
class Reduce:
    """Launch whichever of `buckets` is not launched yet, in order, and wait for all. Answer: `Outcome`."""

    step: int
    buckets: tuple[int, ...]
    counted: bool


@dataclass(frozen=True)
class Outcome:
    """The buckets that are whole here, and whether all that were asked for are."""

    reduced: frozenset[int]
    ok: bool


@dataclass(frozen=True)
class Commit:
    """Every bucket is whole on every position: hand the sums to the script. Answer: None.

    `who` owed what is not known here (it travels with the buckets); `view` and `members` are those of the commit.
    """

    step: int
    view: ViewId
    members: tuple[int, ...]


@dataclass(frozen=True)
class Fenced:
    """The fence of `step` is known to have succeeded: receipts may be published, `reduced` reused. Answer: None."""

    step: int


@dataclass(frozen=True)
class Halt:
    """Revoke every operation of the view and wait until none touches a buffer.

    Answer: the buckets of `step` that are whole here. What completes later is dropped: others decide by the report.
    """

    step: int | None


@dataclass(frozen=True)
class Exchange:
    """(Leader.) Send `report` in the next view newer than `view`, and again in the next if that one is overtaken.

    Answer: `Answer`.
    """

    view: ViewId
    report: Report


@dataclass(frozen=True)
class Answer:
    """The new view and everyone's reports in it; None: a view announced with the fence lets this joiner in."""

    view: View
    reports: dict[int, Report] | None


@dataclass(frozen=True)
class Reform:
    """Build the group of `view` at this position. Answer: True, or False (failed)."""

    view: View


@dataclass(frozen=True)
class Confirm:
    """One fence in the new view: everyone has the decision. Answer: True, or False (failed)."""


@dataclass(frozen=True)
class Enter:
    """First message in a view that was announced with the fence: step, vectors, buckets; `says` is None for a joiner.

    Answer: what some member of the old view said, or None (failed).
    """

    says: tuple[int, dict[int, Vector], tuple[int, int]] | None


@dataclass(frozen=True)
class Entered:
    """All positions of this joiner are in the announced view: the coordinator may take it for the view. Answer: None."""

    view: ViewId
    step: int


@dataclass(frozen=True)
class Forward:
    """Give whole buckets of `step` to those that lack them, and take those that this position lacks.

    `gives`: bucket -> members that lack it (only the first holder gives; it doesn't wait). `takes`: bucket -> holder.
    Answer: `Outcome` of the buckets taken.
    """

    step: int
    gives: dict[int, tuple[int, ...]] = field(default_factory=dict)
    takes: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Decided:
    """A decision was made and is being carried out (for events). Answer: None."""

    step: int
    lost: frozenset[int]
    mine: tuple[int, ...]
    forwarded: int
    redone: int


@dataclass(frozen=True)
class Suspect:
    """A collective failed here: tell the coordinator at once. Answer: None."""

    view: ViewId


@dataclass(frozen=True)
class Pause:
    """Too few members: wait for a view newer than `view`, or until this position is told to go. Answer: None.

    A joiner that was announced with the fence must be let in by a view change (`Suspect`): no fence will come.
    """

    view: ViewId


__all__ = ["Agree", "Answer", "AwaitFence", "Begin", "Commit", "Compute", "Confirm", "Decided", "Enter", "Entered", "Exchange",
           "Fenced", "Form", "Formed", "Forward", "Halt", "Outcome", "Pause", "PostFence", "Reduce", "Reform", "Relayout",
           "Suspect"]
