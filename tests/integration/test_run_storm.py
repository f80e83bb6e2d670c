"""A short storm of random faults, with restarts. The long one: `python benchmarks/soak.py`."""
from __future__ import annotations

import pytest
from harness import run
from storm import growth, storm

from recover.report.audit import audit

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


def test_a_run_gets_over_whatever_happens(tmp_path):
    (tmp_path / "storm").mkdir()
    blown, steps = storm(tmp_path / "storm", seed=1, faults=8, seconds=90)
    assert blown.lives > 0
    assert blown.joined > 0
    assert audit(tmp_path / "storm" / "events").ok
    reference = run(tmp_path, "run_script:train", 1, settings={"steps": steps})
    assert reference.hash == blown.hash


def test_growth_shows_what_only_grows():
    flat = [dict(files=files, threads=9, memory=1000) for files in (12, 14, 11, 15, 12, 13, 14, 12)]
    assert growth(flat) == dict(files=-2, threads=0, memory=0)
    assert growth([dict(files=12 + n, threads=9, memory=1000) for n in range(8)])["files"] == 5
