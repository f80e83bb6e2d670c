"""What travels between a rank and the coordinator, and its encoding. Sans-I/O.

Theory of operation
-------------------
After the handshake (`handshake.py`) both directions carry frames: a length (four bytes, big endian) and that many bytes
of msgpack, which hold one message of the direction's union, tagged by its name. Nothing else is ever decoded, in
particular no pickles. Every length has a limit:

* a frame that announces more than `MAX_FRAME` is an offence at its fifth byte, before anything is buffered for it;
* payloads, names, facts and texts have limits of their own, checked while decoding;
* the answer to an exchange comes in `Parts` (`answers.py`), so that no frame grows with the number of replicas but the view.

`Decoder.feed` buffers at most one incomplete frame. Whatever does not fit raises `WireError`; the connection is then of
no more use, since the two sides need not agree on where the next frame begins.
"""
from __future__ import annotations

from typing import Annotated, Generic, TypeVar

import msgspec

from recover.errors import WireError
from recover.protocol.coordinator import Announcement
from recover.protocol.messages import Endpoint, Pending, View, ViewId

HEADER = 4
MAX_FRAME = 1 << 20
MAX_PAYLOAD = 1 << 19
"""Bytes of one replica's part of an exchange."""
MAX_REPLICAS = 1 << 14
MAX_RANKS = 1 << 10

Text = Annotated[str, msgspec.Meta(max_length=1000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=100)]
Fact = Text | int | float | bool
Facts = Annotated[dict[Name, Fact], msgspec.Meta(max_length=100)]
Replica = Annotated[int, msgspec.Meta(ge=0, lt=MAX_REPLICAS)]
Payload = Annotated[bytes, msgspec.Meta(max_length=MAX_PAYLOAD)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """Base of everything on the wire."""


class Identity(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Who speaks. `life` is drawn once per process: it tells a rank that reconnects from its successor.

    `facts` are what all ranks of the run must agree on (B, seed, versions, ...); the failure timeout (seconds) is what
    they must share with the coordinator, or one side would give up the other between two heartbeats.
    """

    replica: Replica
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    life: Name
    endpoint: Endpoint
    failure_timeout: float
    facts: Facts


class Progress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the training thread is at, for how long, and how long that may last (seconds); see `activity.py`.

    Not `owes`: it waits for others.
    """

    phase: Name
    owes: bool
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    limit: Annotated[float, msgspec.Meta(ge=0)]


# -- either way -----------------------------------------------------------------------------------------------------
class Heartbeat(Message, frozen=True):
    """A sign of life, and the answer to one. From a rank that has begun to train: with what it is at."""

    progress: Progress | None = None


# -- from a rank ----------------------------------------------------------------------------------------------------
class Join(Message, frozen=True):
    """A rank that has seen no view asks to be let in."""

    identity: Identity


class Announce(Message, frozen=True):
    """A rank that has seen a view is back: its coordinator went away, or the connection did."""

    identity: Identity
    announcement: Announcement


class Exchange(Message, frozen=True):
    """This replica's part of the exchange of `view`."""

    view: ViewId
    payload: Payload


class Suspect(Message, frozen=True):
    """A collective of `view` failed here; `peer` is the member to blame where that is known.

    `unheard`: members that this rank itself does not reach or hear over their data connections.
    """

    view: ViewId
    reason: Text
    peer: int | None
    unheard: Annotated[tuple[Replica, ...], msgspec.Meta(max_length=MAX_REPLICAS)] = ()


class Hand(Message, frozen=True):
    """This rank begins to compute a microbatch that it took over from a dead replica (None: it is over that)."""

    name: tuple[int, int] | None


class Entered(Message, frozen=True):
    """This rank has switched to a view that was announced with the fence."""

    view: ViewId


class Finish(Message, frozen=True):
    """This replica passed the last fence: the end of its connections is no loss."""


class Leave(Message, frozen=True):
    """This replica goes, as agreed with the others."""


class Moved(Message, frozen=True):
    """This rank was welcomed by another coordinator, of that incarnation: the one that hears this acts no more."""

    incarnation: int


class Lifeline(Message, frozen=True):
    """This connection says nothing more; it ends with that life of the rank's process (see `lifeline.py`)."""

    replica: Replica
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    life: Name


class Pulse(Message, frozen=True):
    """That life of the rank's process runs, whatever its interpreter does; said again and again (see `pulse.py`)."""

    replica: Replica
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    life: Name


class StatsRequest(Message, frozen=True):
    """Asks for `Stats`; needs no join."""


# -- from the coordinator -------------------------------------------------------------------------------------------
class Welcome(Message, frozen=True):
    """The rank is registered."""

    incarnation: int


class Refused(Message, frozen=True):
    """The rank is not let in. Not `final`: what stands in its way may go away by itself. `standby`: another acts."""

    reason: Text
    final: bool
    standby: bool = False


class NewView(Message, frozen=True):
    """The membership from now on."""

    view: View


class NewPending(Message, frozen=True):
    """A view announced with the fence."""

    pending: Pending


class Parts(Message, frozen=True):
    """What some members gave to the exchange of `view`, packed (`answers.py`); sent once all have given theirs."""

    view: ViewId
    chunk: Annotated[bytes, msgspec.Meta(max_length=MAX_FRAME)]


class Dropped(Message, frozen=True):
    """The others went on without this replica, in `view` or a later one."""

    view: View
    reason: Text


class Stats(Message, frozen=True):
    """Messages by type since the coordinator started, its memory (bytes), and who is in. Not `acting`: it stands by."""

    received: dict[str, int]
    sent: dict[str, int]
    resident: int
    incarnation: int
    view: ViewId
    members: tuple[int, ...]
    missing: tuple[str, ...]
    seconds: float
    acting: bool = True


FromRank = (Heartbeat | Join | Announce | Exchange | Suspect | Hand | Entered | Finish | Leave | StatsRequest | Lifeline | Pulse
            | Moved)
FromCoordinator = Heartbeat | Welcome | Refused | NewView | NewPending | Parts | Dropped | Stats

_encoder = msgspec.msgpack.Encoder()
_T = TypeVar("_T")


def encode(message: Message) -> bytes:
    """The frame of a message. ValueError if it is longer than any frame may be."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a {type(message).__name__} of {len(body)} bytes does not fit into a frame ({MAX_FRAME})")
    return len(body).to_bytes(HEADER, "big") + body


class Decoder(Generic[_T]):
    """From bytes as they come to messages of one direction."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[_T]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[_T]:
        """The messages that `data` completes, in order. WireError for what no member of this run would send."""
        self._buffer += data
        messages, start = [], 0
        while len(self._buffer) - start >= HEADER:
            length = int.from_bytes(self._buffer[start:start + HEADER], "big")
            if length > MAX_FRAME:
                raise WireError(f"a frame of {length} bytes (at most {MAX_FRAME} are allowed)")
            if len(self._buffer) - start - HEADER < length:
                break
            start += HEADER + length
            messages.append(self._decode(bytes(self._buffer[start - length:start])))
        del self._buffer[:start]
        return messages

    def _decode(self, body: bytes) -> _T:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise WireError(f"a frame that is no message: {error}") from None


def from_rank() -> Decoder[FromRank]:
    """A decoder for what the coordinator reads."""
    return Decoder(msgspec.msgpack.Decoder(FromRank))


def from_coordinator() -> Decoder[FromCoordinator]:
    """A decoder for what a rank reads."""
    return Decoder(msgspec.msgpack.Decoder(FromCoordinator))
