"""The `ulfm` backend: the same operations as `tcp`, over messages of an MPI that survives the death of processes.

    UlfmBackend   this rank: communication thread, lanes to the other processes (mpi.py), the group of the newest view
    MpiWire       frames to one peer in one view, as messages
    Engine        operations over wires (engine.py), as for `tcp`

**Membership comes from the coordinator, not from MPI.** An endpoint names a process of MPI_COMM_WORLD, and every message
begins with its view: of an older one it is dropped, of a newer one it waits until this rank has entered that view too.
Whoever enters a view greets all members with a proof that it belongs to the run; greeted by all, it has formed.

**Nothing is shrunk.** Point-to-point messages between the living are whole whatever happened to others, so a
communicator with dead members needs no repair, and there is nothing to wait for. `MPI_Comm_shrink` waits for every
living process of the old communicator: a frozen one that the coordinator has dropped would stop all others. What the
paper does with it (and with revoke and agree) is `guarded.py`.

**The end.** A message that MPI took is lost if its sender's process ends before the receiver has looked. So whoever
closes waits (LINGER seconds at most) until the others have left the view too: they do when they read its goodbye.

**Silence** of a process that lives is judged as for `tcp`, by signs of life. MPI shows a message only when it is whole:
on a connection that carries less than CAPACITY bytes per `Timeouts.silence` the peer would look silent.

**Who may join.** Only processes of one `mpirun`: `facts` are compared when a rank asks to be let in. So a replica that was
started again later is refused (see docs/backends.md).
"""
from __future__ import annotations

import hmac
import os
import struct
import threading
from collections.abc import Callable
from functools import partial

from recover.collectives import frames, mpi
from recover.collectives.contract import Backend, Group
from recover.collectives.engine import Engine
from recover.collectives.frames import Kind
from recover.collectives.groups import EngineGroup
from recover.collectives.loop import LINGER, READ, WRITE, Loop
from recover.collectives.mpi import Hold, Lane
from recover.collectives.operations import Scratch
from recover.collectives.wires import Owner, Wire, copy_in
from recover.config import Timeouts
from recover.errors import PeerLost, WireError
from recover.protocol.messages import NO_VIEW, Endpoint, View, ViewId

_ENVELOPE = struct.Struct("<Bqqqq")     # which kind of message, view, from member, to member
_GREETING, _FRAMES, _GOODBYE = 1, 2, 3
PROOF = 32


class MpiWire(Wire):
    """Frames to member `peer`, each whole in one message; a message holds as many as are ready."""

    def __init__(self, lane: Lane, peer: int, view: ViewId, me: int, owner: Owner) -> None:
        super().__init__(peer, view, owner)
        self._lane, self._envelope = lane, _ENVELOPE.pack(_FRAMES, *view, me, peer)
        self._handle: Callable[[int], None] = lambda events: None
        self._message: memoryview | None = None         # that has come, and is not read yet
        self._severed = False

    def begin(self, loop: Loop, handle: Callable[[int], None]) -> None:
        self._handle = handle

    def take(self, message: memoryview) -> None:
        """A message has come: have it received."""
        if not self._severed:
            self._message = message
            self._handle(READ)
            self._message = None

    def ready(self) -> None:
        """Messages have gone: there may be room for more."""
        self._handle(WRITE)

    def receive(self) -> bool:
        message, self._message = self._message, None
        if message is None:
            return False
        try:
            start = 0
            while start < message.nbytes:
                start = self._frame(message, start)
        except (WireError, struct.error) as error:
            raise PeerLost(str(error), self.peer) from None
        return True

    def _frame(self, message: memoryview, start: int) -> int:
        header = frames.unpack(message, start, self.view)
        start += frames.HEADER_SIZE
        body = message[start:start + header.length]
        if body.nbytes != header.length:
            raise WireError(f"a frame of {header.length} bytes ends after {body.nbytes}")
        if header.kind is Kind.DATA:
            copy_in(self._owner.place(self, header), body)
            self._owner.arrived(self, header)
        else:
            self._told(header, body)
        return start + header.length

    def pump(self) -> bool:
        some = False
        while self._lane.free and (parts := self._outbox.fill(mpi.CAPACITY - _ENVELOPE.size)):
            some = True
            if not self._severed:
                self._lane.send(b"".join((self._envelope, *parts)))     # a copy: the streams' memory is free again
            self._sent()
        if self._lane.failure:
            raise self._lane.loss(self.peer)
        return some

    @property
    def idle(self) -> bool:
        return self._lane.free and not self._outbox.control

    def sever(self) -> None:
        self._severed = True

    def end(self, loop: Loop, reason: str, blamed: int | None) -> None:
        self.say(frames.pack_bye(self.view, reason, blamed))
        if not self._severed:
            self._lane.send(self._envelope + b"".join(self._outbox.control))
            self._lane.send(_ENVELOPE.pack(_GOODBYE, *_ENVELOPE.unpack(self._envelope)[1:]))
        self._drop()
        self._handle = lambda events: None


