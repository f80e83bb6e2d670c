"""The training script of the run tests: a tiny model with everything that scripts do, switched by settings."""
from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

import msgspec
import torch
from harness import Script
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

import recover
from recover.protocol import catchup
from recover.protocol import requests as ask
from recover.training import joining
from recover.training.fetching import Fetch
from recover.training.giving import Giver, What
from recover.training.sampling import Sampler, Samples, seed_everything

VOCABULARY, WIDTH, LENGTH, BATCH = 32, 16, 8, 2
TEXT = torch.randint(0, VOCABULARY, (4096, LENGTH + 1), generator=torch.Generator().manual_seed(5))

DEFAULTS: dict[str, Any] = dict(
    steps=30, microbatches=12, seed=3, reduction="exact", hash_every=1, policy="balanced", nonfinite="raise",
    buffers="leader", clip=True, zero_grad="after", set_to_none=True, tied=False, batch_norm=False, workers=0,
    weighted=False, metrics=False, reference=False, width=WIDTH, order="usual", data_length=4096, spike=None, linger=0.0,
    unused=None, forget=None, late=0.0, boost=None, dtype="float32", dies=None, compile=None, optimizer="adamw", piece=None,
    drip=0.0, kept=None, lag=0.0, wrong=None, checkpoint=None, save=(), drag=0.0, samples=37, killer=None, skip=(),
    poison="stop", orders=None, fails=None)
"""spike, boost: [step, index] whose loss is NaN, or a thousand million times as large. linger: seconds before each
microbatch; late: before the last update. unused: the step from which on a further layer is used. forget: {"step",
"buckets"}: see `forgetful`. dies: "form" (see `dies_forming`), or "giving", "fetching" (see `joins`).
optimizer: or "sgd". piece, drip, kept, lag, wrong: see `joins`. order, width: make a model that does not fit the others'.
compile: torch.compile's arguments. checkpoint: arguments of recover.Checkpoints. save: steps in which to call run.save().
drag: seconds after each microbatch. samples: of `evaluates`. killer: [step, index] that kills whoever computes it.
orders: a directory; see `misbehave`. fails: see `joins`."""


