"""What the reduced buckets of a step say, and the gradient that is made of them.

Functions of reduced values only, hence equal on all replicas.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from recover.errors import LateGradient
from recover.gradients.buckets import Bucket, Member
from recover.gradients.exact import CHUNK, peak_of
from recover.gradients.layout import Learned


@dataclass(frozen=True)
class Committed:
    """What a step's reduced tails say; the same on all replicas."""

    loss: float                             # sum of losses / B, or / global weight; NaN if a microbatch told none
    losses: tuple[float, ...]               # per microbatch
    weights: tuple[float, ...]              # per microbatch
    who: dict[int, int]                     # microbatch -> member, by the last bucket
    contributors: tuple[dict[int, int], ...]    # the same for every bucket: a redone one may name others
    used: dict[str, int]                    # parameter -> microbatches that gave it a gradient
    nonfinite: tuple[int | None, str] | None    # first (microbatch, parameter); None for a sum that overflowed
    learned: Learned | None                 # to `adopt` before the next step; None: nothing new


def check_whole(buckets: Sequence[Bucket], parameters: Sequence[Member], count: int, step: int | None) -> None:
    """`count` microbatches, each exactly once, the same in every bucket (I1); coarse sums folded; no gradient late."""
    first = buckets[0].counts()
    for k, bucket in enumerate(buckets):
        counts = bucket.counts()
        if any(n not in (0, 1) for n in counts) or sum(counts) != count or counts != first:
            raise AssertionError(f"I1: bucket {k} of step {step} holds the microbatches {counts} times; "
                                 f"{count} of {len(counts)} are expected, each once, in every bucket")
        if bucket.pending_levels():
            raise AssertionError(f"bucket {k} of step {step} lacks coarse sums: reduce its extra_levels, then fold it")
    last = buckets[-1]
    for index, late in enumerate(last.reduced_tail[last.tail.late].tolist()):
        if late:
            raise LateGradient(f"{parameters[int(late) - 1].name} got a gradient in microbatch {index} of step {step} "
                               "after its bucket had left: its hook fires more often than was learned")


def prepare(bucket: Bucket, divisor: float) -> float:
    """scratch := reduced * (1 / divisor); gives max |reduced| in exact mode (inf if not finite), else 0."""
    factor = 1.0 / divisor
    if not bucket.exact:
        torch.mul(bucket.reduced, factor, out=bucket.scratch)
        return 0.0
    peak = 0.0
    for start in range(0, bucket.reduced.numel(), CHUNK):
        piece = bucket.reduced[start:start + CHUNK]
        highest = peak_of(piece)
        if not math.isfinite(highest):      # NaNs differ in sign and payload by the order of the sum: make them one
            piece = torch.where(piece.isnan(), math.nan, piece)
        bucket.scratch[start:start + CHUNK].copy_(piece * factor)
        peak = max(peak, highest) if math.isfinite(highest) else math.inf
    return peak


def first_nonfinite(buckets: Sequence[Bucket], parameters: Sequence[Member]) -> tuple[int | None, str] | None:
    """The first microbatch whose gradient is not finite and, of its parameters, the first one registered.

    (None, parameter) when each was finite and only their sum is not; None when all is well.
    """
    found = [(index, bucket.members[place - 1].index)
             for bucket in buckets for index, place in enumerate(bucket.bad()) if place]
    if found:
        index, parameter = min(found)
        return index, parameters[parameter].name
    for bucket in buckets:
        place = bucket.first_bad_gradient()
        if place:
            return None, bucket.members[place - 1].name
    return None


def contributors(bucket: Bucket) -> dict[int, int]:
    """microbatch -> member that computed it, for what is inside this bucket."""
    who = bucket.reduced_tail[bucket.tail.who].tolist()
    return {index: int(who[index]) - 1 for index, inside in enumerate(bucket.counts()) if inside}


def uses(buckets: Sequence[Bucket], parameters: Sequence[Member]) -> dict[str, int]:
    """Parameter -> microbatches that gave it a gradient, in the order of registration."""
    used: dict[int, int] = {}
    for bucket in buckets:
        for member, times in zip(bucket.members, bucket.reduced_tail[bucket.tail.used].tolist(), strict=True):
            used[member.index] = int(times)
    return {member.name: used[member.index] for member in parameters}


def lessons(buckets: Sequence[Bucket], parameters: int) -> Learned | None:
    """How microbatch 0 fired; None when it is not inside or gave no gradient at all."""
    learned = Learned(fires=[0] * parameters, order=[0] * parameters)
    for bucket in buckets:
        values = bucket.reduced_tail.tolist()
        fires, order = values[bucket.tail.fires], values[bucket.tail.order]
        for place, member in enumerate(bucket.members):
            learned["fires"][member.index] = int(fires[place])
            learned["order"][member.index] = int(order[place])
    return learned if any(learned["fires"]) else None
