"""`run.evaluate`: each sample of the set once, whoever is alive, and training none the wiser."""
from __future__ import annotations

import math
from collections import Counter

import pytest
from harness import fault, run
from run_checks import healthy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

STEPS, SAMPLES = 7, 37
DUE = [0, 3, 6, STEPS]


def go(folder, replicas, plan=(), script="run_script:evaluates", **settings):
    return run(folder, script, replicas, plan=plan, settings=dict(steps=STEPS) | settings)


def scores(result):
    """By step; the same on every survivor, to the bit."""
    given = [[(said["step"], said["scores"]) for said in rank.all("evaluation")] for rank in result.survivors]
    assert all(each == given[0] for each in given), result.show()
    assert [step for step, _ in given[0]] == DUE
    return given[0]


def scored(result, step, replicas=None):
    """sample -> how often it was scored in `step`."""
    return Counter(n for rank in result.ranks.values() if replicas is None or rank.replica in replicas
                   for said in rank.all("scored") if said["step"] == step for n in said["samples"])


def sound(result, exact=True):
    healthy(result, STEPS, exact=exact)
    for _, given in scores(result):
        assert given["sum of numbers"] * math.ceil(SAMPLES / 4) == pytest.approx(sum(range(SAMPLES)))
    for said in result.survivors[0].all("evaluation"):
        assert said["scores"]["loss"] == pytest.approx(said["truth"], rel=1e-5)


def test_without_failures(tmp_path):
    result = go(tmp_path, 3)
    sound(result)
    for step in DUE:
        assert scored(result, step) == Counter(range(SAMPLES))
        for replica in range(3):
            assert 8 <= scored(result, step, [replica]).total() <= 16    # shared out
    plain = go(tmp_path, 1, script="run_script:train")
    assert result.hash == plain.hash                                     # training is as it would be without


@pytest.mark.parametrize("plan", [
    [fault(2, 3, "compute:2")], [fault(0, 3, "reduce:2")], [fault(1, 3, "complete")], [fault(0, 6, "optimizer")],
    [fault(1, 3, "compute:1"), fault(2, 3, "recompute")], [fault(2, STEPS, "compute:1")], [fault(0, STEPS, "complete")]])
def test_a_death(tmp_path, plan):
    """The scores are the failure-free ones to the bit; survivors score nothing twice."""
    result, reference = go(tmp_path, 3, plan), go(tmp_path, 2)
    sound(result)
    assert result.hash == reference.hash
    assert scores(result) == scores(reference)
    survivors = [rank.replica for rank in result.survivors]
    for step in DUE:
        assert max(scored(result, step, survivors).values()) == 1
        assert set(scored(result, step)) == set(range(SAMPLES))


def test_fast_and_fewer_microbatches_than_replicas(tmp_path):
    sound(go(tmp_path, 3, [fault(1, 3, "reduce:1")], reduction="fast"), exact=False)
    sound(go(tmp_path, 3, [fault(1, 3, "complete")], microbatches=2))


@pytest.mark.parametrize(("name", "values", "said"), [
    ("steps", (7, 8), ("'7 steps'", "'8 steps'")),
    ("samples", (37, 41), ("'evaluation: 37 samples in batches of 4", "'evaluation: 41 samples in batches of 4"))])
def test_replicas_that_evaluate_differently(tmp_path, name, values, said):
    result = run(tmp_path, "run_script:evaluates", 2, expect_dead=range(2),
                 per_replica={r: {"settings": {"steps": STEPS, name: value}} for r, value in enumerate(values)})
    for rank in result.ranks.values():
        assert "the replicas' scripts differ" in rank.output
        assert all(f"replica {r} has {text}" in rank.output for r, text in enumerate(said)), rank.output


def test_a_policy_that_does_not_keep_b_is_refused(tmp_path):
    """Who dies would take its part of the set along."""
    result = run(tmp_path, "run_script:evaluates", 1, expect_dead=[0], settings={"policy": "shrinking"})
    assert "the policy 'shrinking' lets microbatches go with the dead" in result.ranks[0].output


def test_a_negative_control(tmp_path):
    """Microbatches that also bring along the first batch of the next one."""
    result = go(tmp_path, 3, script="run_mutants:scores_twice")
    with pytest.raises(AssertionError):
        sound(result)
    assert max(scored(result, 0).values()) > 1


def test_a_table_of_scores_that_holds_a_microbatch_twice_ends_the_run(tmp_path):
    result = run(tmp_path, "run_mutants:enters_twice", 2, expect_dead=range(2), settings=dict(steps=STEPS))
    for rank in result.ranks.values():
        assert "AssertionError: I1: the metrics hold microbatches [2" in rank.output
        assert not rank.receipts
