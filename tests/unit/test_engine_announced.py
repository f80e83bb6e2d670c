"""Which view a joiner takes for the one that is to let it in."""
from __future__ import annotations

from types import SimpleNamespace

import pytest

from recover.protocol.messages import NO_VIEW, Pending, View
from recover.training.engine import Engine

OLD, NEW, NEWER = (0, 4), (0, 5), (0, 6)


def announced(after, latest, pending):
    member = SimpleNamespace(latest=View(latest, (0, 1)) if latest else View(),
                             pending=Pending(View(pending, (0, 1, 2)), OLD) if pending else None)
    found = Engine.announced(SimpleNamespace(member=member), after)
    return found.id if found else None


@pytest.mark.parametrize(("after", "latest", "pending", "expected"), [
    (NO_VIEW, None, None, None),
    (NO_VIEW, None, NEW, NEW),
    (OLD, None, NEW, NEW),                  # the one that it was to enter with fell
    (NEW, None, NEW, None),                 # it is that one that fell
    (OLD, NEW, NEWER, None),                # it is in a view by now: others wait for its report there
    (NO_VIEW, NEW, NEWER, None),
    (NEW, NEW, NEWER, NEWER)])
def test_a_view_that_it_is_in_comes_before_what_is_announced_on_top_of_it(after, latest, pending, expected):
    assert announced(after, latest, pending) == expected
