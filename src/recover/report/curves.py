"""The picture of a comparison: both loss curves with the kills, and below them who computed what.

Rules: it draws without a display (Agg); the failure-free curve is wide and pale, the other thin and on top of it, so
that two equal curves are seen to be two. The lower panel stacks each replica's microbatches: its upper edge is the
batch, and a batch that shrank would show as a notch.
"""
from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from recover.report.progress import Progress
from recover.report.tables import Kill

PALE, DARK, RED = "#9ec5e8", "#1b4f8a", "#c0392b"
SHARES = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e6b800", "#72b7b2", "#9d755d", "#bab0ac")


def plot(path: Path, reference: Progress, survivor: Progress, planned: Iterable[Kill] = ()) -> None:
    """Write the picture to `path` (its folder is made); ValueError if neither run committed a step."""
    if not reference.steps and not survivor.steps:
        raise ValueError("neither run committed a step: there is nothing to draw")
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _losses(upper, reference, survivor)
    _shares(lower, survivor)
    _kills(upper, lower, list(planned))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _losses(axes: Any, reference: Progress, survivor: Progress) -> None:
    for progress, style in ((reference, {"color": PALE, "linewidth": 7, "label": "failure-free"}),
                            (survivor, {"color": DARK, "linewidth": 1.6, "label": "with kills"})):
        indices = sorted(progress.steps)
        axes.plot(indices, [progress.steps[index].loss for index in indices], solid_capstyle="round", **style)
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper right", bbox_to_anchor=(1, 0.8))
    axes.set_title("Loss of both runs; below, who computed the microbatches of each step", loc="left", fontsize=11)


def _shares(axes: Any, survivor: Progress) -> None:
    indices = sorted(survivor.steps)
    below = [0] * len(indices)
    for replica in sorted({member for step in survivor.steps.values() for member in step.quotas}):
        heights = [survivor.steps[index].quotas.get(replica, 0) for index in indices]
        axes.bar(indices, heights, bottom=below, width=0.85, color=SHARES[replica % len(SHARES)], label=f"r{replica}")
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set_ylabel("microbatches")
    axes.set_xlabel("step")
    axes.spines[["top", "right"]].set_visible(False)
    if any(below):
        axes.legend(frameon=False, ncols=1, loc="center left", bbox_to_anchor=(1, 0.5))


def _kills(upper: Any, lower: Any, planned: list[Kill]) -> None:
    for kill in planned:
        for axes in (upper, lower):
            axes.axvline(kill.step, color=RED, linewidth=1, linestyle="--")
        upper.annotate(f"replica {kill.replica} killed\n({kill.place})", (kill.step, 1), va="top", fontsize=8,
                       xycoords=("data", "axes fraction"), xytext=(4, -4), textcoords="offset points", color=RED)
