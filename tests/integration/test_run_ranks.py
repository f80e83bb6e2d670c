"""Replicas of several ranks: FSDP2, and pipelines with tensor parallel or FSDP. A rank dies, its replica leaves as a whole,
and the others go on as if it had never been there. The large set of kills runs with `pytest -m slow`."""
from __future__ import annotations

import signal

import pytest
from harness import fault
from ranks_harness import LAYOUTS, RECOVERY, dies_in_recovery, grid, hashes, kill, losses, places, run
from run_checks import computed, healthy

from recover.training.engine import LEFT

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

STEPS, B = 4, 6
REPLICAS = {"fsdp": 3, "pp_tp": 2, "pp_fsdp": 2}
SIZES = {layout: (REPLICAS[layout], ranks) for layout, ranks in LAYOUTS.items()}
PLACES = places("fsdp")


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """layout -> hashes by position and losses of a run of one replica, to which nothing happens."""
    made = {}

    def of(layout):
        if layout not in made:
            result, _ = run(tmp_path_factory.mktemp("reference"), 1, SIZES[layout][1], settings={"layout": layout})
            healthy(result, STEPS)
            made[layout] = hashes(result, SIZES[layout][1]), losses(result)
        return made[layout]
    return of


def go(folder, layout, plan=(), **options):
    settings = {"layout": layout} | options.pop("settings", {})
    return run(folder, *SIZES[layout], plan=plan, settings=settings, **options)


def same(result, layout, reference):
    healthy(result, STEPS)
    assert (hashes(result, SIZES[layout][1]), losses(result)) == reference(layout)


# -- exact ---------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("layout", SIZES)
def test_without_failures(tmp_path, reference, layout):
    result, _ = go(tmp_path, layout)
    same(result, layout, reference)
    assert result.lost() == []
    assert not result.recoveries()
    assert set(computed(result).values()) == {SIZES[layout][1]}     # once, by all positions of one replica
    assert len(set(hashes(result, SIZES[layout][1]))) == SIZES[layout][1]   # positions hold different parts
    assert result.ranks[0].all("step")[-1]["buckets"] >= 2


@pytest.mark.parametrize("n", range(len(PLACES)))
def test_fsdp_two_kills(tmp_path, reference, n):
    """Every place meets both positions over these."""
    plan = [kill(n % 3, 0, 1, PLACES[n]), kill((n + 1) % 3, 1, 2, PLACES[(n + 1) % len(PLACES)])]
    result, _ = go(tmp_path, "fsdp", plan)
    same(result, "fsdp", reference)
    assert sorted(result.lost()) == sorted(f["replica"] for f in plan)


@pytest.mark.parametrize(("layout", "victim", "place"), [
    ("pp_tp", (0, 0), "compute:1"), ("pp_tp", (1, 1), "reduce:1"), ("pp_tp", (1, 2), "complete"), ("pp_tp", (0, 3), "fence"),
    ("pp_tp", (1, 3), "optimizer"), ("pp_fsdp", (0, 0), "reduce:0"), ("pp_fsdp", (1, 3), "compute:2")])
def test_pipelines_a_kill(tmp_path, reference, layout, victim, place):
    result, _ = go(tmp_path, layout, [kill(*victim, 1, place)])
    same(result, layout, reference)
    assert result.lost() == [victim[0]]


def in_recovery(folder, layout, position, place):
    plan, special = dies_in_recovery(position, place, 2)
    return run(folder, 3, LAYOUTS[layout], plan=plan, settings={"layout": layout}, per_replica=special)[0]


@pytest.mark.parametrize(("layout", "position", "place"), [
    ("fsdp", 1, "exchange"), ("fsdp", 0, "recompute"), ("fsdp", 1, "redo"), ("fsdp", 1, "forward"), ("pp_tp", 3, "recompute")])
def test_a_kill_inside_a_recovery(tmp_path, reference, layout, position, place):
    same(in_recovery(tmp_path, layout, position, place), layout, reference)


