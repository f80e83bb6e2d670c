"""The coordinator's server: connections, timers and counters around the registrar, in one asyncio loop.

Theory of operation
-------------------
* A stranger is one whose handshake or first message is still to come. It has `Timeouts.handshake` for both, and there
  are at most `MAX_STRANGERS` of them besides as many as the run has connections: all its ranks may come at once, and then
  none may displace another. A further one displaces the oldest, so that idle ones can't keep members out.
* A rank's end of stream, an offence, or a full queue towards it (it does not read) ends it at once.
* Silence is judged by a clock of this loop, and only when the loop itself ran on time. After a pause (the process was
  stopped, the machine was busy) what has arrived meanwhile is read first, and judged a turn later.
  What is then found of a rank is `liveness`'s to say.
* A suspicion waits `SETTLE` before it makes a new view: the failure that caused it has most often ended a connection
  here too, and one new view is cheaper than two. A suspicion of a view that has passed does nothing.
* A suspicion that names members which were not heard over data connections waits for a heartbeat's time: others report
  theirs, and who is frozen is known to be. Then those go who are cut off from the others, by one rule for all.
* While a view is rebuilt, the grace time runs from the first announcement.
* A failure-free step calls nothing here. Heartbeats are answered, so that ranks notice a coordinator that is gone.
"""
from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys
from collections import Counter
from pathlib import Path

from recover import events
from recover.config import Timeouts
from recover.errors import WireError
from recover.membership import wire
from recover.membership.address import show_address
from recover.membership.connection import Connection
from recover.membership.handshake import Greeter
from recover.membership.lifeline import HOLDERS
from recover.membership.registrar import CLOSED, Registrar
from recover.membership.succession import Succession
from recover.membership.watch import Watch

log = logging.getLogger("recover.membership")

MAX_STRANGERS = 1024
PER_RANK = 1 + HOLDERS
"""Connections of one rank: what it says goes over one, the others are lifelines."""
SETTLE = 0.003
REPORT = 5.0
"""Seconds between two lines about who is awaited; also the period of `MAX_COMPLAINTS`."""
MAX_COMPLAINTS = 50
"""Lines about strangers in one period; the rest is counted."""


