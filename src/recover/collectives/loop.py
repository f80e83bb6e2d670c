"""The communication thread: one per backend, a loop around `selectors`.

* Everything that touches sockets and operations runs here, so none of it needs a lock. Other threads hand it calls.
* `clock` counts the seconds during which this loop was listening. A round of the loop that took long (the process was
  stopped, the interpreter busy) counts as one beat only, and every round reads before anyone is judged: a peer is
  never blamed for a time in which we were not there to hear it.
* An error that nobody expected ends the thread, and every resident is told: operations fail, they don't hang.
"""
from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from recover import forks
from recover.errors import PeerLost
from recover.priority import favour

log = logging.getLogger("recover.collectives")
READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
POLL = 0.0005                   # seconds between looks at a GPU while copies are under way
LINGER = 0.5                    # seconds for a peer to read what was sent before a connection was closed
LINGERING = 256                 # connections


class Resident(Protocol):
    """Something that lives on the loop."""

    def tick(self) -> None:
        """Called every `beat` seconds."""

    def crashed(self, loss: PeerLost) -> None:
        """The loop is at its end."""


class Loop:
    """The thread and its selector. All methods but `call` and `stop` are for the thread itself."""

    def __init__(self, name: str, beat: float) -> None:
        self.beat, self.clock = beat, 0.0
        self.residents: list[Resident] = []
        self.polls: list[Callable[[], bool]] = []       # asked again and again until they say True
        self._selector = selectors.DefaultSelector()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._calls: deque[Callable[[], None]] = deque()
        self._dirty: dict[Callable[[], None], None] = {}
        self._lingering: dict[socket.socket, float] = {}
        self._ear, self._mouth = forks.socket_pair()
        self._awake, self._stopping, self.dead = True, False, False
        self.watch(self._ear, READ, self._woken)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # -- for any thread ----------------------------------------------------------------------------------------------
    def call(self, function: Callable[[], None]) -> None:
        """Run it on the thread, soon and in order; at once if the thread has ended."""
        if self.dead:
            function()
            return
        self._calls.append(function)
        if not self._awake:
            self._awake = True
            try:
                self._mouth.send(b"!")
            except OSError:                             # full, so it wakes anyway; or closed, so nobody is there
                pass

    def stop(self, timeout: float) -> None:
        """End the thread, once what lingers is done; TimeoutError if that takes more than `timeout` seconds."""
        def stop() -> None:
            self._stopping = True
        self.call(stop)
        if not self.here():
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the communication thread did not end within {timeout} s")

    def here(self) -> bool:
        """Whether this is the thread."""
        return threading.current_thread() is self._thread

    # -- for the thread ----------------------------------------------------------------------------------------------
    def watch(self, sock: socket.socket, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler(events)` when the socket is ready; again to change either."""
        number = sock.fileno()
        if number in self._handlers:
            self._selector.modify(sock, events)
        else:
            self._selector.register(sock, events)
        self._handlers[number] = handler

    def forget(self, sock: socket.socket) -> None:
        """No longer watch it; harmless if it is not watched."""
        if self._handlers.pop(sock.fileno(), None) is not None:
            self._selector.unregister(sock)

    def discard(self, sock: socket.socket) -> None:
        """Forget and close it."""
        self.forget(sock)
        self._lingering.pop(sock, None)
        sock.close()

    def linger(self, sock: socket.socket) -> None:
        """Close it when the peer has read what is on its way: closing at once while unread bytes of the peer's are
        here would make the kernel throw away what we sent last."""
        if len(self._lingering) >= LINGERING:
            self.discard(next(iter(self._lingering)))
        self._lingering[sock] = self.clock + LINGER
        self.watch(sock, READ, lambda events: self._drain(sock))

    def soon(self, function: Callable[[], None]) -> None:
        """Run it once at the end of this round, however often it is asked for."""
        self._dirty[function] = None

    # -- inside ------------------------------------------------------------------------------------------------------
    def _run(self) -> None:
        favour()
        loss = PeerLost("the communication thread was closed")
        try:
            self._rounds()
        except Exception as error:                      # the edge of the thread: whatever it is, nobody may hang
            log.exception("the communication thread failed")
            loss = PeerLost(f"the communication thread failed: {error!r}")
        self.dead = True
        for resident in list(self.residents):
            resident.crashed(loss)
        while self._calls:                              # what waits for an answer gets one
            self._calls.popleft()()
        for sock in [*self._lingering, self._ear, self._mouth]:
            sock.close()
        self._selector.close()

    def _rounds(self) -> None:
        last = ticked = time.monotonic()
        while not (self._stopping and not self._lingering and not self._calls):
            self._awake = bool(self._calls)             # from here on a call must wake us, or is seen below
            wait = 0.0 if self._calls else POLL if self.polls else max(0.0, ticked + self.beat - last)
            ready = self._selector.select(wait)
            self._awake = True
            now = time.monotonic()
            self.clock += min(now - last, 2 * self.beat)
            last = now
            for key, events in ready:
                handler = self._handlers.get(key.fd)    # an earlier one may have taken it away
                if handler is not None:
                    handler(events)
            for _ in range(len(self._calls)):
                self._calls.popleft()()
            self.polls = [poll for poll in self.polls if not poll()]
            while self._dirty:
                dirty, self._dirty = self._dirty, {}
                for function in dirty:
                    function()
            if now >= ticked + self.beat:
                ticked = now
                self._tick()

    def _tick(self) -> None:
        for resident in list(self.residents):
            resident.tick()
        for sock, until in list(self._lingering.items()):
            if self.clock > until:
                self.discard(sock)

    def _woken(self, events: int) -> None:
        try:
            self._ear.recv(4096)
        except BlockingIOError:
            pass

    def _drain(self, sock: socket.socket) -> None:
        try:
            while sock.recv(1 << 16):
                pass
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            pass
        self.discard(sock)
