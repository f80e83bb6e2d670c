"""A run that is left in peace by nobody: random faults of all kinds, restarts, and the hash at the end.

    python benchmarks/soak.py [--faults 200] [--seconds 600] [--seed 7]

Four replicas of the run tests' script (real processes; see tests/integration/storm.py for what happens to them). Prints what
happened, how often a replica came back, and the witness's open files, threads and memory. Exits 1 unless the run came to its
end with the hash of a run of one replica to which nothing happened, its audit is clean, and nothing grew.
"""
from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import common

sys.path[:0] = [str(common.ROOT / "src"), str(common.ROOT / "tests" / "integration")]

from harness import run  # noqa: E402
from storm import growth, storm  # noqa: E402

from recover.report.audit import audit  # noqa: E402

BAR = "hash equals the undisturbed run's, audit clean, no growth of open files or threads, less than 16 MiB of memory"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--faults", type=int, default=200)
    options.add_argument("--seconds", type=float, default=600)
    options.add_argument("--seed", type=int, default=7)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory() as kept:
        directory = Path(kept)
        (directory / "storm").mkdir()
        since = time.monotonic()
        blown, steps = storm(directory / "storm", asked.seed, asked.faults, asked.seconds)
        took = time.monotonic() - since
        offences = [str(each) for each in audit(directory / "storm" / "events").offences]
        reference = run(directory, "run_script:train", 1, settings={"steps": steps}, patience=600)
    grown = growth(blown.readings)
    results = dict(faults=dict(blown.done), seconds=round(took, 1), steps=steps, lives=blown.lives, joined=blown.joined,
                   equal=reference.hash == blown.hash, offences=offences, readings=blown.readings, growth=grown)
    met = bool(results["equal"]) and not offences and grown["files"] <= 0 and grown["threads"] <= 0 and grown["memory"] < 16 << 10
    common.show("soak", ["", ""], [
        ("faults", ", ".join(f"{n} {kind}" for kind, n in sorted(blown.done.items()))), ("steps", str(steps)),
        ("seconds", f"{took:.0f}"), ("started again / held the parameters again", f"{blown.lives} / {blown.joined}"),
        ("hash equals the undisturbed run's", "yes" if results["equal"] else "NO"), ("offences in the audit", str(len(offences))),
        ("witness: growth of files, threads, KiB", f"{grown['files']}, {grown['threads']}, {grown['memory']}")])
    common.record("soak", BAR, met, dict(seed=asked.seed, faults=asked.faults), results)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
