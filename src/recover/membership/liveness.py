"""Alive, busy, hung, frozen or gone: what the coordinator makes of the signs that it has of a rank. Pure.

Theory of operation
-------------------
Four kinds of evidence, each blind to something:

    end of stream     of a connection, or of a lifeline: the process is dead. Needs no judge.
    heartbeats        from a thread of the rank's interpreter: the process runs, and its interpreter is free
    pulse             from a process beside it on the same host (`pulse.py`): the process is there and is not stopped
    progress          carried by the heartbeats (`activity.py`): what the training thread is at, and for how long

* No heartbeats and no pulse for `Timeouts.silence`: frozen (a stopped process has no pulse), cut off, or its host died.
* No heartbeats but a pulse: a native call holds the interpreter lock. That is work, as a rule, and it ends: the rank has
  `Timeouts.native`, or the limit of its latest phase if that is longer. (What the kernel does for a process says less: it
  answers keep-alive probes for one that is stopped just as well.)
* Heartbeats, but the training thread does not get on with what it owes for longer than its limit: hung. Only if another
  member has waited for at least `Timeouts.silence`: as long as nobody waits, nobody is held up, and nobody is blamed.
  Whoever waits itself is never hung.

Data connections have a silence of their own (`collectives/engine.py`). Two members that don't hear each other there while
the coordinator hears both steadily are cut off from each other, and can't be in one view: `cut_off` says who goes.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from recover.config import Timeouts
from recover.membership.wire import Progress

Finding = tuple[Literal["heartbeat", "hung"], str]
Pair = tuple[int, int]


@dataclass(frozen=True)
class Signs:
    """Of one rank, as ages in seconds: since it was last heard, since its last pulse (None: it has none)."""

    silent: float
    pulse: float | None = None
    progress: Progress | None = None

    @property
    def waited(self) -> float:
        """Seconds that it has waited for others."""
        return self.progress.seconds if self.progress is not None and not self.progress.owes else 0.0


def judge(signs: Signs, waited: float, timeouts: Timeouts) -> Finding | None:
    """Whether the others must go on without this rank, and why. `waited`: how long another member has waited by now."""
    progress = signs.progress
    owes = progress is not None and progress.owes
    if signs.silent > timeouts.silence:
        if signs.pulse is None or signs.pulse > timeouts.silence:
            return "heartbeat", f"nothing heard for {signs.silent:.2f} s"
        limit = max(timeouts.native, progress.limit if progress is not None and owes else 0.0)
        if signs.silent > limit:
            return "hung", f"its process runs, but its interpreter has been held for {signs.silent:.2f} s (limit {limit:.2f} s)"
        return None
    if progress is not None and owes and waited > timeouts.silence and progress.seconds > progress.limit:
        return "hung", (f"its training thread has been in {progress.phase!r} for {progress.seconds:.2f} s "
                        f"(limit {progress.limit:.2f} s), and others wait for it")
    return None


class Steadiness:
    """Whether a connection brought heartbeats without a gap for the last while. Times by the caller's clock, in seconds."""

    def __init__(self, timeouts: Timeouts, now: float) -> None:
        self._timeouts, self._since, self._last = timeouts, now, now

    def beat(self, now: float) -> None:
        if now - self._last > self._timeouts.silence / 2:
            self._since = now
        self._last = now

    def steady(self, now: float) -> bool:
        """Heard all the time in which others may have missed it: whoever was frozen or busy meanwhile is not cut off."""
        return now - self._last <= self._timeouts.silence / 2 and now - self._since >= self._timeouts.silence


def cut_off(pairs: Iterable[Pair], steady: Collection[int]) -> list[int]:
    """Who must go so that no two of the rest are cut off from each other, for `pairs` (reporter, whom it does not hear).

    Only members that the coordinator hears steadily count. Each time the one with most such partners goes; of several the
    one with the highest number. So whose data connections are all dead goes alone, and of two one stays.
    """
    edges = {frozenset(pair) for pair in pairs if pair[0] != pair[1] and set(pair) <= set(steady)}
    gone: list[int] = []
    while edges:
        partners = Counter(member for edge in edges for member in edge)
        worst = max(partners, key=lambda member: (partners[member], member))
        gone.append(worst)
        edges = {edge for edge in edges if worst not in edge}
    return gone
