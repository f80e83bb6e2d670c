"""The `tcp` backend: plain sockets, one connection per pair of ranks at a position and view.

    TcpBackend    this rank: listening socket, communication thread, the group of the newest view
    EngineGroup   the contract's face for any thread (groups.py)
    Engine        operations over links (engine.py); Link: frames over a socket (links.py)
    Door, Dial    new connections (door.py) and what is said on them (handshake.py)

Of each pair the member with the higher number connects. A connection that proves itself for a view which this rank has
not entered yet waits (its peer was faster); one of an older view is dropped. So nothing of an old view gets in, and no
stream ever has to be resynchronised: a new view means new connections, a few milliseconds on loopback.
"""
from __future__ import annotations

import os
import socket
from functools import partial

from recover import forks
from recover.collectives import addresses, handshake
from recover.collectives.contract import Backend, Group
from recover.collectives.door import Dial, Door
from recover.collectives.engine import Engine
from recover.collectives.groups import EngineGroup
from recover.collectives.handshake import Hello
from recover.collectives.links import Link
from recover.collectives.loop import READ, Loop
from recover.collectives.operations import Scratch
from recover.config import Timeouts
from recover.errors import PeerLost, WireError
from recover.protocol.messages import NO_VIEW, Endpoint, View, ViewId

BACKLOG = 1024
PARKED = 1024                   # proven connections that wait for this rank to enter their view
Where = dict[int, tuple[socket.AddressFamily, tuple[object, ...]]]


