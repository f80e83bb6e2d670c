"""What the training thread of a rank is at, for whoever has to tell slow from hung.

Theory of operation
-------------------
A training thread that hangs (a deadlock, a file system that does not answer, an endless loop) leaves the other threads of
its process alone: heartbeats and data connections live on, and everyone waits for it. So a heartbeat carries more than
"I live": the *phase* that the training thread is in, for how long, whether it *owes* something, and the limit for that.

* The training thread calls `turn` whenever it comes to something new. That is progress, and starts the phase anew.
* Whoever waits for others (`waiting`) makes no progress because of them: it owes nothing, and is never blamed.
* The limit of a phase is ten times the longest of its latest turns, and at least a floor: `Timeouts.compute` for a
  microbatch and for what the run itself does, `Timeouts.script` for what a script does between steps. So slow is not hung.
* The first turn of a phase is never measured against others (it compiles, allocates, warms up): its limit is
  `Timeouts.pause`, and so is that of `run.pause`, unless the script says better.
* Time is counted by the heartbeats' thread, at most two beats at a time. While the process was stopped, or the interpreter
  was held by a native call, no time passes here: those have judges of their own (`liveness.py`).
"""
from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from recover.config import Timeouts
from recover.membership.wire import Progress

FACTOR = 10
"""A turn may last so many times the longest of its latest like."""
LATEST = 16
SCRIPTS = frozenset({"begin", "update", "evaluate"})
"""Phases in which the script does as it likes; the floor of their limit is `Timeouts.script`."""


@dataclass(frozen=True)
class _State:
    phase: str
    owes: bool
    limit: float
    began: float                    # by the clock
    counted: float                  # by the beats


class Activity:
    """Of one rank. `turn`, `waiting`, `pause` and `stop` are for the training thread, `beat` for the heartbeats' thread."""

    def __init__(self, timeouts: Timeouts, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeouts, self._clock = timeouts, clock
        self._state: _State | None = None               # replaced as a whole: two threads read and write it
        self._turns: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=LATEST))
        self._counted = 0.0
        self._beat: float | None = None

    # -- the training thread ----------------------------------------------------------------------------------------
    def turn(self, phase: str) -> None:
        """Something new begins, in which this rank owes its part to the others."""
        self._remember()
        self._enter(phase, True, self.limit(phase))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, others are waited for."""
        before = self._state
        self._remember()
        self._enter("wait", False, 0.0)
        try:
            yield
        finally:
            if before is not None:
                self._enter(before.phase, before.owes, before.limit)

    @contextmanager
    def pause(self, phase: str, seconds: float | None = None) -> Iterator[None]:
        """Inside, something takes up to `seconds` (default: `Timeouts.pause`) and is no failure."""
        before = self._state
        self._remember()
        self._enter(phase, True, self._timeouts.pause if seconds is None else seconds)
        try:
            yield
        finally:
            self._state = None                          # a pause is no measure for anything
            if before is not None:
                self._enter(before.phase, before.owes, before.limit)

    def stop(self) -> None:
        """This rank's part is over, or has not begun: nothing is owed."""
        self._state = None

    def limit(self, phase: str) -> float:
        """Seconds that the next turn of `phase` may last."""
        turns = self._turns.get(phase)
        if not turns:
            return self._timeouts.pause
        return max(self._timeouts.script if phase in SCRIPTS else self._timeouts.compute, FACTOR * max(turns))

    def _enter(self, phase: str, owes: bool, limit: float) -> None:
        self._state = _State(phase, owes, limit, self._clock(), self._counted)

    def _remember(self) -> None:
        state = self._state
        if state is not None and state.owes:
            seen = self._counted - state.counted + 2 * self._timeouts.heartbeat
            self._turns[state.phase].append(min(self._clock() - state.began, seen))

    # -- the heartbeats' thread -------------------------------------------------------------------------------------
    def beat(self) -> Progress | None:
        """A heartbeat is due: what it says. None if this rank owes nothing to anybody."""
        now, last = self._clock(), self._beat
        self._beat = now
        if last is not None:
            self._counted += min(now - last, 2 * self._timeouts.heartbeat)
        state = self._state
        if state is None:
            return None
        return Progress(state.phase, state.owes, max(0.0, min(now - state.began, self._counted - state.counted)), state.limit)
