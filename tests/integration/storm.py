"""Random faults of all kinds over one run whose dead are started again: for the soak and for a short test.

Theory of operation
-------------------
* One seed is one storm. Kinds: SIGKILL at a random moment (of a member, of a joiner, of a donor), a stop that is continued
  late, a training thread that hangs while heartbeats go on, data connections that break while nobody dies, SIGTERM to one
  replica, and the coordinator's death.
* Replica 0 is the witness: nothing happens to it. Its open files, threads and memory are read as the storm goes on.
* Whatever ends is started again under its number, as `recover launch --restart` does. The next fault waits until at least
  `SOUND` replicas, the witness among them, hold the parameters: the run must never be without anyone.
* In the end all are told to go. They stop after the same step and say its hash, which must be that of a run of one replica.
"""
from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import Cluster

KINDS = {"kill": 10, "two kills": 3, "freeze": 2, "hang": 1, "cut": 2, "leave": 2, "coordinator": 2}
REPLICAS, SOUND = 4, 2
FAILURE_TIMEOUT = 2.0
WITNESS = 0


def resources(pid: int) -> dict[str, int]:
    """Open files, threads, and memory that is the process's own (KiB)."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return dict(files=len(os.listdir(f"/proc/{pid}/fd")), threads=int(status["Threads"]),
                memory=int(status["RssAnon"].split()[0]))


@dataclass
class Storm:
    """What happens to a cluster. `seconds`: nothing is begun after that."""

    cluster: Cluster
    seed: int
    faults: int
    seconds: float
    done: Counter[str] = field(default_factory=Counter)
    lives: int = 0
    joined: int = 0
    readings: list[dict[str, int]] = field(default_factory=list)
    frozen: dict[int, float] = field(default_factory=dict)      # replica -> when it is continued
    sick: set[int] = field(default_factory=set)                 # something happened to this life
    level: set[int] = field(default_factory=set)
    read: dict[int, int] = field(default_factory=dict)          # of a life's events, bytes that are from before it was continued

    def blow(self) -> int:
        """Returns the step before which all stopped. Raises TimeoutError if the run does not get over something."""
        self.chance = random.Random(self.seed)
        made, until = self.cluster, time.monotonic() + self.seconds
        made.until(lambda: self.holders() == set(range(REPLICAS)), "all have begun", 60)
        while self.done.total() < self.faults and time.monotonic() < until:
            made.until(lambda: len(self.holders()) >= SOUND, "someone is back", 60)
            if self.done.total() % 10 == 0:
                self.readings.append(resources(made.ranks[WITNESS].pid))
            self.pause(self.chance.uniform(0, .3))
            self.strike()
        made.until(lambda: self.holders() == set(range(REPLICAS)) and not self.frozen, "all are back", 120)
        self.readings.append(resources(made.ranks[WITNESS].pid))
        for replica in range(REPLICAS):
            made.signal(replica, signal.SIGTERM)
        made.wait(seconds=60)
        said = [made.said(replica, "preempted")[-1] for replica in range(REPLICAS)]
        assert len({(each["step"], each["hash"]) for each in said}) == 1, (said, made.show())
        self.hash = said[0]["hash"]
        return int(said[0]["step"])

    def pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        self.cluster.until(lambda: self.tend() or time.monotonic() >= until, "a while", seconds + 5)

    def tend(self) -> None:
        """Continue who was stopped for long enough, start again who ended."""
        made = self.cluster
        for replica in [r for r, when in self.frozen.items() if time.monotonic() > when]:
            del self.frozen[replica]
            log = self.log_of(replica)
            self.read[replica] = log.stat().st_size if log.exists() else 0
            self.level.discard(replica)                 # if it was missed, it ends by itself; else it says what it does next
            self.sick.discard(replica)
            made.signal(replica, signal.SIGCONT)
        for replica in range(REPLICAS):
            code = made.code(replica)
            if code is None:
                continue
            assert replica != WITNESS and code in (-signal.SIGKILL, 75), (replica, code, made.show())
            self.frozen.pop(replica, None)
            self.sick.discard(replica)
            self.level.discard(replica)
            self.read.pop(replica, None)
            made.start_rank(replica)
            self.lives += 1

    def holders(self) -> set[int]:
        """Replicas that hold the parameters and to which nothing has happened: their lives have published receipts."""
        self.tend()
        for replica in self.cluster.ranks.keys() - self.level:
            path = self.log_of(replica)
            if path.exists() and b"recover.step.receipt" in path.read_bytes()[self.read.get(replica, 0):]:
                self.level.add(replica)
                self.joined += self.lives > 0 and replica not in self.read
        return self.level - self.sick

    def log_of(self, replica: int) -> Path:
        return self.cluster.events / f"events-replica{replica}-rank0-{self.cluster.ranks[replica].pid}.jsonl"

    def strike(self) -> None:
        made, chance = self.cluster, self.chance
        kind = chance.choices(list(KINDS), list(KINDS.values()))[0]
        holders = self.holders()
        able = [r for r in range(REPLICAS) if r != WITNESS and r not in self.sick and made.code(r) is None
                and (r not in holders or len(holders) > 1)]
        if kind == "coordinator":
            made.kill_coordinator()
            self.pause(chance.uniform(0, 1.5))
            made.start_coordinator()
        elif not able:
            return self.pause(.05)
        else:
            for victim in chance.sample(able, 2 if kind == "two kills" and len(able) > 1 else 1):
                self.hit(kind, victim)
        self.done[kind] += 1

    def hit(self, kind: str, victim: int) -> None:
        made = self.cluster
        if kind == "leave" and victim not in self.level:
            kind = "kill"                                   # a start that is told to go need not end before it has begun
        if kind == "cut":                                   # nobody is lost
            (made.directory / f"cut{victim}").touch()
            return
        self.sick.add(victim)
        if kind == "freeze":
            self.frozen[victim] = time.monotonic() + FAILURE_TIMEOUT * self.chance.uniform(.2, 2)
            made.signal(victim, signal.SIGSTOP)
        elif kind == "hang":
            (made.directory / f"hang{victim}").touch()
        else:
            made.signal(victim, signal.SIGTERM if kind == "leave" else signal.SIGKILL)


def growth(readings: list[dict[str, int]]) -> dict[str, int]:
    """From the first quarter's largest to the last quarter's smallest reading: what only ever grows shows here."""
    quarter = max(1, len(readings) // 4)
    return {kind: min(r[kind] for r in readings[-quarter:]) - max(r[kind] for r in readings[:quarter]) for kind in readings[0]}


def storm(directory: Path, seed: int, faults: int, seconds: float, **settings: Any) -> tuple[Storm, int]:
    """The storm, and the step before which it was ended."""
    made = Cluster(directory, "run_script:train", REPLICAS, failure_timeout=FAILURE_TIMEOUT,
                   settings={"steps": 1_000_000, "linger": .02, "orders": str(directory), **settings})
    blown = Storm(made, seed, faults, seconds)
    try:
        made.start()
        return blown, blown.blow()
    finally:
        made.close()
