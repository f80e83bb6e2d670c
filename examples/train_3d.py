"""Train the GPT of `train_gpt.py` in replicas of several ranks: pipeline x tensor parallel, or pipeline x FSDP.

Two replicas of four ranks each, one of which may die at any time (its replica leaves, the other goes on)::

    recover launch --replicas 2 --ranks-per-replica 4 examples/train_3d.py --mesh pp=2,tp=2
    recover launch --replicas 2 --ranks-per-replica 4 examples/train_3d.py --mesh pp=2,dp_shard=2

One replica by itself::

    torchrun --nproc-per-node 4 examples/train_3d.py --mesh pp=2,tp=2

The parallelism is plain `torch.distributed`; the lines marked `recover` are the same as in `train_gpt.py`, but for chunks:
a pipeline wants several microbatches at a time.
"""
from __future__ import annotations

import argparse
import math
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import recover
from model import GPT, Config, loss_fn
from recover.parallel.pipeline import Pipeline
from text import load
from train_gpt import schedule


class Stage(nn.Module):
    """The `index`-th of `count` parts of a GPT: bytes [batch, time] or activations [batch, time, width] in, activations
    or logits out. The output layer has weights of its own: the embedding lies on another stage."""

    def __init__(self, config: Config, index: int, count: int) -> None:
        super().__init__()
        whole = GPT(config)                             # every stage draws the same numbers, then keeps its part
        first, last = config.layers * index // count, config.layers * (index + 1) // count
        self.blocks = nn.ModuleDict({str(n): whole.blocks[n] for n in range(first, last)})
        self.bytes = whole.bytes if index == 0 else None
        self.places = whole.places if index == 0 else None
        self.dropout = whole.dropout if index == 0 else None
        self.norm = whole.norm if index == count - 1 else None
        self.head = nn.Linear(config.width, config.vocabulary, bias=False) if index == count - 1 else None
        if self.head is not None:
            self.head.weight.data.copy_(whole.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.bytes is not None:
            x = self.dropout(self.bytes(x) + self.places(torch.arange(x.shape[1], device=x.device)))
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def parallelize(stage: Stage, mesh: DeviceMesh) -> Stage:
    """Tensor parallel over the axis "tp" and FSDP over "dp_shard", where the mesh has them."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        for block in stage.blocks.values():             # attention: weights are split, activations are not
            parallelize_module(block, mesh["tp"], {
                "attention.qkv": ColwiseParallel(output_layouts=Replicate()),
                "attention.out": RowwiseParallel(input_layouts=Replicate()),
                "mlp.0": ColwiseParallel(),
                "mlp.2": RowwiseParallel()})
    if "dp_shard" in names:
        for block in stage.blocks.values():
            fully_shard(block, mesh=mesh["dp_shard"])
        fully_shard(stage, mesh=mesh["dp_shard"])
    return stage


def clip(stage: nn.Module, limit: float, mesh: DeviceMesh) -> float:
    """Scale `.grad` so that its norm over the whole replica, all stages and shards, is at most `limit`; the norm before.

    torch's `clip_grad_norm_` knows one mesh and no other stage.
    """
    gradients = [p.grad for p in stage.parameters() if p.grad is not None]
    parts = [(g.to_local(), g) if isinstance(g, DTensor) else (g, None) for g in gradients]
    peers = mesh.size() // mesh["pp"].size()            # ranks of this stage: each holds a shard, or a copy
    total = torch.zeros((), dtype=torch.float64, device=parts[0][0].device)
    for local, whole in parts:
        shards = 1 if whole is None else math.prod(
            whole.device_mesh.size(axis) for axis, placement in enumerate(whole.placements) if placement.is_shard())
        total += local.double().square().sum() * shards / peers
    dist.all_reduce(total)
    norm = math.sqrt(float(total))
    if norm > limit:
        for local, _ in parts:
            local.mul_(limit / norm)
    return norm


def axes(text: str) -> dict[str, int]:
    """"pp=2,tp=2" -> {"pp": 2, "tp": 2}"""
    try:
        mesh = {name: int(size) for name, size in (axis.split("=") for axis in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form pp=2,tp=2") from None
    if "pp" not in mesh or mesh.keys() - {"pp", "dp_shard", "tp"}:
        raise argparse.ArgumentTypeError(f"this script knows the axes pp, dp_shard and tp, and needs pp; not {text!r}")
    return mesh


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=axes, default=axes("pp=2,tp=2"), help="axes of a replica: pp=2,tp=2 or pp=2,dp_shard=2")
    parser.add_argument("--schedule", default="1f1b", help="of the pipeline: gpipe, 1f1b")
    parser.add_argument("--chunk", type=int, default=4, help="microbatches in the pipeline at a time, at most")
    parser.add_argument("--text", metavar="FILE", help="what to learn (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--microbatches", type=int, default=16, help="per step, over all replicas")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in a microbatch, over the data ranks of a replica")
    parser.add_argument("--block", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reduction", choices=("fast", "exact"), default="fast")
    parser.add_argument("--hash-every", type=int, default=0, metavar="N")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    try:
        dataset = load(args.text, args.block)
    except ValueError as mistake:
        sys.exit(f"train_3d.py: {mistake}")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    run = recover.join(microbatches=args.microbatches, seed=args.seed, reduction=args.reduction,    # recover
                       hash_every=args.hash_every, mesh=args.mesh)
    mesh = run.mesh
    if mesh is None:
        sys.exit("train_3d.py: a pipeline needs several ranks: see the commands at the head of this file")
    torch.manual_seed(args.seed)
    config = Config(block=args.block, layers=args.layers, width=args.width, dropout=args.dropout)
    index, count = mesh["pp"].get_local_rank(), mesh["pp"].size()
    stage = parallelize(Stage(config, index, count).to(device), mesh)
    pipeline = Pipeline({index: stage}, count, loss_fn, group=mesh["pp"].get_group(), schedule=args.schedule,   # recover
                        exact=args.reduction == "exact")
    optimizer = torch.optim.AdamW(stage.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, foreach=False)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(args.steps))
    run.manage(stage, optimizer, scheduler)                                                         # recover
    data = run.data(dataset, batch_size=args.batch_size)                                            # recover

    with run:
        for step in run.steps(args.steps):                                                          # recover
            for chunk in step.chunks(max=args.chunk):                                               # recover
                x, y = (torch.cat(parts).to(device) for parts in zip(*(data[mb] for mb in chunk), strict=True))
                with step.microbatch(*chunk) as m:                                                  # recover
                    pipeline(m).step(x, target=y)                                               # recover
            norm = clip(stage, 1.0, mesh)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if run.is_leader and dist.get_rank() == 0 and step.index % 10 == 0:
                print(f"step {step.index:4d}  loss {step.loss:.4f}  gradient norm {norm:.3f}", flush=True)
        if run.is_leader and dist.get_rank() == 0:
            print(f"done: {args.steps} steps, loss {step.loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
