"""`exact`: parameters, optimizer state and losses are those of the failure-free run, to the bit, whatever happens."""
from __future__ import annotations

import signal
from itertools import product

import pytest
from harness import cluster, fault, run
from run_checks import computed, healthy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

TRAIN = "run_script:train"
PLACES = ("compute:0", "compute:1", "backward:0", "backward:1", "reduce:0", "reduce:1", "reduce:4", "complete", "fence",
          "optimizer", "between")
LONG, SHORT = 30, 6


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """steps -> a run of one replica."""
    made = {}

    def of(steps, **settings):
        key = (steps, *sorted(settings.items()))
        if key not in made:
            made[key] = run(tmp_path_factory.mktemp("reference"), TRAIN, 1, settings={"steps": steps, **settings})
        return made[key]
    return of


def same(result, reference, steps):
    healthy(result, steps)
    assert result.hash == reference.hash
    assert result.losses == reference.losses


@pytest.mark.parametrize("replicas", [2, 3, 4, 5])
def test_any_number_of_replicas(tmp_path, reference, replicas):
    result = run(tmp_path, TRAIN, replicas, settings={"steps": LONG})
    same(result, reference(LONG), LONG)
    assert result.lost() == []
    assert set(computed(result).values()) == {1}
    assert result.ranks[0].all("step")[-1]["buckets"] >= 3
    assert {tuple(receipt["view"]) for rank in result.survivors for receipt in rank.receipts.values()} == {(0, 1)}


@pytest.mark.parametrize(("number", "place"), list(enumerate(PLACES)))
def test_a_kill_at_each_place(tmp_path, reference, number, place):
    victim = number % 4                                         # the leader is among them
    result = run(tmp_path, TRAIN, 4, plan=[fault(victim, 12, place)], settings={"steps": LONG})
    same(result, reference(LONG), LONG)
    assert result.lost() == [victim]
    extra = sum(computed(result).values()) - LONG * 12          # computed by the victim, and again by a survivor
    assert 0 <= extra <= 3


@pytest.mark.parametrize("place", PLACES)
def test_kills_in_the_first_the_second_and_the_last_step(tmp_path, reference, place):
    """Step 1 is special: buckets are laid out anew. In the last two places of the last step nobody is missed any more."""
    plan = [fault(0, 0, place), fault(2, 1, place), fault(3, SHORT - 1, place)]
    result = run(tmp_path, TRAIN, 4, plan=plan, settings={"steps": SHORT})
    same(result, reference(SHORT), SHORT)


def pair(first, second):
    return [fault(1, 3, first), fault(2, 3, second)]


@pytest.mark.parametrize(("first", "second"), [
    ("compute:1", "compute:1"), ("backward:0", "reduce:1"), ("reduce:1", "reduce:4"), ("reduce:2", "complete"),
    ("complete", "complete"), ("complete", "optimizer"), ("fence", "fence"), ("optimizer", "compute:2"),
    ("compute:1", "exchange"), ("reduce:1", "exchange"), ("compute:1", "recompute"), ("reduce:2", "recompute"),
    ("compute:0", "redo"), ("reduce:1", "redo")])
def test_two_kills_in_one_step(tmp_path, reference, first, second):
    result = run(tmp_path, TRAIN, 4, plan=pair(first, second), settings={"steps": SHORT})
    same(result, reference(SHORT), SHORT)
    assert set(result.lost()) == {1, 2}


@pytest.mark.parametrize("giver_dies", [False, True])
def test_forwarding(tmp_path, reference, giver_dies):
    """Replica 3 lacks buckets that replicas 0 and 2 hold. The first holder gives them, or dies before it does."""
    plan = [fault(1, 3, "reduce:5"), *[fault(0, 3, "forward")] * giver_dies]
    result = run(tmp_path, TRAIN, 4, plan=plan, settings={"steps": SHORT},
                 per_replica={3: {"settings": {"forget": {"step": 3, "buckets": [0, 2]}}}})
    same(result, reference(SHORT), SHORT)
    assert any(recovery["forwarded"] for recovery in result.recoveries())


