"""Which samples a microbatch holds, and from which random state it is computed: pure functions of (seed, step, index).

That purity is what lets a survivor recompute the very microbatch that died with another replica. Three parts:

* **Addressing.** Samples are numbered through all epochs: microbatch `(step, index)` holds the `batch_size` samples
  from number `(step * B + index) * batch_size` on. Number `k` is item `k % n` of the shuffled epoch `k // n`, where
  `n` is the dataset's length. Nothing depends on who asks, how many replicas there are, or what was asked before.
* **Shuffling.** Each epoch has a permutation of `0..n-1` that is computed, not stored: its memory is a few numbers
  whatever `n`, and any element is had at once. The items are laid out on a grid of `a * b >= n` cells and mixed by
  rounds that shift rows by an amount that depends on the row, then columns by one that depends on the column (a
  Feistel network whose halves are the coordinates). Each round can be undone, so all of them together are a bijection
  of the grid; whoever lands on one of the cells beyond `n` walks on until he lands inside ("cycle walking"), which
  keeps it a bijection of `0..n-1`. The grid has less than `a`, about the square root of n, cells too many.
* **Seeding.** A cryptographic hash of (seed, step, what for) seeds torch, random and numpy. Neighbouring steps and
  seeds are unrelated, and data augmentation never draws from the stream of the dropout masks.
"""
from __future__ import annotations

import functools
import hashlib
import math
import operator
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

ROUNDS = 16
"""With 12, the 720 orders of 6 items were not yet equally frequent (chi-squared 8 deviations off); with 16 they are."""

_MASK = (1 << 64) - 1


class MapDataset(Protocol):
    """Any map-style dataset. What an item holds depends on its number alone (and on the seeded random state)."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, order=True, slots=True)
class Microbatch:
    """The name of one forward-backward pass: `0 <= index < B` within `step`."""

    step: int
    index: int

    def samples(self, sampler: Sampler) -> tuple[int, ...]:
        """The dataset's items that it holds, in order."""
        return sampler.samples(self)


