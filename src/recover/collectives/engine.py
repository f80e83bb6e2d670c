"""What one group does: operations over links. Lives on the communication thread, except where it says otherwise.

**Why nothing can block anything for ever.** A link is read always, whatever the state of the operations. So that its
bytes have a place, bulk data is sent only to a peer that has said (POST) that it has started the operation; what is
sent earlier is small, and the peer has promised room for it (ROOM bytes per connection, given back by its POST). Hence
no operation that a rank has not launched, or that waits behind `after`, is ever ahead of another in a stream, and an
operation completes as soon as all members have started it, in whatever order they do. Started it will be: launching
never blocks, and `after` names an operation that all members start without this one.

**Failure.** The first one decides: all pending works are settled with it at once (under the lock, by whichever thread
saw it, so that `revoke` needs no help from this thread), then this thread says goodbye on every link, with the reason
and the member to blame, lets go of all buffers and calls the callbacks. Peers that hear the goodbye fail with the
same blame. A goodbye is not a death: it blames whom we blame, or nobody.
"""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from recover.collectives import frames
from recover.collectives.contract import GATHER_LIMIT, Work
from recover.collectives.frames import Header, Kind, Post
from recover.collectives.loop import READ, WRITE, Loop
from recover.collectives.operations import Operation
from recover.collectives.staging import Stage
from recover.collectives.streams import Stream
from recover.collectives.wires import Wire
from recover.collectives.work import Pending, failed
from recover.config import Timeouts
from recover.errors import PeerLost, WireError
from recover.protocol.messages import ViewId

log = logging.getLogger("recover.collectives")
EAGER = GATHER_LIMIT            # bytes: what may be sent to a peer that has not started the operation yet
ROOM = 1 << 20                  # bytes of such data kept per connection
EARLY_POSTS = 1 << 16           # operations that a peer may be ahead


