"""The coordinator's eye on the ranks' signs of life: keeps them by connection, and acts on what `liveness` finds.

Without sockets of its own, and without a clock: `now` is the server's, in seconds, and so is `last` of a connection.
"""
from __future__ import annotations

from typing import Protocol

from recover.config import Timeouts
from recover.membership import wire
from recover.membership.liveness import Pair, Signs, Steadiness, cut_off, judge
from recover.membership.registrar import Registrar
from recover.membership.seats import Connection
from recover.membership.standby import may_lose


class Heard(Connection, Protocol):
    """A connection that knows when something was last heard on it."""

    last: float


class Watch:
    """Of one registrar."""

    def __init__(self, registrar: Registrar, timeouts: Timeouts) -> None:
        self._registrar, self._timeouts = registrar, timeouts
        self._progress: dict[Connection, wire.Progress | None] = {}
        self._steady: dict[Connection, Steadiness] = {}
        self._pairs: set[Pair] = set()

    def heartbeat(self, connection: Heard, message: wire.Heartbeat, now: float) -> None:
        """A rank's heartbeat (or a stranger's, which means nothing)."""
        if connection in self._registrar.where:
            self._progress[connection] = message.progress
            self._steady.setdefault(connection, Steadiness(self._timeouts, now)).beat(now)

    def forget(self, connection: Connection) -> None:
        """It is closed."""
        self._progress.pop(connection, None)
        self._steady.pop(connection, None)

    # -- silent, hung -----------------------------------------------------------------------------------------------
    def judge(self, now: float) -> None:
        """Lose whoever is frozen, cut off or hung. To be called by a loop that itself ran on time."""
        registrar = self._registrar
        signs = {c: self._signs(c, now) for c in registrar.where if hasattr(c, "last")}
        waited = self._waited(signs)
        for connection, each in signs.items():
            if connection not in registrar.where:       # a replica's other ranks go with the first
                continue
            member, _ = registrar.where[connection]
            others = max((seconds for m, seconds in waited.items() if m != member), default=0.0)
            found = judge(each, others, self._timeouts)
            silent = found is not None and found[0] == "heartbeat"
            registrar.doubtful.discard(member)
            if silent and not self._may_lose(member):
                registrar.doubtful.add(member)
            elif found is not None:
                registrar.gone(connection, *found)
        for member, rank in list(registrar.vanished.items()):
            if self._may_lose(member):
                registrar.lose(member, rank, "heartbeat", "it ended after it had fallen silent")

    def _may_lose(self, member: int) -> bool:
        """Whoever has fallen silent may be on the other side of a broken network, with another coordinator."""
        registrar = self._registrar
        return not registrar.quorum or registrar.holding or may_lose(member, registrar.core.view.members, registrar.base)

    def _signs(self, connection: Connection, now: float) -> Signs:
        registrar = self._registrar
        member, rank = registrar.where[connection]
        life = registrar.replicas[member].seats[rank].identity.life
        pulses = [now - c.last for c, said in registrar.pulses.items()      # type: ignore[attr-defined]
                  if (said.replica, said.rank, said.life) == (member, rank, life)]
        return Signs(now - connection.last,             # type: ignore[attr-defined]
                     min(pulses, default=None), self._progress.get(connection))

    def _waited(self, signs: dict[Connection, Signs]) -> dict[int, float]:
        """How long each member of the present view has waited for others; one that has finished waits for nobody."""
        registrar, waited = self._registrar, dict[int, float]()
        if registrar.holding:                           # they wait for us
            return waited
        for connection, each in signs.items():
            member, _ = registrar.where[connection]
            replica = registrar.replicas[member]
            if not replica.finished and replica.belongs(member, registrar.core.view):
                waited[member] = max(waited.get(member, 0.0), each.waited)
        return waited

    # -- cut off ----------------------------------------------------------------------------------------------------
    def unheard(self, connection: Connection, members: tuple[int, ...]) -> None:
        """The rank at `connection` does not reach these members over its data connections."""
        if connection in self._registrar.where:
            reporter, _ = self._registrar.where[connection]
            self._pairs.update((reporter, member) for member in members)

    def judge_cuts(self, now: float) -> None:
        """All have had the time to report: lose those who can't be in one view with the others."""
        pairs, self._pairs = self._pairs, set()
        registrar = self._registrar
        if registrar.holding:
            return
        view = registrar.core.view
        steady = [m for m, replica in registrar.replicas.items() if replica.belongs(m, view) and not replica.finished
                  and all(self._is_steady(seat.connection, now) for seat in replica.seats.values())]
        for member in cut_off(pairs, steady):
            partners = sorted({a + b - member for a, b in pairs if member in (a, b)})
            registrar.lose(member, min(registrar.replicas[member].seats), "cut",
                           f"no data connection with replica {', '.join(map(str, partners))}, though all of them reach the "
                           "coordinator")

    def _is_steady(self, connection: Connection, now: float) -> bool:
        steadiness = self._steady.get(connection)
        return steadiness is not None and steadiness.steady(now)
