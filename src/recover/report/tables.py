"""Tables at the end of a comparison: two runs side by side, and what each kill cost.

Rules: a figure that was not measured is shown as `-`, never as 0; nothing is judged here but equality of what is shown.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rich.table import Table

from recover.report.progress import Progress


@dataclass(frozen=True)
class Kill:
    """What the plan had in mind for one replica: died in `step` at `place`."""

    replica: int
    step: int
    place: str


def milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.1f} ms"


def counts(progress: Progress) -> str:
    """Microbatches per step: one number if all steps agree, else the range."""
    found = {len(step.who) for step in progress.steps.values()}
    if not found:
        return "-"
    return f"{min(found)} in each of {len(progress.steps)}" if len(found) == 1 else f"{min(found)} to {max(found)}"


def _loss(progress: Progress) -> str:
    return "-" if progress.last is None else f"{progress.last.loss!r}"


def _hash(progress: Progress) -> str:
    return progress.state_hash or "-"


def _replicas(progress: Progress) -> str:
    return f"{len(progress.known)} at first, {len(progress.alive)} at the end"


def comparison(reference: Progress, survivor: Progress) -> Table:
    """Both runs, one column each, and whether the line is equal."""
    table = Table(title="failure-free and with kills", title_justify="left")
    for name in ("", "failure-free", "with kills", "equal"):
        table.add_column(name, overflow="fold")
    rows = (("replicas", _replicas, False), ("final loss", _loss, True), ("microbatches per step", counts, True),
            ("microbatches of the dead, computed again", lambda progress: str(progress.recomputed), False),
            ("microbatches thrown away", lambda progress: str(progress.discarded), False),
            ("hash of weights and optimizer state", _hash, True))
    for name, show, compared in rows:
        left, right = show(reference), show(survivor)
        same = left == right and left != "-"
        verdict = "[green]yes" if same else "[bold red]no"
        table.add_row(name, left, right, verdict if compared else "")
    return table


def kills(planned: Iterable[Kill], progress: Progress) -> Table:
    """One row per planned kill: what it hit, what it cost."""
    table = Table(title="kills", title_justify="left")
    for name in ("replica", "step", "place", "detection", "recovery", "microbatches recomputed"):
        table.add_column(name)
    for kill in planned:
        loss = progress.losses.get(kill.replica)
        row = (milliseconds(loss.detection), milliseconds(loss.recovery), str(loss.recomputed)) if loss else ("-",) * 3
        table.add_row(str(kill.replica), str(kill.step), kill.place, *row)
    return table
