"""Who may come in, who is lost, and who must be told what: the coordinator without sockets or clocks.

Theory of operation
-------------------
`protocol.coordinator.Coordinator` decides about replicas. This decides about ranks and their connections, drives it,
and carries out what it puts into its outbox.

* A replica counts as joined, or as announced, when all its ranks have. It is lost as soon as one of its ranks is; the
  others are told and their connections ended, for a replica is atomic.
* A seat (replica, rank) belongs to one *life* of a process. The same life may come back over a new connection, which
  replaces the old one without any loss. Another life is turned away while the seat's connection lives, though not for
  good: the old one may be dead without anyone knowing yet.
* Ranks that have seen a view announce it. Where the run went on without them (they were frozen, cut off, late), they
  are told that they were dropped. The endpoints in a view tell its members from processes that only have their numbers.
* While the view is being rebuilt (`holding`):
  - whoever is named in the newest view announced but never got it, is given it now, and counts as having announced it
    without having confirmed anything;
  - a suspicion takes back the "confirmed" of whoever utters it: otherwise the view could be adopted as it is, and the
    suspicion would be lost;
  - nobody can finish; and if all members that are silent are known to have died, nobody is waited for.
* Facts (B, seed, versions, ...) must be those of the first rank registered. Ranks that have seen a view precede those
  that have not: a stranger that comes first after a restart can't shut the members out.
* Late joiners are let in with the fence, so that nobody stops for them: the view that will have them is announced, and
  is the view once they say that they are in it. Who comes meanwhile is announced after that. A view that is issued for
  another reason includes them all.
"""
from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from recover import events
from recover.membership import answers, wire
from recover.membership.seats import Connection, Replica, Seat, difference, missing
from recover.membership.standby import may_begin
from recover.protocol.coordinator import Announcement, Answered, Coordinator, Pushed, PushedPending
from recover.protocol.messages import NO_VIEW, Endpoint, View, ViewId

log = logging.getLogger("recover.membership")

CLOSED = "its connection was closed"
"""The evidence of a clean end of stream: the kernel's of a process that is gone."""


