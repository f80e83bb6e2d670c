"""How far one backward pass has come: which buckets are final, and which may leave next. Pure: no torch here.

Theory of operation
-------------------
* A hook fires each time autograd adds to a parameter's gradient; a layer that is shared and re-entrantly checkpointed
  fires several times per pass. So a gradient is *final* only after as many firings as were learned; before anything was
  learned, or where a parameter fires less often than usual, it is final when the pass is over.
* Buckets leave in increasing order, as on every other rank: one that is final waits for those before it.
* The last bucket leaves when the pass is over, always. It holds what was never seen before and what backward reaches
  last, so waiting costs nothing, and its tail can carry a loss that the script tells late.
* A firing for a bucket that has left is recorded; what it added is in no sum.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence


class Progress:
    """One pass over `buckets` (lists of parameter numbers). `wanted`: buckets that shall leave in this pass."""

    def __init__(self, buckets: Sequence[Sequence[int]], parameters: int, expected: Sequence[int] | None,
                 wanted: Iterable[int]) -> None:
        self.fired = [0] * parameters       # firings so far
        self.last = [0] * parameters        # rank of the last firing, from 1
        self.late: list[int] = []           # parameters that fired after their bucket left
        self._total = 0
        self._expected = expected
        self._bucket_of = [0] * parameters
        for index, members in enumerate(buckets):
            for p in members:
                self._bucket_of[p] = index
        self._missing = [len(members) for members in buckets]   # one that was never seen keeps its bucket to the end
        self._left: set[int] = set()
        self._queue = sorted(set(wanted), reverse=True)
        self._final = len(buckets) - 1
        if self._queue and not 0 <= self._queue[-1] <= self._queue[0] <= self._final:
            raise ValueError(f"wanted buckets must lie between 0 and {self._final}")

    def fire(self, p: int) -> list[int]:
        """Parameter `p` got a gradient: the buckets that may leave now, in order."""
        self._total += 1
        self.fired[p] += 1
        self.last[p] = self._total
        bucket = self._bucket_of[p]
        if bucket in self._left:
            self.late.append(p)
            return []
        if self._expected is None or self.fired[p] != self._expected[p]:
            return []
        self._missing[bucket] -= 1
        return self._ready()

    @property
    def queued(self) -> list[int]:
        """Wanted buckets that have not left, in order."""
        return self._queue[::-1]

    def _ready(self) -> list[int]:
        ready = []
        while self._queue and self._queue[-1] != self._final and not self._missing[self._queue[-1]]:
            ready.append(self._queue.pop())
        self._left.update(ready)
        return ready

    def rest(self) -> list[int]:
        """The pass is over: the wanted buckets that have not left, in order."""
        rest = self.queued
        self._queue = []
        self._left.update(rest)
        return rest
