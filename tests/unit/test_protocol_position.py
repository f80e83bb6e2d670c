"""Parts of the state machine that the simulation can't show."""
from __future__ import annotations

import pytest

from recover.errors import Diverged
from recover.protocol.decision import Job
from recover.protocol.messages import Speed
from recover.protocol.position import Position
from recover.workload.balanced import Balanced


def position():
    return Position(Job(4, 10, Balanced()), 0, 0, 2, first=True)


def test_states_that_differ_are_noticed_at_the_fence():
    with pytest.raises(Diverged, match="step 4"):
        position().hear_fence(3, {0: Speed(1.0, None, "2:aa"), 1: Speed(1.0, None, "2:bb")})


def test_states_that_agree_and_members_that_say_nothing_pass():
    here = position()
    here.hear_fence(3, {0: Speed(1.0, None, "2:aa"), 1: Speed(2.0, None, "2:aa"), 2: Speed(0.0)})
    assert here.vectors == {5: {0: 1.0, 1: 2.0, 2: 0.0}}
