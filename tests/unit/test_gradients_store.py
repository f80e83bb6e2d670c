"""The store on its own and as several replicas: what a script sees must be what a plain loop gives."""
from __future__ import annotations

import gc
import json
import math
import weakref
from collections.abc import Callable

import pytest
import torch
from gradients_double import Cluster, reduce_bucket, split
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recover.errors import LateGradient
from recover.gradients import GradientStore

B = 8


class Net(nn.Module):
    """Tied embedding and head, an unused parameter registered last (so first in reverse order), no buffers."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(*shape, generator=generator) / 4).to(dtype))

        self.embed, self.first, self.bias = parameter(11, 6), parameter(6, 9), parameter(9)
        self.second = parameter(9, 6)
        self.unused = parameter(5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.embed[tokens] @ self.first + self.bias)
        return hidden @ self.second @ self.embed.T


def tokens(index: int) -> Tensor:
    return torch.randint(11, (7,), generator=torch.Generator().manual_seed(100 + index))


def net_loss(model: nn.Module, index: int) -> Tensor:
    x = tokens(index)
    return nn.functional.cross_entropy(model(x[:-1]).float(), x[1:])


def small(**options: object) -> dict[str, object]:
    """Options that give several buckets for a tiny model."""
    return {"microbatches": B, "bucket_bytes": 300, "first_bucket_bytes": 100, **options}


def plain_gradients(model: nn.Module, loss: Callable[[nn.Module, int], Tensor] = net_loss) -> list[dict[str, Tensor]]:
    """Per microbatch, each parameter's gradient in its own dtype (absent where unused)."""
    gradients = []
    for index in range(B):
        model.zero_grad()
        loss(model, index).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad()
    return gradients


