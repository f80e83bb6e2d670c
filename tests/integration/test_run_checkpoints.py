"""When everything dies: the run goes on from its checkpoint, with any number of replicas, and ends with the same bits."""
from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time

import pytest
from harness import cluster, fault, run
from run_checks import healthy

from recover import events
from recover.errors import LEFT
from recover.report.audit import audit
from recover.training.checkpoint import found, load

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

TRAIN = "run_script:train"
STEPS, EVERY = 20, 4


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return run(tmp_path_factory.mktemp("reference"), TRAIN, 1, settings={"steps": STEPS})


@pytest.fixture
def kept(tmp_path):
    return tmp_path / "kept"


def settings(kept, steps=STEPS, every=EVERY, more=None, **wanted):
    return {"steps": steps, "checkpoint": {"directory": str(kept), "every": every, **wanted}, **(more or {})}


def steps_in(kept):
    return [steps for steps, _ in found(kept)]


def merged(directory, *results):
    """The events of several runs, as if they had been written into one directory."""
    directory.mkdir()
    for n, result in enumerate(results):
        for path in (result.directory / "events").glob("events-*.jsonl"):
            shutil.copy(path, directory / path.name.replace("events-", f"events-{n}", 1))
    return directory


def resumed(result):
    """After how many steps its ranks say that they went on."""
    (steps,) = {line.attributes["steps"] for rank in result.ranks.values() for line in rank.events(events.RUN_RESUMED)}
    return steps


def ends_like(result, reference):
    assert result.hash == reference.hash, result.show()
    assert result.losses == reference.losses[-len(result.losses):]


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_another_number_of_replicas_goes_on(tmp_path, kept, reference, before, after):
    first = run(tmp_path, TRAIN, before, settings=settings(kept, 10))
    healthy(first, 10)
    assert steps_in(kept) == [10, 8, 4]
    second = run(tmp_path, TRAIN, after, settings=settings(kept), plan=[fault(after - 1, 14, "reduce:1")] * (after > 2))
    assert resumed(second) == 10
    assert sorted(second.survivors[0].receipts) == list(range(10, STEPS))
    ends_like(second, reference)
    result = audit(merged(tmp_path / "both", first, second))
    assert result.ok, result.offences


