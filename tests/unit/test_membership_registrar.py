"""The coordinator without sockets or clocks: ranks come and go over doubles of connections."""
from __future__ import annotations

from typing import Any

import pytest

from recover.membership import wire
from recover.membership.answers import Answer
from recover.membership.registrar import CLOSED, Registrar
from recover.protocol.coordinator import Announcement
from recover.protocol.messages import Endpoint, View


class Rank:
    """A process of a replica, and its present connection; `told` is what it was sent, decoded from the very frames."""

    def __init__(self, replica: int, rank: int = 0, ranks: int = 1, life: str = "", **facts: Any) -> None:
        life = life or f"life-{replica}-{rank}"
        endpoint = Endpoint(life, 1000 * replica + rank)
        self.identity = wire.Identity(replica, rank, ranks, life, endpoint, 5.0, facts or {"B": 8})
        self.connection = Wire()

    @property
    def told(self) -> list[Any]:
        return self.connection.told

    @property
    def views(self) -> list[View]:
        return [m.view for m in self.told if isinstance(m, wire.NewView)]

    def last(self, kind: type[wire.Message]) -> Any:
        return [m for m in self.told if isinstance(m, kind)][-1]

    def join(self, registrar: Registrar) -> Rank:
        registrar.join(self.connection, self.identity)
        return self

    def announce(self, registrar: Registrar, view: View, clean: bool = True) -> Rank:
        """Over a new connection."""
        self.connection = Wire()
        registrar.announce(self.connection, self.identity, Announcement(view, clean))
        return self

    def die(self, registrar: Registrar) -> None:
        registrar.gone(self.connection, "eof", "closed")


class Wire:
    def __init__(self) -> None:
        self.told: list[Any] = []
        self.ended = False

    def send(self, message: wire.Message) -> None:
        self.write(wire.encode(message), type(message).__name__, 1)

    def write(self, frames: bytes, kind: str, count: int) -> None:
        messages = wire.from_coordinator().feed(frames)
        assert [type(m).__name__ for m in messages] == [kind] * count
        if not self.ended:
            self.told += messages

    def end(self) -> None:
        self.ended = True


def run(replicas: int, ranks: int = 1) -> tuple[Registrar, list[Rank]]:
    """A run in its first view; ranks by replica and position."""
    registrar = Registrar(replicas, ranks, 0)
    return registrar, [Rank(m, p, ranks).join(registrar) for m in range(replicas) for p in range(ranks)]


# -- forming --------------------------------------------------------------------------------------------------------
def test_the_first_view_waits_for_all_ranks_of_all_first_replicas() -> None:
    registrar = Registrar(2, 2, 0)
    ranks = [Rank(m, p, 2) for m, p in ((0, 0), (1, 0), (0, 1))]
    for rank in ranks:
        rank.join(registrar)
    assert registrar.missing() == ("replica 1 rank 1",)
    assert not any(rank.views for rank in ranks)
    ranks.append(Rank(1, 1, 2).join(registrar))
    assert registrar.missing() == ()
    assert {str(rank.views) for rank in ranks} == {str([registrar.core.view])}
    view = registrar.core.view
    assert view.members == (0, 1)
    assert view.forming
    assert view.endpoints[0] == (ranks[0].identity.endpoint, ranks[2].identity.endpoint)


def test_a_member_lost_before_the_first_view_is_only_awaited_again() -> None:
    registrar = Registrar(2, 1, 0)
    Rank(0).join(registrar).die(registrar)
    b = Rank(1).join(registrar)
    assert registrar.missing() == ("replica 0",)
    Rank(0, life="second").join(registrar)
    assert b.views[-1].members == (0, 1)
    assert len(b.views) == 1


def test_the_mates_of_a_rank_lost_before_the_first_view_are_told_to_go() -> None:
    registrar = Registrar(2, 2, 0)
    mate = Rank(0, 0, 2).join(registrar)
    Rank(0, 1, 2).join(registrar).die(registrar)
    assert "rank 1 of this replica was lost" in mate.last(wire.Refused).reason
    assert mate.last(wire.Refused).final
    assert mate.connection.ended
    assert registrar.missing() == ("replica 0", "replica 1")


