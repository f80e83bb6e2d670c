"""Training loops with one guard left out each, for the negative controls: a run with it must not pass for a good one."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import run_script
from harness import Script
from run_script import Setup, update

import recover
from recover.protocol import requests as ask
from recover.training.evaluation import Evaluation, Evaluator


def launches_early(run: recover.Run) -> None:
    """Buckets leave in the first microbatch instead of the last one owed."""
    advance = run.engine.advance

    def advanced() -> Any:
        request = advance()
        if isinstance(request, ask.Compute):
            run.engine.launching = request = replace(request, last=True)
        return request
    run.engine.advance = advanced


def keeps_local(run: recover.Run) -> None:
    """Local sums of gradients are not emptied at a new step."""
    store = run.sums.store
    begin = store.begin
    store.begin = lambda step: begin(step) if step == 0 else store.clear()


def boasts(run: recover.Run) -> None:
    """Reports every bucket that it launched as whole, without waiting for the operations to end."""
    engine = run.engine

    def halted(request: ask.Halt) -> frozenset[int]:
        claimed = frozenset(engine.works) | engine.whole
        engine.group.revoke()
        engine.group.join(5)
        engine.whole |= claimed
        engine.works, engine.fences = {}, {}
        return frozenset(engine.whole)
    engine.handlers[ask.Halt] = halted


def redoes_all(run: recover.Run) -> None:
    """Forgets in a recovery what it has done, as tools do that throw a step away."""
    engine = run.engine
    halt = engine.halt

    def halted(request: ask.Halt) -> frozenset[int]:
        engine.position.done.clear()
        return halt(request)
    engine.handlers[ask.Halt] = halted


def own_seeds(run: recover.Run) -> None:
    """The random state of a microbatch depends on which replica computes it."""
    run.options = run.options.__class__(**{**vars(run.options), "seed": run.options.seed + run.replica})


def drifts(run: recover.Run) -> None:
    """Nothing is wrong with the protocol: the replica's own update is off by one bit once."""
    updated = run._updated

    def off(step: recover.training.step.Step) -> None:
        if step.index == 2:
            parameter = next(run.managed.models[0].parameters()).data
            parameter.view(-1)[0].mul_(1 + 2 ** -20)
        updated(step)
    run._updated = off


MUTANTS: dict[str, Callable[[recover.Run], None]] = {
    each.__name__: each for each in (launches_early, keeps_local, boasts, redoes_all, own_seeds, drifts)}


def train(script: Script) -> None:
    """As `run_script.train`, with the guard named `mutant` left out."""
    setup = Setup(script)
    with setup.join() as run:
        for step in run.steps(setup.s["steps"]):
            if step.index == 0:
                MUTANTS[script["mutant"]](run)
            for microbatch in step:
                script.say("microbatch", step=microbatch.step, index=microbatch.index)
                loss, weight = setup.loss(microbatch)
                step.backward(loss, weight=weight)
            update(setup)
            script.say("step", step=step.index, loss=step.loss.hex())
    script.say("done")


def enters_twice(script: Script) -> None:
    """Microbatches are in the table of scores twice."""
    score = Evaluator.score

    def scored(self: Evaluator, step: int, indices: Sequence[int]) -> None:
        score(self, step, indices)
        for index in indices:
            self.table.entered(index)
    Evaluator.score = scored
    run_script.evaluates(script)


def scores_twice(script: Script) -> None:
    """The parts of an evaluation set overlap."""
    of = Evaluation.of
    Evaluation.of = lambda self, index, microbatches: range(of(self, index, microbatches).start,
                                                            min(self.batches, of(self, index, microbatches).stop + 1))
    run_script.evaluates(script)
