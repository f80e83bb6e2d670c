"""Decisions about the end: who leaves after which step, when all end, when the run waits."""
from __future__ import annotations

from typing import Any

import pytest

from recover.protocol.decision import Decision, Job, decide
from recover.protocol.messages import Report
from recover.workload.balanced import Balanced


def report(step: int = 4, leaving: bool = False, reduced: tuple[int, ...] = (), owes: tuple[int, ...] = (),
           **values: Any) -> Report:
    return Report(step=step, level=True, leaving=leaving, owes={step: frozenset(owes)}, buckets=((1, 2),),
                  reduced=frozenset((0, b) for b in reduced), vectors={0: {0: 1.0, 1: 1.0, 2: 1.0}}, **values)


def decided(*reports: Report, **job: Any) -> Decision:
    made = decide(range(len(reports)), dict(enumerate(reports)), Job(6, 10, Balanced(), **job))
    assert made is not None
    return made


def test_one_leaves_after_the_step_and_its_work_goes_to_the_others() -> None:
    made = decided(report(owes=(0, 1)), report(leaving=True, owes=(2,)), report(owes=(4, 5)))
    assert [made.last(m) for m in range(3)] == [None, 4, None]
    assert made.ending == ""
    assert (made.lost, set(made.extra) - {1}) == ({3}, set(made.extra))
    assert made.vector[1] == 0


def test_all_told_give_up_a_step_that_is_not_computed() -> None:
    made = decided(*(report(leaving=True, reduced=(0,)) for _ in range(3)))
    assert [made.last(m) for m in range(3)] == [3, 3, 3]
    assert (made.ending, made.lost, made.extra) == ("told", frozenset(), {})


def test_all_told_commit_a_step_that_is_whole_somewhere() -> None:
    made = decided(report(leaving=True, reduced=(0,)), report(leaving=True, reduced=(1,)))
    assert [made.last(m) for m in range(2)] == [4, 4]
    ahead = decided(report(leaving=True, reduced=(0, 1)), report(5, leaving=True))
    assert [ahead.last(m) for m in range(2)] == [4, 4]


def test_a_joiner_goes_with_the_others() -> None:
    made = decided(report(leaving=True), report(leaving=True), Report(step=None, fresh=True))
    assert (made.ending, made.last(2)) == ("told", 3)


@pytest.mark.parametrize(("below", "floor", "ending", "paused"), [
    ("stop", 3, "floor", False), ("stop", 2, "", False), ("wait", 3, "", True), ("wait", 2, "", False), ("stop", 0, "", False)])
def test_the_floor(below: str, floor: int, ending: str, paused: bool) -> None:
    made = decided(report(owes=(0, 1)), report(owes=(2, 3)), floor=floor, below=below)
    assert (made.ending, made.paused) == (ending, paused)
    assert made.last(0) == (3 if ending else None)


def test_who_is_told_while_the_run_waits_goes_at_once() -> None:
    made = decided(report(), report(leaving=True), floor=3)
    assert (made.paused, made.last(0), made.last(1)) == (True, None, 3)


def test_before_the_first_parameters_are_everywhere_all_end_without_a_step() -> None:
    made = decided(*(report(0, leaving=True, formed=False) for _ in range(2)))
    assert (made.ending, made.last(0)) == ("told", -1)
