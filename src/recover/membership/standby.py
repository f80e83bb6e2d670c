"""A coordinator that waits for its turn: when it takes over, and how no two of them ever act for one run. Pure.

Theory of operation
-------------------
* Members know a list of addresses and try them in turn. Whoever *stands by* turns them away for the time being, but keeps
  in mind who asked, and what view they announced.
* It takes over when it has had no answer of a coordinator that acts for the failure timeout, and members have asked of late
  who are more than half of the newest view that they announce (or, before there is any view, all first replicas).
* Its incarnation is then higher than all that the members know of, by `ERA` (a supervisor that merely restarts the first
  coordinator counts by ones and never gets there). Members obey the highest incarnation that they have seen, and no other.
* Members that were welcomed elsewhere tell the coordinator that they leave (`wire.Moved`), and coordinators that know of each
  other ask each other: one that hears of an acting one with a higher incarnation acts no more (*retires*), and turns its
  members away.

Two coordinators on the two sides of a broken network could each go on with the members on theirs. Where a coordinator may
be replaced by another (`quorum`), none goes on with too few:

    who acts already    must keep at least half of `base`: the members of the view whose exchange was completed last, without
                        those that are known to be dead or to have left. The end of a connection is such knowledge, silence
                        is not, nor is an end after silence: it may have gone on elsewhere before it ended. With fewer,
                        the silent ones are not lost: everybody waits until some are back.
    who begins to act   needs more than half of the newest view's members, on its return as well as when it takes over

At least half of a set on one side and more than half on the other is too much; and what is decided in a view takes effect
only once *all* its members have exchanged in it, which a member does with one coordinator only.
"""
from __future__ import annotations

from collections.abc import Collection

from recover.config import Timeouts
from recover.protocol.messages import NO_VIEW, View

ERA = 1 << 32
ROUNDS = 4
"""How many failure timeouts an announcement counts: members try the other addresses in between."""


def may_lose(member: int, members: Collection[int], base: Collection[int]) -> bool:
    """Whether enough are left without `member`, which has only fallen silent. `base`: see above."""
    return 2 * len(set(members) & set(base) - {member}) >= len(base)


def may_begin(heard: Collection[int], members: Collection[int], dead: Collection[int] = ()) -> bool:
    """Whether those of `members` that were heard are more than half of those not known to be dead."""
    alive = set(members) - set(dead)
    return 2 * len(set(heard) & alive) > len(alive)


class Standby:
    """Who asked and who acts; all times in seconds of the caller's clock. `first` replicas make the first view."""

    def __init__(self, first: int, timeouts: Timeouts, now: float) -> None:
        self._first, self._timeouts = first, timeouts
        self._answered = now                            # when a coordinator that acts was last known to
        self._asked: dict[int, tuple[float, View | None]] = {}
        self._newest = NO_VIEW

    def answered(self, now: float) -> None:
        """Another coordinator acts."""
        self._answered = now

    def asked(self, replica: int, view: View | None, now: float) -> None:
        """A rank of this replica came here, with the newest view that it knows."""
        self._asked[replica] = now, view
        if view is not None:
            self._newest = max(self._newest, view.id)

    def turn(self, now: float) -> int | None:
        """The incarnation to act with, once it is our turn."""
        if now - self._answered < self._timeouts.failure_timeout:
            return None
        since = now - ROUNDS * self._timeouts.failure_timeout
        recent = {replica: view for replica, (at, view) in self._asked.items() if at >= since}
        newest = max((view for view in recent.values() if view is not None), key=lambda view: view.id, default=None)
        if newest is None:
            enough = self._newest == NO_VIEW and recent.keys() >= set(range(self._first))
        else:
            enough = newest.id == self._newest and may_begin(recent.keys(), newest.members)
        return (max(0, self._newest[0]) // ERA + 1) * ERA if enough else None
