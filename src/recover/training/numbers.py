"""Names of collective operations: one 64-bit number from (kind, step, bucket, level), unique within a view."""
from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What an operation is for."""

    FENCE = 1
    CONFIRM = 2
    COMPARE = 3
    FORM = 4
    SUM = 5
    COARSE = 6
    FORWARD = 7
    PART = 8
    ENTER = 9
    ASK = 10
    ANSWER = 11
    BODY = 12


def number(kind: Kind, step: int, bucket: int = 0, level: int = 0) -> int:
    """`step` may be -1 (before the first). Steps below 2**34, buckets below 2**16, levels below 2**8."""
    assert -1 <= step < (1 << 34) - 1 and 0 <= bucket < 1 << 16 and 0 <= level < 1 << 8, (kind, step, bucket, level)
    return int(kind) << 58 | (step + 1) << 24 | bucket << 8 | level
