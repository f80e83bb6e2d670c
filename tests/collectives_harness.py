"""Runs the ranks of a group: as threads of this process (fast), or as forked processes (to be killed)."""
from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import contextmanager

import torch

from recover.collectives import Backend, create
from recover.config import Timeouts
from recover.errors import PeerLost
from recover.protocol.messages import Endpoint, View

torch.set_num_threads(1)
TOKEN = b"secret of the run"
PATIENCE = 20.0                 # seconds: only a bug is slower


def make(name="tcp", failure_timeout=30.0, run_id="test", token=TOKEN, **options) -> Backend:
    return create(name, run_id=run_id, token=token, timeouts=Timeouts(failure_timeout=failure_timeout), **options)


def view_of(endpoints: dict[int, Endpoint], number=1, members: Sequence[int] | None = None) -> View:
    members = tuple(sorted(endpoints)) if members is None else tuple(members)
    return View((0, number), members, {m: (endpoints[m],) for m in members})


def together(functions: dict[int, Callable[[], object]], patience=PATIENCE) -> dict[int, object]:
    """Call them at the same time, one thread each; a PeerLost is a result, anything else is raised here."""
    results: dict[int, object] = {}

    def run(key):
        try:
            results[key] = functions[key]()
        except BaseException as error:  # noqa: BLE001 - handed to the main thread
            results[key] = error

    threads = [threading.Thread(target=run, args=(key,), daemon=True) for key in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience)
        assert not thread.is_alive(), f"a rank hangs; done are {results}"
    for error in results.values():
        if isinstance(error, BaseException) and not isinstance(error, PeerLost):
            raise error
    return results


class Ranks:
    """N ranks as threads: `each(f)` calls f(member, group) for all at the same time."""

    def __init__(self, count: int, name="tcp", **options) -> None:
        self.backends = {m: make(name, **options) for m in range(count)}
        self.groups = {}
        self.number = 0

    def form(self, members: Sequence[int] | None = None, timeout=PATIENCE):
        self.number += 1
        view = self.view(members)
        formed = together({m: lambda m=m: self.backends[m].form(view, 0, m, timeout) for m in view.members})
        for result in formed.values():
            if isinstance(result, PeerLost):
                raise result
        self.groups = formed
        return formed

    def each(self, function, members: Sequence[int] | None = None):
        chosen = self.groups if members is None else members
        return together({m: lambda m=m: function(m, self.groups[m]) for m in chosen})

    def view(self, members: Sequence[int] | None = None) -> View:
        return view_of({m: b.endpoint for m, b in self.backends.items()}, self.number, members)

    def close(self) -> None:
        for backend in self.backends.values():
            backend.close()


@contextmanager
def ranks(count: int, name="tcp", form=True, **options):
    cluster = Ranks(count, name, **options)
    try:
        if form:
            cluster.form()
        yield cluster
    finally:
        cluster.close()


class Child:
    """A forked process that runs `body(child)`; both sides talk by `put` and `get`."""

    def __init__(self, body: Callable[[Child], None]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=self._run, args=(body, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.pid = self.process.pid

    def _run(self, body, pipe) -> None:
        self._pipe.close()
        self._pipe = pipe
        try:
            body(self)
        except BaseException:  # noqa: BLE001 - the edge of the process
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def put(self, value: object) -> None:
        self._pipe.send(value)

    def get(self, patience=PATIENCE):
        assert self._pipe.poll(patience), "no answer from the other process"
        return self._pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        if self.process.is_alive():
            self.signal(signal.SIGKILL)
        self.process.join(PATIENCE)
        self._pipe.close()


def rank_process(me: int, body: Callable[[Child, object], None], name="tcp", **options) -> Child:
    """A child that makes a backend, tells its endpoint, is told those of all, forms, runs body(child, group)."""
    def run(child: Child) -> None:
        backend = make(name, **options)
        child.put(backend.endpoint)
        group = backend.form(view_of(child.get()), 0, me, PATIENCE)
        body(child, group)
    return Child(run)


def form_with(backend: Backend, me: int, children: dict[int, Child]):
    """Form this process's group together with rank processes."""
    endpoints = {m: child.get() for m, child in children.items()} | {me: backend.endpoint}
    for child in children.values():
        child.put(endpoints)
    return backend.form(view_of(endpoints), 0, me, PATIENCE)