class TcpBackend(Backend):
    """See `Backend` and `contract.create`."""

    def __init__(self, *, run_id: str, token: bytes, timeouts: Timeouts, host: str | None = None,
                 toward: str | None = None) -> None:
        if not token:
            raise ValueError("the token is empty: all ranks of a run share one secret")
        if len(run_id.encode()) > handshake.RUN_LIMIT:
            raise ValueError(f"run_id is longer than {handshake.RUN_LIMIT} bytes")
        self._run_id, self._token, self._timeouts = run_id, token, timeouts
        self._listener = _listen(addresses.choose(host, toward))
        self.endpoint = Endpoint(*self._listener.getsockname()[:2])
        self._pid = os.getpid()
        self._scratch = Scratch()
        self._engine: Engine | None = None              # of the newest view
        self._newest: ViewId = NO_VIEW                  # views before this one are over ...
        self._entered: ViewId = NO_VIEW                 # ... and this one was entered last
        self._position = -1
        self._parked: dict[tuple[ViewId, int, int], tuple[Hello, socket.socket]] = {}
        self._dials: dict[int, Dial] = {}               # by peer
        self._closed = False
        self._loop = Loop(f"recover-tcp-{self.endpoint.port}", timeouts.heartbeat / 2)
        door = Door(self._loop, self._listener, timeouts.handshake,
                    lambda: handshake.answer(token, self._check), self._proven)
        self._loop.call(door.open)

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
        where = self._resolve(view, position, me)
        engine = Engine(self._loop, view.id, view.members, me, self._timeouts)
        self._engine = engine
        self._loop.call(partial(self._begin, engine, position, where))
        if not engine.formed.wait(timeout):
            missing = sorted(engine.waiting)
            unheard = tuple(peer for peer in missing if peer in self._dials and not self._dials[peer].reached)
            engine.fail(PeerLost(f"members {missing} did not enter view {view.id} within {timeout:.2f} s",
                                 missing[0] if len(missing) == 1 else None, unheard))
        self._loop.call(self._hang_up)
        if engine.lost is not None:
            raise PeerLost(engine.lost.reason, engine.lost.peer, engine.lost.unheard)
        return self._group(engine)

    def _group(self, engine: Engine) -> EngineGroup:
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
        self._loop.call(self._forget_parked)
        self._loop.call(self._hang_up)
        self._loop.stop(self._timeouts.drain + 1)

    def _resolve(self, view: View, position: int, me: int) -> Where:
        where: Where = {}
        for peer in view.members:
            if peer < me:
                endpoint = view.endpoints[peer][position]
                try:
                    where[peer] = addresses.resolve(endpoint.host, endpoint.port)
                except OSError as error:
                    raise PeerLost(f"{endpoint.host} has no address: {error}", peer) from None
        return where

    # -- communication thread ----------------------------------------------------------------------------------------
    def _begin(self, engine: Engine, position: int, where: Where) -> None:
        if engine.view < self._newest:
            engine.fail(PeerLost(f"view {engine.view} is over: there is {self._newest}"), ours=True)
        if engine.lost is not None:
            return
        self._newest = max(self._newest, engine.view)
        self._entered, self._position = engine.view, position
        engine.begin()
        for key, (hello, sock) in list(self._parked.items()):
            if key[0] <= engine.view:
                del self._parked[key]
                self._welcome(hello, sock)
        for peer, address in where.items():
            self._dial(engine, peer, address, position)

    def _dial(self, engine: Engine, peer: int, address: tuple[socket.AddressFamily, tuple[object, ...]],
              position: int) -> None:
        talk = handshake.call(self._token, Hello(self._run_id, engine.view, position, engine.me, peer))

        def failed(reason: str) -> None:
            if peer in engine.waiting:
                dial = self._dials.get(peer)
                engine.fail(PeerLost(reason, peer, () if dial is None or dial.reached else (peer,)))

        try:
            dial = Dial(self._loop, address, talk, lambda hello, sock: self._adopt(engine, peer, sock), failed)
        except OSError as error:                        # no descriptor left, say
            failed(f"can't be called: {error.strerror or error}")
        else:
            self._dials[peer] = dial

    def _hang_up(self) -> None:
        """Forming is over: what is not connected won't be."""
        dials, self._dials = self._dials, {}
        for dial in dials.values():
            dial.abort()

    def _check(self, hello: Hello) -> None:
        """Before anything is proven, hence only to drop early; `_proven` decides."""
        if hello.run_id != self._run_id:
            raise WireError(f"it belongs to the run {hello.run_id!r}, this is {self._run_id!r}")
        if hello.view < self._newest:
            raise WireError(f"it comes from view {hello.view}, this rank is in {self._newest}")

    def _proven(self, hello: Hello, sock: socket.socket) -> None:
        if hello.view <= self._entered:
            self._welcome(hello, sock)
            return
        key = (hello.view, hello.position, hello.caller)
        if key in self._parked or len(self._parked) >= PARKED:
            _, old = self._parked.pop(key if key in self._parked else next(iter(self._parked)))
            self._loop.discard(old)
        self._parked[key] = (hello, sock)
        self._loop.watch(sock, READ, lambda events: self._unpark(key))    # it has nothing to say: it left

    def _unpark(self, key: tuple[ViewId, int, int]) -> None:
        _, sock = self._parked.pop(key)
        self._loop.discard(sock)

    def _forget_parked(self) -> None:
        for key in list(self._parked):
            self._unpark(key)

    def _welcome(self, hello: Hello, sock: socket.socket) -> None:
        engine = self._engine
        if (engine is None or hello.view != engine.view or hello.position != self._position
                or hello.answerer != engine.me or hello.caller not in engine.waiting or hello.caller < engine.me):
            self._loop.discard(sock)
            return
        try:
            sock.send(hello.welcome)
        except OSError:
            self._loop.discard(sock)
            return
        self._adopt(engine, hello.caller, sock)

    def _adopt(self, engine: Engine, peer: int, sock: socket.socket) -> None:
        if engine.lost is not None or peer not in engine.waiting:       # replaced meanwhile
            self._loop.discard(sock)
        else:
            engine.adopt(Link(sock, peer, engine.view, engine))


def _listen(address: str) -> socket.socket:
    sock = forks.open_socket(addresses.family(address))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setblocking(False)
    try:
        where = addresses.resolve(address, 0)[1] if "%" in address else (address, 0)
        sock.bind(where)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ValueError(f"can't accept connections at {address}: {error.strerror or error}") from None
    return sock
