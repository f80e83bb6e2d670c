"""The real coordinator with many members: `python benchmarks/control_plane.py [--members 64 512 4096]`.

The coordinator is the process that a run has (`python -m recover.membership.coordinator`). Members are simulated: two
processes hold the connections of them all, speak the wire protocol (handshake, join, heartbeats, exchange), and compute
nothing. Each member that will die is a process of its own, and is SIGKILLed. Measured per size:

* death to view: from the kill until the last survivor holds every byte of the new view;
* exchange: from the word to all members until the last of them holds every byte of the answer; the payloads are encoded
  `Report`s as survivors would send them in the middle of a reduction (two speed vectors of all members included), and, to
  see what those cost, the same without vectors;
* formation: from the first connection to the first view, all members at once;
* idle: the coordinator's share of a processor while nothing happens but heartbeats, and its memory;
* decoding: what a member's own machine needs to decode that view. Here it would be thousands of times the same work on
  the processors that the coordinator needs, so members compare the bytes with those that one of them has decoded.

Sockets: one per member in the coordinator and one in the clients; the limit on open files is raised as far as the system
lets us, and a size that does not fit is refused with a word.
"""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import msgspec
import psutil

import common
from recover.config import Timeouts
from recover.membership import wire
from recover.membership.answers import Answer
from recover.membership.coordinator import raise_file_limit
from recover.membership.handshake import Caller
from recover.protocol.messages import Endpoint, Report

TOKEN, RUN = b"a token for benchmarks", "control-plane"
CLIENTS = 2
BARS = {64: 0.1, 512: 0.1, 4096: 1.0}
"""Members -> seconds from a death to the new view at the last member, at most."""
PATIENCE = {64: 5.0, 512: 5.0, 4096: 30.0}
"""Members -> failure timeout (seconds). The simulated members of thousands of hosts share two processes here: these must
not be taken for dead when they are merely late. It changes how many heartbeats there are, not how a death is noticed."""
LIMIT = 120.0
"""Seconds for any one thing to happen."""


def payload(members: int) -> bytes:
    """What a survivor reports in the middle of a reduction; two fence vectors, hence two speeds per member (0: none)."""
    vector = {member: 1.0 + member % 7 / 16 for member in range(members)}
    vectors = {1001: vector, 1002: vector} if members else {}
    report = Report(1000, level=True, owes={1000: frozenset(range(8)), 1001: frozenset(range(8))}, buckets=((1, 24),),
                    reduced=frozenset((0, bucket) for bucket in range(12)), vectors=vectors)
    return msgspec.msgpack.encode(report)


# ---------------------------------------------------------------- simulated members

