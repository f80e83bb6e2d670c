"""Pipelines over real processes: whatever the chunks, the schedule and the mesh, gradients are those of one process.

This file is also the program that is tested with: run as a script it imports torch once and forks the ranks of one
pipeline after the other. What each rank found comes back as a file; every rank computes the reference itself.
"""
from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "examples")]

from recover.gradients.store import GradientStore  # noqa: E402
from recover.parallel.pipeline import ALTERNATIVES, Pipeline  # noqa: E402

pytestmark = pytest.mark.integration

PATIENCE = 50.0                 # seconds for all ranks of all pipelines: only a bug is slower
MICROBATCHES, BATCH, WIDTH = 4, 3, 8
CHUNKINGS = {"4": [4], "1+3": [1, 3], "2+2": [2, 2], "1+1+1+1": [1, 1, 1, 1]}
SEVERAL = {"interleaved1f1b": "cards", "interleavedzerobubble": "cards", "loopedbfs": "cards", "zbvzerobubble": "v",
           "dualpipev": "v"}


# ---------------------------------------------------------------- what ranks compute

class Part(nn.Module):
    """A stage with dropout and with buffers that forward writes; [BATCH, WIDTH] float32 -> the same."""

    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.up, self.norm = nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH)
        self.dropout, self.down = nn.Dropout(0.3), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.relu(self.norm(self.up(x)))))


def square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def batches(width: int = WIDTH) -> tuple[Tensor, Tensor]:
    """x, y of all microbatches behind one another."""
    generator = torch.Generator().manual_seed(7)
    x, y = (torch.randn(MICROBATCHES * BATCH, width, generator=generator) for _ in range(2))
    return x, y


class Chunk:
    """What the store's entry and the step are to a pipeline."""

    def __init__(self, indices: Sequence[int], *, seeds: bool = True, boundary: Callable[[int], None] = lambda _: None) -> None:
        self.indices, self.losses, self.seeds = tuple(indices), [float("nan")] * len(indices), seeds
        self.boundary = boundary

    def seed(self, index: int, stage: int) -> None:
        if self.seeds or index == self.indices[0]:
            torch.manual_seed(1000 * index + stage)


def cuts(sizes: Sequence[int]) -> Iterator[range]:
    for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
        yield range(end - size, end)


def run(pipeline: Pipeline, data: tuple[Tensor, Tensor], sizes: Sequence[int], **options: Any) -> list[float]:
    """All microbatches, cut into chunks of these sizes; their losses (NaN where this is not the last stage)."""
    x, y = (part.view(MICROBATCHES, -1, *part.shape[1:]) for part in data)
    losses: list[float] = []
    for indices in cuts(sizes):
        chunk = Chunk(indices, **options)
        rows = slice(indices.start, indices.stop)
        pipeline(chunk).step(x[rows].flatten(0, 1), target=y[rows].flatten(0, 1))
        losses += [float(loss) for loss in chunk.losses]
    return losses


def reference(stages: Sequence[nn.Module], data: tuple[Tensor, Tensor],
              loss_fn: Callable[[Tensor, Tensor], Tensor]) -> tuple[list[dict[str, Tensor]], list[float]]:
    """One process, one microbatch after the other: gradients ("stage.name") and loss of each."""
    x, y = (part.view(MICROBATCHES, -1, *part.shape[1:]) for part in data)
    found: list[dict[str, Tensor]] = []
    losses = []
    for index in range(MICROBATCHES):
        h = x[index]
        for number, stage in enumerate(stages):
            stage.zero_grad()
            torch.manual_seed(1000 * index + number)
            h = stage(h)
        loss = loss_fn(h, y[index])
        loss.backward()
        losses.append(float(loss.detach()))
        found.append({f"{number}.{name}": p.grad.clone() for number, stage in enumerate(stages)
                      for name, p in stage.named_parameters()})
    return found, losses


def total(parts: Sequence[dict[str, Tensor]], stages: Sequence[int]) -> dict[str, Tensor]:
    """The sum over microbatches of what belongs to these stages."""
    names = [name for name in parts[0] if int(name.split(".")[0]) in stages]
    return {name: torch.stack([part[name].double() for part in parts]).sum(0) for name in names}