class Server:
    """Serves one run. `token` and `run_id` are what its ranks must prove to share."""

    def __init__(self, registrar: Registrar, timeouts: Timeouts, token: bytes, run_id: str,
                 others: Succession | None = None) -> None:
        self.registrar = registrar
        self.timeouts = timeouts
        self._watched = Watch(registrar, timeouts)
        self.received: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self._token, self._run_id = token, run_id
        self._others = others                           # who may act for the same run
        self._strangers: dict[Connection, asyncio.TimerHandle] = {}
        self._room = MAX_STRANGERS + PER_RANK * registrar.core.first * registrar.ranks
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._watch: asyncio.Task[None] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._begun = 0.0
        self._turned_away = 0
        self._stopped = self._retired = False

    # -- life -------------------------------------------------------------------------------------------------------
    async def start(self, host: str, port: int) -> int:
        """Listen; the port that was bound. OSError if that is not possible."""
        loop = asyncio.get_running_loop()
        self._begun = loop.time()
        if self._others is not None:
            self._others.start(self._token, self._run_id, self.timeouts)
        self._server = await loop.create_server(self._accept, host or None, port, backlog=1024, reuse_address=True)
        self._watch = loop.create_task(self._keep_watch())
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Close everything. Ranks see their coordinator go, and keep training."""
        assert self._server is not None, "stop() before start()"
        assert self._watch is not None
        self._server.close()
        self._watch.cancel()
        if self._others is not None:
            self._others.stop()
        if self._grace:
            self._grace.cancel()
        for timer in self._strangers.values():
            timer.cancel()
        self._stopped = True
        for connection in self._connections:
            connection.abort()
        await asyncio.sleep(0)                          # aborted transports let go of their sockets

    def _accept(self) -> Connection:
        return Connection(self, Greeter(self._token, self._run_id), self.timeouts.handshake)

    # -- strangers --------------------------------------------------------------------------------------------------
    def opened(self, connection: Connection) -> None:
        """A stranger connected."""
        while len(self._strangers) >= self._room:
            self._turn_away(next(iter(self._strangers)), f"more than {self._room} strangers at once")
        self._connections.add(connection)
        self._strangers[connection] = asyncio.get_running_loop().call_later(
            self.timeouts.handshake, self._too_slow, connection)

    def _too_slow(self, connection: Connection) -> None:
        self._turn_away(connection, "did not say who it is in time" if connection.authenticated
                        else f"no handshake within {self.timeouts.handshake:g} s")

    def _turn_away(self, connection: Connection, reason: str) -> None:
        self._turned_away += 1
        if self._turned_away <= MAX_COMPLAINTS:
            log.warning("dropped a stranger at %s: %s", connection.address, reason)
        self._known(connection)
        connection.abort()

    def _known(self, connection: Connection) -> None:
        timer = self._strangers.pop(connection, None)
        if timer:
            timer.cancel()

    # -- what connections report ------------------------------------------------------------------------------------
    def heard(self, connection: Connection, message: wire.FromRank) -> None:
        """One message of an authenticated connection."""
        match message:
            case wire.Heartbeat():
                connection.send(wire.Heartbeat())
                self._watched.heartbeat(connection, message, connection.last)
            case wire.StatsRequest():
                connection.send(self.stats())
            case wire.Join() | wire.Announce() | wire.Lifeline() | wire.Pulse() if not self.acting:
                self._known(connection)
                self._turn_down(connection, message)
            case wire.Join() | wire.Announce() if connection in self.registrar.where:
                raise WireError("joined twice")
            case wire.Join() | wire.Announce() if message.identity.failure_timeout != self.timeouts.failure_timeout:
                self._known(connection)
                self._refuse_timeout(connection, message)
            case wire.Join():
                self._known(connection)
                self.registrar.join(connection, message.identity)
            case wire.Announce():
                self._known(connection)
                self.registrar.announce(connection, message.identity, message.announcement)
                self._time_grace()
            case wire.Lifeline():
                self._known(connection)
                self.registrar.lifeline(connection, message)
            case wire.Pulse():
                self._known(connection)
                self.registrar.pulses[connection] = message
            case _ if connection not in self.registrar.where:
                raise WireError(f"a {type(message).__name__} before it joined")
            case wire.Exchange():
                self.registrar.exchange(connection, message)
            case wire.Suspect():
                self._suspected(connection, message)
            case wire.Hand():
                self.registrar.hand(connection, message)
            case wire.Entered():
                self.registrar.entered(connection, message)
            case wire.Finish():
                self.registrar.finish(connection)
            case wire.Leave():
                self.registrar.leave(connection)
            case wire.Moved():
                self._moved(message.incarnation)

    # -- one of several coordinators --------------------------------------------------------------------------------
    @property
    def acting(self) -> bool:
        """Not standing by, and not replaced."""
        return not self._retired and not self._standing_by

    @property
    def _standing_by(self) -> bool:
        return self._others is not None and self._others.standing_by

    def _turn_down(self, connection: Connection, message: wire.FromRank) -> None:
        if self._others is not None and isinstance(message, wire.Join | wire.Announce):
            view = message.announcement.view if isinstance(message, wire.Announce) else None
            self._others.asked(message.identity.replica, view)
        reason = "this coordinator stands by" if self._standing_by else "this coordinator was replaced"
        connection.send(wire.Refused(reason, False, True))
        connection.end()

    def _look_at_others(self) -> None:
        """Begin to act if it is our turn; act no more if another does with more right."""
        if self._others is None:
            return
        if not self._standing_by:
            return self._moved(self._others.rival)
        incarnation = self._others.turn()
        if incarnation is None:
            return
        log.warning("no other coordinator acts: this one takes over, with incarnation %d", incarnation)
        self.registrar.core.incarnation = incarnation
        assert self._server is not None
        self.registrar.sink.emit(events.COORDINATOR_START, incarnation=incarnation, pid=os.getpid(),
                                 address=show_address(*self._server.sockets[0].getsockname()[:2]))

    def _moved(self, incarnation: int) -> None:
        if incarnation > self.registrar.core.incarnation and not self._retired:
            log.error("a coordinator of incarnation %d has taken over: this one (%d) acts no more, end it", incarnation,
                      self.registrar.core.incarnation)
            self._retired = True
            for connection in list(self.registrar.where):
                self.registrar.forget(connection)

    def _suspected(self, connection: Connection, message: wire.Suspect) -> None:
        if not message.unheard:
            asyncio.get_running_loop().call_later(SETTLE, self.registrar.suspect, connection, message)
            return
        self._watched.unheard(connection, message.unheard)
        asyncio.get_running_loop().call_later(self.timeouts.heartbeat, self._cut, connection, message)

    def _cut(self, connection: Connection, message: wire.Suspect) -> None:
        if not self._stopped and self.acting:
            self._watched.judge_cuts(asyncio.get_running_loop().time())
            self.registrar.suspect(connection, message)

    def _refuse_timeout(self, connection: Connection, message: wire.Join | wire.Announce) -> None:
        theirs, ours = message.identity.failure_timeout, self.timeouts.failure_timeout
        reason = f"failure_timeout differs: the rank has {theirs:g} s, the coordinator {ours:g} s"
        self.registrar.refuse(connection, message.identity, reason, final=isinstance(message, wire.Join))

    def offended(self, connection: Connection, error: WireError) -> None:
        """Bytes that no member sends. A member that sends them is as good as dead."""
        if connection in self._strangers:
            return self._turn_away(connection, str(error))
        connection.abort()
        self.registrar.gone(connection, "eof", f"it sent garbage: {error}")

    def stalled(self, connection: Connection) -> None:
        """It does not read what it is sent."""
        self._known(connection)
        self.registrar.gone(connection, "stall", "it does not read what it is sent")

    def closed(self, connection: Connection, error: Exception | None) -> None:
        """End of stream, or a broken connection."""
        if self._stopped or self._retired:              # we closed it, or another keeps the membership: nobody is lost
            return
        if connection in self._strangers and not connection.authenticated:
            log.info("a stranger at %s went away before it proved anything", connection.address)
        self._known(connection)
        self._connections.discard(connection)
        self._watched.forget(connection)
        self.registrar.gone(connection, "eof", str(error) if error else CLOSED)

    # -- time -------------------------------------------------------------------------------------------------------
    def _time_grace(self) -> None:
        if self.registrar.rebuilding and self._grace is None:
            self._arm_grace(self.timeouts.grace)

    def _arm_grace(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._grace = loop.call_later(seconds, self._grace_over, loop.time() + seconds)

    def _grace_over(self, due: float) -> None:
        if self._late(due):                             # members may be waiting to be read
            return self._arm_grace(self.timeouts.heartbeat)
        self._grace = None
        if self.registrar.rebuilding and not self._retired:
            log.warning("not heard within the grace time: %s", ", ".join(self.registrar.missing()) or "nobody")
            if not self.registrar.grace_over():
                self._arm_grace(self.timeouts.grace)

    def _late(self, due: float) -> bool:
        return asyncio.get_running_loop().time() - due > self.timeouts.heartbeat

    async def _keep_watch(self) -> None:
        """Judge silence, and say from time to time who is awaited."""
        loop, tick = asyncio.get_running_loop(), self.timeouts.heartbeat / 2
        said = loop.time()
        while True:
            due = loop.time() + tick
            await asyncio.sleep(tick)
            if self._late(due):
                continue
            self._look_at_others()
            if self.acting:
                self._watched.judge(loop.time())
            if loop.time() - said >= REPORT:
                said = loop.time()
                self._report()

    def _report(self) -> None:
        missing = self.registrar.missing()
        if missing:
            log.info("waiting for %s", ", ".join(missing))
        if self._turned_away > MAX_COMPLAINTS:
            log.warning("dropped %d more strangers", self._turned_away - MAX_COMPLAINTS)
        self._turned_away = 0

    # -- figures ----------------------------------------------------------------------------------------------------
    def stats(self) -> wire.Stats:
        """What was said so far, by type of message, and who is in."""
        view = self.registrar.core.view
        return wire.Stats(received=dict(self.received), sent=dict(self.sent), resident=resident(),
                          incarnation=self.registrar.core.incarnation, view=view.id, members=view.members,
                          missing=self.registrar.missing()[:100],
                          seconds=asyncio.get_running_loop().time() - self._begun, acting=self.acting)


def resident() -> int:
    """Memory of this process in bytes (where /proc is missing: its peak)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
