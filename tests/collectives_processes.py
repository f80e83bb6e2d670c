"""Runs the ranks of a group as processes that may die: the test itself goes on in every one of them.

    with processes(3, name) as cluster:             # forks here: from now on four processes run this test
        results = cluster.each(body)                # member m runs body(m, its group); all get everybody's results

The test's own process (`cluster.me` is None) runs no body, it collects. What members of `each` return must be picklable; a
PeerLost is a result, any other exception fails the test. A member that ends within a body has `Died` as its result, one
that stops itself has FROZEN; neither takes part in what follows. A block ends with the end of all members. Closures work,
since a fork copies them; what members share while a body runs is `shared_event()`, made before.

Every registered backend is tested that can be made here; one's own is registered by a module that is named in
RECOVER_TEST_BACKENDS (comma-separated, imported first). A backend whose processes must be started in some special way names
that way in SEATS, one that works among the threads of one process says so in THREADS.
"""
from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait

import pytest
import torch

from collectives_harness import PATIENCE, make, ranks, view_of
from recover.collectives import Backend, Group, names
from recover.errors import PeerLost
from recover.launch.mpi import Seats, find_mpirun
from recover.protocol.messages import Endpoint

LIFETIME = 120                  # seconds after which a member ends, whatever it hangs in
FROZEN = "frozen"

SEATS: dict[str, Callable[[int], Seats]] = {"ulfm": Seats}
"""backend -> what makes places for so many processes: `environment(number)`, `take(number, pid)`, `close()`"""


THREADS = {"tcp"}
"""backends of which one process may have several"""

MISSING: dict[str, str] = {}
"""backend -> why it can't be tested here"""

if importlib.util.find_spec("mpi4py") is None or find_mpirun() is None:
    MISSING["ulfm"] = 'needs pip install "recover-training[ulfm]"'
if not torch.cuda.is_available() or not torch.distributed.is_nccl_available():
    MISSING["nccl"] = "needs a GPU, and a torch with NCCL"
for module in filter(None, os.environ.get("RECOVER_TEST_BACKENDS", "").split(",")):
    importlib.import_module(module)


def backends() -> list:
    """For `parametrize`: all that are registered; what is missing here is skipped by name."""
    return [pytest.param(name, marks=[pytest.mark.skipif(name in MISSING, reason=MISSING.get(name, ""))])
            for name in names()]


@dataclass(frozen=True)
class Died:
    """A member ended within a body; by this signal (0: it exited)."""

    signal: int


def shared_event():
    """An Event for members of any kind."""
    return multiprocessing.get_context("fork").Event()


def die() -> None:
    """End this process as a lost machine would."""
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    """Stop this process."""
    os.kill(os.getpid(), signal.SIGSTOP)