def test_who_writes_goes_round(tmp_path, kept):
    result = run(tmp_path, TRAIN, 3, settings=settings(kept, 12, 2, keep=9))
    assert sorted(steps_in(kept)) == [2, 4, 6, 8, 10, 12]
    for rank in result.ranks.values():
        saved = [line.attributes["steps"] for line in rank.events(events.CHECKPOINT_SAVED)]
        assert saved == [steps for steps in (2, 4, 6, 8, 10, 12) if steps // 2 % 3 == rank.replica]


def test_a_finished_run_has_nothing_left_to_do(tmp_path, kept, reference):
    run(tmp_path, TRAIN, 2, settings=settings(kept))
    again = run(tmp_path, TRAIN, 3, settings=settings(kept))
    assert again.hash == reference.hash
    assert not again.survivors[0].receipts
    assert audit(again.directory / "events").offences[0].what.startswith("no receipt here")     # and nothing else


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_everything_is_killed_at_a_random_moment(tmp_path, kept, reference, seed):
    chance = random.Random(seed)
    results = []
    for replicas in (3, 2):
        with cluster(tmp_path, TRAIN, replicas, settings=settings(kept, every=1, more={"linger": 0.002})) as made:
            goal = (steps_in(kept) or [0])[0] + chance.randint(1, 4)
            made.until(lambda made=made, goal=goal: any(said["step"] >= goal for said in made.said(0, "step")), "it trains")
            time.sleep(chance.random() * 0.03)
            newest = steps_in(kept)[:1]
            for replica in made.ranks:
                made.signal(replica, signal.SIGKILL)
            made.wait()
            results.append(made.collect())
        assert newest <= steps_in(kept)[:1]
        committed = max(max((said["step"] for said in rank.all("step")), default=-1) for rank in results[-1].ranks.values())
        assert committed + 1 - (steps_in(kept) or [0])[0] <= 4, "far more than an interval was lost"
        for steps, path in found(kept):                             # whatever has a name is whole
            assert len(load(path, 0).flat.tensors) > 8, steps
    results.append(run(tmp_path, TRAIN, 3, settings=settings(kept)))
    assert resumed(results[-1]) > 0
    ends_like(results[-1], reference)
    assert not [path.name for path in kept.iterdir() if not path.name.startswith("step-")]
    result = audit(merged(tmp_path / "all", *results))
    assert not [each for each in result.offences if "has no receipt of step" not in each.what], result.offences


def flip(path, place=-5):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_a_damaged_one_is_passed_over(tmp_path, kept, reference):
    run(tmp_path, TRAIN, 2, settings=settings(kept, 10))
    flip(kept / "step-00000010" / "position-0.safetensors")
    result = run(tmp_path, TRAIN, 2, settings=settings(kept))
    assert resumed(result) == 8
    ends_like(result, reference)
    assert "is damaged" in result.ranks[0].output
    assert "an older checkpoint is taken" in result.ranks[1].output
    assert [path for path in kept.iterdir() if path.name.startswith("set-aside-step-00000010")]


def test_the_newest_that_all_can_read(tmp_path, kept, reference):
    """Replica 1 sees a copy of the directory in which the newest is damaged."""
    run(tmp_path, TRAIN, 2, settings=settings(kept, 10))
    other = shutil.copytree(kept, tmp_path / "other")
    flip(other / "step-00000010" / "manifest.json", 30)
    result = run(tmp_path, TRAIN, 2, settings=settings(kept), per_replica={1: {"settings": settings(other)}})
    assert resumed(result) == 8
    ends_like(result, reference)


def refused(tmp_path, script, replicas, said, **options):
    with cluster(tmp_path, script, replicas, **options) as made:
        made.wait()
        result = made.collect()
    assert all(rank.code not in (0, None) for rank in result.ranks.values()), result.show()
    assert all(said in rank.output for rank in result.ranks.values()), result.show()


def test_if_all_are_damaged_it_does_not_begin_anew(tmp_path, kept, reference):
    run(tmp_path, TRAIN, 1, settings=settings(kept, 4))
    flip(kept / "step-00000004" / "position-0.safetensors")
    refused(tmp_path, TRAIN, 2, "none can be read", settings=settings(kept))
    result = run(tmp_path, TRAIN, 1, settings=settings(kept, resume=False))
    ends_like(result, reference)


def test_directories_that_differ_are_refused(tmp_path, kept):
    run(tmp_path, TRAIN, 1, settings=settings(kept, 4))
    refused(tmp_path, TRAIN, 2, "no checkpoint is readable for all replicas", settings=settings(kept),
            per_replica={1: {"settings": settings(tmp_path / "elsewhere")}})


@pytest.mark.parametrize(("more", "said"), [
    ({"seed": 4}, "seed is 3 there and 4 here"), ({"microbatches": 10}, "microbatches is 12"),
    ({"width": 8}, "does not fit what is managed here"), ({"reduction": "fast"}, "reduction")])
def test_another_runs_checkpoint_is_refused(tmp_path, kept, more, said):
    run(tmp_path, TRAIN, 1, settings=settings(kept, 2))
    refused(tmp_path, TRAIN, 2, said, settings=settings(kept, more=more))
    assert steps_in(kept) == [2]


def test_fewer_steps_than_the_checkpoint_has(tmp_path, kept):
    run(tmp_path, TRAIN, 1, settings=settings(kept, 8))
    refused(tmp_path, TRAIN, 2, "ask for more steps", settings=settings(kept, 6))


@pytest.mark.parametrize("more", [{"workers": 1}, {"batch_norm": True, "buffers": "mean"}, {"weighted": True, "metrics": True},
                                  {"dtype": "bfloat16"}, {"tied": True}])
def test_scripts_that_do_more(tmp_path, kept, more):
    whole = run(tmp_path, TRAIN, 2, settings={"steps": 8, **more})
    run(tmp_path, TRAIN, 2, settings=settings(kept, 3, 1, more=more))
    ends_like(run(tmp_path, TRAIN, 3, settings=settings(kept, 8, more=more)), whole)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_first_steps_are_special(tmp_path, kept, reference, steps):
    """After step 0 what it taught is kept, but not yet in force."""
    run(tmp_path, TRAIN, 2, settings=settings(kept, steps))
    ends_like(run(tmp_path, TRAIN, 2, settings=settings(kept), plan=[fault(0, steps, "compute:1")]), reference)


def test_fast_goes_on_too(tmp_path, kept):
    more = {"reduction": "fast"}
    whole = run(tmp_path, TRAIN, 1, settings={"steps": 8, **more})
    run(tmp_path, TRAIN, 2, settings=settings(kept, 5, more=more))
    result = run(tmp_path, TRAIN, 3, settings=settings(kept, 8, more=more))
    assert resumed(result) == 5
    off = [abs(float.fromhex(a["loss"]) - float.fromhex(b["loss"])) for a, b in
           zip(result.ranks[0].all("step"), whole.ranks[0].all("step")[5:], strict=True)]
    assert max(off) < 1e-5


def test_asked_for(tmp_path, kept):
    """No rhythm: only what `run.save()` asks for, and the last."""
    result = run(tmp_path, TRAIN, 2, settings=settings(kept, 7, None, more={"save": [2, 4]}))
    assert steps_in(kept) == [7, 5, 3]
    assert [line.attributes["steps"] for line in result.ranks[0].events(events.CHECKPOINT_SAVED)] == [3, 5]


@pytest.mark.parametrize("replicas", [2, 1])
def test_a_job_that_is_told_to_go_loses_nothing(tmp_path, kept, reference, replicas):
    """SIGTERM to all: they end after the same step and save it, though no checkpoint is due; the job goes on from there."""
    wanted = settings(kept, every=1000)
    with cluster(tmp_path, TRAIN, 2, settings=wanted | {"linger": 0.03}) as made:
        made.until(lambda: any(said["step"] == 2 for said in made.said(1, "microbatch")), "step 2 is under way")
        for replica in range(2):
            made.signal(replica, signal.SIGTERM)
        made.wait()
        first = made.collect()
    assert [rank.code for rank in first.ranks.values()] == [LEFT] * 2, first.show()
    done = first.ranks[0].end["last_step"] + 1
    assert steps_in(kept) == [done]
    second = run(tmp_path, TRAIN, replicas, settings=wanted)
    assert resumed(second) == done
    assert second.hash == reference.hash


def test_by_the_clock(tmp_path, kept):
    result = run(tmp_path, TRAIN, 2, settings=settings(kept, 30, None, minutes=0.2 / 60, more={"linger": 0.01}))
    saved = [line.attributes["steps"] for rank in result.ranks.values() for line in rank.events(events.CHECKPOINT_SAVED)]
    assert len(saved) >= 3
    assert len(set(saved)) == len(saved)                # never by two
    assert all(not said["metrics"] for said in result.ranks[0].all("step"))


def no_room(script):
    """Files may not be longer than 30 KB, as on a disk that is full: the script's other files are shorter, a checkpoint isn't."""
    from run_script import train
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, resource.RLIM_INFINITY))
    train(script)


