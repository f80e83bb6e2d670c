"""Thousands of failure schedules over the real protocol, and proof that each rule is needed."""
from __future__ import annotations

import subprocess
import sys

import pytest
from doubles import PARTS, WORLDS, without
from worlds import Floored, Measured, Preempted, Stopping, Warm

from recover.simulate.protocol import Parts, run, run_seeds
from recover.simulate.world import World

SCHEDULES = 20_000

KNOWN = dict(fence=2, lag=30, reset=32, forward=2, order=2, confirm=1335, proves=35, agreement=3, turn=0, vector=7,
             freeze=1774, settle=4820, exit=2, handback=60, whole=10, clean=10, suspect=5, blame=16, atonce=43, verdict=2174,
             incarnation=45, newest=144, hold=21, reissue=0, vectors=146, floor=7, unknown=561,
             unbegun=9, first=15579, late=44)
"""A seed that breaks without the rule (found by running seeds from 0 on)."""


@pytest.mark.timeout(900)
def test_no_schedule_breaks_an_invariant():
    views, broken = run_seeds(0, SCHEDULES)
    assert broken is None, f"seed {broken[0]}: {broken[1]}; replay: recover simulate protocol --seeds {broken[0]}:{broken[0] + 1}"
    assert sum(views.values()) == SCHEDULES
    eventful = sum(n for count, n in views.items() if count >= 3)
    assert eventful > SCHEDULES / 3, f"schedules without failures prove nothing: {views}"


@pytest.mark.timeout(300)
def test_many_positions():
    """20,000 schedules: `recover simulate protocol --seeds 0:20000 --positions 2:8`."""
    _, broken = run_seeds(0, 700, positions=range(2, 9))
    assert broken is None, broken


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [Preempted, Floored, Stopping, Warm, Measured])
def test_what_the_plain_world_has_not(kind):
    _, broken = run_seeds(0, 300, parts=Parts(world=kind))
    assert broken is None, broken


@pytest.mark.parametrize("rule", sorted(PARTS))
def test_every_rule_is_needed(rule):
    """Negative control: the same seed is clean with the rule, and breaks without it."""
    seed = KNOWN[rule]
    run(seed, Parts(world=WORLDS.get(rule, World)))
    with without(rule) as parts, pytest.raises(Exception):     # noqa: B017, PT011 - any failure is the point
        run(seed, parts)


def test_every_rule_has_a_seed():
    assert PARTS.keys() == KNOWN.keys()


def test_a_failure_names_its_seed_and_the_replay():
    """The command's own report, with a rule left out in a copy of its process."""
    code = ("import sys; sys.path.insert(0, 'tests/simulation'); from doubles import without\n"
            "import recover.simulate.protocol as p\n"
            "with without('fence') as parts:\n"
            "    print(p.run_seeds(0, 10, parts=parts, processes=1)[1])\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith(f"({KNOWN['fence']}, ")
