"""What a policy is: who computes which microbatch of a step, and who takes over what a dead replica left.

A policy answers two questions, and nothing else:

* `plan`: how the microbatches 0..B-1 of a step are dealt out, before anyone starts on it;
* `share`: how the microbatches that died with a replica are dealt out to the survivors, in the middle of a step.

Rules that every policy obeys:

* It is pure. All replicas call it with equal arguments and must get equal answers, or a microbatch would be summed
  twice or never: no clock, no random numbers, no state that one replica has and another lacks, no iteration over a set.
* Members that `plan` gives work are among those whose speed is above 0, and together they own 0..B-1 exactly once
  (`constant` policies; a policy that lets the batch shrink says `constant = False`).
* `shadow` names work that a spare computes beside its owner. It counts only if the protocol promotes the spare, which
  it does when all of this shadow is lost. A member has either work or a shadow.
* `share` deals out exactly `lost`, each once, to members of `able`.

`check_plan` and `check_share` say in words which of these a policy broke; the tests call them on every policy, and
whoever writes one should too (docs/policies.md).
"""
from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple, Protocol, runtime_checkable


class Plan(NamedTuple):
    """Who computes what in one step: member -> microbatch indices in increasing order.

    `work` counts. `shadow` is what spares compute beside its owner. Members without either may be missing.
    """

    work: dict[int, tuple[int, ...]]
    shadow: dict[int, tuple[int, ...]]


@runtime_checkable
class Policy(Protocol):
    """See the rules at the top of this module."""

    @property
    def name(self) -> str:
        """One word, by which scripts and events name the policy."""

    @property
    def constant(self) -> bool:
        """True: every step sums exactly B microbatches. False: the batch shrinks with the replicas."""

    def plan(self, vector: Mapping[int, float], step: int, total: int) -> Plan:
        """Deal out 0..total-1.

        `vector`: member -> speed (microbatches per second, any common unit); 0 means no quota (joining, leaving, idle).
        Raises ValueError when no member has a speed above 0.
        """

    def share(self, lost: Sequence[int], able: Sequence[int], vector: Mapping[int, float],
              done: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        """Deal out `lost` over `able`: member -> additional indices in increasing order, members without any left out.

        `vector`: as for `plan`; a member of `able` may have speed 0 here (everyone else may be leaving).
        `done`: how many microbatches of the step each member owes already. Raises ValueError if `able` is empty and
        `lost` is not.
        """


def speeds(vector: Mapping[int, float]) -> dict[int, Fraction]:
    """Members with a quota, in order of their numbers, and their speeds as exact fractions.

    Fractions, because floating-point sums depend on their order. Raises ValueError for NaN, infinity, negative speeds.
    """
    for member, speed in sorted(vector.items()):
        if not math.isfinite(speed) or speed < 0:
            raise ValueError(f"the speed of member {member} must be a finite number of at least 0, not {speed}")
    return {member: Fraction(vector[member]) for member in sorted(vector) if vector[member] > 0}


def members(vector: Mapping[int, float]) -> list[int]:
    """Members with a quota, in order. Raises ValueError if there are none."""
    able = list(speeds(vector))
    if not able:
        raise ValueError(f"no member has a quota: {dict(vector)}; a plan needs at least one speed above 0")
    return able


def deal(indices: Iterable[int], quotas: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Cut the sorted indices into runs of the given lengths, in the order of `quotas`; empty runs are left out."""
    rest, parts, start = sorted(indices), {}, 0
    for member, quota in quotas.items():
        if quota:
            parts[member] = tuple(rest[start:start + quota])
        start += quota
    assert start == len(rest), f"quotas sum to {start}, not {len(rest)}"
    return parts


def level(count: int, able: Sequence[int], done: Mapping[int, int], weight: Mapping[int, Fraction]) -> dict[int, int]:
    """How many of `count` each of `able` gets so that `(done + got) / weight` is as level as can be.

    One at a time to whoever would be ready first with it, ties to the lowest member. Members missing in `done` have
    done nothing; members missing in `weight` weigh 1.
    """
    if count and not able:
        raise ValueError(f"{count} microbatches are lost and nobody is able to take them")
    got = dict.fromkeys(sorted(able), 0)

    def ready(member: int) -> tuple[Fraction, int]:
        return (done.get(member, 0) + got[member] + 1) / weight.get(member, Fraction(1)), member

    queue = [ready(member) for member in got]
    heapq.heapify(queue)
    for _ in range(count):
        member = queue[0][1]
        got[member] += 1
        heapq.heapreplace(queue, ready(member))
    return got


def check_plan(policy: Policy, plan: Plan, vector: Mapping[int, float], total: int) -> None:
    """Raise ValueError that names the first rule which `plan` breaks."""
    who = f"policy {policy.name!r}"
    for member, indices in (*plan.work.items(), *plan.shadow.items()):
        if not vector.get(member):
            raise ValueError(f"{who} gives member {member} work, but its speed is {vector.get(member)}")
        if list(indices) != sorted(set(indices)):
            raise ValueError(f"{who} gives member {member} indices that are not increasing: {indices}")
    both = [m for m in plan.shadow if plan.shadow[m] and plan.work.get(m)]
    if both:
        raise ValueError(f"{who} gives members {both} both work and a shadow")
    count = Counter(i for indices in plan.work.values() for i in indices)
    _check_exactly_once(who, count, range(total), exhaustive=policy.constant)
    strangers = {i for indices in plan.shadow.values() for i in indices} - count.keys()
    if strangers:
        raise ValueError(f"{who} shadows microbatches {sorted(strangers)} that nobody owes")


def check_share(policy: Policy, parts: Mapping[int, Sequence[int]], lost: Sequence[int], able: Sequence[int]) -> None:
    """Raise ValueError that names the first rule which the answer `parts` of `share` breaks."""
    who = f"policy {policy.name!r}"
    outsiders = sorted(parts.keys() - set(able))
    if outsiders:
        raise ValueError(f"{who} gives lost microbatches to members {outsiders}, who are not able to take them")
    count = Counter(i for indices in parts.values() for i in indices)
    _check_exactly_once(who, count, lost, exhaustive=policy.constant)


def _check_exactly_once(who: str, count: Counter[int], wanted: Iterable[int], *, exhaustive: bool) -> None:
    wanted = set(wanted)
    twice = sorted(i for i, n in count.items() if n > 1)
    if twice:
        raise ValueError(f"{who} deals out microbatches {twice} more than once")
    beyond = sorted(count.keys() - wanted)
    if beyond:
        raise ValueError(f"{who} deals out microbatches {beyond}, which are not there to be dealt")
    missing = sorted(wanted - count.keys())
    if missing and exhaustive:
        raise ValueError(f"{who} leaves out microbatches {missing}")
