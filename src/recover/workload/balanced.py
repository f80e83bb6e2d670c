"""`Balanced`, the default: everyone does the same amount, give or take one.

`plan` gives each of the W members with a quota `B // W` microbatches in one contiguous run, in order of the members'
numbers; the first `B % W` members get one more. With fewer microbatches than members, the last ones get none. The
plan is the same at every step of a view, so data loaders predict it; contiguous runs keep receipts short.

`share` levels the totals: each lost microbatch goes to whoever owes least, so that the step ends as early as it can.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recover.workload.policy import Plan, deal, level, members


@dataclass(frozen=True)
class Balanced:
    """Quotas differ by at most one."""

    name: str = "balanced"
    constant: bool = True

    def plan(self, vector: Mapping[int, float], step: int, total: int) -> Plan:
        able = members(vector)
        base, rest = divmod(total, len(able))
        return Plan(deal(range(total), {m: base + (n < rest) for n, m in enumerate(able)}), {})

    def share(self, lost: Sequence[int], able: Sequence[int], vector: Mapping[int, float],
              done: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        return deal(lost, level(len(lost), able, done, {}))