# -- who may come in ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("facts", "reason"), [
    ({"B": 4}, "B differs: replica 1 rank 0 has 4, replica 0 rank 0 has 8"),
    ({"B": 8.0}, "B differs: replica 1 rank 0 has 8.0, replica 0 rank 0 has 8"),
    ({"B": 8, "seed": 1}, "seed differs: replica 1 rank 0 has 1, replica 0 rank 0 has no such fact"),
    ({"seed": 1}, "B differs: replica 1 rank 0 has no such fact, replica 0 rank 0 has 8"),
])
def test_facts_that_differ_are_refused_with_both_values(facts: dict[str, Any], reason: str) -> None:
    registrar = Registrar(2, 1, 0)
    Rank(0).join(registrar)
    stranger = Rank(1, **facts).join(registrar)
    assert stranger.last(wire.Refused) == wire.Refused(reason, True)
    assert stranger.connection.ended
    assert registrar.missing() == ("replica 1",)


def test_a_first_member_that_goes_takes_its_facts_along() -> None:
    registrar = Registrar(2, 1, 0)
    Rank(0, B=4).join(registrar).die(registrar)
    first, second = Rank(0).join(registrar), Rank(1).join(registrar)
    assert first.views == second.views == [registrar.core.view]


def test_another_number_of_ranks_is_refused() -> None:
    registrar = Registrar(2, 2, 0)
    assert "has 1 ranks; in this run it has 2" in Rank(0, 0, 1).join(registrar).last(wire.Refused).reason
    assert Rank(0, 2, 2).join(registrar).last(wire.Refused).final


def test_a_taken_position_is_refused_for_now_and_free_after_the_loss() -> None:
    registrar, ranks = run(2)
    successor = Rank(1, life="second").join(registrar)
    assert "taken" in successor.last(wire.Refused).reason
    assert not successor.last(wire.Refused).final
    ranks[1].die(registrar)
    successor = Rank(1, life="second").join(registrar)
    assert [view.members for view in ranks[0].views] == [(0, 1), (0,)]
    assert ranks[0].last(wire.NewPending).pending.view.members == (0, 1)         # with the fence


def test_the_same_life_may_come_back_over_another_connection_without_any_loss() -> None:
    registrar, ranks = run(2)
    old, view = ranks[1].connection, registrar.core.view
    ranks[1].announce(registrar, view, clean=False)
    assert old.ended
    registrar.gone(old, "eof", "late news")
    assert registrar.core.view is view
    assert ranks[1].told == [wire.Welcome(0)]
    ranks[0].die(registrar)
    assert ranks[1].views[-1].members == (1,)


def entered(registrar: Registrar, rank: Rank) -> None:
    registrar.entered(rank.connection, wire.Entered(rank.last(wire.NewPending).pending.view.id))


def test_a_late_joiner_is_let_in_with_the_fence() -> None:
    registrar, ranks = run(2)
    first = registrar.core.view
    joiner = Rank(7).join(registrar)
    pending = joiner.last(wire.NewPending).pending
    assert pending.base == first.id
    assert pending.view.members == (0, 1, 7)
    assert [rank.last(wire.NewPending).pending for rank in ranks] == [pending, pending]
    assert registrar.core.view is first
    entered(registrar, joiner)
    assert registrar.core.view == pending.view
    assert not joiner.views


def test_who_comes_while_another_is_let_in_is_next() -> None:
    registrar, _ = run(2)
    one, two = Rank(7).join(registrar), Rank(8).join(registrar)
    assert not [m for m in two.told if isinstance(m, wire.NewPending)]
    base = one.last(wire.NewPending).pending.view.id
    entered(registrar, one)
    assert two.last(wire.NewPending).pending.view.members == (0, 1, 7, 8)
    assert two.last(wire.NewPending).pending.base == base


def test_a_death_lets_joiners_in_at_once() -> None:
    registrar, ranks = run(2)
    joiners = [Rank(7).join(registrar), Rank(8).join(registrar)]
    ranks[1].die(registrar)
    assert [joiner.views[-1].members for joiner in joiners] == [(0, 7, 8)] * 2


def test_a_joiner_that_could_not_get_in_by_the_fence_says_so_and_gets_in_without() -> None:
    registrar, ranks = run(2)
    joiner = Rank(7).join(registrar)
    registrar.suspect(joiner.connection, wire.Suspect(joiner.last(wire.NewPending).pending.view.id, "not formed", None))
    assert joiner.views[-1].members == ranks[0].views[-1].members == (0, 1, 7)


def test_a_joiner_that_waits_when_the_run_ends_is_told() -> None:
    registrar, ranks = run(2)
    joiner = Rank(7).join(registrar)
    for rank in ranks:
        registrar.finish(rank.connection)
    assert joiner.last(wire.Refused).reason == "the run has finished"
    assert registrar.over


