"""Frames and handshake as bytes: what comes back, and what is refused."""
import pytest

from recover.collectives import frames, handshake
from recover.collectives.frames import FRAME_LIMIT, HEADER_SIZE, Kind, Post, What
from recover.collectives.handshake import Hello
from recover.errors import WireError

VIEW = (3, 7)
POST = Post(What.ALL_REDUCE, 2, 1 << 40, 2**64 - 1)


def test_header_comes_back():
    packed = frames.pack(VIEW, Kind.DATA, 12, op=2**64 - 1, offset=2**63, phase=1)
    assert len(packed) == HEADER_SIZE
    assert frames.unpack(packed, 0, VIEW) == (Kind.DATA, 1, 12, 2**64 - 1, 2**63)


def test_post_and_bye_come_back():
    packed = frames.pack_post(VIEW, 5, POST)
    assert frames.unpack(packed, 0, VIEW).length == len(packed) - HEADER_SIZE
    assert frames.unpack_post(packed[HEADER_SIZE:]) == POST
    assert frames.unpack_bye(frames.pack_bye(VIEW, "why", 3)[HEADER_SIZE:]) == ("why", 3)
    assert frames.unpack_bye(frames.pack_bye(VIEW, "ü" * 1000, None)[HEADER_SIZE:])[1] is None


@pytest.mark.parametrize(("kind", "length"), [
    (Kind.ALIVE, 1), (Kind.DATA, 0), (Kind.DATA, FRAME_LIMIT + 1), (Kind.POST, 3), (Kind.BYE, 4), (Kind.BYE, 10_000),
    (0, 0), (77, 5)])
def test_lengths_and_kinds_have_limits(kind, length):
    with pytest.raises(WireError, match="no member sends that"):
        frames.unpack(frames.pack(VIEW, kind, length), 0, VIEW)


def test_a_frame_of_another_view_is_refused():
    with pytest.raises(WireError, match=r"view \(3, 6\)"):
        frames.unpack(frames.pack((3, 6), Kind.ALIVE), 0, VIEW)


def test_unknown_kind_of_operation_is_refused():
    with pytest.raises(WireError, match="unknown kind"):
        frames.unpack_post(b"\x09" + frames.pack_post(VIEW, 5, POST)[HEADER_SIZE + 1:])


HELLO = Hello("run", (0, 1), 0, caller=4, answerer=2)


def converse(caller, answerer, tamper=lambda side, data: data):
    """Both sides of a handshake until both are done; gives back what they return."""
    sides = {"call": caller, "answer": answerer}
    inbox, wanted, results = {"call": b"", "answer": b""}, {}, {}
    other = {"call": "answer", "answer": "call"}
    for side in sides:
        said, wanted[side] = next(sides[side])
        inbox[other[side]] += tamper(side, said)
    while len(results) < 2:
        side = next(s for s in sides if s not in results and len(inbox[s]) >= wanted[s])
        data, inbox[side] = inbox[side][:wanted[side]], inbox[side][wanted[side]:]
        try:
            said, wanted[side] = sides[side].send(data)
        except StopIteration as end:
            results[side] = end.value
            said = end.value.welcome if side == "answer" else b""
        inbox[other[side]] += tamper(side, said)
    return results


def test_both_prove_themselves():
    checked = []
    results = converse(handshake.call(b"t", HELLO), handshake.answer(b"t", checked.append))
    assert results["call"] == results["answer"]._replace(welcome=b"") == checked[0] == HELLO


def test_another_token_is_found_by_the_caller():
    with pytest.raises(WireError, match="another token"):
        converse(handshake.call(b"t", HELLO), handshake.answer(b"other", lambda hello: None))


def test_a_wrong_proof_is_found_by_the_answerer():
    answerer = handshake.answer(b"t", lambda hello: None)
    prefix = next(handshake.call(b"x", HELLO))[0]
    next(answerer)
    answerer.send(prefix[:10])
    answerer.send(prefix[10:])
    with pytest.raises(WireError, match="another token"):
        answerer.send(bytes(handshake.PROOF))


@pytest.mark.parametrize("side", ["call", "answer"])
def test_every_byte_is_proven(side):
    """Change one byte of the hello's body, or of the answers: somebody notices."""
    def tamper(who, data):
        return data[:-1] + bytes([data[-1] ^ 1]) if who == side and data else data
    with pytest.raises(WireError):
        converse(handshake.call(b"t", HELLO), handshake.answer(b"t", lambda hello: None), tamper)


def test_what_is_no_greeting_is_refused_by_its_first_bytes():
    for first in (b"GET / HTTP", b"RECOVER1\xff\xff", b"RECOVER1\x00\x00"):
        answerer = handshake.answer(b"t", lambda hello: None)
        next(answerer)
        with pytest.raises(WireError, match="not a greeting"):
            answerer.send(first)
