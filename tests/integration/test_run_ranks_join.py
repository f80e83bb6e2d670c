"""Replicas of several ranks join a run under way: each position gets its own part from its peers."""
from __future__ import annotations

import pytest
from ranks_harness import LAYOUTS, grid, hashes, kill, run

from recover.report.audit import audit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

STEPS = 16


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """layout -> hashes by position of a run of one replica."""
    made = {}

    def of(layout):
        if layout not in made:
            result, _ = run(tmp_path_factory.mktemp("reference"), 1, LAYOUTS[layout], settings=dict(layout=layout, steps=STEPS))
            made[layout] = hashes(result, LAYOUTS[layout])
        return made[layout]
    return of


def contributed(result, replica):
    return sum(receipt["who"].count(replica) for receipt in result.survivors[0].receipts.values())


SLOW = pytest.mark.slow


@pytest.mark.parametrize("layout", ["fsdp", pytest.param("pp_tp", marks=SLOW), pytest.param("pp_fsdp", marks=SLOW)])
def test_a_replica_comes_back(tmp_path, reference, layout):
    size = LAYOUTS[layout]
    settings = dict(layout=layout, steps=STEPS, linger=0.1)
    with grid(tmp_path, 2, size, plan=[kill(1, size - 1, 1, "compute:1")], settings=settings) as made:
        made.wait(made.of(1))
        made.start_rank(1)
        made.wait(seconds=80)
        result = made.collect()
    assert all(rank.code == 0 for rank in result.ranks.values()), result.show()
    assert hashes(result, size) == reference(layout)
    assert contributed(result, 1) > 0, result.show()
    offences = [each for each in audit(result.directory / "events").offences if each.rule != "steps"]
    assert not offences, f"{offences[0]}\n{result.show()}"


def test_a_giver_dies(tmp_path, reference):
    settings = dict(layout="fsdp", steps=STEPS, linger=0.1)
    with grid(tmp_path, 2, 2, plan=[kill(0, 1, 8, "compute:1")], settings=settings) as made:
        made.until(lambda: any(said["step"] >= 1 for said in made.said(0, "step")), "two steps")
        made.start_rank(2)
        made.wait(seconds=80)
        result = made.collect()
    assert {rank.replica for rank in result.survivors} == {2, 3, 4, 5}, result.show()
    assert hashes(result, 2) == reference("fsdp")
    assert contributed(result, 2) > 0, result.show()
