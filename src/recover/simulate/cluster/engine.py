"""One run of a plan, event by event (simpy). What a failure means is the strategy's; this keeps time and counts.

Theory of operation
-------------------
* The trainer is in one of three phases: it stands still (`stall` seconds are left), it saves, or it trains: `left` seconds
  of the step in hand and then whole steps, as many as there are until the next save, planned failure or end. It sleeps
  until that is done or news comes, and takes off what has passed. So the number of events follows failures and saves, not
  steps.
* News are a replica's failure (its hardware is gone), its hardware's return (repaired, or a spare), and what a strategy
  asked for with `later`. A failure that would hit a replica which is down hits nothing: that makes a constant rate per
  GPU exact (thinning).
* Exponential failures: one clock for the whole job. Weibull: one for each replica, started anew when it returns.
* Rolling back takes the progress back to `saved` and keeps the time: tokens are those of `saved` again.
"""
from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Generator
from typing import Any, Protocol

import simpy

from recover.simulate.cluster.model import HOUR, Outcome, Plan

Events = Generator[Any, Any, None]
EDGE = 1e-9
"""Seconds that are no time: rounding of sums of floats."""


class Strategy(Protocol):
    """One way to live with failures. It may read the run, and change `stall`, `left` and `members`."""

    name: str
    constant: bool
    """Every committed step sums B microbatches, whoever is left."""

    def begin(self, run: Run) -> None:
        """Set the intervals of saves."""

    def failed(self, run: Run, replica: int) -> None:
        """The replica's hardware is gone."""

    def back(self, run: Run, replica: int) -> None:
        """Its hardware is back, or a spare took its place."""

    def ready(self, run: Run, replica: int) -> None:
        """What was asked for with `run.later`."""

    def step_time(self, run: Run) -> float:
        """Seconds of a step by the present members."""

    def step_tokens(self, run: Run) -> float:
        """Tokens of such a step."""


