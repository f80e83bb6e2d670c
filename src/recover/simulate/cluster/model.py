"""What is planned: the job, how its machines fail, what each action costs, and what came of it. Values only.

Theory of operation
-------------------
* Time is in seconds, except where a name says hours. A step takes as long as its slowest replica computes, plus one
  reduction, which is not overlapped (give the part that shows).
* The unit that fails is the replica: one failed GPU takes its replica out, and the replica is whole again when the GPU
  was repaired or a spare took its place. *Alive* are the GPUs of whole replicas; *allocated* are all, spares included.
* Tokens count once, when they stay in the model: what is rolled back or thrown away counts nothing.
* Laws of failure. `exponential` and `weibull` speak of one GPU (`mtbf_hours` is its mean); a replica that returns counts
  as new, which for `weibull` means that all its GPUs are (shape below 1: new ones fail more). `periodic` (every so
  often) and `uniform` (between 0 and twice as often) are those of failure injectors and speak of the whole job, as does
  `steps` (at given steps of progress, for published runs that did so).
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

HOUR = 3600.0
Law = Literal["exponential", "weibull", "periodic", "uniform", "steps"]


def require(condition: bool, what: str) -> None:
    """ValueError that says what to change."""
    if not condition:
        raise ValueError(what)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained. `slow` of the replicas (0 to 1) compute at `slow_speed` of the others' speed."""

    replicas: int
    gpus_per_replica: int
    microbatches: int
    tokens_per_step: int
    microbatch: float
    reduction: float
    slow: float = 0.0
    slow_speed: float = 1.0

    def __post_init__(self) -> None:
        require(self.replicas >= 1 and self.gpus_per_replica >= 1, "a job needs at least one replica of one GPU")
        require(self.microbatches >= self.replicas, f"{self.microbatches} microbatches are less than one per replica: raise B, "
                                                    "or give replicas more GPUs")
        require(self.microbatch > 0 and self.reduction >= 0 and self.tokens_per_step > 0,
                "microbatch seconds and tokens per step must be above 0, reduction seconds not negative")
        require(0 <= self.slow <= 1 and 0 < self.slow_speed <= 1, "slow must be in [0, 1] and slow_speed in (0, 1]")

    @property
    def gpus(self) -> int:
        return self.replicas * self.gpus_per_replica

    @property
    def per_replica(self) -> int:
        """Microbatches of the busiest replica while all are there."""
        return -(-self.microbatches // self.replicas)

    @property
    def step(self) -> float:
        """Seconds of a step in which nothing fails, all replicas alike and whole."""
        return self.per_replica * self.microbatch + self.reduction

    @property
    def rate(self) -> float:
        """Tokens per GPU and second when nothing fails and nothing is saved: what 100 % is."""
        return self.tokens_per_step / (self.step * self.gpus)

    def speeds(self) -> dict[int, float]:
        """Replica -> speed; the last ones are the slow ones."""
        fast = self.replicas - round(self.slow * self.replicas)
        return {r: 1.0 if r < fast else self.slow_speed for r in range(self.replicas)}


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How machines fail. `mean`: of one GPU (`exponential`, `weibull`) or of the job (`periodic`, `uniform`), seconds.

    `repair`: until a failed GPU is back (infinite: never). `spares`: GPUs that wait in reserve; each replaces one.
    `steps`: for the law `steps`, where the progress of the run meets its failures.
    """

    law: Law = "exponential"
    mean: float = math.inf
    shape: float = 1.0
    repair: float = math.inf
    spares: int = 0
    steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(self.mean > 0 and self.shape > 0 and self.repair >= 0 and self.spares >= 0,
                "mean and shape must be above 0, repair and spares not negative")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What actions take, in seconds; intervals in steps.

    detection: from a failure until the others know. reform: until the survivors' groups stand. join: what everybody
    waits when a replica comes in. replica_restart: from hardware to a replica that can join (processes, weights).
    restart: from a known failure until the whole job trains again. save: what a checkpoint holds everybody up; every
    `interval` steps (0: at the Young/Daly optimum). memory_restart, memory_save, memory_interval: the same from the
    memory of peers. swap: until a spare has taken the place of a failed machine inside a job that stands. stall: of
    replica rejoin, until the others go on. rare: strategies that seldom need a checkpoint save at `rare` times `interval`.
    """

    detection: float = 4.0
    reform: float = 2.0
    join: float = 2.0
    replica_restart: float = 300.0
    restart: float = 600.0
    save: float = 30.0
    interval: int = 0
    memory_restart: float = 180.0
    memory_save: float = 0.5
    memory_interval: int = 1
    swap: float = 120.0
    stall: float = 180.0
    rare: int = 10

    def __post_init__(self) -> None:
        require(min(self.detection, self.reform, self.join, self.replica_restart, self.restart, self.save, self.memory_restart,
                    self.memory_save, self.swap, self.stall) >= 0, "no cost may be negative")
        require(self.interval >= 0 and self.memory_interval >= 1 and self.rare >= 1,
                "interval must not be negative, memory_interval and rare at least 1")


@dataclass(frozen=True, kw_only=True)
class Goal:
    """When to stop: whichever comes first."""

    seconds: float = math.inf
    tokens: float = math.inf
    alive_gpu_hours: float = math.inf
    steps: float = math.inf

    def __post_init__(self) -> None:
        require(min(self.seconds, self.tokens, self.alive_gpu_hours, self.steps) < math.inf,
                "a goal must name seconds, tokens, GPU-hours or steps")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One question to the planner."""

    job: Job
    failures: Failures
    costs: Costs = field(default_factory=Costs)
    goal: Goal

    @property
    def mtbf(self) -> float:
        """Mean seconds between failures of the whole job (`steps`: between its steps)."""
        match self.failures.law:
            case "periodic" | "uniform":
                return self.failures.mean
            case "steps":
                steps = (0, *self.failures.steps)
                return self.job.step * steps[-1] / max(1, len(steps) - 1) if len(steps) > 1 else math.inf
            case _:
                return self.failures.mean / self.job.gpus


@dataclass(frozen=True)
class Outcome:
    """What one run came to. `over`: why it ended early; "" if it reached its goal."""

    tokens: float
    seconds: float
    alive_gpu_seconds: float
    allocated_gpu_seconds: float
    committed: int
    discarded: int
    rolled_back: int
    failures: int
    replicas_left: int
    over: str = ""

    def of_alive(self, job: Job) -> float:
        """Tokens per alive GPU-second, as a share of the failure-free rate."""
        return self.tokens / (self.alive_gpu_seconds * job.rate) if self.alive_gpu_seconds else 0.0

    def of_allocated(self, job: Job) -> float:
        """Tokens per allocated GPU-second, as a share of the failure-free rate."""
        return self.tokens / (self.allocated_gpu_seconds * job.rate) if self.allocated_gpu_seconds else 0.0
