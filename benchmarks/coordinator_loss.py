"""Training without a coordinator: `python benchmarks/coordinator_loss.py`.

Runs of four replicas in pairs. In one of each pair the coordinator is SIGKILLed in mid-run and comes back two seconds
later on the same address, knowing nothing; in the other nothing happens. Nobody else fails. Compared are the durations
of the steps in the window from the kill until two seconds after the return, when all members have announced themselves.

A microbatch takes its time asleep, as the host does that waits for an accelerator: on a machine whose processors are
all busy, the new coordinator's start (a Python process with its imports) would delay anybody, and not by our doing.

The same runs say what the coordinator hears while nothing fails: it counts messages by type, and replica 0 asks for the
counts at two steps (those questions are left out of the figures).
"""
from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import common

REPLICAS, MICROBATCHES, NAP, AWAY = 4, 8, 0.010, 2.0
COUNT_FROM, COUNT_TO, KILL_AFTER = 20, 120, 140      # steps
STEPS = 300
WINDOW_AFTER = 2.0


# ---------------------------------------------------------------- the training script

def train(out: Path) -> None:
    """A rank: a small model whose microbatches take `NAP` seconds; keeps when each step was done."""
    import torch
    from torch import nn

    import recover

    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = recover.join(microbatches=MICROBATCHES)
    run.manage(model, optimizer)
    done: list[int] = []
    counts: list[dict[str, Any]] = []
    progress = out / f"progress-{run.replica}"
    with run:
        for step in run.steps(STEPS):
            for _ in step:
                time.sleep(NAP)
                step.backward(model(torch.ones(1, 64)).square().mean())
            optimizer.step()
            done.append(time.monotonic_ns())
            if run.replica == 0 and step.index in (COUNT_FROM, COUNT_TO):
                counts.append(run.member.stats())
            if step.index == KILL_AFTER:
                progress.touch()
        (out / f"steps-{run.replica}.json").write_text(json.dumps({"done": done, "counts": counts}))


# ---------------------------------------------------------------- processes

def launch(arguments: list[str]) -> int:
    """`recover launch` with a coordinator that comes back late."""
    from recover.launch import Options
    from recover.launch import launch as run

    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--events", type=Path)
    parser.add_argument("script", type=Path)
    options = parser.parse_args(arguments)
    return run(Options(script=options.script, replicas=options.replicas, events=options.events),
               coordinator_command=(sys.executable, "-u", __file__, "--late-coordinator"))


def late_coordinator(arguments: list[str]) -> int:
    """The coordinator; any but the first waits `AWAY` seconds before it listens."""
    from recover.membership.coordinator import main

    if arguments[arguments.index("--incarnation") + 1] != "0":
        time.sleep(AWAY)
    return main(arguments)


def one_run(directory: Path, kill: bool) -> dict[str, Any]:
    """Durations of all steps (milliseconds, per replica), those in the window, and counts of messages."""
    killed = 0
    with common.Launch(__file__, directory, replicas=REPLICAS, command=[sys.executable, __file__, "--launch"]) as run:
        common.wait_until(lambda: (directory / "progress-0").exists(), f"step {KILL_AFTER}\n{run.said()}", every=0.005)
        killed = time.monotonic_ns()
        if kill:
            os.kill(coordinator_pid(directory), signal.SIGKILL)
        run.wait()
    lines = common.read_events(directory)
    returned = next((line["monotonic_ns"] for line in lines if line["event"] == "recover.coordinator.start"
                     and line["attributes"]["incarnation"] == 1 and line["replica"] is None
                     and line["monotonic_ns"] - killed > 1e9 * AWAY / 2), 0)
    until = (returned or killed + int(1e9 * AWAY)) + int(1e9 * WINDOW_AFTER)
    kept = [json.loads((directory / f"steps-{replica}.json").read_text()) for replica in range(REPLICAS)]
    durations: list[float] = []
    window: list[float] = []
    for each in kept:
        for before, after in zip(each["done"][4:], each["done"][5:], strict=False):
            inside = before < until and after > killed
            (window if inside else durations).append((after - before) / 1e6)
    assert bool(returned) == kill, "the second coordinator was not seen"
    views = {tuple(line["view"]) for line in lines if line["event"] == "recover.view.new" and line["replica"] is not None}
    return {"killed": kill, "away_s": round((returned - killed) / 1e9, 3) if kill else 0, "views": len(views),
            "recoveries": sum(line["event"] == "recover.recovery" for line in lines),
            "outside": durations, "window": window, "messages": messages(kept[0])}


