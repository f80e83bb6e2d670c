"""Who computes what changes nothing in `exact`, except for the policy that lets the batch shrink."""
from __future__ import annotations

import pytest
from harness import fault, run
from run_checks import computed, healthy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

TRAIN = "run_script:train"
STEPS = 8


@pytest.mark.parametrize("policy", ["speed", "roles", "balanced"])
def test_the_policy_changes_no_bit(tmp_path, policy):
    plan = [fault(1, 1, "compute:1"), fault(0, 4, "reduce:2"), fault(2, 6, "complete")]
    result = run(tmp_path, TRAIN, 4, plan=plan, settings=dict(steps=STEPS, policy=policy))
    healthy(result, STEPS)
    alone = run(tmp_path, TRAIN, 1, settings=dict(steps=STEPS))
    assert result.hash == alone.hash
    assert result.losses == alone.losses


def test_a_spare_steps_in_and_nothing_is_recomputed(tmp_path):
    """Five replicas of one microbatch. After one died there are two majors, a minor and a spare behind the first major."""
    plan = [fault(4, 1, "compute:0"), fault(0, 4, "compute:1")]
    result = run(tmp_path, TRAIN, 5, plan=plan, settings=dict(steps=STEPS, microbatches=5, policy="roles"))
    healthy(result, STEPS)
    assert result.hash == run(tmp_path, TRAIN, 1, settings=dict(steps=STEPS, microbatches=5)).hash
    receipts = result.survivors[0].receipts
    assert [receipts[3]["who"].count(m) for m in range(5)] == [2, 2, 1, 0, 0]
    assert [receipts[4]["who"].count(m) for m in range(5)] == [0, 2, 1, 2, 0]       # 3 was 0's spare
    assert computed(result)[3, 0] == computed(result)[3, 1] == 2                    # by the major, and its shadow
    assert sum(line.attributes["recomputed"] for rank in result.survivors for line in rank.events("recover.recovery")
               if line.step == 4) == 0


def test_shrinking_shrinks_and_its_receipts_say_so(tmp_path):
    result = run(tmp_path, TRAIN, 4, plan=[fault(1, 3, "compute:1")], settings=dict(steps=STEPS, policy="shrinking"))
    healthy(result, STEPS)
    receipts = result.survivors[0].receipts
    assert [receipts[step]["divisor"] for step in range(STEPS)] == [12.0] * 3 + [9.0] * 5
    assert receipts[7]["who"].count(-1) == 3
    assert receipts[7]["policy_constant"] is False
    assert result.hash != run(tmp_path, TRAIN, 1, settings=dict(steps=STEPS)).hash


@pytest.mark.parametrize("kind", ["linger", "drag"])
def test_who_takes_ten_times_as_long_is_given_less(tmp_path, kind):
    """Also where a script takes its time after the backward."""
    result = run(tmp_path, TRAIN, 3, settings=dict(steps=20, policy="speed", linger=0.003), per_replica={
        1: {"settings": {kind: 0.03}}})
    healthy(result, 20)
    who = result.survivors[0].receipts[19]["who"]
    assert who.count(1) <= 2
