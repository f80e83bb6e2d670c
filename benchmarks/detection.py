"""How long after a SIGKILL the survivors are back at work: `python benchmarks/detection.py`.

Four replicas, each with a loader of two forked workers that burn processor time, default settings. Three kills a run:
from outside at random moments, or by a fault plan at each of its places. The figure, per kill::

    detection   from the kill to the moment at which the LAST survivor has its first evidence of it (a collective
                that failed, or a newer view that was pushed: `Engine.notice`)
    recovery    from the moment at which the last survivor is back in the engine (it computed a microbatch, or ran the
                script's update, when the evidence came; that work counts, so it is finished first) to the moment at
                which the last survivor has confirmed the decision (`Engine.confirm`): halt, new view, exchange,
                decision, new connections, confirmation
    total       the sum of both, which is the bar's "detection + decision + reform, not counting the microbatch in hand"

What is left out is only time in which a survivor was in the script's code *after* its evidence. Lost microbatches that
are recomputed and buckets that are redone come afterwards and are not in it: they are work.

The moments are taken by wrapping the engine's methods in the ranks (`Probe`); nothing else is changed.

Two figures say what the machine has to do with it. `wake-up delay` is how late a sleeping process gets a processor. And
`threads dead` is when the kernel has ended the first thread of the victim: two threads of each rank hold a connection
that is in no descriptor table but their own (`close_range` with `CLOSE_RANGE_UNSHARE`), hence is closed as soon as that
thread ends. Connections in the table of the process are closed only when its memory has been taken down.
"""
from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import common

REPLICAS, WORKERS, MICROBATCHES, KILLS = 4, 2, 16, 3
PLACES = ("compute:1", "backward:0", "reduce:0", "reduce:1", "complete", "fence", "optimizer", "between")
MEDIAN_BAR, WORST_BAR = 50.0, 250.0


# ---------------------------------------------------------------- the training script

class Probe:
    """Writes down when the engine of this rank passes the moments that matter, each with one write(2)."""

    def __init__(self, engine: Any, path: Path) -> None:
        from recover.protocol import requests as ask

        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for kind in (ask.Halt, ask.Exchange, ask.Reform, ask.Confirm, ask.Forward):
            engine.handlers[kind] = self.wrapped(kind.__name__.lower(), engine.handlers[kind])
        engine.advance = self.wrapped("engine", engine.advance)
        notice = engine.notice

        def noticed(loss: Any) -> None:
            self.write("notice", str(loss))
            notice(loss)
        engine.notice = noticed

    def wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.write(name)
            result = function(*arguments)
            self.write(name + ".end", bool(result))
            return result
        return call

    def write(self, what: str, said: Any = None) -> None:
        os.write(self.file, json.dumps({"t": time.monotonic_ns(), "what": what, "said": said}).encode() + b"\n")


def hold_lifelines(port: int, replica: int) -> None:
    """Two threads, each with a connection to the driver that nobody else in this process has."""
    def hold() -> None:
        if ctypes.CDLL(None).close_range(3, ctypes.c_uint(-1), 2) == 0:         # CLOSE_RANGE_UNSHARE: keeps no copies
            with socket.create_connection(("127.0.0.1", port)) as line:
                line.sendall(bytes([replica]))
                line.recv(1)

    for _ in range(2):
        threading.Thread(target=hold, daemon=True).start()


class Lifelines:
    """The driver's ends: `ended[replica]` is when the first of its two was closed (monotonic nanoseconds)."""

    def __init__(self) -> None:
        self.ended: dict[int, int] = {}
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.listener.getsockname()[1])
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self.listener, selectors.EVENT_READ)
        replicas: dict[socket.socket, int] = {}
        while True:
            for key, _ in selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self.listener:
                    selector.register(sock.accept()[0], selectors.EVENT_READ)
                elif data := receive(sock):
                    replicas[sock] = data[0]
                else:
                    self.ended.setdefault(replicas.get(sock, -1), time.monotonic_ns())
                    selector.unregister(sock)
                    sock.close()


def receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1)
    except OSError:
        return b""


def train(steps: int, burn: float, lifelines: int) -> None:
    """A rank: a small model, and data that costs its loader's workers `burn` seconds of processor time an item."""
    import torch
    from torch import nn

    import recover

    class Costly:
        def __len__(self) -> int:
            return 4096

        def __getitem__(self, index: int) -> torch.Tensor:
            until = time.process_time() + burn
            while time.process_time() < until:
                pass
            return torch.randn(256)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run = recover.join(microbatches=MICROBATCHES, bucket_bytes=1 << 20, first_bucket_bytes=1 << 18)
    run.manage(model, optimizer)
    data = run.loader(Costly(), batch_size=4, num_workers=WORKERS)
    hold_lifelines(lifelines, run.replica)
    probe = None
    with run:
        for step in run.steps(steps):
            probe = probe or Probe(run.engine, Path(os.environ["BENCH_OUT"]) / f"probe-{run.replica}.jsonl")
            for microbatch in step:
                x = data[microbatch]
                step.backward((model(x) - x).square().mean())
            optimizer.step()


