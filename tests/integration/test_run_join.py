"""Joining a run under way: equal bits at the end, whoever joins, dies or comes back, and whenever."""
from __future__ import annotations

import pytest
from harness import cluster, run
from run_checks import healthy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]

TRAIN = "run_script:train"
STEPS, LINGER = 24, 0.02


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


def at_step(made, replica, step):
    return lambda: any(said["step"] >= step for said in made.said(replica, "step"))


def contributed(result, replica):
    return sum(receipt["who"].count(replica) for receipt in result.survivors[0].receipts.values())


@pytest.mark.parametrize("step", [0, 1, 2, 7])
def test_a_third_replica_joins(tmp_path, reference, step):
    settings = {"steps": STEPS, "linger": LINGER}
    with cluster(tmp_path, TRAIN, 2, settings=settings) as made:
        made.until(at_step(made, 0, step), "under way")
        made.start_rank(2)
        made.wait()
        result = made.collect()
    assert len(result.survivors) == 3, result.show()
    assert result.hash == reference(steps=STEPS).hash
    assert contributed(result, 2) > 0, result.show()
