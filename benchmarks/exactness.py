"""`exact` means exact: the hash of weights and optimizer state after a run, whatever happened in it.

    python benchmarks/exactness.py [--steps 30] [--out benchmarks/records/exactness.json]

Trains a tiny model (the run tests' script: dropout, clipping, AdamW, a schedule; real processes, real SIGKILLs) with 1 to
5 replicas, and with 4 replicas of which some are killed: one at each place, then pairs in one step, the places inside a
recovery among them. Prints all hashes, and exits 1 unless all are equal, losses included, every planned kill happened
and the audit of every run is clean.
"""
from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "integration")]

from harness import Fault, Result, fault, run  # noqa: E402
from run_checks import computed, healthy  # noqa: E402

from recover.training.run import processor  # noqa: E402

SCRIPT = "run_script:train"
PLACES = ("compute:0", "compute:1", "backward:0", "backward:1", "reduce:0", "reduce:1", "reduce:3", "reduce:5", "complete",
          "fence", "optimizer", "between")
PAIRS = (("compute:1", "compute:1"), ("compute:1", "reduce:2"), ("reduce:1", "reduce:4"), ("reduce:2", "complete"),
         ("complete", "optimizer"), ("fence", "between"), ("compute:1", "exchange"), ("reduce:1", "exchange"),
         ("compute:1", "recompute"), ("reduce:1", "recompute"), ("compute:0", "redo"), ("reduce:2", "redo"),
         ("reduce:5", "forward"))
Case = tuple[str, int, list[Fault], dict[int, dict[str, Any]]]


def cases(steps: int) -> Iterator[Case]:
    """(what happens, replicas, plan, settings of single replicas); the first is the reference."""
    for replicas in range(1, 6):
        yield "nothing", replicas, [], {}
    middle = steps // 2
    for number, place in enumerate(PLACES):
        yield f"{place}, step {middle}", 4, [fault(number % 4, middle, place)], {}
    for place in ("compute:1", "reduce:1", "complete", "between"):
        for step in (0, 1, steps - 1):
            yield f"{place}, step {step}", 4, [fault(0, step, place)], {}
    for first, second in PAIRS:
        other = {}
        if second == "forward":                         # there must be something to forward: replica 3 lost two buckets
            other = {3: {"settings": {"forget": {"step": middle, "buckets": [0, 2]}}}}
        victim = 0 if second == "forward" else 2
        yield f"{first} and {second}, step {middle}", 4, [fault(1, middle, first), fault(victim, middle, second)], other


def check(result: Result, steps: int, reference: Result) -> str:
    """"" or what is wrong."""
    try:
        healthy(result, steps)
        if result.hash != reference.hash:
            return "another hash"
        return "" if result.losses == reference.losses else "other losses"
    except AssertionError as error:
        return str(error).splitlines()[0][:200]


def commit() -> str:
    """The commit that is measured; "+" if the sources differ from it."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "src") else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "records" / "exactness.json")
    parser.add_argument("--no-record", action="store_true", help="write nothing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rows = measure(options.steps, Path(directory))
    hashes = {row.get("hash") for row in rows}
    good = len(hashes) == 1 and not any(row["problem"] for row in rows)
    print(f"{len(rows)} runs, {len(hashes)} hash{'' if len(hashes) == 1 else 'es'}: "
          f"{'bit for bit the failure-free run' if good else 'NOT all are good'}")
    if not options.no_record:
        record = dict(command=f"python benchmarks/exactness.py --steps {options.steps}", commit=commit(), good=good,
                      steps=options.steps, microbatches=12, torch=torch.__version__, python=platform.python_version(),
                      processor=processor(), system=platform.system(), runs=rows)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if good else 1


def measure(steps: int, directory: Path) -> list[dict[str, Any]]:
    """Make all runs, print the table; one row per run, "problem" says what is wrong."""
    table = Table("replicas", "killed at", "hash", "twice", "seconds", "", title=f"after {steps} steps",
                  caption="twice: microbatches that a casualty had computed, and a survivor again")
    rows: list[dict[str, Any]] = []
    reference = None
    for what, replicas, plan, other in cases(steps):
        row: dict[str, Any] = dict(replicas=replicas, killed_at=what)
        since = time.monotonic()
        try:
            result = run(directory, SCRIPT, replicas, plan=plan, settings={"steps": steps}, per_replica=other)
        except (AssertionError, TimeoutError) as error:
            row["problem"] = str(error).splitlines()[0][:200]
        else:
            reference = reference or result
            row |= dict(hash=result.survivors[0].hash, computed_twice=sum(computed(result).values()) - 12 * steps,
                        problem=check(result, steps, reference))
        rows.append(row)
        table.add_row(str(replicas), what, row.get("hash", "")[:12], str(row.get("computed_twice", "")),
                      f"{time.monotonic() - since:.1f}", f"[red]{row['problem']}" if row["problem"] else "equal")
    Console().print(table)
    return rows


if __name__ == "__main__":
    sys.exit(main())