# ---------------------------------------------------------------- what happened

@dataclass
class Kill:
    """One SIGKILL: `at` in nanoseconds of the monotonic clock. What comes from `until` on is not its work any more."""

    victim: int
    at: int
    place: str
    until: int = 1 << 63


def analyse(kill: Kill, survivors: list[int], directory: Path) -> dict[str, Any]:
    """The figures of one kill (milliseconds after it)."""
    moments = {s: one_survivor(common.read_lines(directory / f"probe-{s}.jsonl"), kill.at, kill.until) for s in survivors}
    evidence = max(m["evidence"] for m in moments.values())
    free = max(m["free"] for m in moments.values())
    end = max(m["end"] for m in moments.values())
    return {"place": kill.place, "survivors": len(survivors), "total": evidence + end - free,
            "first_evidence": min(m["evidence"] for m in moments.values()), "detection": evidence,
            "recovery": end - free, "with_work_in_hand": end, "views": max(m["views"] for m in moments.values()),
            "timeline": {str(s): m for s, m in moments.items()}}


def one_survivor(lines: list[dict[str, Any]], killed: int, until: int) -> dict[str, Any]:
    """Milliseconds after the kill of: first evidence, back in the engine, and each part of the recovery."""
    seen = [(line["t"], line["what"], line["said"]) for line in lines]
    after = [(t, what, said) for t, what, said in seen if killed <= t < until]

    def first(what: str, since: int = 0) -> int:
        return next(t for t, kind, _ in after if kind == what and t >= since)

    evidence = first("notice")
    where = [what for t, what, _ in seen if t <= evidence and what in ("engine", "engine.end")]
    free = first("engine", evidence) if where and where[-1] == "engine.end" else evidence
    confirmed = [t for t, what, said in after if what == "confirm.end" and said]
    end = confirmed[-1]
    moments: dict[str, Any] = {"evidence": evidence, "free": free}
    for kind in ("halt", "exchange", "reform", "confirm"):
        for name in (kind, kind + ".end"):
            moments[name] = max(t for t, what, _ in after if what == name and t <= end)
    figures = {name: round((t - killed) / 1e6, 3) for name, t in (moments | {"end": end}).items()}
    return figures | {"views": sum(what == "exchange.end" for t, what, _ in after if t <= end),
                      "why": next(said for t, what, said in after if what == "notice")}


def coordinator_moments(directory: Path, kill: Kill) -> dict[str, float]:
    """When the coordinator said that the victim is lost, and pushed the view (milliseconds after the kill)."""
    lines = [line for path in directory.glob("events-coordinator-*.jsonl") for line in common.read_lines(path)]
    found = {}
    for line in lines:
        name = {"recover.replica.lost": "lost", "recover.view.new": "view"}.get(line["event"])
        if name and kill.at <= line["monotonic_ns"] < kill.until:
            found.setdefault(name, round((line["monotonic_ns"] - kill.at) / 1e6, 3))
    return found


# ---------------------------------------------------------------- runs

def planned(directory: Path, places: list[str], dice: random.Random, ranks: list[str]) -> list[Kill]:
    """One run with kills at these places of a plan."""
    victims = dice.sample(range(REPLICAS), len(places))
    plan = "faults:\n" + "".join(f'  - {{replica: {v}, step: {3 + 3 * n}, place: "{p}", action: kill}}\n'
                                 for n, (v, p) in enumerate(zip(victims, places, strict=True)))
    with common.Launch(__file__, directory, replicas=REPLICAS, plan=plan,
                       arguments=["--steps", str(6 + 3 * len(places)), *ranks]) as run:
        run.wait()
    offset = time.time_ns() - time.monotonic_ns()
    done = common.read_lines(directory / "faults-done.jsonl")
    return sorted((Kill(d["replica"], d["at"] - offset, d["place"]) for d in done), key=lambda kill: kill.at)


def unplanned(directory: Path, dice: random.Random, ranks: list[str]) -> list[Kill]:
    """One run with kills from outside, at random moments."""
    kills: list[Kill] = []
    alive = list(range(REPLICAS))
    with common.Launch(__file__, directory, replicas=REPLICAS, arguments=["--steps", "100000", *ranks]) as run:
        pids = common.wait_until(lambda: rank_pids(directory), f"all ranks start\n{run.said()}")
        for _ in range(KILLS):
            common.wait_until(lambda: at_work(directory, alive, len(kills)), "survivors commit")
            time.sleep(dice.uniform(0.3, 0.9))
            victim = dice.choice(alive)
            kills.append(Kill(victim, time.monotonic_ns(), "random"))
            os.kill(pids[victim], signal.SIGKILL)
            alive.remove(victim)
        common.wait_until(lambda: at_work(directory, alive, len(kills)), "the last survivor commits")
        over = time.monotonic_ns()                      # from here on it is told to go, which is a recovery of its own
    return [replace(kill, until=over) for kill in kills]


