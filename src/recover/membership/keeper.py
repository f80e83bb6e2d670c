"""The thread that keeps a rank connected to the coordinator. It knows connections and time; `Member` knows the rest.

Theory of operation
-------------------
* The connection is not the membership: when it breaks, another is made, at short intervals (a coordinator that comes
  back is noticed within `RETRY_LAST` seconds) and at each of the coordinator's addresses in turn.
* A coordinator that is merely silent (stopped, overloaded) keeps its connection: a second one is tried beside it, and
  takes its place only once a coordinator has welcomed us there. So a coordinator that wakes up late has lost nobody,
  and one that was replaced at another address is left, and told so.
* Names are resolved anew for each try. While one does not resolve, tries become rare: name servers are shared.
* Silence is not judged right after this loop itself was held up: what has arrived meanwhile is read first.
* A try may take `Timeouts.handshake` until we have said who we are, and as long again until we are welcomed: a try that
  is given up after the coordinator registered us would look like our death.
"""
from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import threading
from collections.abc import Callable
from typing import Protocol

from recover.config import Timeouts
from recover.membership import wire
from recover.membership.handshake import Caller
from recover.membership.link import Link, connect
from recover.priority import favour

log = logging.getLogger("recover.membership")

RETRY_FIRST, RETRY_LAST = 0.02, 0.1
RETRY_NAME = 2.0
"""Seconds between tries, at most, while the name of a coordinator does not resolve."""


class Owner(Protocol):
    """Whom the keeper serves. All but `over` are called on the keeper's thread."""

    name: str

    @property
    def over(self) -> bool:
        """No connection is needed any more."""

    def opening(self) -> wire.Message: ...

    def sign(self) -> wire.Heartbeat:
        """A heartbeat is due."""

    def heard(self, message: wire.FromCoordinator) -> None: ...

    def refused(self, reason: str, final: bool) -> None: ...

    def linked(self, link: Link | None) -> None: ...

    def gave_up(self, reason: str) -> None: ...

    def ended(self) -> None: ...


