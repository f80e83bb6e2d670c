"""Runs of real processes that start in milliseconds, for tests and for benchmarks/exactness.py.

Theory of operation
-------------------
* A *fork server* (this file run as a script) imports torch once and forks a process per rank. It has one thread, so a
  fork is safe, and what it forks dies with it; it dies when its standard input ends. Each rank leads a session, so that
  what it forked itself (a loader's workers) is found and ended by its process group.
* The coordinator is the real one, a process of its own for every run: forked, too, or (in a network namespace)
  `python -m recover.membership.coordinator`.
* A rank runs a *script*: a function in some module, named "module:function", called with a `Script`. What it `say`s goes
  to a file line by line, hence survives its SIGKILL.
* Every wait has a deadline. `Cluster.close` ends whatever is left, also what was stopped, by its process id.
"""
from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recover import events
from recover.membership import coordinator

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "src"
PATIENCE = 50.0                 # seconds for a whole run: only a bug is slower
RUN = "run-under-test"


class Script:
    """What a script is given: its settings, and `say(kind, **values)` to tell the test something."""

    def __init__(self, settings: dict[str, Any], said: Path) -> None:
        self.settings = settings
        self._file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def __getitem__(self, name: str) -> Any:
        return self.settings[name]

    def say(self, kind: str, **values: Any) -> None:
        os.write(self._file, json.dumps({"kind": kind, **values}).encode() + b"\n")


LIBC = ctypes.CDLL(None)


def die_with_parent() -> None:
    LIBC.prctl(1, signal.SIGKILL)                       # PR_SET_PDEATHSIG


# ---------------------------------------------------------------- the fork server's side

def serve() -> None:
    """Orders in (one JSON line each), what became of the processes out; single-threaded."""
    import logging

    import torch

    import recover.training.run  # noqa: F401 - what every rank would import
    torch.set_num_threads(1)
    warm = torch.nn.Parameter(torch.zeros(1))                       # a first optimizer imports for a second
    warm.grad = torch.zeros(1)
    torch.optim.AdamW([warm]).step()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(name)s: %(message)s")
    wake_in, wake_out = os.pipe()
    os.set_blocking(wake_out, False)
    signal.set_wakeup_fd(wake_out, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    tell(kind="ready")
    text = b""
    while True:
        ready, _, _ = select.select([0, wake_in], [], [])
        if wake_in in ready:
            os.read(wake_in, 4096)
            reap()
        if 0 in ready:
            data = os.read(0, 1 << 16)
            if not data:
                return                                  # children get SIGKILL as we go
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                start(json.loads(line), (wake_in, wake_out))


def tell(**values: Any) -> None:
    os.write(1, json.dumps(values).encode() + b"\n")


def reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if os.WIFSTOPPED(status):
            tell(kind="stopped", pid=pid)
        else:
            tell(kind="ended", pid=pid, code=os.waitstatus_to_exitcode(status))


def start(order: dict[str, Any], private: Iterable[int]) -> None:
    module, _, name = order["script"].partition(":")
    function = getattr(importlib.import_module(module), name)       # here: imported once for all ranks
    pid = os.fork()
    if pid == 0:
        become_rank(order, function, private)
    tell(kind="started", name=order["name"], pid=pid)


def become_rank(order: dict[str, Any], function: Callable[[Script], None], private: Iterable[int]) -> None:
    """Never returns. Ends as a Python program does: threads joined, exit functions run."""
    code = 1
    try:
        die_with_parent()
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in private:
            os.close(descriptor)
        null, output = os.open(os.devnull, os.O_RDONLY), os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for gone in [key for key in os.environ if key.startswith("RECOVER_")]:
            del os.environ[gone]
        os.environ.update(order["environ"])
        faulthandler.register(signal.SIGUSR1)
        function(Script(order["settings"], Path(order["said"])))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


# ---------------------------------------------------------------- this side

class ForkServer:
    """The fork server, seen from here. One for all runs of a process: `ForkServer.get()`."""

    _only: ForkServer | None = None

    def __init__(self) -> None:
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, HERE, HERE.parent))),
                   "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, str(HERE / "harness.py")], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, env=environ, start_new_session=True)
        self._text = b""
        self.pids: dict[str, int] = {}
        self.stopped: set[int] = set()
        self.codes: dict[int, int] = {}
        self._ready = False
        self.until(lambda: self._ready, "the fork server is up", 60)

    @classmethod
    def get(cls) -> ForkServer:
        if cls._only is None or cls._only.process.poll() is not None:
            cls._only = cls()
            atexit.register(cls._only.close)
        return cls._only

    def order(self, **order: Any) -> int:
        assert self.process.stdin is not None
        name = order["name"]
        self.pids.pop(name, None)
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        self.until(lambda: name in self.pids, f"{name} is started", 20)
        return self.pids[name]

    def until(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"not within {seconds:g} s: {what}")
            self.listen(min(left, 0.02))

    def listen(self, seconds: float) -> None:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return
        data = os.read(self.process.stdout.fileno(), 1 << 16)
        if not data:
            raise RuntimeError(f"the fork server ended with {self.process.wait(5)}")
        *lines, self._text = (self._text + data).split(b"\n")
        for said in map(json.loads, lines):
            match said["kind"]:
                case "ready":
                    self._ready = True
                case "started":
                    self.pids[said["name"]] = said["pid"]
                    self.codes.pop(said["pid"], None)
                case "stopped":
                    self.stopped.add(said["pid"])
                case "ended":
                    self.codes[said["pid"]] = said["code"]
                    self.stopped.discard(said["pid"])

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)