def rank_pids(directory: Path) -> dict[int, int]:
    pids = {line["attributes"]["replica"]: line["attributes"]["pid"] for line in common.read_events(directory)
            if line["event"] == "recover.launch.rank.start"}
    return pids if len(pids) == REPLICAS else {}


def at_work(directory: Path, alive: list[int], kills: int) -> bool:
    """Everyone alive has committed three steps in a view of exactly those that are alive."""
    lines = common.read_events(directory)
    return all(sum(line["event"] == "recover.step.receipt" and line["replica"] == replica
                   and sorted(line["attributes"]["members"]) == sorted(alive) for line in lines) >= (3 if not kills else 2)
               for replica in alive)


def measure(kills: list[Kill], directory: Path, ended: dict[int, int]) -> list[dict[str, Any]]:
    """Figures of all kills of a run; ValueError if its receipts do not add up."""
    from recover.report.audit import audit

    result = audit(directory)
    if not result.ok:
        raise ValueError(f"the audit of this run found {result.offence}")
    alive, figures = set(range(REPLICAS)), []
    for n, kill in enumerate(kills):
        alive.remove(kill.victim)
        kill = replace(kill, until=min([kill.until, *(later.at for later in kills[n + 1:])]))
        figures.append(analyse(kill, sorted(alive), directory)
                       | {"threads_dead": (ended[kill.victim] - kill.at) / 1e6,
                          "coordinator": coordinator_moments(directory, kill)})
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="time from SIGKILL to survivors at work")
    parser.add_argument("--runs", type=int, default=4, help="of each kind: planned places, random moments")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--burn", type=float, default=0.004, help="seconds of processor time per item in the workers")
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--lifelines", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    if common.inside():
        train(options.steps, options.burn, options.lifelines)
        return 0
    dice, figures = random.Random(options.seed), []
    places = [PLACES[n % len(PLACES)] for n in range(KILLS * options.runs)]
    with common.Noise() as noise, common.workdir() as work:
        for n in range(options.runs):
            for kind in ("planned", "random"):
                directory, lifelines = work / f"{kind}-{n}", Lifelines()
                ranks = ["--burn", str(options.burn), "--lifelines", str(lifelines.port)]
                kills = planned(directory, places[KILLS * n:KILLS * (n + 1)], dice, ranks) \
                    if kind == "planned" else unplanned(directory, dice, ranks)
                figures += measure(kills, directory, lifelines.ended)
                print(f"{kind} run {n}: " + ", ".join(f"{f['place']} {f['total']:.0f} ms" for f in figures[-KILLS:]), flush=True)
    totals = common.summary([f["total"] for f in figures])
    report(figures, totals)
    met = totals["median"] <= MEDIAN_BAR and totals["max"] <= WORST_BAR and totals["n"] >= 20
    if not options.no_record:
        common.record("detection", f"detection + decision + reform: median at most {MEDIAN_BAR:g} ms, worst at most "
                      f"{WORST_BAR:g} ms, at least 20 kills", met,
                      {"replicas": REPLICAS, "workers": WORKERS, "microbatches": MICROBATCHES, "burn_s": options.burn,
                       "kills": totals["n"], "seed": options.seed},
                      {"total_ms": common.rounded(totals), "wakeup_delay_ms": noise.figures(), "kills": figures})
    return 0 if met else 1


def report(figures: list[dict[str, Any]], totals: dict[str, float]) -> None:
    def figure(choose: Callable[[dict[str, Any]], float]) -> tuple[float, float]:
        found = common.summary([choose(f) for f in figures])
        return found["median"], found["max"]

    def longest(f: dict[str, Any], start: str, end: str) -> float:
        """Of the last survivor to be back in the engine: for the others it includes waiting for that one."""
        last = max(f["timeline"].values(), key=lambda m: float(m["free"]))
        return float(last[end] - last[start])

    rows = [("threads dead (see the text above)", *figure(lambda f: f["threads_dead"])),
            ("first evidence (any survivor)", *figure(lambda f: f["first_evidence"])),
            ("detection (all survivors)", *figure(lambda f: f["detection"])),
            ("  halt (revoke, join)", *figure(lambda f: longest(f, "halt", "halt.end"))),
            ("  view and exchange", *figure(lambda f: longest(f, "exchange", "exchange.end"))),
            ("  decision, reform", *figure(lambda f: longest(f, "exchange.end", "reform.end"))),
            ("  confirm", *figure(lambda f: longest(f, "reform.end", "confirm.end"))),
            ("recovery (last one back to last confirm)", *figure(lambda f: f["recovery"])),
            ("TOTAL", totals["median"], totals["max"]),
            ("(with the work in hand)", *figure(lambda f: f["with_work_in_hand"]))]
    common.show(f"{int(totals['n'])} kills, milliseconds", ("", "median", "worst"), rows)


if __name__ == "__main__":
    sys.exit(main())
