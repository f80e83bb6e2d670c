"""`SpeedWeighted`: quotas in proportion to measured speed. A slow replica and a dead one are cases of one rule.

Each member measures its own microbatches with a `Speedometer` and says its speed with the fence; all members plan
with the same vector. Quotas follow by the method of the largest remainder, with two additions:

* While there are as many microbatches as members, everyone keeps at least one: a member with quota 0 would measure
  nothing, so once slow it would stay slow for ever. The one is taken from whoever would be ready last.
* A speed is said in steps of `1 / NOTCHES` of a power of two (about 4.4 %). Plans then don't change with every
  flutter of a clock, and what data loaders prefetched stays right.

All arithmetic is in exact fractions, so that it is the same everywhere.
"""
from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from recover.workload.policy import Plan, deal, level, members, speeds

NOTCHES = 16


@dataclass(frozen=True)
class SpeedWeighted:
    """Quotas in proportion to speed: largest remainder, ties to the lowest member."""

    name: str = "speed"
    constant: bool = True

    def plan(self, vector: Mapping[int, float], step: int, total: int) -> Plan:
        members(vector)                                 # raises if nobody has a quota
        weight = speeds(vector)
        return Plan(deal(range(total), _at_least_one(apportion(total, weight), weight)), {})

    def share(self, lost: Sequence[int], able: Sequence[int], vector: Mapping[int, float],
              done: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
        weight = {m: s for m, s in speeds(vector).items() if m in set(able)}
        slowest = min(weight.values(), default=Fraction(1))
        return deal(lost, level(len(lost), able, done, {m: weight.get(m, slowest) for m in able}))


def apportion(total: int, weight: Mapping[int, Fraction]) -> dict[int, int]:
    """Largest remainder: whole numbers that sum to `total`, each within one of its exact proportion."""
    whole = sum(weight.values())
    exact = {m: total * w / whole for m, w in weight.items()}
    quotas = {m: math.floor(x) for m, x in exact.items()}
    by_remainder = sorted(exact, key=lambda m: (quotas[m] - exact[m], m))
    for member in by_remainder[:total - sum(quotas.values())]:
        quotas[member] += 1
    return quotas


def _at_least_one(quotas: dict[int, int], weight: Mapping[int, Fraction]) -> dict[int, int]:
    if sum(quotas.values()) < len(quotas):
        return quotas
    for member in [m for m, quota in quotas.items() if quota == 0]:
        giver = max((m for m in quotas if quotas[m] > 1), key=lambda m: (quotas[m] / weight[m], -m))
        quotas[giver] -= 1
        quotas[member] += 1
    return quotas


class Speedometer:
    """A replica's own speed from the times of its microbatches. Knows no clock: it is told durations.

    Smoothed: each microbatch counts `smoothing` of the average, the past the rest. Times that are no time (0, negative,
    NaN, infinite) are ignored.
    """

    def __init__(self, smoothing: float = 0.2) -> None:
        if not 0 < smoothing <= 1:
            raise ValueError(f"smoothing must be above 0 and at most 1, not {smoothing}")
        self._smoothing = smoothing
        self._seconds: float | None = None

    def add(self, seconds: float) -> None:
        """A microbatch took so long (forward and backward, without waiting for peers)."""
        if not math.isfinite(seconds) or seconds <= 0:
            return
        last = seconds if self._seconds is None else self._seconds
        self._seconds = last + self._smoothing * (seconds - last)

    def speed(self, unknown: float = 1.0) -> float:
        """Microbatches per second in notches, always above 0; `unknown` before the first measurement."""
        if self._seconds is None:
            return unknown
        notch = round(-math.log2(self._seconds) * NOTCHES)
        return math.exp2(max(-1000 * NOTCHES, min(1000 * NOTCHES, notch)) / NOTCHES)
