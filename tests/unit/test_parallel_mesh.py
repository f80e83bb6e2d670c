"""Where a rank stands inside its replica: pure arithmetic, compared with torch's own meshes in the integration tests."""
from __future__ import annotations

import pytest

from recover.parallel.mesh import Place


def test_the_last_axis_runs_fastest():
    place = Place.of(5, 8, {"pp": 2, "dp_shard": 2, "tp": 2})
    assert place.coordinates(5) == {"pp": 1, "dp_shard": 0, "tp": 1}
    assert (place.data_rank, place.data_size, place.stage) == (0, 2, 1)


def test_losses_count_once_per_data_rank_on_the_last_stage():
    assert Place.of(0, 8, {"pp": 2, "dp_shard": 2, "tp": 2}).speakers() == (4, 6)
    assert Place.of(0, 1, None).speakers() == (0,)
    assert Place.of(0, 4, {"tp": 4}).speakers() == (0,)
    assert Place.of(3, 4, None).speakers() == (0, 1, 2, 3)


def test_two_data_axes_are_numbered_together():
    numbers = [Place.of(r, 8, {"dp_replicate": 2, "tp": 2, "cp": 2}).data_rank for r in range(8)]
    assert numbers == [0, 1, 0, 1, 2, 3, 2, 3]


def test_a_mesh_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="has 4 ranks, but the replica has 2"):
        Place.of(0, 2, {"pp": 2, "tp": 2})
    with pytest.raises(ValueError, match="at least 1"):
        Place.of(0, 0, {"pp": 0})