class Run:
    """One run with one seed. `members` train; hardware that is `down` does not live."""

    def __init__(self, plan: Plan, strategy: Strategy, seed: int) -> None:
        self.plan, self.strategy = plan, strategy
        self.env = simpy.Environment()
        self.random = random.Random(seed)
        self.members: set[int] = set(range(plan.job.replicas))
        self.down: set[int] = set()
        self.awaited: set[int] = set()                      # down, and known to come back
        self.spares = plan.failures.spares
        self.stall = self.saving = 0.0
        self.save_every, self.save_cost = 0, 0.0
        self.step = self.saved = 0
        self.tokens = self.saved_tokens = 0.0
        self.committed = self.discarded = self.rolled_back = self.failures = 0
        self.alive = 0.0                                    # GPU-seconds
        self.over = ""
        self._news: deque[tuple[str, int]] = deque()
        self._bell, self._trainer_done = self.env.event(), self.env.event()
        self._planned = deque(plan.failures.steps if plan.failures.law == "steps" else ())
        strategy.begin(self)
        self.pace = self.worth = 0.0                        # seconds and tokens of a step by the present members
        self.repace()
        self.left = self.pace

    # -- for strategies ---------------------------------------------------------------------------------------------
    @property
    def training(self) -> bool:
        """A step is in hand (nobody stands still or saves)."""
        return not self.stall and not self.saving

    def later(self, seconds: float, replica: int) -> None:
        """Call `ready` for this replica then."""
        self.env.process(self._call(seconds, ("ready", replica)))

    def again(self) -> None:
        """The step in hand begins anew with the present members; what was done of it is thrown away."""
        if self.left < self.pace - EDGE:
            self.discarded += 1
        self.repace()
        self.left = self.pace

    def repace(self) -> None:
        """Members changed: from the next step on, steps take as long as they make it."""
        self.pace = self.strategy.step_time(self) if self.members else math.inf
        self.worth = self.strategy.step_tokens(self) if self.members else 0.0

    def roll_back(self) -> None:
        """Back to what was saved."""
        self.rolled_back += self.step - self.saved
        self.step, self.tokens, self.saving = self.saved, self.saved_tokens, 0.0
        self.again()

    # -- the trainer ------------------------------------------------------------------------------------------------
    def play(self) -> Outcome:
        """To the goal, or until no replica is left for good."""
        self.env.process(self._train())
        self._start_failures()
        self.env.run(until=self._trainer_done)
        total = self.plan.job.gpus + self.plan.failures.spares
        return Outcome(self.tokens, self.env.now, self.alive, self.env.now * total, self.committed, self.discarded,
                       self.rolled_back, self.failures, len(self.members), self.over)

    def _train(self) -> Events:
        while not self._finished():
            self._heed_planned_failure()
            wait = self._until_something()
            if math.isinf(wait) and not self._may_come():
                self.over = "no replica is left"
                break
            before = self.env.now
            yield self._bell if math.isinf(wait) else self.env.timeout(wait) | self._bell
            self._pass(self.env.now - before, min(wait, self._whole_phase()))
            while self._news:
                self._take(*self._news.popleft())
            if self._bell.triggered:
                self._bell = self.env.event()
        self._trainer_done.succeed()

    def _finished(self) -> bool:
        goal = self.plan.goal
        return bool(self.env.now >= goal.seconds - EDGE or self.tokens >= goal.tokens or self.step >= goal.steps
                    or self.alive >= goal.alive_gpu_hours * HOUR - EDGE or self.over)

    def _until_something(self) -> float:
        """Seconds until this phase, or the run, ends."""
        goal, living = self.plan.goal, self._living()
        hours = (goal.alive_gpu_hours * HOUR - self.alive) / living if living else math.inf
        return max(0.0, min(self._whole_phase(), goal.seconds - self.env.now, hours))

    def _whole_phase(self) -> float:
        if self.stall:
            return self.stall
        if self.saving:
            return self.saving
        return self.left + (self._steps_ahead() - 1) * self.pace if self.members else math.inf

    def _steps_ahead(self) -> int:
        """Steps until somebody must look."""
        goal = self.plan.goal
        ends = [self.saved + self.save_every if self.save_every else math.inf, goal.steps,
                self._planned[0] if self._planned else math.inf, self.step + 100_000]
        if goal.tokens < math.inf:
            ends.append(self.step + math.ceil((goal.tokens - self.tokens) / self.worth))
        return max(1, int(min(ends)) - self.step)

    def _pass(self, seconds: float, wait: float) -> None:
        """Take off what has passed; `wait`: what was slept for, to land exactly where a phase ends."""
        self.alive += seconds * self._living()
        if abs(seconds - wait) < EDGE:
            seconds = wait
        if self.stall:
            self.stall = max(0.0, self.stall - seconds)
        elif self.saving:
            self.saving = max(0.0, self.saving - seconds)
            if not self.saving:
                self._save()
        elif self.members:
            self._progress(seconds)

    def _progress(self, seconds: float) -> None:
        if seconds < self.left - EDGE:
            self.left -= seconds
            return
        steps = 1 + int((seconds - self.left + EDGE) / self.pace)
        self.left = self.pace - max(0.0, seconds - self.left - (steps - 1) * self.pace)
        self.step += steps
        self.committed += steps
        self.tokens += steps * self.worth
        if self.save_every and self.step - self.saved >= self.save_every:
            self.saving = self.save_cost
            if not self.saving:
                self._save()

    def _save(self) -> None:
        self.saved, self.saved_tokens = self.step, self.tokens

    def _living(self) -> int:
        return (self.plan.job.replicas - len(self.down)) * self.plan.job.gpus_per_replica

    # -- failures ---------------------------------------------------------------------------------------------------
    def _start_failures(self) -> None:
        match self.plan.failures.law:
            case "weibull":
                for replica in sorted(self.members):
                    self.env.process(self._ageing(replica))
            case "exponential" | "periodic" | "uniform" if math.isfinite(self.plan.mtbf):
                self.env.process(self._failing())

    def _failing(self) -> Events:
        mean, law = self.plan.mtbf, self.plan.failures.law
        while True:
            match law:
                case "exponential":
                    pause = self.random.expovariate(1 / mean)
                case "uniform":
                    pause = self.random.uniform(0, 2 * mean)
                case _:
                    pause = mean
            yield self.env.timeout(pause)
            everyone = range(self.plan.job.replicas)
            up = [r for r in everyone if r not in self.down] or everyone
            self._hit(self.random.choice(everyone if law == "exponential" else up))

    def _ageing(self, replica: int) -> Events:
        """The life of a replica: the first failure of its GPUs, all as old as it is."""
        law = self.plan.failures
        scale = law.mean / math.gamma(1 + 1 / law.shape) * self.plan.job.gpus_per_replica ** (-1 / law.shape)
        yield self.env.timeout(self.random.weibullvariate(scale, law.shape))
        self._hit(replica)

    def _heed_planned_failure(self) -> None:
        while self._planned and self.step >= self._planned[0]:
            self._planned.popleft()
            whole = sorted(self.members - self.down)
            if whole:
                self._hit(whole[-1])
                self._take(*self._news.popleft())

    def _hit(self, replica: int) -> None:
        if replica in self.down:
            return
        self.failures += 1
        self.down.add(replica)
        repair, spare = self.plan.failures.repair, self.spares > 0
        if spare:
            self.spares -= 1
        if spare or math.isfinite(repair):
            self.awaited.add(replica)
            self.env.process(self._call(0.0 if spare else repair, ("back", replica)))
        if spare and math.isfinite(repair):
            self.env.process(self._restock(repair))
        self._ring(("failed", replica))

    def _restock(self, seconds: float) -> Events:
        yield self.env.timeout(seconds)
        self.spares += 1

    def _call(self, seconds: float, news: tuple[str, int]) -> Events:
        yield self.env.timeout(seconds)
        self._ring(news)

    def _ring(self, news: tuple[str, int]) -> None:
        self._news.append(news)
        if not self._bell.triggered:
            self._bell.succeed()

    def _take(self, kind: str, replica: int) -> None:
        match kind:
            case "failed":
                self.strategy.failed(self, replica)
            case "back":
                self.down.discard(replica)
                self.awaited.discard(replica)
                if self.plan.failures.law == "weibull":
                    self.env.process(self._ageing(replica))
                self.strategy.back(self, replica)
            case "ready":
                self.strategy.ready(self, replica)

    def _may_come(self) -> bool:
        """Somebody may still return."""
        return bool(self._news or self.awaited) or len(self.down) < self.plan.job.replicas
