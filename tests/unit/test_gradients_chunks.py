"""Passes of several microbatches (a pipeline's chunks), withheld gradients, and parameters whose use is told apart."""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from gradients_double import Cluster
from torch import Tensor, nn

from recover.errors import LateGradient
from recover.gradients import Committed, Entry, GradientStore
from recover.gradients.passes import Pass
from recover.gradients.progress import Progress

B = 6
SMALL: dict[str, Any] = dict(microbatches=B, bucket_bytes=60, first_bucket_bytes=30)


class Net(nn.Module):
    """Two stages; `extra` is used by odd microbatches only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second, self.extra = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 3)


def halves(model: nn.Module, index: int) -> tuple[Tensor, Tensor]:
    """Losses of the first and of the second stage by itself."""
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(index)) * 10.0 ** (3 * index)
    one = model.first(x).square().mean()
    two = model.second(x.repeat(1, 2)[:, :4]).square().mean()
    return one, two + model.extra(x).square().mean() if index % 2 else two


def loss_of(model: nn.Module, index: int) -> Tensor:
    return sum(halves(model, index), torch.zeros(()))


def one_stage(model: nn.Module, entry: Entry) -> None:
    for place, index in enumerate(entry.indices):
        loss = loss_of(model, index)
        entry.losses[place] = loss
        loss.backward()
        entry.boundary(index)


def two_stages(model: nn.Module, entry: Entry) -> None:
    """As interleaved schedules do: the second stage's backward of a microbatch, later the first stage's."""
    for place in range(len(entry.indices) + 1):
        if place < len(entry.indices):
            index = entry.indices[place]
            entry.losses[place] = loss_of(model, index).detach()
            halves(model, index)[1].backward()
            entry.boundary(index)
        if place:
            halves(model, entry.indices[place - 1])[0].backward()
            entry.boundary(entry.indices[place - 1])


class Chunked(Cluster):
    """Members compute their work in chunks, the way `run_chunk` does."""

    run_chunk: Callable[[nn.Module, Entry], None] = staticmethod(one_stage)     # type: ignore[assignment]

    def chunks(self, work: Sequence[Sequence[Sequence[int]]]) -> None:
        for member, (model, store) in enumerate(zip(self.models, self.stores, strict=True)):
            self.launched[member] = []
            for chunk in work[member]:
                launch = self.launched[member].append if chunk is work[member][-1] else None
                with store.microbatch(chunk, member, launch=launch) as entry:
                    self.run_chunk(model, entry)

    def step_of(self, work: Sequence[Sequence[Sequence[int]]]) -> Committed:
        self.begin()
        self.chunks(work)
        self.reduce()
        done = self.commit(count=B)
        self.adopt(done)
        return done[0]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def reference(reduction: str) -> tuple[list[Tensor], Committed]:
    cluster = Cluster(1, Net, loss_of, reduction=reduction, **SMALL)
    if reduction == "exact":
        cluster.calibrate()
    for _ in range(2):
        done = cluster.run([list(range(B))], count=B)
        cluster.adopt(done)
    return gradients(cluster.models[0]), done[0]


WORKS = [[[[0, 1, 2, 3, 4, 5]]], [[[3, 1], [0]], [[2, 5, 4]]], [[[0], [1], [2]], [[3, 4, 5]]]]


@pytest.mark.parametrize("run_chunk", [one_stage, two_stages])
@pytest.mark.parametrize("work", WORKS)
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_chunks_give_what_single_microbatches_give(reduction: str, work: list[list[list[int]]],
                                                   run_chunk: Callable[[nn.Module, Entry], None]) -> None:
    cluster = Chunked(len(work), Net, loss_of, reduction=reduction, **SMALL)
    cluster.run_chunk = run_chunk       # type: ignore[method-assign]
    if reduction == "exact":
        cluster.calibrate()
    for _ in range(2):
        done = cluster.step_of(work)
    wanted, single = reference(reduction)
    for mine, theirs in zip(gradients(cluster.models[0]), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
        assert reduction == "fast" or torch.equal(mine, theirs)
    assert done.losses == single.losses and done.used == single.used
    assert cluster.launched[0] == list(range(len(cluster.stores[0].buckets)))


def test_if_boundaries_absorbed_nothing_exact_would_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above."""
    monkeypatch.setattr(Pass, "boundary", lambda self, index: self.progress.boundary(self.indices.index(index)))
    cluster = Chunked(1, Net, loss_of, reduction="exact", **SMALL)
    cluster.calibrate()
    for _ in range(2):
        cluster.step_of(WORKS[0])
    assert any(not torch.equal(a, b) for a, b in zip(gradients(cluster.models[0]), reference("exact")[0], strict=True))


def test_exact_wants_boundaries_of_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Entry, "boundary", lambda self, index: None)
    cluster = Chunked(1, Net, loss_of, reduction="exact", **SMALL)
    cluster.calibrate()
    with pytest.raises(RuntimeError, match=r"call boundary\(index\)"):
        cluster.step_of(WORKS[0])


