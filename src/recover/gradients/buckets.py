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
* Of a DTensor the bucket holds the local part (see `shards`), and its stand-in is a DTensor around the view.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from recover.gradients.exact import DEFAULT_EXPONENT, Grid, absorb, fold, level_count
from recover.gradients.layout import TailLayout
from recover.gradients.shards import is_shard, local_part, stand_in


@dataclass(frozen=True)
class Member:
    """A parameter of a bucket; `index` is its place in the order of registration."""

    index: int
    name: str
    parameter: nn.Parameter


@dataclass(frozen=True)
class Done:
    """What a bucket's tail says about the microbatches of a finished pass. Per parameter: by place in the bucket."""

    indices: Sequence[int]              # of the microbatches
    member: int
    losses: Sequence[float | Tensor]    # per microbatch; NaN: the script did not tell
    weights: Sequence[float]            # per microbatch
    used: Sequence[int]                 # per parameter: how many of the microbatches gave it a gradient
    fires: Sequence[int]                # per parameter: firings in a microbatch; empty unless they are to be learned
    order: Sequence[int]                # per parameter: rank of the last firing; likewise
    late: int                           # 0, or 1 + registered index of a parameter whose bucket had left


@dataclass
class Entry:
    """What the script (or the facade) tells about the microbatches of a pass, best before their backward.

    losses: a number or 0-dim tensor each, of any dtype, may require grad. weights: a number of at least 0 each. One for
    each of `indices`; `loss` and `weight` are short for a pass of one. fired (read only): hook firings per parameter.
    """

    indices: tuple[int, ...] = (0,)
    losses: list[float | Tensor] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    fired: list[int] = field(default_factory=list)
    on_boundary: Callable[[int], None] | None = None
    on_seed: Callable[[int, int], None] | None = None

    def __post_init__(self) -> None:
        self.losses = self.losses or [math.nan] * len(self.indices)
        self.weights = self.weights or [1.0] * len(self.indices)

    @property
    def loss(self) -> float | Tensor:
        """The loss of the only microbatch."""
        return self.losses[0]

    @loss.setter
    def loss(self, value: float | Tensor) -> None:
        if len(self.indices) != 1:
            raise ValueError(f"a chunk of {len(self.indices)} microbatches has that many losses: set `losses`, not `loss`")
        self.losses[:] = [value]

    @property
    def weight(self) -> float:
        """The weight of the (first) microbatch."""
        return self.weights[0]

    @weight.setter
    def weight(self, value: float) -> None:
        self.weights[:] = [value] * len(self.indices)

    def boundary(self, index: int) -> None:
        """The gradient of microbatch `index` is complete in `.grad`, as far as the backward just run makes it.

        For a pass of several microbatches: called after each backward of each stage, before the next backward begins.
        """
        if index not in self.indices:
            raise ValueError(f"microbatch {index} is not in this pass of {list(self.indices)}")
        if self.on_boundary is not None:
            self.on_boundary(index)

    def seed(self, index: int, stage: int) -> None:
        """A pipeline's `stage` is about to run the forward of microbatch `index`: the random state shall be theirs."""
        if self.on_seed is not None:
            self.on_seed(index, stage)

    def complete(self) -> None:
        """Raises ValueError unless there is a loss and a weight for each microbatch."""
        for what, given in (("losses", self.losses), ("weights", self.weights)):
            if len(given) != len(self.indices):
                raise ValueError(f"{len(given)} {what} for a pass of {len(self.indices)} microbatches: give one for each")


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which gradients of parameters of `dtype` are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Memory:
    """Where buckets get their flat tensors. With `keep`, what it gave serves again after `rewind`: fresh memory takes longer
    to come by than what is done with it. (Not for a store that runs a model: tensors that share memory share the count of
    writes by which a bucket knows who wrote.)"""

    def __init__(self, *, keep: bool = False) -> None:
        self._keep = keep
        self._given: list[Tensor] = []
        self._free: list[Tensor] = []

    def zeros(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """[size] zeros."""
        nbytes = size * dtype.itemsize
        for place, flat in enumerate(self._free):
            if flat.device == device and flat.numel() >= nbytes:
                self._free[place] = flat[-(-nbytes // 64) * 64:]        # 64: what follows is aligned for any dtype
                return flat[:nbytes].view(dtype).zero_()
        fresh = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        if self._keep:
            self._given.append(fresh)
        return fresh.view(dtype)

    def rewind(self) -> None:
        """All that it gave is free: nobody may use it any more. From now on it keeps no more."""
        self._free, self._given, self._keep = sorted(self._given, key=lambda flat: -flat.numel()), [], False


class Bucket:
    """One flat slice of the gradient. `local`, `reduced`: [n]; `local_tail`, `reduced_tail`: float64 [tail.size]."""

    def __init__(self, members: Sequence[Member], *, microbatches: int, exact: bool, memory: Memory | None = None) -> None:
        memory = memory or Memory()
        first = members[0].parameter
        dtype, device = sum_dtype(first.dtype), first.device
        self.members = tuple(members)
        self.exact = exact
        self.exponent = DEFAULT_EXPONENT
        self.tail = TailLayout(microbatches, len(members), level_count(dtype, microbatches) if exact else 0)
        parts = [local_part(member.parameter) for member in members]
        size = sum(part.numel() for part in parts)
        sums = torch.float64 if exact else dtype
        self.local = memory.zeros(size, sums, device)
        self.reduced = memory.zeros(size, sums, device)
        self.scratch = memory.zeros(size, dtype, device) if exact else self.local
        self.local_tail = torch.zeros(self.tail.size, dtype=torch.float64, device=device)
        self.reduced_tail = torch.zeros(self.tail.size, dtype=torch.float64, device=device)
        self.coarse: dict[int, Tensor] = {}             # exact: this replica's coarse sums by level
        self.reduced_coarse: dict[int, Tensor] = {}
        ends, views = 0, []
        self._ends = torch.empty(len(members), dtype=torch.int64, device=device)
        for place, part in enumerate(parts):
            views.append(_view(self.scratch, ends, part))
            ends += part.numel()
            self._ends[place] = ends
        self._local_views = tuple(views)
        self.views = tuple(stand_in(view, member.parameter) for view, member in zip(views, members, strict=True))
        self._wrappers = [view for view in self.views if is_shard(view)]
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
        self._writes = self._version()

    def detach(self) -> None:
        """`.grad` of every parameter := None, and of its own dtype again."""
        for member, view in zip(self.members, self.views, strict=True):
            member.parameter.grad = None
            if member.parameter.dtype != view.dtype:
                member.parameter.grad_dtype = member.parameter.dtype

    def disturbed(self, writes: int) -> bool:
        """Whether anything but `writes` additions of autograd wrote into `.grad` since `attach`."""
        return self._version() - self._writes != writes

    def _version(self) -> int:
        """Counts writes into `.grad`: FSDP's into the local part; of DTensors, autograd's and other ones into the whole."""
        return self.scratch._version + sum(wrapper._version for wrapper in self._wrappers)

    def take(self, index: int) -> None:
        """`.grad` holds the gradient of microbatch `index`: is it finite? And, in exact, into the sums with it."""
        self.local_tail[self.tail.bad.start + index] += self._first_bad()
        if self.exact:
            absorb(self.scratch, self.local, self.coarse_sum, self.grid)
            for level in self.coarse:
                self.local_tail[self.tail.level.start + level - 1] = 1.0

    def renew(self) -> None:
        """(Exact, after `take`.) `.grad` := 0, for the next microbatch of the pass."""
        self.scratch.zero_()
        self._writes += 1

    def nonzero(self) -> list[bool]:
        """Per parameter: whether there is anything in `.grad`. Waits for an accelerator."""
        return [bool(view.any()) for view in self._local_views]

    def finish(self, done: Done) -> None:
        """All is taken that a pass gives: its entries into the tail, once per pass."""
        tail = self.tail
        entries = torch.zeros(tail.size, dtype=torch.float64)
        for index, weight in zip(done.indices, done.weights, strict=True):
            entries[tail.count.start + index] = 1.0
            entries[tail.who.start + index] = done.member + 1
            entries[tail.weight.start + index] = weight
            entries[tail.late.start + index] = done.late
        for block, values in ((tail.used, done.used), (tail.fires, done.fires), (tail.order, done.order)):
            if values:
                entries[block] = torch.tensor(values, dtype=torch.float64)
        losses = list(zip(done.indices, done.losses, strict=True))
        for index, loss in losses:
            if not isinstance(loss, Tensor) or loss.device == entries.device:
                entries[tail.loss.start + index] = float(loss.detach() if isinstance(loss, Tensor) else loss)
        self.local_tail.add_(entries.to(self.local_tail.device))
        for index, loss in losses:
            if isinstance(loss, Tensor) and loss.device != entries.device:      # stays on its device: no wait
                self.local_tail[tail.loss.start + index] += loss.detach().to(self.local_tail)

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

    def coarse_pairs(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """What remains to be reduced for `pending_levels`: (inputs, outputs) each."""
        pairs = []
        for level in self.pending_levels():
            output = self.reduced_coarse.setdefault(level, torch.zeros_like(self.reduced))
            pairs.append(([self.coarse_sum(level)], [output]))
        return pairs

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

    def hand_over(self, always: Container[int] = ()) -> None:
        """`.grad` := the prepared gradient in the parameter's own dtype, or None where no microbatch used it.

        always: (by registration) those that get it all the same.
        """
        used = self.reduced_tail[self.tail.used].tolist()
        self.detach()
        for member, view, uses in zip(self.members, self.views, used, strict=True):
            if uses or member.index in always:
                member.parameter.grad = view.to(member.parameter.dtype)

    def checksum(self) -> int:
        """Sum of the payload's bits as 64-bit integers, modulo 2^64 (an odd float32 at the end counts by itself)."""
        words = self.reduced.view(torch.uint8)
        whole = words.numel() // 8 * 8
        total = int(words[:whole].view(torch.int64).sum())
        if whole < words.numel():
            total += int(words[whole:].view(torch.int32).sum())
        return total % (1 << 64)


def _view(flat: Tensor, start: int, parameter: Tensor) -> Tensor:
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


def check_parameters(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raises ValueError for parameters that can not be managed."""
    if not parameters:
        raise ValueError("the model has no parameter that requires a gradient")
    seen: dict[int, str] = {}
    names: set[str] = set()
    for name, parameter in parameters:
        if not parameter.requires_grad:
            raise ValueError(f"{name} does not require a gradient: leave it out")
        if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
            raise ValueError(f"{name} is {parameter.dtype}: only float64, float32, bfloat16 and float16 can be summed")
        if id(parameter) in seen:
            raise ValueError(f"{name} and {seen[id(parameter)]} are the same parameter: tied weights appear once")
        if name in names:
            raise ValueError(f"two parameters are called {name}")
        seen[id(parameter)] = name
        names.add(name)
