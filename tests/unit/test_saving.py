"""When a checkpoint is due and by whom; that positions of a replica act as one; that nothing gets a name before its fence."""
from __future__ import annotations

import threading
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch

from recover import events
from recover.parallel.inner import Alone
from recover.training.checkpoint import Checkpoints, Draft, Part, found, load
from recover.training.saving import Author, Rhythm, Saver, Training, turn
from recover.training.state import Flat

PATIENCE = 20.0


class Said(events.NullLog):
    def __init__(self):
        self.lines = []

    def emit(self, event, **values):
        self.lines.append((event, values))


class Between:
    """The agreement of two positions, driven by two threads."""

    def __init__(self, values, barrier, me):
        self.values, self.barrier, self.me = values, barrier, me

    def agree(self, kind, value):
        self.values[self.me] = (kind, value)
        self.barrier.wait(PATIENCE)
        told = list(self.values)
        self.barrier.wait(PATIENCE)
        assert len({kind for kind, _ in told}) == 1
        return [value for _, value in told]


def saver(directory, position=0, ranks=1, inner=None, replica=0, last=100, **wanted):
    author = Author(replica, position, ranks, "nonce", "run", {"seed": 0}, {})
    training = Training((inner or Alone()).agree, lambda what, seconds: nullcontext())
    return Saver(Checkpoints(directory, **{"every": 2, **wanted}), author, training, Said(), last=last, patience=PATIENCE)


def state(value=1.0):
    return Part(Flat({"w": torch.full((3,), value)}, {}), {})


def test_turns_go_round_and_are_fair():
    assert [turn(n, (4, 1, 7)) for n in range(6)] == [1, 4, 7, 1, 4, 7]
    assert set(Counter(turn(n, range(5)) for n in range(100)).values()) == {20}


def test_every():
    rhythm = Rhythm(5, None, last=12)
    assert {steps: n for steps in range(1, 13) if (n := rhythm.due(steps)) is not None} == {5: 1, 10: 2, 12: 2}


def test_minutes():
    rhythm = Rhythm(None, 0.5, last=1000)
    due = [steps for steps in range(1, 100) if rhythm.due(steps, 1000.0 + steps) is not None]
    assert [b - a for a, b in pairwise(due)] == [30] * (len(due) - 1)
    assert len(due) == 3
    fresh = Rhythm(None, 0.5, last=1000)                # resumed: the first reading only begins the measure
    assert fresh.due(77, 5000.0) is None


def test_without_either_only_the_last_step():
    rhythm = Rhythm(None, None, last=4)
    assert [rhythm.due(steps) is not None for steps in range(1, 5)] == [False, False, False, True]


def test_no_name_before_the_fence(tmp_path):
    one = saver(tmp_path)
    one.between(2, (0,), state)
    assert one.job is not None
    assert one.job.ready.wait(PATIENCE)
    one.fenced(0)
    assert not one.job.over.wait(0.1)
    assert found(tmp_path) == []
    one.fenced(1)
    assert one.job.over.wait(PATIENCE)
    assert [steps for steps, _ in found(tmp_path)] == [2]
    assert [name for name, _ in one.record.lines] == [events.CHECKPOINT_SAVED]


def test_what_ends_before_its_fence_leaves_nothing(tmp_path):
    one = saver(tmp_path)
    one.between(2, (0,), state)
    one.settle()
    assert list(tmp_path.iterdir()) == []
    assert one.failed == 1


def test_the_copy_is_a_copy(tmp_path):
    one = saver(tmp_path)
    part = state()
    one.between(2, (0,), lambda: part)
    part.flat.tensors["w"].zero_()
    one.fenced(1)
    one.settle()
    assert float(load(tmp_path / "step-00000002", 0).flat.tensors["w"][0]) == 1.0


def test_only_whose_turn_it_is(tmp_path):
    one = saver(tmp_path, replica=1)
    one.between(2, (0, 1), state)
    assert one.job is not None
    one = saver(tmp_path, replica=1)
    one.between(4, (0, 1), state)
    assert one.job is None
    one.asked = True
    assert not one.between(5, (0, 1), state)            # asked for: the lowest does
    lowest = saver(tmp_path)
    lowest.asked = True
    assert lowest.between(5, (0, 1), state)


def test_one_at_a_time(tmp_path, monkeypatch):
    held = threading.Event()
    write = Draft.write
    monkeypatch.setattr(Draft, "write", lambda self, *args: (held.wait(PATIENCE), write(self, *args))[1])
    one = saver(tmp_path)
    for steps in (2, 3, 4, 6):
        one.between(steps, (0,), state)
        one.fenced(steps - 1)
    assert one.skipped == 2
    held.set()
    one.settle()
    assert [steps for steps, _ in found(tmp_path)] == [2]


@pytest.mark.parametrize("fault", ["copy", "write", "publish"])
def test_what_fails_is_counted_and_kills_nobody(tmp_path, monkeypatch, fault):
    def fails(*_):
        raise OSError(28, "No space left on device")
    one = saver(tmp_path)
    with monkeypatch.context() as patch:
        if fault != "copy":
            patch.setattr(Draft, fault, fails)
        one.between(2, (0,), state if fault != "copy" else bad)
        one.fenced(1)
        one.settle()
    assert one.failed == 1
    assert [name for name, _ in one.record.lines] == [events.CHECKPOINT_FAILED]
    assert list(tmp_path.iterdir()) == []
    one.between(4, (0,), state)
    one.fenced(3)
    one.settle()
    assert [steps for steps, _ in found(tmp_path)] == [4]


def bad():
    raise ValueError("a Thing can't be kept")


def pair(tmp_path, act):
    """Two positions of a replica, each in a thread; gives what they raised."""
    values, barrier, errors = [None, None], threading.Barrier(2), []

    def run(me):
        try:
            act(saver(tmp_path, me, 2, Between(values, barrier, me)), me)
        except BaseException as error:
            errors.append(error)
            barrier.abort()
            raise
    threads = [threading.Thread(target=run, args=(me,)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not errors


def test_positions_publish_together(tmp_path):
    def act(one, me):
        one.between(2, (0,), lambda: state(float(me)))
        one.fenced(1)
        one.settle()
        assert one.failed == 0
    pair(tmp_path, act)
    assert [float(load(tmp_path / "step-00000002", p).flat.tensors["w"][0]) for p in (0, 1)] == [0.0, 1.0]


@pytest.mark.parametrize("lame", [0, 1])
def test_positions_drop_together(tmp_path, lame):
    def act(one, me):
        one.between(2, (0,), bad if me == lame else state)
        one.fenced(1)
        one.settle()
        assert one.failed == 1
    pair(tmp_path, act)
    assert list(tmp_path.iterdir()) == []


def test_a_position_whose_fence_has_not_passed_holds_the_others_back(tmp_path):
    def act(one, me):
        one.between(2, (0,), state)
        assert one.job.ready.wait(PATIENCE)
        if me == 0:
            one.fenced(1)
        one.between(3, (0,), state)
        assert found(tmp_path) == []
        assert one.job is not None
        one.fenced(1)
        one.between(4, (7,), state)                     # released here
        assert one.job is None
        one.settle()
    pair(tmp_path, act)
    assert [steps for steps, _ in found(tmp_path)] == [2]
