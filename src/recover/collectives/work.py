"""The `Work` that backends of one process share: settled once, by whoever comes first.

`settle` does not run callbacks, it hands them back: callbacks belong on the communication thread, while a result may
also be settled by `revoke` on any other thread.
"""
from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from recover.collectives.contract import Work
from recover.errors import PeerLost

T = TypeVar("T")
log = logging.getLogger("recover.collectives")


class Pending(Work[T], Generic[T]):
    """A result that is still to come."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._callbacks: list[Callable[[Work[T]], None]] = []
        self._done = False
        self._result: T | None = None
        self._loss: PeerLost | None = None

    def done(self) -> bool:
        return self._done

    @property
    def loss(self) -> PeerLost | None:
        """Why it failed; None while pending and after success."""
        return self._loss

    def wait(self, timeout: float | None = None) -> T:
        if not self._done:
            with self._condition:
                if not self._condition.wait_for(lambda: self._done, timeout):
                    raise TimeoutError(f"not done after {timeout} s")
        if self._loss is not None:
            # a new exception each time: several threads may wait, and a raised one collects tracebacks
            raise PeerLost(self._loss.reason, self._loss.peer)
        return self._result  # type: ignore[return-value]  # settled without a loss: it is a T

    def add_done_callback(self, callback: Callable[[Work[T]], None]) -> None:
        with self._condition:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def settle(self, result: T | None, loss: PeerLost | None = None) -> list[Callable[[Work[T]], None]]:
        """Decide the outcome, unless it is decided. Gives back the callbacks, for the caller to have them `run`."""
        with self._condition:
            if self._done:
                return []
            self._result, self._loss, self._done = result, loss, True
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
            return callbacks

    def run(self, callbacks: list[Callable[[Work[T]], None]]) -> None:
        """Call them; what they raise is logged, since nobody is there to catch it."""
        for callback in callbacks:
            try:
                callback(self)
            except Exception:                           # the edge between the communication thread and its users
                log.exception("a callback of an operation failed")


def failed(loss: PeerLost) -> Pending[Any]:
    """One that has failed already."""
    work: Pending[Any] = Pending()
    work.settle(None, loss)
    return work
