"""Exact sums: any order, any grouping, the same bits; close to the truth; NaN and inf pass through."""
from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from gradients_double import all_reduce
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recover.gradients.exact import (
    CHUNK,
    DEFAULT_EXPONENT,
    Grid,
    absorb,
    clamp_exponent,
    exponent_above,
    fold,
    level_count,
    peak_of,
)

SPECIAL = (0.0, -0.0, 1e9, -1e9, 1e30, -1e30, 3e38, 1e-45, -1e-40, 1.1754944e-38, 1.0, -0.1)


def draw(seed: int, count: int, size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Gradients of widely different scales, with spikes, denormals and zeros."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((count, size)) * 10.0 ** rng.integers(-12, 3, (count, size))
    spikes = rng.random((count, size)) < 0.1
    values[spikes] = rng.choice(np.array(SPECIAL), spikes.sum())
    return list(torch.from_numpy(values).to(dtype))


def exact_sum(gradients: list[Tensor], groups: list[list[int]], exponent: int) -> Tensor:
    """The sum as `groups` of replicas would make it: each absorbs its own, then all are reduced and folded."""
    grid = Grid(exponent, len(gradients), gradients[0].dtype)
    fines, coarses = [], []
    for group in groups:
        fine, coarse = torch.zeros(gradients[0].numel(), dtype=torch.float64), {}

        def level_sum(level: int, coarse: dict[int, Tensor] = coarse, fine: Tensor = fine) -> Tensor:
            return coarse.setdefault(level, torch.zeros_like(fine))

        for index in group:
            absorb(gradients[index], fine, level_sum, grid)
        fines.append(fine)
        coarses.append(coarse)
    total = torch.zeros_like(fines[0])
    all_reduce([[fine] for fine in fines], [[total]])
    levels = {}
    for level in {level for coarse in coarses for level in coarse}:
        parts = [coarse.get(level, torch.zeros_like(total)) for coarse in coarses]
        levels[level] = torch.zeros_like(total)
        all_reduce([[part] for part in parts], [[levels[level]]])
    fold(total, levels)
    return total


def grouping(rng: random.Random, count: int, replicas: int) -> list[list[int]]:
    order = list(range(count))
    rng.shuffle(order)
    groups: list[list[int]] = [[] for _ in range(replicas)]
    for index in order:
        groups[rng.randrange(replicas)].append(index)
    return groups


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2 ** 32 - 1), count=st.integers(1, 64), exponent=st.sampled_from([-149, -40, -3, 0, 5, 120]),
       dtype=st.sampled_from([torch.float32, torch.float64]))
def test_any_partition_in_any_order_gives_the_same_bits(seed: int, count: int, exponent: int,
                                                         dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    gradients = draw(seed, count, 50, dtype)
    sums = [exact_sum(gradients, grouping(rng, count, replicas), exponent) for replicas in (1, 2, 3, 5)]
    for other in sums[1:]:
        assert torch.equal(sums[0].view(torch.int64), other.view(torch.int64))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2 ** 32 - 1), count=st.integers(1, 64), exponent=st.sampled_from([DEFAULT_EXPONENT, 0, 3]))
def test_sum_is_close_to_the_true_one(seed: int, count: int, exponent: int) -> None:
    gradients = draw(seed, count, 50)
    got = exact_sum(gradients, [list(range(count))], exponent)
    columns = list(zip(*(gradient.double().tolist() for gradient in gradients), strict=True))
    truth = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64)
    sizes = torch.tensor([math.fsum(map(abs, column)) for column in columns], dtype=torch.float64)
    # each term is rounded to a multiple of 2^(e-40), to nearest; folding rounds in float64
    allowed = count * 2.0 ** (exponent - 41) + sizes * 2.0 ** -50
    assert bool(((got - truth).abs() <= allowed).all())


def test_plain_float64_sums_do_depend_on_the_order() -> None:
    """The negative control: without pre-rounding, the same data gives different bits in different groupings."""
    gradients = [g.double() for g in draw(1, 64, 50)]
    forwards, backwards = torch.zeros(50, dtype=torch.float64), torch.zeros(50, dtype=torch.float64)
    for gradient in gradients:
        forwards += gradient
    for gradient in reversed(gradients):
        backwards += gradient
    assert not torch.equal(forwards, backwards)


