"""Frozen, hung, or only busy: who is taken for dead, who is not, and what becomes of each."""
from __future__ import annotations

import signal
from pathlib import Path

import pytest
from harness import Result, cluster, fault, run
from ranks_harness import grid
from run_checks import healthy

from recover import events
from recover.errors import LEFT
from recover.report.audit import audit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

TRAIN = "run_script:train"
STEPS, TIMEOUT = 8, 1.5
SETTINGS = dict(steps=STEPS, linger=0.01)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"), TRAIN, 1, settings=dict(steps=STEPS)).hash


def causes(result: Result) -> list[tuple[int, str]]:
    """(replica, cause) of every loss, as the coordinator gives it."""
    return [(entry.line.attributes["lost"], entry.line.attributes["cause"])
            for path in sorted((result.directory / "events").glob("events-coordinator-*.jsonl"))
            for entry in events.read(path) if entry.line.event == events.REPLICA_LOST]


def views(result: Result) -> set[tuple[int, int]]:
    return {tuple(receipt["view"]) for rank in result.survivors for receipt in rank.receipts.values()}


@pytest.mark.parametrize(("replicas", "place"), [
    (2, "compute:1"), (3, "compute:1"), pytest.param(3, "complete", marks=pytest.mark.slow), (3, "reduce:1")])
def test_a_hung_training_thread_is_left_behind(tmp_path, alone, replicas, place):
    """Its heartbeats go on. The survivors finish, nobody else goes, and it leaves by itself."""
    result = run(tmp_path, TRAIN, replicas, plan=[fault(1, 3, place, "hang")], settings=SETTINGS, failure_timeout=TIMEOUT,
                 expect_dead=[1])
    healthy(result, STEPS)
    assert causes(result)[0] == (1, "hung"), result.show()
    assert [rank.replica for rank in result.survivors] == [r for r in range(replicas) if r != 1]
    assert result.hash == alone
    assert result.ranks[1].code == LEFT
    assert "its training thread does not notice" in result.ranks[1].output


def test_whoever_hangs_before_a_recovery_is_reported_is_left_behind(tmp_path, alone):
    """Two go at once: one dies, and another hangs before it has said what it holds."""
    result = run(tmp_path, TRAIN, 4, plan=[fault(3, 2, "compute:1"), fault(1, 2, "exchange", "hang")], settings=SETTINGS,
                 failure_timeout=TIMEOUT, expect_dead=[1, 3])
    healthy(result, STEPS)
    assert [rank.replica for rank in result.survivors] == [0, 2]
    assert result.hash == alone


def test_a_frozen_rank_is_left_behind_and_contributes_nothing_when_it_wakes_up(tmp_path, alone):
    with cluster(tmp_path, TRAIN, 3, plan=[fault(1, 3, "compute:1", "stop")], settings=SETTINGS,
                 failure_timeout=TIMEOUT) as made:
        made.until(lambda: made.stopped(1), "it is frozen")
        made.wait([0, 2])
        made.signal(1, signal.SIGCONT)
        made.wait([1])
        result = made.collect()
    healthy(result, STEPS)
    assert causes(result)[0] == (1, "heartbeat")
    assert result.hash == alone
    late = result.ranks[1]
    assert late.code == LEFT, result.show()
    assert late.end["status"] == "evicted"
    assert max(late.receipts, default=-1) < 3
    assert "the others went on without replica 1" in late.output


def test_whoever_was_frozen_for_too_long_is_put_out_and_comes_back(tmp_path):
    steps = 60
    with cluster(tmp_path, TRAIN, 3, plan=[fault(1, 3, "compute:1", "stop")], settings=dict(steps=steps, linger=0.03),
                 failure_timeout=TIMEOUT) as made:
        made.until(lambda: made.stopped(1), "it is frozen")
        made.until(lambda: made.said(0, "step")[-1]["step"] > 8, "the others train on")
        made.signal(1, signal.SIGCONT)
        made.wait([1])
        assert made.code(1) == LEFT, made.show()
        made.start_rank(1)
        made.wait()
        result = made.collect()
    assert [rank.code for rank in result.ranks.values()] == [0] * 3, result.show()
    assert causes(result) == [(1, "heartbeat")]
    assert audit(result.directory / "events").ok
    assert result.hash == run(tmp_path, TRAIN, 1, settings=dict(steps=steps)).hash
    done = [set(receipt["who"]) for _, receipt in sorted(result.ranks[0].receipts.items())]
    assert 1 in done[0]
    assert 1 not in done[8]
    assert 1 in done[-1], "it takes its part again"


