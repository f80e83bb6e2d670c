"""What the benchmarks share: launching, reading events, records, tables, and a measure of how busy the machine was.

Each benchmark is one file that plays two parts. Run by hand it is the *driver*: it launches runs, measures, prints a
table and writes `records/<name>.json` (raw numbers, machine, versions, commit; no host names, no paths). Started by
`recover launch` it is the training script of those runs.

Times of different processes are compared by the monotonic clock, which all processes of one machine share.
"""
from __future__ import annotations

import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
RECORDS = Path(__file__).resolve().parent / "records"
LAUNCH_LIMIT = 150.0
"""Seconds after which a launch counts as hung and is ended."""


# ---------------------------------------------------------------- running

def inside() -> bool:
    """Whether this process is a rank of a run, not the driver."""
    return "RECOVER_COORDINATOR" in os.environ


@contextmanager
def workdir() -> Iterator[Path]:
    """A directory that goes away again; in memory where the system has such a place, so that no fsync disturbs."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="recover-bench-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def environment(**more: str) -> dict[str, str]:
    """Of a child: the package from this checkout, one thread of torch."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("RECOVER_")}
    return kept | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"} | more


class Launch:
    """`recover launch` of a script; ended when the block ends. `output` is a file with what the run said."""

    def __init__(self, script: Path | str, events: Path, *, replicas: int, arguments: Sequence[str] = (),
                 plan: str | None = None, command: Sequence[str] | None = None) -> None:
        events.mkdir(parents=True, exist_ok=True)
        self.events, self.output = events, events / "output.txt"
        options = ["--replicas", str(replicas), "--events", str(events)]
        if plan is not None:
            (events / "plan.yaml").write_text(plan)
            options += ["--fault", str(events / "plan.yaml")]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen([*(command or (sys.executable, "-m", "recover.cli", "launch")), *options,
                                             str(script), *arguments], stdout=output, stderr=output,
                                            env=environment(BENCH_OUT=str(events)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait(self, expect: int = 0) -> None:
        """Until it ends. RuntimeError with the end of its output for another exit code or a hang."""
        try:
            code = self.process.wait(LAUNCH_LIMIT)
        except subprocess.TimeoutExpired:
            self.stop()
            code = None
        if code != expect:
            raise RuntimeError(f"the launch ended with {code}, not {expect}:\n" + self.said())

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not help (the launcher's ranks go with it)."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(15)

    def said(self) -> str:
        return self.output.read_text(errors="replace")[-4000:]


def read_events(directory: Path) -> list[dict[str, Any]]:
    """All event lines of a directory by time; torn last lines are skipped."""
    return sorted((line for path in directory.glob("events-*.jsonl") for line in read_lines(path)),
                  key=lambda line: int(line["time_unix_nano"]))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete JSON lines of a file; [] if there is none."""
    if not path.exists():
        return []
    data = path.read_bytes()
    return [json.loads(line) for line in data[:data.rfind(b"\n") + 1].splitlines()]


def wait_until(condition: Any, what: str, limit: float = 60.0, every: float = 0.02) -> Any:
    """The first true value of `condition()`. TimeoutError names `what`."""
    until = time.monotonic() + limit
    while not (value := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"{what} within {limit:g} s")
        time.sleep(every)
    return value


# ---------------------------------------------------------------- figures

def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, 90 percent, and the extremes; {} for no values."""
    if not values:
        return {}
    ordered = sorted(values)
    return {"n": len(ordered), "min": ordered[0], "median": statistics.median(ordered),
            "p90": ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], "max": ordered[-1]}


class Noise:
    """How late a process that sleeps a millisecond wakes up: what this machine adds to any figure below."""

    def __init__(self) -> None:
        self.late: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(1)

    def _run(self) -> None:
        while not self._stop.is_set():
            before = time.monotonic()
            time.sleep(0.001)
            self.late.append(1000 * (time.monotonic() - before - 0.001))
            time.sleep(random.uniform(0.005, 0.02))

    def figures(self) -> dict[str, float]:
        """Milliseconds."""
        return rounded(summary(self.late))


def rounded(figures: Mapping[str, float], digits: int = 3) -> dict[str, float]:
    return {key: round(value, digits) for key, value in figures.items()}


# ---------------------------------------------------------------- saying it

def machine() -> dict[str, Any]:
    """What the figures depend on; nothing that names the machine."""
    model = platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"system": platform.system(), "processor": model, "cores": os.cpu_count(), "memory_gib": round(memory, 1)}


def versions() -> dict[str, str]:
    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "numpy", "msgspec")}}


def commit() -> str:
    """The checkout's commit; "+" after it if sources differ from it."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True,
                              timeout=20).stdout.strip()
    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", "src", "benchmarks/*.py") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def record(name: str, bar: str, met: bool, settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
    """Write records/<name>.json and say where."""
    RECORDS.mkdir(exist_ok=True)
    path = RECORDS / f"{name}.json"
    content = {"benchmark": name, "date": datetime.now(UTC).date().isoformat(), "commit": commit(), "bar": bar, "met": met,
               "machine": machine(), "versions": versions(), "settings": dict(settings), "results": dict(results)}
    path.write_text(json.dumps(content, indent=1) + "\n")
    Console().print(f"bar: {bar}\n{'met' if met else 'NOT met'}; record: {path.relative_to(ROOT)}", markup=False,
                    highlight=False, soft_wrap=True)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on the terminal; floats with two digits."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column == columns[0] else "right")
    for row in rows:
        table.add_row(*(f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row))
    Console().print(table)
