"""Published figures beside what this planner gets for them, each with the assumptions that the figure needs.

A publication seldom says everything. Where a number had to be *fitted* so that the planner meets a figure, the
assumptions say so, and that figure then proves nothing; the others of the same preset do.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from recover.simulate.cluster.engine import Run
from recover.simulate.cluster.forms import interval, stalled
from recover.simulate.cluster.model import HOUR, Costs, Failures, Goal, Job, Outcome, Plan
from recover.simulate.cluster.strategies import WAYS

DAY = 24 * HOUR


@dataclass(frozen=True)
class Row:
    """One figure. `published`: as it was printed, or "-" where this is a forecast."""

    what: str
    published: str
    got: str


@dataclass(frozen=True)
class Preset:
    """`rows(seeds)` computes."""

    name: str
    source: str
    assumptions: tuple[str, ...]
    rows: Callable[[int], list[Row]]


def outcomes(plan: Plan, way: str, seeds: int) -> list[Outcome]:
    return [Run(plan, WAYS[way](plan), seed).play() for seed in range(seeds)]


def allocated(plan: Plan, way: str, seeds: int) -> str:
    mean, half = interval([o.of_allocated(plan.job) for o in outcomes(plan, way, seeds)])
    return f"{100 * mean:.1f} %" + (f" ± {100 * half:.1f}" if math.isfinite(half) and half > 5e-4 else "")


# ---------------------------------------------------------------- the paper

NO_WAIT = Costs(detection=0, reform=0, join=0, restart=0, save=0, interval=32)
PAPER_3D = Job(replicas=16, gpus_per_replica=8, microbatches=128, tokens_per_step=524_288, microbatch=1.25, reduction=7.3)
PAPER_HSDP = Job(replicas=32, gpus_per_replica=16, microbatches=256, tokens_per_step=1_048_576, microbatch=1.25, reduction=1.25)


def half_intervals(job: Job, losses: int) -> Failures:
    """Failures in the middle of each checkpoint interval but the first, never repaired."""
    return Failures(law="steps", steps=tuple(NO_WAIT.interval * k + NO_WAIT.interval // 2 for k in range(1, losses + 1)))


def tokens_at(job: Job, hours: float, losses: int) -> float:
    """Tokens of this project over tokens of checkpoint-restart, at equal alive GPU-hours."""
    plan = Plan(job=job, failures=half_intervals(job, losses), costs=NO_WAIT, goal=Goal(alive_gpu_hours=hours))
    ours, theirs = (outcomes(plan, way, 1)[0].tokens for way in ("balanced-no-rejoin", "checkpoint-restart"))
    return ours / theirs


def last_interval(job: Job, losses: int) -> float:
    """Throughput per alive GPU-hour over the interval in which the last loss falls: ours over theirs."""
    def rate(way: str) -> float:
        ends = []
        for steps in (losses * 32, losses * 32 + 32):
            plan = Plan(job=job, failures=half_intervals(job, losses), costs=NO_WAIT, goal=Goal(steps=steps))
            ends.append(outcomes(plan, way, 1)[0])
        return (ends[1].tokens - ends[0].tokens) / (ends[1].alive_gpu_seconds - ends[0].alive_gpu_seconds)
    return rate("balanced-no-rejoin") / rate("checkpoint-restart")


def paper_3d(seeds: int) -> list[Row]:
    low, high = (last_interval(PAPER_3D, losses) for losses in (11, 12))
    return [Row("more tokens than checkpoint-restart at 234 alive GPU-hours", "+74.9 %",
                f"+{100 * (tokens_at(PAPER_3D, 234, 15) - 1):.1f} %"),
            Row("throughput per alive GPU-hour after 11 and 12 of 16 losses, over checkpoint-restart's", "2.23x",
                f"{low:.2f}x to {high:.2f}x"),
            Row("the same after the first loss", "-", f"{last_interval(PAPER_3D, 1):.2f}x")]


def paper_hsdp(seeds: int) -> list[Row]:
    return [Row("more tokens than checkpoint-restart at 1338 alive GPU-hours", "+47.4 %",
                f"+{100 * (tokens_at(PAPER_HSDP, 1338, 31) - 1):.1f} %")]


# ---------------------------------------------------------------- FT-HSDP, and on from there

FT_JOB = Job(replicas=12, gpus_per_replica=8192, microbatches=12 * 16, tokens_per_step=12 * 16 * 2**20, microbatch=1.2,
             reduction=0.8)
FT_COSTS = Costs(detection=0, restart=600, stall=180, replica_restart=600, reform=30, join=0, interval=10**9, save=0)
FT_PLAN = Plan(job=FT_JOB, failures=Failures(law="periodic", mean=18 * 60, repair=0), costs=FT_COSTS, goal=Goal(seconds=5 * DAY))
STALLS = (5, 30, 60, 180)
"""Seconds from a failure until the survivors' new groups work: what it takes decides everything at this size."""


