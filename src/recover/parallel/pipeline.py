"""Pipelines of `torch.distributed.pipelining` that take their work in chunks of any size.

Theory of operation. A schedule of torch is built for a fixed number of microbatches, but a replica's quota changes with
every failure. So there is a *flight* per chunk size: a schedule with its own stages around the one set of modules, built
when the size first comes up and kept for the next time. All stages of a replica ask for the same sizes in the same order
(the positions of a replica act as one), hence they build and forget together.

Three things are done at the edges of every microbatch, by wrapping methods *of each stage object* (nothing of torch is
patched globally):

* before its forward, the random state is set to that of (microbatch, stage). Seeding once per chunk would make dropout
  masks depend on how the quota was cut. What shape inference computes in between does not pass here and is not counted.
* before its backward in the last stage, the chunk gets its loss: buckets may leave during the last backward, and take the
  losses along; torch hands them out after it.
* after its backward, FSDP reduces its gradient, so that hooks fire once per microbatch, and the chunk is told that `.grad`
  holds it (`boundary`): `exact` rounds single microbatches, not chunks. The schedule's own reduction, after the chunk, is
  left out: nothing is left to reduce, but FSDP would reduce zeros for it, and hooks would fire once too often.

Gradients are summed, never scaled: who divides is the run (`scale_grads=False`; else each call would rescale everything
that was accumulated before it). Loss functions return the microbatch's mean, or its sum if weights are given.

A new flight begins with torch's shape inference: one forward more, and a backward to the inputs. Under FSDP that empties
`.grad`, and it may write buffers (running statistics); both are put back.
"""
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

KEPT = 16
"""Flights that are kept; each holds receive buffers for all of its microbatches."""

ALTERNATIVES: dict[str, tuple[str, ...]] = {
    "gpipe": ("gpipe",),
    "1f1b": ("1f1b", "gpipe"),
    "loopedbfs": ("loopedbfs",),
    "interleaved1f1b": ("interleaved1f1b", "loopedbfs"),
    "interleavedzerobubble": ("interleavedzerobubble", "loopedbfs"),
    "zbvzerobubble": ("zbvzerobubble",),
    "dualpipev": ("dualpipev", "zbvzerobubble"),
}
"""What runs a chunk that is too small, or no multiple: the first that can. Stages lie on the same ranks in each row."""

SINGLE = ("gpipe", "1f1b")
"""A rank has one stage. The others want several."""

SPLIT = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")
"""Zero-bubble: the backward computes weight gradients apart and adds them to `.grad` itself; some hooks never fire."""


class Chunk(Protocol):
    """What `with step.microbatch(*chunk) as m` yields: the microbatches of one pass, and what wants to hear of them."""

    indices: Sequence[int]
    losses: list[Any]           # one for each; set on the last stage, each before the backward of its microbatch

    def seed(self, index: int, stage: int) -> None:
        """Set the random state for the forward of microbatch `index` in `stage`."""

    def boundary(self, index: int) -> None:
        """One stage's backward of microbatch `index` is over, and the next one's not begun."""