class Clients:
    """The members `low` to `high - 1` of one process, and what they saw."""

    def __init__(self, low: int, high: int, timeout: float) -> None:
        self.numbers = range(low, high)
        self.timeouts = Timeouts(failure_timeout=timeout)
        self.members: dict[int, Link] = {}
        self.begun: float | None = None
        self.views: dict[tuple[int, int], dict[str, Any]] = {}
        self.newest: wire.NewView | None = None
        self.last_body, self.decoding = b"", 0.0
        self.answered, self.answered_last = 0, 0.0          # of the latest exchange: members that have all of it, and when
        self.retries = 0
        self.sending = b""
        self.frames: list[bytes] = []
        self.reply, self.unpacking = Answer(), 0.0

    def view(self, body: bytes) -> None:
        """One member got a view; all members must get the same bytes."""
        if body != self.last_body:
            since = time.perf_counter()
            [message] = wire.from_coordinator().feed(len(body).to_bytes(wire.HEADER, "big") + body)
            self.decoding = time.perf_counter() - since
            assert isinstance(message, wire.NewView)
            self.newest, self.last_body = message, body
        assert self.newest is not None
        seen = self.views.setdefault(self.newest.view.id, {"members": len(self.newest.view.members), "count": 0})
        seen["count"] += 1
        seen["last"], seen["bytes"] = time.monotonic(), len(body)

    def part(self, member: Link, frame: bytes) -> None:
        """One member got some of the answer; all members must get the same bytes in the same order."""
        assert self.newest is not None
        if member.parts == len(self.frames):
            self.frames.append(frame)
            since = time.perf_counter()
            [message] = wire.from_coordinator().feed(frame)
            assert isinstance(message, wire.Parts)
            self.reply.add(message.chunk)
            self.unpacking += time.perf_counter() - since
        assert self.frames[member.parts] == frame, "two members got different answers"
        member.parts += 1
        if member.parts < len(self.frames) or len(self.reply.payloads) < len(self.newest.view.members):
            return
        assert set(self.reply.payloads.values()) == {self.sending}
        self.answered += 1
        self.answered_last = time.monotonic()

    async def connect(self, number: int, port: int) -> None:
        """Until welcomed; as a rank would, again soon after a connection that broke."""
        loop = asyncio.get_running_loop()
        while True:
            link = Link(self, number)
            try:
                await loop.create_connection(lambda link=link: link, "127.0.0.1", port)
                if await link.welcomed:
                    self.members[number] = link
                    return
            except OSError:
                pass
            self.retries += 1
            await asyncio.sleep(0.1)

    async def beat(self) -> None:
        """Heartbeats of all members, spread over the period as they would be."""
        tick, frame = 0.01, wire.encode(wire.Heartbeat())
        parts = max(1, round(self.timeouts.heartbeat / tick))
        while True:
            for part in range(parts):
                for number, link in list(self.members.items()):
                    if number % parts == part:
                        link.write(frame)
                await asyncio.sleep(tick)

    async def run(self, port: int) -> None:
        """Commands come by standard input, one word a line, answers go by standard output, one JSON a line."""
        loop = asyncio.get_running_loop()
        lines = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        beating = asyncio.create_task(self.beat())
        joining = asyncio.gather(*(self.connect(number, port) for number in self.numbers))
        while word := (await lines.readline()).decode().split():
            if word[0] == "exchange":
                assert self.newest is not None
                self.answered = 0
                self.frames, self.reply, self.unpacking, self.sending = [], Answer(), 0.0, payload(int(word[1]))
                frame = wire.encode(wire.Exchange(self.newest.view.id, self.sending))
                for link in list(self.members.values()):
                    link.parts = 0
                    link.write(frame)
            views = [{"id": view, **seen} for view, seen in self.views.items()]
            said = {"welcomed": len(self.members), "views": views, "retries": self.retries,
                    "answered": self.answered, "answered_last": self.answered_last,
                    "decoding": self.decoding, "unpacking": self.unpacking, "cpu": time.process_time()}
            print(json.dumps(said), flush=True)
        beating.cancel()
        joining.cancel()


class Link(asyncio.BufferedProtocol):
    """One member's connection: the real handshake, then frames, of which only the tag is looked at."""

    def __init__(self, clients: Clients, number: int) -> None:
        self.clients, self.number = clients, number
        self.caller = Caller(TOKEN, RUN)
        self.welcomed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.buffer, self.held = bytearray(1 << 12), 0
        self.parts = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.write(self.caller.hello)

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data)

    def get_buffer(self, sizehint: int) -> memoryview:
        if len(self.buffer) - self.held < 1 << 12:
            self.buffer.extend(bytes(max(len(self.buffer), 1 << 16)))
        return memoryview(self.buffer)[self.held:]

    def buffer_updated(self, count: int) -> None:
        self.held += count
        if not self.caller.passed:
            return self.shake()
        start = 0
        while self.held - start >= wire.HEADER:
            length = int.from_bytes(self.buffer[start:start + wire.HEADER], "big")
            if self.held - start - wire.HEADER < length:
                break
            start += wire.HEADER
            self.frame(start, start + length)
            start += length
        self.buffer[:self.held - start] = self.buffer[start:self.held]
        self.held -= start

    def shake(self) -> None:
        data, self.held = bytes(self.buffer[:self.held]), 0
        self.write(self.caller.feed(data))
        if not self.caller.passed:
            return
        identity = wire.Identity(self.number, 0, 1, f"life-{self.number}", Endpoint("10.123.45.67", 40000 + self.number),
                                 self.clients.timeouts.failure_timeout, {"microbatches": 8192, "seed": 0, "version": "bench"})
        self.write(wire.encode(wire.Join(identity)))

    def frame(self, start: int, end: int) -> None:
        size = self.buffer[start + 1] & 0x1F                # a message is an array that begins with its name
        match bytes(self.buffer[start + 2:start + 2 + size]):
            case b"Parts":
                self.clients.part(self, bytes(self.buffer[start - wire.HEADER:end]))
            case b"NewView":
                self.clients.view(bytes(self.buffer[start:end]))
            case b"Welcome":
                self.welcomed.set_result(True)
            case b"Heartbeat":
                pass
            case name:
                raise AssertionError(f"member {self.number} got a {name!r}")

    def connection_lost(self, error: Exception | None) -> None:
        self.clients.members.pop(self.number, None)
        if not self.welcomed.done():
            self.welcomed.set_result(False)