def with_stall(plan: Plan, seconds: float) -> Plan:
    return replace(plan, costs=replace(plan.costs, detection=0.0, reform=seconds))


def ft_hsdp(seeds: int) -> list[Row]:
    synchronous = restarting_in_place(FT_PLAN)
    rows = [Row("synchronous, 10 min stall: effective training time", "44 %", allocated(synchronous, "in-memory", 1)),
            Row("the same, closed form", "44 %", f"{100 * stalled(1080, 600):.1f} %"),
            Row("replica rejoin: 3 min stall, then 7 min at 11 of 12", "80 %", allocated(FT_PLAN, "replica-rejoin", 1)),
            Row("the same, closed form", "80 %", f"{100 * stalled(1080, 180, 420, 1 / 12):.1f} %")]
    rows += [Row(f"this project with rejoin, survivors wait {s} s", "-", allocated(with_stall(FT_PLAN, s), "balanced", 1))
             for s in STALLS]
    random = replace(FT_PLAN, failures=replace(FT_PLAN.failures, law="exponential", mean=1080.0 * FT_JOB.gpus))
    rows += [Row("replica rejoin, exponential failures", "-", allocated(random, "replica-rejoin", seeds)),
             Row("this project, exponential failures, 30 s", "-", allocated(with_stall(random, 30), "balanced", seeds))]
    return rows


def restarting_in_place(plan: Plan) -> Plan:
    """The stall of synchronous training as published: it holds all that a failure costs, lost work included."""
    return replace(plan, costs=replace(plan.costs, memory_restart=plan.costs.restart, memory_save=0.0))


def forward(seeds: int) -> list[Row]:
    rows = []
    for name, replicas in (("98,304", 12), ("598,016", 73)):
        job = replace(FT_JOB, replicas=replicas, microbatches=replicas * 16,
                      tokens_per_step=replicas * 16 * 2**20)
        failures = Failures(law="exponential", mean=1080.0 * FT_JOB.gpus, repair=0)
        plan = Plan(job=job, failures=failures, costs=FT_COSTS, goal=Goal(seconds=DAY))
        rows.append(Row(f"{name} GPUs: a failure every", "-", f"{plan.mtbf / 60:.1f} min"))
        rows.append(Row(f"{name} GPUs: replica rejoin, 3 min stall", "-", allocated(plan, "replica-rejoin", seeds)))
        rows += [Row(f"{name} GPUs: this project with rejoin, survivors wait {s} s", "-",
                     allocated(with_stall(plan, s), "balanced", seeds)) for s in STALLS]
    return rows


# ---------------------------------------------------------------- torchft at Crusoe

CRUSOE_JOB = Job(replicas=30, gpus_per_replica=10, microbatches=30, tokens_per_step=30 * 2**16, microbatch=10.0, reduction=1.0)
CRUSOE_COSTS = Costs(detection=0, reform=10, join=0, replica_restart=0, interval=10**9)


def crusoe_plan(every: float) -> Plan:
    return Plan(job=CRUSOE_JOB, failures=Failures(law="uniform", mean=every, repair=30), costs=CRUSOE_COSTS,
                goal=Goal(seconds=6 * HOUR))


def crusoe(seeds: int) -> list[Row]:
    def share(every: float) -> str:
        runs = outcomes(crusoe_plan(every), "drop-and-shrink", seeds)
        mean, half = interval([o.committed / (o.committed + o.discarded) for o in runs])
        return f"{100 * mean:.1f} % ± {100 * half:.1f}"

    rows = [Row("failure every 60 s: steps committed", f"5,145 of 6,249 = {100 * 5145 / 6249:.1f} %", share(60)),
            Row("failure every 15 s: steps committed", f"268 of 888 = {100 * 268 / 888:.1f} %", share(15))]
    for every in (60.0, 15.0):
        wasted = sum(o.discarded for o in outcomes(crusoe_plan(every), "balanced", seeds))
        rows.append(Row(f"this project with rejoin, every {every:.0f} s: steps thrown away", "-", str(wasted)))
    return rows