def test_a_full_disk_kills_nobody(tmp_path, kept, reference):
    result = run(tmp_path, TRAIN, 2, settings=settings(kept, every=2),
                 per_replica={1: {"script": "test_run_checkpoints:no_room"}})
    assert result.hash == reference.hash
    assert not result.ranks[0].events(events.CHECKPOINT_FAILED)
    assert len(result.ranks[1].events(events.CHECKPOINT_FAILED)) == 5
    assert "it can't be written" in result.ranks[1].output
    assert all(steps // 2 % 2 == 0 for steps in steps_in(kept))
    assert not [path.name for path in kept.iterdir() if not path.name.startswith("step-")]


def test_a_death_while_it_resumes(tmp_path, kept, reference):
    run(tmp_path, TRAIN, 3, settings=settings(kept, 10))
    result = run(tmp_path, TRAIN, 3, settings=settings(kept), expect_dead=[0], per_replica={0: {"settings": {"dies": "form"}}})
    assert result.lost() == [0]
    assert resumed(result) == 10
    ends_like(result, reference)


def test_nobody_writes_where_nothing_was_asked_for(tmp_path, kept, reference):
    os.mkdir(kept)
    run(tmp_path, TRAIN, 2, settings={"steps": 3})
    assert not list(kept.iterdir())
