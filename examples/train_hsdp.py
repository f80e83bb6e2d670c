"""Train a Llama of the `transformers` library under FSDP2: several replicas of several ranks (HSDP).

The model's own code is untouched. Three replicas of two ranks each::

    recover launch --replicas 3 --ranks-per-replica 2 examples/train_hsdp.py

Random weights and a small configuration; bf16 parameters with float32 reduction, activation checkpointing, tied
embeddings, clipping by global norm, a learning-rate schedule. What differs from `train_gpt.py` is how the model is built.
"""
from __future__ import annotations

import argparse
import sys

import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import recover
from text import load
from train_gpt import schedule


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", metavar="FILE", help="what to learn (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--microbatches", type=int, default=12, help="per step, over all replicas")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a microbatch, over the ranks of a replica")
    parser.add_argument("--block", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", choices=("bf16", "float32"), default="bf16")
    parser.add_argument("--reduction", choices=("fast", "exact"), default="fast")
    parser.add_argument("--hash-every", type=int, default=0, metavar="N", help="hash the state after every N steps")
    return parser.parse_args(argv)


def build(args: argparse.Namespace, mesh: object) -> LlamaForCausalLM:
    """The library's Llama, checkpointed and sharded over the ranks of this replica."""
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=256, hidden_size=args.width, intermediate_size=2 * args.width, num_hidden_layers=args.layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=args.block, tie_word_embeddings=True))
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, LlamaDecoderLayer))
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if args.precision == "bf16" else MixedPrecisionPolicy()
    if mesh is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def loss_fn(output: CausalLMOutputWithPast, y: Tensor) -> Tensor:
    return cross_entropy(output.logits.float().flatten(0, 1), y.flatten())


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    try:
        dataset = load(args.text, args.block)
    except ValueError as mistake:
        sys.exit(f"train_hsdp.py: {mistake}")

    device = "cuda" if torch.cuda.is_available() else "cpu"
    run = recover.join(microbatches=args.microbatches, seed=args.seed, reduction=args.reduction, hash_every=args.hash_every,
                       first_bucket_bytes=64 << 10)
    model = build(args, run.mesh).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule(args.steps))
    run.manage(model, optimizer, scheduler)
    data = run.data(dataset, batch_size=args.batch_size)

    with run:
        for step in run.steps(args.steps):
            for microbatch in step:
                x, y = (part.to(device) for part in data[microbatch])
                step.backward(loss_fn(model(x), y))
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if run.is_leader and run.place.rank == 0 and step.index % 10 == 0:
                print(f"step {step.index:4d}  loss {step.loss:.4f}", flush=True)
        if run.is_leader and run.place.rank == 0:
            print(f"done: {args.steps} steps, loss {step.loss:.6f}", flush=True)


if __name__ == "__main__":
    main()
