"""`recover simulate cluster`: options in, tables or JSON out."""
from __future__ import annotations

import json
import math
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from recover.simulate.cluster.model import Plan

DAY = 86400.0


def cluster(
    preset: Annotated[str | None, typer.Option(help="Published figures beside ours: a name, or `all`.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs that train; spares come on top.")] = 1024,
    gpus_per_replica: Annotated[int, typer.Option(help="GPUs of one model copy, the unit that fails.")] = 64,
    microbatches: Annotated[int, typer.Option(help="B, per step.")] = 256,
    tokens_per_microbatch: Annotated[int, typer.Option(help="Tokens of one microbatch.")] = 65536,
    microbatch: Annotated[float, typer.Option(help="Seconds per microbatch on one replica.")] = 1.0,
    reduction: Annotated[float, typer.Option(help="Seconds of reduction that compute does not hide.")] = 1.0,
    slow: Annotated[float, typer.Option(help="Share of the replicas that are slow.")] = 0.0,
    slow_speed: Annotated[float, typer.Option(help="Speed of those, as a share of the others'.")] = 1.0,
    law: Annotated[str, typer.Option(help="exponential, weibull, periodic or uniform.")] = "exponential",
    mtbf: Annotated[float, typer.Option(help="Mean hours to a failure of one GPU (periodic, uniform: of the job).")] = 50_000.0,
    shape: Annotated[float, typer.Option(help="Of weibull.")] = 1.0,
    repair: Annotated[float, typer.Option(help="Hours until a failed GPU is back; `inf`: never.")] = 2.0,
    spares: Annotated[int, typer.Option(help="GPUs in reserve.")] = 0,
    detection: Annotated[float, typer.Option(help="Seconds until a failure is known.")] = 4.0,
    reform: Annotated[float, typer.Option(help="Seconds until the survivors' groups stand.")] = 2.0,
    join: Annotated[float, typer.Option(help="Seconds that all wait when a replica comes in.")] = 2.0,
    replica_restart: Annotated[float, typer.Option(help="Seconds to start a replica again.")] = 300.0,
    restart: Annotated[float, typer.Option(help="Seconds to restart the whole job.")] = 600.0,
    save: Annotated[float, typer.Option(help="Seconds that a checkpoint holds everybody up.")] = 30.0,
    interval: Annotated[int, typer.Option(help="Steps between checkpoints; 0: Young/Daly's optimum.")] = 0,
    swap: Annotated[float, typer.Option(help="Seconds until a spare is swapped in.")] = 120.0,
    stall: Annotated[float, typer.Option(help="Seconds that replica rejoin holds everybody up.")] = 180.0,
    days: Annotated[float, typer.Option(help="How long to run, unless --tokens says.")] = 30.0,
    tokens: Annotated[float | None, typer.Option(help="Train on so many (ends after ten times the ideal time).")] = None,
    price: Annotated[float, typer.Option(help="Of one allocated GPU-hour.")] = 2.0,
    way: Annotated[list[str] | None, typer.Option(help="Only these ways; may be repeated.")] = None,
    seeds: Annotated[int, typer.Option(help="Runs per way.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False,
) -> None:
    """What a cluster that fails yields: this project, checkpoints, shrinking, replica rejoin, spares. See docs/planner.md."""
    try:
        if seeds < 1:
            raise ValueError(f"--seeds must be at least 1, not {seeds}")
        if preset is not None:
            return _presets(preset, seeds, as_json)
        from recover.simulate.cluster.model import Costs, Failures, Goal, Job, Plan
        if gpus_per_replica < 1 or gpus % gpus_per_replica:
            raise ValueError(f"--gpus must be a multiple of --gpus-per-replica: {gpus} is none of {gpus_per_replica}")
        if law not in ("exponential", "weibull", "periodic", "uniform"):
            raise ValueError(f"--law must be exponential, weibull, periodic or uniform, not {law!r}")
        job = Job(replicas=gpus // gpus_per_replica, gpus_per_replica=gpus_per_replica, microbatches=microbatches,
                  tokens_per_step=microbatches * tokens_per_microbatch, microbatch=microbatch, reduction=reduction,
                  slow=slow, slow_speed=slow_speed)
        failures = Failures(law=law, mean=mtbf * 3600, shape=shape, repair=repair * 3600, spares=spares)  # type: ignore[arg-type]
        costs = Costs(detection=detection, reform=reform, join=join, replica_restart=replica_restart, restart=restart, save=save,
                      interval=interval, swap=swap, stall=stall)
        goal = Goal(seconds=10 * tokens / (job.rate * job.gpus), tokens=tokens) if tokens else Goal(seconds=days * DAY)
        _compare(Plan(job=job, failures=failures, costs=costs, goal=goal), way, seeds, price, tokens, as_json)
    except ValueError as error:
        print(f"recover: {error}", file=sys.stderr)
        raise typer.Exit(2) from None


def _presets(name: str, seeds: int, as_json: bool) -> None:
    from rich.console import Console

    from recover.simulate.cluster.presets import PRESETS
    from recover.simulate.cluster.report import preset_json, preset_table

    if name != "all" and name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}; known are all, {', '.join(PRESETS)}")
    chosen = [preset for preset in PRESETS.values() if name in ("all", preset.name)]
    if as_json:
        return print(json.dumps([preset_json(preset, preset.rows(seeds)) for preset in chosen], indent=1))
    for preset in chosen:
        Console().print(preset_table(preset, preset.rows(seeds)))


def _compare(plan: Plan, ways: list[str] | None, seeds: int, price: float, tokens: float | None, as_json: bool) -> None:
    from rich.console import Console

    from recover.simulate.cluster.report import compare, comparison_json, comparison_table, recommend
    from recover.simulate.cluster.strategies import WAYS

    unknown = sorted(set(ways or ()) - WAYS.keys())
    if unknown:
        raise ValueError(f"there is no way {unknown[0]!r}; known are {', '.join(WAYS)}")
    results = compare(plan, ways or list(WAYS), seeds, price, tokens)
    if as_json:
        return print(json.dumps(comparison_json(plan, results), indent=1))
    console = Console()
    console.print(comparison_table(results))
    every = "never" if math.isinf(plan.mtbf) else f"every {plan.mtbf / 3600:.2f} h"
    console.print(f"A failure {every}; a step of {plan.job.step:.1f} s; {seeds} seeds; ± is a 95 % confidence interval.",
                  highlight=False)
    console.print(f"Recommended: {recommend(results)}", highlight=False, soft_wrap=True)
