"""`data[microbatch]` with workers: batches are made ahead of time, and are the same whoever makes them.

Theory of operation
-------------------
* A torch `DataLoader` with `batch_size=None` runs the workers; one item of it is one whole microbatch, made by
  `Samples`, which seeds everything from (step, index) before it touches the dataset. So a batch made by any worker, or
  by none, has the same bits, and workers are free to guess.
* Its sampler guesses what will be asked for: the first microbatch of this replica's plan, from the step at hand on,
  that was neither asked for nor guessed. The guess is made anew for each item, so a plan that changes after a failure
  changes the guesses at once, in both directions. Where there is nothing to guess (no quota, the end of the run), it
  hands out empty items, which cost nothing.
* Results come in the order of the guesses, and at most `PREFETCH * num_workers` are on their way. Asked for one of
  those, the loader takes results until it comes: those before it are discarded if they no longer fit the plan, kept
  otherwise (at most as many again). Asked for any other, it discards what no longer fits at the head of the queue, so
  that the workers turn to better guesses, and makes the batch itself, in process.
* A worker that fails on a guess says so instead of the batch. If that microbatch is then asked for, it is made in
  process, and the error comes up there with its true traceback; a wrong guess's error is nobody's business.
* A worker that dies ends the run of this replica with `WorkerLost`.

Workers are forked by default, once, at the first use, and live as long as the loader.
"""
from __future__ import annotations

import logging
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data import Sampler as TorchSampler

from recover.errors import WorkerLost
from recover.priority import yield_to_others
from recover.training.sampling import MapDataset, Microbatch, Sampler, Samples, preserved_random_state

PREFETCH = 2
"""Microbatches on their way per worker."""

log = logging.getLogger(__name__)

Plan = Callable[[int], Sequence[int]]
"""step -> the indices that this replica is expected to ask for in it, in that order; may change between calls"""


class Loader:
    """Batches by name, made ahead by `num_workers` processes (0: in process, when asked for).

    `batch_size` must be the sampler's. Not for use by several threads at once. Raises ValueError for settings that
    don't fit; `WorkerLost` from `loader[microbatch]` when a worker died (torch may raise its own RuntimeError earlier,
    from the signal handler that it installs).
    """

    def __init__(self, dataset: MapDataset, batch_size: int, num_workers: int = 0,
                 collate_fn: Callable[[list[Any]], Any] | None = None, *, sampler: Sampler, plan: Plan,
                 multiprocessing_context: str = "fork") -> None:
        if batch_size != sampler.batch_size:
            raise ValueError(f"batch_size is {batch_size} here and {sampler.batch_size} in the sampler")
        if num_workers < 0:
            raise ValueError(f"num_workers must not be negative, not {num_workers}")
        self.samples = Samples(dataset, sampler, collate_fn or default_collate)
        self._guesses = _Guesses(plan, depth=PREFETCH * num_workers)
        self._kept: dict[Microbatch, _Made] = {}
        self._results: Iterator[_Made | None] | None = None
        self._workers: DataLoader[_Made | None] | None = None
        self._closed = self._warned = False
        if num_workers:
            self._workers = DataLoader(_Items(self.samples), batch_size=None, sampler=self._guesses,
                                       num_workers=num_workers, collate_fn=_as_it_is, prefetch_factor=PREFETCH,
                                       worker_init_fn=_begin_worker,
                                       persistent_workers=True, multiprocessing_context=multiprocessing_context)

    def __getitem__(self, microbatch: Microbatch) -> Any:
        """The collated batch of this microbatch. Raises what the dataset raises."""
        if self._closed:
            raise RuntimeError("this loader is closed")
        if self._workers is None:
            return self.samples[microbatch]
        self._guesses.begin(microbatch.step)
        if self._results is None:
            with preserved_random_state():              # torch draws a seed for the workers, which they don't use
                self._results = iter(self._workers)
        made = self._from_workers(microbatch)
        self._guesses.known.add(microbatch)
        if made is not None and made.failure is None:
            return made.batch
        if made is not None:
            self._warn(made)
        return self.samples[microbatch]

    def _from_workers(self, wanted: Microbatch) -> _Made | None:
        """What a worker made of it; None if it was not guessed. Discards on the way what no longer fits."""
        if wanted in self._kept:
            return self._kept.pop(wanted)
        self._kept = {m: made for m, made in self._kept.items() if self._guesses.fits(m)}
        if wanted in self._guesses.ahead:
            while (made := self._next()) is None or made.microbatch != wanted:
                self._keep(made)
            return made
        self._guesses.known.add(wanted)
        for _ in range(len(self._guesses.ahead)):
            if self._guesses.fits(self._guesses.ahead[0]):
                break
            self._next()
        return None

    def _keep(self, made: _Made | None) -> None:
        if made is None or not self._guesses.fits(made.microbatch):
            return
        if len(self._kept) >= self._guesses.depth:
            self._kept.pop(next(iter(self._kept)))
        self._kept[made.microbatch] = made

    def _next(self) -> _Made | None:
        """The result of the oldest guess; waits for it."""
        assert self._results is not None
        guess = self._guesses.ahead.popleft()
        try:
            made = next(self._results)
        except (RuntimeError, OSError, EOFError) as error:
            # The dataset's errors come as results, so this is the machinery: torch's RuntimeError about a dead worker,
            # or, if it died with a batch under way, the broken connection over which the batch's memory is handed over.
            # In that case torch's signal handler is still to come, and would raise anywhere: closed loaders are exempt.
            with suppress(RuntimeError):
                self.close()
            raise WorkerLost(f"a data loader's worker process of this replica died ({type(error).__name__}: {error})"
                             ) from error
        assert guess == (made and made.microbatch), f"results are out of order: {made} for {guess}"
        return made

    def _warn(self, made: _Made) -> None:
        if not self._warned:
            log.warning("a worker could not make %s, so it is made in process (said only once):\n%s",
                        made.microbatch, made.failure)
        self._warned = True

    def close(self) -> None:
        """End the workers. The loader can't be used after that; closing again does nothing."""
        self._closed = True
        self._kept.clear()
        self._results = self._workers = None            # the last references: torch joins the workers as they go

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class _Made:
    """What comes back from a worker."""

    microbatch: Microbatch
    batch: Any
    failure: str | None = None


