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
* A pass may hold several microbatches (a pipeline's chunk): then everything fires that many times as often. `boundary`
  says whose firings those since the one before were. A stage's backward is followed by its boundary at once, so a rank
  with several stages passes several per microbatch, in any order.
* What is learned is how one microbatch fires, by itself: it must not depend on the chunk that it happened to be in, since
  the layout of the buckets (and with it the bits of `exact`) does depend on it.
"""
from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


class Progress:
    """One pass over `buckets` (lists of parameter numbers). `wanted`: buckets that shall leave in this pass.

    expected: firings per microbatch, by parameter; None: nothing leaves before the pass is over. microbatches: how many
    the pass holds (0: it only brings what earlier ones withheld). lesson: the place of the one to be learned from.
    """

    def __init__(self, buckets: Sequence[Sequence[int]], parameters: int, expected: Sequence[int] | None,
                 wanted: Iterable[int], microbatches: int = 1, lesson: int = 0) -> None:
        self.fired = [0] * parameters       # firings so far
        self.last = [0] * parameters        # rank of the last firing, from 1
        self.late: list[int] = []           # parameters that fired after their bucket left
        self.microbatches = microbatches
        self._total = 0
        self._expected = None if expected is None else [times * microbatches for times in expected]
        self._since: dict[int, int] = {}    # firings since the last boundary
        self._closed: set[int] = set()      # microbatches (by their place in the pass) that had a boundary
        self._within = [0] * parameters     # microbatches with a firing, up to the last boundary
        self._segment: list[int] = []       # the same, in order
        self._lesson, self._lesson_fired, self._lesson_last = lesson, [0] * parameters, [0] * parameters
        self._lesson_total = 0
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
        self._since[p] = self._since.get(p, 0) + 1
        self._segment.append(p)
        bucket = self._bucket_of[p]
        if bucket in self._left:
            self.late.append(p)
            return []
        if self._expected is None or self.fired[p] != self._expected[p]:
            return []
        self._missing[bucket] -= 1
        return self._ready()

    def boundary(self, place: int) -> set[int]:
        """What fired since the last boundary belongs to the microbatch at `place`; gives the buckets of it."""
        touched = {self._bucket_of[p] for p in self._since}
        for p in self._since:
            self._within[p] += 1
        for p in self._segment if place == self._lesson else ():
            self._lesson_total += 1
            self._lesson_fired[p] += 1
            self._lesson_last[p] = self._lesson_total
        self._since, self._segment = {}, []
        self._closed.add(place)
        return touched

    @property
    def open(self) -> int:
        """The place of the first microbatch without a boundary; of the last one if all have one."""
        place = next((place for place in range(self.microbatches) if place not in self._closed), self.microbatches - 1)
        return max(0, place)

    def used(self, p: int) -> int:
        """In how many microbatches of the pass `p` fired (at most: without boundaries it can't be told)."""
        unbounded = max(1, self.microbatches - len(self._closed))
        return self._within[p] + min(self._since.get(p, 0), unbounded)

    @property
    def bounded(self) -> bool:
        """Whether it is known which firing belongs to which microbatch."""
        return self.microbatches <= 1 or len(self._closed) == self.microbatches

    def lesson(self, p: int) -> tuple[int, int]:
        """How often `p` fires in a microbatch, and the rank of its last firing (1 is the first).

        Without boundaries rather too often than too seldom: then its bucket only leaves later.
        """
        if self.microbatches > 1 and self.bounded:
            return self._lesson_fired[p], self._lesson_last[p]
        return math.ceil(self.fired[p] / max(1, self.microbatches)), self.last[p]

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
