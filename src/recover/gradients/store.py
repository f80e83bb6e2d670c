"""The gradient state of one rank: sums of microbatches, ready to be reduced bucket by bucket by the caller.

Theory of operation
-------------------
* Inside `microbatch` every parameter's `.grad` is a view of a flat buffer; outside it is None (or, between `commit`
  and the next `begin` or microbatch, the step's gradient). So `zero_grad` in either form is harmless in between.
* Post-accumulate hooks count firings. When the last microbatch owed is under way (`launch` is given), a bucket leaves
  as soon as it is final (see `progress`): its tail is completed and `launch(k)` called, from the hook. Hooks never
  raise and never wait; what goes wrong in one is kept and raised by the next call of the store.
* What happened to `local` twice or not at all would be a wrong gradient that nobody sees. Hence: a gradient outside of
  `microbatch` is an error, anything but autograd writing into `.grad` inside `microbatch` is an error (buffers count
  writes; nothing is launched any more), a microbatch that failed halfway spoils the store, and `commit` checks in
  every bucket's tail that each microbatch is inside exactly once (I1). A gradient that comes after its bucket left is
  noted in the tails that leave later (the last bucket's always does), so that `commit` raises it on *every* replica:
  were it raised where it happened, the others would commit the sum that lacks it.
* Step 0 launches at the end of the pass and carries, in the tails, how microbatch 0 fired. Everybody reads the same at
  `commit`; `adopt` then lays the buckets out anew. Replicas agree without a further message.
* `adopt` replaces all buffers. The old ones stay as `retired` for one step, since a peer may still need what they hold.
* Exact exponents change in `commit` only, as a function of the reduced values only, so replicas stay equal; a step
  whose gradient is not finite keeps them.
"""
from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from recover.gradients.buckets import Bucket, Done, Entry, Member, sum_dtype
from recover.gradients.commit import Committed, check_whole, contributors, first_nonfinite, lessons, prepare, uses
from recover.gradients.exact import DEFAULT_EXPONENT, MAX_MICROBATCHES, clamp_exponent, exponent_above, peak_of
from recover.gradients.layout import Learned, Slot, plan
from recover.gradients.progress import Progress

Reduction = Literal["fast", "exact"]
Launch = Callable[[int], None]


@dataclass
class _Pass:
    """A microbatch in progress (or the calibration, which has no launch and no tail)."""

    index: int
    member: int
    entry: Entry
    progress: Progress
    launch: Launch | None
    finished: set[int]
    failure: BaseException | None = None