def fits(schedule: str, size: int, stages: int, ranks: int) -> bool:
    """Whether torch's schedule of that name can run `size` microbatches through `stages` stages on `ranks` ranks."""
    if schedule in ("1f1b", "dualpipev"):
        return size >= stages
    if schedule.startswith("interleaved"):
        return size % max(1, size // ranks) == 0
    return size >= 1


def choose(schedule: str, size: int, stages: int, ranks: int) -> str:
    """The schedule for a chunk of `size` microbatches. Raises ValueError if none can run it."""
    for name in ALTERNATIVES[schedule]:
        if size >= 1 and fits(name, size, stages, ranks):
            return name
    raise ValueError(f"no schedule can run a chunk of {size} microbatches through {stages} stages with {schedule!r}: "
                     "ask for chunks of at least 1 (step.chunks(max=...)), or take schedule='gpipe'")


def check_stages(schedule: str, mine: Sequence[int], count: int, rank: int, ranks: int) -> None:
    """Raises ValueError unless rank `rank` of `ranks` holds the stages that the schedule expects it to."""
    if schedule in SINGLE:
        expected, layout = [rank], "one stage per rank"
        fitting = count == ranks
    elif ALTERNATIVES[schedule][-1] == "zbvzerobubble":
        expected, layout = sorted({rank, count - 1 - rank}), "two stages per rank, laid out as a V"
        fitting = count == 2 * ranks
    else:
        expected, layout = list(range(rank, count, ranks)), "the same number of stages on each rank, dealt like cards"
        fitting = count % ranks == 0
    if not fitting:
        raise ValueError(f"schedule {schedule!r} wants {layout}, which {count} stages on {ranks} ranks are not: change the "
                         "number of stages or the size of the mesh's pipeline axis")
    if sorted(mine) != expected:
        raise ValueError(f"schedule {schedule!r} wants {layout}: rank {rank} of {ranks} must hold stages {expected} of "
                         f"{count}, not {sorted(mine)}")


class Pipeline:
    """`pipeline(m).step(x, target=y, losses=m.losses)` inside `with step.microbatch(*chunk) as m`.

    modules: this rank's stages by index, 0 <= index < `count`; nearly always one. loss_fn(output, target) -> 0-dim loss of
    one microbatch; used by the last stage. group: the ranks of one pipeline (`run.mesh["pp"].get_group()`; None: all).
    schedule: one of `ALTERNATIVES`; chunks that it can't run fall back to a plainer one of the same stages (1F1B to GPipe).
    exact: the run's reduction is "exact".

    Raises ValueError for an unknown schedule, stages that don't lie as the schedule wants them, or one that `exact` refuses.
    """

    def __init__(self, modules: Mapping[int, nn.Module], count: int, loss_fn: Callable[[Any, Any], Tensor], *,
                 group: dist.ProcessGroup | None = None, schedule: str = "1f1b", exact: bool = False) -> None:
        name = schedule.lower()
        if name not in ALTERNATIVES:
            raise ValueError(f"there is no schedule {schedule!r}: take one of {', '.join(ALTERNATIVES)}")
        if exact and name in SPLIT:
            raise ValueError(f"reduction='exact' can't tell the single microbatches of the zero-bubble schedule {schedule!r} "
                             f"apart: take {', '.join(each for each in ALTERNATIVES if each not in SPLIT)}, or "
                             "reduction='fast'")
        ranks = dist.get_world_size(group)
        check_stages(name, list(modules), count, dist.get_rank(group), ranks)
        self.modules, self.count, self.loss_fn = dict(sorted(modules.items())), count, loss_fn
        self.group, self.schedule, self.ranks = group, name, ranks
        self._flights: OrderedDict[int, Flight] = OrderedDict()
        self._forwards: OrderedDict[tuple[Any, ...], Any] = OrderedDict()

    @property
    def splits(self) -> bool:
        """Whether backward writes into `.grad` without firing every hook: the store must know before the first step."""
        return self.schedule in SPLIT

    def __call__(self, chunk: Chunk) -> Flight:
        """The flight for `chunk`, ready to `step`. Raises ValueError if no schedule can run so many microbatches."""
        size = len(chunk.indices)
        flight = self._flights.pop(size, None) or self._build(size)
        self._flights[size] = flight
        while len(self._flights) > KEPT:
            self._flights.popitem(last=False)
        flight.load(chunk)
        return flight

    def evaluate(self, *args: Any, target: Any) -> list[Tensor]:
        """Forward only, for a score function of `run.evaluate`: [`loss_fn`'s 0-dim loss of this batch] on the last stage, []
        on the others. All ranks of the pipeline call it. args, target: as in `Flight.step`, of one batch."""
        shapes = tuple(tuple(part.shape) for part in (*args, target) if isinstance(part, Tensor))
        schedule = self._forwards.pop(shapes, None)
        if schedule is None:
            _, schedule, stages = self._schedule(1)
            for stage in stages:                        # there are none; FSDP would reduce zeros, and hooks fire
                stage.perform_reduce_grad = reduces_nothing     # type: ignore[method-assign]
        self._forwards[shapes] = schedule
        while len(self._forwards) > KEPT:
            self._forwards.popitem(last=False)
        losses: list[Tensor] = []
        with torch.no_grad():                           # shape inference, too, is then without a backward
            schedule.eval(*args, target=target, losses=losses)
        return losses

    def _build(self, size: int) -> Flight:
        name, schedule, stages = self._schedule(size)
        return Flight(name, schedule, stages, size)

    def _schedule(self, size: int) -> tuple[str, Any, list[PipelineStage]]:
        """torch's, for `size` microbatches, with stages of its own."""
        name = choose(self.schedule, size, self.count, self.ranks)
        stages = [PipelineStage(module, index, self.count, device_of(module), group=self.group)
                  for index, module in self.modules.items()]
        kind: Any = get_schedule_class(name)
        return name, kind(stages[0] if name in SINGLE else stages, size, loss_fn=self.loss_fn, scale_grads=False), stages


class Flight:
    """A schedule for one chunk size, with its stages. Made by `Pipeline`."""

    def __init__(self, name: str, schedule: Any, stages: Sequence[PipelineStage], size: int) -> None:
        self.name, self.schedule, self.stages, self.size = name, schedule, stages, size
        self._chunk: Chunk | None = None
        self._shapes: list[tuple[int, ...]] | None = None   # of one microbatch's part of each tensor that is given
        self._fresh = True                                  # the first step begins with shape inference
        self._kept: Kept | None = None
        for stage in stages:
            self._watch(stage)

    def load(self, chunk: Chunk) -> None:
        """(Pipeline.) The next step is for these microbatches."""
        self._chunk = chunk

    def step(self, *args: Any, target: Any = None, losses: list[Any] | None = None, return_outputs: bool = False,
             **kwargs: Any) -> Any:
        """Forward and backward of the whole chunk; gradients are added to `.grad`, losses go to the chunk.

        args: what the first stage's forward takes, the chunk's microbatches behind one another: [size * batch, ...];
        target: likewise, for the loss; each may be given on all stages. losses: may be the chunk's own, or another list
        whose content becomes, on the last stage, one 0-dim loss per microbatch. Returns the last stage's outputs, if wanted.

        Raises ValueError where a batch can't be cut into `size` microbatches of the shape that they always had, and
        RuntimeError when a peer of the pipeline is gone.
        """
        if self._chunk is None:
            raise RuntimeError("call pipeline(m) anew for each chunk: one step per chunk")
        self._check_shapes([part for part in (*args, target) if isinstance(part, Tensor)])
        if self._fresh:
            self._kept = Kept([stage.submod for stage in self.stages])
        result = self.schedule.step(*args, target=target, losses=losses, return_outputs=return_outputs, **kwargs)
        self._fresh, self._chunk = False, None
        return result

    def _check_shapes(self, parts: Sequence[Tensor]) -> None:
        """A wrong shape must not get as far as a stage's peer: Gloo ends both processes when sizes mismatch."""
        for part in parts:
            if part.dim() == 0 or part.shape[0] % self.size:
                raise ValueError(f"a chunk of {self.size} microbatches can't be cut from a tensor of shape {tuple(part.shape)}: "
                                 "its first dimension must be a multiple of the chunk's size (torch.cat of the microbatches)")
        shapes = [(part.shape[0] // self.size, *part.shape[1:]) for part in parts]
        if self._shapes is not None and shapes != self._shapes:
            raise ValueError(f"a pipeline's microbatches keep their shapes: they were {self._shapes}, now they are {shapes}; "
                             "pad them to one length")
        self._shapes = shapes

    # -- the edges of a microbatch -----------------------------------------------------------------------------------

    def _watch(self, stage: PipelineStage) -> None:
        forward, backward, weights = stage.forward_one_chunk, stage.backward_one_chunk, stage.backward_weight_one_chunk
        reduce = stage.perform_reduce_grad

        def forward_one_chunk(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            self._enter(stage, fwd_chunk_id)
            return forward(fwd_chunk_id, *args, **kwargs)

        def backward_one_chunk(bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **kwargs: Any) -> None:
            self._tell(bwd_chunk_id, loss)
            backward(bwd_chunk_id, loss=loss, full_backward=full_backward, **kwargs)
            if full_backward:
                self._leave(stage, bwd_chunk_id, reduce)

        def backward_weight_one_chunk(bwd_chunk_id: int, **kwargs: Any) -> None:
            weights(bwd_chunk_id, **kwargs)
            self._leave(stage, bwd_chunk_id, reduce)

        stage.forward_one_chunk = forward_one_chunk                     # type: ignore[method-assign]
        stage.backward_one_chunk = backward_one_chunk                   # type: ignore[method-assign, assignment]
        stage.backward_weight_one_chunk = backward_weight_one_chunk     # type: ignore[method-assign, assignment]
        stage.perform_reduce_grad = reduces_nothing                     # type: ignore[method-assign]

    def _enter(self, stage: PipelineStage, place: int) -> None:
        assert self._chunk is not None
        if self._kept is not None:                      # shape inference is over
            self._kept.put_back()
            self._kept = None
        self._chunk.seed(self._chunk.indices[place], stage.stage_index)

    def _tell(self, place: int, loss: Tensor | None) -> None:
        assert self._chunk is not None
        if loss is not None:
            self._chunk.losses[place] = loss.detach()

    def _leave(self, stage: PipelineStage, place: int, reduce: Callable[[int], None]) -> None:
        assert self._chunk is not None
        if isinstance(stage.submod, FSDPModule):        # torch would do it once, after the chunk
            reduce(1)
        self._chunk.boundary(self._chunk.indices[place])


def reduces_nothing(grad_scale_factor: int) -> None:
    """A stage's own reduction of gradients, left out."""
    assert grad_scale_factor == 1, "scale_grads=False"


class Kept:
    """What shape inference may disturb in some modules: `.grad` of their parameters, and their buffers."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        for module in modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()                      # so that parameters() are the shards, which hold `.grad`
        self._gradients = [(p, p.grad) for module in modules for p in module.parameters()]
        self._buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers()]

    def put_back(self) -> None:
        for parameter, gradient in self._gradients:
            if parameter.grad is not gradient:
                parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in self._buffers:
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


def device_of(module: nn.Module) -> torch.device:
    """Where its parameters (or buffers) are; the processor if it has none."""
    for tensor in (*module.parameters(), *module.buffers()):
        return tensor.device
    return torch.device("cpu")