def grads(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


# -- against a plain loop ----------------------------------------------------------------------------------------------

def test_five_clipped_adamw_steps_equal_a_plain_loop_bit_for_bit() -> None:
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05, weight_decay=0.1)
    cluster = Cluster(1, Net, net_loss, **small())
    managed = cluster.models[0]
    other = torch.optim.AdamW(managed.parameters(), lr=0.05, weight_decay=0.1)
    norms = []
    for _ in range(5):
        optimizer.zero_grad()
        for index in range(B):
            net_loss(plain, index).backward()
        for p in plain.parameters():
            if p.grad is not None:
                p.grad.mul_(1 / B)
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
        optimizer.step()
        cluster.adopt(cluster.run([list(range(B))], count=B))
        assert torch.equal(nn.utils.clip_grad_norm_(managed.parameters(), 0.1), norms[-1])
        other.step()
        other.zero_grad()
        for a, b in zip(plain.parameters(), managed.parameters(), strict=True):
            assert torch.equal(a, b)
    assert min(norms) > 0.1                             # clipping did something
    assert managed.unused.grad is None
    assert managed.unused not in other.state            # AdamW never saw it


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_between_microbatches_is_harmless(set_to_none: bool) -> None:
    calm, restless = Cluster(1, Net, net_loss, **small()), Cluster(1, Net, net_loss, **small())
    optimizer = torch.optim.SGD(restless.models[0].parameters(), lr=0.1)

    def loss(model: nn.Module, index: int) -> Tensor:
        return net_loss(model, index)

    calm.run([list(range(B))], count=B)
    restless.begin()
    store = restless.stores[0]
    for index in range(B):
        optimizer.zero_grad(set_to_none=set_to_none)
        with store.microbatch(index, 0):
            loss(restless.models[0], index).backward()
        optimizer.zero_grad(set_to_none=set_to_none)
    restless.reduce()
    restless.commit(count=B)
    for a, b in zip(calm.models[0].parameters(), restless.models[0].parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_what_a_script_does_to_grad_never_touches_reduced(reduction: str) -> None:
    cluster = Cluster(1, Net, net_loss, **small(reduction=reduction))
    cluster.run([list(range(B))], count=B)
    store, model = cluster.stores[0], cluster.models[0]
    before = [[tensor.clone() for tensor in store.outputs(k)] for k in range(len(store.buckets))]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    store.begin(1)
    with store.microbatch(0, 0):
        net_loss(model, 0).backward()
    for k, tensors in enumerate(before):
        assert all(torch.equal(a, b) for a, b in zip(tensors, store.outputs(k), strict=True))


@pytest.mark.parametrize("count", [8, 64])
def test_fast_sums_are_within_1e6_of_float64(count: int) -> None:
    build = Net
    cluster = Cluster(3, build, net_loss, **small(microbatches=count))
    cluster.run(split(range(count), 3), count=count)
    model, truth = Net(), {}
    for index in range(count):
        model.zero_grad()
        net_loss(model, index).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                truth[name] = truth.get(name, 0) + p.grad.double()
    errors = [float((grad.double() * count - truth[name]).norm() / truth[name].norm())
              for name, grad in grads(cluster.models[1]).items() if grad is not None]
    assert len(errors) == 4
    assert max(errors) <= 1e-6


@pytest.mark.parametrize("spike", [1.0, 1e9, 1e30])
def test_exact_bits_do_not_depend_on_the_schedule(spike: float) -> None:
    """Three steps with calibration, over 1, 2, 3 and 5 replicas, in different orders, with a spike in a microbatch."""
    def loss(model: nn.Module, index: int) -> Tensor:
        return net_loss(model, index) * (spike if index == 5 else 1.0)

    results = []
    for size in (1, 2, 3, 5):
        cluster = Cluster(size, Net, loss, **small(reduction="exact"))
        cluster.calibrate()
        history = []
        for step in range(3):
            order = list(range(B)) if step % 2 else list(reversed(range(B)))
            done = cluster.run(split(order, size), count=B)
            cluster_levels = [store.state()["exponents"] for store in cluster.stores]
            assert all(each == cluster_levels[0] for each in cluster_levels)
            for model in cluster.models:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            history.append([p.detach().clone() for p in cluster.models[-1].parameters()])
            history.append([torch.tensor(done[0].loss), torch.tensor(cluster_levels[0])])
            cluster.adopt(done)
        results.append(history)
    for other in results[1:]:
        assert all(torch.equal(a, b) for one, two in zip(results[0], other, strict=True)
                   for a, b in zip(one, two, strict=True))


def test_exact_is_close_to_fast() -> None:
    fast, exact = Cluster(2, Net, net_loss, **small()), Cluster(2, Net, net_loss, **small(reduction="exact"))
    exact.calibrate()
    a, b = (cluster.run(split(range(B), 2), count=B)[0] for cluster in (fast, exact))
    assert a.loss == pytest.approx(b.loss, rel=1e-6)
    for one, two in zip(fast.models[0].parameters(), exact.models[0].parameters(), strict=True):
        assert (one.grad is None and two.grad is None) or torch.allclose(one.grad, two.grad, rtol=1e-4, atol=1e-7)


def test_calibration_leaves_nothing_behind() -> None:
    a, b = Cluster(1, Net, net_loss, **small()), Cluster(1, Net, net_loss, **small())
    a.calibrate()
    for cluster in (a, b):
        cluster.run([list(range(B))], count=B)
    for one, two in zip(a.models[0].parameters(), b.models[0].parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, two.grad)


# -- memory, dtypes ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("reduction", "bytes_each"), [("fast", 8), ("exact", 20)])
def test_bytes_per_parameter(reduction: str, bytes_each: int) -> None:
    cluster = Cluster(1, Net, net_loss, **small(reduction=reduction))
    cluster.run([list(range(B))], count=B)
    storages = {}
    for bucket in cluster.stores[0].buckets:
        for tensor in (bucket.local, bucket.reduced, bucket.scratch):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    for p in cluster.models[0].parameters():
        if p.grad is not None:
            assert p.grad.untyped_storage().data_ptr() in storages      # no memory of its own
    assert sum(storages.values()) == bytes_each * sum(p.numel() for p in cluster.models[0].parameters())


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_bfloat16_accumulates_in_float32(reduction: str) -> None:
    def build() -> Net:
        return Net(torch.bfloat16)

    truth: dict[str, Tensor] = {}
    for gradients in plain_gradients(build()):
        for name, gradient in gradients.items():
            truth[name] = truth.get(name, 0) + gradient.float()
    cluster = Cluster(1, build, net_loss, **small(reduction=reduction))
    optimizer = torch.optim.AdamW(cluster.models[0].parameters())
    for _ in range(2):
        cluster.run([list(range(B))], count=B)
        for name, grad in grads(cluster.models[0]).items():
            if grad is not None:
                assert grad.dtype == torch.bfloat16
                if cluster.step == 1:       # a parameter used twice in one pass is summed in float32 too: not the same
                    torch.testing.assert_close(grad, (truth[name] / B).bfloat16(), rtol=0.01, atol=1e-4)
        optimizer.step()
        optimizer.zero_grad()
    assert {bucket.scratch.dtype for bucket in cluster.stores[0].buckets} == {torch.float32}


def test_bfloat16_small_terms_are_not_lost() -> None:
    """64 terms of 2^-8 beside a 1: a bfloat16 sum would lose every one of them."""
    def build() -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        return model

    def loss(model: nn.Module, index: int) -> Tensor:
        return (model.w * (1.0 if index == 0 else 2.0 ** -9)).sum()

    cluster = Cluster(1, build, loss, microbatches=65)
    cluster.run([list(range(65))], count=65)
    assert cluster.stores[0].buckets[0].reduced.tolist() == [1 + 64 * 2.0 ** -9] * 3


def test_mixed_dtypes_have_buckets_of_their_own() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.a = nn.Parameter(torch.ones(3))
        model.b = nn.Parameter(torch.ones(3, dtype=torch.float64))
        return model

    cluster = Cluster(2, build, lambda model, index: (model.a.double() * model.b).sum() * (index + 1), microbatches=3)
    cluster.run([[0, 2], [1]], count=3)
    model = cluster.models[0]
    assert model.a.grad.tolist() == model.b.grad.tolist() == [2.0] * 3
    assert (model.a.grad.dtype, model.b.grad.dtype) == (torch.float32, torch.float64)


def test_strides_of_dense_parameters_are_kept() -> None:
    parameter = nn.Parameter(torch.randn(4, 3).t())
    store = GradientStore([("w", parameter)], microbatches=1)
    assert store.buckets[0].views[0].stride() == parameter.stride()
    sliced = nn.Parameter(torch.randn(4, 6)[:, ::2])
    assert GradientStore([("w", sliced)], microbatches=1).buckets[0].views[0].stride() == (3, 1)


# -- overlap and learning ----------------------------------------------------------------------------------------------

def test_buckets_leave_during_backward_once_learned() -> None:
    cluster = Cluster(2, Net, net_loss, **small())
    order: list[object] = []
    for step in range(2):
        cluster.begin()
        for member, store in enumerate(cluster.stores):
            for index in (0, 1, 2, 3):
                mine = 4 * member + index
                launch = order.append if index == 3 and member == 0 else None
                with store.microbatch(mine, member, launch=launch):
                    net_loss(cluster.models[member], mine).backward()
                    if launch:
                        order.append("end of backward")
        cluster.reduce()
        cluster.adopt(cluster.commit(count=B))
        count = len(cluster.stores[0].buckets)
        if step == 0:
            assert order == ["end of backward", *range(len(cluster.stores[0].retired))]
        else:
            assert order == [*range(count - 1), "end of backward", count - 1]
        order.clear()
    assert len(cluster.stores[0].buckets) > 2
    assert cluster.stores[0].learned == cluster.stores[1].learned
    assert [member.name for member in cluster.stores[0].buckets[-1].members][-1] == "unused"


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_what_is_launched_is_finished(reduction: str) -> None:
    """At launch(k), payload and tail are already what they are at the end."""
    cluster = Cluster(1, Net, net_loss, **small(reduction=reduction))
    cluster.adopt(cluster.run([list(range(B))], count=B))
    store, seen = cluster.stores[0], {}
    cluster.begin()
    for index in range(B):
        launch = (lambda k: seen.update({k: [t.clone() for t in store.inputs(k)]})) if index == B - 1 else None
        with store.microbatch(index, 0, launch=launch) as entry:
            entry.loss = 3.0
            net_loss(cluster.models[0], index).backward()
    assert sorted(seen) == list(range(len(store.buckets)))
    for k, tensors in seen.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, store.inputs(k), strict=True))
        assert tensors[1][store.buckets[k].tail.count].tolist() == [1.0] * B