class Registrar:
    """Ranks in and out of one run. `first` replicas of `ranks` ranks make the first view, their numbers are below `most`."""

    def __init__(self, first: int, ranks: int, incarnation: int, sink: events.Log | None = None,
                 most: int | None = None) -> None:
        if ranks < 1:
            raise ValueError(f"a replica needs at least one rank, not {ranks}")
        self.core = Coordinator(first, incarnation)
        self.ranks, self.most = ranks, most
        self.sink = sink or events.NullLog()
        self.replicas: dict[int, Replica] = {}
        self.where: dict[Connection, tuple[int, int]] = {}
        self.lifelines: dict[Connection, wire.Lifeline] = {}
        self.pulses: dict[Connection, wire.Pulse] = {}
        self.asked: dict[int, Connection] = {}          # whose exchange of the present view is unanswered
        self.departed: set[Endpoint] = set()            # ranks lost while the view is being rebuilt
        self.base: set[int] = set()                     # members of the last view whose exchange was completed, if not dead
        self.vanished: dict[int, int] = {}              # (quorum) rank of each that ended after silence, not lost yet
        self.doubtful: set[int] = set()                 # (quorum) silent, but not lost: too few would be left
        self.quorum = False                             # another coordinator may take over: see `standby.py`
        self.settled = False                            # there is a view
        self.known = False                              # some rank has announced a view (spares a look at every seat)

    @property
    def holding(self) -> bool:
        """There is no view yet, or not again."""
        return self.core.heard is not None

    @property
    def rebuilding(self) -> bool:
        """Some member announced a view: the grace time runs."""
        return bool(self.core.heard)

    @property
    def over(self) -> bool:
        """All members of the view passed the last fence."""
        return bool(self.core.view.members) and set(self.core.view.members) <= self.core.finished

    def missing(self) -> tuple[str, ...]:
        """Who is awaited, in words; empty when there is a view."""
        if not self.holding:
            return ()
        awaited = self.core.silent() if self.rebuilding else set(range(self.core.first))
        return missing(awaited, self.replicas, self.ranks)

    # -- coming in --------------------------------------------------------------------------------------------------
    def join(self, connection: Connection, identity: wire.Identity) -> None:
        """A rank without a view asks to be let in."""
        reason, final = self.objection(identity, member=False)
        if self.over and not reason:
            reason, final = "the run has finished", True
        if reason:
            return self.refuse(connection, identity, reason, final)
        self.register(Seat(connection, identity, None))

    def announce(self, connection: Connection, identity: wire.Identity, announcement: Announcement) -> None:
        """A rank that has seen a view is back."""
        view = announcement.view
        if self.stale(view.id):
            log.error("replica %d announces view %s, but this coordinator (incarnation %d) is not newer: start it with "
                      "a higher incarnation, or end it if another has taken over",
                      identity.replica, view.id, self.core.incarnation)
            return self.refuse(connection, identity, "its view is as new as this coordinator", False)
        if not self.holding and not self.seated(identity):
            return self.turn_out(connection, "the others went on without this replica", seen=True)
        if self.holding:
            self.outrank(identity, view)
        reason, final = self.objection(identity, member=True)
        if reason:
            return self.refuse(connection, identity, reason, final)
        self.register(Seat(connection, identity, announcement))

    def stale(self, view: ViewId) -> bool:
        """This coordinator can't be newer than the view: another took over, or an incarnation was used twice."""
        return view[0] >= self.core.incarnation if self.holding else view > self.core.view.id

    def seated(self, identity: wire.Identity) -> bool:
        """This life has this seat."""
        replica = self.replicas.get(identity.replica)
        seat = replica.seats.get(identity.rank) if replica else None
        return seat is not None and seat.identity.life == identity.life

    def outrank(self, identity: wire.Identity, view: View) -> None:
        """While rebuilding, the newer view settles which of two processes is the replica."""
        replica = self.replicas.get(identity.replica)
        known = replica.known if replica else None
        if replica and not replica.belongs(identity.replica, view) and (not known or known.id < view.id):
            self.dismiss(identity.replica, "another process is this replica, in a newer view")

    def objection(self, identity: wire.Identity, member: bool) -> tuple[str, bool]:
        """Why the rank can't be let in ("": it can), and whether that is final."""
        me = f"replica {identity.replica} rank {identity.rank}"
        if identity.ranks != self.ranks or identity.rank >= self.ranks:
            return f"{me} says that a replica has {identity.ranks} ranks; in this run it has {self.ranks}", True
        if self.most is not None and identity.replica >= self.most:
            return f"{me}: this run has at most {self.most} replicas (--max-replicas), numbered from 0", True
        differs = self.disagreement(identity, member)
        if differs:
            return differs, True
        replica = self.replicas.get(identity.replica)
        if replica and replica.finished:
            return f"replica {identity.replica} is just finishing", False
        seat = replica.seats.get(identity.rank) if replica else None
        if seat and seat.identity.life != identity.life:
            return f"{me} is taken: another live process has this position", False
        return "", False

    def disagreement(self, identity: wire.Identity, member: bool) -> str:
        """The first fact in which the rank differs from the run; "" if none."""
        before: Seat | None = None
        if self.known or self.core.view.members:
            before = next((seat for number, seat in self.seats() if seat.announcement or number in self.core.view.members), None)
        if before is None and not member:
            before = next((seat for _, seat in self.seats()), None)
        return difference(identity, before.identity) if before else ""

    def seats(self) -> Iterator[tuple[int, Seat]]:
        """All seats, with the numbers of their replicas."""
        return ((number, seat) for number, replica in self.replicas.items() for seat in replica.seats.values())

    def register(self, seat: Seat) -> None:
        """Give the rank its seat; the same life's former connection is replaced."""
        identity, connection = seat.identity, seat.connection
        replica = self.replicas.setdefault(identity.replica, Replica(self.ranks))
        old = replica.seats.get(identity.rank)
        if old and old.connection is not connection:
            self.forget(old.connection)
        replica.seats[identity.rank] = seat
        self.vanished.pop(identity.replica, None)
        self.known = self.known or seat.announcement is not None
        self.where[connection] = identity.replica, identity.rank
        self.departed.discard(identity.endpoint)
        connection.send(wire.Welcome(self.core.incarnation))
        if old and not self.holding:
            self.renew(identity.replica, replica, seat)
        elif replica.complete:
            self.arrived(identity.replica, replica)
        self.deliver()

    def renew(self, member: int, replica: Replica, seat: Seat) -> None:
        """A rank is back over another connection: give it what it may have missed."""
        known = seat.announcement.view.id if seat.announcement else NO_VIEW
        if replica.belongs(member, self.core.view) and known < self.core.view.id:
            seat.connection.send(wire.NewView(self.core.view))
        pending = self.core.pending
        if pending and replica.belongs(member, pending.view):
            seat.connection.send(wire.NewPending(pending))

    def arrived(self, member: int, replica: Replica) -> None:
        """All ranks of a replica are here."""
        if replica.known is None:
            log.info("replica %d joined", member)
            self.core.joined(member, replica.endpoints)
            if not self.holding:
                self.core.announce_join()
        if self.holding:
            self.reconsider()

    # -- rebuilding -------------------------------------------------------------------------------------------------
    def newest(self) -> View | None:
        """The newest view that a whole replica announced."""
        views = [replica.known for replica in self.replicas.values() if replica.complete and replica.known]
        return max(views, key=lambda view: view.id) if views else None

    def reconsider(self) -> None:
        """While holding: who is a member of the newest view announced, and what does each say of it?"""
        newest = self.newest() if self.known else None
        if newest is None:
            return
        here = [(number, replica) for number, replica in self.replicas.items() if replica.complete]
        reference = next(seat for _, r in here for seat in r.seats.values() if seat.announcement)
        for number, replica in here:
            differs = "" if replica.known else self.first_difference(replica, reference)
            impostor = replica.known and number in newest.members and not replica.belongs(number, newest)
            if differs or impostor:
                self.dismiss(number, differs or "another process is this replica, in a newer view")
        members = [(n, r) for n, r in here if self.replicas.get(n) is r and r.belongs(n, newest)]
        for number, replica in members:
            self.bring_up(number, replica, newest)
        for number, replica in members:
            self.core.announced(number, replica.announcement(newest))
        self.hasten()

    def first_difference(self, replica: Replica, reference: Seat) -> str:
        return next(filter(None, (difference(s.identity, reference.identity) for s in replica.seats.values())), "")

    def bring_up(self, number: int, replica: Replica, newest: View) -> None:
        """Give the newest view to those of its ranks that never got it."""
        if replica.known is None:
            self.core.lost(number)                      # it waits no longer as a joiner
        for seat in replica.seats.values():
            if seat.announcement is None or seat.announcement.view.id < newest.id:
                seat.announcement = Announcement(newest, False)
                seat.connection.send(wire.NewView(newest))

    def hasten(self) -> None:
        """All members that are silent are known to be dead: nobody is waited for."""
        newest = self.core.newest()
        if newest and all(self.departed.intersection(newest.endpoints[m]) for m in self.core.silent()):
            self.core.rebuild()

    def grace_over(self) -> bool:
        """Members had their time to announce themselves. False: they are too few to go on."""
        newest = self.core.newest()
        if self.quorum and newest is not None:
            dead = [m for m in newest.members if self.departed.intersection(newest.endpoints[m])]
            if not may_begin(set(newest.members) - self.core.silent(), newest.members, dead):
                return False
        self.core.rebuild()
        self.deliver()
        return True

    def rebuilt(self) -> None:
        """There is a view (again): turn out whoever has seen one but is not in it, and let joiners in."""
        self.departed.clear()
        view = self.core.view
        for number, replica in list(self.replicas.items()):
            if replica.known and not (replica.complete and replica.belongs(number, view)):
                self.dismiss(number, f"the others went on without this replica, in view {view.id}")
        for number in view.members:
            if number not in self.replicas:
                self.core.lost(number)
        self.core.admit()

    # -- going ------------------------------------------------------------------------------------------------------
    def gone(self, connection: Connection, cause: events.Cause, evidence: str) -> None:
        """A connection ended, fell silent or does not take what it is sent."""
        if self.pulses.pop(connection, None) is not None:
            return                                      # a helper ended: that proves nothing
        lifeline = self.lifelines.pop(connection, None)
        if lifeline is not None:
            if evidence == CLOSED:                      # anything else may be the network
                self.died(lifeline)
            return
        place = self.where.get(connection)
        if place is None:
            return
        member, rank = place
        replica = self.replicas[member]
        if replica.finished:
            self.forget(connection)
            del replica.seats[rank]
            if not replica.seats:
                del self.replicas[member]
            return
        if member in self.doubtful:                     # it may have gone on elsewhere before it ended
            del self.where[connection]
            self.vanished[member] = rank
            return
        self.lose(member, rank, cause, evidence)

    def lifeline(self, connection: Connection, message: wire.Lifeline) -> None:
        """A connection that ends with a rank's process, long before the kernel has ended the others."""
        self.lifelines[connection] = message

    def died(self, lifeline: wire.Lifeline) -> None:
        """The process at the other end of a lifeline is gone (or its host is): so is the rank, if it is still here."""
        replica = self.replicas.get(lifeline.replica)
        seat = replica.seats.get(lifeline.rank) if replica else None
        if seat is not None and seat.identity.life == lifeline.life:
            self.gone(seat.connection, "eof", "its lifeline ended")

    def release(self, replica: Replica) -> None:
        """Its lifelines and pulses are not wanted any more."""
        lives = {seat.identity.life for seat in replica.seats.values()}
        beside: tuple[dict[Connection, Any], ...] = self.lifelines, self.pulses
        for table in beside:
            for connection in [c for c, said in table.items() if said.life in lives]:
                del table[connection]
                connection.end()

    def lose(self, member: int, rank: int, cause: events.Cause, evidence: str) -> None:
        replica, view = self.replicas[member], self.core.view
        inside = not self.holding and replica.belongs(member, view)
        planned = cause == "leave"
        log.log(logging.INFO if planned else logging.WARNING, "lost replica %d rank %d%s: %s, %s", member, rank,
                f" of view {view.id}" if inside else "", cause, evidence)
        if inside or replica.known:
            self.sink.emit(events.REPLICA_LOST, severity="INFO" if planned else "WARN", view=view.id, lost=member,
                           cause=cause, noticed_by="coordinator", evidence=evidence, position=rank)
        if cause != "heartbeat":
            self.base.discard(member)
        if self.holding:
            self.departed.add(replica.seats[rank].identity.endpoint)
        again = cause == "heartbeat" or (not self.holding and bool(view.members))     # it may come back, and join
        self.dismiss(member, f"rank {rank} of this replica was lost ({cause}: {evidence})", seen=inside or again)
        if self.holding:
            self.hasten()
            self.form()
        self.deliver()

    def form(self) -> None:
        """Whoever hindered the first view is gone."""
        if self.holding and self.core.may_form():
            self.core.joined(*next(iter(self.core.waiting.items())))

    def dismiss(self, member: int, reason: str, seen: bool = False) -> None:
        """A whole replica is out: end its connections. `seen`: it has seen a view."""
        replica = self.replicas.pop(member)
        self.vanished.pop(member, None)
        self.asked.pop(member, None)
        self.release(replica)
        self.core.lost(member)
        for seat in replica.seats.values():
            self.where.pop(seat.connection, None)
            self.turn_out(seat.connection, reason, seen or replica.known is not None)

    def turn_out(self, connection: Connection, reason: str, seen: bool) -> None:
        """Whoever has seen a view was dropped; whoever has not is refused."""
        connection.send(wire.Dropped(self.core.view, reason) if seen else wire.Refused(reason, True))
        connection.end()

    def refuse(self, connection: Connection, identity: wire.Identity, reason: str, final: bool) -> None:
        log.warning("refused replica %d rank %d: %s", identity.replica, identity.rank, reason)
        connection.send(wire.Refused(reason, final))
        connection.end()

    def forget(self, connection: Connection) -> None:
        self.where.pop(connection, None)
        connection.end()

    # -- what ranks say ---------------------------------------------------------------------------------------------
    def exchange(self, connection: Connection, message: wire.Exchange) -> None:
        """A replica's part of the exchange of a view."""
        member, _ = self.where[connection]
        self.asked[member] = connection
        self.core.report(member, message.view, message.payload)
        self.deliver()

    def hand(self, connection: Connection, message: wire.Hand) -> None:
        """What a rank is computing, should it die of that."""
        member, rank = self.where[connection]
        self.core.hand(member, rank, message.name)

    def suspect(self, connection: Connection, message: wire.Suspect) -> None:
        """A collective failed somewhere, though perhaps nobody died."""
        if connection not in self.where:                # lost in the meantime: that made a new view
            return
        member, rank = self.where[connection]
        log.info("replica %d rank %d suspects view %s: %s (peer %s)", member, rank, message.view, message.reason,
                 message.peer)
        seat = self.replicas[member].seats[rank]
        if self.holding:
            if seat.announcement:
                seat.announcement = Announcement(seat.announcement.view, False)
                self.reconsider()
            return self.deliver()
        pending = self.core.pending                     # a joiner that could not get in by the fence gets in without it
        if any(self.replicas[member].belongs(member, view) for view in (self.core.view, *([pending.view] if pending else []))):
            self.core.suspect(message.view)
        self.deliver()

    def entered(self, connection: Connection, message: wire.Entered) -> None:
        """A member has switched to the view announced with the fence."""
        self.core.entered(message.view)
        self.core.announce_join()                       # who came meanwhile
        self.deliver()

    def finish(self, connection: Connection) -> None:
        """A replica passed the last fence. (While rebuilding that can't be granted: its end is then a loss.)"""
        member, _ = self.where[connection]
        replica = self.replicas[member]
        if not self.holding and replica.belongs(member, self.core.view):
            replica.finished = True
            self.release(replica)
            self.core.finish(member)
            log.info("replica %d finished", member)
            if self.over:                               # nobody is left who could let anyone in
                self.core.pending = None
                for late in [n for n in self.replicas if n not in self.core.view.members]:
                    self.dismiss(late, "the run has finished")
            self.deliver()

    def leave(self, connection: Connection) -> None:
        """A replica goes, as agreed."""
        member, rank = self.where[connection]
        for each in range(self.ranks):
            self.core.hand(member, each, None)          # it goes by itself: nothing that it computed is to blame
        self.lose(member, rank, "leave", "it said so")

    # -- telling ----------------------------------------------------------------------------------------------------
    def deliver(self) -> None:
        """Carry out what the core decided, and what follows from it."""
        while self.core.outbox or (not self.holding and not self.settled):
            outbox, self.core.outbox = self.core.outbox, []
            for output in outbox:
                if isinstance(output, Pushed):
                    self.push(output)
                elif isinstance(output, PushedPending):
                    self.broadcast(output.pending.view, wire.NewPending(output.pending))
                else:
                    self.answer(output)
            if not self.holding and not self.settled:
                self.settled = True
                self.rebuilt()

    def push(self, output: Pushed) -> None:
        view = output.view
        log.info("view %s: members %s", view.id, list(view.members))
        self.asked.clear()
        self.sink.emit(events.VIEW_NEW, view=view.id, members=view.members, gone=output.dropped)
        self.broadcast(view, wire.NewView(view))

    def broadcast(self, view: View, message: wire.Message) -> None:
        """To all ranks of the view's members; encoded once."""
        frame, kind = wire.encode(message), type(message).__name__
        for member in view.members:
            replica = self.replicas.get(member)
            for seat in replica.seats.values() if replica else ():
                seat.connection.write(frame, kind, 1)

    def answer(self, output: Answered) -> None:
        """To whoever asked; who asks again (its connection broke) is answered again."""
        self.base = set(self.core.view.members)
        chunks = list(answers.pack(output.payloads))
        frames = b"".join(wire.encode(wire.Parts(output.view, chunk)) for chunk in chunks)
        asked, self.asked = self.asked, {}
        for connection in asked.values():
            connection.write(frames, "Parts", len(chunks))
