"""A coordinator and members on loopback, for tests. Members are threads of this process; the coordinator is one too
(`Host`), or a process that can be killed, stopped and started again (`Process`)."""
from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from recover.config import Environment, Timeouts
from recover.membership import Member
from recover.membership.registrar import Registrar
from recover.membership.server import Server
from recover.protocol.coordinator import Announcement
from recover.protocol.messages import NO_VIEW, Endpoint, View, ViewId

TOKEN = b"a token for tests"
RUN = "test-run"
Facts = dict[str, str | int | float | bool]
FACTS: Facts = {"microbatches": 8, "seed": 0}
SOON = 10.0


def until(condition: Callable[[], bool], what: str, seconds: float = SOON) -> None:
    """Poll: some news has no call to wait with."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.005)


class Host:
    """A `Server` in a thread of its own."""

    def __init__(self, replicas: int, ranks: int = 1, timeout: float = 5.0, incarnation: int = 0,
                 port: int = 0, host: str = "127.0.0.1") -> None:
        self._host = host
        self.registrar = Registrar(replicas, ranks, incarnation)
        self.timeouts = Timeouts(failure_timeout=timeout)
        self.server: Server
        self.port = port
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(SOON)

    async def _serve(self) -> None:
        self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self.server = Server(self.registrar, self.timeouts, TOKEN, RUN)
        self.port = await self.server.start(self._host, self.port)
        self._ready.set()
        await self._ended.wait()
        await self.server.stop()

    @property
    def address(self) -> str:
        return f"{self._host}:{self.port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(SOON)
        assert not self._thread.is_alive()


class Process:
    """A coordinator that may be killed, stopped and started again on its port."""

    def __init__(self, directory: Path, replicas: int, ranks: int = 1, timeout: float = 5.0, more: tuple[str, ...] = (),
                 port: int = 0) -> None:
        self.more = more
        self.directory, self.replicas, self.ranks, self.timeout = directory, replicas, ranks, timeout
        self.incarnation, self.port = -1, port
        self.token = directory / "token"
        self.token.write_bytes(TOKEN)
        self.start()

    def command(self, port: int) -> list[str]:
        options = {"listen": f"127.0.0.1:{port}", "token-file": self.token, "run-id": RUN, "replicas": self.replicas,
                   "ranks-per-replica": self.ranks, "failure-timeout": self.timeout, "incarnation": self.incarnation,
                   "events": self.directory / "events", "port-file": self.directory / f"port{self.incarnation}"}
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        return [sys.executable, "-m", "recover.membership.coordinator", *flags, *self.more]

    def start(self) -> None:
        self.incarnation += 1
        source = str(Path(__file__).parents[1] / "src")
        self.process = subprocess.Popen(self.command(self.port), env={**os.environ, "PYTHONPATH": source})
        port_file = self.directory / f"port{self.incarnation}"
        until(port_file.exists, "the coordinator is up", 30)
        self.port = int(port_file.read_text())

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SOON)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(SOON)


def make(address: str, replica: int, rank: int = 0, ranks: int = 1, *, facts: Facts | None = None, timeout: float = 5.0,
         token: bytes = TOKEN, run_id: str = RUN) -> Member:
    """A member that is not started yet."""
    environment = Environment(coordinator=address, replica=replica, replicas=1, rank=rank, world_size=ranks,
                              token_file=None, run_id=run_id, events=None, faults=None, interface=None)
    return Member(environment, Timeouts(failure_timeout=timeout), token,
                  Endpoint("127.0.0.1", 20000 + make_port()), FACTS if facts is None else facts)


_ports = iter(range(1 << 30))


def make_port() -> int:
    """Endpoints are never connected to here; they only differ."""
    return next(_ports) % 40000


def cut(member: Member) -> None:
    """The connection ends as if the process had died, and the member does not come back."""
    def die() -> None:
        member._closing = True
        if member._keeper.link is not None:
            member._keeper.link.abort()
    member._keeper.post(die)


def clean(member: Member) -> None:
    """As the run does after a confirmed decision: from now on it announces its newest view as confirmed."""
    member.announcement = lambda: Announcement(member.latest, True)


@contextmanager
def formed(address: str, replicas: int, ranks: int = 1, timeout: float = 5.0) -> Iterator[list[Member]]:
    """Members of the first view, by replica and rank; closed at the end."""
    places = [(replica, rank) for replica in range(replicas) for rank in range(ranks)]
    members = [make(address, replica, rank, ranks, timeout=timeout) for replica, rank in places]
    try:
        for member in members:
            member.start()
        views = {str(member.wait_view(NO_VIEW, 20)) for member in members}
        assert len(views) == 1
        yield members
    finally:
        for member in members:
            member._closing = True
        for member in members:
            member.close()


def newer(members: list[Member], than: ViewId, seconds: float = SOON) -> View:
    """The next view, which all members must get."""
    views = [member.wait_view(than, seconds) for member in members]
    assert len({view.id for view in views}) == 1, [view.id for view in views]
    return views[0]


def stranger(address: str) -> socket.socket:
    host, port = address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=SOON)
    sock.settimeout(SOON)
    return sock


def dropped(sock: socket.socket) -> bool:
    """The other side ends the connection; waits for it."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True