def test_only_wanted_buckets_are_launched() -> None:
    cluster = Cluster(1, Net, net_loss, **small())
    cluster.begin()
    cluster.compute([list(range(B))], wanted=[2, 1])
    assert cluster.launched == [[1, 2]]


class Shared(nn.Module):
    """One layer, used three times; the first use is checkpointed re-entrantly inside a checkpointed block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.early = nn.Linear(5, 5)
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.early(x)
        for _ in range(3):
            x = checkpoint(lambda y: torch.tanh(self.layer(y)), x, use_reentrant=True)
        return x


def shared_loss(model: nn.Module, index: int) -> Tensor:
    x = torch.randn(2, 5, generator=torch.Generator().manual_seed(index))
    return model(x).square().sum()


def test_a_shared_layer_under_reentrant_checkpointing_is_whole() -> None:
    truth: dict[str, Tensor] = {}
    for gradients in plain_gradients(Shared(), shared_loss):
        for name, gradient in gradients.items():
            truth[name] = truth.get(name, 0) + gradient
    cluster = Cluster(1, Shared, shared_loss, **small(bucket_bytes=100))
    for _ in range(2):
        cluster.adopt(cluster.run([list(range(B))], count=B))
        for name, grad in grads(cluster.models[0]).items():
            torch.testing.assert_close(grad, truth[name] / B)
    learned = cluster.stores[0].learned
    assert learned is not None
    assert learned["fires"] == [1, 1, 3, 3]


def test_trusting_the_first_firing_is_noticed_by_everyone() -> None:
    """The negative control of learning: expect one firing of the shared layer, and the gradient comes late."""
    cluster = Cluster(2, Shared, shared_loss, **small(bucket_bytes=100, first_bucket_bytes=100))
    for store in cluster.stores:
        store.adopt({"fires": [1, 1, 1, 1], "order": [3, 4, 1, 2]})
    cluster.begin()
    cluster.compute([[0, 1, 2, 3], [4, 5, 6, 7]])
    assert cluster.launched[0] == list(range(len(cluster.stores[0].buckets)))
    cluster.reduce()
    for store in cluster.stores:
        with pytest.raises(LateGradient, match=r"layer.* microbatch 3 of step 0"):
            store.commit(count=B)


def conditional_loss(model: nn.Module, index: int) -> Tensor:
    """`unused` gets a gradient in microbatch 6 only."""
    extra = model.unused.sum() if index == 6 else 0.0
    return net_loss(model, index) + extra


def test_a_parameter_that_microbatch_0_does_not_use_is_never_late() -> None:
    cluster = Cluster(2, Net, conditional_loss, **small())
    for _ in range(2):
        done = cluster.run([[0, 1, 2, 3, 4, 5], [7, 6]], count=B)
        cluster.adopt(done)
        assert done[0].used["unused"] == 1
        assert cluster.models[0].unused.grad.tolist() == [1 / B] * 5


def test_old_buffers_stay_for_one_step_after_a_new_layout() -> None:
    cluster = Cluster(1, Net, net_loss, **small())
    store = cluster.stores[0]
    done = cluster.run([list(range(B))], count=B)
    kept = [bucket.reduced.clone() for bucket in store.buckets]
    cluster.adopt(done)
    store.begin(1)
    assert all(torch.equal(a, b.reduced) for a, b in zip(kept, store.retired, strict=True))
    gone = [weakref.ref(bucket) for bucket in store.retired]
    gc.disable()                        # nothing may keep them but what is about to let go: no cycle that waits for a collection
    try:
        store.begin(2)
        assert store.retired == ()
        assert [bucket() for bucket in gone] == [None] * len(gone)
    finally:
        gc.enable()


# -- what the tails say ------------------------------------------------------------------------------------------------

def test_losses_members_and_uses_travel() -> None:
    cluster = Cluster(3, Net, net_loss, **small())
    done = cluster.run([[0, 3, 6], [1, 4, 7], [2, 5]], count=B)
    losses = [float(net_loss(Net(), index).detach()) for index in range(B)]
    assert all(each == done[0] for each in done[1:])
    assert done[0].losses == tuple(losses)
    assert done[0].loss == sum(losses) / B
    assert done[0].who == {index: index % 3 for index in range(B)}
    assert done[0].used == {"embed": B, "first": B, "bias": B, "second": B, "unused": 0}
    assert done[0].nonfinite is None


def test_a_loss_that_nobody_told_is_nan_and_harms_nothing_else() -> None:
    cluster = Cluster(1, Net, net_loss, **small())
    cluster.begin()
    for index in range(B):
        with cluster.stores[0].microbatch(index, 0) as entry:
            net_loss(cluster.models[0], index).backward()
            if index:
                entry.loss = 1.0
    cluster.reduce()
    done = cluster.commit(count=B)[0]
    assert math.isnan(done.loss)
    assert done.losses[1:] == (1.0,) * (B - 1)
    assert done.nonfinite is None


def test_token_weights_divide_by_the_global_weight() -> None:
    def loss(model: nn.Module, index: int) -> Tensor:
        return net_loss(model, index) * index       # a sum over `index` tokens: microbatch 0 has none

    cluster = Cluster(2, Net, loss, **small())
    cluster.weight = float
    done = cluster.run(split(range(B), 2), count=B, weighted=True)[1]
    total = sum(range(B))
    model = Net()
    (sum(net_loss(model, index) * index for index in range(B)) / total).backward()
    torch.testing.assert_close(cluster.models[1].first.grad, model.first.grad)
    assert done.weights == tuple(map(float, range(B)))
    assert done.loss == pytest.approx(sum(done.losses) / total)


def test_no_weight_at_all_is_an_error() -> None:
    cluster = Cluster(1, Net, net_loss, **small())
    cluster.weight = lambda index: 0.0
    with pytest.raises(ValueError, match="zero"):
        cluster.run([list(range(B))], count=B, weighted=True)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_the_first_nonfinite_gradient_is_named(reduction: str, value: float) -> None:
    def loss(model: nn.Module, index: int) -> Tensor:
        poison = (model.second * value).sum() if index in (5, 6) else 0.0
        return net_loss(model, index) + poison

    cluster = Cluster(2, Net, loss, **small(reduction=reduction))
    cluster.calibrate()
    exponents = cluster.stores[0].state()["exponents"]
    done = cluster.run([[6, 4, 2, 0], [7, 5, 3, 1]], count=B)
    assert [each.nonfinite for each in done] == [(5, "second")] * 2
    assert not bool(cluster.models[0].second.grad.isfinite().any())
    assert bool(cluster.models[0].bias.grad.isfinite().all())
    assert cluster.stores[0].state()["exponents"] == exponents      # a skipped step keeps them


def test_a_sum_that_overflows_is_found_before_the_update() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.ones(2))
        return model

    cluster = Cluster(2, build, lambda model, index: model.w.sum() * 3e38, microbatches=2)
    assert cluster.run([[0], [1]], count=2)[0].nonfinite == (None, "w")


def test_a_finite_gradient_whose_total_overflows_is_not_accused() -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.w = nn.Parameter(torch.ones(9))
        return model

    cluster = Cluster(1, build, lambda model, index: model.w.sum() * 1e38, microbatches=1)
    assert cluster.run([[0]], count=1)[0].nonfinite is None


# -- I1 and other guards -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("work", [[[0, 1, 2, 3], [4, 5, 6]], [[0, 1, 2, 3, 4], [4, 5, 6, 7]],
                                  [[0, 1, 2, 3], [3, 4, 5, 6]]])
def test_commit_refuses_missing_and_doubled_microbatches(work: list[list[int]]) -> None:
    with pytest.raises(AssertionError, match="I1: bucket 0 of step 0"):
        Cluster(2, Net, net_loss, **small()).run(work, count=B)


def test_commit_refuses_buckets_with_different_microbatches() -> None:
    cluster = Cluster(1, Net, net_loss, **small())
    cluster.begin()
    cluster.compute([[0, 1]])
    cluster.reduce()
    tail = cluster.stores[0].buckets[1].tail
    cluster.stores[0].outputs(1)[1][tail.count] = torch.tensor([1.0, 0, 1, 0, 0, 0, 0, 0], dtype=torch.float64)
    with pytest.raises(AssertionError, match="I1: bucket 1"):
        cluster.commit(count=2)


def test_a_shrinking_batch_divides_by_what_is_inside() -> None:
    cluster = Cluster(1, Net, net_loss, **small())
    done = cluster.run([[0, 1, 2]], count=3)[0]
    assert done.loss == pytest.approx(sum(float(net_loss(Net(), index).detach()) for index in range(3)) / 3)


def test_a_failed_bucket_is_redone_with_recomputed_microbatches() -> None:
    """Member 2 dies after bucket 0 was reduced: 0 is forwarded, the others are redone; the result is as without it."""
    for reduction in ("fast", "exact"):
        calm, hit = (Cluster(size, Net, net_loss, **small(reduction=reduction)) for size in (1, 3))
        for cluster in (calm, hit):
            cluster.calibrate()
        calm.run([list(range(B))], count=B)
        hit.begin()
        hit.compute([[0, 1, 2], [3, 4, 5], [6, 7]])
        reduce_bucket(hit.stores, 0)
        hit.stores, hit.models = hit.stores[:2], hit.models[:2]
        hit.stores[1].outputs(0)[0].fill_(math.nan)             # only survivor 0 has it, and forwards
        for source, target in zip(hit.stores[0].outputs(0), hit.stores[1].outputs(0), strict=True):
            target.copy_(source)
        hit.compute([[6], [7]], wanted=range(1, len(hit.stores[0].buckets)))
        for k in range(1, len(hit.stores[0].buckets)):
            reduce_bucket(hit.stores, k)
        done = hit.commit(count=B)
        assert done[0].contributors[0] == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 2, 7: 2}
        assert done[0].who == {0: 0, 1: 0, 2: 0, 3: 1, 4: 1, 5: 1, 6: 0, 7: 1}
        for a, b, c in zip(*(model.parameters() for model in (calm.models[0], *hit.models)), strict=True):
            if a.grad is None:
                assert b.grad is None
                continue
            assert torch.equal(b.grad, c.grad)
            torch.testing.assert_close(a.grad, b.grad)
            assert reduction == "fast" or torch.equal(a.grad, b.grad)


def test_coarse_sums_must_be_folded_before_commit() -> None:
    cluster = Cluster(1, Net, lambda model, index: net_loss(model, index) * 1e9, **small(reduction="exact"))
    cluster.begin()
    cluster.compute([list(range(B))])
    store = cluster.stores[0]
    for k in range(len(store.buckets)):
        for target, source in zip(store.outputs(k), store.inputs(k), strict=True):
            target.copy_(source)
    assert any(store.extra_levels(k) for k in range(len(store.buckets)))
    with pytest.raises(AssertionError, match="coarse"):
        store.commit(count=B)


def test_a_folded_bucket_can_be_forwarded_as_it_is() -> None:
    cluster = Cluster(2, Net, lambda model, index: net_loss(model, index) * 1e9, **small(reduction="exact"))
    cluster.begin()
    cluster.compute(split(range(B), 2))
    cluster.reduce()
    joiner = Cluster(1, Net, net_loss, **small(reduction="exact"))
    joiner.begin()
    for k in range(len(joiner.stores[0].buckets)):
        for target, source in zip(joiner.stores[0].outputs(k), cluster.stores[0].outputs(k), strict=True):
            target.copy_(source)
        assert joiner.stores[0].extra_levels(k) == []
    assert joiner.commit(count=B)[0] == cluster.commit(count=B)[0]
    for a, b in zip(joiner.models[0].parameters(), cluster.models[0].parameters(), strict=True):
        assert a.grad is None or torch.equal(a.grad, b.grad)
    assert joiner.stores[0].state() == cluster.stores[0].state()


def test_a_backward_outside_of_a_microbatch_is_an_error_at_the_next_call() -> None:
    cluster = Cluster(1, Net, net_loss, **small())
    cluster.begin()
    net_loss(cluster.models[0], 0).backward()
    assert all(grad is None for grad in grads(cluster.models[0]).values())
    with pytest.raises(RuntimeError, match="outside of a microbatch"):
        cluster.stores[0].check()
    with pytest.raises(RuntimeError, match="outside of a microbatch"), cluster.stores[0].microbatch(0, 0):
        pass


def zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def forget(model: nn.Module) -> None:
    model.zero_grad(set_to_none=True)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-6)


@pytest.mark.parametrize(("disturb", "before"),
                         [(zero, True), (forget, True), (clip, True), (zero, False), (clip, False)])
def test_writing_grad_inside_a_microbatch_is_an_error(disturb: Callable[[nn.Module], None], before: bool) -> None:
    cluster = Cluster(1, Net, net_loss, **small())
    model, store = cluster.models[0], cluster.stores[0]
    cluster.adopt(cluster.run([list(range(B))], count=B))
    cluster.begin()
    launched: list[int] = []

    def script() -> None:
        with store.microbatch(0, 0, launch=launched.append):
            if before:
                disturb(model)
            net_loss(model, 0).backward()
            if not before:
                disturb(model)

    with pytest.raises(RuntimeError, match=r"wrote into \.grad"):
        script()
    assert not before or launched == []         # nothing wrong was sent
    with pytest.raises(RuntimeError, match=r"wrote into \.grad"):
        store.begin(2)


def test_a_microbatch_that_fails_halfway_spoils_the_store() -> None:
    cluster = Cluster(1, Net, net_loss, **small())
    cluster.begin()

    def script() -> None:
        with cluster.stores[0].microbatch(0, 0):
            net_loss(cluster.models[0], 0).backward()
            raise KeyError("the script's own")

    with pytest.raises(KeyError, match="own"):
        script()
    with pytest.raises(RuntimeError, match="microbatch 0 of step 0 failed halfway"):
        cluster.stores[0].check()


def test_what_launch_raises_in_a_hook_comes_out_at_the_end() -> None:
    cluster = Cluster(1, Net, net_loss, **small())
    cluster.adopt(cluster.run([list(range(B))], count=B))
    cluster.begin()
    calls = []

    def launch(k: int) -> None:
        calls.append(k)
        raise OSError("no queue")

    def script() -> None:
        with cluster.stores[0].microbatch(0, 0, launch=launch):
            net_loss(cluster.models[0], 0).backward()
            calls.append(-1)

    with pytest.raises(OSError, match="no queue"):
        script()
    assert calls[0] == 0
    assert -1 in calls                  # backward was not disturbed


# -- odds and ends -----------------------------------------------------------------------------------------------------

def test_checksum_sees_one_bit_and_equals_across_replicas() -> None:
    cluster = Cluster(2, Net, net_loss, **small())
    cluster.run(split(range(B), 2), count=B)
    first, second = cluster.stores
    for k in range(len(first.buckets)):
        assert first.checksum(k) == second.checksum(k)
        for place in (0, -1):
            before = first.checksum(k)
            words = first.buckets[k].reduced.view(torch.int32)
            words[place] ^= 1
            assert first.checksum(k) != before
            words[place] ^= 1


def test_state_is_json_and_restores_layout_and_exponents() -> None:
    old = Cluster(1, Net, net_loss, **small(reduction="exact"))
    old.calibrate()
    old.adopt(old.run([list(range(B))], count=B))
    state = json.loads(json.dumps(old.stores[0].state()))
    new = GradientStore(list(Net().named_parameters()), **small(reduction="exact"))
    new.load_state(state)
    assert new.state() == old.stores[0].state()
    names = [[[member.name for member in bucket.members] for bucket in store.buckets] for store in (new, old.stores[0])]
    assert names[0] == names[1]
    assert new.retired == ()
    state["exponents"].append(0)
    with pytest.raises(ValueError, match="exponents"):
        new.load_state(state)


def test_an_all_zero_bucket_keeps_its_exponent() -> None:
    cluster = Cluster(1, Net, lambda model, index: net_loss(model, index) * 0.0, **small(reduction="exact"))
    before = cluster.stores[0].state()["exponents"]
    cluster.run([list(range(B))], count=B)
    assert cluster.stores[0].state()["exponents"] == before


def test_a_new_layout_inherits_the_scale() -> None:
    """Exponents belong to buckets; after learning each bucket takes the largest of what its parameters had."""
    cluster = Cluster(1, Net, lambda model, index: net_loss(model, index) * 1e6, **small(reduction="exact"))
    store = cluster.stores[0]
    done = cluster.run([list(range(B))], count=B)
    old = {member.name: bucket.exponent for bucket in store.buckets for member in bucket.members}
    assert len(set(old.values())) > 1
    cluster.adopt(done)
    for bucket in store.buckets:
        assert bucket.exponent == max(old[member.name] for member in bucket.members)


def test_coarse_sums_of_one_step_do_not_leak_into_the_next() -> None:
    """A spike in step 0; with the exponents set back, step 1 needs the same level again and must not find the spike."""
    scale = {0: 1e9, 1: 1e6}

    def loss(model: nn.Module, index: int) -> Tensor:
        return net_loss(model, index) * scale[cluster.step]

    cluster = Cluster(2, Net, loss, **small(reduction="exact"))
    before = [store.state() for store in cluster.stores]
    cluster.run(split(range(B), 2), count=B)
    for store, state in zip(cluster.stores, before, strict=True):
        store.load_state(state)
    cluster.run(split(range(B), 2), count=B)
    assert all(bucket.coarse for bucket in cluster.stores[0].buckets[1:])
    truth = [p["first"].double() for p in plain_gradients(Net(), lambda model, index: net_loss(model, index) * 1e6)]
    torch.testing.assert_close(cluster.models[0].first.grad.double(), sum(truth) / B, rtol=1e-4, atol=1.0)


def test_signature_names_shapes_and_dtypes() -> None:
    assert GradientStore(list(Net().named_parameters()), microbatches=1).signature()[:2] == [
        ("embed", "(11, 6)", "torch.float32"), ("first", "(6, 9)", "torch.float32")]


@pytest.mark.parametrize(("parameters", "options", "words"), [
    ([], {}, "no parameter"),
    ([("a", nn.Parameter(torch.ones(1), requires_grad=False))], {}, "a does not require"),
    ([("a", nn.Parameter(torch.ones(1))), ("a", nn.Parameter(torch.ones(1)))], {}, "called a"),
    ([("a", nn.Parameter(torch.ones(1)))], {"microbatches": 0}, "microbatches must be"),
    ([("a", nn.Parameter(torch.ones(1)))], {"reduction": "slow"}, "slow")])
def test_mistakes_are_named(parameters: list[tuple[str, nn.Parameter]], options: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GradientStore(parameters, **{"microbatches": 1, **options})


def test_the_same_parameter_twice_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(1))
    with pytest.raises(ValueError, match="tied"):
        GradientStore([("a", parameter), ("b", parameter)], microbatches=1)


def test_close_removes_the_hooks() -> None:
    model = Net()
    store = GradientStore(list(model.named_parameters()), microbatches=1)
    store.close()
    net_loss(model, 0).backward()
    store.check()
    assert model.first.grad is not None
