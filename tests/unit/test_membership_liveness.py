"""Slow, busy, hung, frozen, cut off: decided on made-up clocks."""
from __future__ import annotations

import pytest

from recover.config import Timeouts
from recover.membership.activity import FACTOR, LATEST, Activity
from recover.membership.liveness import Signs, Steadiness, cut_off, judge
from recover.membership.wire import Progress

TIMES = Timeouts(failure_timeout=5.0)


class Clock:
    """Time goes on by `sleep`, with a heartbeat every 0.5 s; `frozen` lets it pass without any."""

    def __init__(self) -> None:
        self.now = 100.0
        self.activity = Activity(TIMES, lambda: self.now)
        self.said: Progress | None = None

    def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now + TIMES.heartbeat <= until:
            self.now += TIMES.heartbeat
            self.said = self.activity.beat()
        self.now = until
        self.said = self.activity.beat()

    def frozen(self, seconds: float) -> None:
        self.now += seconds

    def turns(self, phase: str, *seconds: float) -> None:
        for each in seconds:
            self.activity.turn(phase)
            self.sleep(each)


def hung(said: Progress | None, waited: float = 60.0) -> bool:
    found = judge(Signs(0.1, 0.1, said), waited, TIMES)
    assert found is None or found[0] == "hung"
    return found is not None


# -- what the training thread is at ---------------------------------------------------------------------------------
def test_before_and_after_the_run_nothing_is_owed() -> None:
    clock = Clock()
    clock.sleep(3)
    assert clock.said is None
    clock.turns("compute", 1)
    assert clock.said is not None
    clock.activity.stop()
    clock.sleep(1)
    assert clock.said is None
    assert not hung(None)


def test_a_thread_that_stands_still_is_hung_after_the_limit_and_not_before() -> None:
    clock = Clock()
    clock.turns("compute", 0.1, 0.1, 4.9)
    assert not hung(clock.said)
    clock.sleep(0.2)
    assert hung(clock.said)
    clock.activity.turn("compute")
    clock.sleep(0.5)
    assert not hung(clock.said), "it goes on"


def test_the_limit_follows_the_longest_of_the_latest_microbatches() -> None:
    clock = Clock()
    clock.turns("compute", 2.0, 0.1, 0.1, 19.0)
    assert not hung(clock.said), "ten times two seconds"
    clock.sleep(1.5)
    assert hung(clock.said)
    clock.turns("compute", *[0.1] * (LATEST + 1), 6.0)
    assert hung(clock.said), "what was long ago, the hang included, is forgotten"
    assert FACTOR == 10


def test_the_first_of_its_kind_is_not_measured_by_others() -> None:
    clock = Clock()
    clock.turns("compute", 0.1, 0.1)
    clock.turns("update", 300.0)
    assert not hung(clock.said)
    clock.turns("compute", 4.0)
    clock.turns("update", 0.1)
    clock.turns("update", TIMES.pause - 10)
    assert not hung(clock.said), "ten times 300 seconds"


def test_a_script_has_more_time_between_steps_than_in_a_microbatch() -> None:
    clock = Clock()
    clock.turns("update", 0.1, 49.0)
    assert not hung(clock.said)
    clock.sleep(2.0)
    assert hung(clock.said)


def test_who_waits_for_others_is_never_hung() -> None:
    clock = Clock()
    clock.turns("compute", 0.1, 0.1)
    with clock.activity.waiting():
        clock.sleep(1000)
        assert not hung(clock.said)
    clock.sleep(4.0)
    assert not hung(clock.said), "the phase begins anew"
    clock.sleep(2.0)
    assert hung(clock.said)


def test_a_pause_has_its_own_limit_and_teaches_nothing() -> None:
    clock = Clock()
    clock.turns("compute", 0.1, 0.1)
    with clock.activity.pause("checkpoint", 30.0):
        clock.sleep(29.0)
        assert not hung(clock.said)
        clock.sleep(2.0)
        assert hung(clock.said)
    with clock.activity.pause("checkpoint"):
        clock.sleep(TIMES.pause - 1)
        assert not hung(clock.said)
    clock.sleep(6.0)
    assert hung(clock.said)


