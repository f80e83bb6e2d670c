"""The README's table of results, from the records beside this file: `python benchmarks/table.py`."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent / "records"


def record(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())
    return loaded


def rows() -> list[tuple[str, str, str]]:
    """(what, figure, command that prints it)"""
    exact, detection, accuracy = record("exactness"), record("detection")["results"], record("accuracy")["results"]
    coordinator, memory = record("coordinator_loss")["results"], record("memory")["results"]["bytes_per_parameter"]
    hashes, wrong = {run["hash"] for run in exact["runs"]}, sum(bool(run["problem"]) for run in exact["runs"])
    layouts = record("layouts")["results"]
    killed = [row for part in ("exact", "inside") for row in layouts[part] if row["killed_at"] != "nothing"]
    total, window = detection["total_ms"], coordinator["window_ms"]
    return [
        (f"`exact`: hash of weights and optimizer state after {exact['steps']} steps, {len(exact['runs'])} runs: 1 to 5 "
         "replicas, a kill at every place, pairs of kills", f"{len(hashes)} hash", "python benchmarks/exactness.py"),
        ("of those runs: a survivor computed something twice, threw something away, or the audit found fault", str(wrong),
         "python benchmarks/exactness.py"),
        (f"the same in replicas of several ranks (FSDP2, pipeline x TP, pipeline x FSDP2): {len(killed)} runs, a kill of every "
         "position at every place", f"{sum(not row['problem'] for row in killed)} equal the failure-free run of their layout",
         "python benchmarks/layouts.py"),
        ("their gradients (`fast`) against one process that computes everything, kills included: relative error",
         f"at most {max(row['worst'] for row in layouts['gradients']):.1e}", "python benchmarks/layouts.py"),
        ("a rank dies: the last rank of its replica is gone after",
         f"at most {max(row['seconds'] for row in layouts['leaving']):.1f} s", "python benchmarks/layouts.py"),
        ("`fast`: error of a step's gradient against the float64 sum, steps with kills included",
         f"at most {accuracy['worst']:.1e}", "python benchmarks/accuracy.py"),
        (f"SIGKILL of one of 4, loaders busy: detection, decision and reform, {total['n']} kills",
         f"median {total['median']:.0f} ms, worst {total['max']:.0f} ms", "python benchmarks/detection.py"),
        ("coordinator killed and back 2 s later: longest step meanwhile (in a run where nothing happened)",
         f"{window['lost']['max']:.0f} ms ({window['control']['max']:.0f} ms)", "python benchmarks/coordinator_loss.py"),
        ("gradient state, bytes per float32 parameter: `fast`, `exact` (DDP with bucket views)",
         f"{memory['fast, float32']['resident']:.0f}, {memory['exact, float32']['resident']:.0f} "
         f"({memory['DDP, bucket views, float32']['resident']:.0f})", "python benchmarks/memory.py"),
    ]


def markdown() -> str:
    lines = ["| what | measured | command |", "| --- | --- | --- |"]
    lines += [f"| {what} | {figure} | `{command}` |" for what, figure, command in rows()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")