# -- going ----------------------------------------------------------------------------------------------------------
def test_a_replica_is_atomic() -> None:
    registrar, ranks = run(2, 2)
    ranks[3].die(registrar)
    assert registrar.core.view.members == (0,)
    assert "rank 1 of this replica was lost" in ranks[2].last(wire.Dropped).reason
    assert ranks[2].connection.ended
    assert [r.views[-1].members for r in ranks[:2]] == [(0,), (0,)]
    ranks[2].die(registrar)
    assert registrar.core.view.id == (0, 2)


def test_a_finished_replica_is_no_casualty_but_belongs_to_no_further_view() -> None:
    registrar, ranks = run(3)
    registrar.finish(ranks[0].connection)
    ranks[0].die(registrar)
    assert len(ranks[1].views) == 1
    ranks[2].die(registrar)
    assert ranks[1].views[-1].members == (1,)
    registrar.finish(ranks[1].connection)
    assert Rank(5).join(registrar).last(wire.Refused) == wire.Refused("the run has finished", True)


def test_a_leaver_makes_a_view_without_it() -> None:
    registrar, ranks = run(2)
    registrar.leave(ranks[0].connection)
    assert ranks[1].views[-1].members == (1,)
    assert ranks[0].connection.ended


def test_a_suspicion_makes_a_view_of_the_same_members_once() -> None:
    registrar, ranks = run(2)
    for rank in ranks:
        registrar.suspect(rank.connection, wire.Suspect((0, 1), "reset", None))
    assert [view.id for view in ranks[0].views] == [(0, 1), (0, 2)]
    assert ranks[1].views[-1].members == (0, 1)


# -- exchange -------------------------------------------------------------------------------------------------------
def test_an_exchange_is_answered_once_all_have_spoken() -> None:
    registrar, ranks = run(2)
    registrar.exchange(ranks[0].connection, wire.Exchange((0, 1), b"a"))
    assert not any(isinstance(m, wire.Parts) for m in ranks[0].told)
    registrar.exchange(ranks[1].connection, wire.Exchange((0, 1), b"b"))
    answer = Answer()
    answer.add(ranks[0].told[-1].chunk)
    assert answer.payloads == {0: b"a", 1: b"b"}
    assert ranks[0].told[-1] == ranks[1].told[-1]


def test_whoever_asks_again_over_a_new_connection_is_answered_again_and_nobody_else() -> None:
    registrar, ranks = run(2)
    for rank in ranks:
        registrar.exchange(rank.connection, wire.Exchange((0, 1), b"x"))
    before = len(ranks[1].told)
    ranks[0].announce(registrar, registrar.core.view, clean=False)
    registrar.exchange(ranks[0].connection, wire.Exchange((0, 1), b"x"))
    assert [type(m) for m in ranks[0].told] == [wire.Welcome, wire.Parts]
    assert len(ranks[1].told) == before


def test_an_exchange_of_a_former_view_is_dropped() -> None:
    registrar, ranks = run(2)
    registrar.suspect(ranks[0].connection, wire.Suspect((0, 1), "", None))
    for rank in ranks:
        registrar.exchange(rank.connection, wire.Exchange((0, 1), b"x"))
    assert not any(isinstance(m, wire.Parts) for m in ranks[0].told)


# -- coming back with nothing ---------------------------------------------------------------------------------------
def restarted(ranks: int = 1, first: int = 3) -> Registrar:
    return Registrar(first, ranks, 1)


def test_a_view_that_all_confirm_stands_and_nothing_is_pushed() -> None:
    old, ranks = run(3)
    view = old.core.view
    registrar = restarted()
    for rank in ranks:
        rank.announce(registrar, view)
    assert registrar.core.view == view
    assert not registrar.rebuilding
    assert all(rank.told == [wire.Welcome(1)] for rank in ranks)


def test_a_view_that_one_has_not_confirmed_is_replaced() -> None:
    old, ranks = run(3)
    registrar = restarted()
    for rank in ranks:
        rank.announce(registrar, old.core.view, clean=rank is not ranks[1])
    assert {str(rank.views) for rank in ranks} == {str([registrar.core.view])}
    assert registrar.core.view.id == (1, 1)
    assert registrar.core.view.members == (0, 1, 2)


def test_the_clean_rank_of_a_replica_does_not_speak_for_the_other() -> None:
    old, ranks = run(2, 2)
    registrar = restarted(ranks=2, first=2)
    for rank in ranks:
        rank.announce(registrar, old.core.view, clean=rank is not ranks[2])
    assert registrar.core.view.id == (1, 1)