class Permutation:
    """A pseudo-random bijection of `0..length-1` named by (seed, epoch); constant memory, random access."""

    def __init__(self, length: int, seed: int, epoch: int) -> None:
        if length < 1:
            raise ValueError(f"a permutation needs a length of at least 1, not {length}")
        self.length = length
        self._columns = math.isqrt(length - 1) + 1
        self._rows = -(-length // self._columns)
        self._keys = [int.from_bytes(digest(seed, "permutation", epoch, n)[:8], "little") for n in range(ROUNDS)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        """Where `index` goes. IndexError outside `0..length-1`."""
        if not 0 <= index < self.length:
            raise IndexError(f"{index} is outside a permutation of {self.length}")
        cell = self._mix(index)
        while cell >= self.length:
            cell = self._mix(cell)
        return cell

    def _mix(self, cell: int) -> int:
        row, column = divmod(cell, self._columns)
        for n in range(0, ROUNDS, 2):
            column = (column + _scramble(row ^ self._keys[n])) % self._columns
            row = (row + _scramble(column ^ self._keys[n + 1])) % self._rows
        return row * self._columns + column


def _scramble(x: int) -> int:
    """64 bits in, 64 well mixed bits out (the finishing step of SplitMix64)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


@functools.lru_cache(maxsize=16)
def _permutation(length: int, seed: int, epoch: int) -> Permutation:
    return Permutation(length, seed, epoch)


@dataclass(frozen=True)
class Sampler:
    """Which items of a dataset of `length` each microbatch holds; `microbatches` is B.

    Raises ValueError if the dataset is shorter than one step, which would hold some samples twice. (A step across the
    end of an epoch takes its last samples from the next shuffle, so one may come twice there.)
    """

    length: int
    seed: int
    microbatches: int
    batch_size: int
    part: int = 0           # of `parts` that share a microbatch's samples evenly (the data ranks of a replica)
    parts: int = 1

    def __post_init__(self) -> None:
        if self.microbatches < 1 or self.batch_size < 1:
            raise ValueError(f"microbatches and batch_size must be at least 1, not {self.microbatches} and "
                             f"{self.batch_size}")
        if self.batch_size % self.parts or not 0 <= self.part < self.parts:
            raise ValueError(f"a microbatch of {self.batch_size} samples can't be shared evenly by the {self.parts} data ranks "
                             "of a replica: choose another batch_size")
        if self.length < self.microbatches * self.batch_size:
            raise ValueError(f"the dataset has {self.length} samples, but one step takes "
                             f"{self.microbatches * self.batch_size} ({self.microbatches} microbatches of "
                             f"{self.batch_size}); use more data, or fewer or smaller microbatches")

    def samples(self, microbatch: Microbatch) -> tuple[int, ...]:
        """`batch_size / parts` item numbers. Raises ValueError if there is no such microbatch."""
        if microbatch.step < 0 or not 0 <= microbatch.index < self.microbatches:
            raise ValueError(f"there is no microbatch {microbatch.index} of step {microbatch.step}: steps start at 0, "
                             f"and a step has microbatches 0 to {self.microbatches - 1}")
        share = self.batch_size // self.parts
        first = (microbatch.step * self.microbatches + microbatch.index) * self.batch_size + self.part * share
        return tuple(self._item(number) for number in range(first, first + share))

    def _item(self, number: int) -> int:
        epoch, offset = divmod(number, self.length)
        return _permutation(self.length, self.seed, epoch)[offset]


class Samples:
    """`samples[microbatch]`: the collated batch, a pure function of (seed, step, index).

    Augmentations that draw from torch, random or numpy's global generators are part of that: these are seeded for the
    fetch, and put back after it. The fetch uses one torch thread, as a data loader's worker does, because sums depend
    on the number of threads in their last bits.
    """

    def __init__(self, dataset: MapDataset, sampler: Sampler,
                 collate: Callable[[list[Any]], Any] = default_collate) -> None:
        if len(dataset) != sampler.length:
            raise ValueError(f"the dataset has {len(dataset)} samples, its sampler was made for {sampler.length}")
        self.dataset = dataset
        self.sampler = sampler
        self.collate = collate

    def __getitem__(self, microbatch: Microbatch) -> Any:
        if not isinstance(microbatch, Microbatch):
            raise TypeError(f"data[...] takes what `for microbatch in step` hands out, not {microbatch!r}")
        items = microbatch.samples(self.sampler)
        with preserved_random_state(), _one_thread():
            part = f"/{self.sampler.part}" if self.sampler.parts > 1 else ""
            seed_everything(self.sampler.seed, microbatch.step, f"data {microbatch.index}{part}")
            return self.collate([self.dataset[item] for item in items])


def digest(*words: int | str) -> bytes:
    """32 bytes from the words, told apart by type and place (3 is not "3", but numpy's 3 is 3)."""
    plain = tuple(word if isinstance(word, str) else operator.index(word) for word in words)
    return hashlib.blake2b(repr(plain).encode(), digest_size=32).digest()


def seed_everything(seed: int, step: int, index_or_word: int | str) -> None:
    """Seed torch (this process's CPU, and CUDA if it is initialised), random and numpy for one purpose of one step.

    `index_or_word`: the index of a microbatch, or a word such as "commit" for what happens once in a step. An index and
    a word never give the same state. CUDA that is initialised later starts unseeded: seed again after that.
    """
    state = digest(seed, "step", step, index_or_word)
    # not torch.manual_seed: before CUDA is initialised it stores a formatted stack at every call
    torch_seed = int.from_bytes(state[:8], "little")
    torch.default_generator.manual_seed(torch_seed)
    if _cuda():
        torch.cuda.manual_seed_all(torch_seed)
    random.seed(state)
    np.random.seed(np.frombuffer(state, dtype="<u4").astype(np.uint32))


@contextmanager
def preserved_random_state() -> Iterator[None]:
    """Whatever happens inside, torch, random and numpy go on afterwards as if nothing had been drawn."""
    cpu, python, legacy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    cuda: Sequence[torch.Tensor] = torch.cuda.get_rng_state_all() if _cuda() else ()
    try:
        yield
    finally:
        torch.set_rng_state(cpu)
        random.setstate(python)
        np.random.set_state(legacy)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)


def _cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
