"""Quotas that follow measured speed: `python benchmarks/speed.py`.

Four replicas, one of which takes twice as long for a microbatch from a certain step on: after its computation it sleeps as
long as that took. The ideal step shares the microbatches out so that all are ready at once: B divided by the sum of all
speeds, with each replica's own measured time per microbatch. Compared with it are the durations of the steps after
quotas had time to adapt, under the policies `speed` and `balanced`.

A microbatch takes its time asleep, as the host does that waits for an accelerator: four replicas that really compute would
slow each other down on a machine of two cores.
"""
from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common

REPLICAS, MICROBATCHES, NAP, SLOW = 4, 64, 0.010, 3
STEPS, SLOWED, ADAPTED = 60, 20, 40
LIMIT = 1.15


# ---------------------------------------------------------------- the training script

def train(out: Path, policy: str) -> None:
    """A rank; keeps when each step was done, and how many microbatches it computed in which time."""
    import torch
    from torch import nn

    import recover

    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = recover.join(microbatches=MICROBATCHES, policy=policy)
    run.manage(model, optimizer)
    steps: list[dict[str, Any]] = []
    with run:
        for step in run.steps(STEPS):
            count, busy = 0, 0.0
            for _ in step:
                began = time.monotonic()
                time.sleep(NAP)
                step.backward(model(torch.ones(1, 64)).square().mean())
                if run.replica == SLOW and step.index >= SLOWED:
                    time.sleep(time.monotonic() - began)
                count, busy = count + 1, busy + time.monotonic() - began
            optimizer.step()
            steps.append({"done": time.monotonic(), "count": count, "busy": busy})
        (out / f"steps-{run.replica}.json").write_text(json.dumps(steps))


# ---------------------------------------------------------------- the driver

def measure(policy: str) -> dict[str, Any]:
    """Of the adapted steps: median duration (milliseconds), the ideal one, their ratio, and the last quotas."""
    with common.workdir() as directory:
        with common.Launch(__file__, directory, replicas=REPLICAS, arguments=["--policy", policy]) as run:
            run.wait()
        kept = [json.loads((directory / f"steps-{replica}.json").read_text()) for replica in range(REPLICAS)]
    durations = [1000 * (after["done"] - before["done"]) for before, after in zip(kept[0][ADAPTED - 1:], kept[0][ADAPTED:],
                                                                                strict=False)]
    late = [steps[ADAPTED:] for steps in kept]
    each = [1000 * sum(step["busy"] for step in steps) / sum(step["count"] for step in steps) for steps in late]
    ideal = MICROBATCHES / sum(1 / milliseconds for milliseconds in each)
    before = [1000 * (after["done"] - earlier["done"]) for earlier, after in zip(kept[0][4:SLOWED - 1], kept[0][5:SLOWED],
                                                                                strict=False)]
    median = statistics.median(durations)
    return {"median_ms": round(median, 1), "ideal_ms": round(ideal, 1), "ratio": round(median / ideal, 3),
            "before_ms": round(statistics.median(before), 1), "quotas": [steps[-1]["count"] for steps in kept],
            "microbatch_ms": [round(ms, 2) for ms in each], "steps_ms": common.rounded(common.summary(durations), 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", help=argparse.SUPPRESS)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    if common.inside():
        train(Path(os.environ["BENCH_OUT"]), options.policy)
        return 0
    results = {policy: measure(policy) for policy in ("speed", "balanced")}
    columns = ("median_ms", "ideal_ms", "ratio", "before_ms", "quotas")
    common.show("one of four at half speed", ("policy", *columns), [[policy, *(of[c] for c in columns)]
                                                                    for policy, of in results.items()])
    met = results["speed"]["ratio"] <= LIMIT
    if not options.no_record:
        bar = f"policy `speed`, one of {REPLICAS} replicas at half speed: a step takes at most {LIMIT} times the ideal"
        common.record("speed", bar, met,
                      {"replicas": REPLICAS, "microbatches": MICROBATCHES, "nap_s": NAP, "steps": STEPS, "slowed_at": SLOWED,
                       "measured_from": ADAPTED}, results)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