def test_who_does_not_announce_in_time_is_out_and_told_when_it_comes() -> None:
    old, ranks = run(3)
    registrar = restarted()
    for rank in ranks[:2]:
        rank.announce(registrar, old.core.view)
    assert registrar.rebuilding
    assert registrar.missing() == ("replica 2",)
    registrar.grace_over()
    assert ranks[0].views[-1].members == (0, 1)
    ranks[2].announce(registrar, old.core.view)
    assert ranks[2].last(wire.Dropped).view == registrar.core.view
    assert ranks[2].connection.ended


def test_a_replica_of_which_one_rank_is_missing_is_out_and_its_other_rank_is_told() -> None:
    old, ranks = run(2, 2)
    registrar = restarted(ranks=2, first=2)
    for rank in ranks[:3]:
        rank.announce(registrar, old.core.view)
    registrar.grace_over()
    assert ranks[0].views[-1].members == (0,)
    assert ranks[2].last(wire.Dropped).view == registrar.core.view


def test_a_suspicion_during_the_rebuild_is_not_lost() -> None:
    """The view must not be adopted as it is: whoever suspects it waits for a new one."""
    old, ranks = run(2)
    registrar = restarted(first=2)
    ranks[0].announce(registrar, old.core.view)
    registrar.suspect(ranks[0].connection, wire.Suspect((0, 1), "", None))
    ranks[1].announce(registrar, old.core.view)
    assert ranks[0].views == ranks[1].views == [registrar.core.view]
    assert registrar.core.view.id == (1, 1)


def test_nobody_is_waited_for_that_is_known_to_have_died() -> None:
    old, ranks = run(3)
    registrar = restarted()
    ranks[2].announce(registrar, old.core.view)
    ranks[0].announce(registrar, old.core.view)
    ranks[2].die(registrar)
    assert registrar.rebuilding
    ranks[1].announce(registrar, old.core.view)
    assert not registrar.rebuilding
    assert ranks[0].views[-1].members == (0, 1)


def test_a_loss_makes_room_for_the_first_view() -> None:
    """One member of a former run hinders the first view as long as it is there, not longer."""
    old, ranks = run(3)
    registrar = Registrar(1, 1, 1)
    ranks[2].announce(registrar, old.core.view)
    fresh = Rank(0, life="fresh").join(registrar)
    assert not fresh.views
    ranks[2].die(registrar)
    assert fresh.views[-1].members == (0,)


def test_joiners_wait_until_the_view_is_rebuilt_and_are_then_let_in() -> None:
    old, ranks = run(2)
    registrar = restarted(first=2)
    joiner = Rank(5).join(registrar)
    ranks[0].announce(registrar, old.core.view)
    assert not joiner.views
    ranks[1].announce(registrar, old.core.view)
    assert joiner.views == [registrar.core.view]
    assert registrar.core.view.members == (0, 1, 5)


@pytest.mark.parametrize("first", ["joiner", "member"])
def test_one_that_never_got_the_newest_view_is_given_it(first: str) -> None:
    """The coordinator died while it pushed the first view: replica 0 got it, replica 1 did not."""
    old, ranks = run(2)
    view = old.core.view
    registrar = restarted(first=2)
    ranks[1].connection = Wire()
    steps = [lambda: ranks[1].join(registrar), lambda: ranks[0].announce(registrar, view)]
    for step in steps if first == "joiner" else reversed(steps):
        step()
    assert ranks[1].views == [view, registrar.core.view]
    assert registrar.core.view.id == (1, 1)
    assert registrar.core.view.members == (0, 1)


def test_a_successor_does_not_pass_for_the_member_whose_number_it_has() -> None:
    """Replica 1 died with the coordinator and was started again: it joins, it is not in the old view."""
    old, ranks = run(2)
    registrar = restarted(first=2)
    successor = Rank(1, life="second").join(registrar)
    ranks[0].announce(registrar, old.core.view)
    assert registrar.rebuilding
    registrar.grace_over()
    assert [view.members for view in ranks[0].views] == [(0,), (0, 1)]
    assert [view.members for view in successor.views] == [(0, 1)]


@pytest.mark.parametrize("order", ["old first", "new first"])
def test_an_evicted_life_that_wakes_up_does_not_pass_for_its_successor(order: str) -> None:
    old, ranks = run(2)
    first_view, evicted = old.core.view, ranks[1]
    evicted.die(old)
    successor = Rank(1, life="second").join(old)
    entered(old, successor)
    newest = old.core.view
    registrar = restarted(first=2)
    steps = [lambda: evicted.announce(registrar, first_view), lambda: successor.announce(registrar, newest)]
    for step in steps if order == "old first" else reversed(steps):
        step()
    ranks[0].announce(registrar, newest)
    assert registrar.core.view == newest
    assert successor.told == [wire.Welcome(1)]
    assert not evicted.views
    assert evicted.connection.ended


