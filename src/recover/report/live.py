"""The live view of a run: a panel that redraws itself on a terminal, plain lines without one.

Rules: drawing reads a `Progress` and changes nothing; without a terminal one line is printed per `every` steps and one
per loss, so that a log stays readable.
"""
from __future__ import annotations

from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from recover.report.progress import Progress

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


def speed(progress: Progress, tokens_per_step: int) -> str:
    seconds = progress.seconds_per_step()
    return f"{tokens_per_step / seconds:,.0f}" if seconds else "-"


def headline(progress: Progress, steps: int, tokens_per_step: int) -> str:
    """Where the run is, in one plain line."""
    last = progress.last
    if last is None:
        return "waiting for the first step"
    quotas = "  ".join(f"r{replica}:{quota}" for replica, quota in last.quotas.items())
    return (f"step {last.index + 1}/{steps}  loss {last.loss:.4f}  tokens/s {speed(progress, tokens_per_step)}  "
            f"alive {len(progress.alive)}  microbatches {quotas}")


def draw(progress: Progress, title: str, steps: int, tokens_per_step: int) -> RenderableType:
    """The panel: step, loss and speed, a bar, and one row per replica with its share of the last step."""
    last = progress.last
    done = last.index + 1 if last else 0
    head = Table.grid(padding=(0, 3))
    head.add_row(Text(title, style="bold"), f"step {done}/{steps}", f"loss {last.loss:.4f}" if last else "loss -",
                 f"tokens/s {speed(progress, tokens_per_step)}", f"replicas alive {len(progress.alive)}")
    replicas = Table.grid(padding=(0, 2))
    quotas = last.quotas if last else {}
    for replica in sorted(progress.known):
        replicas.add_row(f"replica {replica}", *_row(progress, replica, quotas))
    bar = Table.grid()
    bar.add_row(ProgressBar(total=steps, completed=done, width=60))     # in a grid, for its line's end
    return Group(head, bar, replicas)


def _row(progress: Progress, replica: int, quotas: dict[int, int]) -> tuple[Text, Text]:
    quota = quotas.get(replica, 0)
    colour = COLOURS[replica % len(COLOURS)]
    loss = progress.losses.get(replica)
    if loss is not None:
        where = f" in step {loss.step}" if loss.step is not None else ""
        return Text("dead", style="bold red"), Text(f"lost{where}", style="dim")
    return Text("alive", style="green"), Text("█" * quota, style=colour) + Text(f" {quota} microbatches", style="dim")


class LiveView:
    """Shows a run while it goes on: `with LiveView(...) as view: view.show(progress)`, as often as one likes."""

    def __init__(self, console: Console, title: str, *, steps: int, tokens_per_step: int, every: int = 5) -> None:
        self._console = console
        self._title = title
        self._steps = steps
        self._tokens = tokens_per_step
        self._every = every
        self._printed = -1
        self._told: set[int] = set()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.__exit__(kind, error, trace)

    def show(self, progress: Progress) -> None:
        if self._live is not None:
            self._live.update(draw(progress, self._title, self._steps, self._tokens), refresh=True)
        else:
            self._print(progress)

    def _print(self, progress: Progress) -> None:
        for replica in sorted(set(progress.losses) - self._told):
            self._told.add(replica)
            self._line(f"{self._title}: replica {replica} is dead, {len(progress.alive)} go on")
        index = progress.last.index if progress.last else -1
        if index > self._printed and (index // self._every > self._printed // self._every or index + 1 == self._steps):
            self._printed = index
            self._line(f"{self._title}: {headline(progress, self._steps, self._tokens)}")

    def _line(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True, markup=False)