@pytest.mark.parametrize(("action", "cause"), [("hang", "hung"), ("stop", "heartbeat")])
def test_a_rank_of_a_larger_replica_takes_its_mates_with_it(tmp_path, action, cause):
    """The mates wait for it in collectives of torch's; they leave all the same, and so does it once it can."""
    plan = [dict(replica=1, rank=1, step=2, place="compute:1", action=action)]
    with grid(tmp_path, 2, 2, plan=plan, settings={"layout": "fsdp"}, failure_timeout=TIMEOUT) as made:
        made.until(lambda: all(made.code(n) == 0 for n in (0, 1)) and made.code(2) is not None, "the others finish")
        made.signal(3, signal.SIGCONT)
        made.wait()
        result = made.collect()
    healthy(result, 4)
    assert causes(result)[0] == (1, cause), result.show()
    assert [rank.replica for rank in result.survivors] == [0, 1]
    assert [result.ranks[n].code for n in (2, 3)] == [LEFT, LEFT], result.show()


def test_a_script_may_catch_that_it_was_evicted(tmp_path):
    with cluster(tmp_path, "live_script:catches", 2, plan=[fault(1, 2, "compute:1", "stop")], failure_timeout=TIMEOUT,
                 settings=dict(steps=4, stall=dict(replica=-1, step=0))) as made:
        made.until(lambda: made.stopped(1), "it is frozen")
        made.wait([0])
        made.signal(1, signal.SIGCONT)
        made.wait([1])
        result = made.collect()
    assert result.ranks[1].code == 0
    assert [said["code"] for said in result.ranks[1].all("evicted")] == [LEFT]


def stalled(tmp_path: Path, replicas: int, **stall: object) -> Result:
    return run(tmp_path, "live_script:train", replicas, settings=dict(steps=STEPS, stall=dict(replica=1, step=3, **stall)),
               failure_timeout=TIMEOUT)


def undisturbed(result: Result, alone: str) -> None:
    healthy(result, STEPS)
    assert causes(result) == []
    assert len(result.survivors) == len(result.ranks), result.show()
    assert result.hash == alone
    assert len(result.ranks[1].all("goes on")) == 1


@pytest.mark.parametrize("seconds", [2.0, 4.0])
def test_a_native_call_that_holds_the_interpreter_is_no_death(tmp_path, alone, seconds):
    """No heartbeat for longer than the failure timeout: the process beside it vouches for it."""
    undisturbed(stalled(tmp_path, 3, how="native", seconds=seconds), alone)


def test_without_the_pulse_it_would_be_taken_for_dead(tmp_path):
    """The negative control: nobody vouches."""
    result = run(tmp_path, "live_script:unvouched", 3, failure_timeout=TIMEOUT, expect_dead=[1],
                 settings=dict(steps=STEPS, stall=dict(replica=1, step=3, how="native", seconds=4.0)))
    assert causes(result)[0] == (1, "heartbeat")


def test_a_pause_that_is_announced_is_no_failure(tmp_path, alone):
    undisturbed(stalled(tmp_path, 2, how="sleep", seconds=2.5 * TIMEOUT, pause=None), alone)


def test_a_pause_is_bounded(tmp_path):
    result = run(tmp_path, "live_script:train", 2, failure_timeout=TIMEOUT, expect_dead=[1],
                 settings=dict(steps=STEPS, stall=dict(replica=1, step=3, how="sleep", seconds=30, pause=2.0)))
    assert causes(result)[0] == (1, "hung")


def test_slow_is_not_hung(tmp_path, alone):
    """Microbatches of a third of a second: one that takes more than the failure timeout is nothing unusual."""
    undisturbed(stalled(tmp_path, 2, how="sleep", seconds=1.6 * TIMEOUT, nap=0.3), alone)


def test_the_first_microbatch_may_take_its_time(tmp_path, alone):
    result = run(tmp_path, "live_script:train", 2, failure_timeout=TIMEOUT,
                 settings=dict(steps=STEPS, stall=dict(replica=1, step=0, turn=0, how="sleep", seconds=2.5 * TIMEOUT)))
    undisturbed(result, alone)
