"""Which parameter lies where, and when a bucket may leave: pure."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.gradients.layout import Learned, Slot, TailLayout, plan
from recover.gradients.progress import Progress

F32, F64 = ("float32", "cpu"), ("float64", "cpu")


def slots(*sizes: int, kind: tuple[str, str] = F32) -> list[Slot]:
    return [Slot(size, 4, kind) for size in sizes]


def test_reverse_order_of_registration_small_bucket_first() -> None:
    assert plan(slots(10, 10, 10, 10, 10), None, bucket_bytes=80, first_bucket_bytes=40) == [[4], [3, 2], [1, 0]]


def test_a_parameter_above_the_limit_has_its_own_bucket() -> None:
    assert plan(slots(1, 100, 1), None, bucket_bytes=40, first_bucket_bytes=40) == [[2], [1], [0]]


def test_kinds_do_not_mix() -> None:
    mixed = [Slot(1, 4, F32), Slot(1, 8, F64), Slot(1, 4, F32)]
    assert plan(mixed, None, bucket_bytes=100, first_bucket_bytes=100) == [[2, 0], [1]]


def test_learned_order_and_unseen_last() -> None:
    learned = Learned(fires=[1, 0, 3, 1], order=[4, 0, 9, 1])
    assert plan(slots(1, 1, 1, 1), learned, bucket_bytes=4, first_bucket_bytes=4) == [[3], [0], [2, 1]]


def test_buckets_of_several_kinds_leave_in_the_order_in_which_they_become_final() -> None:
    mixed = [Slot(1, 4, F32), Slot(1, 8, F64), Slot(1, 4, F32)]
    learned = Learned(fires=[1, 1, 1], order=[1, 2, 3])
    assert plan(mixed, learned, bucket_bytes=100, first_bucket_bytes=100) == [[1], [0, 2]]


def test_unseen_of_another_kind_behind_everything() -> None:
    mixed = [Slot(1, 8, F64), Slot(1, 4, F32)]
    learned = Learned(fires=[0, 1], order=[0, 1])
    assert plan(mixed, learned, bucket_bytes=100, first_bucket_bytes=100) == [[1], [0]]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), count=st.integers(1, 20))
def test_every_parameter_exactly_once(data: st.DataObject, count: int) -> None:
    parameters = [Slot(data.draw(st.integers(0, 30)), 4, data.draw(st.sampled_from([F32, F64]))) for _ in range(count)]
    fires = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    order = data.draw(st.permutations(range(1, count + 1)))
    for learned in (None, Learned(fires=fires, order=[o if f else 0 for f, o in zip(fires, order, strict=True)])):
        layout = plan(parameters, learned, bucket_bytes=100, first_bucket_bytes=20)
        assert sorted(p for bucket in layout for p in bucket) == list(range(count))
        assert all(len({parameters[p].kind for p in bucket}) == 1 for bucket in layout)


def test_tail_parts_do_not_overlap() -> None:
    tail = TailLayout(microbatches=3, parameters=2, levels=4)
    parts = [tail.count, tail.who, tail.loss, tail.weight, tail.bad, tail.late, tail.used, tail.fires, tail.order,
             tail.level]
    assert [i for part in parts for i in range(part.start, part.stop)] == list(range(tail.size))
    assert [part.stop - part.start for part in parts] == [3] * 6 + [2] * 3 + [4]


BUCKETS = [[3], [2, 1], [0]]


def test_buckets_leave_in_order_though_final_in_another() -> None:
    progress = Progress(BUCKETS, 4, [1, 1, 1, 1], range(3))
    assert progress.fire(2) == []
    assert progress.fire(1) == []           # bucket 1 is final, but 0 is not
    assert progress.fire(3) == [0, 1]
    assert progress.fire(0) == []           # the last bucket leaves at the end
    assert progress.rest() == [2]
    assert progress.late == []


def test_only_wanted_buckets_leave_and_do_not_wait_for_others() -> None:
    progress = Progress(BUCKETS, 4, [1, 1, 1, 1], [1, 2])
    assert progress.fire(2) == []
    assert progress.fire(1) == [1]
    assert progress.rest() == [2]


def test_nothing_leaves_early_before_it_was_learned() -> None:
    progress = Progress(BUCKETS, 4, None, range(3))
    assert [progress.fire(p) for p in (3, 2, 1, 0)] == [[]] * 4
    assert progress.rest() == [0, 1, 2]


def test_a_shared_parameter_is_final_after_its_last_firing() -> None:
    progress = Progress(BUCKETS, 4, [1, 1, 1, 3], range(3))
    assert [progress.fire(3) for _ in range(3)] == [[], [], [0]]
    assert progress.last[3] == 3


def test_fewer_firings_than_learned_leave_at_the_end() -> None:
    progress = Progress(BUCKETS, 4, [1, 1, 1, 2], range(3))
    assert progress.fire(3) == []
    assert progress.rest() == [0, 1, 2]


def test_a_firing_after_the_bucket_left_is_noted() -> None:
    progress = Progress(BUCKETS, 4, [1, 1, 1, 1], range(3))
    assert progress.fire(3) == [0]
    assert progress.fire(3) == []
    assert progress.late == [3]


def test_a_bucket_of_unseen_parameters_waits_for_the_end() -> None:
    progress = Progress([[1], [0], [2]], 3, [0, 1, 1], range(3))
    assert progress.fire(1) == [0]
    assert progress.fire(2) == []
    assert progress.fire(0) == []
    assert progress.rest() == [1, 2]
    assert progress.late == []


def test_wanted_beyond_the_buckets_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 2"):
        Progress(BUCKETS, 4, None, [3])
