"""One pass: the backward of one microbatch, or of a chunk of them, with the hooks that it fires.

Theory of operation
-------------------
* What a pass adds to a bucket is *taken* (checked, and in `exact` absorbed) and *finished* (written into the tail) once,
  when the bucket leaves or the pass is over. In `exact` every microbatch of a chunk is taken at its boundary, since each is
  a term of its own; what came after the last boundary is taken when the bucket is finished.
* A gradient that can't be ascribed to a microbatch of the chunk is ascribed to the first one without a boundary (only the
  report of a gradient that is not finite depends on that).
* Nothing raises into autograd: a hook that raises in the middle of backward leaves FSDP with gradients that are not
  reduced. What goes wrong is kept and raised when the pass is over.
* A pass without microbatches (`indices` empty) brings the gradients that earlier ones withheld; see `store`.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from recover.gradients.buckets import Bucket, Done, Entry
from recover.gradients.progress import Progress

Launch = Callable[[int], None]


@dataclass
class Pass:
    """`blame`: the microbatch that leftovers are ascribed to if the pass has none of its own."""

    indices: tuple[int, ...]
    member: int
    buckets: Sequence[Bucket]
    progress: Progress
    launch: Launch | None
    learn: bool                     # firings are still to be learned, and microbatch 0 is in this pass
    hooked: bool                    # every write into `.grad` fires a hook
    blame: int = 0
    tracked: Mapping[int, object] = field(default_factory=dict)     # parameters of which `touch` tells the use
    spoiled: int | None = None      # a bucket in whose `.grad` something other than backward wrote
    failure: BaseException | None = None
    finished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._touched: set[tuple[int, int]] = set()         # (parameter, place of the microbatch)
        self.entry = Entry(self.indices, fired=self.progress.fired, on_boundary=self.boundary)

    def fire(self, parameter: int) -> None:
        """A hook's firing. Never raises, never waits."""
        try:
            for k in self.progress.fire(parameter):
                self.let_go(k)
        except Exception as error:      # noqa: BLE001 - a hook must not raise into autograd; `close` raises it
            self.failure = self.failure or error

    def touch(self, parameter: int) -> None:
        """The microbatch in hand uses a tracked parameter, whose own hook tells less (or nothing, until later)."""
        self._touched.add((parameter, self.progress.open))

    def boundary(self, index: int) -> None:
        """See `Entry.boundary`."""
        touched = self.progress.boundary(self.indices.index(index))
        for k in sorted(touched - self.finished):
            if self.buckets[k].exact:
                self.buckets[k].take(index)
                self.buckets[k].renew()

    def _check(self, k: int) -> None:
        bucket = self.buckets[k]
        writes = sum(self.progress.fired[member.index] for member in bucket.members)
        if self.hooked and self.spoiled is None and bucket.disturbed(writes):
            self.spoiled = k

    def verify(self) -> None:
        """Looks for strange writes in all buckets: see `spoiled`."""
        for k in range(len(self.buckets)):
            self._check(k)

    def finish(self, k: int) -> None:
        """What the pass adds to bucket k is final: once per pass."""
        if k in self.finished:
            return
        self.finished.add(k)
        bucket, progress = self.buckets[k], self.progress
        members = [member.index for member in bucket.members]
        used = [self._used(p) for p in members]
        if not self.hooked:
            used = [max(times, int(any_)) for times, any_ in zip(used, bucket.nonzero(), strict=True)]
        bucket.take(self.indices[progress.open] if self.indices else self.blame)
        lessons = [progress.lesson(p) for p in members] if self.learn else []
        bucket.finish(Done(
            self.indices, self.member, *self._told(), used,
            fires=[fires for fires, _ in lessons], order=[last for _, last in lessons],
            late=1 + progress.late[0] if progress.late else 0))

    def _used(self, p: int) -> int:
        if p in self.tracked:
            return sum((p, place) in self._touched for place in range(max(1, len(self.indices))))
        return self.progress.used(p)

    def _told(self) -> tuple[list[float | Tensor], list[float]]:
        """Losses and weights so far (a bucket may leave before the script tells; `close` wants them complete)."""
        count = len(self.indices)
        losses, weights = self.entry.losses, self.entry.weights
        return (list(losses) if len(losses) == count else [math.nan] * count,
                [float(weight) for weight in weights] if len(weights) == count else [1.0] * count)

    def let_go(self, k: int) -> None:
        """Bucket k leaves; not if something else wrote into `.grad`, or another failed to leave."""
        assert self.launch is not None
        self._check(k)
        if self.spoiled is None and self.failure is None:
            self.finish(k)
            self.launch(k)

    def close(self) -> None:
        """The pass is over and nothing went wrong: finishes the buckets, and launches those that have not left."""
        self.entry.complete()
        if self.buckets[0].exact and not self.progress.bounded:
            raise RuntimeError('in reduction="exact" each microbatch of a chunk is rounded by itself: call boundary(index) of '
                               "what step.microbatch(*chunk) yields after each backward, as recover's pipelines do")
        for k in range(len(self.buckets)):
            if k not in self.progress.queued:
                self.finish(k)
        for k in self.progress.rest():
            self.let_go(k)


def named(indices: Sequence[int]) -> str:
    """Microbatches in a message."""
    return ", ".join(map(str, indices)) or "(none: flush)"
