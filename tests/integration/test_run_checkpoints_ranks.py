"""Checkpoints of replicas of several ranks: every position keeps its own shards, and one is whole when all have."""
from __future__ import annotations

import os
import resource

import pytest
from ranks_harness import grid, hashes, kill, losses, run
from run_checks import healthy

from recover import events
from recover.training.checkpoint import found

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

RANKS = {"fsdp": 2, "pp_tp": 4, "pp_fsdp": 4}
STEPS = 4


def settings(kept, layout, steps, every=1, **more):
    return {"layout": layout, "steps": steps, "checkpoint": {"directory": str(kept), "every": every}, **more}


@pytest.mark.parametrize(("layout", "before", "after"), [("fsdp", 2, 3), ("pp_tp", 2, 1), ("pp_fsdp", 1, 2)])
def test_another_number_of_replicas_goes_on(tmp_path, layout, before, after):
    ranks, kept = RANKS[layout], tmp_path / "kept"
    whole, _ = run(tmp_path, 1, ranks, settings={"layout": layout, "steps": STEPS})
    first, _ = run(tmp_path, before, ranks, settings=settings(kept, layout, 2))
    healthy(first, 2)
    assert [steps for steps, _ in found(kept)] == [2, 1]
    files = sorted(path.name for path in found(kept)[0][1].iterdir())
    assert files == ["manifest.json", *(f"position-{p}.safetensors" for p in range(ranks))]
    plan = [kill(2, 1, 2, "reduce:1")] if after == 3 else []
    second, _ = run(tmp_path, after, ranks, settings=settings(kept, layout, STEPS, save=[2]), plan=plan)
    assert sorted(second.survivors[0].receipts) == [2, 3]
    assert hashes(second, ranks) == hashes(whole, ranks)
    assert losses(second) == losses(whole)[2:]
    assert [steps for steps, _ in found(kept)] == [4, 3, 2]


def test_another_mesh_is_refused(tmp_path):
    kept = tmp_path / "kept"
    run(tmp_path, 1, 4, settings=settings(kept, "pp_tp", 1))
    with grid(tmp_path, 1, 4, settings=settings(kept, "pp_fsdp", STEPS)) as made:
        made.wait()
        result = made.collect()
    for rank in result.ranks.values():
        assert rank.code == 1
        assert "was written by replicas of the mesh {'pp': 2, 'tp': 2}" in rank.output, result.show()


def no_room(script):
    """Rank 1's files may not be longer than 8 KB: its part of a checkpoint is."""
    from rank_script import train
    if os.environ["RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, resource.RLIM_INFINITY))
    train(script)


def test_where_one_rank_can_not_write_all_drop_theirs(tmp_path):
    kept = tmp_path / "kept"
    result, _ = run(tmp_path, 1, 2, script="test_run_checkpoints_ranks:no_room", settings=settings(kept, "fsdp", 3))
    assert list(kept.iterdir()) == []
    for rank in result.survivors:
        assert len(rank.events(events.CHECKPOINT_FAILED)) >= 1


def test_one_damaged_part_makes_all_take_an_older_one(tmp_path):
    kept = tmp_path / "kept"
    whole, _ = run(tmp_path, 1, 2, settings={"layout": "fsdp", "steps": STEPS})
    run(tmp_path, 1, 2, settings=settings(kept, "fsdp", 3))
    os.truncate(kept / "step-00000003" / "position-1.safetensors", 100)
    result, _ = run(tmp_path, 2, 2, settings=settings(kept, "fsdp", STEPS))
    assert sorted(result.survivors[0].receipts) == [2, 3]
    assert hashes(result, 2) == hashes(whole, 2)
