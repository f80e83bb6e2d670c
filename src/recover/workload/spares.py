"""`Spares`: members without work that stay level, and take over what a dead member leaves in the same step.

It wraps any other policy. Of a run that began with `replicas` members, `replicas - spares` work and the others are
spares: those with the highest numbers. A spare receives every step's sums and makes every update, so it has the very
parameters that the dead member had. When a member dies,

* its microbatches go to spares that owe nothing yet, a whole quota each, so that no survivor computes one more;
  what is left when there are more dead than spares is shared out as the inner policy says;
* from the next step on one spare fewer is a spare.

In a run that has grown beyond its first size, there are as many spares as before and more members that work.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recover.workload.policy import Plan, Policy, level, members


@dataclass(frozen=True)
class Spares:
    """`inner` for all but `spares` members. ValueError if nobody would be left to work."""

    inner: Policy
    spares: int
    replicas: int

    def __post_init__(self) -> None:
        if not 0 <= self.spares < self.replicas:
            raise ValueError(f"of {self.replicas} replicas {self.spares} can't be spares: at least one must work")

    @property
    def name(self) -> str:
        return f"{self.inner.name} with {self.spares} spares"

    @property
    def constant(self) -> bool:
        return self.inner.constant

    def plan(self, vector: Mapping[int, float], step: int, total: int) -> Plan:
        able = members(vector)
        working = set(able[:max(self.replicas, len(able)) - self.spares])
        return self.inner.plan({m: speed if m in working else 0.0 for m, speed in sorted(vector.items())}, step, total)

    def share(self, lost: Sequence[int], able: Sequence[int], vector: Mapping[int, float],
              done: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        idle = [m for m in sorted(able) if not done.get(m)]
        dead = max(1, self.replicas - self.spares - (len(able) - len(idle)))
        quota = -(-len(lost) // dead)                           # what each of the dead owed, give or take
        taken = min(len(lost), quota * len(idle))
        if not taken:
            return self.inner.share(lost, able, vector, done)
        order, parts, start = sorted(lost), {}, 0
        for m, count in level(taken, idle, {}, {}).items():
            parts[m] = tuple(order[start:start + count])
            start += count
        after = {m: done.get(m, 0) + len(parts.get(m, ())) for m in able}
        for m, more in self.inner.share(order[taken:], able, vector, after).items() if taken < len(lost) else ():
            parts[m] = tuple(sorted((*parts.get(m, ()), *more)))
        return {m: part for m, part in parts.items() if part}