class Forked:
    """A process of the fork server, as `subprocess.Popen` would show it."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.server, self.pid = server, pid

    def poll(self) -> int | None:
        self.server.listen(0)
        return self.server.codes.get(self.pid)

    def wait(self, timeout: float) -> int:
        self.server.until(lambda: self.pid in self.server.codes, f"process {self.pid} has ended", timeout)
        return self.server.codes[self.pid]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def coordinate(script: Script) -> None:
    """The coordinator's process."""
    sys.exit(coordinator.main(script.settings["arguments"]))


@dataclass
class Rank:
    """One replica's only rank: how it ended (None: it did not), and what it left."""

    replica: int
    pid: int
    said: list[dict[str, Any]] = field(default_factory=list)
    lines: list[events.Line] = field(default_factory=list)
    output: str = ""
    code: int | None = None
    lives: int = 1

    def all(self, kind: str) -> list[dict[str, Any]]:
        return [said for said in self.said if said["kind"] == kind]

    def events(self, name: str) -> list[events.Line]:
        return [line for line in self.lines if line.event == name]

    @property
    def receipts(self) -> dict[int, dict[str, Any]]:
        """step -> attributes."""
        return {line.attributes["step"]: line.attributes for line in self.events(events.RECEIPT)}

    @property
    def end(self) -> dict[str, Any]:
        """Attributes of `run.end`."""
        lines = self.events(events.RUN_END)
        said = f"replica {self.replica}: {len(lines)} ends; exit {self.code}; it said:\n{self.output}"
        assert 1 <= len(lines) <= self.lives, said
        return lines[-1].attributes

    @property
    def hash(self) -> str:
        assert self.end["status"] == "finished", f"replica {self.replica} ended {self.end}:\n{self.output}"
        return str(self.end["state_hash"])


Fault = dict[str, Any]


def fault(replica: int, step: int | str, place: str, action: str = "kill") -> Fault:
    return dict(replica=replica, step=step, place=place, action=action)


