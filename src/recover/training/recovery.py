"""Timing and counting of one recovery, and the receipts of steps that are committed but not fenced yet.

A recovery begins with the first evidence (a collective failed, or a newer view was pushed) and ends when the step in
hand commits. Its phases are those of `recover.events.Phases`. The microbatch in hand when the evidence came is finished
first; that time is in no phase, since it is work that counts.
"""
from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from recover import events
from recover.errors import PeerLost


@dataclass
class Recovery:
    """One recovery under way. Times in seconds of the monotonic clock."""

    evidence: float | None = None           # of the first sign
    lost: PeerLost | None = None
    phases: dict[str, float] = field(default_factory=dict)
    lost_microbatches: frozenset[int] = frozenset()
    recomputed: int = 0
    forwarded: int = 0
    redone: int = 0
    views: int = 0

    def add(self, phase: str, since: float) -> None:
        self.phases[phase] = self.phases.get(phase, 0.0) + time.monotonic() - since

    def event(self) -> events.Recovery:
        return events.Recovery(phases=events.Phases(**self.phases), lost=tuple(sorted(self.lost_microbatches)),
                               recomputed=self.recomputed, discarded=0, redone=self.redone, forwarded=self.forwarded)


class Publisher:
    """Receipts, published in order once the fence of their step has passed (a casualty may have committed other bits)."""

    def __init__(self, log: events.Log) -> None:
        self.log = log
        self.paused = False                             # a joiner publishes nothing before it has caught up
        self._waiting: dict[int, events.Receipt] = {}

    def forget(self) -> None:
        """Drop what is not published."""
        self._waiting.clear()

    def hold(self, receipt: events.Receipt) -> None:
        self._waiting[receipt.step] = receipt

    def complete(self, step: int, state_hash: str) -> None:
        """The update of `step` is done, and this is the hash after it."""
        if step in self._waiting:
            self._waiting[step] = msgspec.structs.replace(self._waiting[step], state_hash=state_hash)

    def publish(self, step: int) -> None:
        """The fence of `step` is known to have passed."""
        if self.paused:
            return
        for ready in sorted(s for s in self._waiting if s <= step):
            self.log.receipt(self._waiting.pop(ready))
