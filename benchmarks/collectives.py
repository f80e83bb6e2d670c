"""Backends side by side: `tcp`, `ulfm` where it is installed, and torch's Gloo, in the same processes, one after the other.

* Time of one all_reduce of float32, by size and number of ranks: every round runs each library once, each begun together
  (behind a barrier of the machine's, not of a library); the time of a round is that of its slowest rank. `tcp` is compared
  with Gloo round by round. Ours are out of place, Gloo's is in place: that difference is part of what is compared.
* A rank of a group is killed while all wait for a sum: from the kill to the error *at each survivor*, and on to the first
  fence of the survivors' new group (here the members know at once; in a run the coordinator tells them).

All ranks are processes of this host, which share its cores.
"""
from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import common
from recover import collectives
from recover.config import Timeouts
from recover.errors import PeerLost
from recover.launch.mpi import Seats, find_mpirun
from recover.protocol.messages import Endpoint, View

ROUNDS = {10_000: 60, 100_000: 40, 1_000_000: 24, 10_000_000: 8, 100_000_000: 3}
RANKS = (2, 4, 8)
TEAM, KILLS = 6, 4              # one team of six loses four, one by one
PATIENCE = 120.0
GLOO_TIMEOUT = 5.0              # seconds: what those pay in Gloo who are not the dead rank's neighbours
BARS = {"tcp/gloo": 1.0, "tcp": 50.0, "ulfm": 100.0}
fork = multiprocessing.get_context("fork")


def installed() -> tuple[str, ...]:
    """Our backends that can be used here."""
    ulfm = importlib.util.find_spec("mpi4py") is not None and find_mpirun() is not None
    return ("tcp", "ulfm") if ulfm else ("tcp",)


class Rank:
    """What a rank holds: its backends and groups, its pipe to the driver."""

    def __init__(self, me: int, count: int, pipe: Any, seat: dict[str, str]) -> None:
        self.me, self.count, self.pipe = me, count, pipe
        self.backends: dict[str, collectives.Backend] = {}
        self.endpoints: dict[str, dict[int, tuple[str, int]]] = {}
        self.number = 0
        os.environ.update(seat)

    def share(self, value: Any) -> dict[int, Any]:
        """Everybody's value."""
        self.pipe.send(value)
        assert self.pipe.poll(PATIENCE)
        found: dict[int, Any] = self.pipe.recv()
        return found

    def form(self, name: str, members: Sequence[int]) -> collectives.Group:
        """A group of our backend `name`."""
        if name not in self.backends:
            backend = collectives.create(name, run_id="bench", token=b"bench", timeouts=Timeouts(failure_timeout=30))
            self.backends[name] = backend
            self.endpoints[name] = self.share((backend.endpoint.host, backend.endpoint.port))
        self.number += 1
        where = {m: (Endpoint(*self.endpoints[name][m]),) for m in members}
        return self.backends[name].form(View((0, self.number), tuple(members), where), 0, self.me, PATIENCE)

    def gloo(self, port: int) -> None:
        """torch's own group."""
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=self.me, world_size=self.count,
                                timeout=timedelta(seconds=GLOO_TIMEOUT))


