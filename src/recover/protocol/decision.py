"""The decision of a recovery: a pure function of the reports, so that every survivor computes the same (DESIGN 3.2, 4).

Rules, in the order in which `decide` applies them:

1. Steps of survivors differ by at most one; `low` is the oldest, `high` the newest.
2. The newest fence vector among the reports is in force for the steps after `high` (`reset`: whatever was planned or
   reassigned for those is dropped). Members that are not level, or leave, get no quota.
3. A bucket of step `low` that some survivor holds is forwarded. Survivors ahead (at `high`) hold every bucket of `low`.
4. A bucket that nobody holds is redone from the survivors' local sums, after the lost microbatches of step `high`
   (all of them minus what survivors owe) were shared out. Nothing is lost for a step whose buckets are all held.
5. A spare (`Roles`) is promoted, and what its sums contain then counts, only if all of it is lost (`whole`); a spare
   whose sums do not count is given no lost microbatches (`clean`).
6. A microbatch at which two replicas died (`View.killers`) is put aside. Only what was taken over from the dead is told to the
   coordinator, so a third one died owing it. The run stops with its name, or nobody computes it (`spared`). Only while nobody
   holds a bucket of the step (such a bucket contains it), and only if it is lost: then no sum contains it.
7. While the first parameters are not known to be everywhere, there is nothing to keep: the first step (0, or the one that
   follows a checkpoint: `unknown` until all have formed) is planned anew, and whoever is in the view is a first member.
8. The whole job ends (`ending`) if every level member was told to leave, or if the view has fewer members than the floor
   and the job stops there. All end after the same step: the newest one for which nothing is left to compute. What was
   computed of a later one is given up: nobody knows how long the rest would take. If the job waits below its floor, nobody
   goes on with step `high` (`paused`) before a later view is large enough.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from recover.errors import Poisoned, Stopped
from recover.protocol.messages import Bucket, Name, Report, Vector
from recover.workload.policy import Policy

Below = Literal["wait", "stop"]
Ending = Literal["", "told", "floor"]
"""Why the whole job ends: all were told to go, or too few are left; "" if it goes on."""
LESSON = (0, 0)
"""The microbatch from which a run learns the order of its buckets; the one that can't be skipped."""


@dataclass(frozen=True)
class Job:
    """What all replicas of a run agree on: `total` microbatches a step (B), `steps`, and who computes them.

    With fewer members than `floor` the run waits for more, or stops.
    """

    total: int
    steps: int
    policy: Policy
    floor: int = 0
    below: Below = "wait"
    skip: frozenset[Name] = frozenset()             # microbatches that nobody computes, by agreement of all
    spares_killers: bool = False                    # a microbatch that took two replicas is skipped; else the run stops

    def skipped(self, step: int, more: frozenset[Name] = frozenset()) -> frozenset[int]:
        """Indices that are left out of `step`; `more`: what decisions have put aside."""
        return frozenset(index for at, index in self.skip | more if at == step)


@dataclass(frozen=True)
class Decision:
    """What every member does next. Members are named by their numbers, buckets by (position, index)."""

    low: int
    high: int
    formed: bool
    buckets: tuple[tuple[int, int], ...]            # per position: the newest layout, and how many it has
    vector: Vector
    leaving: frozenset[int]
    holders: dict[Bucket, tuple[int, ...]]          # of step `low`; a bucket without one is redone
    lost: frozenset[int]                            # microbatches of step `high` that nobody owed any more
    promoted: frozenset[int]
    extra: dict[int, tuple[int, ...]]               # member -> lost microbatches that it takes over
    ending: Ending = ""
    paused: bool = False
    skipped: frozenset[Name] = frozenset()          # put aside, by this decision or an earlier one

    def last(self, member: int) -> int | None:
        """The step after which `member` goes; None if it stays."""
        if self.ending:
            whole = self.formed and self.low == self.high and all(self.holders.values())
            return self.high if whole else self.high - 1
        if member not in self.leaving:
            return None
        return self.high - 1 if self.paused else self.high

    def redone(self) -> tuple[Bucket, ...]:
        return tuple(bucket for bucket, holders in self.holders.items() if not holders)