def test_time_in_which_the_process_was_stopped_or_the_interpreter_held_does_not_count() -> None:
    clock = Clock()
    clock.turns("compute", 0.1, 0.1, 1.0)
    clock.frozen(3600.0)
    clock.sleep(0.5)
    assert not hung(clock.said)
    clock.turns("compute", 4.0)
    clock.sleep(27.0)
    assert hung(clock.said), "one hour in a debugger does not make the limit ten hours"


# -- what the coordinator finds -------------------------------------------------------------------------------------
BUSY = Progress("compute", True, 1.0, 5.0)
STUCK = Progress("compute", True, 5.5, 5.0)


@pytest.mark.parametrize(("signs", "waited", "cause"), [
    (Signs(0.4, 0.4, BUSY), 60.0, None),
    (Signs(3.9, None, BUSY), 60.0, None),
    (Signs(4.1, None, BUSY), 0.0, "heartbeat"),                         # it never had a pulse
    (Signs(4.1, 4.1, BUSY), 0.0, "heartbeat"),                          # frozen: the pulse stopped with it
    (Signs(4.1, 0.4, BUSY), 60.0, None),                                # the interpreter is busy
    (Signs(29.9, 0.4, BUSY), 60.0, None),
    (Signs(30.1, 0.4, BUSY), 0.0, "hung"),
    (Signs(30.1, 0.4, Progress("compute", True, 1.0, 90.0)), 60.0, None),
    (Signs(90.1, 0.4, Progress("compute", True, 1.0, 90.0)), 60.0, "hung"),
    (Signs(30.1, 0.4, Progress("wait", False, 1.0, 0.0)), 60.0, "hung"),        # what it waited for is long over
    (Signs(0.4, 0.4, STUCK), 4.1, "hung"),
    (Signs(0.4, None, STUCK), 4.1, "hung"),
    (Signs(0.4, 0.4, STUCK), 3.9, None),                                # nobody has waited long enough yet
    (Signs(0.4, 0.4, Progress("wait", False, 900.0, 0.0)), 900.0, None),
    (Signs(0.4, 0.4, None), 60.0, None),
])
def test_the_evidence_and_what_it_proves(signs: Signs, waited: float, cause: str | None) -> None:
    found = judge(signs, waited, TIMES)
    assert (found[0] if found else None) == cause
    assert found is None or found[1]


def test_only_waiting_counts_as_having_waited() -> None:
    assert Signs(0.1, None, Progress("wait", False, 7.0, 0.0)).waited == 7.0
    assert Signs(0.1, None, STUCK).waited == 0.0
    assert Signs(0.1).waited == 0.0


# -- cut off from each other ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(("pairs", "gone"), [
    ([], []),
    ([(0, 1), (1, 0)], [1]),                                            # of two, the higher number
    ([(1, 0)], [1]),                                                    # whoever reports it
    ([(3, 0), (3, 1), (3, 2)], [3]),
    ([(0, 1), (2, 1), (3, 1)], [1]),                                    # the one that most don't hear
    ([(0, 2), (0, 3), (1, 2), (1, 3)], [3, 2]),                         # two halves: one of them stays whole
    ([(0, 1), (2, 3)], [3, 1]),
    ([(0, 0)], []),
])
def test_one_rule_says_who_goes(pairs: list[tuple[int, int]], gone: list[int]) -> None:
    assert cut_off(pairs, range(4)) == gone
    left = set(range(4)) - set(gone)
    assert not any(a != b and {a, b} <= left for a, b in pairs), "no two of the rest are cut off"
    assert cut_off(reversed(pairs), range(4)) == gone


def test_whom_the_coordinator_does_not_hear_steadily_is_no_party() -> None:
    assert cut_off([(0, 1), (2, 1)], steady=[0, 2]) == []
    assert cut_off([(0, 1), (2, 1), (0, 2)], steady=[0, 2]) == [2]


def test_steady_means_heard_without_a_gap_as_long_as_others_may_have_heard_nothing() -> None:
    steadiness, now = Steadiness(TIMES, 0.0), 0.0
    while now < 3.9:
        steadiness.beat(now := now + 0.5)
    assert steadiness.steady(4.1)
    assert not steadiness.steady(6.1), "silent by now"
    steadiness.beat(6.2)
    assert not steadiness.steady(6.3), "busy until a moment ago: its peers' complaints prove nothing"
    for n in range(1, 9):
        steadiness.beat(6.2 + n / 2)
    assert steadiness.steady(10.3)
