"""`Spares`: who works, who takes over, and that a loss costs no survivor a microbatch while there are enough spares."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover.workload import Balanced, Spares, SpeedWeighted

LEVEL = dict.fromkeys(range(6), 1.0)


def owed(policy, vector, total):
    return {m: len(work) for m, work in policy.plan(vector, 0, total).work.items()}


def after(policy, vector, total, dead):
    """member -> microbatches owed, once `dead` died before they had reduced anything."""
    plan = owed(policy, vector, total)
    lost = [i for m in dead for i in policy.plan(vector, 0, total).work.get(m, ())]
    able = [m for m in vector if m not in dead and vector[m]]
    parts = policy.share(sorted(lost), able, vector, {m: plan.get(m, 0) for m in able})
    assert sorted(i for part in parts.values() for i in part) == sorted(lost)
    return {m: (plan.get(m, 0), len(parts.get(m, ()))) for m in able}


def test_the_last_ones_are_spares_and_fewer_after_a_death():
    policy = Spares(Balanced(), 2, 6)
    assert owed(policy, LEVEL, 12) == {0: 3, 1: 3, 2: 3, 3: 3}
    assert owed(policy, dict.fromkeys((0, 2, 3, 4, 5), 1.0), 12) == {0: 3, 2: 3, 3: 3, 4: 3}
    assert owed(policy, dict.fromkeys((0, 4, 5), 1.0), 12) == {0: 4, 4: 4, 5: 4}
    assert owed(policy, LEVEL | {6: 1.0, 7: 0.0}, 15) == dict.fromkeys(range(5), 3)     # grown: two are spares still


@given(st.integers(2, 6), st.integers(1, 5), st.integers(6, 60), st.data())
def test_no_survivor_computes_one_more_while_there_are_enough_spares(working, spares, total, data):
    policy = Spares(Balanced(), spares, working + spares)
    dead = data.draw(st.lists(st.integers(0, working - 1), unique=True, min_size=1, max_size=min(spares, working - 1)))
    shares = after(policy, dict.fromkeys(range(working + spares), 1.0), total, dead)
    assert all(more == 0 for m, (_, more) in shares.items() if m < working), shares


def test_without_spares_survivors_do():
    """The negative control: three share out what the fourth leaves."""
    assert after(Balanced(), dict.fromkeys(range(4), 1.0), 12, [1]) == {0: (3, 1), 2: (3, 1), 3: (3, 1)}


def test_more_dead_than_spares_are_shared_out():
    shares = after(Spares(Balanced(), 1, 5), dict.fromkeys(range(5), 1.0), 16, [0, 1])
    assert shares == {2: (4, 2), 3: (4, 1), 4: (0, 5)}     # the spare a whole quota, the rest level
    assert after(Spares(SpeedWeighted(), 1, 4), dict.fromkeys(range(4), 1.0), 9, [0]) == {1: (3, 0), 2: (3, 0), 3: (0, 3)}


def test_nobody_left_to_work_is_refused():
    with pytest.raises(ValueError, match="of 2 replicas 2 can't be spares"):
        Spares(Balanced(), 2, 2)


def test_replicas_compare_all_settings():
    assert repr(Spares(Balanced(), 1, 4)) == "Spares(inner=Balanced(name='balanced', constant=True), spares=1, replicas=4)"