class Tokens(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Random sequences: (x, y), each [LENGTH] int64. `noisy`: x is changed at random, from torch's generator."""

    def __init__(self, length: int = 4096, noisy: bool = False) -> None:
        self.length, self.noisy = length, noisy

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = TEXT[index, :-1], TEXT[index, 1:]
        if self.noisy:
            x = torch.where(torch.rand(LENGTH) < 0.1, torch.randint(0, VOCABULARY, (LENGTH,)), x)
        return x, y


class Tiny(nn.Module):
    """Eight parameters in at least four buckets of 6 KB."""

    def __init__(self, width: int = WIDTH, tied: bool = False, batch_norm: bool = False, order: str = "usual",
                 unused: int | None = None) -> None:
        super().__init__()
        self.wakes = unused
        if unused is not None:
            self.unused = nn.Linear(width, width)
        if order == "usual":
            self.embedding = nn.Embedding(VOCABULARY, width)
        self.up = nn.Linear(width, 3 * width)
        self.norm = nn.BatchNorm1d(3 * width) if batch_norm else nn.LayerNorm(3 * width)
        self.dropout = nn.Dropout(0.2)
        self.down = nn.Linear(3 * width, width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        if order != "usual":
            self.embedding = nn.Embedding(VOCABULARY, width)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, step: int = 0) -> Tensor:
        """[batch, length] int64 -> [batch * length, VOCABULARY]"""
        h = self.embedding(x).flatten(0, 1)
        if self.wakes is not None and step >= self.wakes:
            h = h + self.unused(h)
        return self.head(h + self.down(self.dropout(torch.relu(self.norm(self.up(h))))))


class Setup:
    """Everything a script makes before it joins, from its settings."""

    def __init__(self, script: Script) -> None:
        self.s = s = DEFAULTS | script.settings
        self.turns = 0
        torch.manual_seed(s.get("init", 11))
        self.model = Tiny(s["width"], s["tied"], s["batch_norm"], s["order"], s["unused"])
        self.model.to(getattr(torch, s["dtype"]))
        if s["compile"] is not None:
            self.model = torch.compile(self.model, **s["compile"])
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3, weight_decay=0.1)
        if s["optimizer"] == "sgd":
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=3e-2, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / math.sqrt(n + 1))

    def join(self) -> recover.Run:
        s = self.s
        run = recover.join(microbatches=s["microbatches"], seed=s["seed"], reduction=s["reduction"], policy=s["policy"],
                           hash_every=s["hash_every"], nonfinite=s["nonfinite"], buffers=s["buffers"],
                           skip=s["skip"], poison=s["poison"],
                           checkpoint=recover.Checkpoints(**s["checkpoint"]) if s["checkpoint"] else None,
                           bucket_bytes=6144, first_bucket_bytes=1024)
        run.manage(self.model, self.optimizer, self.scheduler)
        dataset = Tokens(s["data_length"], noisy=s["workers"] > 0)
        self.data = run.loader(dataset, BATCH, num_workers=s["workers"]) if s["workers"] else run.data(dataset, BATCH)
        return run

    def tokens(self, microbatch: recover.Microbatch) -> int:
        """How many of its tokens count: 0 for some microbatches."""
        return (7 * microbatch.step + 5 * microbatch.index) % 4 * 3

    def loss(self, microbatch: recover.Microbatch) -> tuple[Tensor, float | None]:
        x, y = self.data[microbatch]
        logits, wanted = self.model(x, microbatch.step), y.flatten()
        if self.s["spike"] == [microbatch.step, microbatch.index]:
            logits = logits * math.nan
        if not self.s["weighted"]:
            loss = cross_entropy(logits, wanted)
            return loss * 1e9 if self.s["boost"] == [microbatch.step, microbatch.index] else loss, None
        count = self.tokens(microbatch)
        return cross_entropy(logits[:count], wanted[:count], reduction="sum"), float(count)

    def truth(self, length: int) -> float:
        """The mean loss of the first `length` samples, in one go."""
        self.model.eval()
        with torch.no_grad():
            loss = cross_entropy(self.model(TEXT[:length, :-1]), TEXT[:length, 1:].flatten())
        self.model.train()
        return float(loss)

    def reference_error(self, run: recover.Run, step: recover.training.step.Step) -> float:
        """|.grad - float64 mean of every microbatch's float32 gradient| / |mean|, all replayed here."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
        weight = 0.0
        for index in range(self.s["microbatches"]):
            seed_everything(run.seed, step.index, index)
            loss, count = self.loss(recover.Microbatch(step.index, index))
            weight += 1.0 if count is None else count
            for total, part in zip(sums, torch.autograd.grad(loss, parameters), strict=True):
                total += part.double()
        seed_everything(run.seed, step.index, "commit")
        off = sum(float((p.grad.double() - total / weight).square().sum()) for p, total in zip(parameters, sums, strict=True))
        return math.sqrt(off / sum(float((total / weight).square().sum()) for total in sums))


def forgetful(run: recover.Run, step: int, buckets: list[int]) -> None:
    """In the first recovery of `step`, as if these buckets had not come in time: others must forward or redo them."""
    halt = run.engine.halt
    left = [set(buckets)]

    def halted(request: Any) -> frozenset[int]:
        whole = halt(request)
        if request.step != step or not left:
            return whole
        run.engine.whole -= left.pop()
        return frozenset(run.engine.whole)
    run.engine.handlers[ask.Halt] = halted


def dies_forming(run: recover.Run) -> None:
    """Is killed after the first view was formed, before anything is computed."""
    steps = run._start

    def start(count: int) -> None:
        steps(count)
        run.engine.handlers[ask.Form] = lambda request: os.kill(os.getpid(), signal.SIGKILL)
    run._start = start


def joins(setup: Setup) -> None:
    """Everything that a test changes about joining. piece: bytes; drip: seconds before each; kept: bytes of steps to be replayed.

    dies: "giving" or "fetching" the third piece. wrong: "copy": takes a copy for that of the step after it; "skip": replays a
    step without its sums. fails: the question that a giver's thread fails at.
    """
    s, count = setup.s, [0]
    catchup.PIECE = s["piece"] or catchup.PIECE
    joining.KEPT_BYTES = s["kept"] or joining.KEPT_BYTES
    answer, take, put, replay = Giver._answer, Fetch._take_piece, joining.Joiner._put, joining.Joiner._replay

    def count_to_three() -> None:
        count[0] += 1
        if count[0] == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    def answers(self: Giver, group: Any, joiner: int, question: list[int]) -> Any:
        if question[0] == What.PIECE:
            count_to_three()
        return answer(self, group, joiner, question)

    def fails(self: Giver, group: Any, joiner: int, question: list[int]) -> Any:
        if question[0] == What[s["fails"]]:
            raise RuntimeError("as planned")
        return answer(self, group, joiner, question)

    def takes(self: Fetch, *given: Any) -> None:
        time.sleep(s["drip"])
        if s["dies"] == "fetching":
            count_to_three()
        take(self, *given)

    def puts(self: joining.Joiner, segment: joining.Segment) -> None:
        head = msgspec.structs.replace(segment.head, step=segment.start + 1)
        put(self, joining.Segment(segment.start + 1, head, segment.data, segment.hole))

    def replays(self: joining.Joiner) -> ask.Commit:
        request = replay(self)
        count[0] += 1
        if count[0] == 1:
            setup.model.zero_grad(set_to_none=True)
        return request

    if s["fails"]:
        Giver._answer = fails
    if s["dies"] == "giving":
        Giver._answer = answers
    Fetch._take_piece = takes
    if s["wrong"] == "copy":
        joining.Joiner._put = puts
    if s["wrong"] == "skip":
        joining.Joiner._replay = replays


def misbehave(setup: Setup, run: recover.Run) -> None:
    """If a file says so, which is then gone: hang for ever, or drop the connections. Once it is under way."""
    setup.turns += 1
    if setup.turns < 5 or not setup.s["orders"]:
        return
    for order in ("hang", "cut"):
        file = os.path.join(setup.s["orders"], f"{order}{os.environ['RECOVER_REPLICA']}")
        if os.path.exists(file):
            os.unlink(file)
            if order == "hang":
                time.sleep(3600)
            if run.engine.group is not None:
                run.engine.group.sever()


def zero(setup: Setup, place: str) -> None:
    if setup.s["zero_grad"] in (place, "everywhere"):
        setup.optimizer.zero_grad(set_to_none=setup.s["set_to_none"])


def update(setup: Setup) -> None:
    """What comes after the inner loop."""
    if setup.s["clip"]:
        clip_grad_norm_(setup.model.parameters(), 0.05)
    setup.optimizer.step()
    setup.scheduler.step()
    zero(setup, "after")


def train(script: Script) -> None:
    """The loop. Says each microbatch that was handed out, and each step's loss and metrics."""
    setup = Setup(script)
    with setup.join() as run:
        run.on_preempted(lambda step: script.say("preempted", step=step, hash=run.hash()))
        joins(setup)
        if setup.s["dies"] == "form":
            dies_forming(run)
        first = True
        for step in run.steps(setup.s["steps"]):
            if setup.s["forget"] and step.index == 0:
                forgetful(run, **setup.s["forget"])
            if first and step.index:
                time.sleep(setup.s["lag"])
            first = False
            zero(setup, "before")
            for microbatch in step:
                script.say("microbatch", step=microbatch.step, index=microbatch.index)
                if setup.s["linger"]:
                    time.sleep(setup.s["linger"])
                zero(setup, "inside")
                misbehave(setup, run)
                if setup.s["killer"] == [microbatch.step, microbatch.index]:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss, weight = setup.loss(microbatch)
                zero(setup, "inside")
                if setup.s["metrics"]:
                    step.add("double", 2.0 * microbatch.index)
                    if microbatch.index % 3 == 0:
                        step.add("thirds", loss.detach())
                step.backward(loss, weight=weight)
                zero(setup, "inside")
                time.sleep(setup.s["drag"])
            if setup.s["reference"] and not step.skipped:
                script.say("error", step=step.index, relative=setup.reference_error(run, step))
            if setup.s["late"] and step.index == setup.s["steps"] - 1:
                time.sleep(setup.s["late"])
            update(setup)
            if step.index in setup.s["save"]:
                run.save()
            script.say("step", step=step.index, loss=step.loss.hex(), metrics=step.metrics, skipped=step.skipped,
                       buckets=run.sums.gradient_count, leader=run.is_leader, at=time.monotonic())
    script.say("done", cpu=time.process_time())


