"""What an engine needs of a connection to one peer, and what connections of every kind share.

A `Wire` carries frames in order. How they travel is its own affair: bytes of a socket (links.py), or messages of MPI
(ulfm.py). It raises PeerLost, naming its peer, for everything that ends it.

*Out*, by the `Outbox`: batches of control frames first, then DATA of the streams that may be sent, in the order in which
their operations started; `gather` goes ahead of bulk. A frame is made only of bytes that exist, so no frame is ever begun
that waits for another member, and signs of life always fit between two frames.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Protocol

from recover.collectives import frames
from recover.collectives.frames import Header, Kind, Post
from recover.collectives.loop import Loop
from recover.collectives.streams import Stream
from recover.errors import PeerLost
from recover.protocol.messages import ViewId

PLACES = 512                    # that one call to the kernel may name (it allows 1024)


class Owner(Protocol):
    """Who knows the operations: the engine."""

    def posted(self, wire: Wire, op: int, post: Post) -> None:
        """The peer has started `op`."""

    def place(self, wire: Wire, header: Header) -> list[memoryview]:
        """Where the bytes of this DATA frame belong."""

    def arrived(self, wire: Wire, header: Header) -> None:
        """They are there."""

    def flushed(self, wire: Wire, stream: Stream) -> None:
        """Nothing needs its memory any more: every byte of it is on its way."""


class Outbox:
    """What waits to be sent to one peer."""

    def __init__(self, view: ViewId) -> None:
        self._view = view
        self.control: deque[bytes] = deque()
        self._urgent: list[Stream] = []
        self._bulk: list[Stream] = []
        self._batch: list[Stream] = []

    def add(self, stream: Stream) -> None:
        """Queue a stream; it goes when it is open and has bytes ready."""
        (self._urgent if stream.urgent else self._bulk).append(stream)

    def fill(self, space: int) -> list[memoryview]:
        """The next batch: at most `space` bytes of frames, headers included; empty if nothing may be sent."""
        out: list[memoryview] = []
        while self.control and len(out) < PLACES and len(self.control[0]) <= space:
            out.append(memoryview(self.control.popleft()))
            space -= out[-1].nbytes
        for stream in (*self._urgent, *self._bulk):
            count = min(stream.waiting(), frames.FRAME_LIMIT, space - frames.HEADER_SIZE)
            if count <= 0:
                continue
            out.append(memoryview(frames.pack(self._view, Kind.DATA, count, stream.op, stream.taken, stream.phase)))
            out.extend(stream.pieces.cut(stream.taken, count))
            stream.taken += count
            space -= count + frames.HEADER_SIZE
            self._batch.append(stream)
        return out

    def sent(self) -> list[Stream]:
        """The whole batch is on its way: the streams that are at their end now."""
        batch, self._batch = self._batch, []
        ended = [stream for stream in batch if stream.taken == stream.total]
        for stream in ended:
            (self._urgent if stream.urgent else self._bulk).remove(stream)
        return ended

    def drop(self) -> None:
        """Forget everything."""
        self.control.clear()
        self._batch, self._urgent, self._bulk = [], [], []


class Wire(ABC):
    """The connection to member `peer` in `view`. Lives on the communication thread."""

    def __init__(self, peer: int, view: ViewId, owner: Owner) -> None:
        self.peer, self.view, self._owner = peer, view, owner
        self.heard = self.spoke = 0.0                   # kept by the owner, on its clock
        self.early: dict[int, Post] = {}                # operations that only the peer has started so far
        self.stored: dict[int, list[tuple[Header, bytearray]]] = {}     # ... and small data of theirs
        self.room_taken = self.room_used = 0            # bytes of our data stored there; of its data stored here
        self.parking: bytearray | None = None           # where DATA of an operation not started here is going now
        self.pumper: Callable[[], None] = lambda: None  # the owner's: has it call `pump`
        self._outbox = Outbox(view)

    @abstractmethod
    def begin(self, loop: Loop, handle: Callable[[int], None]) -> None:
        """From now on `handle(events)` is called when there is something to `receive`, or room to `pump`."""

    @abstractmethod
    def receive(self) -> bool:
        """Take in what is there; whether that was anything."""

    @abstractmethod
    def pump(self) -> bool:
        """Send what may be sent and is taken; whether that was anything."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Nothing is waiting to be sent."""

    @abstractmethod
    def sever(self) -> None:
        """Break it as a network would."""

    @abstractmethod
    def end(self, loop: Loop, reason: str, blamed: int | None) -> None:
        """Say goodbye, let go of every buffer and close; what was taken to be sent still arrives where that is possible."""

    def say(self, frame: bytes) -> None:
        """Queue a control frame."""
        self._outbox.control.append(frame)

    def add(self, stream: Stream) -> None:
        """Queue a stream; it goes when it is open and has bytes ready."""
        self._outbox.add(stream)

    def _told(self, header: Header, body: memoryview) -> None:
        """A control frame has come in whole."""
        if header.kind is Kind.POST:
            self._owner.posted(self, header.op, frames.unpack_post(body))
        elif header.kind is Kind.BYE:
            reason, blamed = frames.unpack_bye(body)
            raise PeerLost(f"member {self.peer} gave up view {self.view}: {reason}", blamed)

    def _sent(self) -> None:
        for stream in self._outbox.sent():
            self._owner.flushed(self, stream)

    def _drop(self) -> None:
        self._outbox.drop()
        self.early, self.stored = {}, {}


def copy_in(sink: list[memoryview], data: memoryview) -> int:
    """Copy `data` into the places of `sink`, which loses what is full; gives back how many bytes had room."""
    copied = 0
    while copied < data.nbytes and sink:
        part = min(sink[0].nbytes, data.nbytes - copied)
        sink[0][:part] = data[copied:copied + part]
        advance(sink, part)
        copied += part
    return copied


def advance(views: list[memoryview], count: int) -> None:
    """Remove the first `count` bytes."""
    index = 0
    while count and count >= views[index].nbytes:
        count -= views[index].nbytes
        index += 1
    del views[:index]
    if count:
        views[0] = views[0][count:]