@pytest.mark.parametrize("run_chunk", [one_stage, two_stages])
def test_what_is_learned_does_not_depend_on_the_chunk(run_chunk: Callable[[nn.Module, Entry], None]) -> None:
    lessons = []
    for work in ([[[0], [1, 2, 3, 4, 5]]], [[[3, 1, 0], [2, 4, 5]]], [list(map(list, zip(range(B))))]):
        cluster = Chunked(1, Net, loss_of, **SMALL)
        cluster.run_chunk = run_chunk   # type: ignore[method-assign]
        lessons.append(cluster.step_of(work).learned)
    assert lessons[0] == lessons[1] == lessons[2] and lessons[0] is not None
    assert sorted(lessons[0]["fires"]) == [0, 0, 1, 1, 1, 1]


def test_buckets_leave_during_the_last_microbatch_of_a_chunk() -> None:
    cluster = Chunked(1, Net, loss_of, **SMALL)
    cluster.step_of([[list(range(B))]])
    store, model, launched = cluster.stores[0], cluster.models[0], []
    assert len(store.buckets) > 2
    cluster.begin()
    with store.microbatch([0, 2, 4], 0, launch=launched.append) as entry:
        for index in (0, 2):
            loss_of(model, index).backward()
            entry.boundary(index)
        assert launched == [], "a third microbatch is to come"
        loss_of(model, 4).backward()
        early = list(launched)
    assert early and launched == list(range(len(store.buckets)))


def test_a_gradient_after_its_bucket_left_is_late_in_chunks_too() -> None:
    cluster = Chunked(1, Net, loss_of, **SMALL)
    cluster.step_of([[list(range(B))]])
    store, model = cluster.stores[0], cluster.models[0]
    cluster.begin()
    with store.microbatch(list(range(B)), 0, launch=lambda k: None):
        for index in range(B):
            loss_of(model, index).backward()
        for index in range(2):
            loss_of(model, index).backward()
    cluster.reduce()
    with pytest.raises(LateGradient):
        cluster.commit(count=B)


@pytest.mark.parametrize("field", ["losses", "weights"])
def test_each_microbatch_of_a_chunk_has_a_loss_and_a_weight(field: str) -> None:
    cluster = Chunked(1, Net, loss_of, **SMALL)
    cluster.begin()

    def script() -> None:
        with cluster.stores[0].microbatch([0, 1], 0, launch=lambda k: None) as entry:
            getattr(entry, field).append(0.0)
            loss_of(cluster.models[0], 0).backward()

    with pytest.raises(ValueError, match=rf"3 {field} for a pass of 2"):
        script()
    with pytest.raises(RuntimeError, match="was not finished"):
        cluster.stores[0].begin(1)


def test_an_entry_is_short_for_one() -> None:
    one, two = Entry((3,)), Entry((3, 4))
    one.loss, one.weight, two.weight = 2.0, 5.0, 7.0
    assert (one.losses, one.weights, two.weights) == ([2.0], [5.0], [7.0, 7.0]) and math.isnan(two.losses[1])
    with pytest.raises(ValueError, match="set `losses`"):
        two.loss = 1.0
    with pytest.raises(ValueError, match="not in this pass"):
        two.boundary(5)


def test_a_bad_gradient_is_ascribed_within_an_exact_chunk() -> None:
    def spiked(model: nn.Module, index: int) -> Tensor:
        return loss_of(model, index) * (math.inf if index == 4 else 1.0)

    def chunk(model: nn.Module, entry: Entry) -> None:
        for index in entry.indices:
            spiked(model, index).backward()
            entry.boundary(index)

    cluster = Chunked(1, Net, spiked, reduction="exact", **SMALL)
    cluster.run_chunk = chunk           # type: ignore[method-assign]
    cluster.calibrate()
    done = cluster.step_of([[list(range(B))]])
    assert done.nonfinite is not None and done.nonfinite[0] == 4


# -- without hooks -----------------------------------------------------------------------------------------------------


def behind_hooks(model: nn.Module, entry: Entry) -> None:
    """Weights by hand, as zero-bubble schedules do; biases by backward."""
    for index in entry.indices:
        weights = [model.first.weight, model.second.weight] + ([model.extra.weight] if index % 2 else [])
        biases = [model.first.bias, model.second.bias] + ([model.extra.bias] if index % 2 else [])
        found = torch.autograd.grad(loss_of(model, index), weights)
        torch.autograd.backward(loss_of(model, index), inputs=biases)
        for weight, gradient in zip(weights, found, strict=True):
            weight.grad += gradient
        entry.losses[entry.indices.index(index)] = loss_of(model, index).detach()
        entry.boundary(index)