class Team:
    """`count` forked processes that run `body(rank)`, and may be killed."""

    def __init__(self, count: int, body: Callable[[Rank], Any], mpi: bool) -> None:
        self.seats = Seats(count) if mpi else None
        self.pipes, self.pids = {}, {}
        for me in range(count):
            ours, theirs = fork.Pipe()
            seat = self.seats.environment(me) if self.seats else {}
            pid = os.fork()
            if pid == 0:
                ours.close()
                for pipe in self.pipes.values():
                    pipe.close()
                self._child(Rank(me, count, theirs, seat), body)
            theirs.close()
            self.pipes[me], self.pids[me] = ours, pid
            if self.seats:
                self.seats.take(me, pid)

    @staticmethod
    def _child(rank: Rank, body: Callable[[Rank], Any]) -> None:
        signal.alarm(600)
        torch.set_num_threads(1)
        try:
            body(rank)
            for backend in rank.backends.values():
                backend.close()
        except BaseException:  # noqa: BLE001 - the edge of the process
            traceback.print_exc()
        os._exit(0)

    def gather(self, members: Sequence[int] | None = None) -> dict[int, Any]:
        """One value of each."""
        found = {}
        for me in self.pipes if members is None else members:
            if not self.pipes[me].poll(PATIENCE):
                raise TimeoutError(f"rank {me} says nothing")
            found[me] = self.pipes[me].recv()
        return found

    def tell(self, value: Any, members: Sequence[int] | None = None) -> None:
        for me in self.pipes if members is None else members:
            self.pipes[me].send(value)

    def spread(self) -> None:
        """The driver's side of `Rank.share`."""
        self.tell(self.gather())

    def close(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in self.pipes.values():
            pipe.close()
        if self.seats:
            self.seats.close()


def free_port() -> int:
    from recover.launch.options import free_ports
    return free_ports(1)[0]


# ---------------------------------------------------------------- time per all_reduce

def speed(count: int, names: Sequence[str], sizes: Sequence[int]) -> dict[int, dict[str, list[float]]]:
    """size -> library -> milliseconds of each round, at its slowest rank."""
    barrier, port = fork.Barrier(count, timeout=PATIENCE), free_port()

    def body(rank: Rank) -> None:
        groups = {name: rank.form(name, range(count)) for name in names}
        rank.gloo(port)
        for size in sizes:
            times: dict[str, list[float]] = {name: [] for name in (*names, "gloo")}
            source = torch.ones(size // 4)
            output, inplace = torch.empty_like(source), torch.empty_like(source)
            for turn in range(ROUNDS[size] + 2):        # two to warm up
                inplace.copy_(source)
                order = [*names, "gloo"]
                for name in order[turn % len(order):] + order[:turn % len(order)]:
                    barrier.wait()
                    before = time.monotonic()
                    if name == "gloo":
                        dist.all_reduce(inplace)
                    else:
                        groups[name].all_reduce(size + turn, [source], [output]).wait(PATIENCE)
                    times[name].append(1000 * (time.monotonic() - before))
            assert output[0] == inplace[0] == count
            rank.pipe.send({name: values[2:] for name, values in times.items()})
        rank.pipe.recv()

    team = Team(count, body, "ulfm" in names)
    try:
        for _ in names:
            team.spread()
        found = {}
        for size in sizes:
            each = team.gather()
            found[size] = {name: [max(values) for values in zip(*(each[m][name] for m in each), strict=True)]
                           for name in (*names, "gloo")}
        return found
    finally:
        team.close()


# ---------------------------------------------------------------- death

def deaths(name: str, teams: int) -> dict[str, list[float]]:
    """Milliseconds of every survivor of every kill: to the error, and to the first fence of the new group; and per kill
    to the error at the last survivor."""
    error, working, last = [], [], []
    for _ in range(teams):
        team = Team(TEAM, lambda rank: mourn(rank, name), name == "ulfm")
        try:
            team.spread()
            for victim in range(TEAM - 1, TEAM - 1 - KILLS, -1):
                team.gather(range(victim + 1))          # all wait for a sum that the victim does not launch
                time.sleep(0.05)
                killed = time.monotonic()
                os.kill(team.pids[victim], signal.SIGKILL)
                noticed = team.gather(range(victim))
                error += [1000 * (at - killed) for at, _ in noticed.values()]
                working += [1000 * (at - killed) for _, at in noticed.values()]
                last.append(1000 * (max(at for at, _ in noticed.values()) - killed))
        finally:
            team.close()
    return {"error": error, "last": last, "working": working}


def mourn(rank: Rank, name: str) -> None:
    """Wait for sums that end with somebody's death, and go on without him."""
    group = rank.form(name, range(TEAM))
    source, output = torch.ones(250_000), torch.empty(250_000)
    for left in range(TEAM, TEAM - KILLS, -1):
        group.gather(1, b"").wait(PATIENCE)
        rank.pipe.send("waiting")
        if rank.me == left - 1:
            time.sleep(PATIENCE)
        try:
            group.all_reduce(2, [source], [output]).wait(PATIENCE)
            raise AssertionError("a sum without the dead")
        except PeerLost:
            error = time.monotonic()
        group = rank.form(name, range(left - 1))
        group.gather(0, b"").wait(PATIENCE)
        rank.pipe.send((error, time.monotonic()))


def gloo_deaths(kills: int) -> dict[str, list[float]]:
    """The same of Gloo, which has no new group: milliseconds to the error, at most GLOO_TIMEOUT and a little."""
    error, last = [], []
    for _ in range(kills):
        port = free_port()

        def body(rank: Rank, port: int = port) -> None:
            rank.gloo(port)
            dist.all_reduce(torch.ones(10))
            rank.pipe.send("waiting")
            if rank.me == TEAM - 1:
                time.sleep(PATIENCE)
            try:
                dist.all_reduce(torch.ones(250_000))
            except RuntimeError:
                rank.pipe.send(time.monotonic())
            rank.pipe.recv()
        team = Team(TEAM, body, False)
        try:
            team.gather()
            time.sleep(0.05)
            killed = time.monotonic()
            os.kill(team.pids[TEAM - 1], signal.SIGKILL)
            noticed = [1000 * (at - killed) for at in team.gather(range(TEAM - 1)).values()]
            error += noticed
            last.append(max(noticed))
        finally:
            team.close()
    return {"error": error, "last": last, "working": []}


# ---------------------------------------------------------------- the driver

def table_of_speed(names: Sequence[str], found: dict[int, dict[int, dict[str, list[float]]]]) -> dict[str, Any]:
    rows, cells = [], []
    for count, by_size in found.items():
        for size, times in by_size.items():
            medians = {name: statistics.median(values) for name, values in times.items()}
            ratio = statistics.median(a / b for a, b in zip(times["tcp"], times["gloo"], strict=True))
            cells.append({"ranks": count, "bytes": size, "rounds": len(times["tcp"]), "tcp/gloo": round(ratio, 3),
                          "ms": common.rounded(medians)})
            rows.append((f"{count} ranks, {size:,} bytes", *(medians[name] for name in (*names, "gloo")), ratio))
    common.show("one all_reduce, milliseconds (median)", ("", *names, "gloo", "tcp / gloo"), rows)
    return {"cells": cells, "tcp/gloo": round(statistics.median(cell["tcp/gloo"] for cell in cells), 3)}


def table_of_deaths(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    figures = {name: {what: common.rounded(common.summary(values)) for what, values in times.items()}
               for name, times in found.items()}
    rows = []
    for name, by in figures.items():
        worked = [by["working"].get(key, "-") for key in ("median", "max")]
        rows.append((name, by["last"]["n"], by["error"]["median"], by["last"]["median"], by["last"]["max"], *worked))
    common.show("after a SIGKILL, milliseconds", ("", "kills", "error at a survivor, median", "at the last one, median",
                                                  "at the last one, worst", "working group, median", "worst"), rows)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="tcp, ulfm and Gloo side by side")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, ranks and kills; no record")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    names = installed()
    if "ulfm" not in names:
        print('ulfm is left out: pip install "recover-training[ulfm]"')
    ranks, sizes, teams = ((2, 4), list(ROUNDS)[:4], 1) if options.quick else (RANKS, list(ROUNDS), 5)
    with common.Noise() as noise:
        speeds = table_of_speed(names, {count: speed(count, names, sizes) for count in ranks})
        lost = table_of_deaths({name: deaths(name, teams) for name in names} | {"gloo": gloo_deaths(1 if options.quick else 5)})
    met = speeds["tcp/gloo"] <= BARS["tcp/gloo"] and all(lost[name]["last"]["max"] <= BARS[name] for name in names)
    if not options.no_record and not options.quick:
        bar = (f"tcp at most {BARS['tcp/gloo']:g} times Gloo's time (median over sizes and ranks); kill to error at the last "
               f"survivor at most {BARS['tcp']:g} ms (tcp), {BARS['ulfm']:g} ms (ulfm)")
        common.record("collectives", bar, met, {"rounds": {str(k): v for k, v in ROUNDS.items()}, "ranks": ranks,
                                                "team": TEAM, "gloo_timeout_s": GLOO_TIMEOUT},
                      {"speed": speeds, "death_ms": lost, "noise_ms": noise.figures()})
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
