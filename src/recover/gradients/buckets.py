"""The buffers of one bucket, and the views of them that stand in for `.grad`.

Theory of operation
-------------------
* `local` is what this replica has summed, `reduced` what all have: two buffers, because a reduction that fails must
  leave its input whole, and because a peer may need `reduced` while the script already clips `.grad` in place.
* `scratch` is what `.grad` points into. In `fast` mode it *is* `local` (autograd accumulates right into what is sent: 8
  bytes per float32 parameter, both buffers together). In `exact` mode it holds one microbatch's gradient, which is then
  absorbed into float64 sums (4 + 8 + 8 bytes). At commit it takes the step's gradient for the script.
* Gradients of 16-bit parameters are summed in float32, those of float64 parameters in float64.
* `tail` is described in `layout`. A microbatch's entries are written once, when its gradient in this bucket is final.
"""
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from recover.gradients.exact import DEFAULT_EXPONENT, Grid, absorb, fold, level_count
from recover.gradients.layout import TailLayout


@dataclass(frozen=True)
class Member:
    """A parameter of a bucket; `index` is its place in the order of registration."""

    index: int
    name: str
    parameter: nn.Parameter


@dataclass(frozen=True)
class Done:
    """What a bucket's tail says about one finished microbatch."""

    index: int                  # of the microbatch
    member: int
    loss: float | Tensor        # NaN: the script did not tell
    weight: float
    fired: Sequence[int]        # firings per parameter, by registration
    last: Sequence[int]         # rank of the last firing, by registration
    learn: bool                 # whether firings are still to be learned
    late: int                   # 0, or 1 + registered index of a parameter whose bucket had left


