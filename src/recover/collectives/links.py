"""One data connection: frames in and out of a non-blocking socket. Lives on the communication thread.

*In.* Small reads go through a 64 KiB stage, where headers are found. Once a DATA header is known, the rest of its
bytes is received where it belongs, together with what follows it, by one scattering read. A link never stops reading.

*Out.* Batches: control frames first, then DATA of the streams that may be sent, in the order in which their
operations started; `gather` goes ahead of bulk. A frame is made only of bytes that exist, so no frame is ever begun
that waits for another member, and signs of life always fit between two frames. The next batch is made when the kernel
has taken the whole one before; only then does a stream count as flushed, and its memory as free.

The link raises PeerLost, naming its peer, for everything that ends it.
"""
from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from recover.collectives import frames
from recover.collectives.frames import Header, Kind, Post
from recover.collectives.streams import Stream
from recover.errors import PeerLost, WireError
from recover.protocol.messages import ViewId

STAGE = 64 << 10
BATCH = 1 << 20                 # bytes handed to the kernel before the order of streams is considered anew
READS = 8                       # reads before other links get their turn
PLACES = 512                    # that one call to the kernel may name (it allows 1024)


class Owner(Protocol):
    """Who knows the operations."""

    def posted(self, link: Link, op: int, post: Post) -> None:
        """The peer has started `op`."""

    def place(self, link: Link, header: Header) -> list[memoryview]:
        """Where the bytes of this DATA frame belong."""

    def arrived(self, link: Link, header: Header) -> None:
        """They are there."""

    def flushed(self, link: Link, stream: Stream) -> None:
        """The kernel has taken every byte of it."""


class Link:
    """The connection to member `peer` in `view`."""

    def __init__(self, sock: socket.socket, peer: int, view: ViewId, owner: Owner) -> None:
        self.sock, self.peer, self.view, self._owner = sock, peer, view, owner
        self.heard = self.spoke = 0.0                   # kept by the owner, on its clock
        self.early: dict[int, Post] = {}                # operations that only the peer has started so far
        self.stored: dict[int, list[tuple[Header, bytearray]]] = {}     # ... and small data of theirs
        self.room_taken = self.room_used = 0            # bytes of our data stored there; of its data stored here
        self.writing = False                            # the owner waits for the kernel to take more
        self.parking: bytearray | None = None           # where DATA of an operation not started here is going now
        self.want_write: Callable[[bool], None] = lambda wanted: None
        self.pumper: Callable[[], None] = lambda: None
        self._memory = memoryview(bytearray(STAGE))
        self._begin = self._end = 0                     # unread bytes in the stage
        self._sink: list[memoryview] = []               # where the rest of the current DATA frame goes
        self._missing = 0                               # bytes of it
        self._header: Header | None = None
        self._control: deque[bytes] = deque()
        self._urgent: list[Stream] = []
        self._bulk: list[Stream] = []
        self._out: list[memoryview] = []
        self._batch: list[Stream] = []

    # -- in ---------------------------------------------------------------------------------------------------------
    def receive(self) -> bool:
        """Read what is there; whether any byte was. PeerLost at the end of the stream and for frames out of place."""
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
            _advance(self._sink, direct)
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
        if header.kind is Kind.POST:
            self._owner.posted(self, header.op, frames.unpack_post(body))
        elif header.kind is Kind.BYE:
            reason, blamed = frames.unpack_bye(body)
            raise PeerLost(f"member {self.peer} gave up view {self.view}: {reason}", blamed)
        return True

    def _data(self, header: Header, staged: memoryview) -> None:
        self._header, self._missing = header, header.length
        self._sink = self._owner.place(self, header)
        copied = 0
        while copied < staged.nbytes:
            part = min(self._sink[0].nbytes, staged.nbytes - copied)
            self._sink[0][:part] = staged[copied:copied + part]
            _advance(self._sink, part)
            copied += part
        self._missing -= copied
        if not self._missing:
            self._finish()

    def _finish(self) -> None:
        header, self._header = self._header, None
        assert header is not None
        assert not self._sink
        self._owner.arrived(self, header)

    # -- out --------------------------------------------------------------------------------------------------------
    def say(self, frame: bytes) -> None:
        """Queue a control frame."""
        self._control.append(frame)

    def add(self, stream: Stream) -> None:
        """Queue a stream; it goes when it is open and has bytes ready."""
        (self._urgent if stream.urgent else self._bulk).append(stream)

    @property
    def idle(self) -> bool:
        """Nothing is waiting to be sent."""
        return not (self._out or self._control)

    def pump(self) -> bool:
        """Send what the kernel takes; whether it took anything."""
        some = False
        while self._out or self._fill():
            try:
                count = self.sock.sendmsg(self._out[:PLACES])
            except (BlockingIOError, InterruptedError):
                self.want_write(True)
                return some
            except OSError as error:
                raise PeerLost(f"connection broke: {error.strerror or error}", self.peer) from None
            some = True
            _advance(self._out, count)
            if not self._out:
                self._settle()
        self.want_write(False)
        return some

    def _fill(self) -> bool:
        while self._control and len(self._out) < PLACES:
            self._out.append(memoryview(self._control.popleft()))
        space = BATCH
        for stream in (*self._urgent, *self._bulk):
            count = min(stream.waiting(), frames.FRAME_LIMIT, space)
            if not count:
                continue
            header = frames.pack(self.view, Kind.DATA, count, stream.op, stream.taken, stream.phase)
            self._out.append(memoryview(header))
            self._out.extend(stream.pieces.cut(stream.taken, count))
            stream.taken += count
            space -= count
            self._batch.append(stream)
            if space <= 0:
                break
        return bool(self._out)

    def _settle(self) -> None:
        """The batch is with the kernel."""
        batch, self._batch = self._batch, []
        for stream in batch:
            if stream.taken == stream.total:
                (self._urgent if stream.urgent else self._bulk).remove(stream)
                self._owner.flushed(self, stream)

    # -- the end ----------------------------------------------------------------------------------------------------
    def leave(self, reason: str, blamed: int | None) -> bool:
        """Say goodbye if that fits between two frames; whether the peer may still want to read what was sent."""
        if self._out:
            return False
        self._control.append(frames.pack_bye(self.view, reason, blamed))
        try:
            self.sock.send(b"".join(self._control))
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:
            return False
        return True

    def drop(self) -> None:
        """Forget every buffer."""
        self._sink, self._out, self._batch, self._urgent, self._bulk = [], [], [], [], []
        self.early, self.stored = {}, {}
        self._control.clear()


def _advance(views: list[memoryview], count: int) -> None:
    """Remove the first `count` bytes."""
    index = 0
    while count and count >= views[index].nbytes:
        count -= views[index].nbytes
        index += 1
    del views[:index]
    if count:
        views[0] = views[0][count:]
