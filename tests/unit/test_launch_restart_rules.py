"""Which replicas are started again: every rule, and its negative."""
from __future__ import annotations

from typing import Any

import pytest

from recover.launch.restarts import FIRST, LONGEST, Again, Life, Out, Restarts


def life(how: str = "killed", replica: int = 1, **values: Any) -> Life:
    return Life(replica=replica, how=how, **{"joined": True, "committed": False, **values})  # type: ignore[arg-type]


def over(restarts: Restarts, end: Life, *, going_on: bool = True, held: bool = True) -> Again | Out:
    return restarts.over(end, going_on=going_on, held=held)


@pytest.mark.parametrize("how", ["killed", "failed", "evicted"])
def test_a_dead_replica_is_started_again(how: str) -> None:
    assert over(Restarts(3), life(how)) == Again(1, FIRST, 1)
    assert over(Restarts(0), life(how)) == Out(1)


@pytest.mark.parametrize("how", ["finished", "told"])
def test_who_went_in_order_is_not(how: str) -> None:
    assert over(Restarts(3), life(how, committed=True)) == Out(1)


def test_a_script_that_fails_before_it_ever_joined_is_not_but_a_killed_one_is() -> None:
    answer = over(Restarts(3), life("failed", joined=False))
    assert isinstance(answer, Out)
    assert "before it had joined" in answer.reason
    assert isinstance(over(Restarts(3), life("killed", joined=False)), Again)


def test_one_that_had_joined_before_may_fail_to_join_again() -> None:
    restarts = Restarts(2)
    assert over(restarts, life()) == Again(1, FIRST, 1)
    assert over(restarts, life("failed", joined=False)) == Again(1, 2 * FIRST, 2)


def test_the_budget_is_per_step_committed() -> None:
    restarts = Restarts(2)
    counts = [over(restarts, life(committed=n == 2)) for n in range(5)]
    assert counts[:4] == [Again(1, FIRST, 1), Again(1, 2 * FIRST, 2), Again(1, FIRST, 1), Again(1, 2 * FIRST, 2)]
    assert isinstance(counts[4], Out)
    assert "started again 2 times and has not committed a step since" in counts[4].reason
    assert over(restarts, life(replica=2)) == Again(2, FIRST, 1)         # each has its own budget


def test_pauses_double_up_to_a_limit() -> None:
    restarts = Restarts(100)
    pauses = [answer.pause for _ in range(100) if isinstance(answer := over(restarts, life()), Again)]
    assert pauses[:4] == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST]
    assert pauses == sorted(pauses)
    assert (len(pauses), pauses[-1]) == (100, LONGEST)


def test_nobody_is_started_for_a_run_that_has_ended_or_lost_its_parameters() -> None:
    assert over(Restarts(3), life(), going_on=False) == Out(1)
    answer = over(Restarts(3), life(), held=False)
    assert isinstance(answer, Out)
    assert "nobody is left" in answer.reason
