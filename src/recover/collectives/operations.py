"""Operations as state machines: bytes come in, bytes become ready to go out. No sockets, no threads.

An operation talks to its `peers` by streams and arrivals. Its life: `start` (tensors are ready, may be read), POST of
every peer, all arrivals whole, all streams flushed: `complete`. That a POST of every peer is part of it means that no
frame of a finished operation is ever still to come, and that both sides compared what they think the operation is.

**All-reduce**: every tensor is cut into one slice per member. Phase 0: each member sends to every other the other's
slice of its inputs. The owner adds the slices in member order as they come, chunk by chunk, into its output. Phase 1:
what is summed goes to everyone. One member adds, all copy: the bits are equal everywhere. Chunks keep the sum in the
cache and let the transfer, the sum and the way back overlap.

Sums are taken by numpy, not torch, where it has the type: torch would start a pool of threads for this thread.
"""
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recover.collectives import frames
from recover.collectives.contract import GATHER_LIMIT
from recover.collectives.frames import Header, Post, What
from recover.collectives.streams import Arrival, Pieces, Stream
from recover.collectives.work import Pending
from recover.errors import WireError

CHUNK = 256 << 10               # bytes summed at a time: two of them and the result fit into a second-level cache
HALF_CHUNK = 64 << 10           # for half types, by torch: up to 32768 elements it uses no further thread
ALIGNED = 16                    # elements: slices begin at multiples of it
POOL_LIMIT = 256 << 20          # bytes of scratch kept for the next operation

_NUMPY = {torch.float32, torch.float64, torch.int64}
_HALF = {torch.bfloat16, torch.float16}
SUMMED = _NUMPY | _HALF
Bytes = NDArray[np.uint8]


