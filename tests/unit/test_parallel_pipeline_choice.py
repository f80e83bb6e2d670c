"""Which schedule runs a chunk, and where it wants its stages: decided without processes."""
from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from recover.parallel.pipeline import ALTERNATIVES, SPLIT, Pipeline, check_stages, choose, fits


@pytest.mark.parametrize(("schedule", "size", "chosen"), [
    ("gpipe", 1, "gpipe"), ("gpipe", 9, "gpipe"),
    ("1f1b", 4, "1f1b"), ("1f1b", 7, "1f1b"), ("1f1b", 3, "gpipe"), ("1f1b", 1, "gpipe"),
    ("interleaved1f1b", 4, "interleaved1f1b"), ("interleaved1f1b", 3, "interleaved1f1b"), ("interleaved1f1b", 5, "loopedbfs"),
    ("interleavedzerobubble", 6, "interleavedzerobubble"), ("interleavedzerobubble", 7, "loopedbfs"),
    ("dualpipev", 4, "dualpipev"), ("dualpipev", 3, "zbvzerobubble"),
])
def test_four_stages_on_two_ranks(schedule: str, size: int, chosen: str) -> None:
    assert choose(schedule, size, stages=4, ranks=2) == chosen


@pytest.mark.parametrize("schedule", ALTERNATIVES)
def test_any_size_of_at_least_one_has_a_schedule(schedule: str) -> None:
    for stages, ranks in ((1, 1), (2, 1), (4, 2), (4, 4), (12, 3)):
        for size in range(1, 40):
            name = choose(schedule, size, stages, ranks)
            assert fits(name, size, stages, ranks)
            assert name in ALTERNATIVES[schedule]


def test_an_empty_chunk_has_none() -> None:
    with pytest.raises(ValueError, match=r"0 microbatches through 2 stages.*'1f1b'.*at least 1"):
        choose("1f1b", 0, 2, 2)


def test_what_one_alternative_splits_its_only_other_may_not_hide() -> None:
    """The store is told once whether hooks can be trusted: by the schedule that was asked for, not by the fallback."""
    for schedule, names in ALTERNATIVES.items():
        if schedule not in SPLIT:
            assert not set(names) & set(SPLIT)


@pytest.mark.parametrize(("schedule", "mine", "count", "rank", "ranks"), [
    ("1f1b", [1], 2, 1, 2), ("gpipe", [0], 1, 0, 1), ("interleaved1f1b", [1, 3], 4, 1, 2), ("loopedbfs", [3, 1, 5], 6, 1, 2),
    ("zbvzerobubble", [3, 0], 4, 0, 2), ("dualpipev", [1, 2], 4, 1, 2),
])
def test_stages_that_lie_right(schedule: str, mine: list[int], count: int, rank: int, ranks: int) -> None:
    check_stages(schedule, mine, count, rank, ranks)


@pytest.mark.parametrize(("schedule", "mine", "count", "rank", "ranks", "said"), [
    ("1f1b", [0], 2, 1, 2, r"must hold stages \[1\] of 2, not \[0\]"),
    ("1f1b", [0, 2], 4, 0, 2, "one stage per rank.*change the number of stages or the size of the mesh"),
    ("interleaved1f1b", [0, 1], 4, 0, 2, r"must hold stages \[0, 2\]"),
    ("interleaved1f1b", [0, 2], 3, 0, 2, "same number of stages on each rank"),
    ("zbvzerobubble", [0, 2], 4, 0, 2, r"must hold stages \[0, 3\]"),
    ("zbvzerobubble", [0, 3, 1], 6, 0, 2, "two stages per rank"),
])
def test_stages_that_do_not(schedule: str, mine: list[int], count: int, rank: int, ranks: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_stages(schedule, mine, count, rank, ranks)


def loss(output: Any, target: Any) -> Any:
    raise AssertionError("nothing is computed")


def test_an_unknown_schedule() -> None:
    with pytest.raises(ValueError, match=r"no schedule '2f2b': take one of gpipe, 1f1b"):
        Pipeline({0: nn.Linear(1, 1)}, 2, loss, schedule="2f2b")


@pytest.mark.parametrize("schedule", SPLIT)
def test_exact_refuses_zero_bubble_schedules_by_name(schedule: str) -> None:
    with pytest.raises(ValueError, match=rf"'exact'.*{schedule!r}.*take gpipe, 1f1b.*or reduction='fast'"):
        Pipeline({0: nn.Linear(1, 1)}, 2, loss, schedule=schedule, exact=True)
