"""What the coordinator decides, without sockets or clocks: calls in, `outbox` out.

The coordinator holds soft state only: the view, who waits to join, and the one exchange of the view. It is never asked
during a failure-free step. Its rules (DESIGN 3.2):

* Every change of membership, and every suspicion without a death, makes a new view (`suspect`): each recovery has its
  own view and each view exactly one exchange, whose payloads the coordinator does not read.
* A view's id is (incarnation, counter). Whoever starts the coordinator again raises the incarnation, so that a number
  is never used twice (`incarnation`).
* A coordinator that has just been started knows nothing. If members announce a view, it takes the members of the
  *newest* view announced (`newest`), goes on with that very view only if all of them announce it, each with its
  decision confirmed (`reissue`), and admits no joiner before (`hold`). If nobody announces one and all first members
  ask to join, it forms the first view.
* A view that is announced with the fence (`pending`) is not a view yet: any change cancels it, and includes its joiner.

* It remembers which microbatch, taken over from a dead replica, each rank is at (`hand`). A view names those at which two
  replicas were lost (`blame`); what becomes of them is decided elsewhere.

`outbox` collects what must be sent, oldest first; whoever drives the coordinator empties it.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from recover.protocol.messages import NO_VIEW, Endpoint, Name, Pending, View, ViewId


class Announcement(msgspec.Struct, frozen=True):
    """What a member tells a coordinator that came back: its newest view, and whether it acted on its decision."""

    view: View
    clean: bool


class Pushed(msgspec.Struct, frozen=True):
    """Send the view to all its members, and to those that it no longer has."""

    view: View
    dropped: tuple[int, ...]


class PushedPending(msgspec.Struct, frozen=True):
    """Send the pending view to its members, the joiner included."""

    pending: Pending


class Answered(msgspec.Struct, frozen=True):
    """The exchange of `view` is complete: send all payloads to all members."""

    view: ViewId
    payloads: dict[int, bytes]


Output = Pushed | PushedPending | Answered
Endpoints = dict[int, tuple[Endpoint, ...]]
KILLERS = 64
"""Microbatches that took two replicas, the latest ones, that a view names."""


class Coordinator:
    """The membership of one run. `first` members (numbered from 0) make the first view."""

    def __init__(self, first: int, incarnation: int = 0) -> None:
        if first < 1:
            raise ValueError(f"a run needs at least one replica, not {first}")
        self.first = first
        self.incarnation = incarnation
        self.counter = 0
        self.view = View()
        self.waiting: Endpoints = {}                        # joiners
        self.pending: Pending | None = None
        self.box: dict[int, bytes] = {}                     # the exchange of the present view
        self.finished: set[int] = set()                     # left at the finish line: no casualty
        self.heard: dict[int, Announcement] | None = {}     # while there is no view: what members announced
        self.outbox: list[Output] = []
        self.hands: dict[tuple[int, int], Name] = {}        # (member, rank) -> what it took over and is computing
        self.deaths: Counter[Name] = Counter()              # replicas that died at it
        self.killers: tuple[Name, ...] = ()

    # -- microbatches that kill --------------------------------------------------------------------------------------
    def hand(self, member: int, rank: int, name: Name | None) -> None:
        """A rank begins to compute a microbatch that died with another replica (None: it is over that)."""
        if name is None:
            self.hands.pop((member, rank), None)
        else:
            self.hands[member, rank] = name

    def blame(self, member: int) -> None:
        """`member` is lost. What its ranks were computing may be the reason: certainly so when it happens twice."""
        places = [place for place in self.hands if place[0] == member]
        for name in sorted({self.hands.pop(place) for place in places}):
            newest = max(step for step, _ in [name, *self.deaths])
            self.deaths = Counter({each: n for each, n in self.deaths.items() if each[0] > newest - 4})     # older ones are over
            self.deaths[name] += 1
            if self.deaths[name] >= 2 and name not in self.killers:
                self.killers = (*self.killers, name)[-KILLERS:]

    # -- membership -------------------------------------------------------------------------------------------------
    def joined(self, member: int, endpoints: tuple[Endpoint, ...]) -> None:
        """All ranks of a replica that is in no view ask to be let in."""
        if member in self.view.members:                     # a new life, and the old one's death not noticed yet
            self.lost(member)
        self.finished.discard(member)
        self.waiting[member] = endpoints
        if self.heard is None:
            return
        if self.may_form():
            self.heard = None
            self.issue(self.waiting, forming=True)

    def may_form(self) -> bool:
        """`hold`: while members may still announce a view, only the whole first membership may start one."""
        return not self.heard and set(range(self.first)) <= self.waiting.keys()

    def admit(self) -> None:
        """Let the waiting joiners in by a view change (the plain way)."""
        if self.waiting and self.heard is None:
            self.change()

    def announce_join(self) -> None:
        """Let the waiting joiners in with the fence: announce the view that will have them. (Nobody is left: no fence.)"""
        if not self.waiting or self.pending or self.heard is not None:
            return
        if not self.endpoints():
            self.change()
            return
        members = self.endpoints() | self.waiting
        self.waiting = {}
        self.pending = Pending(self.make(members), self.view.id)
        self.outbox.append(PushedPending(self.pending))

    def entered(self, view: ViewId) -> None:
        """A member has switched to the pending view: it is the view now."""
        if self.pending and self.pending.view.id == view:
            self.view, self.pending, self.box = self.pending.view, None, {}

    def lost(self, member: int) -> None:
        """A member died, hung, left, or was never there."""
        self.blame(member)
        self.waiting.pop(member, None)
        if self.heard is not None:
            self.heard.pop(member, None)
        elif member in self.view.members or (self.pending and member in self.pending.view.members):
            self.change(without=member)

    def finish(self, member: int) -> None:
        """A member passed the last fence and goes: no casualty, and nobody needs to hear of it, unless they wait for it."""
        if member in self.view.members:
            self.finished.add(member)
            self.waive()

    def waive(self) -> None:
        """An exchange that waits for somebody who finished would wait for ever: it moves to a view without them."""
        if self.finished and self.box and self.finished & set(self.view.members) - self.box.keys():
            self.change()

    def suspect(self, view: ViewId) -> None:
        """A collective of `view` failed at some member, though perhaps nobody died."""
        if self.heard is None and view >= self.view.id:
            self.change()

    # -- the exchange -----------------------------------------------------------------------------------------------
    def report(self, member: int, view: ViewId, payload: bytes) -> None:
        """A member's part of the exchange of `view`; parts for any other view are dropped."""
        if self.heard is not None or view != self.view.id or member not in self.view.members:
            return
        self.box.setdefault(member, payload)
        if len(self.box) == len(self.view.members):         # its keys are members: see above
            self.outbox.append(Answered(self.view.id, dict(self.box)))
        self.waive()

    # -- coming back ------------------------------------------------------------------------------------------------
    def announced(self, member: int, announcement: Announcement) -> None:
        """A member of some view reached this coordinator, which may know nothing."""
        if self.heard is not None:
            self.heard[member] = announcement
            if not self.silent():
                self.rebuild()

    def silent(self) -> set[int]:
        """Members of the newest view announced that have not been heard yet."""
        newest = self.newest()
        return set(newest.members) - (self.heard or {}).keys() if newest else set()

    def newest(self) -> View | None:
        views = [a.view for a in (self.heard or {}).values()]
        return max(views, key=lambda view: view.id) if views else None

    def rebuild(self) -> None:
        """All members of the newest view announced themselves, or the grace time is over."""
        newest = self.newest()
        if self.heard is None or newest is None:
            return
        heard, self.heard = self.heard, None
        self.counter, self.killers = self.first_number(newest), newest.killers
        if self.may_go_on(newest, heard):
            self.view = newest
            return
        self.view = newest                                  # so that whoever is left out is told
        self.issue({m: newest.endpoints[m] for m in self.eligible(newest, heard)})

    def first_number(self, newest: View) -> int:
        """`incarnation`: numbers start anew, since no other incarnation uses them."""
        return 0

    def may_go_on(self, newest: View, heard: dict[int, Announcement]) -> bool:
        """`reissue`: the view stands only if all its members are in it, each with its decision confirmed."""
        return all(m in heard and heard[m].view.id == newest.id and heard[m].clean for m in newest.members)

    def eligible(self, newest: View, heard: dict[int, Announcement]) -> Iterable[int]:
        """`newest`: whoever was put out of the newest view stays out, though it may not know."""
        return [m for m in newest.members if m in heard]

    # -- views ------------------------------------------------------------------------------------------------------
    def endpoints(self) -> Endpoints:
        return {m: self.view.endpoints.get(m, ()) for m in self.view.members if m not in self.finished}

    def change(self, without: int | None = None) -> None:
        """A new view: the present members, and whoever waits or was announced with the fence."""
        members = self.endpoints()
        if self.pending:
            members |= {m: e for m, e in self.pending.view.endpoints.items() if m not in self.finished}
        members |= self.joiners()
        self.issue({m: e for m, e in members.items() if m != without})

    def joiners(self) -> Endpoints:
        """Who is let in by the change at hand."""
        return self.waiting

    def make(self, members: Endpoints, forming: bool = False) -> View:
        self.counter += 1
        number = self.incarnation, self.counter
        return View(number, tuple(sorted(members)), dict(sorted(members.items())), forming, self.killers)

    def issue(self, members: Endpoints, forming: bool = False) -> None:
        before, self.view = self.view, self.make(members, forming)
        assert before.id == NO_VIEW or self.view.id > before.id, ("view ids must grow", before.id, self.view.id)
        self.waiting = {m: e for m, e in self.waiting.items() if m not in members}
        self.pending, self.box = None, {}
        self.outbox.append(Pushed(self.view, tuple(m for m in before.members if m not in members)))
