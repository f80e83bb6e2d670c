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
    backends = record("collectives")["results"]
    died = backends["death_ms"]
    coordinator, memory = record("coordinator_loss")["results"], record("memory")["results"]["bytes_per_parameter"]
    hashes, wrong = {run["hash"] for run in exact["runs"]}, sum(bool(run["problem"]) for run in exact["runs"])
    everything, speed = record("checkpoint")["results"], record("speed")["results"]
    layouts = record("layouts")["results"]
    killed = [row for part in ("exact", "inside") for row in layouts[part] if row["killed_at"] != "nothing"]
    soak, joins = record("soak")["results"], record("join")["results"]
    total, window = detection["total_ms"], coordinator["window_ms"]
    sizes = {row["members"]: max(row["death_to_view_s"]) for row in record("control_plane")["results"]["sizes"]}
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
        ("one all_reduce, 10 kB to 100 MB, 2 to 8 ranks of one host: time of `tcp` over that of Gloo, median",
         f"{backends['speed']['tcp/gloo']:.2f}", "python benchmarks/collectives.py"),
        ("SIGKILL of one of up to 6: until the last survivor has its error, worst of 20: `tcp`, `ulfm`",
         f"{died['tcp']['last']['max']:.0f} ms, {died['ulfm']['last']['max']:.0f} ms", "python benchmarks/collectives.py"),
        (f"{sum(soak['faults'].values())} random faults in {soak['seconds']:.0f} s over one run of 4 replicas with restarts "
         f"(kills, freezes, hangs, cuts, leaves, coordinator): came back {soak['joined']} times; hash equals the undisturbed "
         "run's, offences in the audit", f"{'yes' if soak['equal'] else 'NO'}, {len(soak['offences'])}",
         "python benchmarks/soak.py"),
        (f"{len(joins['joins'])} joins of a run under way, some with the donor or the joiner killed: equal from its first step",
         f"{sum(each['equal'] for each in joins['joins'])}", "python benchmarks/join.py"),
        ("a replica of 10 million parameters joins three on two cores: their longest step meanwhile, against the median",
         f"up to {max(each['delay'] for each in joins['delays']):.0%} longer", "python benchmarks/join.py"),
        ("coordinator killed and back 2 s later: longest step meanwhile (in a run where nothing happened)",
         f"{window['lost']['max']:.0f} ms ({window['control']['max']:.0f} ms)", "python benchmarks/coordinator_loss.py"),
        ("a death among 512 (4,096) members of one coordinator: the new view at the last of them, worst of 5",
         f"{1000 * sizes[512]:.0f} ms ({1000 * sizes[4096]:.0f} ms)", "python benchmarks/control_plane.py"),
        (f"everything killed {len(everything['rows'])} times, resumed with 1 to 4 replicas: hash at the end is the undisturbed "
         f"run's, most steps lost (checkpoint every {record('checkpoint')['settings']['every']})",
         f"{'yes' if everything['end']['equal'] else 'NO'}, {everything['lost']}", "python benchmarks/checkpoint.py"),
        ("policy `speed`, one of 4 replicas at half speed: step time over the ideal (`balanced`)",
         f"{speed['speed']['ratio']:.2f} ({speed['balanced']['ratio']:.2f})", "python benchmarks/speed.py"),
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