@pytest.mark.slow
@pytest.mark.parametrize("place", RECOVERY)
@pytest.mark.parametrize(("layout", "position"), [(layout, n) for layout, (_, size) in SIZES.items() for n in range(size)])
def test_a_kill_of_every_position_inside_a_recovery(tmp_path, reference, layout, position, place):
    same(in_recovery(tmp_path, layout, position, place), layout, reference)


@pytest.mark.slow
@pytest.mark.parametrize("step", [0, 1, STEPS - 1])
@pytest.mark.parametrize(("layout", "position", "place"), [
    (layout, position, place) for layout, (_, positions) in SIZES.items() for position in range(positions)
    for place in places(layout)])
def test_a_kill_of_every_position_at_every_place(tmp_path, reference, layout, position, place, step):
    result, _ = go(tmp_path, layout, [kill(step % 2, position, step, place)])
    same(result, layout, reference)


@pytest.mark.parametrize(("layout", "position", "inside"), [
    ("fsdp", 1, "all_gather"), ("fsdp", 0, "reduce_scatter"), ("pp_tp", 1, "all_reduce"), ("pp_tp", 2, "flush"),
    ("pp_fsdp", 1, "flush")])
def test_a_kill_inside_a_collective_of_the_replica(tmp_path, reference, layout, position, inside):
    doom = dict(replica=1, position=position, step=2, inside=inside)
    result, alive = go(tmp_path, layout, settings={"doom": doom}, victims=[(1, position)])
    same(result, layout, reference)
    assert result.lost() == [1]
    who = result.survivors[0].receipts[2]["who"]
    assert len(who) == B
    assert set(who) <= set(alive)                       # committed with all its microbatches, none of them the casualty's


def test_a_negative_control_of_the_hash(tmp_path, reference):
    """Random states that depend on who computes a microbatch."""
    result, _ = go(tmp_path, "fsdp", settings={"own_seeds": True})
    assert hashes(result, 2) != reference("fsdp")[0]


# -- fast ----------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("layout", "plan"), [
    ("fsdp", []), ("fsdp", [kill(0, 1, 1, "backward:1"), kill(2, 0, 2, "reduce:1")]),
    ("pp_tp", []), ("pp_tp", [kill(0, 2, 1, "reduce:1")]),
    ("pp_fsdp", []), ("pp_fsdp", [kill(1, 1, 2, "compute:1")])])
def test_fast_is_one_process_but_for_rounding(tmp_path, layout, plan):
    """Every replica recomputed each step's gradient unsharded, from all microbatches in float32."""
    result, _ = go(tmp_path, layout, plan, settings={"reduction": "fast", "reference": True})
    healthy(result, STEPS, exact=False)
    for rank in result.survivors:
        errors = [said["relative"] for said in rank.all("error")]
        assert len(errors) == STEPS
        assert 0 < max(errors) <= 1e-5                  # 0: something was compared with itself


def test_a_negative_control_of_the_measure(tmp_path):
    result, _ = go(tmp_path, "fsdp", settings={"reduction": "fast", "reference": True, "lose": True})
    assert min(said["relative"] for rank in result.survivors for said in rank.all("error")) > 1e-3


# -- evaluation ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("layout", "plan"), [
    ("fsdp", [kill(0, 1, 2, "compute:1")]), ("fsdp", [kill(2, 0, STEPS, "complete")]),
    ("pp_tp", [kill(1, 3, 2, "reduce:1")]), ("pp_fsdp", [kill(0, 2, 2, "compute:1")])])
def test_evaluation_is_one_process(tmp_path, reference, layout, plan):
    """Of 25 samples in batches of 4: the last holds one, which two data ranks share."""
    result, _ = go(tmp_path, layout, plan, settings={"evaluate": 25})
    same(result, layout, reference)
    for rank in result.survivors:
        assert [said["step"] for said in rank.all("evaluation")] == [0, 2, STEPS]
        for said in rank.all("evaluation"):
            assert said["scores"]["loss"] == pytest.approx(said["truth"], rel=1e-5)


# -- a replica leaves as a whole -----------------------------------------------------------------------------------------