class Numbered(Tokens):
    """An evaluation set whose items say which they are."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return *super().__getitem__(index), index


def evaluates(script: Script) -> None:
    """Evaluates every third step and at the end. Says which samples were scored, and what came out."""
    setup = Setup(script)
    with setup.join() as run:
        now = [0]

        def score(batch: list[Tensor]) -> dict[str, tuple[Tensor, int]]:
            x, y, numbers = batch
            assert not setup.model.training
            script.say("scored", step=now[0], samples=numbers.tolist())
            loss = cross_entropy(setup.model(x), y.flatten(), reduction="sum")
            return {"loss": (loss, y.numel()), "sum of numbers": (numbers.sum(), 1)}

        run.evaluate(Numbered(setup.s["samples"]), 4, score, every=3)
        for step in run.steps(setup.s["steps"]):
            now[0] = step.index
            for microbatch in step:
                script.say("microbatch", step=microbatch.step, index=microbatch.index)
                assert setup.model.training
                loss, weight = setup.loss(microbatch)
                step.backward(loss, weight=weight)
            if step.evaluation:
                script.say("evaluation", step=step.index, scores=step.evaluation, truth=setup.truth(37))
            update(setup)
            script.say("step", step=step.index, loss=step.loss.hex(), leader=run.is_leader)
            now[0] = step.index + 1
        assert all(p.grad is None for p in setup.model.parameters())
        script.say("evaluation", step=now[0], scores=run.evaluation, truth=setup.truth(37))
    script.say("done")


# ---------------------------------------------------------------- for comparison

def plain_loop(script: Script) -> None:
    """What the run must be like, without it: one process, the same samples and random states."""
    setup = Setup(script)
    s = setup.s
    setup.data = Samples(Tokens(s["data_length"]), Sampler(s["data_length"], s["seed"], s["microbatches"], BATCH))
    for step in range(s["steps"]):
        losses = []
        left = [index for index in range(s["microbatches"]) if [step, index] not in s["skip"] and step not in s["skip"]]
        for index in left:
            seed_everything(s["seed"], step, index)
            loss, _ = setup.loss(recover.Microbatch(step, index))
            (loss / len(left)).backward()
            losses.append(float(loss.detach()))
        update(setup)
        script.say("step", step=step, loss=(math.fsum(losses) / len(losses) if losses else math.nan).hex())


def loses_one(script: Script) -> None:
    """One microbatch of each step counts half."""
    setup = Setup(script)
    with setup.join() as run:
        for step in run.steps(setup.s["steps"]):
            for microbatch in step:
                loss, _ = setup.loss(microbatch)
                step.backward(loss * 0.5 if microbatch.index == 5 else loss)
            script.say("error", step=step.index, relative=setup.reference_error(run, step))
            update(setup)


# ---------------------------------------------------------------- scripts that do it wrong

def leaves_early(script: Script) -> None:
    setup = Setup(script)
    with setup.join() as run:
        for step in run.steps(setup.s["steps"]):
            for microbatch in step:
                step.backward(setup.loss(microbatch)[0])
                if step.index == 2:
                    break
            update(setup)


def steps_inside(script: Script) -> None:
    setup = Setup(script)
    with setup.join() as run:
        for step in run.steps(setup.s["steps"]):
            for microbatch in step:
                step.backward(setup.loss(microbatch)[0])
                setup.optimizer.step()


def bare_backward(script: Script) -> None:
    setup = Setup(script)
    with setup.join() as run:
        for step in run.steps(setup.s["steps"]):
            for microbatch in step:
                setup.loss(microbatch)[0].backward()
            update(setup)


def forgets_backward(script: Script) -> None:
    setup = Setup(script)
    with setup.join() as run:
        for step in run.steps(setup.s["steps"]):
            for microbatch in step:
                if microbatch.index % 4 != 1:
                    step.backward(setup.loss(microbatch)[0])
            update(setup)


def stops_early(script: Script) -> None:
    """Ends without an error, in the middle."""
    setup = Setup(script)
    with setup.join() as run:
        for step in run.steps(setup.s["steps"]):
            for microbatch in step:
                step.backward(setup.loss(microbatch)[0])
            update(setup)
            if step.index == 2:
                return


def fails(script: Script) -> None:
    """As scripts do: an error of its own, between two steps."""
    setup = Setup(script)
    with setup.join() as run:
        for step in run.steps(setup.s["steps"]):
            for microbatch in step:
                step.backward(setup.loss(microbatch)[0])
            update(setup)
            if step.index == 2:
                raise KeyError("no such batch")
