"""The finish line, as the coordinator sees it: nobody waits for the report of a member that has finished."""
from __future__ import annotations

import pytest

from recover.protocol.coordinator import Answered, Coordinator, Pushed


@pytest.fixture
def core():
    made = Coordinator(3)
    for member in range(3):
        made.joined(member, ())
    made.outbox.clear()
    return made


@pytest.mark.parametrize("finishes_first", [True, False])
def test_an_exchange_moves_on_without_whoever_finished(core, finishes_first):
    view = core.view.id
    acts = [lambda: core.finish(2), lambda: core.report(0, view, b"r")]
    for act in acts if finishes_first else reversed(acts):
        act()
    (pushed,) = core.outbox
    assert isinstance(pushed, Pushed)
    assert pushed.view.members == (0, 1)
    core.outbox.clear()
    for member in (0, 1):
        core.report(member, core.view.id, b"r")
    assert [type(out) for out in core.outbox] == [Answered]


def test_finishing_alone_tells_nobody(core):
    for member in range(3):
        core.finish(member)
    assert core.outbox == []


def test_whoever_reported_may_finish(core):
    view = core.view.id
    for member in range(3):
        core.report(member, view, b"r")
    core.outbox.clear()
    core.finish(1)
    assert core.outbox == []