# ---------------------------------------------------------------- processes

class Child:
    """A process with some of the members."""

    def __init__(self, low: int, high: int, port: int, timeout: float) -> None:
        arguments = ["--clients", str(low), str(high), str(port), "--failure-timeout", str(timeout)]
        self.count = high - low
        self.process = subprocess.Popen([sys.executable, __file__, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        env=common.environment())

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        return self.process.stdin, self.process.stdout

    def say(self, word: str) -> None:
        self.pipes[0].write(word.encode() + b"\n")
        self.pipes[0].flush()

    def hear(self) -> dict[str, Any]:
        line = self.pipes[1].readline()
        if not line:
            raise RuntimeError("a process with members ended: see above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, word: str = "state") -> dict[str, Any]:
        self.say(word)
        return self.hear()

    def end(self) -> None:
        self.process.kill()
        self.process.wait(15)
        for pipe in self.pipes:
            pipe.close()


def coordinator(directory: Path, members: int, timeout: float) -> tuple[subprocess.Popen[bytes], int]:
    """The process and its port."""
    (directory / "token").write_bytes(TOKEN)
    port = directory / "port"
    options = {"listen": "127.0.0.1:0", "token-file": directory / "token", "run-id": RUN, "replicas": members,
               "failure-timeout": timeout, "port-file": port}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with (directory / "coordinator.txt").open("wb") as output:
        process = subprocess.Popen([sys.executable, "-m", "recover.membership.coordinator", *flags], stderr=output,
                                   env=common.environment())
    common.wait_until(port.exists, "the coordinator is up", LIMIT)
    return process, int(port.read_text())


# ---------------------------------------------------------------- measuring

def newest(states: list[dict[str, Any]], members: int) -> list[dict[str, Any]]:
    """What each process saw of the newest view with so many members; [] unless all processes saw one."""
    found = [max((v for v in state["views"] if v["members"] == members), key=lambda v: v["id"], default=None)
             for state in states]
    return [view for view in found if view is not None] if None not in found else []


def last_view(clients: list[Child], members: int) -> tuple[float, int]:
    """When the last member of `clients` got the view with so many members (monotonic clock), and its size in bytes."""
    wanted = sum(child.count for child in clients)

    def complete() -> tuple[float, int] | None:
        views = newest([child.ask() for child in clients], members)
        if sum(view["count"] for view in views) < wanted:
            return None
        return max(view["last"] for view in views), views[0]["bytes"]

    found: tuple[float, int] = common.wait_until(complete, f"a view of {members} members", LIMIT, every=0.25)
    return found


def exchange(clients: list[Child], members: int) -> float:
    """Seconds that one exchange of `payload(members)` takes until the last member has the whole answer. One per view."""
    wanted, before = sum(child.count for child in clients), time.monotonic()
    for child in clients:
        child.say(f"exchange {members}")
    for child in clients:
        child.hear()

    def complete() -> float | None:
        said = [child.ask() for child in clients]
        if sum(state["answered"] for state in said) < wanted:
            return None
        return float(max(state["answered_last"] for state in said))

    after: float = common.wait_until(complete, f"an exchange of {members} members", LIMIT, every=0.25)
    return after - before


def idle(process: psutil.Process, seconds: float = 4.0) -> float:
    """Share of one processor while members only beat."""
    before = sum(process.cpu_times()[:2])
    time.sleep(seconds)
    return (sum(process.cpu_times()[:2]) - before) / seconds


def measure(members: int, kills: int, timeout: float) -> dict[str, Any]:
    """One size."""
    with common.workdir() as directory, contextlib.ExitStack() as stack, common.Noise() as noise:
        process, port = coordinator(directory, members + kills, timeout)
        stack.callback(process.wait, 15)
        stack.callback(process.kill)
        watched, before = psutil.Process(process.pid), time.monotonic()
        share = -(-members // CLIENTS)
        bounds = [(low, min(members, low + share)) for low in range(0, members, share)]
        victims = [(members + number, members + number + 1) for number in range(kills)]
        children = []
        for low, high in [*bounds, *victims]:
            children.append(Child(low, high, port, timeout))
            stack.callback(children[-1].end)
        clients, doomed = children[:len(bounds)], children[len(bounds):]
        formed, _ = last_view(children, members + kills)
        results: dict[str, Any] = {"members": members, "failure_timeout_s": timeout, "formation_s": formed - before,
                                   "death_to_view_s": [], "view_cpu_s": 0.0, "exchange_without_vectors_s": []}
        results["idle_cpu"] = idle(watched)
        for number, victim in enumerate(doomed):
            cpu, since = sum(watched.cpu_times()[:2]), time.monotonic()
            victim.process.kill()
            left = members + kills - 1 - number
            last, size = last_view([*clients, *doomed[number + 1:]], left)
            results["death_to_view_s"].append(last - since)
            results["view_bytes"] = size
            results["view_cpu_s"] += (sum(watched.cpu_times()[:2]) - cpu) / kills
            if number < kills - 1:
                results["exchange_without_vectors_s"].append(exchange([*clients, *doomed[number + 1:]], 0))
        results["decode_view_s"] = clients[0].ask()["decoding"]
        cpu = sum(watched.cpu_times()[:2])
        results["exchange_s"] = exchange(clients, members)
        results["unpack_answer_s"] = clients[0].ask()["unpacking"]
        results["exchange_cpu_s"] = sum(watched.cpu_times()[:2]) - cpu
        results |= {"payload_bytes": len(payload(members)), "resident_mib": watched.memory_info().rss / 2**20,
                    "connection_retries": sum(child.ask()["retries"] for child in clients)}
    return results | {"wakeup_delay_ms": noise.figures(), "load_average": os.getloadavg()[0]}


def line(row: dict[str, Any]) -> list[object]:
    """Of the table."""
    view, bare = (common.summary(row[key]) for key in ("death_to_view_s", "exchange_without_vectors_s"))
    seconds = (view["median"], view["max"], row["view_cpu_s"], row["exchange_s"], row["exchange_cpu_s"], bare["median"])
    return [row["members"], *(round(1000 * value) for value in seconds), row["view_bytes"], round(1000 * row["formation_s"]),
            100 * row["idle_cpu"], round(row["resident_mib"])]


def fits(members: int) -> bool:
    """The clients' processes and the coordinator may open so many files."""
    raise_file_limit()
    return members + 100 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--members", type=int, nargs="+", default=[64, 512, 4096])
    parser.add_argument("--kills", type=int, default=5, help="at least 2")
    parser.add_argument("--failure-timeout", type=float, help="seconds; by default 5, and 30 for thousands")
    parser.add_argument("--clients", type=int, nargs=3, metavar=("LOW", "HIGH", "PORT"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.clients:
        raise_file_limit()
        low, high, port = options.clients
        return asyncio.run(Clients(low, high, options.failure_timeout).run(port))
    for members in options.members:
        if not fits(members):
            sys.exit(f"{members} members need more open files than {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}: raise "
                     "`ulimit -n`, or ask for fewer --members")
    results = [measure(members, options.kills, options.failure_timeout or PATIENCE.get(members, 5.0))
               for members in options.members]
    met = all(max(row["death_to_view_s"]) <= BARS.get(row["members"], float("inf")) for row in results)
    common.show("control plane, milliseconds unless said otherwise; CPU: of the coordinator",
                ["members", "view: median", "worst", "CPU", "exchange", "CPU", "no vectors", "view, B", "formation",
                 "idle, %", "MiB"],
                [line(row) for row in results])
    common.record("control_plane", "death to the new view at the last member: 512 members 100 ms, 4,096 members 1 s", met,
                  {"kills": options.kills, "client_processes": CLIENTS},
                  {"sizes": results})


if __name__ == "__main__":
    main()
