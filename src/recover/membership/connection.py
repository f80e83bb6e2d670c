"""One connection that the coordinator accepted: bytes in and out, nothing decided."""
from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, Protocol, cast

from recover.errors import WireError
from recover.membership import wire
from recover.membership.address import show_address, tune
from recover.membership.handshake import Greeter

MAX_QUEUE = 32 << 20
"""Bytes that may wait for a peer which does not read; beyond, it is dropped rather than waited for."""


class Host(Protocol):
    """Who a connection reports to. Once it was ended from our side, only `closed` is still called."""

    received: Counter[str]
    sent: Counter[str]

    def opened(self, connection: Connection) -> None: ...

    def heard(self, connection: Connection, message: wire.FromRank) -> None: ...

    def offended(self, connection: Connection, error: WireError) -> None: ...

    def stalled(self, connection: Connection) -> None: ...

    def closed(self, connection: Connection, error: Exception | None) -> None: ...


class Connection(asyncio.Protocol):
    """Handshake first, then frames. `last` is when something was last heard (the loop's clock, seconds)."""

    def __init__(self, host: Host, greeter: Greeter, linger: float) -> None:
        self._host = host
        self._greeter = greeter
        self._linger = linger
        self._decoder: wire.Decoder[wire.FromRank] | None = None
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self.last = self._loop.time()
        self.address = "?"

    @property
    def authenticated(self) -> bool:
        return self._decoder is not None

    # -- what the transport calls -----------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=MAX_QUEUE)
        peer: Any = transport.get_extra_info("peername")
        self.address = show_address(*peer[:2]) if peer else "?"
        tune(transport.get_extra_info("socket"))
        self._host.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        self.last = self._loop.time()
        try:
            if self._decoder is None:
                data = self._shake(data)
            if self._decoder is not None:
                for message in self._decoder.feed(data):
                    self._deliver(message)
        except WireError as error:
            self._host.offended(self, error)

    def _shake(self, data: bytes) -> bytes:
        self._write(self._greeter.feed(data))
        if not self._greeter.passed:
            return b""
        self._decoder = wire.from_rank()
        return self._greeter.surplus

    def _deliver(self, message: wire.FromRank) -> None:
        if self._ended:                                 # by an earlier message of the same bytes
            return
        self._host.received[type(message).__name__] += 1
        self._host.heard(self, message)

    def pause_writing(self) -> None:
        if not self._ended:                             # in the middle of a write: whoever writes is not disturbed
            self._loop.call_soon(self._stalled)

    def _stalled(self) -> None:
        if not self._ended:
            self._host.stalled(self)
            self.abort()                                # what still waits in the queue will never be read

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        self._host.closed(self, exc)

    # -- what the coordinator calls ---------------------------------------------------------------------------------
    def send(self, message: wire.Message) -> None:
        self.write(wire.encode(message), type(message).__name__, 1)

    def write(self, frames: bytes, kind: str, count: int) -> None:
        if not self._ended:
            self._host.sent[kind] += count
            self._write(frames)

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def end(self) -> None:
        """Send what is left, then close; after `linger` seconds give up on that."""
        if self._ended:
            return
        self._ended = True
        assert self._transport is not None
        self._transport.close()
        self._loop.call_later(self._linger, self._transport.abort)

    def abort(self) -> None:
        """Close at once."""
        self._ended = True
        assert self._transport is not None
        self._transport.abort()
