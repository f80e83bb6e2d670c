"""The speed that a replica says of itself."""
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recover.workload import Speedometer
from recover.workload.speed import NOTCHES


def test_unknown_before_the_first_measurement():
    assert Speedometer().speed() == 1.0
    assert Speedometer().speed(unknown=3.5) == 3.5


def test_constant_times_give_their_speed_to_a_notch():
    meter = Speedometer()
    for _ in range(5):
        meter.add(0.25)
    assert meter.speed() == 4.0
    meter = Speedometer(smoothing=1)
    meter.add(0.3)
    assert abs(math.log2(meter.speed() * 0.3)) <= 0.5 / NOTCHES


def test_a_flutter_changes_nothing_and_a_slowdown_does():
    meter = Speedometer()
    for seconds in (0.25, 0.251, 0.249, 0.2505):
        meter.add(seconds)
    assert meter.speed() == 4.0
    for _ in range(30):
        meter.add(1.0)
    assert meter.speed() == 1.0


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True)))
def test_whatever_it_is_told_it_says_a_speed_that_plans_accept(times):
    meter = Speedometer()
    for seconds in times:
        meter.add(seconds)
    assert 0 < meter.speed() < math.inf


def test_times_that_are_none_are_ignored():
    meter = Speedometer()
    meter.add(0.5)
    for seconds in (0.0, -1.0, math.nan, math.inf):
        meter.add(seconds)
    assert meter.speed() == 2.0


@pytest.mark.parametrize("smoothing", [0, -1, 1.5])
def test_smoothing_is_a_fraction(smoothing):
    with pytest.raises(ValueError, match="smoothing"):
        Speedometer(smoothing)
