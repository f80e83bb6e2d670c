"""What training scripts do anyway must go on working, across failures, to the bit of the failure-free run."""
from __future__ import annotations

import pytest
from harness import fault, run
from run_checks import healthy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

TRAIN = "run_script:train"
STEPS = 6
PLAN = [fault(1, 1, "compute:1"), fault(0, 3, "reduce:2")]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return run(tmp_path_factory.mktemp("plain"), TRAIN, 1, settings=dict(steps=STEPS))


def pair(tmp_path, **settings):
    """The same script, alone and with failures."""
    settings = dict(steps=STEPS) | settings
    alone = run(tmp_path, TRAIN, 1, settings=settings)
    result = run(tmp_path, TRAIN, 3, plan=PLAN, settings=settings)
    healthy(result, STEPS)
    assert result.hash == alone.hash
    assert result.losses == alone.losses
    return alone, result


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("place", ["before", "inside", "after", "everywhere", "nowhere"])
def test_zero_grad_anywhere(tmp_path, plain, place, set_to_none):
    settings = dict(steps=STEPS, zero_grad=place, set_to_none=set_to_none)
    result = run(tmp_path, TRAIN, 3, plan=PLAN, settings=settings)
    healthy(result, STEPS)
    assert result.hash == plain.hash


def test_tied_weights(tmp_path, plain):
    alone, _ = pair(tmp_path, tied=True)
    assert alone.hash != plain.hash


def test_without_clipping(tmp_path, plain):
    alone, _ = pair(tmp_path, clip=False)
    assert alone.hash != plain.hash


def test_a_loader_with_workers(tmp_path):
    """Batches are drawn at random in the workers; what was lost is drawn again in process, with the same bits."""
    alone, _ = pair(tmp_path, workers=2)
    assert alone.hash != run(tmp_path, TRAIN, 1, settings=dict(steps=STEPS)).hash


@pytest.mark.parametrize("buffers", ["leader", "sum", "mean"])
def test_buffers_that_forward_writes(tmp_path, buffers):
    """Running statistics of BatchNorm: equal on all, equal to the failure-free run's, and named once."""
    _, result = pair(tmp_path, batch_norm=True, buffers=buffers)
    named = [line for line in result.survivors[0].output.splitlines() if "forward writes buffers" in line]
    assert len(named) == 1
    assert "norm.running_mean" in named[0]


def test_weights_and_a_microbatch_of_weight_zero(tmp_path, plain):
    alone, _ = pair(tmp_path, weighted=True)
    assert alone.hash != plain.hash
    divisors = [receipt["divisor"] for receipt in alone.ranks[0].receipts.values()]
    assert all(divisor == sum((7 * step + 5 * index) % 4 * 3 for index in range(12)) for step, divisor in enumerate(divisors))


def test_metrics_across_failures(tmp_path):
    alone, result = pair(tmp_path, metrics=True)
    expected = [said["metrics"] for said in alone.ranks[0].all("step")]
    assert [said["metrics"] for said in result.survivors[0].all("step")] == expected
    assert expected[0]["double"] == 11.0                        # the mean of 0, 2, ... 22
    assert expected[0]["thirds"] > 0


@pytest.mark.parametrize("used_from", [99, 1, 3])
def test_a_parameter_that_nothing_uses_for_a_while(tmp_path, used_from):
    pair(tmp_path, unused=used_from)


@pytest.mark.parametrize("boost", [[0, 0], [1, 3], [3, 11], [3, 0]])
def test_a_gradient_a_thousand_million_times_as_large(tmp_path, plain, boost):
    """Where a bucket's exponent does not fit, coarse sums are reduced too: in steps with failures like in others."""
    alone, _ = pair(tmp_path, boost=boost)
    assert alone.hash != plain.hash


def test_half_precision_parameters(tmp_path, plain):
    alone, _ = pair(tmp_path, dtype="bfloat16")
    assert alone.hash != plain.hash


def test_losses_are_those_of_a_plain_loop(tmp_path):
    """No recover in it: the same model, samples and random state, gradients accumulated by autograd itself."""
    result = run(tmp_path, TRAIN, 3, plan=PLAN, settings=dict(steps=STEPS))
    bare = run(tmp_path, "run_script:plain_loop", 1, settings=dict(steps=STEPS), expect_dead=[0])
    for ours, theirs in zip(result.survivors[0].all("step"), bare.ranks[0].all("step"), strict=True):
        assert float.fromhex(ours["loss"]) == pytest.approx(float.fromhex(theirs["loss"]), rel=1e-6)


def test_one_leader_at_a_time(tmp_path):
    result = run(tmp_path, TRAIN, 3, plan=[fault(0, 3, "compute:0")], settings=dict(steps=STEPS))
    leaders = {said["step"]: [rank.replica for rank in result.ranks.values() for other in rank.all("step")
                              if other["step"] == said["step"] and other["leader"]] for said in result.ranks[1].all("step")}
    assert leaders == {0: [0], 1: [0], 2: [0], 3: [1], 4: [1], 5: [1]}


def test_the_finish_line(tmp_path):
    """A replica that is slow to update for the last time is no casualty, nor are those who are done."""
    result = run(tmp_path, TRAIN, 3, settings=dict(steps=3),
                 per_replica={0: {"settings": {"late": 0.6}}, 2: {"settings": {"late": 0.2}}})
    healthy(result, 3)
    assert result.lost() == []
    assert not result.recoveries()
    assert len(result.survivors) == 3
