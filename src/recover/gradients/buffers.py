"""Buffers that forward writes (running statistics, counters), made a pure function of the step.

Theory of operation
-------------------
* Every microbatch starts from the buffers as the step found them, and what it changed is its contribution: so nothing
  depends on which microbatches one replica happened to run, or in what order.
* `leader`: the values that microbatch 0 left. `sum`: start + every microbatch's change (counters of tokens or experts).
  `mean`: start + the mean change (running statistics, which move by a fraction per microbatch).
* Contributions are reduced like one more bucket: a float64 payload and a float64 tail with a one-hot count (I1) and,
  per buffer, how many microbatches changed it. Whole numbers and `leader` are exact in any order as they are. In
  `exact` mode, changes of floating-point buffers are summed on fixed grids (see `exact`) that cover all that their
  dtype can hold: about ten float64 per float32 element, no state, one reduction.
* All replicas must agree on what takes part, so it is decided from shapes alone: the smallest buffers first, while the
  payload stays below the limit. What does not take part, is complex, bool or larger, is only watched: its name is
  reported when it changes.
* Changes are found by comparing bits: version counters miss some (batch norm's running statistics, `.data`). A buffer
  that forward replaces by a new tensor is followed when the names are given as a callable (`module.named_buffers`).
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from recover.gradients.exact import Grid, absorb, level_count

Policy = Literal["leader", "sum", "mean"]
Named = Iterable[tuple[str, Tensor]]
LIMIT = 64 << 20    # bytes of payload


@dataclass
class _Watched:
    """One buffer. `part`: its elements of the payload (None: only watched); `levels`: float64 per element there."""

    name: str
    start: Tensor
    part: slice | None = None
    levels: int = 1
    coarse: dict[int, Tensor] = field(default_factory=dict)


class BufferWatch:
    """The buffers of a managed module.

    named_buffers: pairs of name and tensor, or a callable that gives them (`module.named_buffers`). microbatches: B.
    exact: order-independent sums for floating-point buffers too. limit: bytes of payload.
    """

    def __init__(self, named_buffers: Named | Callable[[], Named], policy: Policy = "leader", *, microbatches: int,
                 exact: bool = False, limit: int = LIMIT) -> None:
        if policy not in ("leader", "sum", "mean"):
            raise ValueError(f'the policy for buffers must be "leader", "sum" or "mean", not {policy!r}')
        fixed = () if callable(named_buffers) else tuple(named_buffers)
        self._read: Callable[[], Named] = named_buffers if callable(named_buffers) else lambda: fixed
        self.policy = policy
        self.microbatches = microbatches
        self._exact = exact
        self._watched = {name: _Watched(name, buffer.detach().clone()) for name, buffer in self._read()}
        size = self._lay_out(limit)
        self._local = torch.zeros(size, dtype=torch.float64)
        self._reduced = torch.zeros(size, dtype=torch.float64)
        self._local_tail = torch.zeros(microbatches + len(self._watched), dtype=torch.float64)
        self._reduced_tail = torch.zeros_like(self._local_tail)

    def _lay_out(self, limit: int) -> int:
        """Gives out the payload, smallest buffers first; its elements."""
        size = 0
        for watched in sorted(self._watched.values(), key=lambda each: (each.start.numel(), each.name)):
            dtype = watched.start.dtype
            if dtype.is_complex or dtype == torch.bool:
                continue
            if self._exact and self.policy != "leader" and dtype.is_floating_point:
                watched.levels = 1 + level_count(_grid_dtype(dtype), self.microbatches)
            length = watched.start.numel() * watched.levels
            if (size + length) * 8 > limit:
                break
            watched.part = slice(size, size + length)
            size += length
        return size

    @property
    def empty(self) -> bool:
        """Whether there is nothing to reduce."""
        return not self._local.numel()

    @property
    def unmanaged(self) -> list[str]:
        """Buffers that are only watched: too large, complex or bool."""
        return [watched.name for watched in self._watched.values() if watched.part is None]

    def signature(self) -> list[tuple[str, str, str]]:
        """(name, shape, dtype) of every buffer: must be equal on all replicas."""
        return [(watched.name, str(tuple(watched.start.shape)), str(watched.start.dtype))
                for watched in self._watched.values()]

    def begin(self) -> None:
        """A new step: what the buffers hold now is where every microbatch starts."""
        for name, buffer in self._read():
            self._watched[name].start.copy_(buffer)
        self._local.zero_()
        self._local_tail.zero_()

    @contextmanager
    def microbatch(self, indices: int | Sequence[int]) -> Iterator[None]:
        """Forward and backward of a microbatch inside; afterwards the buffers are as the step found them.

        A chunk of several counts as a whole: what it changed is one contribution, that of its first microbatch.
        RuntimeError when forward changed a buffer's shape or dtype.
        """
        yield
        indices = (indices,) if isinstance(indices, int) else tuple(indices)
        index = indices[0]
        for each in indices:
            assert self._local_tail[each] == 0, f"microbatch {each} twice"
            self._local_tail[each] = 1.0
        for place, (name, buffer) in enumerate(self._read()):
            watched = self._watched[name]
            if buffer.shape != watched.start.shape or buffer.dtype != watched.start.dtype:
                raise RuntimeError(f"the buffer {name} became {tuple(buffer.shape)} {buffer.dtype}, it was "
                                   f"{tuple(watched.start.shape)} {watched.start.dtype}: buffers must keep both")
            changed = not _same_bits(buffer, watched.start)
            if changed:
                self._local_tail[self.microbatches + place] += 1.0
            if watched.part is not None:
                self._contribute(index, watched, buffer, changed)
            if changed:
                with torch.no_grad():
                    buffer.copy_(watched.start)

    def _contribute(self, index: int, watched: _Watched, buffer: Tensor, changed: bool) -> None:
        payload = self._local[watched.part]
        floating = buffer.dtype.is_floating_point
        if self.policy == "leader":
            if index == 0:
                payload.add_(_flat(buffer) if floating else _flat(buffer - watched.start))
            return
        if not changed:
            return
        if not floating:
            payload.add_(_flat(buffer - watched.start))
            return
        change = _flat(buffer).sub_(_flat(watched.start))
        if watched.levels == 1:
            payload.add_(change)
            return
        levels = payload.view(watched.levels, -1)
        dtype = _grid_dtype(buffer.dtype)
        absorb(change, levels[0], levels.__getitem__, Grid(_grid_exponent(dtype), self.microbatches, dtype))

    def inputs(self) -> list[Tensor]:
        """This replica's contribution: [payload, tail], float64 on the CPU. Read only."""
        return [self._local, self._local_tail]

    def outputs(self) -> list[Tensor]:
        """Where the sums of all members go, and what is forwarded."""
        return [self._reduced, self._reduced_tail]

    def commit(self, *, count: int) -> list[str]:
        """Writes the step's result into the buffers, in place; names the buffers that microbatches changed.

        count: the microbatches that must be inside. Raises AssertionError when one is missing or inside twice (I1).
        """
        counts = [int(n) for n in self._reduced_tail[:self.microbatches].tolist()]
        if any(n not in (0, 1) for n in counts) or sum(counts) != count:
            raise AssertionError(f"I1: the buffers hold microbatches {counts} times, {count} expected, each once")
        changes = self._reduced_tail[self.microbatches:].tolist()
        changed = []
        with torch.no_grad():
            for (name, buffer), times in zip(self._read(), changes, strict=True):
                if not times:
                    continue
                changed.append(name)
                if self._watched[name].part is not None:
                    self._write(self._watched[name], buffer, count, counts[0] == 1)
        return changed

    def _write(self, watched: _Watched, buffer: Tensor, count: int, first: bool) -> None:
        levels = self._reduced[watched.part].view(watched.levels, -1)
        total = torch.zeros_like(levels[0])
        for level in range(watched.levels - 1, -1, -1):
            total.add_(levels[level])
        floating = watched.start.dtype.is_floating_point
        if self.policy == "mean":
            total.div_(count)
        if self.policy == "leader" and floating:
            value = total if first else _flat(watched.start)
        elif floating:
            value = _flat(watched.start).add_(total)
        else:
            value = watched.start.reshape(-1).cpu() + total.round_().to(watched.start.dtype)
        buffer.copy_(value.view(watched.start.shape))


def _flat(values: Tensor) -> Tensor:
    """A copy: float64, [n], on the CPU."""
    return values.detach().to(device="cpu", dtype=torch.float64, copy=True).reshape(-1)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if not a.numel():
        return True
    return torch.equal(a.detach().contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _grid_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _grid_exponent(dtype: torch.dtype) -> int:
    return -900 if dtype == torch.float64 else -149
