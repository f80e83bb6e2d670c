"""W replicas in one process, and an all-reduce that is a loop: a double for the tests of recover.gradients."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from recover.gradients import Committed, GradientStore

torch.set_num_threads(1)


def all_reduce(inputs: Sequence[Sequence[Tensor]], outputs: Sequence[Sequence[Tensor]]) -> None:
    """Sums in member order into everybody's outputs, out of place."""
    for place in range(len(inputs[0])):
        total = inputs[0][place].clone()
        for member in inputs[1:]:
            total += member[place]
        for member in outputs:
            member[place].copy_(total)


def reduce_bucket(stores: Sequence[GradientStore], k: int) -> None:
    """Bucket k whole on all: payload and tail, then coarse sums where some member has any."""
    all_reduce([store.inputs(k) for store in stores], [store.outputs(k) for store in stores])
    extra = [store.extra_levels(k) for store in stores]
    assert len({len(pairs) for pairs in extra}) == 1
    for pairs in zip(*extra, strict=True):
        all_reduce([pair[0] for pair in pairs], [pair[1] for pair in pairs])
    for store in stores:
        store.fold(k)


class Cluster:
    """Replicas with equal models: `build()` makes the same one each time; `loss(model, index)` is a microbatch's."""

    def __init__(self, size: int, build: Callable[[], nn.Module], loss: Callable[[nn.Module, int], Tensor],
                 **options: object) -> None:
        self.models = [build() for _ in range(size)]
        self.loss = loss
        self.stores = [GradientStore(list(model.named_parameters()), **options) for model in self.models]  # type: ignore[arg-type]
        self.launched: list[list[int]] = [[] for _ in range(size)]
        self.weight: Callable[[int], float] = lambda index: 1.0
        self.step = 0

    def calibrate(self) -> None:
        for model, store in zip(self.models, self.stores, strict=True):
            with store.calibration():
                self.loss(model, 0).backward()

    def compute(self, work: Sequence[Sequence[int]], wanted: Sequence[int] | None = None) -> None:
        """Member r computes work[r] in that order; what it launches is noted (all at once for one without work)."""
        for member, (model, store) in enumerate(zip(self.models, self.stores, strict=True)):
            self.launched[member] = []
            for index in work[member]:
                last = index == work[member][-1]
                launch = self.launched[member].append if last else None
                with store.microbatch(index, member, launch=launch, wanted=wanted) as entry:
                    loss = self.loss(model, index)
                    entry.loss, entry.weight = loss, self.weight(index)
                    loss.backward()

    def reduce(self) -> None:
        for k in range(len(self.stores[0].buckets)):
            reduce_bucket(self.stores, k)

    def begin(self) -> None:
        for store in self.stores:
            store.begin(self.step)

    def run(self, work: Sequence[Sequence[int]], *, count: int, weighted: bool = False) -> list[Committed]:
        """A whole step without failures; adopts what was learned."""
        self.begin()
        self.compute(work)
        self.reduce()
        return self.commit(count=count, weighted=weighted)

    def commit(self, *, count: int, weighted: bool = False) -> list[Committed]:
        done = [store.commit(count=count, weighted=weighted) for store in self.stores]
        self.step += 1
        return done

    def adopt(self, committed: Sequence[Committed]) -> None:
        for store, each in zip(self.stores, committed, strict=True):
            if each.learned is not None:
                store.adopt(each.learned)


def split(indices: Sequence[int], cuts: int) -> list[list[int]]:
    """Deals indices to `cuts` members like cards."""
    return [list(indices[member::cuts]) for member in range(cuts)]