# ---------------------------------------------------------------- Llama 3

LLAMA_JOB = Job(replicas=128, gpus_per_replica=128, microbatches=128 * 16, tokens_per_step=16 * 2**20, microbatch=0.6,
                reduction=0.6)
LLAMA_PLAN = Plan(job=LLAMA_JOB, failures=Failures(mean=54 * DAY * 16_384 / 419, repair=0), goal=Goal(seconds=54 * DAY),
                  costs=Costs(detection=30, restart=600, save=10))


def llama3(seeds: int) -> list[Row]:
    runs = outcomes(LLAMA_PLAN, "checkpoint-restart", seeds)
    count, half = interval([float(o.failures) for o in runs])
    restarting = allocated(LLAMA_PLAN, "checkpoint-restart", seeds)
    return [Row("unexpected interruptions in 54 days", "419", f"{count:.0f} ± {half:.0f}"),
            Row("effective training time, checkpoint-restart", "more than 90 %", restarting),
            Row("this project with rejoin, survivors wait 30 s", "-", allocated(with_stall(LLAMA_PLAN, 30), "balanced", seeds))]


PRESETS: dict[str, Preset] = {preset.name: preset for preset in (
    Preset("paper-3d", "ReCoVer, arXiv 2605.11215: 128 GPUs, 16 replicas of 8, B = 128, 524,288 tokens a step", (
        "fitted to +74.9 %: checkpoint interval 32 steps, microbatch 1.25 s, reduction 7.3 s (6.5 to 7.3 s do)",
        "failures in the middle of each checkpoint interval but the first (1.5 N, 2.5 N, ...), none repaired; 2.23x is "
        "compared with the throughput after as many losses as come nearest",
        "checkpoint-restart goes on with the replicas that are left, each with its 8 microbatches; saving and restarting "
        "themselves cost nothing",
        "so 1.5x is work done twice, and the rest is reduction: survivors who compute more share one reduction among "
        "more microbatches, which tokens per alive GPU-hour rewards"), paper_3d),
    Preset("paper-hsdp", "ReCoVer, arXiv 2605.11215: HSDP", (
        "fitted, one figure for several numbers that were not published: 512 GPUs, 32 replicas of 16, B = 256, interval "
        "32, microbatch 1.25 s, reduction 1.25 s: shows only that the figure is consistent with work done twice",), paper_hsdp),
    Preset("ft-hsdp", "FT-HSDP, arXiv 2602.00277: 98,304 GPUs, 12 replicas, 20 s steps, a failure every 18 min", (
        "failures at equal intervals, replacement hardware at hand, the published stalls hold all that a failure costs",
        "a replica is back 10 min after its failure; 16 microbatches of 1.2 s per replica and 0.8 s of reduction",
        "for this project: groups of this size were not measured, so the time that survivors wait is varied; with 11 "
        "replicas the slowest owes 18 microbatches, 12.5 % more (9.1 % would be even)"), ft_hsdp),
    Preset("forward", "a forecast: FT-HSDP's failure rate per GPU, at 98,304 and 598,016 GPUs", (
        "exponential failures, the same rate per GPU; replicas of 8,192 GPUs; the global batch grows with the replicas",
        "the time that survivors wait is an assumption, hence four of them"), forward),
    Preset("crusoe", "torchft at Crusoe: 300 GPUs, 30 replicas, 11 s steps", (
        "fitted to the failure every 15 s: 10 s for a new quorum and new groups after a failure; the other is predicted",
        "assumed: intervals uniform between 0 and twice their mean; a replica is back after 30 s, without holding up "
        "anybody"), crusoe),
    Preset("llama3", "Llama 3: 16,384 GPUs, 419 unexpected interruptions in 54 days", (
        "exponential failures at the published rate, so the count is no more than a check of the clock",
        "128 replicas of 128 GPUs, 10.2 s steps; saves of 10 s at Young/Daly's interval, detection 30 s, restart 10 min with "
        "replacement hardware at hand"), llama3),
)}