def coordinator_pid(directory: Path) -> int:
    return int(next(line["attributes"]["pid"] for line in common.read_events(directory)
                    if line["event"] == "recover.coordinator.start"))


def messages(kept: dict[str, Any]) -> dict[str, Any]:
    """What the coordinator heard between two steps, by type."""
    first, last = kept["counts"]
    heard = {name: last["received"].get(name, 0) - first["received"].get(name, 0) for name in last["received"]}
    heard["StatsRequest"] = heard.get("StatsRequest", 0) - 1      # the second question itself
    return {"steps": COUNT_TO - COUNT_FROM, "seconds": round(last["seconds"] - first["seconds"], 3),
            "received": {name: count for name, count in heard.items() if count}}


# ---------------------------------------------------------------- the driver

def main() -> int:
    if sys.argv[1:2] == ["--launch"]:
        return launch(sys.argv[2:])
    if sys.argv[1:2] == ["--late-coordinator"]:
        return late_coordinator(sys.argv[2:])
    parser = argparse.ArgumentParser(description="steps while the coordinator is away")
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    if common.inside():
        train(Path(os.environ["BENCH_OUT"]))
        return 0
    runs = []
    with common.Noise() as noise, common.workdir() as work:
        for n in range(options.pairs):
            for kill in ((True, False) if n % 2 else (False, True)):      # neither is always the first
                runs.append(one_run(work / f"{n}-{kill}", kill))
    rows = []
    for run in runs:
        window, outside = common.summary(run["window"]), common.summary(run["outside"])
        rows.append([f"away {run['away_s']:.1f} s" if run["killed"] else "stays", run["views"], int(window["n"]),
                     window["median"], window["p90"], window["max"], outside["median"], outside["max"]])
    common.show(f"{REPLICAS} replicas, durations of steps in milliseconds", (
        "coordinator", "views", "in window", "median", "p90", "max", "outside: median", "max "), rows)
    first = runs[0]["messages"]
    print(f"messages to the coordinator in {first['steps']} failure-free steps ({first['seconds']} s): {first['received']}")
    lost, control = ([run for run in runs if run["killed"] is kill] for kill in (True, False))
    figures = {name: {"median": statistics.median(d for run in group for d in run["window"]),
                      "max": max(d for run in group for d in run["window"])}
               for name, group in (("lost", lost), ("control", control))}
    longest = max(max(run["outside"] + ([] if run["killed"] else run["window"])) for run in runs)
    undelayed = figures["lost"]["max"] <= max(longest, 1.5 * figures["control"]["median"]) \
        and figures["lost"]["median"] <= 1.05 * figures["control"]["median"]
    quiet = all(set(run["messages"]["received"]) <= {"Heartbeat", "Pulse"} for run in runs)
    undisturbed = all(run["views"] == 1 and run["recoveries"] == 0 for run in runs)
    if not options.no_record:
        common.record("coordinator_loss", "coordinator killed and restarted 2 s later: no step is delayed by it (none longer "
                      "than the longest where nothing happened, median within 5 %), no new view; signs of life only",
                      undelayed and quiet and undisturbed,
                      {"replicas": REPLICAS, "microbatches": MICROBATCHES, "nap_s": NAP, "away_s": AWAY, "steps": STEPS,
                       "pairs": options.pairs},
                      {"window_ms": {n: common.rounded(f) for n, f in figures.items()}, "wakeup_delay_ms": noise.figures(),
                       "runs": [run | {"outside": common.rounded(common.summary(run["outside"])),
                                       "window": [round(d, 2) for d in run["window"]]} for run in runs]})
    return 0 if undelayed and quiet and undisturbed else 1


if __name__ == "__main__":
    sys.exit(main())
