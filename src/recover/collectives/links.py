"""One data connection over a socket: frames in and out. Lives on the communication thread.

*In.* Small reads go through a 64 KiB stage, where headers are found. Once a DATA header is known, the rest of its
bytes is received where it belongs, together with what follows it, by one scattering read. A link never stops reading.

*Out.* The next batch (wires.py) is made when the kernel has taken the whole one before; only then does a stream count as
flushed, and its memory as free.
"""
from __future__ import annotations

import socket
from collections.abc import Callable

from recover.collectives import frames
from recover.collectives.frames import Header, Kind
from recover.collectives.loop import READ, WRITE, Loop
from recover.collectives.wires import PLACES, Owner, Wire, advance, copy_in
from recover.errors import PeerLost, WireError
from recover.protocol.messages import ViewId

STAGE = 64 << 10
BATCH = 1 << 20                 # bytes handed to the kernel before the order of streams is considered anew
READS = 8                       # reads before other links get their turn


class Link(Wire):
    """The connection to member `peer` in `view`."""

    def __init__(self, sock: socket.socket, peer: int, view: ViewId, owner: Owner) -> None:
        super().__init__(peer, view, owner)
        self.sock = sock
        self._watch: Callable[[int], None] = lambda events: None
        self._writing = False                           # we wait for the kernel to take more
        self._memory = memoryview(bytearray(STAGE))
        self._begin = self._end = 0                     # unread bytes in the stage
        self._sink: list[memoryview] = []               # where the rest of the current DATA frame goes
        self._missing = 0                               # bytes of it
        self._header: Header | None = None
        self._out: list[memoryview] = []

    def begin(self, loop: Loop, handle: Callable[[int], None]) -> None:
        self._watch = lambda events: loop.watch(self.sock, events, handle)
        self._watch(READ)

    # -- in ---------------------------------------------------------------------------------------------------------
    def receive(self) -> bool:
        some = False
        for _ in range(READS):
            room = self._sink[:PLACES]
            if len(room) == len(self._sink):
                room.append(self._memory[self._end:])
            try:
                count = self.sock.recvmsg_into(room)[0]
            except (BlockingIOError, InterruptedError):
                return some
            except OSError as error:
                raise PeerLost(f"connection broke: {error.strerror or error}", self.peer) from None
            if count == 0:
                raise PeerLost("closed the connection (end of stream)", self.peer)
            some = True
            try:
                self._consume(count)
            except WireError as error:
                raise PeerLost(str(error), self.peer) from None
            if count < sum(view.nbytes for view in room):
                break
        return some

    def _consume(self, count: int) -> None:
        direct = min(count, self._missing)
        if direct:
            advance(self._sink, direct)
            self._missing -= direct
            if not self._missing:
                self._finish()
        self._end += count - direct
        while not self._missing and self._frame():
            pass
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin:
            left = bytes(self._memory[self._begin:self._end])       # at most one short frame
            self._begin, self._end = 0, len(left)
            self._memory[:self._end] = left

    def _frame(self) -> bool:
        """Take one frame, or the beginning of one, from the stage; False if there is too little of it."""
        have = self._end - self._begin - frames.HEADER_SIZE
        if have < 0:
            return False
        header = frames.unpack(self._memory, self._begin, self.view)
        start = self._begin + frames.HEADER_SIZE
        if header.kind is Kind.DATA:
            self._begin = start + min(have, header.length)
            self._data(header, self._memory[start:self._begin])
            return True
        if have < header.length:
            return False
        self._begin = start + header.length
        body = self._memory[start:self._begin]
        self._told(header, body)
        return True

    def _data(self, header: Header, staged: memoryview) -> None:
        self._header, self._missing = header, header.length
        self._sink = self._owner.place(self, header)
        self._missing -= copy_in(self._sink, staged)
        if not self._missing:
            self._finish()

    def _finish(self) -> None:
        header, self._header = self._header, None
        assert header is not None
        assert not self._sink
        self._owner.arrived(self, header)

    # -- out --------------------------------------------------------------------------------------------------------
    @property
    def idle(self) -> bool:
        return not (self._out or self._outbox.control)

    def pump(self) -> bool:
        some = False
        while self._out or self._fill():
            try:
                count = self.sock.sendmsg(self._out[:PLACES])
            except (BlockingIOError, InterruptedError):
                self._want_write(True)
                return some
            except OSError as error:
                raise PeerLost(f"connection broke: {error.strerror or error}", self.peer) from None
            some = True
            advance(self._out, count)
            if not self._out:
                self._sent()
        self._want_write(False)
        return some

    def _fill(self) -> bool:
        self._out = self._outbox.fill(BATCH)
        return bool(self._out)

    def _want_write(self, wanted: bool) -> None:
        if wanted != self._writing:
            self._writing = wanted
            self._watch(READ | WRITE if wanted else READ)

    # -- the end ----------------------------------------------------------------------------------------------------
    def sever(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:                                 # broken already
            pass

    def end(self, loop: Loop, reason: str, blamed: int | None) -> None:
        loop.forget(self.sock)
        lingers = self._leave(reason, blamed)
        self._drop()
        self._sink, self._out = [], []
        if lingers and not loop.dead:
            loop.linger(self.sock)
        else:
            self.sock.close()

    def _leave(self, reason: str, blamed: int | None) -> bool:
        """Say goodbye if that fits between two frames; whether the peer may still want to read what was sent."""
        if self._out:
            return False
        self.say(frames.pack_bye(self.view, reason, blamed))
        try:
            self.sock.send(b"".join(self._outbox.control))
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True