class UlfmBackend(Backend):
    """See `Backend` and `contract.create`; `host` and `toward` mean nothing here."""

    def __init__(self, *, run_id: str, token: bytes, timeouts: Timeouts, host: str | None = None,
                 toward: str | None = None) -> None:
        if not token:
            raise ValueError("the token is empty: all ranks of a run share one secret")
        self._mpi = mpi.start()
        self._run_id, self._token, self._timeouts = run_id, token, timeouts
        job = os.environ.get("PMIX_NAMESPACE", f"singleton-{os.getpid()}")
        self.endpoint = Endpoint(f"mpi:{job}", self._mpi.COMM_WORLD.rank)
        self.facts = {"mpi_job": job}
        self._pid = os.getpid()
        self._scratch = Scratch()
        self._engine: Engine | None = None              # of the newest view
        self._newest: ViewId = NO_VIEW                  # views before this one are over ...
        self._entered: ViewId = NO_VIEW                 # ... and this one was entered last
        self._lanes: dict[int, Lane] = {}
        self._wires: dict[int, MpiWire] = {}            # of the view entered last, by process
        self._peers: dict[int, int] = {}                # process -> member of the view entered last
        self._parting: set[int] = set()                 # processes that have not left that view yet
        self._closed = self._leaving = False
        self._flushed = threading.Event()               # closed, and what was to be sent is gone
        self._loop = Loop(f"recover-ulfm-{self.endpoint.port}", timeouts.heartbeat / 2)
        self._loop.call(lambda: self._loop.polls.append(self._poll))

    # -- any thread --------------------------------------------------------------------------------------------------
    def form(self, view: View, position: int, me: int, timeout: float) -> Group:
        assert os.getpid() == self._pid, "a forked child has no part in its parent's groups"
        if me not in view.members or sorted(set(view.members)) != list(view.members):
            raise ValueError(f"member {me} can't form view {view.id}: its members are {view.members}, in rising order")
        if self._closed:
            raise PeerLost("the backend is closed")
        if self._engine is not None:
            self._engine.fail(PeerLost("closed by this rank: it forms a newer view"), ours=True)
            self._engine.released.wait(self._timeouts.drain)
        engine = Engine(self._loop, view.id, view.members, me, self._timeouts)
        where = self._processes(view, position, me)
        self._engine = engine
        self._loop.call(partial(self._begin, engine, position, where))
        if not engine.formed.wait(timeout):
            missing = sorted(engine.waiting)
            engine.fail(PeerLost(f"members {missing} did not enter view {view.id} within {timeout:.2f} s",
                                 missing[0] if len(missing) == 1 else None))
        if engine.lost is not None:
            raise PeerLost(engine.lost.reason, engine.lost.peer, engine.lost.unheard)
        return EngineGroup(engine, self._scratch)

    def abandon(self, newest: ViewId) -> None:
        self._newest = max(self._newest, newest)
        engine = self._engine
        if engine is not None and engine.view < newest and not engine.formed.is_set():
            engine.fail(PeerLost(f"view {engine.view} is over: there is {newest}"), ours=True)

    def close(self) -> None:
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._engine is not None:
            self._engine.fail(PeerLost("closed by this rank"), ours=True)
        self._loop.call(self._flush)
        self._flushed.wait(LINGER)
        self._loop.stop(self._timeouts.drain + 1)
        for lane in self._lanes.values():
            lane.close()

    def _processes(self, view: View, position: int, me: int) -> dict[int, int]:
        """Which process each of the other members is."""
        found = {}
        for peer in view.members:
            endpoint = view.endpoints[peer][position]
            if endpoint.host != self.endpoint.host:
                raise PeerLost(f"it runs under another mpirun ({endpoint.host}, not {self.endpoint.host})", peer)
            if peer != me:
                found[endpoint.port] = peer
        return found

    # -- communication thread ----------------------------------------------------------------------------------------
    def _begin(self, engine: Engine, position: int, where: dict[int, int]) -> None:
        if engine.view < self._newest:
            engine.fail(PeerLost(f"view {engine.view} is over: there is {self._newest}"), ours=True)
        if engine.lost is not None:
            return
        self._newest = self._entered = engine.view
        self._wires, self._peers, self._parting = {}, where, set(where)
        engine.begin()
        for process, peer in where.items():
            lane = self._lanes.get(process)
            if lane is None:
                lane = self._lanes[process] = Lane(self._mpi, process, mpi.TAG + position, self._read)
            lane.send(self._greeting(engine.view, engine.me, peer))
            if lane.failure:
                engine.fail(lane.loss(peer))

    def _poll(self) -> bool:
        """Have MPI work; never at an end, so that the loop asks again and again."""
        moved = False
        for process, lane in list(self._lanes.items()):
            failed, went = lane.failure, lane.poll()
            moved = moved or went
            if lane.failure and not failed:
                self._dead(process, lane)
            elif went and process in self._wires:
                self._wires[process].ready()
        if moved:
            self._loop.call(lambda: None)               # look again at once: more is likely to come
        if self._leaving and not any(lane.busy or process in self._parting for process, lane in self._lanes.items()
                                     if not lane.failure):
            self._flushed.set()
        return False

    def _dead(self, process: int, lane: Lane) -> None:
        if self._engine is not None and process in self._peers and self._engine.view == self._entered:
            self._engine.fail(lane.loss(self._peers[process]))

    def _flush(self) -> None:
        self._leaving = True

    def _greeting(self, view: ViewId, sender: int, receiver: int) -> bytes:
        envelope = _ENVELOPE.pack(_GREETING, *view, sender, receiver)
        return envelope + hmac.digest(self._token, envelope + self._run_id.encode(), "sha256")

    def _read(self, lane: Lane, message: memoryview) -> None:
        """A message has come. Hold, if it belongs to a view that this rank has not entered yet."""
        if message.nbytes < _ENVELOPE.size:
            return
        kind, incarnation, counter, sender, receiver = _ENVELOPE.unpack_from(message)
        view, engine = (incarnation, counter), self._engine
        if view > self._entered:
            raise Hold
        if kind == _GOODBYE and view == self._entered:
            self._parting.discard(lane.rank)
        if (engine is None or view != engine.view or view != self._entered or engine.lost is not None
                or (sender, receiver) != (self._peers.get(lane.rank), engine.me)):
            return
        if kind == _FRAMES and lane.rank in self._wires:
            self._wires[lane.rank].take(message[_ENVELOPE.size:])
        elif kind == _GREETING and sender in engine.waiting:
            if not hmac.compare_digest(message, self._greeting(view, sender, receiver)):
                engine.fail(PeerLost("could not prove that it belongs to this run (another token?)", sender))
                return
            wire = self._wires[lane.rank] = MpiWire(lane, sender, view, engine.me, engine)
            engine.adopt(wire)