def decide(members: Sequence[int], reports: Mapping[int, Report], job: Job, killers: Sequence[Name] = ()) -> Decision | None:
    """None: nobody in the view was in the run (it ended before a joiner got in).

    `killers`: those of the view. Raises Stopped if nobody is level, Poisoned if the job does not spare killers.
    """
    formed = any(reports[m].formed for m in members)
    old = {m: reports[m] for m in members if reports[m].step is not None and not (formed and reports[m].fresh)}
    if not old:
        return None
    steps = at_hand(old, formed)
    low, high = min(steps), max(steps)
    assert high - low <= 1, ("steps of survivors apart by more than one", low, high)
    level = [m for m in members if holds_parameters(reports[m], formed)]
    if not level and low < job.steps:
        raise Stopped(f"no member that holds the parameters is left at step {low}")
    leaving = frozenset(m for m in members if reports[m].leaving)
    ending = why_to_end(members, level, leaving, job)
    vector = in_force(members, old, [m for m in level if m not in leaving] or level)
    buckets = [max(counts) for counts in zip(*(r.buckets for r in old.values()), strict=True)]     # the newest layout
    holders = {(p, b): holding((p, b), old, low, high) for p, (_, count) in enumerate(buckets) for b in range(count)}
    lost: frozenset[int] = frozenset()
    promoted: frozenset[int] = frozenset()
    extra: dict[int, tuple[int, ...]] = {}
    skipped = frozenset(name for r in old.values() for name in r.skipped)
    if formed and not ending and high < job.steps and (high > low or not all(holders.values())):
        if low == high and not any(holders.values()):
            skipped |= spared(old, high, skipped, killers, job)
        lost, promoted, extra = share_out(old, high, vector, level, leaving, job, skipped)
    paused = not ending and job.below == "wait" and len(members) < job.floor and high < job.steps
    return Decision(low, high, formed, tuple(buckets), vector, leaving, holders, lost, promoted, extra, ending, paused, skipped)


def holds_parameters(report: Report, formed: bool) -> bool:
    """`late`: whoever first comes to a run that has formed does not hold them, though it may take itself for a first member."""
    return not formed or (report.level and not report.fresh)


def why_to_end(members: Sequence[int], level: Sequence[int], leaving: frozenset[int], job: Job) -> Ending:
    """`together`: the last ones that hold the parameters end together, after the same step."""
    if leaving.issuperset(level):
        return "told"
    return "floor" if job.below == "stop" and len(members) < job.floor else ""


def spared(old: Mapping[int, Report], high: int, skipped: frozenset[Name], killers: Sequence[Name], job: Job) -> frozenset[Name]:
    """Killers among the lost microbatches of the step at hand. Raises Poisoned."""
    owed = {i for r in old.values() for i in (*r.owes.get(high, ()), *r.shadow.get(high, ()))}
    found = sorted(name for name in killers if name[0] == high and name[1] not in owed and name not in skipped | job.skip)
    if found and (not job.spares_killers or found[0] == LESSON):
        raise Poisoned(*found[0])
    return frozenset(found)


def at_hand(old: Mapping[int, Report], formed: bool) -> list[int]:
    """`unknown`: while nobody has formed, some may know by now where the run begins, and others not: that says nothing."""
    return [r.step for r in old.values() if r.step is not None] if formed else [0]


def in_force(members: Sequence[int], old: Mapping[int, Report], willing: Sequence[int]) -> Vector:
    """The newest fence vector known to anyone; members that it does not know count as average."""
    vectors = [(step, sorted(vector.items())) for report in old.values() for step, vector in report.vectors.items()]
    known = dict(max(vectors, default=(0, []))[1])
    speeds = [speed for speed in known.values() if speed > 0]
    average = sum(speeds) / len(speeds) if speeds else 1.0
    return {m: (known.get(m, 0) or average) if m in willing else 0 for m in members}


def holding(bucket: Bucket, old: Mapping[int, Report], low: int, high: int) -> tuple[int, ...]:
    return tuple(m for m, r in old.items() if r.step == high > low or bucket in r.reduced)


def share_out(old: Mapping[int, Report], high: int, vector: Vector, level: Sequence[int], leaving: frozenset[int],
              job: Job, skipped: frozenset[Name]) -> tuple[frozenset[int], frozenset[int], dict[int, tuple[int, ...]]]:
    """Lost microbatches of step `high`, the spares promoted, and who takes over what."""
    owed = Counter(i for r in old.values() for i in r.owes.get(high, ()))
    assert max(owed.values(), default=1) == 1, ("I1: a microbatch is owed twice", high, owed)
    all_of_it = frozenset(range(job.total)) - job.skipped(high, skipped)
    lost = all_of_it - owed.keys() if job.policy.constant else frozenset()
    promoted, rest = set(), set(lost)
    for m, r in sorted(old.items()):
        shadow = r.shadow.get(high, frozenset())
        if shadow and m not in leaving and promotable(shadow, rest):
            promoted.add(m)
            rest -= shadow
    counting = [m for m, r in sorted(old.items()) if m in promoted or countable(r.shadow.get(high, frozenset()))]
    able = [m for m in counting if vector[m]] or [m for m in counting if m in level]
    done = {m: len(old[m].owes.get(high, ())) + (len(old[m].shadow.get(high, ())) if m in promoted else 0) for m in able}
    extra = job.policy.share(sorted(rest), able, vector, done) if rest else {}
    return lost, frozenset(promoted), extra


def promotable(shadow: frozenset[int], lost: set[int]) -> bool:
    """`whole`: a spare's sums can be counted only if everything in them is lost elsewhere."""
    return shadow <= lost


def countable(shadow: frozenset[int]) -> bool:
    """`clean`: sums with shadow microbatches in them do not count, so nothing lost may be added to them."""
    return not shadow