class _Items(Dataset["_Made | None"]):
    """The workers' side: a guess in, its batch out."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, guess: Microbatch | None) -> _Made | None:
        if guess is None:
            return None
        try:
            return _Made(guess, self.samples[guess])
        except Exception:  # noqa: BLE001 - the edge of a worker: if the batch is asked for, its error comes up in process
            return _Made(guess, None, traceback.format_exc())


class _Guesses(TorchSampler["Microbatch | None"]):
    """The endless sequence of guesses, made one by one as workers become free (in the parent process)."""

    def __init__(self, plan: Plan, depth: int) -> None:
        self.plan = plan
        self.depth = depth
        self.step = 0
        self.known: set[Microbatch] = set()             # asked for or guessed, from `step` on
        self.ahead: deque[Microbatch | None] = deque()  # guessed, result not taken; in order

    def begin(self, step: int) -> None:
        """Microbatches of `step` are being asked for: those of earlier ones are over."""
        if step != self.step:
            self.step = step
            self.known = {m for m in self.known if m.step >= step}

    def fits(self, guess: Microbatch | None) -> bool:
        """It may still be asked for."""
        return guess is not None and guess.step >= self.step and guess.index in self.plan(guess.step)

    def __iter__(self) -> Iterator[Microbatch | None]:
        while True:
            guess = self._guess()
            if guess is not None:
                self.known.add(guess)
            self.ahead.append(guess)
            yield guess

    def _guess(self) -> Microbatch | None:
        # with at least one microbatch a step, `depth` guesses and the one in hand reach no further than this
        for step in range(self.step, self.step + self.depth + 2):
            for index in self.plan(step):
                microbatch = Microbatch(step, index)
                if microbatch not in self.known:
                    return microbatch
        return None


def _begin_worker(worker: int) -> None:
    yield_to_others()


def _as_it_is(made: Any) -> Any:
    return made