def test_writes_without_hooks_are_summed_once_announced() -> None:
    cluster = Chunked(2, Net, loss_of, **SMALL)
    cluster.run_chunk = behind_hooks    # type: ignore[method-assign]
    for store in cluster.stores:
        store.unhooked("ZBV")
    for _ in range(2):
        done = cluster.step_of([[[0, 1], [2]], [[3, 4, 5]]])
    wanted, single = reference("fast")
    for mine, theirs in zip(gradients(cluster.models[0]), wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert done.losses == single.losses
    assert all(done.used.values())


def test_writes_without_hooks_are_an_error_unless_announced() -> None:
    cluster = Chunked(1, Net, loss_of, **SMALL)
    cluster.run_chunk = behind_hooks    # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"wrote into \.grad"):
        cluster.step_of([[list(range(B))]])


def test_exact_refuses_a_schedule_without_hooks_by_name() -> None:
    store = GradientStore(list(Net().named_parameters()), microbatches=2, reduction="exact")
    with pytest.raises(ValueError, match="can not run ScheduleZBVZeroBubble"):
        store.unhooked("ScheduleZBVZeroBubble")


# -- withheld, tracked -------------------------------------------------------------------------------------------------


def test_sums_that_lack_what_is_withheld_can_not_be_read() -> None:
    cluster = Cluster(1, Net, loss_of, **SMALL)
    store, model = cluster.stores[0], cluster.models[0]
    with pytest.raises(AssertionError, match="may not be withheld"), store_begun(store).microbatch(0, 0, withheld=True):
        pass                            # firings are not learned yet
    cluster.adopt(cluster.run([list(range(B))], count=B))
    cluster.begin()
    for index in range(B):
        with store.microbatch(index, 0, withheld=True) as entry:
            entry.loss = loss_of(model, index).detach()     # no hook fires
    assert store.withheld == tuple(range(B))
    with pytest.raises(AssertionError, match="withheld"):
        store.inputs(0)
    with pytest.raises(AssertionError, match="leak"):
        store.begin(7)
    with store.flush(0):
        sum((loss_of(model, index) for index in range(B)), torch.zeros(())).backward()
    cluster.reduce()
    assert cluster.commit(count=B)[0].losses == reference("fast")[1].losses
    for mine, theirs in zip(gradients(model), reference("fast")[0], strict=True):
        torch.testing.assert_close(mine, theirs)


def store_begun(store: GradientStore) -> GradientStore:
    store.begin(0)
    return store


def test_use_of_tracked_parameters_is_what_is_told() -> None:
    """As under FSDP: every hook fires in every microbatch, with zeros where this rank used nothing."""
    def everything(model: nn.Module, index: int) -> Tensor:
        return loss_of(model, index) + sum((p.sum() * 0 for p in model.parameters()), torch.zeros(()))

    cluster = Cluster(1, Net, everything, **SMALL)
    store, model = cluster.stores[0], cluster.models[0]
    touches = store.track([model.extra.weight, model.extra.bias, model.first.weight])
    for used in ((), (1, 3)):
        cluster.begin()
        for index in range(B):
            with store.microbatch(index, 0, launch=(lambda k: None) if index == B - 1 else None) as entry:
                entry.loss = loss = everything(model, index)
                loss.backward()
                touches[id(model.first.weight)](model.first.weight)
                if index in used:
                    touches[id(model.extra.weight)](model.extra.weight)
        cluster.reduce()
        done = cluster.commit(count=B)[0]
        assert (done.used["extra.weight"], done.used["first.weight"], done.used["first.bias"]) == (len(used), B, B)
        assert store.unused(done) == (["extra.bias"] if used else ["extra.weight", "extra.bias"])
        assert model.extra.weight.grad is not None, "another data rank may have used it"
        store.drop(store.unused(done))
        assert (model.extra.weight.grad is None) == (not used) and model.extra.bias.grad is None
        assert model.first.weight.grad is not None


# -- progress ----------------------------------------------------------------------------------------------------------


def test_firings_are_counted_per_microbatch() -> None:
    progress = Progress([[0, 1], [2]], 3, None, (), 3, lesson=1)
    for p in (0, 0, 1):
        progress.fire(p)
    assert progress.boundary(0) == {0} and progress.open == 1
    for p in (0, 0, 2):
        progress.fire(p)
    assert progress.boundary(1) == {0, 1} and progress.open == 2 and not progress.bounded
    progress.fire(0)
    assert [progress.used(p) for p in range(3)] == [3, 1, 1]
    progress.boundary(2)
    assert [progress.used(p) for p in range(3)] == [3, 1, 1]
    assert [progress.lesson(p) for p in range(3)] == [(2, 2), (0, 0), (1, 3)]


def test_without_boundaries_firings_are_shared_out_upwards() -> None:
    progress = Progress([[0, 1], [2]], 3, None, (), 3)
    for p in (0,) * 6 + (1,):
        progress.fire(p)
    assert [progress.lesson(p) for p in range(3)] == [(2, 6), (1, 7), (0, 0)]
    assert [progress.used(p) for p in range(3)] == [3, 1, 0]
