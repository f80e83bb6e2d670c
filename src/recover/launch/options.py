"""What a launch is asked to do, and the environment that each rank gets from it."""
from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from recover.config import Timeouts
from recover.faults import FaultPlan
from recover.launch.mpi import mpirun_command

MAX_RANKS = 4096
Below = Literal["wait", "stop"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """A launch. ValueError for what can't work, before anything is started."""

    script: Path
    arguments: tuple[str, ...] = ()
    replicas: int
    ranks_per_replica: int = 1
    faults: Path | None = None
    events: Path | None = None
    failure_timeout: float = 5.0
    threads_per_rank: int = 1
    interface: str | None = None
    backend: str | None = None          # of the sums between replicas, for scripts that name none
    listen: str = "127.0.0.1:0"         # where the coordinator accepts members; port 0: any free one
    grace: float = 5.0                  # seconds between a polite end and SIGKILL
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    token_file: Path | None = None      # None: a fresh one for this run only
    restart: int = 0                    # starts of a dead replica without a step committed in between
    spares: int = 0
    min_replicas: int = 0
    max_replicas: int | None = None     # None: `replicas`
    below: Below = "wait"
    join: str | None = None             # the coordinator of a run under way, which `replica` joins
    replica: int | None = None

    def __post_init__(self) -> None:
        Timeouts(failure_timeout=self.failure_timeout)
        if self.replicas < 1 or self.ranks_per_replica < 1 or self.replicas * self.ranks_per_replica > MAX_RANKS:
            raise ValueError(f"--replicas and --ranks-per-replica must be at least 1, and at most {MAX_RANKS} ranks in "
                             f"all, not {self.replicas} and {self.ranks_per_replica}")
        if self.threads_per_rank < 1:
            raise ValueError(f"--threads-per-rank must be at least 1, not {self.threads_per_rank}")
        if not self.grace > 0:
            raise ValueError(f"--grace must be more than 0 seconds, not {self.grace}")
        if not self.script.is_file():
            raise ValueError(f"there is no script {self.script}")
        if self.token_file is not None and not self.token_file.is_file():
            raise ValueError(f"there is no token file {self.token_file}")
        if self.faults is not None:
            FaultPlan.load(self.faults).check(max(self.replicas, self.most), self.ranks_per_replica)
        host_and_port(self.listen)
        self._check_numbers()
        self._check_join()
        self._check_backend()

    def _check_backend(self) -> None:
        if self.backend != "ulfm":
            return
        mpirun_command(1)
        if self.restart or self.join is not None or self.most > self.replicas:
            raise ValueError("with --backend ulfm nobody can come later, since MPI waits for every process when it starts: leave "
                             "out --restart, --join and --max-replicas, or use --backend tcp")

    def _check_numbers(self) -> None:
        if self.restart < 0:
            raise ValueError(f"--restart must be at least 0, not {self.restart}")
        if not 0 <= self.spares < self.replicas:
            raise ValueError(f"--spares must be at least 0 and below --replicas {self.replicas}, not {self.spares}")
        if not 0 <= self.min_replicas <= self.replicas:
            raise ValueError(f"--min-replicas must be between 0 and --replicas {self.replicas}, not {self.min_replicas}")
        if self.below not in ("wait", "stop"):
            raise ValueError(f'--below must be "wait" or "stop", not {self.below!r}')
        if not self.replicas <= self.most <= MAX_RANKS:
            raise ValueError(f"--max-replicas must be at least --replicas {self.replicas}, not {self.max_replicas}")

    def _check_join(self) -> None:
        if (self.join is None) != (self.replica is None):
            raise ValueError("--join HOST:PORT and --replica K belong together: replica K joins the run of that coordinator")
        if self.join is None:
            return
        host, port = host_and_port(self.join, "--join")
        if port == 0 or not host:
            raise ValueError(f"--join must name the port of a coordinator, not {self.join!r}")
        if self.token_file is None:
            raise ValueError("--join needs the --token-file and the --run-id that the run was started with")
        if self.replica is not None and self.replica < 0:
            raise ValueError(f"--replica must be at least 0, not {self.replica}")

    @property
    def most(self) -> int:
        """How many replicas the run may have."""
        return self.replicas if self.max_replicas is None else self.max_replicas

    @property
    def numbers(self) -> tuple[int, ...]:
        """The replicas that this launch starts."""
        return tuple(range(self.replicas)) if self.replica is None else (self.replica,)

    @property
    def plan(self) -> FaultPlan:
        """The planned faults; none without a plan."""
        return FaultPlan() if self.faults is None else FaultPlan.load(self.faults)

    @property
    def command(self) -> tuple[str, ...]:
        """What every rank runs."""
        return (sys.executable, "-u", str(self.script), *self.arguments)


def host_and_port(address: str, option: str = "--listen") -> tuple[str, int]:
    """Split "host:port" ("[::1]:0" for IPv6). ValueError says what is wrong."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{option} must be HOST:PORT{' (port 0 for any free one)' * (option == '--listen')}, not {address!r}")
    return host.strip("[]"), int(port)


@dataclass(frozen=True, kw_only=True)
class Where:
    """What is known only once a run has begun."""

    coordinator: str
    token_file: Path
    events: Path
    master_ports: Mapping[int, int]     # by replica, for its own torch.distributed


def rank_environment(options: Options, where: Where, replica: int, rank: int,
                     base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of one rank: torchrun's variables, local to its replica, and ours."""
    ranks, threads = options.ranks_per_replica, str(options.threads_per_rank)
    environ = {key: value for key, value in base.items() if not key.startswith("RECOVER_")}
    environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(where.master_ports[replica]),
        # The same for all, however many replicas there are: one and two threads give different bits.
        "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": "1",
        "RECOVER_COORDINATOR": where.coordinator, "RECOVER_REPLICA": str(replica),
        "RECOVER_REPLICAS": str(options.replicas), "RECOVER_TOKEN_FILE": str(where.token_file),
        "RECOVER_RUN_ID": options.run_id, "RECOVER_EVENTS": str(where.events),
        "RECOVER_FAILURE_TIMEOUT": repr(options.failure_timeout),
    }
    if options.faults is not None:
        environ["RECOVER_FAULTS"] = str(options.faults.absolute())
    if options.backend is not None:
        environ["RECOVER_BACKEND"] = options.backend
    if options.spares:
        environ["RECOVER_SPARES"] = str(options.spares)
    if options.min_replicas:
        environ |= {"RECOVER_MIN_REPLICAS": str(options.min_replicas), "RECOVER_BELOW": options.below}
    if options.interface is not None:
        environ["RECOVER_INTERFACE"] = options.interface
    return environ


def free_ports(n: int) -> tuple[int, ...]:
    """`n` different free ports on loopback, as good a guess as any: they are free when this returns."""
    sockets = [socket.socket() for _ in range(n)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return tuple(one.getsockname()[1] for one in sockets)
    finally:
        for one in sockets:
            one.close()
