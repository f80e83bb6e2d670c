"""The answer to an exchange as it travels: everyone's payloads, packed once for all members. Sans-I/O.

Theory of operation
-------------------
W members get W payloads each, so an answer costs W times W. What keeps that small:

* Payloads of one recovery end alike (in reports: what the fences said, some bytes for every member of the view). A part
  names an earlier part that ends with the same bytes, and how many; it carries only what comes before them. Earlier
  parts that others are compared with are at most `REFERENCES`: survivors' steps differ by at most one.
* Parts are collected in chunks of about `CHUNK` bytes, and a chunk is compressed: what is left of the payloads is alike too.
* A chunk depends on those before it and says nothing about those behind it: whoever unpacks counts members.

With 512 members whose steps differ by one, an answer of 5.9 MB becomes one of less than 20 kB. What payloads mean is not
known here. Limits: a chunk unpacks to at most `MAX_CHUNK` bytes, a payload to `wire.MAX_PAYLOAD`.
"""
from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

import msgspec

from recover.errors import WireError
from recover.membership import wire

CHUNK = 1 << 18
MAX_CHUNK = 1 << 20
REFERENCES = 4
REST = 256
"""A payload of which more bytes than these are its own becomes a reference for later ones."""
OVERHEAD = 32
"""Bytes of a part besides its head, at most."""


class Share(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The payload of `member`: `head`, and then the last `shared` bytes of the payload of `like`, an earlier member."""

    member: int
    head: bytes
    like: int
    shared: int


_decoder = msgspec.msgpack.Decoder(list[Share])


def common_end(a: bytes, b: bytes) -> int:
    """How many bytes at their ends are the same."""
    low, high = 0, min(len(a), len(b))
    while low < high:                                   # the last `low` are the same, the last `high + 1` are not
        middle = (low + high + 1) // 2
        if a[len(a) - middle:len(a) - low] == b[len(b) - middle:len(b) - low]:
            low = middle
        else:
            high = middle - 1
    return low


def pack(payloads: Mapping[int, bytes]) -> Iterator[bytes]:
    """Chunks that `Answer` unpacks, in this order."""
    references: dict[int, bytes] = {}
    batch: list[Share] = []
    size = 0
    for member, payload in payloads.items():
        like, shared = _closest(payload, references)
        if len(payload) - shared > REST and len(references) < REFERENCES:
            references[member] = payload
        if batch and size + len(payload) - shared > CHUNK:
            yield zlib.compress(msgspec.msgpack.encode(batch), 1)
            batch, size = [], 0
        batch.append(Share(member, payload[:len(payload) - shared], like, shared))
        size += len(payload) - shared + OVERHEAD
    if batch:
        yield zlib.compress(msgspec.msgpack.encode(batch), 1)


def _closest(payload: bytes, references: Mapping[int, bytes]) -> tuple[int, int]:
    """The reference with the longest common end, and how many bytes that is."""
    ends = [(common_end(payload, reference), member) for member, reference in references.items()]
    shared, like = max(ends, default=(0, 0))
    return like, shared


class Answer:
    """Payloads by member, as far as they have come."""

    def __init__(self) -> None:
        self.payloads: dict[int, bytes] = {}

    def add(self, chunk: bytes) -> None:
        """One chunk more. WireError for what `pack` would not make."""
        try:
            unpacker = zlib.decompressobj()
            shares = _decoder.decode(unpacker.decompress(chunk, MAX_CHUNK))
        except (zlib.error, msgspec.MsgspecError, RecursionError) as error:
            raise WireError(f"a chunk of an answer that is none: {error}") from None
        for share in shares:
            self.payloads[share.member] = self._whole(share)

    def _whole(self, share: Share) -> bytes:
        if not share.shared:
            return share.head
        reference = self.payloads.get(share.like, b"")
        if not 0 < share.shared <= len(reference) or len(share.head) + share.shared > wire.MAX_PAYLOAD:
            raise WireError(f"a part of an answer shares {share.shared} bytes of {len(reference)}")
        return share.head + reference[len(reference) - share.shared:]