def test_an_evicted_life_alone_is_not_taken_for_the_member() -> None:
    old, ranks = run(2)
    first_view, evicted = old.core.view, ranks[1]
    evicted.die(old)
    entered(old, Rank(1, life="second").join(old))
    registrar = restarted(first=2)
    evicted.announce(registrar, first_view)
    ranks[0].announce(registrar, old.core.view)
    registrar.grace_over()
    assert [view.members for view in ranks[0].views] == [(0,)]
    assert evicted.connection.ended
    assert isinstance(evicted.told[-1], wire.Dropped)


def test_strangers_that_come_first_after_a_restart_do_not_shut_the_members_out() -> None:
    old, ranks = run(2)
    registrar = restarted(first=2)
    stranger = Rank(5, B=4).join(registrar)
    for rank in ranks:
        rank.announce(registrar, old.core.view)
    assert registrar.core.view == old.core.view
    assert "B differs: replica 5 rank 0 has 4" in stranger.last(wire.Refused).reason


def test_an_incarnation_used_twice_or_overtaken_acts_for_nobody() -> None:
    old, ranks = run(2)
    registrar = Registrar(2, 1, 0)
    ranks[0].announce(registrar, old.core.view)
    assert not ranks[0].last(wire.Refused).final
    assert not registrar.rebuilding
    registrar, ranks = run(2)
    before = registrar.core.view
    ranks[0].announce(registrar, View((1, 1), (0, 1), before.endpoints))
    assert isinstance(ranks[0].told[-1], wire.Refused)
    assert registrar.core.view == before


def test_who_finishes_while_the_view_is_rebuilt_is_not_kept_in_it() -> None:
    old, ranks = run(3)
    registrar = restarted()
    ranks[0].announce(registrar, old.core.view)
    registrar.finish(ranks[0].connection)
    ranks[0].die(registrar)
    for rank in ranks[1:]:
        rank.announce(registrar, old.core.view)
    assert ranks[1].views[-1].members == (1, 2)


# -- lifelines ------------------------------------------------------------------------------------------------------
def test_a_lifeline_ends_its_own_life_only() -> None:
    registrar = Registrar(2, 1, 0)
    zero, one = Rank(0).join(registrar), Rank(1).join(registrar)
    present, former = Wire(), Wire()
    registrar.lifeline(present, wire.Lifeline(1, 0, one.identity.life))
    registrar.lifeline(former, wire.Lifeline(1, 0, "another life"))
    broken = Wire()
    registrar.lifeline(broken, wire.Lifeline(1, 0, one.identity.life))
    registrar.gone(former, "eof", CLOSED)
    registrar.gone(broken, "eof", "[Errno 104] Connection reset by peer")
    assert [view.members for view in zero.views] == [(0, 1)]
    registrar.gone(present, "eof", CLOSED)
    assert [view.members for view in zero.views] == [(0, 1), (0,)]
    assert not registrar.lifelines
    one.die(registrar)                                      # its connection follows later: nothing more to say
    assert len(zero.views) == 2


def test_a_lifeline_that_ends_after_the_finish_is_no_loss() -> None:
    registrar = Registrar(2, 1, 0)
    zero, one = Rank(0).join(registrar), Rank(1).join(registrar)
    line = Wire()
    registrar.lifeline(line, wire.Lifeline(1, 0, one.identity.life))
    registrar.finish(one.connection)
    registrar.gone(line, "eof", CLOSED)
    assert [view.members for view in zero.views] == [(0, 1)]


def test_a_run_grows_up_to_its_limit() -> None:
    registrar = Registrar(1, 1, 0, most=2)
    first, second = Rank(0, 0, 1).join(registrar), Rank(1, 0, 1).join(registrar)
    assert second.last(wire.NewPending).pending.view.members == (0, 1)
    assert second.last(wire.NewPending) == first.last(wire.NewPending)
    third = Rank(2, 0, 1).join(registrar)
    assert third.connection.ended
    assert "this run has at most 2 replicas (--max-replicas), numbered from 0" in str(third.told)
    assert Rank(2, 0, 1).join(Registrar(1, 1, 0)).connection.ended is False        # no limit was given
