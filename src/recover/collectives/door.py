"""New connections: those that we make (`dial`) and those that strangers make (`Door`). On the communication thread.

A stranger gets `Timeouts.handshake` seconds and never more than a few hundred bytes of memory; at most STRANGERS of
them are heard at once, then the one that has taken longest goes. Whoever does not prove to belong to the run is dropped
and logged (a flood of them is counted, not logged line by line).
"""
from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable

from recover import forks
from recover.collectives.handshake import Hello, Talk
from recover.collectives.loop import READ, WRITE, Loop
from recover.errors import PeerLost, WireError

log = logging.getLogger("recover.collectives")
STRANGERS = 64
LOG_EVERY = 1.0                 # seconds between two lines about strangers

Proven = Callable[[Hello, socket.socket], None]
Failed = Callable[[str], None]


def tune(sock: socket.socket) -> None:
    """A connected socket: no delay for small frames; within one host no pacing of bursts.

    No buffer sizes: naming one would switch off the kernel's own tuning, which goes further than what it lets a program
    ask for (and 4 MiB were not faster on loopback). Pacing (bbr, where that is the system's choice) is made for long
    ways: between two processes of one host it made 40 MB take 43 ms instead of 29.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    try:
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
            sock.setsockopt(socket.IPPROTO_TCP, option, value)      # middleboxes forget idle connections after minutes
        if sock.getpeername()[0] == sock.getsockname()[0]:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"cubic")
    except OSError:                                     # gone already, or no such choice here: only speed is at stake
        pass


class Exchange:
    """One handshake over one socket: moves bytes for a `Talk`, then hands the socket over."""

    def __init__(self, loop: Loop, sock: socket.socket, talk: Talk, proven: Proven, failed: Failed) -> None:
        self._loop, self._sock, self._talk, self._proven, self._failed = loop, sock, talk, proven, failed
        self._buffer = b""
        self._over = False
        self._saying, self._wanted = next(talk)

    def begin(self) -> None:
        """On a connected socket."""
        self._loop.watch(self._sock, READ, self._step)
        self._say()

    def abort(self, reason: str) -> None:
        """Give it up; harmless when it is over."""
        if not self._over:
            self._over = True
            self._loop.discard(self._sock)
            self._failed(reason)

    def _step(self, events: int) -> None:
        try:
            data = self._sock.recv(self._wanted - len(self._buffer))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.abort(f"connection broke during the handshake: {error.strerror or error}")
            return
        if not data:
            self.abort("closed the connection during the handshake (another run, or another view?)")
            return
        self._buffer += data
        if len(self._buffer) == self._wanted:
            self._advance()

    def _advance(self) -> None:
        buffer, self._buffer = self._buffer, b""
        try:
            self._saying, self._wanted = self._talk.send(buffer)
        except WireError as error:
            self.abort(str(error))
            return
        except StopIteration as end:
            self._over = True
            self._loop.forget(self._sock)
            self._proven(end.value, self._sock)
            return
        self._say()

    def _say(self) -> None:
        if not self._saying:
            return
        try:                                            # some hundred bytes into an empty buffer: all or an error
            whole = self._sock.send(self._saying) == len(self._saying)
        except OSError:
            whole = False
        if not whole:
            self.abort("connection broke during the handshake")


class Dial:
    """One connection to a peer, from the attempt to its welcome. `reached`: the peer's host has answered."""

    def __init__(self, loop: Loop, where: tuple[socket.AddressFamily, tuple[object, ...]], talk: Talk,
                 proven: Proven, failed: Failed) -> None:
        self._loop, self._failed = loop, failed
        self._sock = forks.open_socket(where[0])
        self._sock.setblocking(False)
        self._exchange = Exchange(loop, self._sock, talk, proven, failed)
        self._over = self.reached = False
        code = self._sock.connect_ex(where[1])
        if code in (0, errno.EINPROGRESS):
            loop.watch(self._sock, WRITE, self._connected)
        else:
            loop.soon(lambda: self._refused(code))

    def abort(self) -> None:
        """Give it up silently."""
        self._over = True
        self._exchange.abort("given up")

    def _connected(self, events: int) -> None:
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._refused(code)
        else:
            self.reached = True
            tune(self._sock)
            self._exchange.begin()

    def _refused(self, code: int) -> None:
        if not self._over:
            self._exchange.abort(f"can't be reached: {errno.errorcode.get(code, code)}")


class Door:
    """The listening socket and those who have not proven anything yet."""

    def __init__(self, loop: Loop, listener: socket.socket, limit: float, answer: Callable[[], Talk],
                 proven: Proven) -> None:
        self._loop, self._listener, self._limit, self._answer, self._proven = loop, listener, limit, answer, proven
        self._strangers: dict[Exchange, float] = {}
        self._paused = False
        self._logged, self._unlogged = -LOG_EVERY, 0

    def open(self) -> None:
        """Begin to accept."""
        self._loop.residents.append(self)
        self._loop.watch(self._listener, READ, self._accept)

    def tick(self) -> None:
        """Strangers that take too long go."""
        if self._paused:
            self._paused = False
            self._loop.watch(self._listener, READ, self._accept)
        for exchange, since in list(self._strangers.items()):
            if self._loop.clock - since > self._limit:
                exchange.abort("took too long to prove that it belongs to this run")

    def crashed(self, loss: PeerLost) -> None:
        """The loop ends: so does the door."""
        for exchange in list(self._strangers):
            exchange.abort("this rank ends")
        self._loop.discard(self._listener)

    def _accept(self, events: int) -> None:
        for _ in range(16):
            try:
                sock, address = forks.accept(self._listener)
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError as error:                    # out of descriptors: asking again at once would only spin
                self.report(f"can't accept connections: {error}")
                self._paused = True
                self._loop.forget(self._listener)
                return
            self._receive(sock, address)

    def _receive(self, sock: socket.socket, address: object) -> None:
        if len(self._strangers) >= STRANGERS:
            next(iter(self._strangers)).abort("others are waiting")
        tune(sock)

        def proven(hello: Hello, sock: socket.socket) -> None:
            del self._strangers[exchange]
            self._proven(hello, sock)

        def failed(reason: str) -> None:
            self._strangers.pop(exchange, None)
            self.report(f"dropped a connection from {address}: {reason}")

        exchange = Exchange(self._loop, sock, self._answer(), proven, failed)
        self._strangers[exchange] = self._loop.clock
        exchange.begin()

    def report(self, text: str) -> None:
        """Log it, but not a flood of it."""
        now = time.monotonic()
        if now - self._logged < LOG_EVERY:
            self._unlogged += 1
            return
        more = f" ({self._unlogged} more since the last such line)" if self._unlogged else ""
        self._logged, self._unlogged = now, 0
        log.warning("%s%s", text, more)