def raw(tensor: Tensor) -> Bytes:
    """The memory of a contiguous CPU tensor as bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()


def view(tensor: Tensor) -> memoryview:
    """The same as a memoryview; empty for a tensor without elements."""
    return memoryview(raw(tensor).data) if tensor.numel() else memoryview(b"")


def describe(what: What, tensors: Sequence[Tensor]) -> Post:
    """What is compared with the peers."""
    return Post(what, len(tensors), sum(t.nbytes for t in tensors),
                frames.digest([(str(t.dtype), t.numel()) for t in tensors]))


class Scratch:
    """Memory for arriving slices, kept between operations: fresh pages cost as much as the sum itself."""

    def __init__(self, limit: int = POOL_LIMIT) -> None:
        self._free: list[Bytes] = []
        self._limit = limit

    def take(self, nbytes: int) -> Bytes:
        """At least `nbytes` bytes."""
        fitting = [i for i, b in enumerate(self._free) if nbytes <= b.nbytes <= 2 * nbytes + (64 << 10)]
        if fitting:
            return self._free.pop(min(fitting, key=lambda i: self._free[i].nbytes))
        return np.empty(nbytes, np.uint8)

    def give(self, buffer: Bytes) -> None:
        """Back into the pool, which forgets its oldest when it is full."""
        self._free.append(buffer)
        while sum(b.nbytes for b in self._free) > self._limit:
            del self._free[0]

    @property
    def held(self) -> int:
        """Bytes in the pool."""
        return sum(b.nbytes for b in self._free)


class Operation(ABC):
    """One operation of one member. `posted`, `place` and `arrived` raise WireError for what no sound peer does."""

    def __init__(self, op: int, post: Post, peers: Sequence[int]) -> None:
        self.op, self.post, self.peers = op, post, tuple(peers)
        self.work: Pending[Any] = Pending()
        self.over = False                               # complete, and nobody needs to look again
        self._silent = set(peers)                       # have not posted yet
        self._arrivals: dict[tuple[int, int], Arrival] = {}
        self._incomplete = 0                            # arrivals that are not whole
        self._unsent = 0                                # streams that are not flushed

    # -- what kinds of operations differ in --------------------------------------------------------------------------
    @abstractmethod
    def start(self) -> dict[int, list[Stream]]:
        """Begin: what goes to each peer. `peers` that get nothing may be left out."""

    def progress(self, peer: int, phase: int) -> None:  # noqa: B027 - most kinds need nothing
        """More bytes of that arrival are there."""

    def result(self) -> Any:
        """What `wait` gives back."""
        return None

    def release(self) -> None:  # noqa: B027 - most kinds hold nothing
        """Done: give back what was borrowed."""

    # -- what they have in common ------------------------------------------------------------------------------------
    def posted(self, peer: int, post: Post) -> None:
        """The peer has started it too, and says what it thinks it is."""
        if post != self.post:
            same = post[:3] == self.post[:3]
            raise WireError(f"operation {self.op} is {self.post} here and {post} at member {peer}"
                            + (", with other dtypes or shapes" if same else ""))
        self._silent.discard(peer)

    def place(self, peer: int, header: Header) -> list[memoryview]:
        """Where the bytes of a DATA frame belong."""
        arrival = self._arrivals.get((peer, header.phase))
        if arrival is None or header.offset != arrival.got or arrival.got + header.length > arrival.pieces.total:
            raise WireError(f"operation {self.op} has no place for {header.length} bytes at {header.offset} "
                            f"(phase {header.phase}) of member {peer}")
        return arrival.pieces.cut(header.offset, header.length)

    def arrived(self, peer: int, header: Header) -> None:
        """They are there."""
        arrival = self._arrivals[peer, header.phase]
        arrival.got += header.length
        self._incomplete -= arrival.whole
        self.progress(peer, header.phase)

    def flushed(self) -> None:
        """One more stream is with the kernel."""
        self._unsent -= 1

    @property
    def complete(self) -> bool:
        """Nothing is left to come or to go."""
        return not (self._silent or self._incomplete or self._unsent)

    def _expect(self, peer: int, phase: int, pieces: Pieces) -> None:
        self._arrivals[peer, phase] = arrival = Arrival(pieces)
        self._incomplete += not arrival.whole

    def _stream(self, phase: int, pieces: Pieces, ready: int, urgent: bool = False) -> list[Stream]:
        if not pieces.total:
            return []
        self._unsent += 1
        return [Stream(self.op, phase, pieces, ready, urgent)]


class Copy(Operation):
    """`tensors` of the source to those of all destinations: broadcast, send and receive."""

    def __init__(self, op: int, tensors: Sequence[Tensor], me: int, source: int, destinations: Sequence[int]) -> None:
        self._sends = me == source
        super().__init__(op, describe(What.COPY, tensors), destinations if self._sends else [source])
        self._tensors = list(tensors)

    def start(self) -> dict[int, list[Stream]]:
        pieces = Pieces([view(t) for t in self._tensors])
        if self._sends:
            return {peer: self._stream(0, pieces, pieces.total) for peer in self.peers}
        self._expect(self.peers[0], 0, pieces)
        return {}


class Gather(Operation):
    """Small bytes of everyone to everyone. How long a peer's are is known from its POST."""

    def __init__(self, op: int, payload: bytes, me: int, peers: Sequence[int]) -> None:
        super().__init__(op, Post(What.GATHER, 1, len(payload), 0), peers)
        self._payload, self._me = payload, me
        self._got: dict[int, bytearray] = {}

    def start(self) -> dict[int, list[Stream]]:
        pieces = Pieces([memoryview(self._payload)])
        return {peer: self._stream(0, pieces, pieces.total, urgent=True) for peer in self.peers}

    def posted(self, peer: int, post: Post) -> None:
        if post.what is not What.GATHER or post.nbytes > GATHER_LIMIT or peer in self._got:
            raise WireError(f"operation {self.op} is {self.post} here and {post} at member {peer}")
        self._silent.discard(peer)
        self._got[peer] = bytearray(post.nbytes)
        self._expect(peer, 0, Pieces([memoryview(self._got[peer])]))

    def result(self) -> dict[int, bytes]:
        values = {peer: bytes(got) for peer, got in self._got.items()} | {self._me: self._payload}
        return dict(sorted(values.items()))