@pytest.mark.parametrize(("layout", "doom"), [("fsdp", None), ("pp_tp", None), ("fsdp", "all_gather"), ("pp_tp", "flush")])
def test_the_ranks_of_a_broken_replica_are_gone_within_two_seconds(tmp_path, layout, doom):
    """Without a launcher that would end them, and long before any timeout."""
    replicas, positions = SIZES[layout]
    plan = [kill(1, 1, 1, "compute:0")] if doom is None else []
    settings = {"layout": layout, "doom": doom and dict(replica=1, position=1, step=1, inside=doom)}
    with grid(tmp_path, replicas, positions, plan=plan, settings=settings, failure_timeout=30.0) as made:
        made.until(lambda: made.code(positions + 1) is not None, "the victim is dead")
        made.until(lambda: all(made.code(n) is not None for n in made.of(1)), "its replica is gone", 2.0)
        made.wait()
        result = made.collect()
    assert result.ranks[positions + 1].code == -signal.SIGKILL
    healthy(result, STEPS)


def frozen(folder, peer_stays):
    """Position 1 of replica 1 is stopped; its peer waits for it in a collective of torch's, which nothing ends."""
    plan = [fault(1, 1, "compute:1", "stop") | {"rank": 1}]
    return grid(folder, 3, 2, plan=plan, failure_timeout=2.0, per_replica={1: {"settings": {"stays": peer_stays}}})


def test_the_peer_of_a_frozen_rank_leaves(tmp_path, reference):
    with frozen(tmp_path, False) as made:
        made.until(lambda: made.code(2) is not None, "the peer has left")
        made.wait([0, 1, 4, 5])
        assert made.stopped(3)
        result = made.collect()
    assert result.ranks[2].code in (1, LEFT), result.show()
    same(result, "fsdp", reference)
    assert result.lost() == [1]


def test_a_negative_control_of_leaving(tmp_path, reference):
    """The others don't need it to leave, but a peer that isn't told to would stay."""
    with frozen(tmp_path, True) as made:
        made.wait([0, 1, 4, 5])
        with pytest.raises(TimeoutError):
            made.until(lambda: made.code(2) is not None, "the peer has left", 3.0)
        result = made.collect()
    same(result, "fsdp", reference)


# -- refused -------------------------------------------------------------------------------------------------------------

def outputs(folder, replicas=1, positions=2, **options):
    """What all ranks said of a run that none of them gets through."""
    with grid(folder, replicas, positions, **options) as made:
        made.wait()
        result = made.collect()
    assert all(rank.code == 1 for rank in result.ranks.values()), result.show()
    return [rank.output for rank in result.ranks.values()]


def test_a_mesh_that_does_not_multiply_to_the_ranks(tmp_path):
    for output in outputs(tmp_path, settings={"mesh": {"pp": 2, "tp": 2}}):
        assert "ValueError: the mesh {'pp': 2, 'tp': 2} has 4 ranks, but the replica has 2" in output


def test_a_model_that_is_wrapped_in_ddp(tmp_path):
    for output in outputs(tmp_path, script="rank_script:wrapped"):
        assert "wrapped in DistributedDataParallel: give run.manage the plain model" in output


def test_replicas_with_different_models(tmp_path):
    for output in outputs(tmp_path, replicas=2, per_replica={1: {"settings": {"width": 24}}}):
        assert "the replicas' models differ" in output
        assert "words.weight: (32, 16)" in output
        assert "words.weight: (32, 24)" in output


def test_replicas_with_different_meshes(tmp_path):
    """The one that comes second is not let in, and hears both values."""
    meshes = [{"dp_shard": 2}, {"tp": 2}]
    with grid(tmp_path, 2, 2, per_replica={r: {"settings": {"mesh": mesh}} for r, mesh in enumerate(meshes)}) as made:
        def gone(replica):
            return all(made.code(n) is not None for n in made.of(replica))
        made.until(lambda: gone(0) or gone(1), "one is refused")
        result, loser = made.collect(), 0 if gone(0) else 1
    for number in made.of(loser):
        assert "JoinRefused" in result.ranks[number].output
        assert all(str(mesh) in result.ranks[number].output for mesh in meshes), result.show()
