"""The codec, the handshake and addresses: bytes in, messages or WireError out."""
from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recover.errors import WireError
from recover.membership import wire
from recover.membership.address import parse_address, parse_addresses, read_token
from recover.membership.handshake import MAGIC, VERSION, Caller, Greeter
from recover.protocol.coordinator import Announcement
from recover.protocol.messages import Endpoint, Pending, View

VIEW = View((2, 7), (0, 3), {0: (Endpoint("10.0.0.1", 5), Endpoint("10.0.0.1", 6)), 3: (Endpoint("::1", 7),)}, True)
FACTS = {"seed": 0, "lr": 0.5, "exact": True, "torch": "2.13"}
IDENTITY = wire.Identity(3, 1, 2, "life", Endpoint("10.0.0.1", 5), 5.0, FACTS)
FROM_RANK = [wire.Join(IDENTITY), wire.Announce(IDENTITY, Announcement(VIEW, True)), wire.Heartbeat(),
             wire.Exchange((2, 7), b"\0\xff"), wire.Suspect((2, 7), "reset by peer", None), wire.Suspect((2, 7), "", 3),
             wire.Entered((2, 8)), wire.Finish(), wire.Leave(), wire.StatsRequest()]
FROM_COORDINATOR = [wire.Welcome(2), wire.Refused("B differs", True), wire.NewView(VIEW), wire.Heartbeat(),
                    wire.NewPending(Pending(VIEW, (2, 6))), wire.Parts((2, 7), b"x"), wire.Dropped(View(), "late"),
                    wire.Stats({"Join": 1}, {}, 1, 0, (0, 1), (0,), ("replica 1",), 0.5)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_messages_survive_the_wire_in_pieces_of_any_size(size: int) -> None:
    for decoder, messages in ((wire.from_rank(), FROM_RANK), (wire.from_coordinator(), FROM_COORDINATOR)):
        data = b"".join(wire.encode(message) for message in messages)
        got: list[object] = []
        for start in range(0, len(data), size):
            got += decoder.feed(data[start:start + size])
        assert got == messages


def test_types_of_facts_survive() -> None:
    [message] = wire.from_rank().feed(wire.encode(wire.Join(IDENTITY)))
    assert isinstance(message, wire.Join)
    assert {k: type(v) for k, v in message.identity.facts.items()} == {k: type(v) for k, v in FACTS.items()}


def test_an_oversized_frame_is_an_offence_at_its_header() -> None:
    decoder = wire.from_rank()
    with pytest.raises(WireError, match="1048577 bytes"):
        decoder.feed((wire.MAX_FRAME + 1).to_bytes(4, "big"))


def test_the_largest_frame_allowed_is_waited_for() -> None:
    assert wire.from_rank().feed(wire.MAX_FRAME.to_bytes(4, "big")) == []


@pytest.mark.parametrize("message", [
    wire.Exchange((0, 1), bytes(wire.MAX_PAYLOAD + 1)),
    wire.Suspect((0, 1), "x" * 1001, None),
    wire.Join(msgspec.structs.replace(IDENTITY, replica=-1)),
    wire.Join(msgspec.structs.replace(IDENTITY, life="x" * 101)),
    wire.Join(msgspec.structs.replace(IDENTITY, facts={f"k{n}": n for n in range(101)})),
    wire.Join(msgspec.structs.replace(IDENTITY, facts={"k": "x" * 1001})),
    wire.Welcome(0),                                        # of the other direction
], ids=["payload", "reason", "negative", "life", "facts", "fact", "direction"])
def test_what_no_rank_sends_is_an_offence(message: wire.Message) -> None:
    with pytest.raises(WireError):
        wire.from_rank().feed(wire.encode(message))


def test_deep_nesting_is_an_offence_not_a_crash() -> None:
    body = b"\x91" * 500_000
    with pytest.raises(WireError):
        wire.from_rank().feed(len(body).to_bytes(4, "big") + body)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_wire_errors(data: bytes) -> None:
    for decoder in (wire.from_rank(), wire.from_coordinator()):
        try:
            decoder.feed(len(data).to_bytes(4, "big") + data)
        except WireError:
            pass


def test_a_message_that_fits_no_frame_is_our_own_mistake() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        wire.encode(wire.Parts((0, 1), bytes(wire.MAX_FRAME)))


# -- handshake ------------------------------------------------------------------------------------------------------
def shake(caller: Caller, greeter: Greeter) -> None:
    greeter.feed(caller.feed(greeter.feed(caller.hello)))


def test_both_pass_with_one_token_and_one_run() -> None:
    caller, greeter = Caller(b"secret", "run"), Greeter(b"secret", "run")
    shake(caller, greeter)
    assert caller.passed
    assert greeter.passed


@pytest.mark.parametrize("size", [1, 5, 71])
def test_the_handshake_comes_in_pieces_and_frames_follow_at_once(size: int) -> None:
    caller, greeter = Caller(b"secret", "run"), Greeter(b"secret", "run")
    answer = b"".join(greeter.feed(caller.hello[n:n + size]) for n in range(0, len(caller.hello), size))
    shown = b"".join(caller.feed(answer[n:n + size]) for n in range(0, len(answer), size))
    greeter.feed(shown[:-1])
    assert not greeter.passed
    greeter.feed(shown[-1:] + b"frames")
    assert greeter.passed
    assert greeter.surplus == b"frames"


@pytest.mark.parametrize(("token", "run"), [(b"other", "run"), (b"secret", "yesterday")])
def test_the_caller_finds_a_foreign_greeter(token: bytes, run: str) -> None:
    caller, greeter = Caller(b"secret", "run"), Greeter(token, run)
    with pytest.raises(WireError, match="another token, or another run"):
        caller.feed(greeter.feed(caller.hello))
    assert not caller.passed


@pytest.mark.parametrize("shown", ["replayed", "reflected", "random"])
def test_the_greeter_finds_a_false_proof(shown: str) -> None:
    """A caller without the token has nothing to show but old proofs, the greeter's own, or noise."""
    old_caller, old_greeter = Caller(b"secret", "run"), Greeter(b"secret", "run")
    replayed = old_caller.feed(old_greeter.feed(old_caller.hello))
    greeter = Greeter(b"secret", "run")
    challenge = greeter.feed(old_caller.hello)
    false = {"replayed": replayed, "reflected": challenge[-32:], "random": os.urandom(32)}[shown]
    with pytest.raises(WireError, match="does not prove"):
        greeter.feed(false)
    assert not greeter.passed


def test_garbage_is_found_at_its_first_byte() -> None:
    with pytest.raises(WireError, match="does not speak"):
        Greeter(b"secret", "run").feed(b"GET / HTTP/1.1\r\n")
    with pytest.raises(WireError, match="does not speak"):
        Greeter(b"secret", "run").feed(b"\x16")


def test_another_version_is_named() -> None:
    with pytest.raises(WireError, match=f"version {VERSION + 1} .* version {VERSION}"):
        Greeter(b"secret", "run").feed(MAGIC[:-1] + bytes([VERSION + 1]))


def test_nothing_is_buffered_for_a_stranger_beyond_its_hello() -> None:
    with pytest.raises(WireError, match="before it was greeted"):
        Greeter(b"secret", "run").feed(MAGIC + bytes(33))


# -- addresses ------------------------------------------------------------------------------------------------------
def test_addresses() -> None:
    assert parse_address("host:1") == ("host", 1)
    assert parse_address("[::1]:29400") == ("::1", 29400)
    assert parse_addresses("a:1, b:2,") == [("a", 1), ("b", 2)]


@pytest.mark.parametrize("text", ["host", "host:", "host:x", "host:70000", "::1:29400", ""])
def test_malformed_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST|ambiguous"):
        parse_addresses(text)


def test_a_token_must_be_one(tmp_path) -> None:                                                  # type: ignore[no-untyped-def]
    (tmp_path / "token").write_text(" 1234567890\n")
    assert read_token(tmp_path / "token") == b"1234567890"
    (tmp_path / "short").write_text("1234567\n")
    with pytest.raises(ValueError, match="at least 8"):
        read_token(tmp_path / "short")
