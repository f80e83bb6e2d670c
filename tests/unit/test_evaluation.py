"""How an evaluation set is shared out, and that its table of scores notices what is inside twice, or not at all."""
from __future__ import annotations

from collections import Counter

import pytest
from torch import nn

from recover.training.evaluation import Evaluation, Evaluator
from recover.training.metrics import Metrics, means


class Numbers:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


def evaluation(length=37, batch_size=4, score=lambda batch: {"sum": (sum(batch), len(batch))}, **more):
    return Evaluation(Numbers(length), batch_size, score, more.pop("every", 0), list, **more)


@pytest.mark.parametrize("microbatches", [1, 3, 8, 50])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
def test_every_sample_counts_once(microbatches: int, parts: int) -> None:
    counted: Counter[int] = Counter()
    for part in range(parts):
        each = evaluation(part=part, parts=parts)
        for index in range(microbatches):
            for batch in each.of(index, microbatches):
                samples, counts = each.samples(batch)
                assert len(samples) >= 1                # a forward under FSDP wants all ranks
                counted.update(samples if counts else ())
    assert counted == Counter(range(37))


def test_a_sample_that_only_fills_up_does_not_count() -> None:
    first, second = (evaluation(length=5, part=part, parts=2).scores(0, 1, 0, 0) for part in range(2))
    assert first["sum"] == (0 + 1, 2)                   # of batch (4,) it scores the 4, too, and drops that
    assert second["sum"] == (2 + 3 + 4, 3)


def test_when_it_is_due() -> None:
    assert [s for s in range(8) if evaluation(every=3).due(s, 7)] == [0, 3, 6, 7]
    assert [s for s in range(8) if evaluation().due(s, 7)] == [7]


def test_the_scores_travel_by_microbatch() -> None:
    """Two replicas score different microbatches; the sum of their tables is the whole."""
    tables = []
    for indices in ([0, 2], [1]):
        evaluator = Evaluator(evaluation(), 3, 0, [nn.Linear(1, 1)])
        evaluator.score(0, indices)
        for index in indices:
            evaluator.table.entered(index)
        tables.append(evaluator.table)
    whole = tables[0]
    whole.reduced.copy_(tables[0].local + tables[1].local)
    whole.check(3)
    assert whole.totals() == {"sum": (sum(range(37)), 37)}
    assert means([whole.totals()]) == {"sum": 18.0}


@pytest.mark.parametrize("entered", [[0, 1], [0, 1, 1, 2], [0, 1, 1]])
def test_a_microbatch_that_is_missing_or_twice_is_found(entered: list[int]) -> None:
    table = Metrics(3)
    for index in entered:
        table.entered(index)
    table.reduced.copy_(table.local)
    with pytest.raises(AssertionError, match="I1"):
        table.check(3)


@pytest.mark.parametrize("training", [True, False])
def test_models_are_put_back_as_they_were(training: bool) -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(1, 1))
    model.train(training)
    model[0].train(not training)
    seen = []
    Evaluator(evaluation(score=lambda batch: seen.append(model[0].training) or {}), 1, 0, [model]).score(0, [0])
    assert set(seen) == {False}
    assert [module.training for module in model.modules()] == [training, not training, training]


@pytest.mark.parametrize(("mistake", "words"), [
    (dict(length=0), "empty"), (dict(batch_size=0), "batch_size"), (dict(every=-1), "every")])
def test_mistakes(mistake: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        evaluation(**mistake)


def test_a_score_of_another_form() -> None:
    with pytest.raises(ValueError, match=r"\(sum over the batch, its weight\); 'loss' is 3"):
        evaluation(score=lambda batch: {"loss": 3.0}).scores(0, 1, 0, 0)
