"""Operations without sockets: bytes are carried between members by hand, in random portions and orders."""
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.collectives.frames import Header, Kind
from recover.collectives.operations import AllReduce, Copy, Gather, Scratch
from recover.collectives.streams import Pieces
from recover.errors import WireError

torch.set_num_threads(1)
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64]


def carry(operations, seed=0, step=1 << 20):
    """Start all, then move random portions from any stream to its arrival until nothing moves."""
    rnd = random.Random(seed)
    streams = {(m, peer): found for m, op in operations.items() for peer, found in op.start().items()}
    for m, operation in operations.items():
        for peer in operation.peers:
            operations[peer].posted(m, operation.post)
    while movable := [(key, s) for key, found in streams.items() for s in found if s.ready > s.taken]:
        (source, target), stream = rnd.choice(movable)
        count = min(stream.ready - stream.taken, rnd.randint(1, step))
        header = Header(Kind.DATA, stream.phase, count, stream.op, stream.taken)
        data = b"".join(stream.pieces.cut(stream.taken, count))
        for place in operations[target].place(source, header):
            place[:], data = data[:place.nbytes], data[place.nbytes:]
        operations[target].arrived(source, header)
        stream.taken += count
        if stream.taken == stream.total:
            operations[source].flushed()
    assert all(operation.complete for operation in operations.values())


def random_tensor(count, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.int64:
        return torch.randint(-2**62, 2**62, (count,), generator=generator)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 100).to(dtype)


def in_member_order(tensors):
    if tensors[0].dtype in (torch.bfloat16, torch.float16):
        total = tensors[0].float()
        for tensor in tensors[1:]:
            total = total + tensor.float()
        return total.to(tensors[0].dtype)
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def reduce(inputs, seed=0, step=1 << 20):
    outputs = {m: [torch.full_like(t, 7) for t in ts] for m, ts in inputs.items()}
    pool = Scratch()
    carry({m: AllReduce(1, inputs[m], outputs[m], m, sorted(inputs), pool) for m in inputs}, seed, step)
    return outputs


@settings(max_examples=60, deadline=None)
@given(members=st.sets(st.integers(0, 50), min_size=2, max_size=5), sizes=st.lists(st.integers(0, 400), max_size=4),
       dtype=st.sampled_from(DTYPES), seed=st.integers(0, 10**6))
def test_all_reduce_is_the_sum_in_member_order_to_the_bit(members, sizes, dtype, seed):
    inputs = {m: [random_tensor(n, dtype, seed + 97 * m + i) for i, n in enumerate(sizes)] for m in members}
    before = {m: [t.clone() for t in ts] for m, ts in inputs.items()}
    outputs = reduce(inputs, seed, step=97)
    for index in range(len(sizes)):
        expected = in_member_order([inputs[m][index] for m in sorted(members)])
        assert all(torch.equal(outputs[m][index], expected) for m in members)
    assert all(torch.equal(a, b) for m in members for a, b in zip(inputs[m], before[m], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_do_not_show(dtype):
    """Slices larger than a chunk, in portions that end in the middle of elements and chunks."""
    inputs = {m: [random_tensor(500_001, dtype, m), random_tensor(9, torch.float64, 10 + m)] for m in range(3)}
    outputs = reduce(inputs, seed=3, step=300_001)
    for index in range(2):
        expected = in_member_order([inputs[m][index] for m in range(3)])
        assert all(torch.equal(outputs[m][index], expected) for m in range(3))


def test_half_types_are_rounded_once():
    inputs = {m: [torch.tensor([value], dtype=torch.bfloat16)] for m, value in enumerate([256.0, 1.0, 1.0])}
    assert reduce(inputs)[0][0].item() == 258.0         # rounding after each addition gives 256


def test_nan_and_inf_go_through():
    inputs = {m: [torch.tensor([float("inf"), float("nan"), 3e38])] for m in range(2)}
    result = reduce(inputs)[1][0]
    assert result[0] == float("inf")
    assert result[1].isnan()
    assert result[2] == float("inf")


def test_copy_and_gather():
    tensors = {m: [torch.full((5,), float(m)), torch.full((0,), 1.0), torch.full((3,), m)] for m in range(3)}
    carry({m: Copy(1, tensors[m], m, 1, [p for p in range(3) if p != m] if m == 1 else [m]) for m in range(3)})
    assert all(tensors[m][0].eq(1).all() and tensors[m][2].eq(1).all() for m in range(3))
    operations = {m: Gather(2, b"x" * m, m, [p for p in range(3) if p != m]) for m in range(3)}
    carry(operations)
    assert [op.result() for op in operations.values()] == [{0: b"", 1: b"x", 2: b"xx"}] * 3


def test_disagreement_names_both():
    a = AllReduce(1, [torch.zeros(10)], [torch.zeros(10)], 0, (0, 1), Scratch())
    b = AllReduce(1, [torch.zeros(11)], [torch.zeros(11)], 1, (0, 1), Scratch())
    with pytest.raises(WireError, match=r"40 bytes.*here.*44 bytes.*at member 1"):
        a.posted(1, b.post)
    wide = [torch.zeros(5, dtype=torch.float64)]
    other = AllReduce(1, wide, [wide[0].clone()], 1, (0, 1), Scratch())
    with pytest.raises(WireError, match="other dtypes"):
        a.posted(1, other.post)
    with pytest.raises(WireError, match="copy of 40 bytes"):
        a.posted(1, Copy(1, [torch.zeros(10)], 1, 1, [0]).post)


@pytest.mark.parametrize(("phase", "length", "offset"), [(0, 1 << 19, 0), (0, 4, 4), (1, 4, 1 << 40)])
def test_data_out_of_place_is_refused(phase, length, offset):
    operation = AllReduce(1, [torch.zeros(100)], [torch.zeros(100)], 0, (0, 1), Scratch())
    operation.start()
    with pytest.raises(WireError, match="no place"):
        operation.place(1, Header(Kind.DATA, phase, length, 1, offset))


def test_pieces_cut_across_views():
    pieces = Pieces([memoryview(b"abc"), memoryview(b""), memoryview(b"defg"), memoryview(b"h")])
    assert pieces.total == 8
    for start in range(9):
        for length in range(9 - start):
            assert b"".join(pieces.cut(start, length)) == b"abcdefgh"[start:start + length]


def test_scratch_is_bounded_and_used_again():
    pool = Scratch(limit=1000)
    first = pool.take(600)
    pool.give(first)
    assert pool.take(500) is first
    pool.give(first)
    pool.give(pool.take(900_000))
    assert pool.held <= 1000
