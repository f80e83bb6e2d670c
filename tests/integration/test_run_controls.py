"""Negative controls: with a guard of the training loop left out, a run fails, or is told from a good one."""
from __future__ import annotations

import pytest
from harness import cluster, fault, run
from run_checks import healthy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

STEPS = 5


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run(tmp_path_factory.mktemp("alone"), "run_script:train", 1, settings=dict(steps=STEPS)).hash


def ended(tmp_path, mutant, plan=(), mutants=range(3)):
    per_replica = {m: {"script": "run_mutants:train", "settings": {"mutant": mutant}} for m in mutants}
    with cluster(tmp_path, "run_script:train", 3, plan=plan, settings=dict(steps=STEPS), per_replica=per_replica) as made:
        made.wait()
        return made.collect()


@pytest.mark.parametrize("mutant", ["launches_early", "keeps_local"])
def test_wrong_sums_are_not_committed(tmp_path, mutant):
    """I1 in-band: every bucket's tail says what is inside."""
    result = ended(tmp_path, mutant)
    assert not result.survivors
    assert all("I1: " in rank.output for rank in result.ranks.values()), result.show()


def test_the_hash_tells_a_bucket_that_was_not_whole(tmp_path, alone):
    """The tails don't: what lies in the buffers is the sum of the step before, which has each microbatch once."""
    result = ended(tmp_path, "boasts", [fault(1, 2, "reduce:1")])
    assert not result.survivors or result.hash != alone


def test_a_step_thrown_away_is_found(tmp_path):
    result = ended(tmp_path, "redoes_all", [fault(1, 2, "reduce:1")])    # all had computed theirs
    with pytest.raises(AssertionError):
        healthy(result, STEPS)


def test_the_hash_tells_other_random_states(tmp_path, alone):
    assert ended(tmp_path, "own_seeds").hash != alone


def test_a_replica_that_differs_ends_the_run(tmp_path):
    """I5 in-band, though only one is off, by one bit, once. All say so, each with the hashes of all."""
    result = ended(tmp_path, "drifts", mutants=[2])
    assert not result.survivors
    for rank in result.ranks.values():
        assert "Diverged: replicas differ after an update" in rank.output, result.show()
        assert all(f"{other}: '2:" in rank.output for other in range(3))
