"""Train a small GPT on real text: a plain training script, and the few lines (marked `recover`) that join it to a run.

Alone::

    python examples/train_gpt.py

With four replicas, any three of which may die::

    recover launch --replicas 4 examples/train_gpt.py --reduction exact
"""
from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable

import torch
from torch.nn.utils import clip_grad_norm_

import recover
from model import GPT, Config, loss_fn
from text import load


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", metavar="FILE", help="what to learn (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--microbatches", type=int, default=16, help="per step, over all replicas")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a microbatch")
    parser.add_argument("--block", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--workers", type=int, default=0, help="of the data loader, per replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--reduction", choices=("fast", "exact"), default="fast")
    parser.add_argument("--backend", help="of the sums between replicas (default: what the launcher says, or tcp)")
    parser.add_argument("--policy", default="balanced", help="who computes what (see docs/policies.md)")
    parser.add_argument("--hash-every", type=int, default=0, metavar="N",
                        help="hash weights and optimizer state after every N steps (0: only at the end)")
    parser.add_argument("--checkpoint", metavar="DIR", help="keep the state there, and go on from it (see docs/checkpoints.md)")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="N", help="steps")
    return parser.parse_args(argv)


def schedule(steps: int, warmup: int = 5) -> Callable[[int], float]:
    """The learning rate's factor at a step: a short linear warm-up, then a cosine down to a tenth."""
    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        done = (step - warmup) / max(1, steps - warmup)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))
    return factor


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    try:
        dataset = load(args.text, args.block)
    except ValueError as mistake:
        sys.exit(f"train_gpt.py: {mistake}")
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(args.seed)
    config = Config(block=args.block, layers=args.layers, width=args.width, dropout=args.dropout)
    model = GPT(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(args.steps))

    keep = recover.Checkpoints(args.checkpoint, every=args.checkpoint_every) if args.checkpoint else None
    run = recover.join(microbatches=args.microbatches, seed=args.seed, reduction=args.reduction,    # recover
                       policy=args.policy, backend=args.backend, hash_every=args.hash_every, checkpoint=keep)
    run.manage(model, optimizer, scheduler)                                                         # recover
    if args.workers:
        data = run.loader(dataset, args.batch_size, num_workers=args.workers)                       # recover
    else:
        data = run.data(dataset, batch_size=args.batch_size)                                        # recover

    with run:
        for step in run.steps(args.steps):                                                          # recover
            for microbatch in step:                                                                 # recover
                x, y = (part.to(device) for part in data[microbatch])
                step.backward(loss_fn(model(x), y))                                                 # recover
            norm = clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if run.is_leader and step.index % 10 == 0:
                print(f"step {step.index:4d}  loss {step.loss:.4f}  gradient norm {norm:.3f}", flush=True)
        if run.is_leader:
            print(f"done: {args.steps} steps, loss {step.loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
