"""`Shrinking`, the strawman: quotas stay, the batch shrinks. For comparison only.

This is what dropping a dead replica and going on amounts to: every survivor keeps its `per_replica` microbatches,
nobody makes up for the lost ones, and each step sums fewer microbatches than the failure-free run would have. The
policy says so: `constant` is False, and the divisor of such a step is the number that was summed.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recover.workload.policy import Plan, deal, members


@dataclass(frozen=True)
class Shrinking:
    """A quota of `per_replica` for every member, whatever happens to the others (never beyond B in all)."""

    per_replica: int
    name: str = "shrinking"
    constant: bool = False

    def __post_init__(self) -> None:
        if self.per_replica < 1:
            raise ValueError(f"per_replica must be at least 1, not {self.per_replica}")

    def plan(self, vector: Mapping[int, float], step: int, total: int) -> Plan:
        able = members(vector)
        covered = min(total, len(able) * self.per_replica)
        quotas = {m: max(0, min(self.per_replica, covered - n * self.per_replica)) for n, m in enumerate(able)}
        return Plan(deal(range(covered), quotas), {})

    def share(self, lost: Sequence[int], able: Sequence[int], vector: Mapping[int, float],
              done: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        return {}
