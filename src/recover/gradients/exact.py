"""Sums that do not depend on the order of their terms: pre-rounded float64 (Demmel and Nguyen).

Theory of operation
-------------------
* Let 2^e bound what the bucket's values are expected to be and C = 1.5 * 2^(e+12). In float64, `(x + C) - C` rounds x
  to a multiple of u = 2^(e-40), because C + x stays in C's binade as long as |x| < C/3. A sum of B such terms with
  |x| < C/(3B) is again a multiple of u below 2^(e+12), fits into 53 bits, and so do all partial sums: no addition ever
  rounds, hence any order and any grouping over replicas give the same bits.
* Values at or above C/(3B) are cut in two at the next *level* (the same grid 2^32 times coarser): the coarse part goes
  to that level's own sum, which is exact for the same reason, and the remainder, which is below the lower level's bound
  whatever B up to 2^19, goes on to the level below. Every piece is a pure function of the value, e and B.
* Coarse sums are allocated when first needed, travel by a second reduction of the buckets that have any, and are folded
  into the fine sum from the coarsest down: a fixed order again. That rounds, but equally for everyone.
* NaN and inf stay in the fine sum, where ordinary arithmetic passes them on. Float64 values of 2^900 and more count as
  infinite, so that no grid constant overflows.
* The work is done in chunks that stay in the processor's cache.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 1 << 16             # elements; 512 KiB of float64
STRIDE = 32                 # bits between two levels
MAX_MICROBATCHES = 1 << 19  # beyond, a remainder could exceed the bound of the level below
DEFAULT_EXPONENT = -30      # of a bucket whose scale is unknown: low costs a level, high would cost precision
_LOWEST = {torch.float32: -149, torch.float64: -900}
_HIGHEST = {torch.float32: 148, torch.float64: 900}
_LIMIT = {torch.float32: 2.0 ** 128, torch.float64: 2.0 ** 900}


def clamp_exponent(exponent: int, dtype: torch.dtype) -> int:
    """Into the range where every grid constant of gradients of `dtype` (float32 or float64) is a normal number."""
    return max(_LOWEST[dtype], min(_HIGHEST[dtype], exponent))


def exponent_above(peak: float, dtype: torch.dtype) -> int | None:
    """The least e with `peak` < 2^e, clamped; None when `peak` says nothing (0, NaN, inf)."""
    if peak == 0 or not math.isfinite(peak):
        return None
    return clamp_exponent(math.frexp(peak)[1], dtype)


def level_count(dtype: torch.dtype, microbatches: int) -> int:
    """Coarse levels that can ever be needed for values of `dtype`, whatever the exponent."""
    top = 128 if dtype == torch.float32 else 900
    span = top - (_LOWEST[dtype] + 11) + math.ceil(math.log2(microbatches))
    return max(0, math.ceil(span / STRIDE))


@dataclass(frozen=True)
class Grid:
    """The grids of one bucket in one step: a pure function of its exponent, B and the gradients' dtype."""

    exponent: int
    microbatches: int
    dtype: torch.dtype

    def constant(self, level: int) -> float:
        """C of a level; level 0 is the fine one."""
        return math.ldexp(1.5, self.exponent + STRIDE * level + 12)

    def bound(self, level: int) -> float:
        """Values below it are summed exactly at this level."""
        return self.constant(level) / (3 * self.microbatches)

    @property
    def limit(self) -> float:
        """Values at or above it count as infinite (no float32 is)."""
        return _LIMIT[self.dtype]

    def level(self, peak: float) -> int:
        """The lowest level that can hold `peak`."""
        level = 0
        while peak >= self.bound(level):
            level += 1
        return level


def absorb(gradient: Tensor, fine: Tensor, coarse: Callable[[int], Tensor], grid: Grid) -> None:
    """Adds one microbatch's gradient to exact sums.

    gradient: flat [n], `grid.dtype`, unchanged. fine: flat [n] float64. coarse(j) gives level j's flat [n] float64 sum
    (j >= 1), allocating it at the first call; it is asked only for levels that this gradient needs.
    """
    constant, bound = grid.constant(0), grid.bound(0)
    work = torch.empty(min(CHUNK, gradient.numel()), dtype=torch.float64, device=gradient.device)
    for start in range(0, gradient.numel(), CHUNK):
        piece = gradient[start:start + CHUNK]
        x = work[:piece.numel()].copy_(piece)
        if not peak_of(piece) < bound:          # also when there is a NaN
            _split(x, _Chunk(coarse, start, piece.numel()), grid)
        fine[start:start + CHUNK].add_(x.add_(constant).sub_(constant))


@dataclass(frozen=True)
class _Chunk:
    """The part of the coarse sums that belongs to a chunk of the gradient."""

    coarse: Callable[[int], Tensor]
    start: int
    length: int

    def __call__(self, level: int) -> Tensor:
        return self.coarse(level)[self.start:self.start + self.length]


def _split(x: Tensor, coarse: Callable[[int], Tensor], grid: Grid) -> None:
    """Moves what is too large for the fine sum from x [n] (float64, in place) into the coarse sums."""
    finite = x.isfinite()
    if grid.dtype == torch.float64:
        huge = finite & (x.abs() >= grid.limit)
        x[huge] = x[huge].sign() * math.inf
        finite &= ~huge
    if not bool(finite.any()):
        return
    for level in range(grid.level(float(x[finite].abs().max())), 0, -1):
        constant = grid.constant(level)
        large = finite & (x.abs() >= grid.bound(level - 1))
        if not bool(large.any()):
            continue                            # a pure function of the values: adding zeros changes nothing
        part = torch.where(large, (x + constant) - constant, 0.0)
        coarse(level).add_(part)
        x.sub_(part)


def fold(fine: Tensor, coarse: dict[int, Tensor]) -> None:
    """fine [n] float64, in place := the sum of all levels, from the coarsest down."""
    total = torch.zeros_like(fine)
    for level in sorted(coarse, reverse=True):
        total.add_(coarse[level])
    fine.copy_(total.add_(fine))


def peak_of(values: Tensor) -> float:
    """max |x|; NaN if there is one, 0.0 if empty."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return float(torch.maximum(-low, high))