class Cluster:
    """A coordinator and the ranks of one run. `per_replica`: settings, environment or script of single replicas."""

    positions = 1                                       # ranks of a replica
    host = "127.0.0.1"                                  # where the coordinator listens ...
    inside: tuple[str, ...] = ()                        # ... and the command that runs it there
    options: tuple[str, ...] = ()                       # further ones of the coordinator

    def __init__(self, directory: Path, script: str, replicas: int, *, plan: Iterable[Fault] = (),
                 settings: dict[str, Any] | None = None, failure_timeout: float = 5.0,
                 per_replica: dict[int, dict[str, Any]] | None = None) -> None:
        self.directory, self.replicas, self.failure_timeout = directory, replicas, failure_timeout
        self.script, self.settings, self.per_replica = script, settings or {}, per_replica or {}
        self.plan = list(plan)
        self.events = directory / "events"
        self.events.mkdir(parents=True)
        (directory / "token").write_bytes(b"secret of the run")
        (directory / "plan.yaml").write_text(yaml.safe_dump({"faults": self.plan}))
        self.server = ForkServer.get()
        self.ranks: dict[int, Rank] = {}
        self.coordinator: Forked | subprocess.Popen[bytes] | None = None
        self.incarnation, self.port = -1, 0

    def start(self) -> Cluster:
        self.start_coordinator()
        for replica in range(self.replicas):
            self.start_rank(replica)
        return self

    def start_coordinator(self) -> None:
        self.incarnation += 1
        port_file = self.directory / f"port{self.incarnation}"
        arguments = ["--listen", f"{self.host}:{self.port}",
                     "--token-file", str(self.directory / "token"), "--run-id", RUN, "--replicas", str(self.replicas),
                     "--ranks-per-replica", str(self.positions),
                     "--failure-timeout", str(self.failure_timeout), "--incarnation", str(self.incarnation), "--events",
                     str(self.events), "--port-file", str(port_file), *self.options]
        started = self.coordinator = self._coordinator_inside(arguments) if self.inside else self._coordinator(arguments)
        self.server.until(lambda: port_file.exists() or started.poll() is not None, "the coordinator is up", 20)
        assert started.poll() is None, self._text("coordinator.txt")
        self.port = int(port_file.read_text())

    def _coordinator(self, arguments: list[str]) -> Forked:
        pid = self.server.order(name=f"{self.directory}/coordinator{self.incarnation}", script="harness:coordinate",
                                environ={}, output=str(self.directory / "coordinator.txt"), said=os.devnull,
                                settings={"arguments": arguments})
        return Forked(self.server, pid)

    def _coordinator_inside(self, arguments: list[str]) -> subprocess.Popen[bytes]:
        with (self.directory / "coordinator.txt").open("ab") as output:
            return subprocess.Popen([*self.inside, sys.executable, "-m", "recover.membership.coordinator", *arguments],
                                    env={**os.environ, "PYTHONPATH": str(SOURCE)}, stdout=output, stderr=output,
                                    preexec_fn=die_with_parent)

    @property
    def addresses(self) -> str:
        """Where ranks look for a coordinator."""
        return f"{self.host}:{self.port}"

    def kill_coordinator(self) -> None:
        assert self.coordinator is not None
        self.coordinator.kill()
        self.coordinator.wait(5)

    def start_rank(self, replica: int) -> None:
        own = self.per_replica.get(replica, {})
        environ = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "RECOVER_REPLICA": str(replica),
                   "RECOVER_COORDINATOR": self.addresses, "RECOVER_REPLICAS": str(self.replicas),
                   "RECOVER_TOKEN_FILE": str(self.directory / "token"), "RECOVER_RUN_ID": RUN,
                   "RECOVER_EVENTS": str(self.events), "RECOVER_FAILURE_TIMEOUT": str(self.failure_timeout),
                   "RECOVER_INTERFACE": "127.0.0.1"}
        if self.plan:
            environ["RECOVER_FAULTS"] = str(self.directory / "plan.yaml")
        pid = self.server.order(
            name=f"{self.directory}/{replica}", script=own.get("script", self.script), environ=environ | own.get("environ", {}),
            output=str(self.directory / f"output{replica}.txt"), said=str(self.directory / f"said{replica}.jsonl"),
            settings=self.settings | own.get("settings", {}))
        self.ranks[replica] = Rank(replica, pid, lives=1 + self.ranks[replica].lives if replica in self.ranks else 1)

    def code(self, replica: int) -> int | None:
        return self.server.codes.get(self.ranks[replica].pid)

    def stopped(self, replica: int) -> bool:
        return self.ranks[replica].pid in self.server.stopped

    def until(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
        try:
            self.server.until(condition, what, seconds)
        except TimeoutError as late:
            for replica in self.ranks:
                self.signal(replica, signal.SIGUSR1)    # says where all its threads are
            time.sleep(0.5)
            raise TimeoutError(f"{late}\n{self.show()}") from None

    def wait(self, replicas: Iterable[int] | None = None, seconds: float = PATIENCE) -> None:
        """Until these (default: all) have ended."""
        chosen = list(self.ranks if replicas is None else replicas)
        self.until(lambda: all(self.code(r) is not None for r in chosen), f"replicas {chosen} have ended", seconds)

    def signal(self, replica: int, number: int) -> None:
        if self.code(replica) is None:
            os.kill(self.ranks[replica].pid, number)

    def said(self, replica: int, kind: str) -> list[dict[str, Any]]:
        """So far."""
        path = self.directory / f"said{replica}.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return [said for said in map(json.loads, lines) if said["kind"] == kind]

    def collect(self) -> Result:
        for replica, rank in self.ranks.items():
            rank.code = self.code(replica)
            rank.output = self._text(f"output{replica}.txt")
            rank.said = [json.loads(line) for line in self._text(f"said{replica}.jsonl").splitlines()]
            rank.lines = [entry.line for path in sorted(self.events.glob(f"events-replica{replica}-*.jsonl"))
                          for entry in events.read(path)]
        done = self.events / "faults-done.jsonl"
        happened = {json.loads(line)["number"] for line in done.read_text().splitlines()} if done.exists() else set()
        missed = [f for number, f in enumerate(self.plan, start=1) if number not in happened]
        return Result(self.directory, self.ranks, missed, self._text("coordinator.txt"))

    def _text(self, name: str) -> str:
        path = self.directory / name
        return path.read_text(errors="replace") if path.exists() else ""

    def show(self) -> str:
        parts = [f"-- replica {r}: exit {self.code(r)}\n{self._text(f'output{r}.txt')[-3000:]}" for r in self.ranks]
        return "\n".join([f"plan {self.plan}", *parts, f"-- coordinator\n{self._text('coordinator.txt')[-3000:]}"])

    def close(self) -> None:
        for rank in self.ranks.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)     # its session: loader workers too
        with contextlib.suppress(TimeoutError):
            self.server.until(lambda: all(self.code(r) is not None for r in self.ranks), "all are dead", 10)
        if self.coordinator is not None and self.coordinator.poll() is None:
            self.kill_coordinator()


