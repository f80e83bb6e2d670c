"""Bytes in order, lying in several places: what one peer sends another within one phase of an operation.

The sender reads them where the tensors are and the receiver writes them where they belong: no copy on either side.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class Pieces:
    """A sequence of byte views, addressed as one range [0, total)."""

    __slots__ = ("_ends", "_views", "total")

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = [view for view in views if view.nbytes]
        self._ends: list[int] = []
        self.total = 0
        for view in self._views:
            self.total += view.nbytes
            self._ends.append(self.total)

    def cut(self, start: int, length: int) -> list[memoryview]:
        """The views of bytes [start, start + length)."""
        assert start >= 0
        assert length >= 0
        assert start + length <= self.total
        index, found = bisect_right(self._ends, start), list[memoryview]()
        while length:
            view = self._views[index]
            first = start - (self._ends[index] - view.nbytes)
            part = view[first:first + length]
            found.append(part)
            start, length, index = start + part.nbytes, length - part.nbytes, index + 1
        return found


class Stream:
    """Pieces on their way to one peer: bytes [taken, ready) may be sent once the stream is `open`."""

    __slots__ = ("eager", "op", "open", "phase", "pieces", "ready", "taken", "urgent")

    def __init__(self, op: int, phase: int, pieces: Pieces, ready: int, urgent: bool = False) -> None:
        self.op, self.phase, self.pieces, self.ready, self.urgent = op, phase, pieces, ready, urgent
        self.taken = 0
        self.open = False       # the peer has started this operation, or has room for it
        self.eager = 0          # bytes of the peer's room that this stream occupies

    @property
    def total(self) -> int:
        return self.pieces.total

    def waiting(self) -> int:
        """Bytes that could be sent now."""
        return self.ready - self.taken if self.open else 0


class Arrival:
    """Pieces coming from one peer, in order."""

    __slots__ = ("got", "pieces")

    def __init__(self, pieces: Pieces) -> None:
        self.pieces, self.got = pieces, 0

    @property
    def whole(self) -> bool:
        return self.got == self.pieces.total