class Engine:
    """The operations and links of member `me` in one view. `launch`, `fail` and `join` are for any thread."""

    def __init__(self, loop: Loop, view: ViewId, members: Sequence[int], me: int, timeouts: Timeouts) -> None:
        self.loop, self.view, self.members, self.me = loop, view, tuple(members), me
        self.formed, self.released = threading.Event(), threading.Event()
        self.lost: PeerLost | None = None
        self.on_loss: Callable[[PeerLost], None] | None = None
        self.waiting = set(members) - {me}              # peers that are not connected yet
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._ours = self._told = False                 # the loss is our own revoke; on_loss was called
        self._pending: dict[Operation, Stage | None] = {}
        self._claimed: set[tuple[int, int]] = set()     # (operation, peer) in use
        self._links: dict[int, Wire] = {}
        self._active: dict[tuple[int, int], Operation] = {}
        self._streams: dict[tuple[int, int], list[Stream]] = {}

    # -- any thread --------------------------------------------------------------------------------------------------
    def launch(self, operation: Operation, staging: Stage | None, after: Work[Any] | None) -> Pending[Any]:
        """Enqueue it; ValueError if its number is in use."""
        keys = [(operation.op, peer) for peer in operation.peers or (self.me,)]
        with self._lock:
            if self.lost is not None:
                return failed(self.lost)
            if any(key in self._claimed for key in keys):
                raise ValueError(f"operation number {operation.op} is still in use: numbers are unique within a view")
            self._claimed.update(keys)
            self._pending[operation] = staging
        if after is None:
            self.loop.call(partial(self._ready, operation))
        else:
            after.add_done_callback(lambda done: self.loop.call(partial(self._gate, operation, done)))
        return operation.work

    def fail(self, loss: PeerLost, ours: bool = False) -> None:
        """End everything; only the first call counts."""
        with self._lock:
            if self.lost is not None:
                return
            if not ours:
                loss.unheard = loss.unheard or self._unheard()
            self.lost, self._ours = loss, ours
            settled = [(operation.work, operation.work.settle(None, loss)) for operation in self._pending]
        self.formed.set()
        self.loop.call(partial(self._end, settled))

    def _unheard(self) -> tuple[int, ...]:
        """Peers whose signs of life are missing, whoever it was that noticed first."""
        return tuple(link.peer for link in list(self._links.values())
                     if self.loop.clock - link.heard > self._timeouts.silence / 2)

    def sever(self) -> None:
        """Break the connections; all that follows is what follows when a network breaks."""
        def shut() -> None:
            for link in self._links.values():
                link.sever()
        self.loop.call(shut)

    def notify(self) -> None:
        """Have `on_loss` called if there is reason and it was not."""
        self.loop.call(self._notify)

    # -- connections -------------------------------------------------------------------------------------------------
    def begin(self) -> None:
        """Join the loop."""
        self.loop.residents.append(self)
        if not self.waiting:
            self.formed.set()

    def adopt(self, link: Wire) -> None:
        """A proven connection to a peer that is `waiting` still."""
        assert self.lost is None
        assert link.peer in self.waiting
        link.heard = link.spoke = self.loop.clock
        link.pumper = partial(self._pump, link)
        self._links[link.peer] = link
        link.begin(self.loop, partial(self._handle, link))
        self.waiting.discard(link.peer)
        if not self.waiting:
            self.formed.set()

    def tick(self) -> None:
        """Judge silence, give signs of life."""
        for link in self._links.values():
            silent = self.loop.clock - link.heard
            if silent > self._timeouts.silence:
                self.fail(PeerLost(f"silent for {silent:.2f} s", link.peer))
                return
            if link.idle and self.loop.clock - link.spoke >= self._timeouts.heartbeat - self.loop.beat / 2:
                link.say(frames.pack(self.view, Kind.ALIVE))
                self.loop.soon(link.pumper)

    def crashed(self, loss: PeerLost) -> None:
        """The loop ends."""
        self.fail(loss)

    def _handle(self, link: Wire, events: int) -> None:
        if self.lost is not None:
            return
        try:
            if events & READ and link.receive():
                link.heard = self.loop.clock
        except PeerLost as loss:
            self.fail(loss)
            return
        if events & WRITE:
            self._pump(link)

    def _pump(self, link: Wire) -> None:
        if self.lost is not None:
            return
        try:
            if link.pump():
                link.spoke = self.loop.clock
        except PeerLost as loss:
            self.fail(_last_words(link) or loss)

    # -- operations --------------------------------------------------------------------------------------------------
    def _gate(self, operation: Operation, after: Work[Any]) -> None:
        try:
            after.wait(0)
        except PeerLost as loss:
            self._settle(operation, None, PeerLost(f"what it had to wait for failed: {loss.reason}", loss.peer))
            return
        self._ready(operation)

    def _ready(self, operation: Operation) -> None:
        staging = self._pending.get(operation)
        if staging is None or staging.arrived():
            self._start(operation)
        else:
            self.loop.polls.append(partial(self._staged, operation, staging, self._start))

    def _staged(self, operation: Operation, staging: Stage, then: Callable[[Operation], None]) -> bool:
        if self.lost is not None or not staging.arrived():
            return self.lost is not None
        then(operation)
        return True

    def _start(self, operation: Operation) -> None:
        if self.lost is not None:
            return
        streams = operation.start()
        post = frames.pack_post(self.view, operation.op, operation.post)
        for peer in operation.peers:                    # all hear of it, also if one of them disagrees
            self._active[operation.op, peer] = operation
            self._links[peer].say(post)
            self.loop.soon(self._links[peer].pumper)
        for peer in operation.peers:
            try:
                self._meet(self._links[peer], operation, streams.get(peer, []))
            except WireError as error:
                self.fail(PeerLost(str(error), peer))
                return
        self._check(operation)

    def _meet(self, link: Wire, operation: Operation, streams: list[Stream]) -> None:
        """Take up what the peer has sent already, and open the streams that may be sent."""
        self._streams[operation.op, link.peer] = streams
        early = link.early.pop(operation.op, None)
        for stream in streams:
            stream.open = early is not None
            if not stream.open and stream.ready == stream.total <= min(EAGER, ROOM - link.room_taken):
                stream.open, stream.eager = True, stream.total
                link.room_taken += stream.eager
            link.add(stream)
        if early is not None:
            operation.posted(link.peer, early)
        for header, data in link.stored.pop(operation.op, ()):
            self._deliver(link, operation, header, data)

    def _deliver(self, link: Wire, operation: Operation, header: Header, data: bytearray) -> None:
        link.room_used -= header.length
        start = 0
        for place in operation.place(link.peer, header):
            place[:] = data[start:start + place.nbytes]
            start += place.nbytes
        operation.arrived(link.peer, header)
        self._moved(operation)

    def moved(self, operation: Operation) -> None:
        """(Communication thread.) Something else than bytes has taken `operation` on."""
        if self.lost is None and not operation.over:
            self._moved(operation)

    def _moved(self, operation: Operation) -> None:
        """More may be ready to go, or all is done."""
        for peer in operation.peers:
            self.loop.soon(self._links[peer].pumper)
        self._check(operation)

    def _check(self, operation: Operation) -> None:
        if operation.over or not operation.complete:
            return
        operation.over = True
        for peer in operation.peers:
            del self._active[operation.op, peer], self._streams[operation.op, peer]
        operation.release()
        staging = self._pending.get(operation)
        if staging is None:
            self._finish(operation)
            return
        staging.deliver()
        self.loop.polls.append(partial(self._staged, operation, staging, self._finish))

    def _finish(self, operation: Operation) -> None:
        self._settle(operation, operation.result(), None)

    def _settle(self, operation: Operation, result: Any, loss: PeerLost | None) -> None:
        with self._lock:
            self._pending.pop(operation, None)
            self._claimed.difference_update((operation.op, peer) for peer in operation.peers or (self.me,))
            callbacks = operation.work.settle(result, loss)
        operation.work.run(callbacks)

    # -- frames (the links' owner) -----------------------------------------------------------------------------------
    def posted(self, link: Wire, op: int, post: Post) -> None:
        operation = self._active.get((op, link.peer))
        if operation is None:
            if len(link.early) >= EARLY_POSTS:
                raise WireError(f"member {link.peer} is {EARLY_POSTS} operations ahead")
            link.early[op] = post
            return
        operation.posted(link.peer, post)
        for stream in self._streams[op, link.peer]:
            link.room_taken -= stream.eager
            stream.open, stream.eager = True, 0
        self.loop.soon(link.pumper)
        self._check(operation)

    def place(self, link: Wire, header: Header) -> list[memoryview]:
        operation = self._active.get((header.op, link.peer))
        if operation is not None:
            return operation.place(link.peer, header)
        if header.op not in link.early or header.length > min(EAGER, ROOM - link.room_used):
            raise WireError(f"{header.length} bytes of operation {header.op}, which was not started here")
        link.room_used += header.length
        link.parking = bytearray(header.length)
        return [memoryview(link.parking)]

    def arrived(self, link: Wire, header: Header) -> None:
        operation = self._active.get((header.op, link.peer))
        data, link.parking = link.parking, None
        if operation is None:
            assert data is not None
            link.stored.setdefault(header.op, []).append((header, data))
        elif data is not None:                          # started while these bytes were coming in
            self._deliver(link, operation, header, data)
        else:
            operation.arrived(link.peer, header)
            self._moved(operation)

    def flushed(self, link: Wire, stream: Stream) -> None:
        operation = self._active[stream.op, link.peer]
        operation.flushed()
        self._check(operation)

    # -- the end -----------------------------------------------------------------------------------------------------
    def _end(self, settled: list[tuple[Pending[Any], list[Callable[[Work[Any]], None]]]]) -> None:
        assert self.lost is not None
        if self in self.loop.residents:
            self.loop.residents.remove(self)
        for link in self._links.values():
            link.end(self.loop, self.lost.reason, self.lost.peer)
        for staging in self._pending.values():
            if staging is not None:
                staging.settle()
        self._links, self._active, self._streams, self._pending = {}, {}, {}, {}
        self.released.set()
        for work, callbacks in settled:
            work.run(callbacks)
        self._notify()

    def _notify(self) -> None:
        if self.lost is None or self._ours or self._told or self.on_loss is None:
            return
        self._told = True
        try:
            self.on_loss(self.lost)
        except Exception:                               # the edge between the communication thread and its users
            log.exception("on_loss failed")


def _last_words(link: Wire) -> PeerLost | None:
    """Of a peer that takes no more: its goodbye, if there is one, knows better than the broken connection."""
    try:
        link.receive()
    except PeerLost as loss:
        return loss
    return None
