"""`run.evaluate`: an evaluation set shared out over the replicas, every sample once, also when one dies.

Theory of operation. An evaluation rides on a step: microbatch `index` brings its part of the set's batches along, which
whoever computes the microbatch scores first, with the weights from before the step's update (as `step.loss` has them). The
scores travel like metrics, in a bucket of their own. So a death is nothing new: the lost microbatches are computed by
others, and their part of the set with them; what survivors have scored is kept. After the last step there is one more that
only evaluates: its microbatches have no backward, and nothing is updated.

Batch `b` of N belongs to microbatch `index` where `N * index // B <= b < N * (index + 1) // B`. The data ranks of a replica
share each batch; a rank that gets no sample of a small one scores its first sample all the same (a forward under FSDP wants
all ranks), and that score is dropped.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from recover.training.metrics import Metrics, total
from recover.training.sampling import MapDataset, seed_everything

Score = Callable[[Any], Mapping[str, tuple[float | Tensor, float | Tensor]]]
"""A collated batch in, {name: (sum over the batch, weight of the batch)} out."""


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate and when. `part` of `parts`: this data rank of the replica's. Raises ValueError for a mistake."""

    dataset: MapDataset
    batch_size: int
    score: Score
    every: int
    collate: Callable[[list[Any]], Any]
    part: int = 0
    parts: int = 1

    def __post_init__(self) -> None:
        if len(self.dataset) < 1:
            raise ValueError("the evaluation set is empty")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {self.batch_size}")
        if self.every < 0:
            raise ValueError(f"every must be 0 (only after the last step) or a number of steps, not {self.every}")

    @property
    def batches(self) -> int:
        return -(-len(self.dataset) // self.batch_size)

    def due(self, step: int, steps: int) -> bool:
        """Whether `step` of `steps` evaluates; number `steps` is the one after the last update."""
        return step == steps or (self.every > 0 and step % self.every == 0)

    def of(self, index: int, microbatches: int) -> range:
        """The batches that microbatch `index` of B brings along."""
        return range(self.batches * index // microbatches, self.batches * (index + 1) // microbatches)

    def samples(self, batch: int) -> tuple[range, bool]:
        """Numbers of this data rank's samples of a batch, and whether they count."""
        first = batch * self.batch_size
        size = min(self.batch_size, len(self.dataset) - first)
        mine = range(first + size * self.part // self.parts, first + size * (self.part + 1) // self.parts)
        return (mine, True) if mine else (range(first, first + 1), False)

    def scores(self, index: int, microbatches: int, seed: int, step: int) -> dict[str, tuple[float, float]]:
        """Of microbatch `index`'s part of the set: name -> sum and weight. Raises ValueError for scores of another form."""
        found: dict[str, list[tuple[float, float]]] = {}
        for batch in self.of(index, microbatches):
            numbers, counts = self.samples(batch)
            seed_everything(seed, step, f"evaluation {batch}/{self.part}")
            given = self.score(self.collate([self.dataset[n] for n in numbers]))
            for name, pair in given.items() if counts else ():
                try:
                    value, weight = pair
                    found.setdefault(name, []).append((float(value), float(weight)))
                except (TypeError, ValueError):
                    raise ValueError(f"an evaluation's score is a pair for each name, (sum over the batch, its weight); "
                                     f"{name!r} is {pair!r}") from None
        return {name: (total(v for v, _ in pairs), total(w for _, w in pairs)) for name, pairs in found.items()}


@contextmanager
def evaluating(models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, models are in evaluation mode, and nothing records gradients. (Whoever hands out a microbatch seeds anew.)"""
    modes = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


class Evaluator:
    """The evaluation under way in one run: `table` is reduced like the metrics."""

    def __init__(self, evaluation: Evaluation, microbatches: int, seed: int, models: Sequence[nn.Module]) -> None:
        self.evaluation, self.table = evaluation, Metrics(microbatches)
        self.microbatches, self.seed, self.models = microbatches, seed, models

    def score(self, step: int, indices: Sequence[int]) -> None:
        """Score what these microbatches bring along."""
        with evaluating(self.models):
            for index in indices:
                for name, (value, weight) in self.evaluation.scores(index, self.microbatches, self.seed, step).items():
                    self.table.add(index, name, value, weight)

    def twin(self) -> Evaluator:
        """With a table of its own."""
        return Evaluator(self.evaluation, self.microbatches, self.seed, self.models)

    def signature(self) -> str:
        """What all replicas must have alike."""
        each = self.evaluation
        return f"evaluation: {len(each.dataset)} samples in batches of {each.batch_size} every {each.every} steps"