class Keeper:
    """One thread, one asyncio loop, one connection at a time (two while a silent one is being replaced)."""

    def __init__(self, owner: Owner, addresses: list[tuple[str, int]], timeouts: Timeouts,
                 caller: Callable[[], Caller]) -> None:
        self.link: Link | None = None
        self.address: tuple[str, int] | None = None     # where the newest link leads
        self._owner = owner
        self._addresses = addresses
        self._timeouts = timeouts
        self._caller = caller
        self._patience = min(1.0, timeouts.failure_timeout)
        self._turned_down = False                       # the latest try was answered, but not well
        self._nameless = 0                              # tries in a row for which a name did not resolve
        self._pid = os.getpid()
        self._ready = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="recover-member", daemon=True)

    # -- from any thread --------------------------------------------------------------------------------------------
    def start(self) -> None:
        self._thread.start()
        self._ready.wait(10)

    def post(self, call: Callable[[], None]) -> None:
        """Run `call` on the keeper's thread; nothing if that is over, or in a forked child, which lacks it."""
        if self._loop is None or os.getpid() != self._pid:
            return
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:                            # the loop is closed
            pass

    def join(self) -> None:
        """Wait until the thread has ended, for about two seconds at most. The owner is `over`."""
        self.post(self.stir)
        if self._thread.is_alive() and os.getpid() == self._pid and threading.current_thread() is not self._thread:
            self._thread.join(self._patience + 1)

    # -- on the keeper's thread -------------------------------------------------------------------------------------
    def send(self, message: wire.Message) -> None:
        """To the coordinator; dropped while there is none."""
        if self.link is not None:
            self.link.send(message)

    def stir(self) -> None:
        """Look at once whether the owner is over or the connection lost."""
        if self._wake is not None:
            self._wake.set()

    def _run(self) -> None:
        favour()
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        beating = asyncio.create_task(self._beat())
        try:
            await self._keep_connected()
            await asyncio.sleep(0)                      # what was posted before the owner was over goes first
            if self.link is not None:
                await self.link.part(self._patience)
        finally:
            beating.cancel()
            self.link = None
            self._owner.ended()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._timeouts.heartbeat)
            self.send(self._owner.sign())

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        lost_at, tries, due = loop.time(), 0, loop.time()
        while not self._owner.over:
            now = loop.time()
            if self._sound(now, late=now - due > self._timeouts.heartbeat):
                lost_at, tries = now, 0
                due = now + self._timeouts.heartbeat
                await self._sleep(self._timeouts.heartbeat)
                continue
            if now - lost_at > self._timeouts.coordinator:
                return self._owner.gave_up(f"no coordinator was reached for {self._timeouts.coordinator:g} s")
            problem = await self._try(self._addresses[tries % len(self._addresses)])
            tries += 1
            due = loop.time() + self._timeouts.heartbeat
            if problem and not self._owner.over:
                log.log(logging.INFO if tries == 1 else logging.DEBUG, "%s: no coordinator yet: %s",
                        self._owner.name, problem)
                await self._sleep(self._pause(tries))

    def _pause(self, tries: int) -> float:
        """Seconds until the next try: soon where nobody answers, less so where somebody says no."""
        soon = min(RETRY_LAST, RETRY_FIRST * 1.5 ** min(tries, 20))
        if self._nameless:
            soon = min(RETRY_NAME, RETRY_LAST * 2.0 ** min(self._nameless, 20))
        return max(soon, self._timeouts.heartbeat if self._turned_down else 0) * random.uniform(0.7, 1.0)

    async def _sleep(self, seconds: float) -> None:
        assert self._wake is not None
        try:
            await asyncio.wait_for(self._wake.wait(), seconds)
        except TimeoutError:
            pass
        self._wake.clear()

    def _sound(self, now: float, late: bool) -> bool:
        """There is a connection, and it is not silent."""
        link = self.link
        if link is not None and late:
            link.last = max(link.last, now - self._timeouts.silence / 2)
        return link is not None and now - link.last <= self._timeouts.silence

    async def _try(self, address: tuple[str, int]) -> str:
        """One try at one address; "" if we were welcomed, else what happened."""
        link = Link(self, self._caller(), address)
        self._turned_down, nameless = False, False
        try:
            async with asyncio.timeout(self._timeouts.handshake):
                await connect(link, *address)
                await link.opened
            problem = await asyncio.wait_for(link.settled, self._timeouts.handshake)
        except TimeoutError:                            # it is an OSError too, hence first
            problem = f"{link.address} does not answer"
        except (OSError, UnicodeError) as error:        # a name that does not resolve, or is none
            problem = f"{link.address}: {error}"
            nameless = isinstance(error, socket.gaierror)
        self._nameless = self._nameless + 1 if nameless else 0
        if problem:
            link.abort()
        return problem

    # -- what links report ------------------------------------------------------------------------------------------
    def opening(self, link: Link) -> wire.Message:
        return self._owner.opening()

    def heard(self, link: Link, message: wire.FromCoordinator) -> None:
        match message:
            case wire.Welcome():
                self._welcomed(link, message.incarnation)
            case wire.Refused():
                self._turned_down = True
                link.settle(f"{link.address} refused us: {message.reason}")
                if not message.standby:                 # that is no answer: another one acts, or it takes over soon
                    self._owner.refused(message.reason, message.final)
            case wire.Dropped():                        # also as the first answer, to one that announces a view
                link.settle(f"{link.address} turned us out: {message.reason}")
                self._owner.heard(message)
            case _ if link is self.link:
                self._owner.heard(message)

    def offended(self, link: Link, reason: str) -> None:
        """Whoever answers there is not our coordinator, though it may be started there yet."""
        self._turned_down = True
        self._owner.refused(f"{link.address} {reason}", False)

    def broken(self, link: Link) -> None:
        if link is self.link:
            self.link = None
            self._owner.linked(None)
            self.stir()

    def _welcomed(self, link: Link, incarnation: int) -> None:
        former, self.link = self.link, link
        self.address = link.where
        link.settle("")
        if former is not None and former is not link:   # whoever wakes up there hears first that it is not needed
            former.send(wire.Moved(incarnation))
            former.abort()
        self._owner.linked(link)
