"""A replica as the coordinator sees it: which of its ranks are connected, and what they said."""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from recover.membership import wire
from recover.protocol.coordinator import Announcement
from recover.protocol.messages import Endpoint, View

_ABSENT = object()


class Connection(Protocol):
    """What decides needs of a connection; none of these waits or calls back."""

    def send(self, message: wire.Message) -> None:
        """Send one message."""

    def write(self, frames: bytes, kind: str, count: int) -> None:
        """Send `count` frames of one kind that are encoded already."""

    def end(self) -> None:
        """Send what is left, then close. Nothing that still arrives is reported."""


@dataclass(eq=False)
class Seat:
    """One rank that is connected; `announcement` if it has seen a view."""

    connection: Connection
    identity: wire.Identity
    announcement: Announcement | None


@dataclass(eq=False)
class Replica:
    """A replica with at least one rank connected."""

    ranks: int
    seats: dict[int, Seat] = field(default_factory=dict)
    finished: bool = False

    @property
    def complete(self) -> bool:
        return len(self.seats) == self.ranks

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(self.seats[rank].identity.endpoint for rank in sorted(self.seats))

    @property
    def known(self) -> View | None:
        """The newest view that any of its ranks announced."""
        views = [seat.announcement.view for seat in self.seats.values() if seat.announcement]
        return max(views, key=lambda view: view.id) if views else None

    def announcement(self, view: View) -> Announcement:
        """What the replica says of `view`: confirmed only if all its ranks say so."""
        said = [seat.announcement for seat in self.seats.values()]
        return Announcement(view, all(a is not None and a.clean and a.view.id == view.id for a in said))

    def belongs(self, member: int, view: View) -> bool:
        """These very processes, not just their number, are `member` of `view` (as far as they are here)."""
        ends = view.endpoints.get(member, ())
        return len(ends) == self.ranks and all(ends[r] == seat.identity.endpoint for r, seat in self.seats.items())


def difference(mine: wire.Identity, theirs: wire.Identity) -> str:
    """The first fact in which two ranks differ, with both values; "" if they agree."""
    for key in [*theirs.facts, *(key for key in mine.facts if key not in theirs.facts)]:
        a, b = mine.facts.get(key, _ABSENT), theirs.facts.get(key, _ABSENT)
        if a != b or type(a) is not type(b):
            return (f"{key} differs: replica {mine.replica} rank {mine.rank} has {_show(a)}, "
                    f"replica {theirs.replica} rank {theirs.rank} has {_show(b)}")
    return ""


def _show(value: Any) -> str:
    return "no such fact" if value is _ABSENT else repr(value)


def missing(awaited: Iterable[int], replicas: dict[int, Replica], ranks: int) -> tuple[str, ...]:
    """Which of the awaited replicas are not here, or not whole, in words."""
    words = []
    for member in sorted(awaited):
        replica = replicas.get(member)
        if replica is None:
            words.append(f"replica {member}")
        elif not replica.complete:
            absent = sorted(set(range(ranks)) - replica.seats.keys())
            words.append(f"replica {member} rank {', '.join(map(str, absent))}")
    return tuple(words)