def test_ignoring_the_bound_makes_sums_depend_on_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the levels: a spike that stays in the fine sum spoils it."""
    gradients = draw(2, 64, 50)
    monkeypatch.setattr(Grid, "bound", lambda self, level: math.inf)
    rng = random.Random(0)
    sums = {tuple(exact_sum(gradients, grouping(rng, 64, 3), -3).tolist()) for _ in range(5)}
    assert len(sums) > 1


def test_folding_does_not_depend_on_who_needed_a_level_first() -> None:
    generator = torch.Generator().manual_seed(0)
    levels = {level: torch.randn(100, dtype=torch.float64, generator=generator) for level in (1, 2, 3)}
    results = []
    for order in ((1, 2, 3), (3, 1, 2)):
        fine = torch.full((100,), 1e-3, dtype=torch.float64)
        fold(fine, {level: levels[level] for level in order})
        results.append(fine)
    assert torch.equal(*results)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_pass_through(value: float) -> None:
    gradients = draw(3, 8, 20)
    gradients[5][7] = value
    for groups in ([list(range(8))], [[5, 0], [1, 2, 3], [7, 6, 4]]):
        total = exact_sum(gradients, groups, 0)
        assert math.isnan(total[7]) if math.isnan(value) else total[7] == value
        assert int(total.isfinite().sum()) == 19


def test_opposite_infinities_give_nan() -> None:
    gradients = draw(3, 2, 4)
    gradients[0][1], gradients[1][1] = math.inf, -math.inf
    assert math.isnan(exact_sum(gradients, [[0], [1]], 0)[1])


def test_float64_beyond_the_grids_counts_as_infinite() -> None:
    gradients = [torch.tensor([1e300, 1.0, -1e300, 1e200], dtype=torch.float64)]
    assert exact_sum(gradients, [[0]], 0).tolist() == [math.inf, 1.0, -math.inf, 1e200]


def test_chunks_join_without_a_seam() -> None:
    gradient = torch.linspace(-1, 1, 2 * CHUNK + 3)
    gradient[CHUNK] = 1e20                      # coarse in the second chunk only
    total = exact_sum([gradient], [[0]], 1)
    assert torch.equal(total.float(), torch.where(gradient.abs() > 1e-3, gradient, total.float()))
    assert float((total - gradient.double()).abs().max()) <= 2.0 ** -40


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("microbatches", [1, 64, 1 << 19])
def test_levels_reach_the_largest_value_from_the_lowest_exponent(dtype: torch.dtype, microbatches: int) -> None:
    grid = Grid(clamp_exponent(-10_000, dtype), microbatches, dtype)
    largest = torch.finfo(dtype).max if dtype == torch.float32 else 2.0 ** 900
    assert grid.level(largest * (1 - 2.0 ** -53)) <= level_count(dtype, microbatches)
    for level in range(1, level_count(dtype, microbatches) + 1):
        unit = grid.constant(level) / 1.5 * 2.0 ** -52
        assert unit / 2 < grid.bound(level - 1)     # the remainder fits one level below
        assert math.isfinite(grid.constant(level))


@pytest.mark.parametrize(("peak", "exponent"), [(0.75, 0), (1.0, 1), (1e-45, -148), (0.0, None), (math.nan, None),
                                                (math.inf, None)])
def test_exponent_bounds_the_peak(peak: float, exponent: int | None) -> None:
    peak = float(torch.tensor(peak))
    assert exponent_above(peak, torch.float32) == exponent
    assert exponent is None or peak < 2.0 ** exponent


def test_peak_sees_both_signs_and_nan() -> None:
    assert peak_of(torch.tensor([1.0, -3.0])) == 3.0
    assert math.isnan(peak_of(torch.tensor([1.0, math.nan])))
    assert peak_of(torch.empty(0)) == 0.0
