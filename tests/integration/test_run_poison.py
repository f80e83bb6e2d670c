"""A microbatch that kills whoever computes it, and microbatches that are skipped on purpose."""
from __future__ import annotations

import signal

import pytest
from harness import cluster, fault, run
from run_checks import healthy

from recover import events
from recover.errors import POISONED
from recover.report.audit import audit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

TRAIN, STEPS = "run_script:train", 6
KILLER = [3, 7]


def ended(directory, replicas, **settings):
    with cluster(directory, TRAIN, replicas, settings={"steps": STEPS, "killer": KILLER, **settings}) as made:
        made.wait()
        return made.collect()


def dead(result):
    return [rank.replica for rank in result.ranks.values() if rank.code == -signal.SIGKILL]


def test_it_is_found_and_the_run_stops_with_its_name(tmp_path):
    result = ended(tmp_path, 5)
    assert len(dead(result)) in (3, 4), result.show()           # 4: the first was a step ahead of the others
    rest = [rank for rank in result.ranks.values() if rank.replica not in dead(result)]
    assert rest
    for rank in rest:
        assert rank.code == POISONED, result.show()
        assert "while they computed microbatch 7 of step 3" in rank.output
        assert "skip=[(3, 7)]" in rank.output
        assert rank.end["status"] == "failed"
        assert max(rank.receipts) == 2


@pytest.fixture(scope="module")
def skipped(tmp_path_factory):
    """A run to which nothing happens, and which leaves it out."""
    return run(tmp_path_factory.mktemp("skipped"), TRAIN, 1, settings={"steps": STEPS, "skip": [KILLER]})


def test_it_is_found_and_skipped_by_all(tmp_path, skipped):
    result = ended(tmp_path, 5, poison="skip")
    assert len(dead(result)) in (3, 4), result.show()
    healthy(result, STEPS)
    for rank in result.survivors:
        assert {step: receipt.get("skipped") for step, receipt in rank.receipts.items()} == {
            step: [7] if step == 3 else None for step in range(STEPS)}
        assert rank.receipts[3]["who"][7] == -1
        assert rank.receipts[3]["divisor"] == 11.0
    assert result.hash == skipped.hash
    assert result.losses == skipped.losses


def test_what_is_skipped_on_purpose_kills_nobody(tmp_path, skipped):
    """And whoever dies for another reason changes nothing."""
    plan = [fault(1, 3, "compute:1"), fault(0, 3, "recompute")]
    result = run(tmp_path, TRAIN, 4, plan=plan, settings={"steps": STEPS, "killer": KILLER, "skip": [KILLER]})
    healthy(result, STEPS)
    assert result.hash == skipped.hash


def test_a_skipped_step_changes_no_parameter(tmp_path):
    result = run(tmp_path, TRAIN, 3, settings={"steps": STEPS, "skip": [4, [2, 0]], "batch_norm": True},
                 plan=[fault(2, 4, "reduce:1")])
    assert audit(result.directory / "events").ok
    said = result.survivors[0].all("step")
    assert [step["skipped"] for step in said] == [False] * 4 + [True, False]
    receipts = result.survivors[0].receipts
    assert receipts[4]["divisor"] == 0
    assert receipts[4]["who"] == [-1] * 12
    assert receipts[2]["skipped"] == [0]


@pytest.mark.parametrize("skip", [[KILLER], [3, [1, 0], [0, 5]]])
def test_it_is_what_a_plain_loop_without_them_does(tmp_path, skip):
    """In `fast`, to rounding."""
    settings = {"steps": STEPS, "skip": skip, "reduction": "fast"}
    result = run(tmp_path, TRAIN, 2, settings=settings)
    with cluster(tmp_path, "run_script:plain_loop", 1, settings=settings) as made:
        made.wait()
        plain = made.collect()
    ours, theirs = ([float.fromhex(s["loss"]) for s in rank.all("step")] for rank in (result.ranks[0], plain.ranks[0]))
    assert ours == pytest.approx(theirs, rel=1e-5, nan_ok=True)


def test_whoever_was_stopped_goes_on_without_it(tmp_path, skipped):
    kept = {"directory": str(tmp_path / "kept"), "every": 1}
    stopped = ended(tmp_path, 5, checkpoint=kept)
    assert not stopped.survivors
    result = run(tmp_path, TRAIN, 2, settings={"steps": STEPS, "killer": KILLER, "skip": [KILLER], "checkpoint": kept})
    assert result.survivors[0].events(events.RUN_RESUMED)[0].attributes["steps"] in (2, 3)
    assert result.hash == skipped.hash


@pytest.mark.parametrize(("skip", "said"), [
    ([[0, 0]], "from which the run learns"), ([0], "from which the run learns"),
    ([[1, 99]], "below 12"), (["x"], "holds steps")])
def test_mistakes(tmp_path, skip, said):
    with cluster(tmp_path, TRAIN, 1, settings={"steps": 2, "skip": skip}) as made:
        made.wait()
        result = made.collect()
    assert result.ranks[0].code == 1
    assert said in result.ranks[0].output


def test_all_must_skip_the_same(tmp_path):
    with cluster(tmp_path, TRAIN, 2, settings={"steps": 2}, per_replica={1: {"settings": {"skip": [[1, 3]]}}}) as made:
        made.until(lambda: made.code(0) is not None or made.code(1) is not None, "one is refused")
        result = made.collect()
    assert any("skip" in rank.output and "1:3" in rank.output for rank in result.ranks.values()), result.show()
