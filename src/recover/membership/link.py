"""A rank's end of one connection to a coordinator: bytes in and out, nothing decided."""
from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Protocol, cast

from recover import forks
from recover.errors import WireError
from recover.membership import wire
from recover.membership.address import show_address, tune
from recover.membership.handshake import Caller

MAX_QUEUE = 8 << 20
"""Bytes that may wait for a coordinator which does not read."""


class Owner(Protocol):
    """Who a link reports to, on the loop's thread."""

    def opening(self, link: Link) -> wire.Message:
        """The first message, once the coordinator has proved itself."""

    def heard(self, link: Link, message: wire.FromCoordinator) -> None: ...

    def offended(self, link: Link, reason: str) -> None: ...

    def broken(self, link: Link) -> None: ...


class Link(asyncio.Protocol):
    """`opened` resolves once we have said who we are, or the connection is over; `settled` to "" once the coordinator
    welcomed us, or to why it never will. `last`: when something was last heard (the loop's clock, seconds)."""

    def __init__(self, owner: Owner, caller: Caller, address: tuple[str, int]) -> None:
        self._owner = owner
        self._caller = caller
        self._decoder: wire.Decoder[wire.FromCoordinator] | None = None
        self._transport: asyncio.Transport | None = None
        self._parting = False
        self._loop = asyncio.get_running_loop()
        self.where, self.address = address, show_address(*address)
        self.opened: asyncio.Future[None] = self._loop.create_future()
        self.settled: asyncio.Future[str] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.last = self._loop.time()

    # -- what the transport calls -----------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=MAX_QUEUE)
        self._write(self._caller.hello)

    def data_received(self, data: bytes) -> None:
        self.last = self._loop.time()
        try:
            if self._decoder is None:
                data = self._shake(data)
            if self._decoder is not None:
                for message in self._decoder.feed(data):
                    self._owner.heard(self, message)
        except WireError as error:
            self.settle(f"{self.address} {error}")
            self._owner.offended(self, str(error))
            self.abort()

    def _shake(self, data: bytes) -> bytes:
        self._write(self._caller.feed(data))
        if not self._caller.passed:
            return b""
        self._decoder = wire.from_coordinator()
        self.send(self._owner.opening(self))
        self._open()
        return self._caller.surplus

    def pause_writing(self) -> None:
        self._loop.call_soon(self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        self.settle(f"{self.address} closed the connection{f' ({exc})' if exc else ''}")
        if not self.closed.done():
            self.closed.set_result(None)
        self._owner.broken(self)

    # -- what the keeper calls --------------------------------------------------------------------------------------
    def settle(self, outcome: str) -> None:
        if not self.settled.done():
            self.settled.set_result(outcome)
        self._open()

    def _open(self) -> None:
        if not self.opened.done():
            self.opened.set_result(None)

    def send(self, message: wire.Message) -> None:
        self._write(wire.encode(message))

    def _write(self, data: bytes) -> None:
        if data and self._transport and not self._transport.is_closing() and not self._parting:
            self._transport.write(data)

    async def part(self, seconds: float) -> None:
        """Send what is left, say that no more comes, and see the other side close; abort when that takes too long."""
        if self._transport and not self._transport.is_closing():
            self._parting = True
            with contextlib.suppress(OSError):          # the other side is gone already
                self._transport.write_eof()
            await asyncio.wait([self.closed], timeout=seconds)
        self.abort()

    def abort(self) -> None:
        if self._transport:
            self._transport.abort()


async def connect(link: Link, host: str, port: int) -> None:
    """Resolve the name anew, try each of its addresses, and hand the socket to `link`. OSError if none answers.

    The socket is one that forked children lose, from its first moment on (see `recover.forks`).
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    problem = OSError(f"{host} has no address")
    for family, _, _, _, address in found:
        sock = forks.open_socket(family)
        try:
            sock.setblocking(False)
            tune(sock)
            await loop.sock_connect(sock, address)
            await loop.create_connection(lambda: link, sock=sock)
            return
        except OSError as error:
            sock.close()
            problem = error
        except BaseException:                           # cancelled: the caller's time is over
            sock.close()
            raise
    raise problem
