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
* Withheld gradients: FSDP can keep a microbatch's gradient to itself until a later microbatch is synchronised. Such a pass
  says so (`withheld`), and until a pass that is not withheld brings the gradients (a microbatch's, or `flush`), `inputs`
  refuse to be read: their tails already count what their sums still lack.
* Tracked parameters: under FSDP a hook tells that a shard arrived, not who used the parameter. `track` and `touch` do.
* Exact exponents change in `commit` only, as a function of the reduced values only, so replicas stay equal; a step
  whose gradient is not finite keeps them.
"""
from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn

from recover.gradients.buckets import Bucket, Entry, Member, Memory, check_parameters, sum_dtype
from recover.gradients.commit import Committed, check_whole, contributors, first_nonfinite, lessons, prepare, uses
from recover.gradients.exact import DEFAULT_EXPONENT, MAX_MICROBATCHES, clamp_exponent, exponent_above, peak_of
from recover.gradients.layout import Learned, Slot, plan
from recover.gradients.passes import Launch, Pass, named
from recover.gradients.progress import Progress
from recover.gradients.shards import describe, local_part

Reduction = Literal["fast", "exact"]


class GradientStore:
    """Sums of gradients in flat buckets.

    parameters: unique, each with `requires_grad`, in the same order on every replica. microbatches: B.
    bucket_bytes, first_bucket_bytes: limits of what one reduction sends; a larger parameter gets a bucket of its own.
    memory: see `buckets.Memory`; for a store through which no model runs.
    Raises ValueError for parameters that cannot be managed.
    """

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], *, microbatches: int,
                 reduction: Reduction = "fast", bucket_bytes: int = 25 << 20,
                 first_bucket_bytes: int = 1 << 20, memory: Memory | None = None) -> None:
        if reduction not in ("fast", "exact"):
            raise ValueError(f'reduction must be "fast" or "exact", not {reduction!r}')
        if not 1 <= microbatches <= MAX_MICROBATCHES:
            raise ValueError(f"microbatches must be between 1 and {MAX_MICROBATCHES}, not {microbatches}")
        check_parameters(parameters)
        self.microbatches = microbatches
        self.reduction = reduction
        self.learned: Learned | None = None
        self.buckets: tuple[Bucket, ...] = ()
        self.retired: tuple[Bucket, ...] = ()
        self._memory = memory or Memory()
        self._parameters = tuple(Member(index, name, parameter) for index, (name, parameter) in enumerate(parameters))
        self._limits = {"bucket_bytes": bucket_bytes, "first_bucket_bytes": first_bucket_bytes}
        self._lay_out()
        self._step: int | None = None
        self._retired_since: int | None = None
        self._pass: Pass | None = None
        self._withheld: list[int] = []
        self._tracked: dict[int, Member] = {}
        self._hooked = True
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
            slots.append(Slot(local_part(member.parameter).numel(), 8 if exact else dtype.itemsize, (str(dtype), str(device))))
        scale = {member.index: bucket.exponent for bucket in self.buckets for member in bucket.members}
        layout = plan(slots, self.learned, **self._limits)
        self.buckets = tuple(Bucket([self._parameters[p] for p in members], microbatches=self.microbatches, exact=exact,
                                    memory=self._memory) for members in layout)
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

    def begin_with(self, learned: Learned) -> None:
        """Like `adopt`, in the memory of the present buckets: nothing has been summed yet."""
        self._memory.rewind()
        self.adopt(learned)
        self.release()

    def release(self) -> None:
        """Frees the buffers of a former layout: every peer is known to have passed the step that they belong to."""
        self.retired = ()

    def signature(self) -> list[tuple[str, str, str]]:
        """(name, shape, dtype) of every parameter in order: must be equal on all replicas.

        A DTensor's shape is followed by its local shape, placements and mesh.
        """
        return [(member.name, describe(member.parameter), str(member.parameter.dtype))
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

    # -- how the model is run ------------------------------------------------------------------------------------------

    @property
    def synchronises_each(self) -> bool:
        """Whether FSDP must reduce the gradient of each microbatch: each is a term (exact), or firings are learned."""
        return self.reduction == "exact" or self.learned is None

    @property
    def withheld(self) -> tuple[int, ...]:
        """Microbatches whose gradients FSDP still keeps; `flush` brings them."""
        return tuple(self._withheld)

    def unhooked(self, what: str) -> None:
        """From now on `.grad` is also written without hooks, by `what` (a zero-bubble schedule): buckets leave at the end.

        A parameter then counts as used where its hook fired or its sum is not zero. Raises ValueError in `exact`.
        """
        if self.reduction == "exact":
            raise ValueError(f'reduction="exact" can not run {what}: it computes weight gradients apart from their '
                             'microbatch. Use GPipe, 1F1B or interleaved 1F1B, or reduction="fast"')
        self._hooked = False

    def track(self, parameters: Iterable[Tensor]) -> dict[int, Callable[[Tensor], None]]:
        """Use of these managed parameters is told by `touch`, not by their hooks: id(parameter) -> touch.

        `commit` gives them a gradient even if nothing used them here, since another data rank may have: see `drop`.
        """
        wanted = {id(parameter) for parameter in parameters}
        found = {id(member.parameter): member for member in self._parameters if id(member.parameter) in wanted}
        self._tracked.update((member.index, member) for member in found.values())
        return {key: self._touch(member.index) for key, member in found.items()}

    def _touch(self, index: int) -> Callable[[Tensor], None]:
        def touched(_: Tensor) -> None:
            with self._lock:
                if self._pass is not None:
                    self._pass.touch(index)
        return touched

    def unused(self, committed: Committed) -> list[str]:
        """Tracked parameters that nothing used in the step, as far as this position knows."""
        return [member.name for member in self._tracked.values() if not committed.used[member.name]]

    def drop(self, names: Iterable[str]) -> None:
        """`.grad` of these parameters := None: no data rank of any replica used them. After `commit`."""
        dropped = set(names)
        for member in self._tracked.values():
            if member.name in dropped:
                member.parameter.grad = None

    # -- a step --------------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        """A new step: local sums and tails are empty, `.grad` is None, `reduced` is as it was."""
        self.check()
        assert self._pass is None, "begin inside a microbatch"
        assert not self._withheld, f"gradients of {self._withheld} would leak into step {step}: flush them"
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
    def microbatch(self, indices: int | Sequence[int], member: int, *, launch: Launch | None = None,
                   wanted: Iterable[int] | None = None, withheld: bool = False) -> Iterator[Entry]:
        """The script's backward for microbatch `indices` (0 <= index < B), computed by `member`, runs inside.

        indices: or several, that a pipeline computes in one pass; see `Entry.boundary` (`exact` needs it then).
        launch: given for the last microbatch that this rank owes; called once for every bucket in `wanted` (default
        all), in increasing order, as soon as `inputs(k)` is complete, from autograd's thread or at the end. It must
        only enqueue. withheld: FSDP was told not to reduce the gradients of this pass yet (only where
        `synchronises_each` is false, and never together with launch). The yielded Entry takes loss and weight; set
        them before backward.
        Raises RuntimeError (something else wrote into `.grad`), ValueError (not one loss and weight for each), or what
        `launch` raised, at the end.
        """
        several = (indices,) if isinstance(indices, int) else tuple(indices)
        assert several and len(set(several)) == len(several), f"{several} are not distinct microbatches"
        assert all(0 <= index < self.microbatches for index in several), f"microbatches {several} of {self.microbatches}"
        assert not withheld or (launch is None and not self.synchronises_each), "gradients may not be withheld here"
        queue = () if launch is None else range(len(self.buckets)) if wanted is None else wanted
        with self._run(several, member, launch, queue) as current:
            yield current.entry
            self._withheld = [*self._withheld, *several] if withheld else []    # before buckets leave at the end of the pass

    @contextmanager
    def flush(self, member: int) -> Iterator[None]:
        """Inside, FSDP is made to reduce what was withheld; needed when no microbatch follows that would."""
        with self._run((), member, None, ()):
            yield
        self._withheld = []

    @contextmanager
    def _run(self, indices: tuple[int, ...], member: int, launch: Launch | None, queue: Iterable[int]) -> Iterator[Pass]:
        self.check()
        assert self._step is not None, "begin a step first"
        current = self._enter(indices, member, launch, queue)
        try:
            yield current
        except BaseException:
            self._abandon(f"microbatch {named(indices)} of step {self._step} failed halfway: its sums are not usable")
            raise
        self._leave(current)

    @contextmanager
    def calibration(self) -> Iterator[None]:
        """The backward of microbatch (0, 0) inside: only sets exact exponents; `begin` empties the sums."""
        self.check()
        assert self._step is None, "calibrate before the first step"
        current = self._enter((0,), 0, None, ())
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
        assert not self._withheld or self._pass is not None, f"gradients of {self._withheld} are withheld: flush them"
        return [self.buckets[k].local, self.buckets[k].local_tail]

    def outputs(self, k: int) -> list[Tensor]:
        """Where the sums of all members go, and what is forwarded to a peer that lacks the bucket."""
        return [self.buckets[k].reduced, self.buckets[k].reduced_tail]

    def extra_levels(self, k: int) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Exact: once outputs(k) are whole, further reductions that bucket k needs, as (inputs, outputs).

        The same number on all members; empty nearly always, and after `fold`. The bucket counts as reduced only
        after these and `fold(k)`.
        """
        return self.buckets[k].coarse_pairs()

    def fold(self, k: int) -> None:
        """After the reductions of `extra_levels(k)`: outputs(k) become the whole sum. Without any, it does nothing."""
        if self.buckets[k].pending_levels():
            self.buckets[k].fold()

    def checksum(self, k: int) -> int:
        """A cheap checksum of the reduced payload's bits, 0 <= checksum < 2^64."""
        return self.buckets[k].checksum()

    # -- commit --------------------------------------------------------------------------------------------------------

    def commit(self, *, count: int, weighted: bool = False, divisor: float | None = None) -> Committed:
        """All buckets are reduced: `.grad` := sum / count, or sum / global weight; None where nothing used a parameter.

        divisor: the global weight where other ranks of the replica have a part in it too (their data differ).

        `local` is overwritten, `reduced` is not. count: the microbatches that must be inside (B, unless the policy lets
        the batch shrink). Raises AssertionError when one is missing or inside twice (I1), LateGradient, ValueError when
        the global weight is zero; `.grad` is None then. A gradient that is not finite is reported, not raised.
        """
        self.check()
        assert self._pass is None, "commit inside a microbatch"
        check_whole(self.buckets, self._parameters, count, self._step)
        tail, values = self.buckets[-1].tail, self.buckets[-1].reduced_tail.tolist()
        losses, weights = tuple(values[tail.loss]), tuple(values[tail.weight])
        if divisor is None:
            divisor = math.fsum(weights) if weighted else float(count)
        if divisor == 0:
            raise ValueError("the weights of all microbatches of the step are zero: there is nothing to divide by")
        peaks = [prepare(bucket, divisor) for bucket in self.buckets]
        nonfinite = first_nonfinite(self.buckets, self._parameters)
        if nonfinite is None and self.reduction == "exact":
            self._next_exponents(peaks)
        for bucket in self.buckets:
            bucket.hand_over(self._tracked)
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

    def _enter(self, indices: tuple[int, ...], member: int, launch: Launch | None, wanted: Iterable[int]) -> Pass:
        assert self._pass is None, "microbatches do not nest"
        groups = [[each.index for each in bucket.members] for bucket in self.buckets]
        expected = None if self.learned is None or not self._hooked else self.learned["fires"]
        lesson = indices.index(0) if 0 in indices else 0
        progress = Progress(groups, len(self._parameters), expected, wanted, len(indices), lesson)
        current = Pass(indices, member, self.buckets, progress, launch, hooked=self._hooked, tracked=self._tracked,
                       learn=self.learned is None and 0 in indices, blame=self._withheld[-1] if self._withheld else 0)
        for bucket in self.buckets:
            bucket.attach()
        self._pass = current
        return current

    def _leave(self, current: Pass) -> None:
        self._detach()
        self._verify(current)
        try:
            current.close()
        except BaseException as error:
            self._errors.append(RuntimeError(
                f"microbatch {named(current.indices)} of step {self._step} was not finished: {error}"))
            raise
        self._verify(current)

    def _verify(self, current: Pass) -> None:
        """Raises what went wrong during the pass; from then on the store is unusable."""
        current.verify()
        if current.spoiled is not None and not self._errors:
            self._errors.append(RuntimeError(
                f"something other than backward wrote into .grad inside a microbatch (bucket {current.spoiled}, "
                f"step {self._step}, microbatch {named(current.indices)}): call zero_grad, clip or scale "
                "gradients outside of it"))
        if current.failure is not None:
            self._errors.append(RuntimeError(f"launching a bucket failed: {current.failure}"))
            raise current.failure
        self.check()

    def _abandon(self, reason: str) -> None:
        self._detach()
        self._errors.append(RuntimeError(reason))

    def _detach(self) -> None:
        if self._pass is not None:
            self._pass.entry.on_boundary = None         # a cycle: the pass holds buckets, whose memory must go with them
        self._pass = None
        self.clear()

    def _hook(self, member: Member) -> Callable[[Tensor], None]:
        def fired(parameter: Tensor) -> None:
            with self._lock:
                self._fired(member, parameter)
        return fired

    def _fired(self, member: Member, parameter: Tensor) -> None:
        if self._pass is not None:
            self._pass.fire(member.index)
            return
        parameter.grad = None
        self._errors.append(RuntimeError(
            f"backward() outside of a microbatch gave {member.name} a gradient: use step.backward(loss), or "
            "`with step.microbatch(microbatch): loss.backward()`"))
