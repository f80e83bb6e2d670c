"""Which parameter lies in which bucket, and what a bucket's tail means. Pure: no tensor is touched here.

Theory of operation
-------------------
* A bucket is a contiguous run of parameters of one element type on one device. At first parameters are taken in reverse
  order of registration (backward produces their gradients roughly so); once the real order of the last firings was
  *learned*, they are laid out in that order, and those that never fired come last, so that they hold nobody up.
* The first bucket of the whole model is small: the earlier something leaves, the more of the reduction hides.
* Every replica must lay out identical buckets, so the layout is a pure function of names, sizes and what was learned.
* The *tail* is a short float64 vector that is reduced together with the bucket: which microbatches are inside
  (one-hot), who computed them, their losses and weights. What belongs to different microbatches lies in different
  elements, so that one NaN loss says which microbatch it was; every element is either zero on all members but one or
  a small whole number, so its sum is exact in any order.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict


class Learned(TypedDict):
    """Per parameter (by registration): how often its hook fires in a microbatch, and the rank of its last firing (1 is
    the first; 0 in both: never seen)."""

    fires: list[int]
    order: list[int]


@dataclass(frozen=True)
class Slot:
    """What the layout needs to know of one parameter: elements, bytes per element as sent, what may not be mixed."""

    numel: int
    itemsize: int
    kind: tuple[str, str]       # (dtype of the sums, device)


def plan(slots: Sequence[Slot], learned: Learned | None, *, bucket_bytes: int,
         first_bucket_bytes: int) -> list[list[int]]:
    """Buckets as lists of indices into `slots`, in launch order; each parameter appears exactly once."""
    count = len(slots)
    if learned is None:
        seen = list(reversed(range(count)))
        unseen: list[int] = []
    else:
        seen = sorted((p for p in range(count) if learned["fires"][p]), key=lambda p: learned["order"][p])
        unseen = [p for p in reversed(range(count)) if not learned["fires"][p]]
    buckets: list[list[int]] = []
    open_buckets: dict[tuple[str, str], list[int]] = {}
    sizes: dict[tuple[str, str], int] = {}
    for p in seen:
        kind = slots[p].kind
        bucket = open_buckets.get(kind)
        limit = first_bucket_bytes if bucket is not None and bucket is buckets[0] else bucket_bytes
        size = slots[p].numel * slots[p].itemsize
        if bucket is None or sizes[kind] + size > limit:
            bucket = open_buckets[kind] = []
            sizes[kind] = 0
            buckets.append(bucket)
        bucket.append(p)
        sizes[kind] += size
    if learned is not None:         # launched in the order in which they become final
        buckets.sort(key=lambda bucket: learned["order"][bucket[-1]])
    last: dict[tuple[str, str], list[int]] = {}
    for p in unseen:
        last.setdefault(slots[p].kind, []).append(p)
    return _append_unseen(buckets, last, slots)


def _append_unseen(buckets: list[list[int]], unseen: dict[tuple[str, str], list[int]],
                   slots: Sequence[Slot]) -> list[list[int]]:
    """Parameters that never fired: into the last bucket if they are of its kind, else into buckets of their own."""
    for kind, members in unseen.items():
        if buckets and slots[buckets[-1][0]].kind == kind:
            buckets[-1] = buckets[-1] + members
        else:
            buckets.append(members)
    return buckets


@dataclass(frozen=True)
class TailLayout:
    """Where what lies in a bucket's tail (float64), for B microbatches, P parameters and L coarse levels."""

    microbatches: int
    parameters: int
    levels: int

    def _after(self, blocks: int, extra: int, length: int) -> slice:
        start = blocks * self.microbatches + extra * self.parameters
        return slice(start, start + length)

    @property
    def count(self) -> slice:
        """[B] one for each microbatch inside; exactly all ones once reduced (I1)."""
        return self._after(0, 0, self.microbatches)

    @property
    def who(self) -> slice:
        """[B] 1 + the member that computed it."""
        return self._after(1, 0, self.microbatches)

    @property
    def loss(self) -> slice:
        """[B] its loss, as the script gave it."""
        return self._after(2, 0, self.microbatches)

    @property
    def weight(self) -> slice:
        """[B] its weight (1 unless the script says otherwise)."""
        return self._after(3, 0, self.microbatches)

    @property
    def bad(self) -> slice:
        """[B] 0, or 1 + the place in the bucket of the parameter whose sum this microbatch first made NaN or inf."""
        return self._after(4, 0, self.microbatches)

    @property
    def late(self) -> slice:
        """[B] 0, or 1 + the registered index of a parameter whose gradient in it came after its bucket had left."""
        return self._after(5, 0, self.microbatches)

    @property
    def used(self) -> slice:
        """[P] how many microbatches gave the parameter a gradient."""
        return self._after(6, 0, self.parameters)

    @property
    def fires(self) -> slice:
        """[P] how often its hook fired in microbatch 0 (until it is learned)."""
        return self._after(6, 1, self.parameters)

    @property
    def order(self) -> slice:
        """[P] the rank of its last firing in microbatch 0 (until it is learned)."""
        return self._after(6, 2, self.parameters)

    @property
    def level(self) -> slice:
        """[L] how many members hold a coarse sum of level 1 + j."""
        return self._after(6, 3, self.levels)

    @property
    def size(self) -> int:
        """Elements of the tail."""
        start: int = self.level.stop
        return start