def gradients(modules: dict[int, nn.Module]) -> dict[str, Tensor]:
    whole = getattr(torch.distributed.tensor, "DTensor", ())
    return {f"{index}.{name}": (p.grad.full_tensor() if isinstance(p.grad, whole) else p.grad).clone()
            for index, module in modules.items() for name, p in module.named_parameters()}


def error(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """|found - wanted| / |wanted|, over all of it."""
    assert found.keys() == wanted.keys()
    off = sum(float((found[name].double() - wanted[name]).square().sum()) for name in wanted)
    return (off / sum(float(value.square().sum()) for value in wanted.values())) ** 0.5


# ---------------------------------------------------------------- two ranks

def one_stage_each(rank: int) -> dict[str, Any]:
    """GPipe and 1F1B, all chunkings."""
    data = batches()
    parts, losses = reference([Part(0), Part(1)], data, square)
    wanted, found = total(parts, [rank]), {}
    for schedule, (name, sizes) in itertools.product(("gpipe", "1f1b"), CHUNKINGS.items()):
        modules: dict[int, nn.Module] = {rank: Part(rank)}
        seen: list[tuple[int, float]] = []
        pipeline = Pipeline(modules, 2, square, schedule=schedule, exact=True)

        def boundary(index: int, modules: Any = modules, seen: Any = seen) -> None:
            seen.append((index, error(gradients(modules), total(parts[:index + 1], [rank]))))

        said = run(pipeline, data, sizes, boundary=boundary)
        found[f"{schedule} {name}"] = dict(
            gradients=gradients(modules), error=error(gradients(modules), wanted), boundaries=seen,
            losses=said, expected=losses, counted=int(modules[rank].norm.num_batches_tracked),
            ran=[flight.name for flight in pipeline._flights.values()])
    return found


def seeded_per_chunk(rank: int) -> float:
    """What goes wrong if only the first microbatch of a chunk is seeded: how far chunks of 4 and of 1+3 are apart."""
    seen = []
    for sizes in ([4], [1, 3]):
        modules: dict[int, nn.Module] = {rank: Part(rank)}
        run(Pipeline(modules, 2, square, schedule="gpipe"), batches(), sizes, seeds=False)
        seen.append(gradients(modules))
    return error(seen[0], {name: value.double() for name, value in seen[1].items()})


def several_stages_each(rank: int) -> dict[str, Any]:
    """Four stages on two ranks: the schedules that want that."""
    data = batches()
    parts, _ = reference([Part(n) for n in range(4)], data, square)
    found = {}
    for schedule, layout in SEVERAL.items():
        mine = [rank, 3 - rank] if layout == "v" else [rank, 2 + rank]
        modules: dict[int, nn.Module] = {n: Part(n) for n in mine}
        pipeline = Pipeline(modules, 4, square, schedule=schedule)
        run(pipeline, data, [3, 1])
        ran = [flight.name for flight in pipeline._flights.values()]
        first = error(gradients(modules), total(parts, mine))
        run(pipeline, data, [4])
        ran.append(pipeline._flights[4].name)
        wanted = {name: 2 * value for name, value in total(parts, mine).items()}
        found[schedule] = dict(first=first, both=error(gradients(modules), wanted), ran=ran)
    return found


def every_size_is_built(rank: int) -> list[str]:
    """Schedules and sizes for which torch refuses what `choose` chose."""
    refused = []
    for schedule in ALTERNATIVES:
        layout = SEVERAL.get(schedule)
        mine = [rank] if layout is None else [rank, 3 - rank] if layout == "v" else [rank, 2 + rank]
        pipeline = Pipeline({n: Part(n) for n in mine}, 2 if layout is None else 4, square, schedule=schedule)
        for size in range(1, 12):
            try:
                pipeline._build(size)
            except Exception as failed:     # noqa: BLE001 - whatever torch says is reported
                refused.append(f"{schedule} {size}: {failed}")
    return refused


def store_sums(rank: int, mine: Sequence[int], count: int, schedule: str) -> dict[str, Any]:
    """The sums of a store, and what the tails say, for all chunkings and both reductions."""
    data = batches()
    x, y = (part.view(MICROBATCHES, BATCH, WIDTH) for part in data)
    found = {}
    for (name, sizes), reduction in itertools.product(CHUNKINGS.items(), ("exact", "fast")):
        modules: dict[int, nn.Module] = {n: Part(n) for n in mine}
        named = [(f"{n}.{name}", p) for n, module in modules.items() for name, p in module.named_parameters()]
        store = GradientStore(named, microbatches=MICROBATCHES, reduction=reduction, bucket_bytes=600, first_bucket_bytes=200)
        pipeline = Pipeline(modules, count, square, schedule=schedule, exact=reduction == "exact")
        launched: list[int] = []
        for step in range(3):
            store.begin(step)
            launched.clear()
            for indices in cuts(sizes):
                last = indices.stop == MICROBATCHES
                with store.microbatch(tuple(indices), 0, launch=launched.append if last else None) as entry:
                    entry.on_seed = Chunk(indices).seed     # as the step does
                    rows = slice(indices.start, indices.stop)
                    pipeline(entry).step(x[rows].flatten(0, 1), target=y[rows].flatten(0, 1), losses=entry.losses)
            sums = [part.clone() for k in range(len(store.buckets)) for part in store.inputs(k)]
            for k in range(len(store.buckets)):
                for part, whole in zip(store.inputs(k), store.outputs(k), strict=True):
                    whole.copy_(part)
                for inputs, outputs in store.extra_levels(k):
                    for part, whole in zip(inputs, outputs, strict=True):
                        whole.copy_(part)
                store.fold(k)
            done = store.commit(count=MICROBATCHES)
            if done.learned is not None:
                store.adopt(done.learned)
        found[f"{reduction} {name}"] = dict(
            sums=sums, losses=list(done.losses), launched=list(launched), buckets=len(store.buckets),
            gradients={name: MICROBATCHES * value for name, value in gradients(modules).items()},
            fires=store.learned["fires"] if store.learned else None)
    return found


def wrong_shapes(rank: int) -> list[str]:
    """What is said of tensors that can't be cut, or are cut otherwise than before."""
    pipeline = Pipeline({rank: Part(rank)}, 2, square)
    x, y = batches()
    pipeline(Chunk([0, 1])).step(x[:6], target=y[:6])
    said = []
    for rows in (5, 8):
        try:
            pipeline(Chunk([0, 1])).step(x[:rows], target=y[:rows])
        except ValueError as mistake:
            said.append(str(mistake))
    return said


# ---------------------------------------------------------------- four ranks

def grid(axis: str) -> dict[str, Any]:
    """The example's GPT, PP2 x TP2 or PP2 x FSDP2: gradients, losses and the clipped norm, for two chunkings."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    import train_3d
    from model import Config, loss_fn

    config = Config(vocabulary=32, block=6, layers=2, heads=2, width=8, dropout=0.2)

    def stage(index: int) -> Any:
        torch.manual_seed(3)
        return train_3d.Stage(config, index, 2)

    def text(data_rank: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(50 + data_rank)
        whole = torch.randint(0, 32, (MICROBATCHES * BATCH, 7), generator=generator)
        return whole[:, :-1], whole[:, 1:]

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", axis))
    index, data_ranks = mesh["pp"].get_local_rank(), (0, 1) if axis == "dp_shard" else (0,)
    stages = [stage(0), stage(1)]
    parts, losses = map(list, zip(*(reference(stages, text(each), loss_fn) for each in data_ranks), strict=True))
    together = [part for each in parts for part in each]
    mine = mesh[axis].get_local_rank() if axis == "dp_shard" else 0
    found: dict[str, Any] = dict(expected=losses[mine])
    for name in ("4", "1+3"):
        module = train_3d.parallelize(stage(index), mesh)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_gradient_divide_factor(1.0)
                part.set_force_sum_reduction_for_comms(True)
        attached = {p: torch.zeros_like(p) for p in module.parameters()}
        for p, gradient in attached.items():
            p.grad = gradient
        fired: dict[int, int] = {}
        for n, p in enumerate(module.parameters()):
            p.register_post_accumulate_grad_hook(lambda _, n=n, fired=fired: fired.update({n: fired.get(n, 0) + 1}))
        pipeline = Pipeline({index: module}, 2, loss_fn, group=mesh["pp"].get_group())
        said = run(pipeline, text(mine), CHUNKINGS[name])
        kept = [p.grad is gradient for p, gradient in attached.items()]
        whole = gradients({index: module})
        wanted, everything = total(together, [index]), total(together, [0, 1])
        norm = sum(float(value.square().sum()) for value in everything.values()) ** 0.5
        measured = train_3d.clip(module, norm / 10, mesh)
        after = train_3d.clip(module, norm, mesh)
        found[name] = dict(error=error(whole, wanted), losses=said, norm=measured / norm, clipped=after / norm, gradients=whole,
                           kept=all(kept), fires=sorted(set(fired.values())), last=index == 1,
                           sharded=any(isinstance(p, DTensor) and any(q.is_shard() for q in p.placements)
                                       for p in module.parameters()))
    return found


# ---------------------------------------------------------------- processes

WORLDS: dict[str, tuple[int, Callable[[int], Any]]] = {
    "one": (2, one_stage_each), "unseeded": (2, seeded_per_chunk), "several": (2, several_stages_each),
    "sizes": (2, every_size_is_built), "shapes": (2, wrong_shapes),
    "store": (2, lambda rank: store_sums(rank, [rank], 2, "1f1b")),
    "cards": (2, lambda rank: store_sums(rank, [rank, 2 + rank], 4, "interleaved1f1b")),
    "tp": (4, lambda rank: grid("tp")), "fsdp": (4, lambda rank: grid("dp_shard"))}


def rank_main(folder: Path, world: str, rank: int) -> None:
    size, check = WORLDS[world]
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / world}.rendezvous", rank=rank, world_size=size)
    torch.save(check(rank), folder / f"{world}.{rank}.part")
    os.rename(folder / f"{world}.{rank}.part", folder / f"{world}.{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def serve(folder: Path) -> None:
    """Each pipeline's ranks in turn; a rank's error goes to standard error. Children die with this process' session."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    deadline = time.monotonic() + PATIENCE
    for world, (size, _) in WORLDS.items():
        pids = []
        for rank in range(size):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    rank_main(folder, world, rank)
                    code = 0
                except BaseException:       # noqa: BLE001 - the edge of a process: said on standard error
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            pids.append(pid)
        reap(pids, deadline)


def reap(pids: list[int], deadline: float) -> None:
    """Wait for all; when one fails, end the others (they would wait for it)."""
    left = set(pids)
    while left:
        for pid in sorted(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
            if (ended and status) or time.monotonic() > deadline:
                for other in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(other, signal.SIGKILL)
        time.sleep(0.01)


class Found:
    """What the ranks of each pipeline found."""

    def __init__(self, folder: Path, errors: str) -> None:
        self._folder, self._errors = folder, errors

    def __getitem__(self, world: str) -> list[Any]:
        files = [self._folder / f"{world}.{rank}.pt" for rank in range(WORLDS[world][0])]
        if not all(file.exists() for file in files):
            pytest.fail(f"a rank of {world!r} failed:\n{self._errors[-6000:]}", pytrace=False)
        return [torch.load(file, weights_only=True) for file in files]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("pipeline")
    with (folder / "stderr").open("w") as errors:
        process = subprocess.Popen([sys.executable, __file__, str(folder)], stderr=errors, start_new_session=True)
        try:
            process.wait(PATIENCE + 5)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Found(folder, (folder / "stderr").read_text())


# ---------------------------------------------------------------- the tests

CASES = [f"{schedule} {name}" for schedule in ("gpipe", "1f1b") for name in CHUNKINGS]


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_losses_are_those_of_one_process(found: Found, case: str) -> None:
    first, last = (each[case] for each in found["one"])
    assert max(first["error"], last["error"]) < 1e-5
    assert last["losses"] == pytest.approx(last["expected"], rel=1e-5)
    assert all(loss != loss for loss in first["losses"])        # NaN: only the last stage knows


def test_the_chunks_change_nothing(found: Found) -> None:
    """Dropout included: bit for bit."""
    for each in found["one"]:
        one = each["gpipe 4"]["gradients"]
        assert all(torch.equal(one[name], each[case]["gradients"][name]) for case in CASES for name in one)


def test_seeding_once_per_chunk_would(found: Found) -> None:
    assert max(found["unseeded"]) > 0.05


@pytest.mark.parametrize("case", CASES)
def test_at_each_boundary_grad_holds_the_microbatches_so_far(found: Found, case: str) -> None:
    for each in found["one"]:
        assert [index for index, _ in each[case]["boundaries"]] == [0, 1, 2, 3]
        assert max(off for _, off in each[case]["boundaries"]) < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_shape_inference_leaves_no_trace_in_buffers(found: Found, case: str) -> None:
    assert [each[case]["counted"] for each in found["one"]] == [MICROBATCHES, MICROBATCHES]


def test_small_chunks_fall_back(found: Found) -> None:
    one = found["one"][0]
    assert one["1f1b 4"]["ran"] == ["1f1b"]
    assert one["1f1b 1+3"]["ran"] == ["gpipe", "1f1b"]
    assert one["1f1b 1+1+1+1"]["ran"] == ["gpipe"]


@pytest.mark.parametrize("schedule", SEVERAL)
def test_schedules_of_several_stages_per_rank(found: Found, schedule: str) -> None:
    for each in found["several"]:
        assert max(each[schedule]["first"], each[schedule]["both"]) < 1e-5
        assert all(name in ALTERNATIVES[schedule] for name in each[schedule]["ran"])
        assert each[schedule]["ran"][-1] == schedule


def test_torch_builds_what_was_chosen(found: Found) -> None:
    assert found["sizes"] == [[], []]


@pytest.mark.parametrize("world", ["store", "cards"])
def test_exact_sums_do_not_depend_on_the_chunks(found: Found, world: str) -> None:
    """Sums and tails; also where one rank's stages take turns (`cards`)."""
    for each in found[world]:
        for name in CHUNKINGS:
            one, other = each["exact 4"], each[f"exact {name}"]
            assert len(one["sums"]) == len(other["sums"]) > 4
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one["sums"], other["sums"], strict=True))


