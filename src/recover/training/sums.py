"""All buckets of a step under one numbering: the gradient's, then the written buffers', then the metrics'.

The protocol knows a bucket by its index only. Gradient buckets come first, since they are launched from hooks during
the last backward; the others leave when the microbatch loop ends.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recover.gradients.buckets import Entry
from recover.gradients.buffers import BufferWatch
from recover.gradients.commit import Committed
from recover.gradients.store import GradientStore
from recover.parallel import fsdp
from recover.parallel.inner import Share
from recover.training.evaluation import Evaluator
from recover.training.metrics import Metrics, means


@dataclass(frozen=True)
class Whole:
    """A committed step: what the tails say, the metrics, and the names of buffers that forward wrote."""

    gradient: Committed
    loss: float                         # mean over the step's global weight
    divisor: float
    metrics: dict[str, float]
    scores: dict[str, float]            # of the evaluation, in a step that has one
    written: list[str]
    nonfinite: str                      # where the gradient is not finite, in words; "" if it is


class Sums:
    """The local and reduced sums of one rank."""

    def __init__(self, store: GradientStore, buffers: BufferWatch, metrics: Metrics, models: Sequence[nn.Module] = ()) -> None:
        self.store, self.buffers, self.metrics = store, buffers, metrics
        self.evaluator: Evaluator | None = None
        self.sharded = tuple(models) if fsdp.modules_of(models) else ()      # under FSDP
        self._withhold = False                          # FSDP keeps the gradients of the microbatch in hand for a later one
        if self.sharded:
            fsdp.watch(self.sharded, store.track(fsdp.sharded(self.sharded)))
        self._tables = [metrics]

    def attach(self, evaluator: Evaluator) -> None:
        """(Before the first step.) Its scores travel too."""
        self.evaluator = evaluator
        self._tables.append(evaluator.table)

    @property
    def _others(self) -> list[BufferWatch | Metrics]:
        """What has the buckets behind the gradient's."""
        return [*self._tables] if self.buffers.empty else [self.buffers, *self._tables]

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
        for table in self._tables:
            table.begin()

    def before_forward(self, last: bool, pipelined: bool) -> None:
        """Tell FSDP whether the microbatch's gradients are reduced inside the replica now, or with a later one.

        A pipeline's adapter reduces them after each microbatch by itself.
        """
        self._withhold = bool(self.sharded) and not (pipelined or last or self.store.synchronises_each)
        if self.sharded and not pipelined:
            fsdp.sync(self.sharded, not self._withhold)

    def flush(self, member: int) -> None:
        """Have FSDP reduce what it was told to keep, where no microbatch follows that would."""
        if self.store.withheld:
            with self.store.flush(member):
                fsdp.flush(self.sharded)

    @contextmanager
    def microbatch(self, indices: tuple[int, ...], member: int, launch: Callable[[int], None] | None,
                   wanted: frozenset[int]) -> Iterator[Entry]:
        with self.buffers.microbatch(indices), \
                self.store.microbatch(indices, member, launch=launch, withheld=self._withhold,
                                      wanted=sorted(b for b in wanted if b < self.gradient_count)) as entry:
            yield entry
        for table in self._tables:
            for index in indices:
                table.entered(index)

    @contextmanager
    def calibration(self) -> Iterator[Entry]:
        """Microbatch (0, 0) is computed and discarded: it only sets the exponents of `exact`."""
        self.buffers.begin()
        with self.buffers.microbatch((0,)), self.store.calibration():
            yield Entry()

    def share(self) -> Share:
        """(All buckets are whole.) This position's part of the step's weight, loss, metrics and scores."""
        last = self.store.buckets[-1]
        values = last.reduced_tail.tolist()
        scores = {} if self.evaluator is None else self.evaluator.table.totals()
        return math.fsum(values[last.tail.weight]), sum(values[last.tail.loss]), self.metrics.totals(), scores

    def commit(self, count: int | None, shares: Sequence[Share]) -> Whole:
        """`.grad` becomes the step's gradient, divided by the weight of all data ranks' shares.

        `count` microbatches must be inside; None: however many there are (a policy that lets the batch shrink).
        """
        inside = count if count is not None else sum(self.store.buckets[-1].counts())
        divisor = math.fsum(share[0] for share in shares)
        gradient = self.store.commit(count=inside, divisor=divisor if inside else 1.0)
        if not inside:                                  # all of the step is skipped
            self.store.clear()
        written = [] if self.buffers.empty else self.buffers.commit(count=inside)
        for table in self._tables:
            table.check(inside)
        loss = sum(share[1] for share in shares) / divisor if inside else math.nan
        metrics, scores = means(share[2] for share in shares), means(share[3] for share in shares)
        return Whole(gradient, loss, divisor, metrics, scores, written, where(gradient.nonfinite))


class Mirror(Sums):
    """What a joiner reduces into while its script replays: zeros in, sums out. No parameter and no hook is touched."""

    def __init__(self, other: Sums) -> None:
        other.store.close()
        super().__init__(other.store, other.buffers, other.metrics)

    def begin(self, step: int) -> None:
        for bucket in self.store.buckets:
            bucket.begin()


def where(nonfinite: tuple[int | None, str] | None) -> str:
    """A gradient that is not finite, in words."""
    if nonfinite is None:
        return ""
    microbatch, parameter = nonfinite
    return f"the gradient of {parameter} in " + ("the sum over all microbatches" if microbatch is None
                                                 else f"microbatch {microbatch}") + " is not finite"
