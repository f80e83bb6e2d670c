"""Compiled models: hooks fire, deaths change nothing. With g++, which inductor's kernels for the processor need; else
the graph is captured and split alike, but runs uncompiled."""
from __future__ import annotations

import shutil

import pytest
from harness import fault, run
from run_checks import healthy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

STEPS = 5
BACKEND = "inductor" if shutil.which("g++") else "aot_eager"


def go(folder, replicas, plan=(), **settings):
    settings = dict(steps=STEPS, microbatches=6, compile={"backend": BACKEND}) | settings
    return run(folder, "run_script:train", replicas, plan=plan, settings=settings, patience=120)


def test_exact_with_kills_equals_one_replica(tmp_path):
    reference = go(tmp_path, 1)
    healthy(reference, STEPS)
    result = go(tmp_path, 3, [fault(1, 1, "reduce:1"), fault(0, 3, "compute:1")])
    healthy(result, STEPS)
    assert result.hash == reference.hash


def test_fast_is_the_replayed_gradient(tmp_path):
    result = go(tmp_path, 2, [fault(1, 2, "compute:1")], reduction="fast", reference=True)
    healthy(result, STEPS, exact=False)
    for rank in result.survivors:
        assert max(said["relative"] for said in rank.all("error")) <= 1e-5
