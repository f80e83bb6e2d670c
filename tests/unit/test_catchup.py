"""What a joiner fetches from whom, and what it does next."""
from __future__ import annotations

import random

import pytest

from recover.protocol.catchup import PATIENCE, Do, Pieces, Progress, next_move

VIEW = (0, 3)
WAITS, WHOLE, FAILED = Progress(False, False, -1, False), Progress(True, False, -1, False), Progress(False, True, -1, False)


def test_pieces_are_divided_between_givers() -> None:
    pieces = Pieces(10, 4)
    assert [pieces.ask((VIEW, m)) for m in (0, 1, 2, 3)] == [(0, 4), (4, 8), (8, 10), None]
    for m in (0, 1, 2):
        assert not pieces.whole
        pieces.arrived((VIEW, m))
    assert pieces.whole
    assert pieces.given == {(VIEW, 0): 4, (VIEW, 1): 4, (VIEW, 2): 2}


def test_what_a_lost_giver_was_asked_for_is_asked_of_another() -> None:
    pieces = Pieces(8, 4)
    one, two = (VIEW, 0), (VIEW, 1)
    pieces.ask(one)
    pieces.ask(two)
    pieces.arrived(two)
    pieces.lost(one)
    assert not pieces.whole
    assert pieces.ask(two) == (0, 4)
    pieces.lost(one)                                    # twice is harmless
    pieces.arrived(two)
    assert pieces.whole


def test_nothing_to_fetch_is_whole() -> None:
    assert Pieces(0).whole


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_arrives_once_whoever_dies(seed: int) -> None:
    rnd, got = random.Random(seed), bytearray(1000)
    pieces, view = Pieces(len(got), 64), 0
    busy: dict[int, tuple[int, int]] = {}
    while not pieces.whole:
        giver = rnd.randrange(3)
        if giver in busy:
            start, end = busy.pop(giver)
            for n in range(start, end):
                got[n] += 1
            pieces.arrived(((0, view), giver))
        elif (piece := pieces.ask(((0, view), giver))) is not None:
            busy[giver] = piece
        if rnd.random() < .1:                           # the view ends: the old threads say so late, but they do
            for each in busy:
                pieces.lost(((0, view), each))
            busy, view = {}, view + 1
    assert set(got) == {1}


@pytest.mark.parametrize(("ready", "told", "do"), [
    (False, [WAITS, WHOLE], Do.KEEP), (False, [WHOLE, WHOLE], Do.READY), (False, [WHOLE, FAILED], Do.AGAIN),
    (True, [Progress(False, False, 7, False)] * 2, Do.TAKE_OVER),
    (True, [Progress(False, False, 7, False), Progress(False, False, 6, False)], Do.KEEP),
    (True, [Progress(False, True, -1, False)], Do.KEEP),        # whose copy is in place needs no giver
    (True, [Progress(False, False, 3, True)], Do.AGAIN),
    (False, [Progress(False, False, 7, False)], Do.KEEP)])
def test_moves(ready: bool, told: list[Progress], do: Do) -> None:
    assert next_move(7, ready, 0, told).do is do


def test_a_new_attempt_begins_with_a_step_that_no_giver_can_have_begun() -> None:
    starts = [next_move(7, False, tries, [FAILED]).start for tries in (0, 1, 100)]
    assert starts == [9, 10, 9 + PATIENCE]