class Processes(AbstractContextManager):
    """`count` members of backend `name`; in the test's own process and, after the fork, in each member."""

    def __init__(self, count: int, name: str, form: bool = True, **options) -> None:
        self.count, self.name, self.options = count, name, options
        self.me: int | None = None
        self.number = 0
        self.backend: Backend | None = None
        self.groups: dict[int, Group] = {}              # ours only
        self.alive = tuple(range(count))                # those who take part
        self.members = self.alive                       # of the newest view
        self._pids: dict[int, int] = {}                 # theirs; only the test's own process knows
        self._form, self._seats, self._frozen = form, None, {}
        self._pipes: dict[int, Connection] = {}

    # -- life --------------------------------------------------------------------------------------------------------
    def __enter__(self) -> Processes:
        self._seats = SEATS[self.name](self.count) if self.name in SEATS else None
        pipes = {}
        for member in range(self.count):
            ours, theirs = multiprocessing.Pipe()
            pid = os.fork()
            if pid == 0:
                signal.alarm(LIFETIME)
                self.me, self._pipes = member, {member: theirs}
                for pipe in (ours, *pipes.values()):
                    pipe.close()
                break
            theirs.close()
            pipes[member], self._pids[member] = ours, pid
            if self._seats is not None:
                self._seats.take(member, pid)
        try:
            self._begin(pipes)
        except BaseException:
            self._fail()
            raise
        return self

    def _begin(self, pipes: dict[int, Connection]) -> None:
        if self.me is None:
            self._pipes = pipes
        elif self._seats is not None:
            os.environ.update(self._seats.environment(self.me))

        def endpoint(me, group):
            self.backend = make(self.name, **self.options)
            return self.backend.endpoint.host, self.backend.endpoint.port
        self.endpoints = self.each(endpoint)
        if self._form:
            self.form()

    def __exit__(self, kind, error, trace) -> None:
        if self.me is None:
            self._end(0 if error else PATIENCE)
            return
        if error is not None:
            self._fail()
        self.backend.close()
        self._pipes[self.me].send_bytes(pickle.dumps(("over", None)))
        os._exit(0)

    def _fail(self) -> None:
        """An error in a member is told to the test."""
        if self.me is None:
            self._end(0)
            return
        try:
            self._pipes[self.me].send_bytes(pickle.dumps(("error", traceback.format_exc())))
        except OSError:
            pass
        os._exit(1)

    def _end(self, patience: float) -> None:
        until = time.monotonic() + patience
        left = {**self._pids, **self._frozen}
        while left and time.monotonic() < until:
            for member, pid in list(left.items()):
                if member in self._frozen or os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    del left[member]
            time.sleep(0.01)
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in self._pipes.values():
            pipe.close()
        if self._seats is not None:
            self._seats.close()
        assert not left or not patience, f"members {sorted(left)} did not end"

    # -- what tests do -----------------------------------------------------------------------------------------------
    def form(self, members: Sequence[int] | None = None, timeout: float = PATIENCE) -> dict[int, object]:
        """A new view; PeerLost of a member that did not get into it is raised."""
        formed = self.try_to_form(members, timeout)
        for result in formed.values():
            if isinstance(result, PeerLost):
                raise result
        return formed

    def try_to_form(self, members: Sequence[int] | None = None, timeout: float = PATIENCE) -> dict[int, object]:
        """A new view; what became of it at each member that still takes part: its members, or PeerLost."""
        self.number += 1
        view = self.view(members)
        self.members = view.members

        def enter(me, group):
            self.groups.pop(me, None)
            self.groups[me] = self.backend.form(view, 0, me, timeout)
            return self.groups[me].members
        return self.each(enter, [m for m in view.members if m in self.alive])

    def thaw(self, member: int) -> None:
        """Let one that has stopped itself go on; it takes no part all the same."""
        if self.me is None:
            os.kill(self._frozen[member], signal.SIGCONT)

    def view(self, members: Sequence[int] | None = None):
        return view_of({m: Endpoint(*e) for m, e in self.endpoints.items()}, self.number,
                       self.alive if members is None else members)

    def each(self, function, members: Sequence[int] | None = None) -> dict[int, object]:
        """What the function gave to each of the members (of the newest view, as far as they take part)."""
        chosen = list(members or [m for m in self.members if m in self.alive])
        if self.me is None:
            return self._collect(chosen)
        pipe = self._pipes[self.me]
        if self.me in chosen:
            try:
                said = ("result", function(self.me, self.groups.get(self.me)))
            except PeerLost as loss:
                said = ("lost", (loss.reason, loss.peer))
            pipe.send_bytes(pickle.dumps(said))
        assert pipe.poll(LIFETIME), "no results"
        results, self.alive = pickle.loads(pipe.recv_bytes())
        return {member: _decode(said) for member, said in results.items()}

    def _collect(self, chosen: list[int]) -> dict[int, object]:
        results, until = {}, time.monotonic() + PATIENCE
        while waiting := [m for m in chosen if m not in results]:
            assert time.monotonic() < until, f"members {waiting} hang; the others: {results}"
            for pipe in wait([self._pipes[m] for m in waiting], 0.02):
                member = next(m for m in waiting if self._pipes[m] is pipe)
                results[member] = self._answer(member)
            for member in waiting:
                if member not in results and _stopped(self._pids[member]):
                    results[member] = (FROZEN, None)
                    self._frozen[member] = self._pids.pop(member)
        self.alive = tuple(self._pids)
        payload = pickle.dumps((results, self.alive))
        for member in self.alive:
            self._pipes[member].send_bytes(payload)
        return {member: _decode(said) for member, said in results.items()}

    def _answer(self, member: int) -> tuple[str, object]:
        try:
            kind, value = pickle.loads(self._pipes[member].recv_bytes())
        except (EOFError, ConnectionError):
            code = os.waitpid(self._pids.pop(member), 0)[1]
            return "died", os.WTERMSIG(code) if os.WIFSIGNALED(code) else 0
        assert kind != "error", f"member {member} failed:\n{value}"
        return kind, value


def _decode(said: tuple[str, object]) -> object:
    kind, value = said
    return {"lost": lambda: PeerLost(*value), "died": lambda: Died(value), FROZEN: lambda: FROZEN}.get(kind, lambda: value)()


def _stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def gather(count: int, name: str, form: bool = True, **options):
    """Members as threads, which is quick, where the backend can do that; else as processes. Use `each` only."""
    return (ranks if name in THREADS else processes)(count, name, form=form, **options)


def processes(count: int, name: str, form: bool = True, **options) -> Processes:
    """See the module."""
    return Processes(count, name, form, **options)
