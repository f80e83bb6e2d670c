"""Microbatches that kill: when one is blamed, and when it may be put aside."""
from __future__ import annotations

import pickle

import pytest

from recover.errors import Poisoned
from recover.protocol.coordinator import Coordinator
from recover.protocol.decision import Job, decide
from recover.protocol.messages import Endpoint, Report
from recover.workload.balanced import Balanced

KILLER = (4, 2)


def coordinator(members=5):
    made = Coordinator(members)
    for m in range(members):
        made.joined(m, (Endpoint("host", m),))
    return made


def test_one_death_may_be_chance_and_two_are_not():
    c = coordinator()
    c.hand(0, 0, KILLER)
    c.lost(0)
    assert c.view.killers == ()
    c.hand(1, 0, (4, 3))
    c.lost(1)
    assert c.view.killers == ()
    c.hand(2, 0, KILLER)
    c.lost(2)
    assert c.view.killers == (KILLER,)
    c.change()
    assert c.view.killers == (KILLER,)


def test_whoever_is_over_it_did_not_die_of_it():
    c = coordinator()
    for m in (0, 1):
        c.hand(m, 0, KILLER)
        c.hand(m, 0, None)
        c.lost(m)
    assert c.view.killers == ()


def test_the_ranks_of_a_replica_count_once():
    c = coordinator()
    for rank in (0, 1):
        c.hand(0, rank, KILLER)
    c.lost(0)
    assert c.view.killers == ()


def test_what_is_remembered_is_bounded():
    c = coordinator(1)
    for step in range(1000):
        for _ in (0, 1):
            c.hand(0, 0, (step, 0))
            c.blame(0)
    assert len(c.killers) <= 64
    assert len(c.deaths) <= 8


def reports(reduced=(), step=4, **more):
    """Members 0 and 1 of three; 2 died owing microbatches 2 and 5 of step 4."""
    owes = {0: {0, 3}, 1: {1, 4}}
    return {m: Report(step, level=True, owes={4: frozenset(owes[m])}, buckets=((1, 2),), vectors={0: {0: 1.0, 1: 1.0}},
                      reduced=frozenset(reduced), **more) for m in owes}


def job(spares=True, **more):
    return Job(6, 10, Balanced(), spares_killers=spares, **more)


def shared(decision):
    return sorted(i for part in decision.extra.values() for i in part)


def test_without_a_killer_all_that_is_lost_is_shared_out():
    decision = decide((0, 1), reports(), job())
    assert (shared(decision), decision.skipped) == ([2, 5], frozenset())


def test_a_killer_is_skipped():
    decision = decide((0, 1), reports(), job(), (KILLER,))
    assert (shared(decision), decision.lost, decision.skipped) == ([5], {5}, {KILLER})


def test_a_killer_stops_the_run():
    with pytest.raises(Poisoned, match="microbatch 2 of step 4") as stopped:
        decide((0, 1), reports(), job(False), (KILLER,))
    assert stopped.value.code == 65
    assert str(pickle.loads(pickle.dumps(stopped.value))) == str(stopped.value)


def test_what_an_earlier_decision_skipped_stays_skipped():
    """Also for a coordinator that came back and knows nothing."""
    decision = decide((0, 1), reports(skipped=frozenset({KILLER})), job(False))
    assert (shared(decision), decision.skipped) == ([5], {KILLER})


@pytest.mark.parametrize("killer", [(4, 1), (3, 2), (5, 2)])
def test_what_somebody_owes_or_another_step_has_is_not_skipped(killer):
    decision = decide((0, 1), reports(), job(), (killer,))
    assert (shared(decision), decision.skipped) == ([2, 5], frozenset())


def test_a_killer_that_is_in_some_bucket_is_not_skipped():
    """Bucket 0 is whole, with it inside: in bucket 1, too, it must be."""
    decision = decide((0, 1), reports(reduced={(0, 0)}), job(), (KILLER,))
    assert (shared(decision), decision.skipped) == ([2, 5], frozenset())


def test_what_is_skipped_on_purpose_is_not_lost():
    decision = decide((0, 1), reports(), job(skip=frozenset({KILLER, (9, 0)})))
    assert shared(decision) == [5]
