"""All buckets of a step under one numbering: the gradient's, then the written buffers', then the metrics'.

The protocol knows a bucket by its index only. Gradient buckets come first, since they are launched from hooks during
the last backward; the others leave when the microbatch loop ends.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from recover.gradients.buckets import Entry
from recover.gradients.buffers import BufferWatch
from recover.gradients.commit import Committed
from recover.gradients.store import GradientStore
from recover.training.metrics import Metrics


@dataclass(frozen=True)
class Whole:
    """A committed step: what the tails say, the metrics, and the names of buffers that forward wrote."""

    gradient: Committed
    metrics: dict[str, float]
    written: list[str]


class Sums:
    """The local and reduced sums of one rank."""

    def __init__(self, store: GradientStore, buffers: BufferWatch, metrics: Metrics) -> None:
        self.store, self.buffers, self.metrics = store, buffers, metrics
        self._others: list[BufferWatch | Metrics] = [metrics] if buffers.empty else [buffers, metrics]

    @property
    def gradient_count(self) -> int:
        return len(self.store.buckets)

    @property
    def count(self) -> int:
        return self.gradient_count + len(self._others)

    def inputs(self, b: int) -> list[Tensor]:
        """Read only."""
        return self.store.inputs(b) if b < self.gradient_count else self._others[b - self.gradient_count].inputs()

    def outputs(self, b: int) -> list[Tensor]:
        return self.store.outputs(b) if b < self.gradient_count else self._others[b - self.gradient_count].outputs()

    def zeros(self, b: int) -> list[Tensor]:
        """What a spare contributes whose sums don't count."""
        return [torch.zeros_like(part) for part in self.inputs(b)]

    def extra_levels(self, b: int) -> list[tuple[list[Tensor], list[Tensor]]]:
        return self.store.extra_levels(b) if b < self.gradient_count else []

    def fold(self, b: int) -> None:
        if b < self.gradient_count:
            self.store.fold(b)

    def begin(self, step: int) -> None:
        self.store.begin(step)
        self.buffers.begin()
        self.metrics.begin()

    @contextmanager
    def microbatch(self, index: int, member: int, launch: Callable[[int], None] | None,
                   wanted: frozenset[int]) -> Iterator[Entry]:
        with self.buffers.microbatch(index), \
                self.store.microbatch(index, member, launch=launch,
                                      wanted=sorted(b for b in wanted if b < self.gradient_count)) as entry:
            yield entry
        self.metrics.entered(index)

    @contextmanager
    def calibration(self) -> Iterator[Entry]:
        """Microbatch (0, 0) is computed and discarded: it only sets the exponents of `exact`."""
        self.buffers.begin()
        with self.buffers.microbatch(0), self.store.calibration():
            yield Entry(fired=[])

    def commit(self, count: int | None) -> Whole:
        """`count` microbatches must be inside; None: however many there are (a policy that lets the batch shrink)."""
        inside = count if count is not None else sum(self.store.buckets[-1].counts())
        gradient = self.store.commit(count=inside, weighted=True)
        written = [] if self.buffers.empty else self.buffers.commit(count=inside)
        return Whole(gradient, self.metrics.commit(inside), written)
