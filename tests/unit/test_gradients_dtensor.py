"""Parameters that are DTensors, on one rank of a mesh whose other ranks are imaginary (no collective takes place)."""
from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from gradients_double import Cluster
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from recover.gradients import GradientStore

B = 4
MEMBER = dict(microbatches=B, bucket_bytes=64, first_bucket_bytes=16)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Seen from rank 1 of 2."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def part(mesh: DeviceMesh, local: Tensor, shape: tuple[int, ...], placement: Shard | Replicate) -> nn.Parameter:
    whole = torch.empty(shape)
    return nn.Parameter(DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride()))


class Parts(nn.Module):
    """This rank's: 2 of 5 rows, all of a replicated vector, nothing of a scalar, 2 of 4 columns, and a plain parameter."""

    def __init__(self, mesh: DeviceMesh, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rows = part(mesh, torch.randn(2, 3, dtype=dtype), (5, 3), Shard(0))
        self.same = part(mesh, torch.randn(3, dtype=dtype), (3,), Replicate())
        self.none = part(mesh, torch.randn(0, dtype=dtype), (1,), Shard(0))
        self.columns = part(mesh, torch.randn(3, 2, dtype=dtype), (3, 4), Shard(1))
        self.plain = nn.Parameter(torch.randn(2, dtype=dtype))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def loss_of(model: nn.Module, index: int) -> Tensor:
    """Of local parts only."""
    assert isinstance(model, Parts)
    generator = torch.Generator().manual_seed(index)
    terms = [(local(p) * torch.randn(local(p).shape, generator=generator)).sum() for p in model.parameters()]
    return torch.stack([term.float() for term in terms]).sum()


def expected() -> list[Tensor]:
    sums = []
    shapes = [(2, 3), (3,), (0,), (3, 2), (2,)]
    for index in range(B):
        generator = torch.Generator().manual_seed(index)
        sums.append([torch.randn(shape, generator=generator) for shape in shapes])
    return [torch.stack(each).sum(0) / B for each in zip(*sums, strict=True)]


@pytest.mark.parametrize("reduction", ["fast", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_local_parts_are_summed_and_handed_over_as_dtensors(mesh: DeviceMesh, reduction: str, dtype: torch.dtype) -> None:
    cluster = Cluster(2, lambda: Parts(mesh, dtype), loss_of, reduction=reduction, **MEMBER)
    if reduction == "exact":
        cluster.calibrate()
    for _ in range(3):
        done = cluster.run([[0, 1, 2], [3]], count=B)
        assert done[0].used == dict.fromkeys(done[0].used, B) and done[0].nonfinite is None
        for model in cluster.models:
            for parameter, wanted in zip(model.parameters(), expected(), strict=True):
                assert type(parameter.grad) is type(parameter.data) and parameter.grad is not None
                assert parameter.grad.shape == parameter.shape and parameter.grad.dtype == dtype
                torch.testing.assert_close(local(parameter.grad).float(), wanted, rtol=1e-2 if dtype.itemsize == 2 else 1e-5,
                                           atol=1e-2 if dtype.itemsize == 2 else 1e-6)
        cluster.adopt(done)
    assert cluster.launched[0] == list(range(len(cluster.stores[0].buckets)))
    assert sum(bucket.local.numel() for bucket in cluster.stores[0].buckets) == 6 + 3 + 0 + 6 + 2
    torch.optim.AdamW([p for p in cluster.models[0].parameters() if isinstance(p, DTensor)], foreach=False).step()


def test_a_rank_that_holds_nothing(mesh: DeviceMesh) -> None:
    def build() -> nn.Module:
        model = nn.Module()
        model.none = part(mesh, torch.randn(0), (1,), Shard(0))
        model.neither = part(mesh, torch.randn(0, 3), (1, 3), Shard(0))
        return model

    def loss(model: nn.Module, index: int) -> Tensor:
        return sum((local(p).sum() for p in model.parameters()), torch.zeros(()))

    for reduction in ("fast", "exact"):
        cluster = Cluster(2, build, loss, reduction=reduction, **MEMBER)
        if reduction == "exact":
            cluster.calibrate()
        for _ in range(2):
            done = cluster.run([[0, 1], [2, 3]], count=B)
            cluster.adopt(done)
            assert done[0].losses == (0.0,) * B and done[0].nonfinite is None
        assert [cluster.stores[0].checksum(k) for k in range(len(cluster.stores[0].buckets))] == [0]
        assert all(p.grad is not None and p.grad.shape == p.shape for p in cluster.models[0].parameters())


def test_the_signature_says_what_lies_here(mesh: DeviceMesh) -> None:
    store = GradientStore(list(Parts(mesh).named_parameters()), microbatches=1)
    assert store.signature()[:3] == [
        ("rows", "(5, 3), here (2, 3), placed S(0) on a mesh (2,)", "torch.float32"),
        ("same", "(3,), here (3,), placed R on a mesh (2,)", "torch.float32"),
        ("none", "(1,), here (0,), placed S(0) on a mesh (2,)", "torch.float32")]
    assert store.signature()[4] == ("plain", "(2,)", "torch.float32")


def zero(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def scale(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)        # type: ignore[union-attr]


def reach_inside(model: nn.Module) -> None:
    model.rows.grad.to_local().zero_()


@pytest.mark.parametrize("disturb", [zero, scale, reach_inside])
@pytest.mark.parametrize("before", [True, False])
def test_writing_grad_inside_a_microbatch_is_an_error(mesh: DeviceMesh, disturb: Callable[[nn.Module], None],
                                                      before: bool) -> None:
    cluster = Cluster(1, lambda: Parts(mesh), loss_of, **MEMBER)
    model, store = cluster.models[0], cluster.stores[0]
    cluster.adopt(cluster.run([list(range(B))], count=B))
    cluster.begin()

    def script() -> None:
        with store.microbatch(0, 0):
            if before:
                disturb(model)
            loss_of(model, 0).backward()
            if not before:
                disturb(model)

    with pytest.raises(RuntimeError, match=r"wrote into \.grad"):
        script()


def test_changing_the_committed_gradient_in_place_is_harmless(mesh: DeviceMesh) -> None:
    cluster = Cluster(1, lambda: Parts(mesh), loss_of, **MEMBER)
    for disturb in (scale, zero, scale):
        done = cluster.run([list(range(B))], count=B)
        before = [cluster.stores[0].outputs(k)[0].clone() for k in range(len(cluster.stores[0].buckets))]
        for parameter, wanted in zip(cluster.models[0].parameters(), expected(), strict=True):
            torch.testing.assert_close(local(parameter.grad), wanted)
        disturb(cluster.models[0])
        assert all(torch.equal(cluster.stores[0].outputs(k)[0], each) for k, each in enumerate(before))
        cluster.adopt(done)
