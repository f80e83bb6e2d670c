"""Replicas of two ranks: FSDP2 and tensor parallel against one process that computes everything."""
from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradients_double import Cluster, all_reduce
from shards_harness import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from recover.gradients import GradientStore
from recover.parallel import fsdp

pytestmark = pytest.mark.integration

B = 6
RANKS = 2
WORDS, WIDTH = 11, 6        # both uneven over 2 ranks somewhere: 11 rows, and a bias of one element
SMALL: dict[str, Any] = dict(microbatches=B, bucket_bytes=600, first_bucket_bytes=100)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """A tied embedding; a block that is checkpointed if wanted; an expert that some microbatches use; one that none uses."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.checkpointed = checkpointed
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.expert, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.shift = nn.Parameter(torch.full((1,), 0.25))

    def forward(self, tokens: Tensor, expert: bool) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        if expert:
            x = x + self.expert(x)
        return self.head(x) * (1 + self.shift)


def loss_of(model: nn.Module, index: int, rank: int | None = None) -> Tensor:
    """Microbatch `index`'s part on a data rank: the mean over its tokens. The expert is used by microbatch 1 and 4, on rank 0."""
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(100 * index + rank)
    tokens = torch.randint(WORDS, (3, 5), generator=generator)
    logits = model(tokens[:, :-1], index in (1, 4) and rank == 0)
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def reference(steps: int = 3) -> tuple[list[dict[str, Tensor | None]], dict[str, Tensor]]:
    """One process: gradients of each step, and the parameters after the last."""
    model, gradients = Net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        for index in range(B):
            for rank in range(RANKS):
                (loss_of(model, index, rank) / (B * RANKS)).backward()
        gradients.append({name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    return gradients, {name: p.detach().clone() for name, p in model.named_parameters()}


def shard(policy: MixedPrecisionPolicy | None = None, checkpointed: bool = False) -> nn.Module:
    model = Net(checkpointed)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp_shard",))
    options: dict[str, Any] = {"mesh": mesh} if policy is None else {"mesh": mesh, "mp_policy": policy}
    for part in (*model.blocks, model.never):       # the expert, which one rank alone uses, belongs to the whole
        fully_shard(part, **options)
    fully_shard(model, **options)
    fsdp.prepare([model])
    return model


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def close(actual: Tensor, expected: Tensor, error: float) -> None:
    difference = float((actual - expected).norm() / (expected.norm() + 1e-30))
    assert difference <= error, f"relative error {difference}"


def tracked(cluster: Cluster) -> None:
    for model, store in zip(cluster.models, cluster.stores, strict=True):
        fsdp.watch([model], store.track(fsdp.sharded([model])))


def settle(cluster: Cluster, done: Sequence[Any]) -> None:
    """What the engine does at commit: parameters that no rank used get no gradient."""
    for store, each in zip(cluster.stores, done, strict=True):
        everywhere: list[Any] = [None] * RANKS
        dist.all_gather_object(everywhere, store.unused(each))
        store.drop(set.intersection(*map(set, everywhere)))
    cluster.adopt(done)


def compare(model: nn.Module, expected: dict[str, Tensor | None], error: float) -> None:
    for name, parameter in model.named_parameters():
        wanted = expected[name]
        if wanted is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, name
            assert parameter.grad.dtype == parameter.dtype
            close(full(parameter.grad), wanted, error)


def train(cluster: Cluster, work: Sequence[Sequence[int]], *, error: float, steps: int = 3) -> None:
    """Steps against the reference; raises where gradients or the parameters after the last step differ."""
    cluster.weight = lambda index: float(RANKS)         # of all data ranks together
    tracked(cluster)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in cluster.models]
    gradients, parameters = reference(steps)
    for expected in gradients:
        done = cluster.run(work, count=B, weighted=True)
        assert done[0].nonfinite is None
        settle(cluster, done)
        for model, optimizer in zip(cluster.models, optimizers, strict=True):
            compare(model, expected, error)
            optimizer.step()
            optimizer.zero_grad()
    for model in cluster.models:
        for name, parameter in model.named_parameters():
            close(full(parameter), parameters[name], error * 10)
    launched = cluster.launched[0]
    assert launched == list(range(len(cluster.stores[0].buckets))), launched


def plain(reduction: str, checkpointed: bool) -> tuple[int, bool]:
    cluster = Cluster(2, lambda: shard(checkpointed=checkpointed), loss_of, reduction=reduction, **SMALL)
    if reduction == "exact":
        cluster.calibrate()
    train(cluster, [[0, 1, 2, 3], [4, 5]], error=1e-5)
    sizes = [bucket.local.numel() for bucket in cluster.stores[0].buckets]
    return sum(sizes), any(p.to_local().numel() == 0 for p in cluster.models[0].parameters())   # type: ignore[attr-defined]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_fsdp_steps_equal_those_of_one_process(tmp_path: Path, reduction: str, checkpointed: bool) -> None:
    (first, _), (second, empty) = on_ranks(RANKS, tmp_path, plain, reduction, checkpointed)
    assert first + second == sum(p.numel() for p in Net().parameters())
    assert empty, "a parameter of one element was to be empty on the second rank"


class Withholding(Cluster):
    """As the engine does it: FSDP reduces with the last microbatch only, once firings are learned."""

    synchronised: list[bool]

    def compute(self, work: Sequence[Sequence[int]], wanted: Sequence[int] | None = None) -> None:
        self.synchronised = []
        for member, (model, store) in enumerate(zip(self.models, self.stores, strict=True)):
            self.launched[member] = []
            for index in work[member]:
                last = index == work[member][-1]
                sync = last or store.synchronises_each
                self.synchronised.append(sync)
                fsdp.sync([model], sync)
                with store.microbatch(index, member, launch=self.launched[member].append if last else None,
                                      wanted=wanted, withheld=not sync) as entry:
                    entry.loss, entry.weight = (loss := self.loss(model, index)), self.weight(index)
                    loss.backward()


def withholding() -> list[bool]:
    cluster = Withholding(2, shard, loss_of, **SMALL)
    train(cluster, [[0, 1, 2, 3], [4, 5]], error=1e-5)
    return cluster.synchronised


def test_fast_reduces_over_the_shards_once_per_step(tmp_path: Path) -> None:
    assert on_ranks(RANKS, tmp_path, withholding) == [[False, False, False, True, False, True]] * RANKS


def more_after_a_failure() -> None:
    """A replica dies after its peer's buckets left: the peer computes the lost ones, after a microbatch that was reduced."""
    cluster = Withholding(1, shard, loss_of, **SMALL)
    cluster.weight = lambda index: float(RANKS)
    tracked(cluster)
    gradients, _ = reference(1)
    settle(cluster, cluster.run([list(range(B))], count=B, weighted=True))
    compare(cluster.models[0], gradients[0], 1e-5)
    cluster.begin()
    cluster.compute([[0, 1, 2]])
    cluster.compute([[4, 3, 5]])
    cluster.reduce()
    settle(cluster, cluster.commit(count=B, weighted=True))
    compare(cluster.models[0], gradients[0], 1e-5)


def test_microbatches_after_a_reduced_one_add_up(tmp_path: Path) -> None:
    on_ranks(RANKS, tmp_path, more_after_a_failure)


def cut_short(flushed: bool) -> None:
    """A leaver stops after microbatch 2 of 4: what is withheld must come before its sums are read."""
    cluster = Withholding(1, shard, loss_of, **SMALL)
    cluster.weight = lambda index: float(RANKS)
    tracked(cluster)
    model, store = cluster.models[0], cluster.stores[0]
    settle(cluster, cluster.run([list(range(B))], count=B, weighted=True))
    gradients, _ = reference(1)
    cluster.begin()
    for index in range(B):
        fsdp.sync([model], False)
        with store.microbatch(index, 0, withheld=True) as entry:
            entry.loss, entry.weight = (loss := loss_of(model, index)), float(RANKS)
            loss.backward()
    assert store.withheld == tuple(range(B))
    with pytest.raises(AssertionError, match="withheld"):
        store.inputs(0)
    with pytest.raises(AssertionError, match="leak"):
        store.begin(9)
    with store.flush(0):
        if flushed:
            fsdp.flush([model])
    cluster.reduce()
    settle(cluster, cluster.commit(count=B, weighted=True))
    compare(model, gradients[0], 1e-5)
    assert all(isinstance(p, DTensor) for p in model.parameters()), "resharded"
    fsdp.sync([model], True)
    cluster.adopt(cluster.run([list(range(B))], count=B, weighted=True))
    store.drop(["never.weight", "never.bias"])
    compare(model, gradients[0], 1e-5)


def test_what_is_withheld_is_flushed_when_nothing_follows(tmp_path: Path) -> None:
    on_ranks(RANKS, tmp_path, cut_short, True)
    with pytest.raises(AssertionError, match="relative error"):
        on_ranks(RANKS, tmp_path, cut_short, False)


def mixed() -> None:
    """bfloat16 compute, float32 reduction: hooks bring float32 shards. The reference is the same without a store."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    other = shard(policy)
    for index in range(B):
        loss_of(other, index).backward()
    cluster = Cluster(2, lambda: shard(policy), loss_of, **SMALL)
    cluster.weight = lambda index: float(RANKS)
    tracked(cluster)
    settle(cluster, cluster.run([[0, 1, 2], [3, 4, 5]], count=B, weighted=True))
    for mine, theirs in zip(cluster.models[0].parameters(), other.parameters(), strict=True):
        if mine.grad is not None:
            assert mine.grad.dtype == torch.float32
            close(full(mine.grad), full(theirs.grad) / (B * RANKS), 1e-5)
    gradients, _ = reference(1)
    for name, parameter in cluster.models[0].named_parameters():
        if gradients[0][name] is not None:
            close(full(parameter.grad), gradients[0][name], 3e-2)


def low(dtype: torch.dtype) -> None:
    """Shards that are themselves bfloat16 add up in float32."""
    def build() -> nn.Module:
        model = Net().to(dtype)
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
        fsdp.prepare([model])
        return model
    cluster = Cluster(1, build, loss_of, **SMALL)
    cluster.weight = lambda index: float(RANKS)
    tracked(cluster)
    cluster.begin()
    cluster.compute([list(range(B))])
    assert cluster.stores[0].inputs(0)[0].dtype == torch.float32
    cluster.reduce()
    settle(cluster, cluster.commit(count=B, weighted=True))
    gradients, _ = reference(1)
    compare(cluster.models[0], gradients[0], 5e-2)
    torch.optim.AdamW(cluster.models[0].parameters()).step()


def test_mixed_precision(tmp_path: Path) -> None:
    on_ranks(RANKS, tmp_path, mixed)
    on_ranks(RANKS, tmp_path, low, torch.bfloat16)


def bits(groupings: Sequence[Sequence[Sequence[int]]]) -> list[list[bytes]]:
    """Exact: what one step's gradients are, to the bit, for each way to share out the microbatches."""
    found = []
    for work in groupings:
        cluster = Cluster(len(work), shard, loss_of, reduction="exact", **SMALL)
        cluster.calibrate()
        for _ in range(2):
            cluster.adopt(cluster.run(work, count=B, weighted=True))
        found.append([p.grad.to_local().numpy().tobytes() for p in cluster.models[0].parameters() if p.grad is not None])
    return found


def test_exact_bits_do_not_depend_on_who_computes_what(tmp_path: Path) -> None:
    groupings = [[[0, 1, 2, 3, 4, 5]], [[5, 3, 1], [0, 2, 4]], [[2], [5, 0], [1, 4, 3]]]
    for found in on_ranks(RANKS, tmp_path, bits, groupings):
        assert found[0] == found[1] == found[2]
        assert any(any(part) for part in found[0])


class Wide(nn.Module):
    """For tensor parallel: a column-wise, a row-wise and a replicated parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def wide_loss(model: nn.Module, index: int) -> Tensor:
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(index))
    return full(model(x)).pow(2).mean()


def split_wide(mesh: Any) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import PrepareModuleInput
    model = Wide()
    return parallelize_module(model, mesh, {
        "": PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Replicate()),
    })


def tensor_parallel(reduction: str) -> None:
    def build() -> nn.Module:
        return split_wide(init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",)))
    cluster = Cluster(2, build, wide_loss, reduction=reduction, **SMALL)
    one = Wide()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (*cluster.models, one)]
    if reduction == "exact":
        cluster.calibrate()
    for _ in range(3):
        cluster.adopt(cluster.run([[0, 2, 4], [1, 3, 5]], count=B))
        for index in range(B):
            (wide_loss(one, index) / B).backward()
        for mine, theirs in zip(cluster.models[0].parameters(), one.parameters(), strict=True):
            assert isinstance(mine.grad, DTensor) and mine.grad.placements == mine.placements    # type: ignore[attr-defined]
            assert theirs.grad is not None
            close(full(mine.grad), theirs.grad, 1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(cluster.models[0].parameters(), one.parameters(), strict=True):
        close(full(mine), theirs, 1e-4)


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_tensor_parallel_steps_equal_those_of_one_process(tmp_path: Path, reduction: str) -> None:
    on_ranks(RANKS, tmp_path, tensor_parallel, reduction)


def two_axes() -> None:
    """FSDP over tensor parallel: parameters lie on both axes; the data ranks see different samples."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    rank = mesh["dp_shard"].get_local_rank()
    model = split_wide(mesh["tp"])
    fully_shard(model, mesh=mesh["dp_shard"])
    fsdp.prepare([model])
    store = GradientStore(list(model.named_parameters()), **SMALL)
    store.begin(0)
    for index in range(B):
        with store.microbatch(index, 0, launch=(lambda k: None) if index == B - 1 else None) as entry:
            entry.loss = loss = wide_loss(model, 10 * index + rank)
            loss.backward()
    for k in range(len(store.buckets)):
        all_reduce([store.inputs(k)], [store.outputs(k)])
    store.commit(count=B, divisor=2.0 * B)
    one = Wide()
    for index in range(B):
        for each in range(2):
            (wide_loss(one, 10 * index + each) / (2 * B)).backward()
    for mine, theirs in zip(model.parameters(), one.parameters(), strict=True):
        assert theirs.grad is not None and mine.grad is not None
        close(full(mine.grad), theirs.grad, 1e-5)


def test_fsdp_and_tensor_parallel_together(tmp_path: Path) -> None:
    on_ranks(4, tmp_path, two_axes)


def averaged() -> float:
    """Without `prepare` FSDP averages: the sum over data ranks is half of what it should be."""
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    loss_of(model, 0).backward()
    mean = full(model.shift.grad).item()                # type: ignore[arg-type]
    model.zero_grad()
    assert fsdp.prepare([model]) == [model]
    loss_of(model, 0).backward()
    return full(model.shift.grad).item() / mean         # type: ignore[arg-type]


def test_prepare_makes_sums_of_means(tmp_path: Path) -> None:
    assert all(math.isclose(ratio, RANKS, rel_tol=1e-5) for ratio in on_ranks(RANKS, tmp_path, averaged))


def wrapped(wrap: Callable[[nn.Module], nn.Module]) -> str:
    with pytest.raises(ValueError, match="wrapped in") as error:
        fsdp.prepare([nn.Sequential(wrap(nn.Linear(2, 2)))])
    return str(error.value)


def old_fsdp(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


@pytest.mark.parametrize(("wrap", "says"), [(nn.parallel.DistributedDataParallel, "0 is wrapped in DistributedDataParallel: "),
                                            (old_fsdp, "fully_shard")])
def test_other_wrappers_are_refused(tmp_path: Path, wrap: Callable[[nn.Module], nn.Module], says: str) -> None:
    assert all(says in text for text in on_ranks(RANKS, tmp_path, functools.partial(wrapped, wrap)))