@dataclass
class Entry:
    """What the script (or the facade) tells about the microbatch in progress, best before its backward."""

    loss: float | Tensor = math.nan     # 0-dim; of any dtype; may require grad
    weight: float = 1.0
    fired: list[int] = field(default_factory=list)      # read only: hook firings per parameter so far


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of parameters of `dtype` are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Bucket:
    """One flat slice of the gradient. `local`, `reduced`: [n]; `local_tail`, `reduced_tail`: float64 [tail.size]."""

    def __init__(self, members: Sequence[Member], *, microbatches: int, exact: bool) -> None:
        first = members[0].parameter
        dtype, device = sum_dtype(first.dtype), first.device
        self.members = tuple(members)
        self.exact = exact
        self.exponent = DEFAULT_EXPONENT
        self.tail = TailLayout(microbatches, len(members), level_count(dtype, microbatches) if exact else 0)
        size = sum(member.parameter.numel() for member in members)
        sums = torch.float64 if exact else dtype
        self.local = torch.zeros(size, dtype=sums, device=device)
        self.reduced = torch.zeros(size, dtype=sums, device=device)
        self.scratch = torch.zeros(size, dtype=dtype, device=device) if exact else self.local
        self.local_tail = torch.zeros(self.tail.size, dtype=torch.float64, device=device)
        self.reduced_tail = torch.zeros(self.tail.size, dtype=torch.float64, device=device)
        self.coarse: dict[int, Tensor] = {}             # exact: this replica's coarse sums by level
        self.reduced_coarse: dict[int, Tensor] = {}
        ends, views = 0, []
        self._ends = torch.empty(len(members), dtype=torch.int64, device=device)
        for place, member in enumerate(members):
            views.append(_view(self.scratch, ends, member.parameter))
            ends += member.parameter.numel()
            self._ends[place] = ends
        self.views = tuple(views)
        self._writes = 0

    # -- a step, a microbatch ------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Empty local sums; `reduced` stays, a peer may need it."""
        self.local.zero_()
        self.local_tail.zero_()
        self.coarse.clear()
        self.reduced_coarse.clear()

    def attach(self) -> None:
        """`.grad` of every parameter := its view."""
        if self.exact:
            self.scratch.zero_()
        for member, view in zip(self.members, self.views, strict=True):
            parameter = member.parameter
            parameter.grad = None
            if parameter.dtype != view.dtype:
                parameter.grad_dtype = view.dtype
            parameter.grad = view
        self._writes = self.scratch._version

    def detach(self) -> None:
        """`.grad` of every parameter := None, and of its own dtype again."""
        for member, view in zip(self.members, self.views, strict=True):
            member.parameter.grad = None
            if member.parameter.dtype != view.dtype:
                member.parameter.grad_dtype = member.parameter.dtype

    def disturbed(self, writes: int) -> bool:
        """Whether anything but `writes` additions of autograd wrote into `.grad` since `attach`."""
        return self.scratch._version - self._writes != writes

    def finish(self, done: Done) -> None:
        """The gradient of a microbatch is complete: into the sums with it (exact), and its entries into the tail."""
        tail = self.tail
        entries = torch.zeros(tail.size, dtype=torch.float64)
        entries[tail.count.start + done.index] = 1.0
        entries[tail.who.start + done.index] = done.member + 1
        entries[tail.weight.start + done.index] = done.weight
        entries[tail.late.start + done.index] = done.late
        for place, member in enumerate(self.members):
            entries[tail.used.start + place] = min(1, done.fired[member.index])
            if done.learn and done.index == 0:
                entries[tail.fires.start + place] = done.fired[member.index]
                entries[tail.order.start + place] = done.last[member.index]
        if not isinstance(done.loss, Tensor) or done.loss.device == entries.device:
            loss = done.loss
            entries[tail.loss.start + done.index] = float(loss.detach() if isinstance(loss, Tensor) else loss)
        bad = self._first_bad()         # before this microbatch's entries, and before exact sums absorb it
        self.local_tail.add_(entries.to(self.local_tail.device))
        self.local_tail[tail.bad.start + done.index] += bad
        if isinstance(done.loss, Tensor) and done.loss.device != entries.device:    # stays on its device: no wait
            self.local_tail[tail.loss.start + done.index] += done.loss.detach().to(self.local_tail)
        if self.exact:
            absorb(self.scratch, self.local, self.coarse_sum, self.grid)
            for level in self.coarse:
                self.local_tail[tail.level.start + level - 1] = 1.0

    def _first_bad(self) -> float | Tensor:
        """1 + place of the first parameter that this microbatch made NaN or inf, else 0 (no wait on an accelerator)."""
        if self.scratch.device.type == "cpu" and math.isfinite(float(self.scratch.sum())):
            return 0.0
        bad = locate(self.scratch, self._ends)
        return bad if self.exact else bad * (self.local_tail[self.tail.bad].sum() == 0)

    # -- exact ---------------------------------------------------------------------------------------------------------

    @property
    def grid(self) -> Grid:
        """The grids of this step."""
        return Grid(self.exponent, self.tail.microbatches, self.scratch.dtype)

    def coarse_sum(self, level: int) -> Tensor:
        """This replica's sum of a coarse level: float64 [n], zeros at first."""
        if level not in self.coarse:
            self.coarse[level] = torch.zeros_like(self.local)
        return self.coarse[level]

    def pending_levels(self) -> list[int]:
        """Coarse levels that some member holds and that are not yet folded into `reduced`."""
        return [j + 1 for j, members in enumerate(self.reduced_tail[self.tail.level].tolist()) if members]

    def fold(self) -> None:
        """Coarse sums into `reduced`; afterwards the bucket is whole and may be forwarded as it is."""
        fold(self.reduced, {level: self.reduced_coarse[level] for level in self.pending_levels()})
        self.reduced_tail[self.tail.level].zero_()
        self.reduced_coarse.clear()

    # -- after the reduction -------------------------------------------------------------------------------------------

    def counts(self) -> list[int]:
        """How often each microbatch is inside the reduced bucket."""
        return [int(count) for count in self.reduced_tail[self.tail.count].tolist()]

    def bad(self) -> list[int]:
        """Per microbatch: 1 + place of the parameter that it first made NaN or inf on its replica, or 0."""
        return [int(place) for place in self.reduced_tail[self.tail.bad].tolist()]

    def first_bad_gradient(self) -> int:
        """The same for the gradient that was prepared for the script: 1 + place, or 0."""
        if math.isfinite(float(self.scratch.sum())):
            return 0
        return int(locate(self.scratch, self._ends))

    def hand_over(self) -> None:
        """`.grad` := the prepared gradient in the parameter's own dtype, or None where no microbatch used it."""
        used = self.reduced_tail[self.tail.used].tolist()
        self.detach()
        for member, view, uses in zip(self.members, self.views, used, strict=True):
            if uses:
                member.parameter.grad = view.to(member.parameter.dtype)

    def checksum(self) -> int:
        """Sum of the payload's bits as 64-bit integers, modulo 2^64 (an odd float32 at the end counts by itself)."""
        words = self.reduced.view(torch.uint8)
        whole = words.numel() // 8 * 8
        total = int(words[:whole].view(torch.int64).sum())
        if whole < words.numel():
            total += int(words[whole:].view(torch.int32).sum())
        return total % (1 << 64)


def _view(flat: Tensor, start: int, parameter: nn.Parameter) -> Tensor:
    """The part of `flat` for a parameter: its shape, and its strides where these leave no gaps."""
    dense = sorted(zip(parameter.stride(), parameter.shape, strict=True))
    expected = 1
    for stride, length in dense:
        if length != 1 and stride != expected:
            return flat[start:start + parameter.numel()].view(parameter.shape)
        expected *= length
    return flat.as_strided(parameter.shape, parameter.stride(), start)


def locate(flat: Tensor, ends: Tensor) -> Tensor:
    """1 + index of the part that holds the first NaN or inf of `flat` [n], else 0; part i ends before `ends[i]`.

    A 0-dim float64 tensor on the same device, computed without waiting for it.
    """
    if not flat.numel():
        return torch.zeros((), dtype=torch.float64, device=flat.device)
    mask = ~flat.isfinite()
    first = mask.to(torch.uint8).argmax()
    return ((torch.searchsorted(ends, first, right=True) + 1) * mask.any()).to(torch.float64)
