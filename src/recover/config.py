"""Settings of a run: one timeout for users, everything else derived from it.

`failure_timeout` (seconds) answers "after how long of silence may the run go on without a member?". A member sends a
heartbeat every tenth of it and is dropped after the whole of it; every other wait below is a multiple that is safe
whatever the value, so there is nothing else to tune.
"""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """All times in seconds."""

    failure_timeout: float = 5.0

    def __post_init__(self) -> None:
        if not 0.1 <= self.failure_timeout <= 3600:
            raise ValueError(f"failure_timeout must be between 0.1 and 3600 seconds, not {self.failure_timeout}")

    @property
    def heartbeat(self) -> float:
        """Between two signs of life, to the coordinator and on each data connection."""
        return self.failure_timeout / 10

    @property
    def silence(self) -> float:
        """After this much silence a peer or member counts as gone."""
        return self.failure_timeout * 0.8

    @property
    def compute(self) -> float:
        """At least so long a microbatch may take, before a member that others wait for counts as hung."""
        return self.failure_timeout

    @property
    def script(self) -> float:
        """At least so long the script may take between two steps: the update, a checkpoint, an evaluation of its own."""
        return self.failure_timeout * 10

    @property
    def native(self) -> float:
        """At least so long a native call may hold the interpreter lock: the process lives, its heartbeats are missing."""
        return self.failure_timeout * 6

    @property
    def pause(self) -> float:
        """For what happens the first time (compilation) and for `run.pause` without a limit of its own."""
        return max(600.0, 120 * self.failure_timeout)

    @property
    def connect(self) -> float:
        """For connecting to a member of a new view, handshake included."""
        return self.failure_timeout

    @property
    def handshake(self) -> float:
        """How long a stranger may take to prove that it belongs to the run."""
        return min(5.0, self.failure_timeout)

    @property
    def formation(self) -> float:
        """How long the first members wait for each other (processes start, imports take long)."""
        return max(120.0, 20 * self.failure_timeout)

    @property
    def coordinator(self) -> float:
        """How long members try to reach a coordinator that went away before they give up."""
        return max(300.0, 60 * self.failure_timeout)

    @property
    def grace(self) -> float:
        """How long a restarted coordinator waits for the members of the newest view to announce themselves."""
        return self.failure_timeout

    @property
    def drain(self) -> float:
        """For an operation of an old view to let go of its buffers after `revoke`."""
        return self.failure_timeout


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the launcher (or torchrun, or a scheduler) tells a rank through its environment."""

    coordinator: str            # "host:port", several separated by commas
    replica: int
    replicas: int
    rank: int                   # inside the replica: its position
    world_size: int             # ranks of the replica
    token_file: Path | None
    run_id: str
    events: Path | None
    faults: Path | None
    interface: str | None       # address or interface name of the data connections
    spares: int = 0             # how many replicas have no work before another dies
    min_replicas: int = 0       # with fewer the run waits, or stops, as `below` says
    below: Literal["wait", "stop"] = "wait"

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> Environment:
        """From RECOVER_* and torchrun's variables; ValueError names what is missing or malformed."""
        try:
            coordinator = environ["RECOVER_COORDINATOR"]
            replica, replicas = int(environ["RECOVER_REPLICA"]), int(environ["RECOVER_REPLICAS"])
        except KeyError as missing:
            raise ValueError(f"{missing.args[0]} is not set: start the script with `recover launch`, or set it") from None
        rank, world_size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK={rank} and WORLD_SIZE={world_size} do not fit: they are local to the replica")
        if not replica >= 0:
            raise ValueError(f"RECOVER_REPLICA={replica} must not be negative")

        spares, floor = int(environ.get("RECOVER_SPARES", "0")), int(environ.get("RECOVER_MIN_REPLICAS", "0"))
        if not 0 <= spares < replicas or floor < 0:
            raise ValueError(f"RECOVER_SPARES={spares} must be at least 0 and below RECOVER_REPLICAS={replicas}, and "
                             f"RECOVER_MIN_REPLICAS={floor} at least 0")

        def path(name: str) -> Path | None:
            return Path(environ[name]) if environ.get(name) else None

        return cls(coordinator=coordinator, replica=replica, replicas=replicas, rank=rank, world_size=world_size,
                   token_file=path("RECOVER_TOKEN_FILE"), run_id=environ.get("RECOVER_RUN_ID", "run"),
                   events=path("RECOVER_EVENTS"), faults=path("RECOVER_FAULTS"),
                   interface=environ.get("RECOVER_INTERFACE") or None, spares=spares, min_replicas=floor,
                   below="stop" if environ.get("RECOVER_BELOW") == "stop" else "wait")
