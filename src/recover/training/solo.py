"""A run of one replica without a launcher: the same loop, with nobody to speak to."""
from __future__ import annotations

from collections.abc import Callable

from recover.config import Timeouts
from recover.membership.activity import Activity
from recover.protocol.coordinator import Announcement
from recover.protocol.messages import NO_VIEW, Endpoint, Pending, View, ViewId


class Solo:
    """What `recover.membership.member.Member` is to a run with others."""

    def __init__(self, endpoint: Endpoint, timeouts: Timeouts) -> None:
        self.activity = Activity(timeouts)
        self.latest = View((0, 1), (0,), {0: (endpoint,)}, forming=True)
        self.pending: Pending | None = None
        self.evicted = False
        self.on_view: Callable[[View], None] | None = None
        self.announcement: Callable[[], Announcement] | None = None

    def start(self) -> None:
        pass

    def vouch(self) -> None:
        pass

    def wait_view(self, newer_than: ViewId = NO_VIEW, timeout: float | None = None) -> View:
        """A view of the same one member: nothing else can happen here but a fault that a plan asked for."""
        if self.latest.id <= newer_than:
            self.latest = View((0, newer_than[1] + 1), (0,), self.latest.endpoints)
        return self.latest

    def wait_news(self, timeout: float) -> View:
        return self.latest

    def exchange(self, view: ViewId, payload: bytes, timeout: float | None = None) -> dict[int, bytes]:
        return {0: payload}

    def suspect(self, view: ViewId, reason: str, peer: int | None = None, unheard: tuple[int, ...] = ()) -> None:
        pass

    def hand(self, name: tuple[int, int] | None) -> None:
        pass

    def entered(self, view: ViewId) -> None:
        pass

    def finish(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass
