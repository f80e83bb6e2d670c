"""Buffers that forward writes: a pure function of the step, whoever computed what."""
from __future__ import annotations

import math
import random

import pytest
import torch
from gradients_double import all_reduce, split
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from recover.gradients import BufferWatch

B = 6


class Counting(nn.Module):
    """Batch norm (its running statistics change behind version counters), a counter and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] += len(x)
        return self.norm(x)


def batch(index: int) -> Tensor:
    return torch.randn(3 + index, 4, generator=torch.Generator().manual_seed(index)) * 10.0 ** (index - 3)


def run_steps(size: int, policy: str, *, exact: bool = False, steps: int = 2, seed: int = 0) -> list[Counting]:
    """`steps` steps over `size` replicas, microbatches dealt and ordered by `seed`."""
    models = [Counting() for _ in range(size)]
    watches = [BufferWatch(model.named_buffers, policy, microbatches=B, exact=exact) for model in models]  # type: ignore[arg-type]
    for step in range(steps):
        order = list(range(B))
        random.Random(seed + step).shuffle(order)
        for model, watch, work in zip(models, watches, split(order, size), strict=True):
            watch.begin()
            for index in work:
                before = [buffer.clone() for buffer in model.buffers()]
                with watch.microbatch(index):
                    model(batch(index + step))
                assert all(torch.equal(a, b) for a, b in zip(before, model.buffers(), strict=True))
        all_reduce([watch.inputs() for watch in watches], [watch.outputs() for watch in watches])
        names = [watch.commit(count=B) for watch in watches]
        assert names == [["seen", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]] * size
    return models


def test_leader_leaves_what_microbatch_0_left() -> None:
    plain = Counting()
    for step in range(2):
        plain(batch(step))
    for size in (1, 2, 3):
        for model in run_steps(size, "leader", seed=size):
            assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), model.buffers(), strict=True))


def test_sum_counts_every_microbatch_once() -> None:
    for model in run_steps(2, "sum"):
        assert int(model.seen[0]) == sum(len(batch(index + step)) for index in range(B) for step in range(2))
        assert int(model.norm.num_batches_tracked) == 2 * B


def test_mean_of_running_statistics() -> None:
    start = Counting()
    changes = []
    for index in range(B):
        model = Counting()
        model(batch(index))
        changes.append((model.norm.running_mean - start.norm.running_mean).double())
    for model in run_steps(3, "mean", steps=1):
        assert torch.allclose(model.norm.running_mean.double(), sum(changes) / B, rtol=1e-6)
        assert int(model.norm.num_batches_tracked) == 1


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), policy=st.sampled_from(["sum", "mean"]))
def test_exact_bits_do_not_depend_on_who_computed_what(seed: int, policy: str) -> None:
    reference = run_steps(1, policy, exact=True)[0]
    for size in (2, 3):
        for model in run_steps(size, policy, exact=True, seed=seed):
            assert all(torch.equal(a, b) for a, b in zip(reference.buffers(), model.buffers(), strict=True))


class Drifting(nn.Module):
    """A float64 buffer, so that no rounding to float32 hides how its sum was made."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("drift", torch.zeros(50, dtype=torch.float64))

    def forward(self, index: int) -> None:
        generator = torch.Generator().manual_seed(index)
        self.drift += torch.randn(50, dtype=torch.float64, generator=generator) * 10.0 ** index


@pytest.mark.parametrize("exact", [True, False])
def test_float64_sums_are_order_independent_only_if_exact(exact: bool) -> None:
    results = set()
    for order in (range(B), range(B - 1, -1, -1)):
        model = Drifting()
        watch = BufferWatch(model.named_buffers, "sum", microbatches=B, exact=exact)
        watch.begin()
        for index in order:
            with watch.microbatch(index):
                model(index)
        all_reduce([watch.inputs()], [watch.outputs()])
        watch.commit(count=B)
        results.add(tuple(model.drift.tolist()))
    assert len(results) == (1 if exact else 2)


def test_nan_passes_through() -> None:
    for exact in (False, True):
        model = Counting()
        watch = BufferWatch(model.named_buffers, "sum", microbatches=1, exact=exact)
        watch.begin()
        with watch.microbatch(0):
            model.table[2] = math.nan
        all_reduce([watch.inputs()], [watch.outputs()])
        assert watch.commit(count=1) == ["table"]
        assert model.table.isnan().tolist() == [False, False, True, False, False]


def test_a_missing_microbatch_is_refused() -> None:
    watch = BufferWatch(Counting().named_buffers, microbatches=2)
    watch.begin()
    with watch.microbatch(0):
        pass
    all_reduce([watch.inputs()], [watch.outputs()])
    with pytest.raises(AssertionError, match="I1"):
        watch.commit(count=2)


class Replacing(nn.Module):
    """Forward puts a new tensor in the buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self) -> None:
        self.count = self.count + 1


def test_a_replaced_buffer_is_followed() -> None:
    model = Replacing()
    watch = BufferWatch(model.named_buffers, "sum", microbatches=3)
    for _ in range(2):
        watch.begin()
        for index in range(3):
            with watch.microbatch(index):
                model()
        all_reduce([watch.inputs()], [watch.outputs()])
        assert watch.commit(count=3) == ["count"]
    assert float(model.count) == 6.0


def test_what_does_not_fit_is_watched_and_named() -> None:
    model = nn.Module()
    model.register_buffer("large", torch.zeros(100))
    model.register_buffer("small", torch.zeros(2))
    model.register_buffer("flag", torch.zeros(2, dtype=torch.bool))
    watch = BufferWatch(model.named_buffers, "sum", microbatches=1, limit=64)
    assert watch.unmanaged == ["large", "flag"]
    watch.begin()
    with watch.microbatch(0):
        model.large += 1
        model.small += 1
        model.flag[0] = True
    all_reduce([watch.inputs()], [watch.outputs()])
    assert watch.commit(count=1) == ["large", "small", "flag"]
    assert (float(model.large.sum()), float(model.small.sum()), bool(model.flag.any())) == (0.0, 2.0, False)


def test_a_changed_shape_is_refused() -> None:
    model = Replacing()
    watch = BufferWatch(model.named_buffers, microbatches=1)
    watch.begin()

    def forward() -> None:
        with watch.microbatch(0):
            model.count = torch.zeros(2)

    with pytest.raises(RuntimeError, match="count became"):
        forward()


def test_a_model_without_buffers_has_nothing_to_reduce() -> None:
    assert BufferWatch(nn.Linear(2, 2).named_buffers, microbatches=1).empty
    assert not BufferWatch(Counting().named_buffers, microbatches=1).empty


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="median"):
        BufferWatch([], "median", microbatches=1)  # type: ignore[arg-type]
