"""Told to go: what SIGTERM does to a rank, and what is left to do once all have agreed.

Theory of operation
-------------------
* The handler only sets a flag. The engine looks at it between two requests of the protocol; the microbatch in hand is
  finished. A recovery follows in which the replica hands back what it has not computed (`protocol.position`); what it
  has computed it contributes. It goes when the fence of that step has passed. One signal to one rank takes the whole
  replica along; a second signal changes nothing (schedulers and launchers both pass it on).
* If all replicas are told, they end together (`Decision.ending`), and hooks are called in every rank: the place where a
  checkpoint is written.
* A script that has a handler of its own for SIGTERM keeps it, and may call `run.leave()`.
* A forked child (a loader's worker) inherits the handler but not the run: there the signal does what it does by default.
"""
from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from recover.protocol.position import Position

Hook = Callable[[int], None]


class Obedience:
    """Calls `leave` at SIGTERM, while it is in force, if nobody else handles that signal."""

    def __init__(self, leave: Callable[[], None]) -> None:
        self._leave, self._owner, self._in_force = leave, os.getpid(), False

    def begin(self) -> None:
        """Main thread only; elsewhere, and where the script has a handler, nothing happens."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._hear)
            self._in_force = True

    def end(self) -> None:
        if self._in_force and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._hear:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._in_force = False

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self._leave()


def why(position: Position) -> str:
    """What `position`, which is over before the last step, says at its end."""
    step = position.step or 0
    after = f"after step {step - 1}" if step else "before the first step"
    members, job = len(position.view.members), position.job
    if position.ending == "floor":
        return f"stopped {after}: {members} {'replica is' if members == 1 else 'replicas are'} left, the run wants {job.floor}"
    return f"told to go, like all others: stopped {after}" if position.ending else f"told to go: left {after}"