class GradientStore:
    """Sums of gradients in flat buckets.

    parameters: unique, each with `requires_grad`, in the same order on every replica. microbatches: B.
    bucket_bytes, first_bucket_bytes: limits of what one reduction sends; a larger parameter gets a bucket of its own.
    Raises ValueError for parameters that cannot be managed.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], *, microbatches: int,
                 reduction: Reduction = "fast", bucket_bytes: int = 25 << 20,
                 first_bucket_bytes: int = 1 << 20) -> None:
        if reduction not in ("fast", "exact"):
            raise ValueError(f'reduction must be "fast" or "exact", not {reduction!r}')
        if not 1 <= microbatches <= MAX_MICROBATCHES:
            raise ValueError(f"microbatches must be between 1 and {MAX_MICROBATCHES}, not {microbatches}")
        _check_parameters(parameters)
        self.microbatches = microbatches
        self.reduction = reduction
        self.learned: Learned | None = None
        self.buckets: tuple[Bucket, ...] = ()
        self.retired: tuple[Bucket, ...] = ()
        self._parameters = tuple(Member(index, name, parameter) for index, (name, parameter) in enumerate(parameters))
        self._limits = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
        self._lay_out()
        self._step: int | None = None
        self._retired_since: int | None = None
        self._pass: _Pass | None = None
        self._errors: list[Exception] = []
        self._lock = threading.RLock()      # hooks of different devices may run on different threads
        self._handles = [
            member.parameter.register_post_accumulate_grad_hook(self._hook(member))  # type: ignore[no-untyped-call]
            for member in self._parameters]

    # -- layout --------------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        exact = self.reduction == "exact"
        slots = []
        for member in self._parameters:
            dtype, device = sum_dtype(member.parameter.dtype), member.parameter.device
            slots.append(Slot(member.parameter.numel(), 8 if exact else dtype.itemsize, (str(dtype), str(device))))
        scale = {member.index: bucket.exponent for bucket in self.buckets for member in bucket.members}
        layout = plan(slots, self.learned, **self._limits)
        self.buckets = tuple(Bucket([self._parameters[p] for p in members], microbatches=self.microbatches, exact=exact)
                             for members in layout)
        for bucket in self.buckets:
            bucket.exponent = max(scale.get(member.index, DEFAULT_EXPONENT) for member in bucket.members)

    def adopt(self, learned: Learned) -> None:
        """Lays the buckets out by what was learned. Between two steps, with the same value on all replicas.

        `.grad` stays as it is. The old buckets stay as `retired` until the step after the next begins (or `release`).
        """
        assert self._pass is None, "adopt inside a microbatch"
        if any(len(values) != len(self._parameters) for values in (learned["fires"], learned["order"])):
            raise ValueError(f"learned of {len(learned['fires'])} parameters, but there are {len(self._parameters)}")
        if learned == self.learned:
            return
        self.learned = Learned(fires=list(learned["fires"]), order=list(learned["order"]))
        self.retired, self._retired_since = self.buckets, None
        self._lay_out()

    def release(self) -> None:
        """Frees the buffers of a former layout: every peer is known to have passed the step that they belong to."""
        self.retired = ()

    def signature(self) -> list[tuple[str, str, str]]:
        """(name, shape, dtype) of every parameter in order: must be equal on all replicas."""
        return [(member.name, str(tuple(member.parameter.shape)), str(member.parameter.dtype))
                for member in self._parameters]

    def state(self) -> dict[str, Any]:
        """What a joiner or a checkpoint needs, as plain JSON-able values."""
        learned = copy.deepcopy(self.learned)
        exponents = [bucket.exponent for bucket in self.buckets] if self.reduction == "exact" else []
        return {"learned": learned, "exponents": exponents}

    def load_state(self, state: dict[str, Any]) -> None:
        """Takes over `state()` of another store of the same parameters. ValueError when it does not fit."""
        if state["learned"] is not None:
            self.adopt(state["learned"])
            self.release()
        elif self.learned is not None:
            self.learned = None
            self._lay_out()
        if self.reduction == "exact":
            if len(state["exponents"]) != len(self.buckets):
                raise ValueError(f"{len(state['exponents'])} exponents for {len(self.buckets)} buckets: "
                                 "the replicas differ in parameters, bucket sizes or reduction")
            for bucket, exponent in zip(self.buckets, state["exponents"], strict=True):
                bucket.exponent = int(exponent)

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A new step: local sums and tails are empty, `.grad` is None, `reduced` is as it was."""
        self.check()
        assert self._pass is None, "begin inside a microbatch"
        if self._retired_since is None:
            self._retired_since = step
        elif step > self._retired_since:
            self.release()
        self._step = step
        self.clear()
        for bucket in self.buckets:
            bucket.begin()

    def clear(self) -> None:
        """`.grad` of every parameter := None (an optimizer's step then does nothing)."""
        for bucket in self.buckets:
            bucket.detach()

    def close(self) -> None:
        """Removes the hooks; the store is not used any more."""
        for handle in self._handles:
            handle.remove()

    def check(self) -> None:
        """Raises what was recorded: RuntimeError for a gradient outside of a microbatch and the like."""
        if self._errors:
            raise self._errors[0]

    @contextmanager
    def microbatch(self, index: int, member: int, *, launch: Launch | None = None,
                   wanted: Iterable[int] | None = None) -> Iterator[Entry]:
        """The script's backward for microbatch `index` (0 <= index < B), computed by `member`, runs inside.

        launch: given for the last microbatch that this rank owes; called once for every bucket in `wanted` (default
        all), in increasing order, as soon as `inputs(k)` is complete, from autograd's thread or at the end. It must
        only enqueue. The yielded Entry takes loss and weight; set them before backward.
        Raises RuntimeError (something else wrote into `.grad`), or what `launch` raised, at the end.
        """
        self.check()
        assert self._step is not None, "begin a step first"
        assert 0 <= index < self.microbatches, f"microbatch {index} of {self.microbatches}"
        queue = () if launch is None else range(len(self.buckets)) if wanted is None else wanted
        current = self._enter(index, member, launch, queue)
        try:
            yield current.entry
        except BaseException:
            self._abandon(f"microbatch {index} of step {self._step} failed halfway: its sums are not usable")
            raise
        self._leave(current)

    @contextmanager
    def calibration(self) -> Iterator[None]:
        """The backward of microbatch (0, 0) inside: only sets exact exponents; `begin` empties the sums."""
        self.check()
        assert self._step is None, "calibrate before the first step"
        current = self._enter(0, 0, None, ())
        try:
            yield
        except BaseException:
            self._abandon("the calibration failed halfway")
            raise
        self._detach()
        self._verify(current)
        spread = math.ceil(math.log2(self.microbatches) / 2)    # B terms of random sign: sqrt(B) times as large
        for bucket in self.buckets:
            exponent = exponent_above(peak_of(bucket.scratch), bucket.scratch.dtype) if bucket.exact else None
            if exponent is not None:
                bucket.exponent = clamp_exponent(exponent + spread, bucket.scratch.dtype)

    # -- what the caller reduces ---------------------------------------------------------------------------------------

    def inputs(self, k: int) -> list[Tensor]:
        """What bucket k contributes to the reduction: [payload (n), tail (float64)]. Read only."""
        return [self.buckets[k].local, self.buckets[k].local_tail]

    def outputs(self, k: int) -> list[Tensor]:
        """Where the sums of all members go, and what is forwarded to a peer that lacks the bucket."""
        return [self.buckets[k].reduced, self.buckets[k].reduced_tail]

    def extra_levels(self, k: int) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Exact: once outputs(k) are whole, further reductions that bucket k needs, as (inputs, outputs).

        The same number on all members; empty nearly always, and after `fold`. The bucket counts as reduced only
        after these and `fold(k)`.
        """
        bucket = self.buckets[k]
        pairs = []
        for level in bucket.pending_levels():
            output = bucket.reduced_coarse.setdefault(level, torch.zeros_like(bucket.reduced))
            pairs.append(([bucket.coarse_sum(level)], [output]))
        return pairs

    def fold(self, k: int) -> None:
        """After the reductions of `extra_levels(k)`: outputs(k) become the whole sum. Without any, it does nothing."""
        if self.buckets[k].pending_levels():
            self.buckets[k].fold()

    def checksum(self, k: int) -> int:
        """A cheap checksum of the reduced payload's bits, 0 <= checksum < 2^64."""
        return self.buckets[k].checksum()

    # -- commit --------------------------------------------------------------------------------------------------------

    def commit(self, *, count: int, weighted: bool = False) -> Committed:
        """All buckets are reduced: `.grad` := sum / count, or sum / global weight; None where nothing used a parameter.

        `local` is overwritten, `reduced` is not. count: the microbatches that must be inside (B, unless the policy lets
        the batch shrink). Raises AssertionError when one is missing or inside twice (I1), LateGradient, ValueError when
        the global weight is zero; `.grad` is None then. A gradient that is not finite is reported, not raised.
        """
        self.check()
        assert self._pass is None, "commit inside a microbatch"
        check_whole(self.buckets, self._parameters, count, self._step)
        tail, values = self.buckets[-1].tail, self.buckets[-1].reduced_tail.tolist()
        losses, weights = tuple(values[tail.loss]), tuple(values[tail.weight])
        divisor = math.fsum(weights) if weighted else float(count)
        if divisor == 0:
            raise ValueError("the weights of all microbatches of the step are zero: there is nothing to divide by")
        peaks = [prepare(bucket, divisor) for bucket in self.buckets]
        nonfinite = first_nonfinite(self.buckets, self._parameters)
        if nonfinite is None and self.reduction == "exact":
            self._next_exponents(peaks)
        for bucket in self.buckets:
            bucket.hand_over()
        inside = tuple(contributors(bucket) for bucket in self.buckets)
        return Committed(loss=sum(losses) / divisor, losses=losses, weights=weights,
                         who=inside[-1], contributors=inside,
                         used=uses(self.buckets, self._parameters), nonfinite=nonfinite,
                         learned=None if self.learned else lessons(self.buckets, len(self._parameters)))

    def _next_exponents(self, peaks: Sequence[float]) -> None:
        for bucket, peak in zip(self.buckets, peaks, strict=True):
            exponent = exponent_above(peak, bucket.scratch.dtype)
            if exponent is not None:
                bucket.exponent = exponent

    # -- one pass ------------------------------------------------------------------------------------------------------

    def _enter(self, index: int, member: int, launch: Launch | None, wanted: Iterable[int]) -> _Pass:
        assert self._pass is None, "microbatches do not nest"
        groups = [[each.index for each in bucket.members] for bucket in self.buckets]
        expected = None if self.learned is None else self.learned["fires"]
        progress = Progress(groups, len(self._parameters), expected, wanted)
        current = _Pass(index, member, Entry(fired=progress.fired), progress, launch, set())
        for bucket in self.buckets:
            bucket.attach()
        self._pass = current
        return current

    def _leave(self, current: _Pass) -> None:
        self._detach()
        self._verify(current)
        for k in range(len(self.buckets)):
            if k not in current.progress.queued:
                self._finish(current, k)
        for k in current.progress.rest():
            self._let_go(current, k)

    def _verify(self, current: _Pass) -> None:
        """Raises what went wrong during the pass; from then on the store is unusable."""
        for k in range(len(self.buckets)):
            self._check_writes(current, k)
        if current.failure is not None:
            self._errors.append(RuntimeError(f"launching a bucket failed: {current.failure}"))
            raise current.failure
        self.check()

    def _check_writes(self, current: _Pass, k: int) -> None:
        bucket = self.buckets[k]
        writes = sum(current.progress.fired[member.index] for member in bucket.members)
        if bucket.disturbed(writes) and not self._errors:
            self._errors.append(RuntimeError(
                f"something other than backward wrote into .grad inside a microbatch (bucket {k}, step {self._step}, "
                f"microbatch {current.index}): call zero_grad, clip or scale gradients outside of it"))

    def _abandon(self, reason: str) -> None:
        self._detach()
        self._errors.append(RuntimeError(reason))

    def _detach(self) -> None:
        self._pass = None
        self.clear()

    def _finish(self, current: _Pass, k: int) -> None:
        """The microbatch's gradient in bucket k is final: once per pass."""
        if k in current.finished:
            return
        current.finished.add(k)
        entry, progress = current.entry, current.progress
        late = 1 + progress.late[0] if progress.late else 0
        self.buckets[k].finish(Done(current.index, current.member, entry.loss, float(entry.weight),
                                    progress.fired, progress.last, self.learned is None, late))

    def _let_go(self, current: _Pass, k: int) -> None:
        assert current.launch is not None
        self._check_writes(current, k)
        if self._errors:
            return
        self._finish(current, k)
        current.launch(k)

    def _hook(self, member: Member) -> Callable[[Tensor], None]:
        def fired(parameter: Tensor) -> None:
            with self._lock:
                self._fired(member, parameter)
        return fired

    def _fired(self, member: Member, parameter: Tensor) -> None:
        current = self._pass
        if current is None:
            parameter.grad = None
            self._errors.append(RuntimeError(
                f"backward() outside of a microbatch gave {member.name} a gradient: use step.backward(loss), or "
                "`with step.microbatch(microbatch): loss.backward()`"))
            return
        ready = current.progress.fire(member.index)
        try:
            for k in ready:
                self._let_go(current, k)
        except Exception as error:      # noqa: BLE001 - a hook must not raise into autograd; _verify raises it
            current.failure = current.failure or error


def _check_parameters(parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
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
