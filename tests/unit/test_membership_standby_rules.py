"""Two coordinators: who may act, decided on made-up clocks and broken networks."""
from __future__ import annotations

import itertools

import pytest
from test_membership_registrar import Rank

from recover.config import Timeouts
from recover.membership import wire
from recover.membership.registrar import Registrar
from recover.membership.standby import ERA, ROUNDS, Standby, may_begin, may_lose
from recover.protocol.messages import Endpoint, View

TIMES = Timeouts(failure_timeout=5.0)


def view(incarnation: int, counter: int, *members: int) -> View:
    return View((incarnation, counter), members, {m: (Endpoint(f"life-{m}-0", 1000 * m),) for m in members})


def asked(standby: Standby, seen: View | None, *members: int, now: float) -> None:
    for member in members:
        standby.asked(member, seen, now)


def test_it_waits_until_nobody_acts_and_most_members_have_come() -> None:
    standby = Standby(4, TIMES, 0.0)
    asked(standby, view(0, 3, 0, 1, 2, 3), 0, 1, 2, now=4.0)
    assert standby.turn(4.9) is None, "the first may still answer"
    assert standby.turn(5.1) == ERA
    standby.answered(5.2)
    assert standby.turn(10.1) is None
    assert standby.turn(10.3) == ERA


@pytest.mark.parametrize(("members", "turn"), [((0,), None), ((0, 1), None), ((0, 1, 2), ERA), ((7, 8, 9), None)])
def test_more_than_half_of_the_newest_view_must_come(members: tuple[int, ...], turn: int | None) -> None:
    standby = Standby(4, TIMES, 0.0)
    asked(standby, view(0, 3, 0, 1, 2, 3), *members, now=6.0)
    assert standby.turn(6.0) == turn


def test_the_newest_view_decides_who_counts() -> None:
    standby = Standby(4, TIMES, 0.0)
    asked(standby, view(0, 3, 0, 1, 2, 3), 1, 2, 3, now=6.0)
    asked(standby, view(0, 4, 0), 0, now=6.0)
    assert standby.turn(6.0) == ERA, "0 was left alone, and is here"
    standby = Standby(4, TIMES, 0.0)
    asked(standby, view(0, 4, 0), 0, now=6.0)
    asked(standby, view(0, 3, 0, 1, 2, 3), 1, 2, 3, now=6.0 + 5 * ROUNDS)
    assert standby.turn(7.0 + 5 * ROUNDS) is None, "there is a newer view than the one that these announce"


def test_who_asked_long_ago_does_not_count() -> None:
    standby = Standby(2, TIMES, 0.0)
    asked(standby, view(0, 1, 0, 1), 0, now=6.0)
    asked(standby, view(0, 1, 0, 1), 1, now=6.1 + 5 * ROUNDS)
    assert standby.turn(6.1 + 5 * ROUNDS) is None
    asked(standby, view(0, 1, 0, 1), 0, now=7 + 5 * ROUNDS)
    assert standby.turn(7 + 5 * ROUNDS) == ERA


def test_before_there_is_a_view_all_first_replicas_must_come() -> None:
    standby = Standby(3, TIMES, 0.0)
    asked(standby, None, 0, 1, now=6.0)
    assert standby.turn(6.0) is None
    asked(standby, None, 2, now=6.0)
    assert standby.turn(6.0) == ERA


@pytest.mark.parametrize("known", [0, 5, ERA, ERA + 7, 3 * ERA])
def test_its_incarnation_is_above_all_that_are_known_and_those_of_mere_restarts(known: int) -> None:
    standby = Standby(1, TIMES, 0.0)
    asked(standby, view(known, 1, 0), 0, now=6.0)
    turn = standby.turn(6.0)
    assert turn is not None
    assert turn > known + 1000
    assert turn % ERA == 0


# -- no two act -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", range(1, 7))
def test_no_two_sides_of_a_broken_network_both_go_on(size: int) -> None:
    """One side's coordinator loses the others one by one, in any order, as far as it may; the other takes over."""
    everyone, both, either = set(range(size)), 0, 0
    for there in itertools.chain.from_iterable(itertools.combinations(range(size), n) for n in range(size + 1)):
        members = set(everyone)
        for member in there:
            if may_lose(member, members, everyone):
                members -= {member}
        stays = members.isdisjoint(there)               # else it waits for some of them, for ever
        begins = may_begin(there, everyone)
        both += stays and begins
        either += stays or begins
    assert both == 0
    assert either == 2 ** size, "one of them always goes on"


def test_a_majority_that_is_none_would_let_both_go_on() -> None:
    """The negative control: half is not enough for whoever begins."""
    assert may_lose(3, {0, 1, 3}, {0, 1, 2, 3})
    assert not may_begin({2, 3}, {0, 1, 2, 3})
    assert may_begin({2, 3}, {0, 1, 2, 3}, dead={1})


def returned(quorum: bool, heard: int) -> Registrar:
    """A coordinator that came back to four members, of whom only some are heard."""
    registrar = Registrar(4, 1, 1)
    registrar.quorum = quorum
    for member in range(heard):
        Rank(member).announce(registrar, view(0, 2, 0, 1, 2, 3))
    return registrar


def test_a_coordinator_that_came_back_does_not_go_on_with_half_where_another_may_act() -> None:
    assert returned(quorum=False, heard=2).grace_over()
    assert returned(quorum=True, heard=3).grace_over()
    registrar = returned(quorum=True, heard=2)
    assert not registrar.grace_over()
    assert registrar.holding
    Rank(2).announce(registrar, view(0, 2, 0, 1, 2, 3))
    assert registrar.grace_over()
    assert registrar.core.view.members == (0, 1, 2)


def test_known_deaths_count_for_nothing() -> None:
    """Two of four are dead for certain: the other two are all there is."""
    registrar = returned(quorum=True, heard=2)
    for member in (2, 3):
        late = Rank(member)
        registrar.departed.add(late.identity.endpoint)
    assert registrar.grace_over()
    assert registrar.core.view.members == (0, 1)


def test_the_base_is_what_the_last_complete_exchange_had_without_the_dead() -> None:
    registrar = Registrar(4, 1, 0)
    ranks = [Rank(member).join(registrar) for member in range(4)]
    assert registrar.base == set()
    for rank in ranks:
        registrar.exchange(rank.connection, wire.Exchange((0, 1), b"x"))
    assert registrar.base == {0, 1, 2, 3}
    ranks[3].die(registrar)
    assert registrar.base == {0, 1, 2}
    registrar.gone(ranks[2].connection, "heartbeat", "silent")
    assert registrar.base == {0, 1, 2}, "silence is no death"
    assert registrar.core.view.members == (0, 1)
    assert not may_lose(1, registrar.core.view.members, registrar.base)
