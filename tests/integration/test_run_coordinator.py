"""The coordinator dies in the middle of a run and comes back with nothing."""
from __future__ import annotations

import os
import signal

import pytest
from harness import cluster, run
from run_checks import healthy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

TRAIN = "run_script:train"
STEPS = 30
SETTINGS = dict(steps=STEPS, linger=0.01)


def at_step(made, step, replica=0):
    return lambda: len(made.said(replica, "step")) > step


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"), TRAIN, 1, settings=dict(steps=STEPS)).hash


def test_no_step_waits_for_it(tmp_path, alone):
    with cluster(tmp_path, TRAIN, 3, settings=SETTINGS) as made:
        made.until(at_step(made, 4), "under way")
        made.kill_coordinator()
        now = len(made.said(0, "step"))
        made.until(at_step(made, now + 5), "steps go on without it")
        made.start_coordinator()
        made.wait()
        result = made.collect()
    healthy(result, STEPS)
    assert result.hash == alone
    assert not result.recoveries()
    assert {tuple(receipt["view"]) for rank in result.survivors for receipt in rank.receipts.values()} == {(0, 1)}


def test_a_death_while_it_is_away(tmp_path, alone):
    """The recovery waits for its return, then all go on."""
    with cluster(tmp_path, TRAIN, 3, settings=SETTINGS, failure_timeout=2.0) as made:
        made.until(at_step(made, 4), "under way")
        made.kill_coordinator()
        made.signal(1, signal.SIGKILL)
        made.until(lambda: made.code(1) is not None, "it is dead")
        made.start_coordinator()
        made.wait()
        result = made.collect()
    healthy(result, STEPS)
    assert [rank.replica for rank in result.survivors] == [0, 2]
    assert result.hash == alone
    assert {tuple(receipt["members"]) for receipt in result.ranks[0].receipts.values()} == {(0, 1, 2), (0, 2)}


def test_both_die_at_once_and_another_after_its_return(tmp_path, alone):
    with cluster(tmp_path, TRAIN, 4, settings=SETTINGS, failure_timeout=2.0) as made:
        made.until(at_step(made, 3), "under way")
        made.signal(0, signal.SIGKILL)
        made.kill_coordinator()
        made.start_coordinator()
        made.until(at_step(made, 8, replica=1), "it goes on")
        made.signal(3, signal.SIGKILL)
        made.wait()
        result = made.collect()
    healthy(result, STEPS)
    assert [rank.replica for rank in result.survivors] == [1, 2]
    assert result.hash == alone


def test_it_is_gone_at_the_finish_line(tmp_path, alone):
    """Nobody needs it to finish."""
    with cluster(tmp_path, TRAIN, 3, settings=SETTINGS) as made:
        made.until(at_step(made, 4), "under way")
        made.kill_coordinator()
        made.wait()
        result = made.collect()
    healthy(result, STEPS)
    assert len(result.survivors) == 3
    assert result.hash == alone


def test_a_failure_free_step_tells_it_nothing(tmp_path):
    """Frozen, it hears nothing; and nobody minds, as long as that takes less than the failure timeout."""
    with cluster(tmp_path, TRAIN, 3, settings=SETTINGS, failure_timeout=20.0) as made:
        made.until(at_step(made, 2), "under way")
        assert made.coordinator is not None
        os.kill(made.coordinator.pid, signal.SIGSTOP)
        made.wait()
        result = made.collect()
    healthy(result, STEPS)
    assert not result.recoveries()
