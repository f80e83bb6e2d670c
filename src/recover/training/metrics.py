"""`step.add("accuracy", value)`: numbers of microbatches that are reduced exactly once, like the loss.

A metric may be added after the last bucket of the gradient has left, and a replica without a quota does not know which
ones there are. So they travel in a bucket of their own, which leaves when the microbatch loop ends: a table of float64
with a row per microbatch, in which the one replica that computed it writes names and values and all others zeros. The
sum of such tables is the table. Names are cut into words of six bytes, which a float64 holds exactly. An evaluation's
scores (`run.evaluate`) travel in a second such table.
"""
from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

PER_MICROBATCH = 8
NAME_BYTES = 24
_WORD = 6
_WORDS = NAME_BYTES // _WORD
_SLOT = _WORDS + 2

Totals = dict[str, tuple[float, float]]
"""name -> sum of values, sum of weights"""


class Metrics:
    """The metrics of the step at hand; `microbatches` is B. Tables are float64, [B, 1 + 8 * 6]."""

    def __init__(self, microbatches: int) -> None:
        self.local = torch.zeros(microbatches, 1 + PER_MICROBATCH * _SLOT, dtype=torch.float64)
        self.reduced = torch.zeros_like(self.local)
        self._used: dict[int, list[str]] = {}

    def begin(self) -> None:
        if self._used or self.local.any():
            self.local.zero_()
        self._used = {}

    def entered(self, index: int) -> None:
        """Microbatch `index` was computed here: the count that proves I1 for this bucket too."""
        self.local[index, 0] += 1

    def add(self, index: int, name: str, value: float, weight: float = 1.0) -> None:
        """Raises ValueError for a name that is too long or given twice, and for more than 8 names."""
        encoded = name.encode()
        used = self._used.setdefault(index, [])
        if not 0 < len(encoded) <= NAME_BYTES:
            raise ValueError(f"the name of a metric has 1 to {NAME_BYTES} bytes, not {len(encoded)}: {name!r}")
        if name in used:
            raise ValueError(f"metric {name!r} was already added to microbatch {index}; add it once, summed up")
        if len(used) == PER_MICROBATCH:
            raise ValueError(f"microbatch {index} has {PER_MICROBATCH} metrics already; {name!r} is one too many")
        start = 1 + len(used) * _SLOT
        used.append(name)
        padded = encoded.ljust(NAME_BYTES, b"\0")
        words = [int.from_bytes(padded[n * _WORD:(n + 1) * _WORD], "big") for n in range(_WORDS)]
        self.local[index, start:start + _SLOT] = torch.tensor([*words, float(value), float(weight)], dtype=torch.float64)

    def inputs(self) -> list[Tensor]:
        return [self.local]

    def outputs(self) -> list[Tensor]:
        return [self.reduced]

    def check(self, count: int) -> None:
        """Raises AssertionError unless `count` microbatches are inside, each once (I1)."""
        counts = self.reduced[:, 0].tolist()
        if any(n not in (0, 1) for n in counts) or sum(counts) != count:
            raise AssertionError(f"I1: the metrics hold microbatches {counts} times, {count} expected, each once")

    def totals(self) -> Totals:
        """Over the microbatches that added a name, in the order of their first appearance."""
        rows = self.reduced.tolist()
        values: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            for start in range(1, len(row), _SLOT):
                name = b"".join(int(word).to_bytes(_WORD, "big") for word in row[start:start + _WORDS]).rstrip(b"\0")
                if name:
                    values.setdefault(name.decode(), []).append((row[start + _WORDS], row[start + _WORDS + 1]))
        return {name: (total(v for v, _ in found), total(w for _, w in found)) for name, found in values.items()}


def total(values: Iterable[float]) -> float:
    """Rounded once, and so in any order; NaN and inf pass through."""
    given = list(values)
    return math.fsum(given) if all(map(math.isfinite, given)) else sum(given)


def means(parts: Iterable[Totals]) -> dict[str, float]:
    """name -> weighted mean over all microbatches and data ranks that added it; NaN where the weights are 0."""
    found: dict[str, list[tuple[float, float]]] = {}
    for part in parts:
        for name, pair in part.items():
            found.setdefault(name, []).append(pair)
    sums = {name: (total(v for v, _ in pairs), total(w for _, w in pairs)) for name, pairs in found.items()}
    return {name: value / weight if weight else math.nan for name, (value, weight) in sums.items()}
