"""A rank that is frozen (SIGSTOP), or whose training thread hangs: `python benchmarks/frozen.py`.

Four replicas, default settings (`failure_timeout` 5 s). A fault plan stops or hangs one of them before its second microbatch
of a step. The figure is the time from that moment to the next step that each of the others commits; the bar is
`failure_timeout` + 1 s for the last of them. A frozen rank is continued once the others have committed `WAKE` more steps: it
must find itself evicted, have committed nothing since, and exit with 75. A hung one must do so by itself.

For a hung thread the bar has a microbatch more in it: its limit runs from the last sign of progress, and that of the
others' waiting from their own last microbatch.
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import common

REPLICAS, MICROBATCHES, NAP, STEPS, AT, WAKE, VICTIM = 4, 16, 0.01, 300, 40, 20, 2
TIMEOUT, SLACK = 5.0, 1.0


def train(out: Path) -> None:
    """A rank: a small model whose microbatches take `NAP` seconds; writes down when each step was committed."""
    import torch
    from torch import nn

    import recover

    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = recover.join(microbatches=MICROBATCHES)
    run.manage(model, optimizer)
    file = os.open(out / f"commits-{run.replica}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    with run:
        for step in run.steps(STEPS):
            for _ in step:
                time.sleep(NAP)
                step.backward(model(torch.ones(1, 64)).square().mean())
            os.write(file, json.dumps({"step": step.index, "at": time.time_ns()}).encode() + b"\n")
            optimizer.step()


def one_run(directory: Path, action: str) -> dict[str, Any]:
    """Seconds to the next commit of each survivor, and how the victim ended."""
    plan = f'faults: [{{replica: {VICTIM}, step: {AT}, place: "compute:1", action: {action}}}]'
    survivors = [r for r in range(REPLICAS) if r != VICTIM]
    with common.Launch(__file__, directory, replicas=REPLICAS, plan=plan) as run:
        def gone_on() -> bool:
            return all(len(commits(directory, r)) > AT + WAKE for r in survivors)
        common.wait_until(gone_on, f"the others commit step {AT + WAKE}\n{run.said()}", limit=60)
        done = common.read_lines(directory / "faults-done.jsonl")[0]
        if action == "stop":
            os.kill(done["pid"], signal.SIGCONT)
        run.wait()
    lines = common.read_events(directory)
    losses = [line["attributes"] for line in lines if line["event"] == "recover.replica.lost"]
    cause = next(loss["cause"] for loss in losses if (loss["lost"], loss["noticed_by"]) == (VICTIM, "coordinator"))
    ends = [line["attributes"] for line in lines if line["event"] == "recover.launch.rank.end"]
    seconds = [round((next_commit(directory, r, done["at"]) - done["at"]) / 1e9, 3) for r in survivors]
    return {"action": action, "seconds": seconds, "cause": cause,
            "victim_exit": next(end["exit_code"] for end in ends if end["replica"] == VICTIM),
            "others_exit": sorted({end["exit_code"] for end in ends if end["replica"] != VICTIM}),
            "victim_late": sum(c["at"] > done["at"] for c in commits(directory, VICTIM))}


def commits(directory: Path, replica: int) -> list[dict[str, int]]:
    return common.read_lines(directory / f"commits-{replica}.jsonl")


def next_commit(directory: Path, replica: int, after: int) -> int:
    return next(c["at"] for c in commits(directory, replica) if c["at"] > after)


def main() -> int:
    parser = argparse.ArgumentParser(description="a rank that is frozen, or hangs")
    parser.add_argument("--runs", type=int, default=3, help="of each kind")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    if common.inside():
        train(Path(os.environ["BENCH_OUT"]))
        return 0
    with common.Noise() as noise, common.workdir() as work:
        runs = [one_run(work / f"{action}-{n}", action) for action in ("stop", "hang") for n in range(options.runs)]
    common.show(f"{REPLICAS} replicas, failure_timeout {TIMEOUT:g} s: seconds from the fault to the next commit", (
        "action", "first", "last", "lost by", "victim: exit", "commits after", "others: exit"),
        [[run["action"], min(run["seconds"]), max(run["seconds"]), run["cause"], run["victim_exit"], run["victim_late"],
          str(run["others_exit"])] for run in runs])
    met = all(max(run["seconds"]) <= TIMEOUT + SLACK and run["victim_exit"] == 75 and run["others_exit"] == [0]
              and run["victim_late"] == 0 for run in runs)
    if not options.no_record:
        common.record("frozen", "a rank frozen or hung: the others' next commit within failure_timeout + 1 s; woken late it "
                      "commits nothing and exits with 75", met,
                      {"replicas": REPLICAS, "microbatches": MICROBATCHES, "nap_s": NAP, "failure_timeout_s": TIMEOUT},
                      {"runs": runs, "wakeup_delay_ms": noise.figures()})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
