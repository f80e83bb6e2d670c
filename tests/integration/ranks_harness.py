"""Runs of replicas of several ranks: the harness of `harness.py`, whose numbers here are those of ranks over all replicas."""
from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from harness import PATIENCE, RUN, Cluster, Fault, Rank, Result

from recover import events

TRAIN = "rank_script:train"
LAYOUTS = {"fsdp": 2, "pp_tp": 4, "pp_fsdp": 4}         # ranks of a replica
RECOVERY = ("exchange", "recompute", "redo", "forward")


def places(layout: str) -> tuple[str, ...]:
    """Of a step. A pipeline's schedule calls backward itself: no fault is planned inside it."""
    inside = ("backward:0",) if layout == "fsdp" else ()
    return ("compute:1", *inside, "reduce:1", "complete", "fence", "optimizer", "between")


def dies_in_recovery(position: int, place: str, step: int) -> tuple[list[Fault], dict[int, Any]]:
    """Of 3 replicas, 0 dies first, then a rank of 1 in the recovery from that: the plan, and settings of single replicas.

    For something to forward, replica 2 is made to lack a bucket that the dead had summed with all.
    """
    last = kill(1, position, step, place)
    if place != "forward":
        return [kill(0, 0, step, "compute:1"), last], {}
    return [kill(0, position, step, "reduce:2"), last], {2: {"settings": {"forget": {"step": step, "buckets": [0]}}}}


def quiet_ports(n: int) -> tuple[int, ...]:
    """Free ports that the system gives to nobody by itself, not even while a rank that is to listen there is starting."""
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports: list[int] = []
    for port in random.sample(range(max(1024, low - 20000), low), 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports.append(port)
    assert len(ports) >= n, "too few free ports"
    return tuple(ports[:n])


def kill(replica: int, position: int, step: int, place: str) -> Fault:
    return dict(replica=replica, rank=position, step=step, place=place, action="kill")


class Grid(Cluster):
    """A cluster of replicas x `positions` ranks. Rank `position` of a replica has the number replica * positions + position."""

    def __init__(self, directory: Path, script: str, replicas: int, positions: int, **options: Any) -> None:
        super().__init__(directory, script, replicas, **options)
        self.positions, self.ports = positions, quiet_ports(replicas + 1)     # one may come later

    def of(self, replica: int) -> range:
        """Numbers of the ranks of a replica."""
        return range(replica * self.positions, (replica + 1) * self.positions)

    def start_rank(self, replica: int) -> None:
        own = self.per_replica.get(replica, {})
        base = {"RECOVER_FAULTS": str(self.directory / "plan.yaml")} if self.plan else {}
        base |= {"WORLD_SIZE": str(self.positions), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.ports[replica]),
                 "GLOO_SOCKET_IFNAME": "lo", "RECOVER_REPLICA": str(replica), "RECOVER_REPLICAS": str(self.replicas),
                 "RECOVER_COORDINATOR": f"127.0.0.1:{self.port}", "RECOVER_TOKEN_FILE": str(self.directory / "token"),
                 "RECOVER_RUN_ID": RUN, "RECOVER_EVENTS": str(self.events), "RECOVER_INTERFACE": "127.0.0.1",
                 "RECOVER_FAILURE_TIMEOUT": str(self.failure_timeout)}
        for position, number in enumerate(self.of(replica)):
            pid = self.server.order(
                name=f"{self.directory}/{number}", script=own.get("script", self.script),
                environ=base | {"RANK": str(position), "LOCAL_RANK": str(position)},
                output=str(self.directory / f"output{number}.txt"), said=str(self.directory / f"said{number}.jsonl"),
                settings=self.settings | own.get("settings", {}))
            self.ranks[number] = Rank(number, pid, lives=1 + self.ranks[number].lives if number in self.ranks else 1)

    def collect(self) -> Result:
        result = super().collect()
        for number, rank in self.ranks.items():
            replica, position = divmod(number, self.positions)
            rank.lines = [entry.line for path in sorted(self.events.glob(f"events-replica{replica}-rank{position}-*.jsonl"))
                          for entry in events.read(path)]
        return result


@contextlib.contextmanager
def grid(directory: Path, replicas: int, positions: int, *, script: str = TRAIN, **options: Any) -> Iterator[Grid]:
    """Started, with nothing left behind at the end."""
    made = Grid(Path(tempfile.mkdtemp(dir=directory)), script, replicas, positions, **options)
    try:
        yield made.start()
    finally:
        made.close()


def run(directory: Path, replicas: int, positions: int, *, victims: Iterable[tuple[int, int]] | None = None,
        **options: Any) -> tuple[Result, list[int]]:
    """A run to its end, and the replicas that must have survived it, which is checked: all their ranks have finished.

    victims: (replica, position) that must have died by SIGKILL; by default those of the plan.
    """
    with grid(directory, replicas, positions, **options) as made:
        made.wait(seconds=PATIENCE)
        result = made.collect()
    victims = [(f["replica"], f["rank"]) for f in made.plan] if victims is None else list(victims)
    assert not result.missed, result.show()
    alive = [replica for replica in range(replicas) if replica not in {replica for replica, _ in victims}]
    for replica, position in victims:
        assert result.ranks[replica * positions + position].code == -signal.SIGKILL, result.show()
        assert all(result.ranks[n].code != 0 for n in made.of(replica)), result.show()      # it left as a whole
    assert [rank.replica for rank in result.survivors] == [n for replica in alive for n in made.of(replica)], result.show()
    return result, alive


def hashes(result: Result, positions: int) -> list[str]:
    """By position: of all survivors, which must be the same."""
    found = []
    for position in range(positions):
        given = {rank.hash for rank in result.survivors if rank.replica % positions == position}
        assert len(given) == 1, result.show()
        found += given
    return found


def losses(result: Result) -> list[str]:
    """The bits of each step's loss, the same on every rank."""
    given = {json.dumps([said["loss"] for said in rank.all("step")]) for rank in result.survivors}
    assert len(given) == 1, result.show()
    return list(json.loads(next(iter(given))))
