"""Comparing the ways on one plan: figures with confidence intervals, a recommendation, tables, JSON."""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from recover.simulate.cluster.engine import Run
from recover.simulate.cluster.forms import interval
from recover.simulate.cluster.model import HOUR, Outcome, Plan
from recover.simulate.cluster.presets import Preset, Row
from recover.simulate.cluster.strategies import WAYS


@dataclass(frozen=True)
class Figure:
    """A mean over seeds, and half of the width of its 95 % confidence interval (None: one seed)."""

    mean: float
    half: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        mean, half = interval(values)
        return cls(mean, half if math.isfinite(half) else None)

    def show(self, scale: float = 1.0, digits: int = 1) -> str:
        spread = "" if self.half is None else f" ± {self.half * scale:,.{digits}f}"
        return f"{self.mean * scale:,.{digits}f}{spread}"


@dataclass(frozen=True)
class Result:
    """One way. Goodputs are shares of the failure-free tokens per GPU-hour; `hours` and `cost` are None if some seed did not
    get to the tokens asked for. `constant`: every step sums B microbatches."""

    way: str
    constant: bool
    goodput_alive: Figure
    goodput_allocated: Figure
    hours: Figure | None
    cost: Figure | None
    failures: float
    ended_early: int


def compare(plan: Plan, ways: Sequence[str], seeds: int, price: float, tokens: float | None) -> list[Result]:
    """All `ways` on the same plan, `seeds` runs each. `price`: of one allocated GPU-hour; `tokens`: to train on, or None."""
    return [_result(plan, way, seeds, price, tokens) for way in ways]


def _result(plan: Plan, way: str, seeds: int, price: float, tokens: float | None) -> Result:
    strategies = [WAYS[way](plan) for _ in range(seeds)]
    runs = [Run(plan, strategy, seed).play() for seed, strategy in enumerate(strategies)]
    hours = [_hours(run, tokens) for run in runs] if tokens else []
    reached = bool(hours) and all(math.isfinite(h) for h in hours)
    gpus = plan.job.gpus + plan.failures.spares
    return Result(way, strategies[0].constant, Figure.of([run.of_alive(plan.job) for run in runs]),
                  Figure.of([run.of_allocated(plan.job) for run in runs]), Figure.of(hours) if reached else None,
                  Figure.of([h * gpus * price for h in hours]) if reached else None,
                  sum(run.failures for run in runs) / seeds, sum(bool(run.over) for run in runs))


def _hours(run: Outcome, tokens: float | None) -> float:
    return run.seconds / HOUR if tokens and run.tokens >= tokens else math.inf


def recommend(results: Sequence[Result]) -> str:
    """The way with the most tokens per allocated GPU-hour among those that hold the batch, and what can't be told from it."""
    fair = [r for r in results if r.constant and not r.ended_early]
    if not fair:
        return "None of these ways keeps the batch to the end: repair machines, or have spares."
    best = max(fair, key=lambda r: r.goodput_allocated.mean)
    same = [r.way for r in fair if r is not best and _overlap(r.goodput_allocated, best.goodput_allocated)]
    shrinking = [r.way for r in results if not r.constant and not r.ended_early
                 and r.goodput_allocated.mean > best.goodput_allocated.mean]
    text = f"{best.way}: {best.goodput_allocated.show(100)} % of the failure-free tokens per allocated GPU-hour."
    if same:
        text += f" Not to be told from it with these seeds: {', '.join(same)}."
    if shrinking:
        text += f" More, but with another batch than planned: {', '.join(shrinking)}."
    return text


def _overlap(a: Figure, b: Figure) -> bool:
    return abs(a.mean - b.mean) <= (a.half or 0.0) + (b.half or 0.0)


def comparison_table(results: Sequence[Result]) -> Table:
    table = Table(title="goodput: tokens per alive and per allocated GPU-hour, % of failure-free", title_justify="left")
    for column in ("way", "batch", "alive", "allocated", "hours", "cost", "fails", "ended early"):
        table.add_column(column, justify="left" if column in ("way", "batch") else "right", no_wrap=column != "ended early")
    for r in results:
        table.add_row(r.way, "B" if r.constant else "shrinks", r.goodput_alive.show(100), r.goodput_allocated.show(100),
                      r.hours.show() if r.hours else "-", r.cost.show(1, 0) if r.cost else "-", f"{r.failures:.1f}",
                      str(r.ended_early or ""))
    return table


def preset_table(preset: Preset, rows: Sequence[Row]) -> Table:
    table = Table(title=f"{preset.name}: {preset.source}", title_justify="left",
                  caption="\n".join(f"* {line}" for line in preset.assumptions), caption_justify="left")
    table.add_column("what")
    table.add_column("published", justify="right")
    table.add_column("here", justify="right")
    for row in rows:
        table.add_row(row.what, row.published, row.got)
    return table


def preset_json(preset: Preset, rows: Sequence[Row]) -> dict[str, Any]:
    return {"preset": preset.name, "source": preset.source, "assumptions": list(preset.assumptions),
            "rows": [asdict(row) for row in rows]}


def comparison_json(plan: Plan, results: Sequence[Result]) -> dict[str, Any]:
    """Without infinities, which JSON lacks."""
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(entry) for key, entry in value.items()}
        return None if isinstance(value, float) and math.isinf(value) else value
    return {"plan": plain(asdict(plan)), "results": [asdict(r) for r in results], "recommendation": recommend(results)}
