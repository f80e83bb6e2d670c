"""The training script of the tests of replicas of several ranks: one tiny model under FSDP2, or in a pipeline.

Layouts: "fsdp" (the default mesh), "pp_tp" (two stages, their linear layers split) and "pp_fsdp". Every part of it draws the
same first values as the whole model of one process would, which `reference_error` recomputes every gradient with.
"""
from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from harness import Script
from run_script import LENGTH, VOCABULARY, Tokens, forgetful
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import recover
from recover.parallel.pipeline import Pipeline
from recover.training.sampling import Microbatch, Sampler, Samples, seed_everything

WIDTH, BLOCKS, BATCH = 16, 2, 4
MESHES: dict[str, dict[str, int] | None] = {"fsdp": None, "pp_tp": {"pp": 2, "tp": 2}, "pp_fsdp": {"pp": 2, "dp_shard": 2}}
DEFAULTS: dict[str, Any] = dict(layout="fsdp", steps=4, microbatches=6, reduction="exact", chunk=3, width=WIDTH,
                                reference=False, lose=False, own_seeds=False, doom=None, stays=False, evaluate=0,
                                forget=None, linger=0.0, checkpoint=None, save=())
"""doom: {"replica", "position", "step", "inside"}: see `DOOMS`. lose: a microbatch counts half. own_seeds: of each replica.
linger: seconds before each microbatch of FSDP.
stays: nothing ends a rank whose replica is out. evaluate: so many samples, in every second step.
forget, checkpoint, save: see `run_script`."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Stage(nn.Module):
    """The `index`-th of `count` parts. Of one part, some microbatches also use an expert, on data rank 0 alone."""

    def __init__(self, index: int, count: int, width: int = WIDTH) -> None:
        super().__init__()
        torch.manual_seed(11)                           # each part draws all of it
        words, blocks = nn.Embedding(VOCABULARY, width), [Block(width) for _ in range(BLOCKS)]
        expert, head = nn.Linear(width, width), nn.Linear(width, VOCABULARY, bias=False)
        mine = range(BLOCKS * index // count, BLOCKS * (index + 1) // count)
        self.words = words if index == 0 else None
        self.blocks = nn.ModuleDict({str(n): blocks[n] for n in mine})
        self.expert = expert if count == 1 else None
        self.head = head if index == count - 1 else None

    def forward(self, x: Tensor, expert: bool = False) -> Tensor:
        """[batch, length] int64, or [batch, length, width] -> [batch, length, width or VOCABULARY]"""
        if self.words is not None:
            x = self.words(x)
        for block in self.blocks.values():
            x = block(x)
        if expert:
            x = x + self.expert(x)
        return x if self.head is None else self.head(x)


def loss_fn(logits: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), y.flatten())


def uses_expert(microbatch: Microbatch, part: int) -> bool:
    return part == 0 and microbatch.index % 3 == 1


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Setup:
    """A joined run with its model."""

    def __init__(self, script: Script) -> None:
        self.s = s = DEFAULTS | script.settings
        self.script = script
        mesh = s["mesh"] if "mesh" in s else MESHES[s["layout"]]
        self.run = run = recover.join(microbatches=s["microbatches"], seed=3, reduction=s["reduction"], hash_every=1, mesh=mesh,
                                      bucket_bytes=4096, first_bucket_bytes=1024,
                                      checkpoint=recover.Checkpoints(**s["checkpoint"]) if s["checkpoint"] else None)
        self.stages = 2 if s["layout"].startswith("pp") else 1
        self.model = self.parallelize(Stage(run.place.stage, self.stages, s["width"]))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1, foreach=False)
        run.manage(self.model, self.optimizer)
        self.dataset = Tokens()
        self.data = run.data(self.dataset, BATCH)
        if self.stages > 1:
            self.pipeline = Pipeline({run.place.stage: self.model}, 2, loss_fn, group=run.mesh["pp"].get_group(),
                                     exact=s["reduction"] == "exact")
        if s["evaluate"]:
            run.evaluate(Tokens(s["evaluate"]), BATCH, self.score, every=2)
        if s["own_seeds"]:
            run.options = run.options.__class__(**{**vars(run.options), "seed": run.seed + run.replica})

    def parallelize(self, model: Stage) -> Stage:
        mesh = self.run.mesh
        if "tp" in mesh.mesh_dim_names:
            for block in model.blocks.values():
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        if "dp_shard" in mesh.mesh_dim_names:
            for block in model.blocks.values():
                fully_shard(block, mesh=mesh["dp_shard"])
            fully_shard(model, mesh=mesh["dp_shard"])
        return model

    def computes(self, step: recover.training.step.Step) -> None:
        """The microbatches of a step, in this layout's way."""
        if self.stages == 1:
            for microbatch in step:
                self.say((microbatch,))
                time.sleep(self.s["linger"])
                x, y = self.data[microbatch]
                loss = loss_fn(self.model(x, uses_expert(microbatch, self.run.place.data_rank)), y)
                step.backward(loss * 0.5 if self.s["lose"] and microbatch.index == 2 else loss)
            return
        for chunk in step.chunks(max=self.s["chunk"]):
            self.say(chunk)
            x, y = (torch.cat(parts) for parts in zip(*(self.data[each] for each in chunk), strict=True))
            with step.microbatch(*chunk) as m:
                self.pipeline(m).step(x, target=y)

    def score(self, batch: Any) -> dict[str, tuple[Tensor, int]]:
        x, y = batch
        losses = self.pipeline.evaluate(x, target=y) if self.stages > 1 else [loss_fn(self.model(x), y)]
        return {"loss": (losses[0] * len(x), len(x))} if losses else {}

    def truth(self) -> float:
        """The mean loss of the evaluation set, by the whole model in one go."""
        parts = self.whole()
        x, y = (torch.stack(parts) for parts in zip(*(self.dataset[n] for n in range(self.s["evaluate"])), strict=True))
        with torch.no_grad():
            for part in parts:
                x = part.eval()(x)
        return float(loss_fn(x, y))

    def whole(self) -> list[Stage]:
        """Every stage, unsharded, with the values that the ranks of this replica hold."""
        values = self.everywhere({name: full(p.detach()) for name, p in self.model.named_parameters()})
        parts = [Stage(index, self.stages, self.s["width"]) for index in range(self.stages)]
        for part in parts:
            for name, p in part.named_parameters():
                p.data.copy_(values[name])
        return parts

    def say(self, chunk: tuple[Microbatch, ...]) -> None:
        for each in chunk:
            self.script.say("microbatch", step=each.step, index=each.index)

    # -- one process computes everything --------------------------------------------------------------------------

    def reference_error(self, step: int) -> float:
        """|gradient - float64 mean of every microbatch's float32 gradient| / |mean|, the latter computed here, unsharded."""
        given = self.everywhere({name: full(p.grad) for name, p in self.model.named_parameters() if p.grad is not None})
        parts = self.whole()
        named = {name: p for part in parts for name, p in part.named_parameters()}
        sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in named.items()}
        B, ranks = self.s["microbatches"], self.run.place.data_size
        for index in range(B):
            for rank in range(ranks):
                gradients = torch.autograd.grad(self.plain_loss(parts, Microbatch(step, index), rank), list(named.values()),
                                                allow_unused=True)
                for name, gradient in zip(named, gradients, strict=True):
                    if gradient is not None:
                        sums[name] += gradient.double() / (B * ranks)
        seed_everything(self.run.seed, step, "commit")
        assert given.keys() == {name for name, total in sums.items() if total.any()}
        off = sum(float((given[name].double() - sums[name]).square().sum()) for name in given)
        return math.sqrt(off / sum(float(total.square().sum()) for total in sums.values()))

    def plain_loss(self, parts: list[Stage], microbatch: Microbatch, rank: int) -> Tensor:
        place, length = self.run.place, len(self.dataset)
        data = Samples(self.dataset, Sampler(length, self.run.seed, self.s["microbatches"], BATCH, rank, place.data_size))
        x, y = data[microbatch]
        assert x.shape == (BATCH // place.data_size, LENGTH)
        for index, part in enumerate(parts):
            plain = place.data_size == 1 and index == 0
            seed_everything(self.run.seed, microbatch.step, microbatch.index if plain else f"{microbatch.index}/{rank}/{index}")
            x = part(x, *[uses_expert(microbatch, rank)] * (len(parts) == 1))
        return loss_fn(x, y)

    def everywhere(self, mine: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of all ranks of this replica."""
        given: list[Any] = [None] * self.run.place.ranks
        dist.all_gather_object(given, mine)
        return {name: tensor for each in given for name, tensor in each.items()}


# ---------------------------------------------------------------- dying inside a collective of torch's

def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in(module: Any, *names: str) -> Callable[[Setup], None]:
    """This rank starts its next one of `names` (they vary with torch's version) and is killed before it is over: its peers
    are in the middle of it."""
    def doom(setup: Setup) -> None:
        for name in names:
            if hasattr(module, name):
                setattr(module, name, last(getattr(module, name)))

    def last(plain: Callable[..., Any]) -> Callable[..., None]:
        def started(*args: Any, **kwargs: Any) -> None:
            plain(*args, **kwargs)
            kill()
        return started
    return doom


def dies_in_flush(setup: Setup) -> None:
    """In the backward of the second microbatch of a chunk; others are in the pipeline before and behind it."""
    count = [0]

    def backward(module: nn.Module, given: Any, output: Tensor) -> None:
        count[0] += 1
        if count[0] == 2:
            output.register_hook(lambda gradient: kill())
    setup.model.register_forward_hook(backward)


DOOMS = {"all_gather": dies_in(dist, "all_gather_single", "all_gather_into_tensor"),
         "reduce_scatter": dies_in(dist, "reduce_scatter_single", "reduce_scatter_tensor"),
         "all_reduce": dies_in(functional, "all_reduce"), "flush": dies_in_flush}


# ---------------------------------------------------------------- scripts

def train(script: Script) -> None:
    setup = Setup(script)
    run, doom = setup.run, setup.s["doom"]
    doomed = doom is not None and (doom["replica"], doom["position"]) == (run.replica, run.place.rank)
    with run:
        for step in run.steps(setup.s["steps"]):
            if setup.s["forget"] and step.index == 0:
                forgetful(run, **setup.s["forget"])
            if setup.s["stays"]:
                run.engine.leave_at_once = lambda: None
            if doomed and step.index == doom["step"]:
                DOOMS[doom["inside"]](setup)
            setup.computes(step)
            if step.evaluation:
                script.say("evaluation", step=step.index, scores=step.evaluation, truth=setup.truth())
            if setup.s["reference"]:
                script.say("error", step=step.index, relative=setup.reference_error(step.index))
            if setup.stages == 1:
                clip_grad_norm_(setup.model.parameters(), 0.5)
            setup.optimizer.step()
            setup.optimizer.zero_grad()
            if step.index in setup.s["save"]:
                run.save()
            script.say("step", step=step.index, loss=step.loss.hex(), buckets=run.sums.gradient_count)
        if setup.s["evaluate"]:
            assert all(p.grad is None for p in setup.model.parameters())
            script.say("evaluation", step=setup.s["steps"], scores=run.evaluation, truth=setup.truth())
    script.say("done")


def wrapped(script: Script) -> None:
    """A script that forgot to take off the DDP wrapper."""
    run = recover.join(microbatches=4)
    model = nn.parallel.DistributedDataParallel(Stage(0, 1))
    with run:
        run.manage(model, torch.optim.SGD(model.parameters(), lr=0.1))
