"""A rank's side without threads or sockets: news in, first messages and repetitions out."""
from __future__ import annotations

from typing import Any

import pytest

from membership_kit import make
from recover.errors import Evicted, JoinRefused
from recover.membership import wire
from recover.membership.member import Member
from recover.protocol.coordinator import Announcement
from recover.protocol.messages import NO_VIEW, Endpoint, Pending, View


def view(counter: int, *members: int, incarnation: int = 0) -> View:
    return View((incarnation, counter), members, {m: (Endpoint("host", m),) for m in members})


class Link:
    address = "test"

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: wire.Message) -> None:
        self.sent.append(message)


@pytest.fixture
def member() -> Member:
    """Replica 0, not started."""
    return make("127.0.0.1:1", 0)


def link_up(member: Member) -> Link:
    link = Link()
    member._keeper.link = link                                                                  # type: ignore[assignment]
    member.linked(link)                                                                         # type: ignore[arg-type]
    return link


def link_down(member: Member) -> None:
    member._keeper.link = None
    member.linked(None)


def test_views_only_grow(member: Member) -> None:
    heard: list[View] = []
    member.on_view = heard.append
    for pushed in (view(2, 0, 1), view(1, 0, 1, 2), view(2, 0), view(9, 0, incarnation=0), view(1, 0, incarnation=1),
                   view(10, 0, incarnation=0)):
        member.heard(wire.NewView(pushed))
    assert [v.id for v in heard] == [(0, 2), (0, 9), (1, 1)]
    assert member.latest.id == (1, 1)


def test_without_a_view_it_joins_and_with_one_it_announces(member: Member) -> None:
    assert isinstance(member.opening(), wire.Join)
    member.heard(wire.NewView(view(1, 0, 1)))
    first = member.opening()
    assert isinstance(first, wire.Announce)
    assert first.announcement == Announcement(view(1, 0, 1), False)
    member.announcement = lambda: Announcement(view(1, 0, 1), True)
    second = member.opening()
    assert isinstance(second, wire.Announce)
    assert second.announcement.clean


def test_it_announces_the_newest_view_though_the_run_has_not_taken_it_up(member: Member) -> None:
    member.announcement = lambda: Announcement(view(1, 0, 1), True)
    member.heard(wire.NewView(view(2, 0)))
    message = member.opening()
    assert isinstance(message, wire.Announce)
    assert message.announcement == Announcement(view(2, 0), False)


def test_a_suspicion_takes_back_that_the_view_is_confirmed_and_is_said_again(member: Member) -> None:
    member.heard(wire.NewView(view(1, 0, 1)))
    member.announcement = lambda: Announcement(view(1, 0, 1), True)
    member.suspect((0, 1), "reset", 1)
    message = member.opening()
    assert isinstance(message, wire.Announce)
    assert not message.announcement.clean
    for _ in range(2):
        assert link_up(member).sent == [wire.Suspect((0, 1), "reset", 1)]
        link_down(member)
    member.heard(wire.NewView(view(2, 0, 1)))
    assert link_up(member).sent == []


@pytest.mark.parametrize("farewell", [wire.Finish(), wire.Leave()])
def test_a_farewell_uttered_without_a_connection_is_said_with_the_next(member: Member, farewell: wire.Message) -> None:
    member.heard(wire.NewView(view(1, 0, 1)))
    member.finish() if isinstance(farewell, wire.Finish) else member.leave()
    assert not member.over
    assert link_up(member).sent == [farewell]
    link_down(member)
    assert member.over, "nobody comes back after a farewell"


def test_who_goes_is_not_evicted(member: Member) -> None:
    member.heard(wire.NewView(view(1, 0, 1)))
    member.leave()
    member.heard(wire.Dropped(view(2, 1), "it said so"))
    assert not member.evicted


def test_dropped_though_the_view_has_its_number(member: Member) -> None:
    """Its successor is in: the number alone proves nothing."""
    heard: list[tuple[View, bool]] = []
    member.on_view = lambda v: heard.append((v, member.evicted))
    member.heard(wire.NewView(view(1, 0, 1)))
    member.heard(wire.Dropped(view(1, 0, 1), "another life"))
    assert heard == [(view(1, 0, 1), False), (view(1, 0, 1), True)]
    with pytest.raises(Evicted):
        member.wait_view(NO_VIEW, 1)
    assert member.over


def test_a_pending_view_is_forgotten_when_a_newer_one_comes(member: Member) -> None:
    member.heard(wire.NewView(view(1, 0, 1)))
    member.heard(wire.NewPending(Pending(view(2, 0, 1, 2), (0, 1))))
    assert member.pending is not None
    member.heard(wire.NewView(view(3, 0, 1, 2)))
    assert member.pending is None
    member.heard(wire.NewPending(Pending(view(2, 0, 1, 2), (0, 1))))
    assert member.pending is None


def test_entering_a_pending_view_makes_it_the_newest(member: Member) -> None:
    member.heard(wire.NewView(view(1, 0, 1)))
    member.heard(wire.NewPending(Pending(view(2, 0, 1, 2), (0, 1))))
    member.entered((0, 2))
    assert member.latest.id == (0, 2)
    assert member.pending is None


def test_a_refusal_that_may_pass_does_not_end_a_member_of_a_view(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 1e6])
    member.heard(wire.NewView(view(1, 0, 1)))
    monkeypatch.setattr("recover.membership.member.time.monotonic", lambda: next(now))
    member.refused("taken", False)
    member.refused("taken", False)
    assert member.failure is None


def test_a_refusal_that_does_not_pass_ends_a_joiner(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([1.0, 1.0 + 9.9, 1.0 + 10.1])
    monkeypatch.setattr("recover.membership.member.time.monotonic", lambda: next(now))
    member.refused("taken", False)
    member.refused("taken", False)
    assert member.failure is None
    member.refused("taken", False)
    assert isinstance(member.failure, JoinRefused)
