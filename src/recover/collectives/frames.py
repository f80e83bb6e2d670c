"""Frames of the data connections, as bytes: a header of 40 bytes, then at most FRAME_LIMIT bytes.

Nothing here knows about sockets. Every frame names its view, and every length has a limit, so that bytes which no
member of this view would send are recognised by their header alone (`WireError`).

    ALIVE   nothing: a sign of life
    POST    "I have started operation `op`": what it is and how large, so that both sides find out when they disagree
    DATA    bytes `offset ..` of one of the two phases of operation `op`
    BYE     why the sender gives up this view, and the member to blame (-1: none)
"""
from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from recover.errors import WireError
from recover.protocol.messages import ViewId

FRAME_LIMIT = 1 << 20
REASON_LIMIT = 400
_HEADER = struct.Struct("<BBHIqqQQ")
_POST = struct.Struct("<B3xIQQ")
_BLAME = struct.Struct("<q")
HEADER_SIZE = _HEADER.size


class Kind(IntEnum):
    """Kinds of frames."""

    ALIVE = 1
    POST = 2
    DATA = 3
    BYE = 4


class What(IntEnum):
    """Kinds of operations."""

    ALL_REDUCE = 1
    COPY = 2
    GATHER = 3


_LIMITS = {Kind.ALIVE: (0, 0), Kind.POST: (_POST.size, _POST.size), Kind.DATA: (1, FRAME_LIMIT),
           Kind.BYE: (_BLAME.size, _BLAME.size + REASON_LIMIT)}


class Header(NamedTuple):
    """What precedes every frame's bytes; `length` counts those bytes only."""

    kind: Kind
    phase: int
    length: int
    op: int
    offset: int


class Post(NamedTuple):
    """What an operation is, for comparison with the peer's: `digest` stands for dtypes and sizes in their order."""

    what: What
    tensors: int
    nbytes: int
    digest: int

    def __str__(self) -> str:
        return f"{self.what.name.lower()} of {self.nbytes} bytes in {self.tensors} tensors"


def digest(parts: Sequence[tuple[str, int]]) -> int:
    """64 bits that stand for (dtype, number of elements) of each tensor."""
    return int.from_bytes(hashlib.blake2b(repr(list(parts)).encode(), digest_size=8).digest(), "little")


def pack(view: ViewId, kind: Kind, length: int = 0, op: int = 0, offset: int = 0, phase: int = 0) -> bytes:
    """A header."""
    return _HEADER.pack(kind, phase, 0, length, view[0], view[1], op, offset)


def unpack(buffer: bytes | bytearray | memoryview, start: int, view: ViewId) -> Header:
    """The header at `start`; WireError if no member of `view` would send it."""
    kind, phase, zero, length, incarnation, counter, op, offset = _HEADER.unpack_from(buffer, start)
    low, high = _LIMITS.get(kind, (1, 0))
    if zero or phase > 1 or not low <= length <= high:
        raise WireError(f"frame of kind {kind} and {length} bytes: no member sends that")
    if (incarnation, counter) != view:
        raise WireError(f"frame of view {(incarnation, counter)} in view {view}")
    return Header(Kind(kind), phase, length, op, offset)


def pack_post(view: ViewId, op: int, post: Post) -> bytes:
    """A whole POST frame."""
    return pack(view, Kind.POST, _POST.size, op) + _POST.pack(*post)


def unpack_post(body: bytes | memoryview) -> Post:
    """The body of a POST frame; WireError for an unknown kind of operation."""
    what, tensors, nbytes, parts = _POST.unpack(body)
    if what not in What.__members__.values():
        raise WireError(f"operation of unknown kind {what}")
    return Post(What(what), tensors, nbytes, parts)


def pack_bye(view: ViewId, reason: str, blamed: int | None) -> bytes:
    """A whole BYE frame; a long reason is cut."""
    text = reason.encode()[:REASON_LIMIT]
    return pack(view, Kind.BYE, _BLAME.size + len(text)) + _BLAME.pack(-1 if blamed is None else blamed) + text


def unpack_bye(body: bytes | memoryview) -> tuple[str, int | None]:
    """Reason and blamed member of a BYE frame."""
    (blamed,) = _BLAME.unpack_from(body)
    return bytes(body[_BLAME.size:]).decode(errors="replace"), None if blamed < 0 else blamed