class AllReduce(Operation):
    """Sum in member order, as the module's text says."""

    def __init__(self, op: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], me: int,
                 members: Sequence[int], scratch: Scratch) -> None:
        super().__init__(op, describe(What.ALL_REDUCE, inputs), [m for m in members if m != me])
        self._inputs = [t.detach().reshape(-1) for t in inputs]
        self._outputs = [t.detach().reshape(-1) for t in outputs]
        self._me, self._members, self._scratch = me, tuple(members), scratch
        self._borrowed: list[Bytes] = []
        self._sums: list[Ordered] = []
        self._summed = self._mine = 0
        self._results: list[Stream] = []

    def start(self) -> dict[int, list[Stream]]:
        mine = self._slice(self._outputs, self._me)
        if not self.peers:
            for source, target in zip(self._inputs, self._outputs, strict=True):
                target.copy_(source)
            return {}
        own = Pieces([view(t) for t in mine])
        self._mine = own.total
        slots = {peer: self._borrow(mine) for peer in self.peers}
        given = self._slice(self._inputs, self._me)
        for index, target in enumerate(mine):
            if target.numel():
                terms = [given[index] if m == self._me else slots[m][index] for m in self._members]
                self._sums.append(Ordered(terms, target))
        streams = {}
        for peer in self.peers:
            self._expect(peer, 0, Pieces([view(t) for t in slots[peer]]))
            self._expect(peer, 1, Pieces([view(t) for t in self._slice(self._outputs, peer)]))
            given = self._slice(self._inputs, peer)
            pieces = Pieces([view(t) for t in given])
            results = self._stream(1, own, 0)
            self._results += results
            streams[peer] = [*results, *self._stream(0, pieces, pieces.total)]
        return streams

    def progress(self, peer: int, phase: int) -> None:
        if phase == 1 or self._summed == self._mine:
            return
        ready = min(self._arrivals[p, 0].got for p in self.peers)
        if ready < self._mine and ready - self._summed < CHUNK:
            return
        base = 0
        for part in self._sums:
            if base < ready and self._summed < base + part.nbytes:
                self._summed = base + part.add(self._summed - base, min(ready - base, part.nbytes))
            base += part.nbytes
        for stream in self._results:
            stream.ready = self._summed

    def release(self) -> None:
        for buffer in self._borrowed:
            self._scratch.give(buffer)
        self._borrowed, self._sums = [], []

    def _slice(self, tensors: Sequence[Tensor], member: int) -> list[Tensor]:
        """The slice of each tensor that `member` owns."""
        found, rank, count = [], self._members.index(member), len(self._members)
        for tensor in tensors:
            size = -(-tensor.numel() // (count * ALIGNED)) * ALIGNED
            found.append(tensor[min(rank * size, tensor.numel()):min((rank + 1) * size, tensor.numel())])
        return found

    def _borrow(self, like: Sequence[Tensor]) -> list[Tensor]:
        """Scratch tensors like the given ones, each on a cache line of its own."""
        sizes = [-(-t.nbytes // 64) * 64 for t in like]
        buffer = self._scratch.take(max(1, sum(sizes)))
        self._borrowed.append(buffer)
        whole, start, found = torch.from_numpy(buffer), 0, []
        for tensor, size in zip(like, sizes, strict=True):
            found.append(whole[start:start + tensor.nbytes].view(tensor.dtype))
            start += size
        return found


class Ordered:
    """target = terms[0] + terms[1] + ..., range by range."""

    def __init__(self, terms: Sequence[Tensor], target: Tensor) -> None:
        self._half = target.dtype in _HALF
        self._terms, self._target = list(terms), target
        self._arrays = [] if self._half else [t.numpy() for t in terms]
        self._into = None if self._half else target.numpy()
        self.nbytes, self._item = target.nbytes, target.element_size()

    def add(self, start: int, stop: int) -> int:
        """Sum the whole elements in bytes [start, stop); gives back where it got to."""
        first, last = start // self._item, stop // self._item
        step = (HALF_CHUNK if self._half else CHUNK) // self._item
        with np.errstate(all="ignore"):                 # inf and nan are results like others
            for begin in range(first, last, step):
                self._add(begin, min(begin + step, last))
        return last * self._item

    def _add(self, begin: int, end: int) -> None:
        if self._into is None:
            total = self._terms[0][begin:end].float()
            for term in self._terms[1:]:
                total += term[begin:end]
            self._target[begin:end].copy_(total)
            return
        into = self._into[begin:end]
        np.add(self._arrays[0][begin:end], self._arrays[1][begin:end], out=into)
        for array in self._arrays[2:]:
            np.add(into, array[begin:end], out=into)
