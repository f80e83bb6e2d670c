"""Told to go: one replica, all of them, and a run with too few replicas left. SIGTERM to real processes."""
from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pytest
from harness import Cluster, Result, cluster, fault, run
from run_checks import computed, healthy

from recover.errors import LEFT
from recover.report.audit import audit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
STEPS, B = 8, 12
SLOW = dict(steps=STEPS, linger=0.03)


def until_computing(made: Cluster, replica: int, step: int, count: int = 2) -> None:
    """`replica` has begun its microbatch number `count` of `step`."""
    made.until(lambda: sum(said["step"] == step for said in made.said(replica, "microbatch")) >= count,
               f"replica {replica} computes in step {step}")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("reference"), "run_script:train", 1, settings=dict(steps=STEPS))


def state_hashes(result: Result, replica: int) -> dict[int, str]:
    return {step: receipt["state_hash"] for step, receipt in result.ranks[replica].receipts.items()}


def test_one_that_is_told_to_go_leaves_its_work_and_nothing_is_computed_again(tmp_path: Path, reference: Result) -> None:
    with cluster(tmp_path, "run_script:train", 3, settings=SLOW) as made:
        until_computing(made, 1, 3)
        made.signal(1, signal.SIGTERM)
        made.wait()
        result = made.collect()
    leaver = result.ranks[1]
    assert leaver.code == LEFT, result.show()
    assert leaver.end["status"] == "left"
    assert "told to go" in leaver.end["message"]
    healthy(result, STEPS)
    assert result.hash == reference.hash
    assert set(computed(result).values()) == {1}            # what it had done was not lost
    last = leaver.end["last_step"]
    who = Counter(result.ranks[0].receipts[last]["who"])
    assert 0 < who[1] <= B // 3, who                        # its sums are in the step after which it went
    assert all(1 not in result.ranks[0].receipts[step]["who"] for step in range(last + 1, STEPS))


def test_when_all_are_told_to_go_they_end_together(tmp_path: Path, reference: Result) -> None:
    with cluster(tmp_path, "run_script:train", 3, settings=SLOW) as made:
        until_computing(made, 2, 3)
        for replica in range(3):
            made.signal(replica, signal.SIGTERM)
        made.wait(seconds=20)
        result = made.collect()
    assert [rank.code for rank in result.ranks.values()] == [LEFT] * 3, result.show()
    assert audit(result.directory / "events").ok
    hooked = {tuple(said["step"] for said in rank.all("preempted")) for rank in result.ranks.values()}
    (steps,) = hooked                                       # once in each, all before the same step
    assert len(steps) == 1
    for rank in result.ranks.values():
        assert "like all others" in rank.end["message"]
        assert rank.end["last_step"] == steps[0] - 1
        expected = {step: h for step, h in state_hashes(reference, 0).items() if step < steps[0]}
        assert state_hashes(result, rank.replica) == expected
        assert [said["hash"] for said in rank.all("preempted")] == [expected[steps[0] - 1]]


@pytest.mark.parametrize("replicas", [1, 3])
def test_fewer_than_the_floor_stop_alike(tmp_path: Path, reference: Result, replicas: int) -> None:
    """With 1 replica the floor is met, and the run finishes: the negative control."""
    floor = {"RECOVER_MIN_REPLICAS": str(min(replicas, 3)), "RECOVER_BELOW": "stop"}
    plan = [fault(1, 4, "compute:1")] if replicas == 3 else []
    with cluster(tmp_path, "run_script:train", replicas, plan=plan, settings=dict(steps=STEPS),
                 per_replica={r: dict(environ=floor) for r in range(replicas)}) as made:
        made.wait()
        result = made.collect()
    if replicas == 1:
        assert result.hash == reference.hash
        return
    for rank in (result.ranks[0], result.ranks[2]):
        assert rank.code == LEFT, result.show()
        assert rank.end["message"] == "stopped after step 3: 2 replicas are left, the run wants 3"
        assert [said["step"] for said in rank.all("preempted")] == [4]


def test_below_the_floor_the_run_waits_and_can_still_be_told_to_go(tmp_path: Path) -> None:
    floor = {"RECOVER_MIN_REPLICAS": "2", "RECOVER_BELOW": "wait"}
    with cluster(tmp_path, "run_script:train", 2, plan=[fault(1, 4, "compute:1")], settings=dict(steps=STEPS),
                 per_replica={r: dict(environ=floor) for r in range(2)}) as made:
        made.wait([1])
        made.until(lambda: "the run waits: it has 1 replicas" in made.show(), "replica 0 waits")
        assert [said["step"] for said in made.said(0, "step")] == [0, 1, 2, 3]
        made.signal(0, signal.SIGTERM)
        made.wait()
        result = made.collect()
    assert result.ranks[0].code == LEFT, result.show()
    assert [said["step"] for said in result.ranks[0].all("step")] == [0, 1, 2, 3]


def test_below_the_floor_the_run_goes_on_when_somebody_joins(tmp_path: Path, reference: Result) -> None:
    floor = {"RECOVER_MIN_REPLICAS": "2", "RECOVER_BELOW": "wait"}
    with cluster(tmp_path, "run_script:train", 2, plan=[fault(1, 4, "compute:1")], settings=dict(steps=STEPS),
                 per_replica={r: dict(environ=floor) for r in range(2)}) as made:
        made.wait([1])
        made.until(lambda: "the run waits: it has 1 replicas" in made.show(), "replica 0 waits")
        made.start_rank(1)
        made.wait()
        result = made.collect()
    assert [rank.code for rank in result.ranks.values()] == [0, 0], result.show()
    assert result.hash == reference.hash
    after = [receipt["members"] for step, receipt in result.ranks[0].receipts.items() if step >= 4]
    assert after == [[0, 1]] * (STEPS - 4), result.show()


@pytest.mark.parametrize("place", ["compute:1", "reduce:1"])
def test_a_spare_takes_over_and_no_survivor_computes_one_more(tmp_path: Path, reference: Result, place: str) -> None:
    result = run(tmp_path, "run_script:train", 4, plan=[fault(1, 4, place)], settings=dict(steps=STEPS),
                 per_replica={r: dict(environ={"RECOVER_SPARES": "1"}) for r in range(4)})
    healthy(result, STEPS)
    assert result.hash == reference.hash
    for replica in (0, 2):
        per_step = Counter(said["step"] for said in result.ranks[replica].all("microbatch"))
        per_step[0] -= 1                                    # the one that `exact` discards
        assert per_step == dict.fromkeys(range(STEPS), B // 3), (replica, per_step)
    spare = Counter(said["step"] for said in result.ranks[3].all("microbatch"))
    assert spare == {0: 1} | dict.fromkeys(range(4, STEPS), B // 3), spare


def test_one_rank_is_told_and_its_replica_leaves_as_a_whole(tmp_path: Path) -> None:
    from ranks_harness import grid
    settings = {"layout": "fsdp", "linger": 0.05}
    with grid(tmp_path, 2, 2, settings=settings) as made:
        until_computing(made, 3, 1)
        made.signal(3, signal.SIGTERM)                      # replica 1, position 1
        made.wait()
        result = made.collect()
    assert [rank.code for rank in result.ranks.values()] == [0, 0, LEFT, LEFT], result.show()
    assert {rank.end["last_step"] for rank in (result.ranks[2], result.ranks[3])} == {1}
    assert set(computed(result).values()) == {2}            # once, by both positions of one replica
    assert audit(result.directory / "events").ok
