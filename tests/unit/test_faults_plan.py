"""Fault plans: what is accepted, what is refused and how, and what a seed draws."""
from __future__ import annotations

import random
from pathlib import Path

import pytest

from recover.faults import ACTIONS, INDEXED, PLACES, Fault, FaultPlan

GOOD = """
faults:
  - {replica: 2, step: 5, place: "compute:1", action: kill}
  - {replica: 1, rank: 3, step: "*", place: redo, action: stop}
"""


def test_a_plan_is_read_with_defaults() -> None:
    plan = FaultPlan.parse(GOOD)
    assert plan.faults == (
        Fault(number=1, replica=2, rank=0, step=5, place="compute", index=1, action="kill"),
        Fault(number=2, replica=1, rank=3, step=None, place="redo", index=None, action="stop"))
    assert plan.for_rank(1, 3) == plan.faults[1:]
    assert plan.for_rank(1, 0) == ()


def test_a_bare_list_and_nothing_are_plans_too() -> None:
    assert FaultPlan.parse("- {replica: 0, step: 0, place: fence, action: cut}").faults[0].place == "fence"
    assert FaultPlan.parse("") == FaultPlan.parse("faults:") == FaultPlan()


def test_every_place_and_action_survives_dump_and_parse() -> None:
    entries = [{"replica": 0, "step": 1, "place": place + ":2" * (place in INDEXED), "action": action}
               for place in PLACES for action in ACTIONS]
    plan = FaultPlan.parse(str(entries))            # Python's literals are YAML here
    assert len(plan.faults) == len(PLACES) * len(ACTIONS)
    assert FaultPlan.parse(plan.dump()) == plan


@pytest.mark.parametrize(("entry", "said"), [
    ("{replica: 1, step: 5, place: fence}", "lacks action"),
    ("{replica: 1, step: 5, place: fence, action: kill, when: now}", "unknown when"),
    ("{replica: -1, step: 5, place: fence, action: kill}", "replica must be a whole number"),
    ("{replica: true, step: 5, place: fence, action: kill}", "replica must be a whole number"),
    ("{replica: 1, rank: x, step: 5, place: fence, action: kill}", "rank must be a whole number"),
    ("{replica: 1, step: any, place: fence, action: kill}", 'step must be a whole number from 0 or "*"'),
    ("{replica: 1, step: 5, place: nowhere, action: kill}", "place must be one of"),
    ("{replica: 1, step: 5, place: 7, action: kill}", "place must be one of"),
    ("{replica: 1, step: 5, place: compute, action: kill}", "needs an index, as in compute:0"),
    ("{replica: 1, step: 5, place: 'fence:1', action: kill}", "takes no index"),
    ("{replica: 1, step: 5, place: 'reduce:-1', action: kill}", "index of place reduce"),
    ("{replica: 1, step: 5, place: 'reduce:', action: kill}", "index of place reduce"),
    ("{replica: 1, step: 5, place: fence, action: explode}", "action must be one of kill, stop, hang, cut"),
    ("fence", "must be a mapping"),
])
def test_a_bad_entry_is_named_with_its_mistake(entry: str, said: str) -> None:
    good = "{replica: 0, step: 0, place: fence, action: kill}"
    with pytest.raises(ValueError, match=r"entry 2 of the fault plan") as caught:
        FaultPlan.parse(f"- {good}\n- {entry}\n")
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["3", "faults: 3", "plan: []", "a: [", "x" * (1 << 21)])
def test_what_is_no_plan_at_all_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="fault plan"):
        FaultPlan.parse(text)


def test_load_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"absent\.yaml"):
        FaultPlan.load(tmp_path / "absent.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("- {replica: 0}")
    with pytest.raises(ValueError, match=r"bad\.yaml: entry 1"):
        FaultPlan.load(bad)
    bad.write_text(GOOD)
    assert FaultPlan.load(bad) == FaultPlan.parse(GOOD)


def test_entries_that_no_rank_would_meet_are_refused() -> None:
    plan = FaultPlan.parse(GOOD)
    plan.check(replicas=3, ranks_per_replica=4)
    with pytest.raises(ValueError, match=r"entry 1 .*replicas 0 to 1"):
        plan.check(replicas=2, ranks_per_replica=4)
    with pytest.raises(ValueError, match=r"entry 2 .*ranks 0 to 0"):
        plan.check(replicas=3, ranks_per_replica=1)


def test_a_drawn_plan_is_a_function_of_its_seed_and_leaves_somebody_alive() -> None:
    rng = random.Random(1)
    plans = set()
    for seed in range(200):
        replicas, steps = rng.randint(2, 6), rng.randint(8, 40)
        n = rng.randint(0, replicas - 1)
        plan = FaultPlan.draw(seed, replicas, steps, n)
        assert plan == FaultPlan.draw(seed, replicas, steps, n)
        plan.check(replicas, 1)
        assert len({fault.replica for fault in plan.faults}) == len(plan.faults) == n
        steps_hit = [fault.step for fault in plan.faults]
        assert all(step is not None and 0 < step < steps - 1 for step in steps_hit)
        assert len(set(steps_hit)) == n
        plans.add(plan)
    assert len(plans) > 100


def test_draw_refuses_to_kill_everybody() -> None:
    with pytest.raises(ValueError, match="leave one alive"):
        FaultPlan.draw(0, replicas=3, steps=10, n=3)
    with pytest.raises(ValueError, match="at least 2 steps"):
        FaultPlan.draw(0, replicas=3, steps=1, n=2)
