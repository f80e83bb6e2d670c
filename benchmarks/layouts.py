"""Replicas of several ranks: gradients, hashes and deaths of single ranks, for FSDP2, pipeline x TP and pipeline x FSDP2.

    python benchmarks/layouts.py [--no-record]

Trains the tiny model of the run tests (`tests/integration/rank_script.py`) with real processes and real SIGKILLs:

* gradients: `fast`, float32, each step's gradient against one process that computes all B microbatches unsharded;
* hashes: `exact`, one rank killed, of every position at every place, those inside a recovery included (another replica
  dies first there), against the failure-free run of the same layout;
* inside: a rank killed within an FSDP all-gather or reduce-scatter, a TP all-reduce, a pipeline flush;
* leaving: from the death of a rank to the end of the last rank of its replica, without a launcher.

Prints a table and exits 1 unless all bars are met.
"""
from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common

sys.path.insert(0, str(common.ROOT / "tests" / "integration"))

from harness import Fault, Result
from ranks_harness import LAYOUTS, RECOVERY, dies_in_recovery, grid, hashes, kill, losses, places, run
from run_checks import healthy

STEPS, MIDDLE = 4, 2
INSIDE = (("fsdp", 1, "all_gather"), ("fsdp", 0, "reduce_scatter"), ("pp_tp", 1, "all_reduce"), ("pp_tp", 2, "flush"),
          ("pp_fsdp", 1, "flush"), ("pp_fsdp", 3, "all_gather"))
Row = dict[str, Any]


def plans(layout: str, position: int) -> Iterator[tuple[str, int, list[Fault], dict[int, Any]]]:
    """(place, replicas, plan, settings of single replicas)"""
    for place in places(layout):
        yield place, 2, [kill(1, position, MIDDLE, place)], {}
    for place in RECOVERY:
        yield place, 3, *dies_in_recovery(position, place, MIDDLE)


def checked(directory: Path, layout: str, replicas: int, reference: Result | None, **options: Any) -> tuple[Result | None, str]:
    """A run, and "" or what is wrong with it."""
    exact = options.get("settings", {}).get("reduction") != "fast"
    settings = {"layout": layout, "steps": STEPS} | options.pop("settings", {})
    try:
        result, _ = run(directory, replicas, LAYOUTS[layout], settings=settings, **options)
        healthy(result, STEPS, exact=exact)
        if reference is not None and hashes(result, LAYOUTS[layout]) != hashes(reference, LAYOUTS[layout]):
            return result, "another hash"
        if reference is not None and losses(result) != losses(reference):
            return result, "other losses"
        return result, ""
    except (AssertionError, TimeoutError) as error:
        return None, str(error).splitlines()[0][:200]


def gradients(directory: Path) -> Iterator[Row]:
    for layout in LAYOUTS:
        for what, plan in (("nothing", []), ("compute:1 and reduce:1", [kill(0, 1, 1, "compute:1"), kill(2, 0, 2, "reduce:1")])):
            result, problem = checked(directory, layout, 3, None, plan=plan, settings={"reduction": "fast", "reference": True})
            errors = [said["relative"] for rank in result.survivors for said in rank.all("error")] if result else [1.0]
            problem = problem or ("" if max(errors) <= 1e-5 else "bar")
            yield dict(layout=layout, killed_at=what, worst=max(errors), problem=problem)


def exact(directory: Path) -> Iterator[Row]:
    for layout, positions in LAYOUTS.items():
        reference, problem = checked(directory, layout, 1, None)
        yield dict(layout=layout, position=None, killed_at="nothing", problem=problem)
        for position in range(positions):
            for place, replicas, plan, other in plans(layout, position):
                _, problem = checked(directory, layout, replicas, reference, plan=plan, per_replica=other)
                yield dict(layout=layout, position=position, killed_at=place, problem=problem)


def inside(directory: Path) -> Iterator[Row]:
    references: dict[str, Result | None] = {}
    for layout, position, where in INSIDE:
        if layout not in references:
            references[layout] = checked(directory, layout, 1, None)[0]
        doom = dict(replica=1, position=position, step=MIDDLE, inside=where)
        result, problem = checked(directory, layout, 2, references[layout], settings={"doom": doom}, victims=[(1, position)])
        who = result.survivors[0].receipts[MIDDLE]["who"] if result else []
        if not problem and (len(who) != 6 or set(who) != {0}):
            problem = f"step {MIDDLE} was summed from {who}"
        yield dict(layout=layout, position=position, killed_at=where, problem=problem)


def leaving(directory: Path) -> Iterator[Row]:
    for layout, positions in LAYOUTS.items():
        for position in range(positions):
            seconds = departure(directory, layout, position)
            yield dict(layout=layout, position=position, seconds=seconds, problem="" if seconds <= 2 else "bar")


def departure(directory: Path, layout: str, position: int) -> float:
    """Seconds from a rank's death to the end of the last rank of its replica. `failure_timeout` is 30 s: nobody waits for it."""
    positions = LAYOUTS[layout]
    victim = positions + position
    settings = {"layout": layout, "steps": STEPS}
    with grid(directory, 2, positions, plan=[kill(1, position, 1, "compute:1")], settings=settings, failure_timeout=30.0) as made:
        made.until(lambda: made.code(victim) is not None, "the victim is dead")
        since = time.monotonic()
        made.until(lambda: all(made.code(n) is not None for n in made.of(1)), "its replica is gone")
        seconds = time.monotonic() - since
        assert made.code(victim) == -signal.SIGKILL
        made.wait()
    return seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-record", action="store_true", help="write nothing")
    options = parser.parse_args()
    results: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for part in (gradients, exact, inside, leaving):
            results[part.__name__] = rows = []
            for row in part(Path(directory)):
                rows.append(row)
                if row["problem"]:
                    print(f"{part.__name__}: {row}", flush=True)
    good = not any(row["problem"] for rows in results.values() for row in rows)
    show(results)
    if not options.no_record:
        common.record("layouts", "gradients within 1e-5; every hash equal; a broken replica's last rank gone within 2 s", good,
                      {"steps": STEPS, "step of the kill": MIDDLE}, results)
    return 0 if good else 1


def show(results: dict[str, list[Row]]) -> None:
    def of(part: str, layout: str) -> list[Row]:
        return [row for row in results[part] if row["layout"] == layout]

    def fine(part: str) -> list[str]:
        return [f"{sum(not row['problem'] for row in of(part, each))} of {len(of(part, each))}" for each in LAYOUTS]

    common.show("replicas of several ranks", ("", *LAYOUTS), (
        ("gradient against one process, worst relative error", *(f"{max(row['worst'] for row in of('gradients', each)):.1e}"
                                                                 for each in LAYOUTS)),
        ("exact: hash equals that of one replica", *fine("exact")),
        ("killed inside a collective of the replica: step whole, hash equal", *fine("inside")),
        ("last rank of a broken replica gone after, worst, s", *(max(row["seconds"] for row in of("leaving", each))
                                                                 for each in LAYOUTS))))


if __name__ == "__main__":
    sys.exit(main())
