"""What a joiner fetches from whom, and what it does next: decided without sockets, threads or clocks.

Theory of operation
-------------------
A joiner is in the view, owes nothing, and receives every step's sums. It catches up by *attempts*. An attempt names a step
`start` that no giver has begun yet; every giver keeps a copy of the state in which that step begins; the copy is fetched in
pieces, from all of them at once, while the joiner keeps the sums of `start` and later steps. Once the copy is there (`ready`),
the script replays the kept steps. When it waits for the very step that is being committed, it has caught up.

After each step that it takes part in, the positions of a joiner tell each other where they are (`Progress`), and each
computes the same `Move`: so they start the same attempts, load the same copy and take over at the same step.
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

import msgspec

from recover.protocol.messages import ViewId

PIECE = 2 << 20                 # bytes: small, so that a gradient does not wait long behind one
PATIENCE = 8                    # steps: the longest that an attempt is put off after givers were told too late


Giver = tuple[ViewId, int]


class Pieces:
    """The pieces of `total` bytes: which are missing, and which giver was asked for which.

    A giver is named by (view, member): what it was asked for in one view it does not give in the next.
    """

    def __init__(self, total: int, size: int = PIECE) -> None:
        assert total >= 0 and size > 0
        self._missing = deque((start, min(start + size, total)) for start in range(0, total, size))
        self._asked: dict[Giver, tuple[int, int]] = {}
        self.given: dict[Giver, int] = {}               # bytes

    @property
    def whole(self) -> bool:
        return not self._missing and not self._asked

    def ask(self, giver: Giver) -> tuple[int, int] | None:
        """The next piece for this giver, [start, end); None: nothing is left to ask for (but see `lost`)."""
        assert giver not in self._asked, "one piece at a time"
        if not self._missing:
            return None
        self._asked[giver] = self._missing.popleft()
        return self._asked[giver]

    def arrived(self, giver: Giver) -> None:
        """What it was asked for is there."""
        start, end = self._asked.pop(giver)
        self.given[giver] = self.given.get(giver, 0) + end - start

    def lost(self, giver: Giver) -> None:
        """It gives no more: what it was asked for is asked of another."""
        if giver in self._asked:
            self._missing.appendleft(self._asked.pop(giver))


class Progress(msgspec.Struct, frozen=True, array_like=True):
    """Where one position of a joiner is when a step has been committed.

    whole: all bytes of the attempt's copy are here. failed: no giver has it (any more). awaits: the step whose sums its
    script waits for (-1: none). full: what it keeps has reached its limit.
    """

    whole: bool
    failed: bool
    awaits: int
    full: bool


class Do(Enum):
    """What a joiner does next."""

    KEEP = "keep"               # go on as before
    READY = "ready"             # every position has its copy: the scripts may load it
    AGAIN = "again"             # a new attempt, from a newer copy
    TAKE_OVER = "take over"     # the scripts have caught up: they go on by themselves


@dataclass(frozen=True)
class Move:
    """`start`: of the new attempt, for AGAIN."""

    do: Do
    start: int = -1


def first_start(entered: int) -> int:
    """The first attempt of a joiner that entered at this step."""
    return entered + 1


def next_move(step: int, ready: bool, tries: int, told: list[Progress]) -> Move:
    """After `step` was committed. ready: the attempt's copy may be loaded already. tries: attempts so far that failed.

    A giver can't begin step + 2 before this joiner has taken part in step + 1: told at once, it hears in time.
    """
    if ready and all(each.awaits == step for each in told):
        return Move(Do.TAKE_OVER)
    if any(each.full for each in told):
        return Move(Do.AGAIN, step + 2)
    if not ready and any(each.failed for each in told):
        return Move(Do.AGAIN, step + 2 + min(tries, PATIENCE))
    if not ready and all(each.whole for each in told):
        return Move(Do.READY)
    return Move(Do.KEEP)
