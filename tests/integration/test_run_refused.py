"""Bad input and scripts that do it wrong: a clear error that names the cause, and nothing lost."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml
from harness import HERE, SOURCE, cluster, fault, run
from run_checks import handed_out, healthy

from recover.launch.verdict import ALL_DEAD

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

TRAIN = "run_script:train"
STEPS = 5


def refused(tmp_path, replicas=2, script=TRAIN, settings=None, **options):
    """A run in which no replica gets to the end; what each said."""
    settings = dict(steps=STEPS) | (settings or {})
    result = run(tmp_path, script, replicas, settings=settings, expect_dead=range(replicas), **options)
    assert all(rank.code == 1 for rank in result.ranks.values()), result.show()
    return [rank.output for rank in result.ranks.values()]


def test_fewer_microbatches_than_replicas(tmp_path):
    result = run(tmp_path, TRAIN, 4, plan=[fault(1, 2, "compute:0")], settings=dict(steps=STEPS, microbatches=3))
    healthy(result, STEPS)
    assert not handed_out(result.ranks[3]).keys() & {(step, i) for step in (0, 1) for i in range(3)}    # owed nothing
    assert "4 replicas share 3 microbatches: some have nothing to compute" in result.ranks[0].output
    assert result.hash == run(tmp_path, TRAIN, 1, settings=dict(steps=STEPS, microbatches=3)).hash


@pytest.mark.parametrize(("name", "values"), [("microbatches", (12, 16)), ("seed", (3, 4)), ("reduction", ("exact", "fast")),
                                              ("policy", ("balanced", "speed")), ("nonfinite", ("raise", "skip"))])
def test_replicas_that_ask_for_different_things(tmp_path, name, values):
    """The one that comes second is not let in, and hears both values."""
    with cluster(tmp_path, TRAIN, 2, settings=dict(steps=STEPS), per_replica={
            replica: {"settings": {name: value}} for replica, value in enumerate(values)}) as made:
        made.until(lambda: made.code(0) is not None or made.code(1) is not None, "one is refused")
        loser = 0 if made.code(0) is not None else 1
        output = made.collect().ranks[loser].output
    assert "JoinRefused" in output
    assert name in output
    assert all(str(value) in output for value in values) or name == "policy"


def test_exact_with_kernels_that_are_chosen_by_measuring(tmp_path):
    (output,) = refused(tmp_path, 1, settings={"compile": {"mode": "max-autotune"}})
    assert 'reduction="exact" needs the same kernels on every replica' in output


@pytest.mark.parametrize(("settings", "words"), [
    ({"width": 24}, ["embedding.weight: (32, 16)", "embedding.weight: (32, 24)"]),
    ({"order": "other"}, ["embedding.weight", "up.weight"]),
    ({"batch_norm": True}, ["norm.running_mean", "buffers"])])
def test_replicas_whose_models_differ(tmp_path, settings, words):
    outputs = refused(tmp_path, per_replica={1: {"settings": settings}})
    for output in outputs:
        assert "replicas' models differ" in output
        assert any(word in output for word in words)
    if len(words) == 2 and "width" in settings:
        assert all(word in output for word in words for output in outputs)


def test_a_wrong_token(tmp_path):
    """Whoever has it is not let in, and the run goes on without noticing."""
    wrong = tmp_path / "wrong"
    wrong.write_bytes(b"another secret")
    with cluster(tmp_path, TRAIN, 1, settings=dict(steps=STEPS, linger=0.01), failure_timeout=1.0,
                 per_replica={5: {"environ": {"RECOVER_TOKEN_FILE": str(wrong)}}}) as made:
        made.start_rank(5)
        made.wait()
        result = made.collect()
    assert result.ranks[0].code == 0
    assert result.ranks[5].code == 1
    assert "JoinRefused" in result.ranks[5].output
    assert "token" in result.ranks[5].output


def test_a_dataset_shorter_than_a_step(tmp_path):
    outputs = refused(tmp_path, 1, settings=dict(data_length=20))
    assert "the dataset has 20 samples, but one step takes 24" in outputs[0]


@pytest.mark.parametrize(("script", "words"), [
    ("leaves_early", "step 2 was left early"),
    ("steps_inside", "optimizer.step() inside the microbatch loop"),
    ("bare_backward", "outside of a microbatch"),
    ("forgets_backward", "was handed out, but not given to step.backward(loss)")])
def test_scripts_that_do_it_wrong(tmp_path, script, words):
    for output in refused(tmp_path, script=f"run_script:{script}"):
        assert words in output
        assert "Traceback" in output


@pytest.mark.parametrize("script", ["leaves_early", "fails", "stops_early", "bare_backward"])
def test_the_others_go_on_without_a_replica_whose_script_fails(tmp_path, script):
    result = run(tmp_path, TRAIN, 3, settings=dict(steps=STEPS), per_replica={1: {"script": f"run_script:{script}"}},
                 expect_dead=[1])
    healthy(result, STEPS)
    assert result.lost() == [1]
    assert [rank.replica for rank in result.survivors if rank.end["status"] == "finished"] == [0, 2]
    assert result.ranks[0].hash == result.ranks[2].hash == run(tmp_path, TRAIN, 1, settings=dict(steps=STEPS)).hash
    assert result.ranks[1].end["status"] == ("left" if script == "stops_early" else "failed")


@pytest.mark.parametrize("plan", [[], [fault(0, 2, "compute:1")]])
def test_a_gradient_that_is_not_finite_is_named(tmp_path, plan):
    result = run(tmp_path, TRAIN, 3, plan=plan, settings=dict(steps=STEPS, spike=[2, 7]), expect_dead=range(3))
    for rank in [rank for rank in result.ranks.values() if rank.code != -9]:
        assert "NotFinite: step 2: the gradient of embedding.weight in microbatch 7 is not finite" in rank.output
        assert rank.code == 1


@pytest.mark.parametrize("step", [0, 1, 2])
def test_a_step_that_is_not_finite_is_skipped_alike_on_all(tmp_path, step):
    settings = dict(steps=STEPS, spike=[step, 7 * (step > 0)], nonfinite="skip")
    result = run(tmp_path, TRAIN, 3, plan=[fault(0, 2, "reduce:1")], settings=settings)
    healthy(result, STEPS)
    assert result.hash == run(tmp_path, TRAIN, 1, settings=settings).hash
    for rank in result.survivors:
        assert [said["step"] for said in rank.all("step") if said["skipped"]] == [step]
        assert f"step {step}: the gradient of embedding.weight in microbatch {settings['spike'][1]} is not finite: skipped" \
            in rank.output


def test_all_dead_says_how_far_it_got(tmp_path):
    """Through the real launcher."""
    plan = [fault(0, 2, "compute:0"), fault(1, 3, "complete")]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump({"faults": plan}))
    (tmp_path / "train.py").write_text("import pathlib, torch, run_script, harness\n"
                                       "run_script.train(harness.Script({'steps': 6}, pathlib.Path(__file__ + '.said')))\n")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (SOURCE, HERE)))}
    ended = subprocess.run([sys.executable, "-m", "recover.cli", "launch", "--replicas", "2", "--fault",
                            str(tmp_path / "plan.yaml"), "--events", str(tmp_path / "events"), str(tmp_path / "train.py")],
                           env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == ALL_DEAD, ended.stderr
    assert "step 2" in ended.stdout + ended.stderr              # the last one that is known to be committed