@pytest.mark.parametrize("reduction", ["exact", "fast"])
@pytest.mark.parametrize("world", ["store", "cards"])
def test_the_store_gets_every_gradient_and_loss(found: Found, world: str, reduction: str) -> None:
    count = {"store": 2, "cards": 4}[world]
    parts, losses = reference([Part(n) for n in range(count)], batches(), square)
    for rank, each in enumerate(found[world]):
        for name in CHUNKINGS:
            case = each[f"{reduction} {name}"]
            assert error(case["gradients"], total(parts, range(rank, count, 2))) < 1e-5
            assert case["launched"] == list(range(case["buckets"]))
            assert set(case["fires"]) == {1}
            assert rank == 0 or case["losses"] == pytest.approx(losses, rel=1e-5)


def test_wrong_shapes_are_refused_before_anything_is_sent(found: Found) -> None:
    for cut, changed in found["shapes"]:
        assert "(5, 8)" in cut and "torch.cat" in cut
        assert "(3, 8)" in changed and "(4, 8)" in changed and "pad" in changed


@pytest.mark.parametrize("mesh", ["tp", "fsdp"])
@pytest.mark.parametrize("name", ["4", "1+3"])
def test_inside_stages_anything_goes(found: Found, mesh: str, name: str) -> None:
    for each in found[mesh]:
        case = each[name]
        assert case["sharded"]
        assert case["error"] < 1e-5
        assert not case["last"] or case["losses"] == pytest.approx(each["expected"], rel=1e-5)
        assert case["norm"] == pytest.approx(1, rel=1e-5) and case["clipped"] == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize("mesh", ["tp", "fsdp"])
@pytest.mark.parametrize("name", ["4", "1+3"])
def test_grad_stays_what_was_attached_and_hooks_fire_per_microbatch(found: Found, mesh: str, name: str) -> None:
    for each in found[mesh]:
        assert each[name]["kept"]
        assert each[name]["fires"] == [MICROBATCHES]


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
