"""`fast`: each step's gradient is the mean of its B microbatch gradients but for rounding; a survivor redoes nothing."""
from __future__ import annotations

import pytest
from harness import fault, run
from run_checks import computed, healthy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

TRAIN = "run_script:train"
STEPS = 8
SETTINGS = dict(reduction="fast", steps=STEPS, reference=True)


def accurate(result):
    """Every survivor replayed all microbatches of each step by itself, and summed their gradients in float64."""
    errors = [said["relative"] for rank in result.ranks.values() for said in rank.all("error")]
    assert len(errors) >= STEPS * len(result.survivors)
    assert max(errors) <= 1e-6
    assert max(errors) > 0.0                                    # else something was compared with itself


@pytest.mark.parametrize("replicas", [1, 3, 4])
def test_without_failures(tmp_path, replicas):
    result = run(tmp_path, TRAIN, replicas, settings=SETTINGS)
    healthy(result, STEPS, exact=False)
    accurate(result)


@pytest.mark.parametrize("plan", [
    [fault(2, 0, "compute:1")],
    [fault(0, 1, "backward:1"), fault(3, 4, "compute:0")],
    [fault(1, 3, "reduce:0"), fault(2, 3, "recompute")],
    [fault(1, 3, "reduce:2"), fault(2, 3, "redo")],
    [fault(0, 2, "complete"), fault(1, 4, "fence"), fault(3, 5, "optimizer")],
    [fault(1, 2, "between"), fault(2, 6, "exchange"), fault(0, 6, "reduce:1")],
], ids=lambda plan: ", ".join(f"{f['place']} {f['step']}" for f in plan))
def test_in_steps_with_failures(tmp_path, plan):
    result = run(tmp_path, TRAIN, 4, plan=plan, settings=SETTINGS)
    healthy(result, STEPS, exact=False)
    accurate(result)


def test_only_what_was_lost_is_computed_again(tmp_path):
    """Replica 3 dies at its third microbatch: three survivors take one each of the three that it owed, and no more."""
    result = run(tmp_path, TRAIN, 4, plan=[fault(3, 4, "compute:2")], settings=SETTINGS | {"reference": False})
    healthy(result, STEPS, exact=False)
    again = {name: n for name, n in computed(result, exact=False).items() if n != 1}
    assert again == {(4, 9): 2, (4, 10): 2}                     # done by the casualty, then by a survivor; the third once
    recomputed = [recovery["recomputed"] for recovery in result.recoveries()]
    assert sorted(recomputed) == [1, 1, 1]
    who = result.survivors[0].receipts[4]["who"]
    assert sorted(who[9:]) == [0, 1, 2]


def test_what_is_reduced_is_not_computed_again(tmp_path):
    """All buckets but the last were reduced when it died: its share is in them, and only the last is made anew."""
    result = run(tmp_path, TRAIN, 4, plan=[fault(3, 4, "complete")], settings=SETTINGS | {"reference": False})
    healthy(result, STEPS, exact=False)
    plain = run(tmp_path, TRAIN, 4, settings=SETTINGS | {"reference": False})
    for mine, theirs in zip(result.survivors[0].all("step"), plain.ranks[0].all("step"), strict=True):
        assert float.fromhex(mine["loss"]) == pytest.approx(float.fromhex(theirs["loss"]), rel=1e-5)


def test_a_negative_control_of_the_measure(tmp_path):
    """A gradient that lacks one of its microbatches is told from a right one by orders of magnitude."""
    result = run(tmp_path, "run_script:loses_one", 1, settings=SETTINGS, expect_dead=[])
    assert min(said["relative"] for said in result.ranks[0].all("error")) > 1e-3
