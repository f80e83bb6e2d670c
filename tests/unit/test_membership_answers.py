"""Packed answers: what is unpacked is what was packed, they are small where payloads are alike, and nonsense is refused."""
from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.errors import WireError
from recover.membership import wire
from recover.membership.answers import CHUNK, MAX_CHUNK, REFERENCES, Answer, Share, common_end, pack
from recover.protocol.messages import Report

ends = st.sampled_from([b"", b"e" * 40, b"f" * 31, b"ab" * 100])
payloads = st.dictionaries(st.integers(0, 99), st.tuples(st.binary(max_size=60), ends).map(b"".join), max_size=20)


def unpacked(chunks: list[bytes]) -> dict[int, bytes]:
    answer = Answer()
    for chunk in chunks:
        answer.add(chunk)
    return answer.payloads


def packed(*shares: Share) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(shares))


@settings(max_examples=200, deadline=None)
@given(payloads)
def test_what_was_packed_is_unpacked(given: dict[int, bytes]) -> None:
    assert unpacked(list(pack(given))) == given


@given(st.binary(max_size=20), st.binary(max_size=20), ends)
def test_the_common_end_is_the_longest(a: bytes, b: bytes, end: bytes) -> None:
    a, b = a + end, b + end
    length = common_end(a, b)
    assert a[len(a) - length:] == b[len(b) - length:]
    longer = length + 1
    assert longer > min(len(a), len(b)) or a[-longer:] != b[-longer:]


def test_reports_of_a_big_run_are_packed_small() -> None:
    vector = {member: 1 + member / 7 for member in range(512)}

    def report(member: int) -> bytes:
        step = 9 + member % 2
        vectors = {step + 1: vector, step + 2: vector}
        return msgspec.msgpack.encode(Report(step, owes={step: frozenset({member})}, vectors=vectors))

    given = {member: report(member) for member in range(512)}
    chunks = list(pack(given))
    assert unpacked(chunks) == given
    assert sum(map(len, chunks)) < 20_000 < sum(map(len, given.values())) / 200


def test_long_payloads_come_in_several_chunks_that_fit_frames() -> None:
    given = {member: bytes([member]) * wire.MAX_PAYLOAD for member in range(REFERENCES + 2)}
    chunks = list(pack(given))
    assert len(chunks) > 1
    assert all(len(zlib.decompress(chunk)) <= MAX_CHUNK for chunk in chunks)
    assert unpacked(chunks) == given
    assert CHUNK + wire.MAX_PAYLOAD < MAX_CHUNK < 2 * wire.MAX_FRAME


@pytest.mark.parametrize("chunk", [
    b"", b"nonsense", zlib.compress(b"\xc1"), zlib.compress(bytes(MAX_CHUNK + 1)), packed(Share(1, b"", 0, 5)),
    packed(Share(0, b"abc", 0, 0), Share(1, b"", 0, 4)), packed(Share(0, b"abc", 0, 0), Share(1, b"", 0, -1)),
    packed(Share(0, b"a" * wire.MAX_PAYLOAD, 0, 0), Share(1, b"b", 0, wire.MAX_PAYLOAD)),
])
def test_what_was_not_packed_is_refused(chunk: bytes) -> None:
    with pytest.raises(WireError):
        Answer().add(chunk)
