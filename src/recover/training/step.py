"""One optimizer step as the script sees it: a loop over the microbatches that this replica computes.

A failure shows up here as more turns of the loop, and nothing else. In the first step of an `exact` run there is one turn
more: microbatch (0, 0) is computed by every replica and discarded, to learn how large gradients are.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from recover.errors import RecoverError
from recover.gradients.buckets import Entry
from recover.protocol import requests as ask
from recover.training.sampling import Microbatch, seed_everything

if TYPE_CHECKING:
    from recover.training.run import Run

FAILURES = (RecoverError, RuntimeError, ValueError, AssertionError)
"""What the loops over steps and microbatches raise."""


class Step:
    """`for microbatch in step: ...`; then `.grad` holds the mean gradient over all B microbatches, once each.

    index: the step's number. After the loop: `loss` (mean over all microbatches, or over the global weight), `metrics`,
    `evaluation` (name -> weighted mean over the evaluation set, if the step had one: see `run.evaluate`), and `skipped` (the
    gradient was not finite, and the run skips such steps: every `.grad` is None).
    """

    def __init__(self, run: Run, index: int) -> None:
        self._run = run
        self.index = index
        self.loss = math.nan
        self.metrics: dict[str, float] = {}
        self.evaluation: dict[str, float] = {}
        self.skipped = False
        self.complete = False
        self._entered = False
        self._current: tuple[Microbatch, ...] = ()
        self._done = False                              # the current microbatch's backward was run
        self._calibrating = False

    def __iter__(self) -> Iterator[Microbatch]:
        for chunk in self._loop(1):
            yield chunk[0]

    def chunks(self, max: int) -> Iterator[tuple[Microbatch, ...]]:
        """The same loop, by up to `max` microbatches at a time (for pipelines): `with step.microbatch(*chunk) as m: ...`."""
        if max < 1:
            raise ValueError(f"a chunk has at least 1 microbatch, not {max}")
        self._run.engine.pipelined = True
        yield from self._loop(max)

    def _loop(self, max: int) -> Iterator[tuple[Microbatch, ...]]:
        if self._entered:
            raise RuntimeError(f"the microbatches of step {self.index} were handed out already: loop over a step once")
        self._entered = True
        run = self._run
        try:
            yield from self._turns(max)
        except FAILURES as error:                       # the script may end without asking `run.steps` again
            run.failed(error)
            raise

    def _turns(self, max: int) -> Iterator[tuple[Microbatch, ...]]:
        run = self._run
        run.in_loop = True
        run.engine.position.chunk = max
        try:
            if run.engine.needs_calibration:
                yield from self._calibrate()
            while isinstance(request := run.advance(), ask.Compute):
                run.score(request.step, request.indices)
                yield from self._hand_out(tuple(Microbatch(request.step, index) for index in request.indices))
        finally:
            run.in_loop = False
        if request is None:                             # all go, and give this step up
            raise run.gone()
        assert isinstance(request, ask.Commit) and request.step == self.index, request
        self._commit(request)

    def _calibrate(self) -> Iterator[tuple[Microbatch, ...]]:
        self._calibrating = True
        yield from self._hand_out((Microbatch(0, 0),))
        self._calibrating = False
        self._run.engine.calibrated(self.index)

    def _hand_out(self, chunk: tuple[Microbatch, ...]) -> Iterator[tuple[Microbatch, ...]]:
        self._current, self._done = chunk, False
        self._run.enter(chunk[0])
        self._run.engine.handed_out()
        yield chunk
        if not self._done:
            self._run.sums.store.check()                # a bare loss.backward(), say
            raise RuntimeError(f"microbatch {chunk[0].index} of step {self.index} was handed out, but not given to "
                               "step.backward(loss): every microbatch must be (with weight=0 if it holds no tokens)")
        self._current = ()

    @contextmanager
    def microbatch(self, *chunk: Microbatch, weight: float = 1.0) -> Iterator[Entry]:
        """Around a trainer's own `loss.backward()`; set `.loss` of what it yields. Raises RuntimeError at the wrong time.

        `chunk`: what the loop handed out (may be left out).
        """
        current = self._current
        if not current:
            raise RuntimeError(f"no microbatch of step {self.index} is under way: call backward inside `for microbatch in step`")
        if chunk and chunk != current:
            raise RuntimeError(f"{chunk} is not what was handed out, {current}")
        if self._done:
            raise RuntimeError(f"microbatch {current[0].index} of step {self.index} had its backward already: add up its "
                               "losses and call backward once")
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"the weight of a microbatch must be a finite number of at least 0, not {weight}")
        run = self._run
        with run.sums.calibration() if self._calibrating else run.engine.microbatch() as entry:
            entry.weight = float(weight)
            entry.on_seed = lambda index, stage: run.enter(Microbatch(self.index, index), stage)
            yield entry
        self._done = True

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, scaler: Any = None) -> None:
        """`loss.backward()`, its gradient added to the step's. Never raises because a peer died.

        loss: the microbatch's mean loss; or, with `weight` (its tokens, say), the sum over them: the step's gradient and
        loss are then divided by the sum of all weights. scaler: a `torch.amp.GradScaler`; use `nonfinite="keep"` with it.
        """
        if scaler is not None and self._run.nonfinite != "keep":
            raise ValueError('with a gradient scaler, join with nonfinite="keep": the scaler skips steps itself, alike on all')
        with self.microbatch(weight=1.0 if weight is None else float(weight)) as entry:
            entry.loss = loss.detach()
            self._run.before_backward(loss)
            (loss if scaler is None else scaler.scale(loss)).backward()

    def add(self, name: str, value: float | Tensor) -> None:
        """A number of the microbatch in hand; `metrics[name]` is its mean over all microbatches that added it."""
        if not self._current:
            raise RuntimeError("step.add belongs inside `for microbatch in step`")
        if not self._calibrating:
            self._run.sums.metrics.add(self._current[0].index, name, float(value))

    def _commit(self, request: ask.Commit) -> None:
        self.complete = True
        self._run.committed(self, request)
        seed_everything(self._run.seed, self.index, "commit")

    def __repr__(self) -> str:
        return f"<step {self.index}{', complete' if self.complete else ''}>"


__all__ = ["Microbatch", "Step"]