def test_the_receiver_of_a_bucket_dies(tmp_path, reference):
    plan = [fault(1, 3, "reduce:5"), fault(3, 3, "forward")]
    result = run(tmp_path, TRAIN, 4, plan=plan, settings={"steps": SHORT},
                 per_replica={3: {"settings": {"forget": {"step": 3, "buckets": [0, 2]}}}})
    same(result, reference(SHORT), SHORT)


def test_four_of_five_die_one_after_the_other(tmp_path, reference):
    plan = [fault(0, 2, "compute:1"), fault(4, 3, "reduce:2"), fault(1, 3, "recompute"), fault(3, 5, "between")]
    result = run(tmp_path, TRAIN, 5, plan=plan, settings={"steps": 8})
    same(result, reference(8), 8)
    assert [rank.replica for rank in result.survivors] == [2]


@pytest.mark.parametrize(("place", "steps"), list(product(("compute:1", "reduce:2", "complete", "fence", "between"), (SHORT,))))
def test_broken_connections_cost_nobody(tmp_path, reference, place, steps):
    plan = [fault(1, step, place, "cut") for step in (0, 1, 3)]
    result = run(tmp_path, TRAIN, 4, plan=plan, settings={"steps": steps})
    same(result, reference(steps), steps)
    assert result.lost() == []
    assert len(result.survivors) == 4
    assert set(computed(result).values()) == {1}
    assert result.recoveries()


@pytest.mark.parametrize("place", ["compute:1", "reduce:2", "optimizer"])
def test_a_frozen_replica_is_put_out_and_finds_out_when_it_wakes(tmp_path, reference, place):
    with cluster(tmp_path, TRAIN, 3, plan=[fault(2, 3, place, "stop")], settings={"steps": SHORT},
                 failure_timeout=2.0) as made:
        made.wait([0, 1])
        assert made.stopped(2)
        made.signal(2, signal.SIGCONT)
        made.wait([2])
        result = made.collect()
    same(result, reference(SHORT), SHORT)
    assert result.lost() == [2]
    assert result.ranks[2].code not in (0, None)
    assert result.ranks[2].end["status"] == "evicted", result.show()
    assert max(result.ranks[2].receipts, default=0) <= 3


@pytest.mark.parametrize("place", ["complete", "fence", "between"])
def test_broken_connections_at_the_finish_line(tmp_path, reference, place):
    """Some have passed the last fence and go; whoever has not must not wait for them."""
    plan = [fault(1, 2, "optimizer"), fault(0, 2, place, "cut")]
    result = run(tmp_path, TRAIN, 4, plan=plan, settings={"steps": 3})
    same(result, reference(3), 3)
    assert len(result.survivors) == 3


def test_a_short_nap_costs_nobody(tmp_path, reference):
    with cluster(tmp_path, TRAIN, 3, plan=[fault(2, 3, "compute:1", "stop")], settings={"steps": SHORT}) as made:
        made.until(lambda: made.stopped(2), "it naps")
        made.signal(2, signal.SIGCONT)
        made.wait()
        result = made.collect()
    same(result, reference(SHORT), SHORT)
    assert result.lost() == []
    assert not result.recoveries()


def test_first_values_are_those_of_the_first_replica(tmp_path, reference):
    """Other replicas may have begun with other parameters."""
    result = run(tmp_path, TRAIN, 3, plan=[fault(1, 3, "compute:1")], settings={"steps": SHORT},
                 per_replica={1: {"settings": {"init": 77}}, 2: {"settings": {"init": 78}}})
    same(result, reference(SHORT), SHORT)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_before_the_first_parameters_are_everywhere(tmp_path, reference, victim):
    result = run(tmp_path, TRAIN, 3, settings={"steps": SHORT}, expect_dead=[victim],
                 per_replica={victim: {"settings": {"dies": "form"}}})
    same(result, reference(SHORT), SHORT)
    assert result.lost() == [victim]


def test_slow_is_not_dead(tmp_path, reference):
    """One replica takes longer for its part of a step than the failure timeout."""
    result = run(tmp_path, TRAIN, 3, settings={"steps": 2}, failure_timeout=1.0, per_replica={1: {"settings": {"linger": 0.4}}})
    same(result, reference(2), 2)
    assert result.lost() == []
    assert not result.recoveries()