@dataclass
class Result:
    """What a run left behind. `missed`: planned faults that did not happen."""

    directory: Path
    ranks: dict[int, Rank]
    missed: list[Fault]
    coordinator: str

    @property
    def survivors(self) -> list[Rank]:
        """Those that finished."""
        return [rank for rank in self.ranks.values() if rank.code == 0 and rank.end["status"] == "finished"]

    @property
    def hash(self) -> str:
        """Of all survivors, which must be the same."""
        assert self.survivors, self.show()
        hashes = {rank.replica: rank.hash for rank in self.survivors}
        assert len(set(hashes.values())) == 1, hashes
        return next(iter(hashes.values()))

    @property
    def losses(self) -> list[str]:
        """The bits of each step's loss, by the survivors' receipts, which must agree."""
        all_of = {tuple(r["loss_bits"] for _, r in sorted(rank.receipts.items())) for rank in self.survivors}
        assert len(all_of) == 1, self.show()
        return list(next(iter(all_of)))

    def recoveries(self) -> list[dict[str, Any]]:
        return [line.attributes for rank in self.ranks.values() for line in rank.events(events.RECOVERY)]

    def lost(self) -> list[int]:
        """Replicas that the coordinator counted as lost, in order."""
        return [entry.line.attributes["lost"]
                for path in sorted((self.directory / "events").glob("events-coordinator-*.jsonl"))
                for entry in events.read(path) if entry.line.event == events.REPLICA_LOST]

    def show(self) -> str:
        return "\n".join([f"missed faults: {self.missed}", *(f"-- replica {r.replica}: exit {r.code}\n{r.output[-3000:]}"
                                                             for r in self.ranks.values()),
                          f"-- coordinator\n{self.coordinator[-3000:]}"])


@contextlib.contextmanager
def cluster(directory: Path | None, script: str, replicas: int, kind: type[Cluster] = Cluster,
            **options: Any) -> Iterator[Any]:
    """A started cluster, with nothing left behind at the end."""
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        made = kind(Path(tempfile.mkdtemp(dir=directory)), script, replicas, **options)
        stack.callback(made.close)
        yield made.start()


def run(directory: Path | None, script: str, replicas: int, *, expect_dead: Iterable[int] | None = None,
        patience: float = PATIENCE, **options: Any) -> Result:
    """A run to its end. Every planned fault must have happened; all but `expect_dead` must have finished.

    `expect_dead` defaults to the replicas that the plan kills, which must have died by SIGKILL.
    """
    with cluster(directory, script, replicas, **options) as made:
        made.wait(seconds=patience)
        result = made.collect()
    killed = {f["replica"] for f in made.plan if f["action"] == "kill"}
    dead = set(killed if expect_dead is None else expect_dead)
    assert not result.missed, result.show()
    for replica, rank in result.ranks.items():
        if replica in killed:
            assert rank.code == -signal.SIGKILL, result.show()
        elif replica not in dead:
            assert rank in result.survivors, result.show()
    return result


if __name__ == "__main__":
    serve()
