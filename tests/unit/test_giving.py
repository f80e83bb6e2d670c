"""What a giver's training thread does when a step begins."""
from __future__ import annotations

from types import SimpleNamespace

import pytest

from recover import events
from recover.config import Timeouts
from recover.training.giving import Giver
from recover.training.snapshot import Snapshot


class Hands:
    def __init__(self, size=1000):
        self.sizes, self.rooms = size, []

    def size(self):
        if isinstance(self.sizes, Exception):
            raise self.sizes
        return self.sizes

    def take(self, step, room):
        self.rooms.append(room)
        return Snapshot(b"head", room)


def giver(hands):
    return Giver(lambda: hands, lambda: b"", Timeouts(failure_timeout=5), events.NullLog())


def test_nothing_is_copied_before_there_is_room():
    hands = Hands()
    it = giver(hands)
    it._wanted[7] = 3
    it.at(3)
    assert hands.rooms == []
    group = SimpleNamespace(lost=None)
    assert it._await(group, 7, 3) is None               # too late: it names another step, and by then there is room
    it._make_room()
    it._wanted[7] = 4
    it.at(4)
    assert [room.numel() for room in hands.rooms] == [1000]
    assert it._await(group, 7, 4).data is hands.rooms[0]


@pytest.mark.parametrize("trouble", [RuntimeError("dictionary changed size during iteration"), 1 << 60])
def test_without_room_the_copy_makes_its_own(trouble):
    hands = Hands(trouble)
    it = giver(hands)
    it._making = True
    it._make_room()
    assert not it._making                               # else nobody would ever be given a copy
    it._wanted[7] = 3
    it.at(3)
    assert [room.numel() for room in hands.rooms] == [0]


def test_what_nobody_wants_is_let_go():
    it = giver(Hands())
    it._make_room()
    it._tidy()
    assert it._room is None
