"""Joining a run under way: equal bits at the end, whoever joins, dies or comes back, and whenever."""
from __future__ import annotations

import signal

import pytest
from harness import cluster, fault, run
from run_checks import unwritten

from recover.report.audit import audit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

TRAIN = "run_script:train"
STEPS, LINGER = 24, 0.02
SLOWLY = pytest.mark.slow
SLOW = {"piece": 4096, "drip": 0.1}                     # nine pieces: some steps long


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """settings -> a run of one replica, to which nothing happens."""
    made = {}

    def of(**settings):
        key = tuple(sorted(settings.items()))
        if key not in made:
            made[key] = run(tmp_path_factory.mktemp("reference"), TRAIN, 1, settings=settings)
        return made[key]
    return of


def started(tmp_path, replicas=2, joiner=None, **options):
    settings = {"steps": STEPS, "linger": LINGER} | options.pop("settings", {})
    per_replica = {replicas: {"settings": joiner or {}}} | options.pop("per_replica", {})
    return cluster(tmp_path, TRAIN, replicas, settings=settings, per_replica=per_replica, **options)


def until_step(made, step, replica=0):
    made.until(lambda: any(said["step"] >= step for said in made.said(replica, "step")), f"step {step}")


def joined(made, step, replica=2):
    """The result of a run that `replica` joins after `step`."""
    until_step(made, step)
    made.start_rank(replica)
    made.wait()
    return made.collect()


def contributed(result, replica):
    return sum(receipt["who"].count(replica) for receipt in result.survivors[0].receipts.values())


def level_at(result, replica):
    return [line.step for line in result.ranks[replica].events("recover.join.level")]


def same(result, reference, survivors, **settings):
    """All of these finished with the bits of the undisturbed run, and the receipts of everyone are in order."""
    expected = reference(**{"steps": STEPS} | settings)
    assert [rank.replica for rank in result.survivors] == survivors, result.show()
    assert result.hash == expected.hash, result.show()
    offences = [each for each in audit(result.directory / "events").offences if not unwritten(each, result)]
    assert not offences, f"{offences[0]}\n{result.show()}"
    for rank in result.survivors:
        losses = {step: receipt["loss_bits"] for step, receipt in rank.receipts.items()}
        assert losses == {step: expected.losses[step] for step in losses}, result.show()
        assert STEPS - 1 in losses, result.show()


@pytest.mark.parametrize("step", [0, 1, pytest.param(2, marks=SLOWLY), pytest.param(7, marks=SLOWLY)])
def test_a_third_replica_joins(tmp_path, reference, step):
    with started(tmp_path) as made:
        result = joined(made, step)
    same(result, reference, [0, 1, 2])
    assert contributed(result, 2) > 0
    assert result.lost() == []
    assert not result.recoveries()                      # nobody stopped for it


@pytest.mark.parametrize("settings", [
    dict(batch_norm=True, buffers="mean", tied=True), dict(weighted=True, metrics=True, optimizer="sgd"),
    pytest.param(dict(dtype="bfloat16"), marks=SLOWLY), dict(unused=12), pytest.param(dict(hash_every=0), marks=SLOWLY)], ids=str)
def test_other_scripts(tmp_path, reference, settings):
    with started(tmp_path, settings=settings) as made:
        result = joined(made, 3)
    same(result, reference, [0, 1, 2], **settings)
    assert contributed(result, 2) > 0


def test_fast(tmp_path):
    """Equal on all replicas, though not to another run's."""
    with started(tmp_path, settings={"reduction": "fast"}) as made:
        result = joined(made, 3)
    assert [rank.replica for rank in result.survivors] == [0, 1, 2], result.show()
    assert result.hash
    assert audit(result.directory / "events").ok
    assert contributed(result, 2) > 0


def test_the_first_two_die_after_two_others_have_joined(tmp_path, reference):
    plan = [fault(0, 19, "compute:1"), fault(1, 20, "reduce:2")]
    with started(tmp_path, plan=plan) as made:
        until_step(made, 2)
        made.start_rank(2)
        made.start_rank(3)
        made.wait()
        result = made.collect()
    same(result, reference, [2, 3])
    assert max(level_at(result, 2) + level_at(result, 3)) < 19


def test_a_killed_replica_comes_back_under_its_number(tmp_path, reference):
    with started(tmp_path, 3, plan=[fault(0, 2, "compute:1")]) as made:
        made.wait([0])
        made.start_rank(0)
        made.wait()
        result = made.collect()
    same(result, reference, [0, 1, 2])
    assert result.lost() == [0]
    assert level_at(result, 0)
    behind = range(5, level_at(result, 0)[0])
    assert not any(said["leader"] for said in result.ranks[0].all("step") if said["step"] in behind)


def test_a_joiner_dies_fetching_and_another_gets_in(tmp_path, reference):
    with started(tmp_path, joiner={**SLOW, "dies": "fetching"}) as made:
        until_step(made, 2)
        made.start_rank(2)
        made.wait([2])
        made.start_rank(3)
        made.wait()
        result = made.collect()
    same(result, reference, [0, 1, 3])
    assert result.ranks[2].code == -signal.SIGKILL
    assert contributed(result, 2) == 0
    assert contributed(result, 3) > 0


def test_a_giver_dies_and_the_other_goes_on_from_there(tmp_path, reference):
    with started(tmp_path, joiner=SLOW, per_replica={0: {"settings": {"dies": "giving"}}}) as made:
        result = joined(made, 2)
    same(result, reference, [1, 2])
    assert result.ranks[0].code == -signal.SIGKILL
    assert "starts anew" not in result.ranks[2].output
    assert level_at(result, 2)


def test_a_giver_that_fails_at_a_question_holds_up_nobody(tmp_path, reference):
    """It lives, and trains on: no change of view tells the joiner."""
    with started(tmp_path, joiner={"piece": 4096}, per_replica={0: {"settings": {"fails": "PIECE"}}}) as made:
        result = joined(made, 2)
    same(result, reference, [0, 1, 2])                  # the other one gave it all
    assert contributed(result, 2) > 0
    assert "as planned" in result.ranks[0].output


def test_a_joiner_that_is_not_welcomed_goes(tmp_path, reference):
    with started(tmp_path, per_replica={0: {"settings": {"fails": "WELCOME"}}}) as made:
        result = joined(made, 2)
    same(result, reference, [0, 1])
    assert result.ranks[2].code == 1
    assert "as planned" in result.ranks[2].end["message"], result.show()


def test_the_last_giver_dies_and_the_joiner_says_that_it_is_over(tmp_path):
    with started(tmp_path, 1, joiner=SLOW, per_replica={0: {"settings": {"dies": "giving"}}}) as made:
        result = joined(made, 2, 1)
    assert result.ranks[0].code == -signal.SIGKILL
    assert result.ranks[1].code == 1
    assert "no member that holds the parameters is left" in result.ranks[1].end["message"], result.show()


@pytest.mark.parametrize("place", ["compute:1", "reduce:1", *(
    pytest.param(place, marks=SLOWLY) for place in ("complete", "fence", "optimizer", "between"))])
def test_a_survivor_dies_while_another_catches_up(tmp_path, reference, place):
    with started(tmp_path, joiner=SLOW, plan=[fault(1, 9, place)], settings={"linger": 0.03}) as made:
        result = joined(made, 3)
    same(result, reference, [0, 2])
    assert level_at(result, 2)[0] > 9
    assert min(line.view for line in result.ranks[2].events("recover.view.new")) == (0, 2)   # it was in before that death


def test_a_joiner_that_falls_behind_jumps(tmp_path, reference):
    with started(tmp_path, joiner={"kept": 1, "lag": 1.0}) as made:
        result = joined(made, 2)
    same(result, reference, [0, 1, 2])
    assert "starts anew" in result.ranks[2].output
    steps = [said["step"] for said in result.ranks[2].all("step")]
    assert steps != list(range(steps[0], STEPS))        # some were never replayed
    assert level_at(result, 2)


@pytest.mark.parametrize("wrong", ["copy", "skip"])
def test_a_joiner_in_another_state_is_found_before_it_contributes(tmp_path, reference, wrong):
    with started(tmp_path, joiner={"wrong": wrong}) as made:
        result = joined(made, 2)
    same(result, reference, [0, 1])
    assert result.ranks[2].code == 1
    assert "Diverged" in result.ranks[2].end["message"], result.show()
    assert contributed(result, 2) == 0


@pytest.mark.parametrize(("setting", "says"),
                         [({"steps": 25}, "25 steps"), ({"width": 24}, "(32, 24)"), ({"seed": 5}, "seed differs")])
def test_a_joiner_with_another_script_is_refused(tmp_path, reference, setting, says):
    with started(tmp_path, joiner=setting) as made:
        result = joined(made, 2)
    same(result, reference, [0, 1])
    assert result.ranks[2].code == 1
    assert says in result.ranks[2].output, result.show()


def test_too_late(tmp_path, reference):
    """The run ends before the joiner is level: it says so, or (its copy came in time) it finishes by itself."""
    with started(tmp_path, joiner=SLOW | {"drip": 0.3}) as made:
        until_step(made, STEPS - 6)
        made.start_rank(2)
        made.wait()
        result = made.collect()
    same(result, reference, [0, 1])
    assert "the run" in result.ranks[2].end["message"], result.show()
