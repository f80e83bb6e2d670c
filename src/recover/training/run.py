"""`recover.join`: a training script's part in a run. See the interface in the README and `examples/train_gpt.py`.

A run is joined at once, in the background; `run.manage` says what is trained; `run.steps` starts the protocol: the
first members compare their models, take over the first replica's parameters, and go.
"""
from __future__ import annotations

import atexit
import hashlib
import logging
import math
import os
import platform
import secrets
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate

from recover import collectives, events
from recover.config import Environment, Timeouts
from recover.errors import Evicted, Left, LeftRun, NotFinite, Poisoned, RecoverError
from recover.faults.injector import injector_for
from recover.gradients.buckets import Memory
from recover.gradients.buffers import BufferWatch
from recover.gradients.buffers import Policy as BufferPolicy
from recover.gradients.store import GradientStore, Reduction
from recover.membership import files
from recover.membership.member import Member
from recover.parallel import fsdp
from recover.parallel.inner import Agreement, Alone, Inner
from recover.parallel.mesh import Place
from recover.parallel.ranks import build_mesh, shared_token
from recover.protocol import requests as ask
from recover.protocol.decision import LESSON, Job
from recover.protocol.position import Position
from recover.training import snapshot
from recover.training.checkpoint import Checkpoints
from recover.training.compiled import refuse_measured
from recover.training.engine import LEAVE, Engine, Links
from recover.training.evaluation import Evaluation, Evaluator, Score
from recover.training.joining import Hands
from recover.training.keeping import CLOCK, Keeping
from recover.training.leaving import Hook, Obedience, why
from recover.training.loader import Loader
from recover.training.managed import Managed
from recover.training.metrics import Metrics
from recover.training.sampling import MapDataset, Microbatch, Sampler, Samples, seed_everything
from recover.training.solo import Solo
from recover.training.step import FAILURES, Step
from recover.training.sums import Mirror, Sums
from recover.workload import Policy, Spares
from recover.workload import policy as find_policy

log = logging.getLogger("recover.training")

NEVER = (1 << 62, 0)
"""A view that no coordinator makes."""
NonFinite = Literal["raise", "skip", "keep"]


@dataclass(frozen=True)
class Options:
    """What the script asks for; all replicas must ask for the same."""

    microbatches: int
    seed: int
    reduction: Reduction
    policy: Policy
    nonfinite: NonFinite
    buffers: BufferPolicy
    hash_every: int
    bucket_bytes: int
    first_bucket_bytes: int
    checkpoint: Checkpoints | None = None
    skip: frozenset[tuple[int, int]] = frozenset()
    poison: Literal["stop", "skip"] = "stop"

    def __post_init__(self) -> None:
        if self.microbatches < 1:
            raise ValueError(f"microbatches (B, per step over all replicas) must be at least 1, not {self.microbatches}")
        if self.reduction not in ("fast", "exact"):
            raise ValueError(f'reduction must be "fast" or "exact", not {self.reduction!r}')
        if self.nonfinite not in ("raise", "skip", "keep"):
            raise ValueError(f'nonfinite must be "raise", "skip" or "keep", not {self.nonfinite!r}')
        if self.poison not in ("stop", "skip"):
            raise ValueError(f'poison must be "stop" or "skip", not {self.poison!r}')
        wrong = [name for name in sorted(self.skip) if name == LESSON or name[0] < 0 or not 0 <= name[1] < self.microbatches]
        if wrong:
            raise ValueError(f"skip: {wrong[0]} is no (step, index) with an index below {self.microbatches}, or it is (0, 0), "
                             "from which the run learns")
        if self.hash_every < 0:
            raise ValueError(f"hash_every must be 0 (never) or a number of steps, not {self.hash_every}")

    def facts(self, backend: str) -> dict[str, str | int | float | bool]:
        """What is compared at join, both values named when they differ."""
        facts: dict[str, str | int | float | bool] = dict(
            microbatches=self.microbatches, seed=self.seed, reduction=self.reduction, policy=repr(self.policy),
            nonfinite=self.nonfinite, buffers=self.buffers, hash_every=self.hash_every, bucket_bytes=self.bucket_bytes,
            first_bucket_bytes=self.first_bucket_bytes, skip=skips(self.skip), poison=self.poison,
            torch=str(torch.__version__), backend=backend)
        if self.reduction == "exact":                   # other kernels give other bits
            gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
            facts |= dict(threads=torch.get_num_threads(), processor=processor(), gpu=gpu,
                          deterministic=torch.are_deterministic_algorithms_enabled())
        return facts


def processor() -> str:
    """Model of the processor, as far as the machine tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def join(*, microbatches: int, seed: int = 0, reduction: Reduction = "fast", policy: str | Policy = "balanced",
         backend: str | None = None, nonfinite: NonFinite = "raise", buffers: BufferPolicy = "leader", hash_every: int = 0,
         bucket_bytes: int = 25 << 20, first_bucket_bytes: int = 1 << 20, mesh: Mapping[str, int] | None = None,
         checkpoint: Checkpoints | None = None, skip: Iterable[int | tuple[int, int]] = (),
         poison: Literal["stop", "skip"] = "stop") -> Run:
    """Join the run that this process was started for; without `recover launch`, a run of one replica by itself.

    microbatches: B, per step over all replicas. seed: of samples and of the random state per microbatch. reduction:
    "fast", or "exact" (order-independent sums: the trajectory is the failure-free one bit for bit). policy: who computes
    what (docs/policies.md). nonfinite: what a NaN or inf in the step's gradient does: "raise" NotFinite, "skip" the step
    alike on all, or "keep" it (a gradient scaler deals with it). buffers: how buffers that forward writes are made equal:
    as microbatch 0 left them ("leader"), or every microbatch's change summed ("sum") or averaged ("mean"). hash_every:
    hash parameters and optimizer state after every n steps. bucket_bytes: of one reduction. mesh: axes of a replica of
    several ranks, such as {"pp": 2, "dp_shard": 2, "tp": 2}; `run.mesh` is torch's DeviceMesh over them (recover.parallel.mesh).
    backend: of the sums between replicas; by default RECOVER_BACKEND (`recover launch --backend`), without that "tcp".
    checkpoint: `recover.Checkpoints("dir", every=100)`, for when all replicas die: the run goes on from the newest one there.
    skip: steps, or (step, index) of microbatches, that nobody computes; the divisor is that of the rest. poison: what becomes
    of a microbatch that kills whoever computes it: the run "stop"s with Poisoned, which names it, or all "skip" it
    (docs/faults.md).

    Raises ValueError for a mistake in these or in the environment. That the others ask for something else comes out as
    JoinRefused from `run.steps`, with both values.
    """
    environment = Environment.read() if os.environ.get("RECOVER_COORDINATOR") else None
    chosen = find_policy(policy, replicas=environment.replicas if environment else 1, microbatches=microbatches)
    if " at 0x" in repr(chosen):
        raise ValueError(f"replicas compare policies by repr(), and {chosen!r} has none of its own: make it a frozen dataclass")
    if environment and environment.spares:
        chosen = Spares(chosen, environment.spares, environment.replicas)
    options = Options(microbatches, seed, reduction, chosen, nonfinite, buffers, hash_every, bucket_bytes, first_bucket_bytes,
                      checkpoint, named(skip, microbatches), poison)
    rank, ranks = (environment.rank, environment.world_size) if environment else (int(os.environ.get("RANK", "0")),
                                                                                   int(os.environ.get("WORLD_SIZE", "1")))
    backend = backend or os.environ.get("RECOVER_BACKEND") or "tcp"
    return Run(options, environment, backend, Place.of(rank, ranks, mesh))


def named(skip: Iterable[int | tuple[int, int]], microbatches: int) -> frozenset[tuple[int, int]]:
    """Steps as all their microbatches. Raises ValueError for what is neither a step nor (step, index)."""
    found: set[tuple[int, int]] = set()
    for each in skip:
        pair = tuple(each) if isinstance(each, list | tuple) else ()
        if type(each) is int:
            found.update((each, index) for index in range(microbatches))
        elif len(pair) == 2 and all(type(part) is int for part in pair):
            found.add((pair[0], pair[1]))
        else:
            raise ValueError(f"skip holds steps and (step, index), not {each!r}")
    return frozenset(found)


def skips(names: Iterable[tuple[int, int]]) -> str:
    """For comparing: short, whatever their number."""
    text = ", ".join(f"{step}:{index}" for step, index in sorted(names))
    return text if len(text) < 200 else f"{text[:100]}... ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def read_token(environment: Environment | None) -> bytes:
    """The run's shared secret. Raises ValueError if there is none."""
    if environment is None:
        return secrets.token_bytes(32)                  # a run by itself
    if environment.token_file is None:
        raise ValueError("RECOVER_TOKEN_FILE is not set: it names a file with the secret that all ranks of a run share")
    try:
        return environment.token_file.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"RECOVER_TOKEN_FILE can't be read: {error}") from None


class Run:
    """One rank's part in a run. Made by `join`."""

    def __init__(self, options: Options, environment: Environment | None, backend: str, place: Place) -> None:
        self.options, self.environment, self.place = options, environment, place
        self.timeouts = Timeouts(failure_timeout=float(os.environ.get("RECOVER_FAILURE_TIMEOUT", "5")))
        self.replica = environment.replica if environment else 0
        self.in_loop = False
        self.evaluation: dict[str, float] = {}          # the newest
        self._steps = 0
        self._loaders: list[Loader] = []
        self.data_sets: list[list[int]] = []            # length and batch size of each
        self.keeping: Keeping | None = None
        self._clock: float | None = None
        self._fault: Tensor | None = None
        self._step: Step | None = None
        self._started = self._ended = False
        self._warned: set[str] = set()
        self._unhashed: int | None = None
        self._told_to_go = False
        self._hooks: list[Hook] = []                    # for when the whole job has to go
        self._obedience = Obedience(self.leave)
        self._loss = float("nan")
        token = read_token(environment)
        run_id = environment.run_id if environment else f"solo-{os.environ.get('MASTER_PORT', os.getpid())}"
        self.run_id, self.backend_name = run_id, backend
        self.record = events.open_log(environment.events if environment else None, run_id, self.replica, place.rank)
        self.record.emit(events.RUN_START, microbatches=options.microbatches, seed=options.seed, reduction=options.reduction,
                         replicas=environment.replicas if environment else 1, ranks_per_replica=place.ranks,
                         policy=options.policy.name)
        where: dict[str, Any] = dict(host=environment.interface if environment else "127.0.0.1", timeouts=self.timeouts,
                                     toward=environment.coordinator.split(",")[0] if environment else None)
        self.backend = collectives.create(backend, run_id=run_id, token=token, **where)
        self.mesh: DeviceMesh | None = None
        self.inner: Agreement = Alone()
        if place.ranks > 1:
            self.mesh = build_mesh(place)
            token = token if environment else shared_token()
            inner = collectives.create("tcp", run_id=f"{run_id}/{self.replica}", token=token, **where)
            self.inner = Inner(inner, place.rank, place.ranks, self.timeouts)
        if environment is not None:
            files.for_rank(environment.replicas, place.ranks)
        self.member: Any = Solo(self.backend.endpoint, self.timeouts)
        if environment is not None:
            if environment.replicas > options.microbatches and environment.replica == 0:
                warnings.warn(f"{environment.replicas} replicas share {options.microbatches} microbatches: some have nothing "
                              "to compute", stacklevel=3)
            facts = options.facts(backend) | {"mesh": str(dict(place.axes))} | dict(self.backend.facts)
            if environment.min_replicas:
                facts |= dict(min_replicas=environment.min_replicas, below=environment.below)
            self.member = Member(environment, self.timeouts, token, self.backend.endpoint, facts)
        self.injector = injector_for(environment, {"cut": self._cut}) if environment else None
        atexit.register(self.close)

    # -- what the script says ---------------------------------------------------------------------------------------
    def manage(self, *objects: Any) -> None:
        """The model (or models), optimizer(s), scheduler and whatever else has a state_dict: what the run keeps equal.

        Raises ValueError for what can't be managed, RuntimeError if called twice or after the first step.
        """
        if self._started or hasattr(self, "managed"):
            raise RuntimeError("run.manage is called once, before run.steps, with everything that is trained")
        self.managed = Managed(objects)
        if self.options.reduction == "exact":
            refuse_measured(self.managed.models)
        fsdp.prepare(self.managed.models)
        self.sums = self._make_sums(self.managed.models)
        for optimizer in self.managed.optimizers:
            optimizer.register_step_pre_hook(self._optimizer_steps)

    def _make_sums(self, models: Sequence[torch.nn.Module] = (), memory: Memory | None = None) -> Sums:
        options = self.options
        store = GradientStore(self.managed.parameters(), microbatches=options.microbatches, reduction=options.reduction,
                              bucket_bytes=options.bucket_bytes, first_bucket_bytes=options.first_bucket_bytes,
                              memory=memory)
        watch = BufferWatch(self.managed.named_buffers, options.buffers, microbatches=options.microbatches,
                            exact=options.reduction == "exact")
        return Sums(store, watch, Metrics(options.microbatches), models)

    def _twin(self) -> Sums:
        """(While catching up.) Sums with the same buckets, in which nothing is ever summed: they touch no parameter."""
        twin = Mirror(self._make_sums(memory=Memory(keep=True)))
        if self.sums.evaluator is not None:
            twin.attach(self.sums.evaluator.twin())
        return twin

    def _copy(self, step: int, room: Tensor | None) -> snapshot.Snapshot:
        fsdp.reshard(self.managed.models)
        return snapshot.take(step, self.managed, self.sums.store.state(), room)

    def _load(self, head: snapshot.Head, data: Tensor) -> None:
        fsdp.reshard(self.managed.models)
        self.sums.store.load_state(snapshot.load(head, data, self.managed))

    def data(self, dataset: MapDataset, batch_size: int, collate_fn: Callable[[list[Any]], Any] | None = None) -> Samples:
        """`data[microbatch]`: its samples of a map-style dataset, collated; a pure function of the run's seed.

        Raises ValueError if the dataset is shorter than one step.
        """
        return Samples(dataset, self._sampler(dataset, batch_size), collate_fn or default_collate)

    def loader(self, dataset: MapDataset, batch_size: int, num_workers: int = 0,
               collate_fn: Callable[[list[Any]], Any] | None = None) -> Loader:
        """The same as `data`, made ahead of time by worker processes."""
        loader = Loader(dataset, batch_size, num_workers, collate_fn, sampler=self._sampler(dataset, batch_size),
                        plan=self._predict)
        self._loaders.append(loader)
        return loader

    def evaluate(self, dataset: MapDataset, batch_size: int, score: Score, *, every: int = 0,
                 collate_fn: Callable[[list[Any]], Any] | None = None) -> None:
        """Evaluate the model on `dataset`, shared out over the replicas, each sample once, also when one dies.

        score: called with each collated batch, the model in evaluation mode, without gradients; gives for each name a pair,
        the sum over the batch and the batch's weight (its number of tokens, say). All ranks of a replica call it; what the
        last stage of a pipeline gives counts. every: evaluate with each n-th step, the first included: `step.evaluation` has
        {name: sum of sums / sum of weights}, for the weights from before the step's update (like `step.loss`). Always once
        more after the last step: `run.evaluation`, which is the newest at any time.

        Call it before run.steps, after run.manage. Raises ValueError for a mistake, RuntimeError at the wrong time.
        """
        if self._started or not hasattr(self, "managed"):
            raise RuntimeError("run.evaluate is called after run.manage and before run.steps")
        if not self.options.policy.constant:
            raise ValueError(f"the policy {self.options.policy.name!r} lets microbatches go with the dead, and their parts of an "
                             "evaluation set with them: evaluate with a policy that keeps B")
        if self.sums.evaluator is not None:
            raise RuntimeError("run.evaluate is called once: one score function may give several names")
        evaluation = Evaluation(dataset, batch_size, score, every, collate_fn or default_collate, self.place.data_rank,
                                self.place.data_size)
        self.sums.attach(Evaluator(evaluation, self.options.microbatches, self.options.seed, self.managed.models))

    def _sampler(self, dataset: MapDataset, batch_size: int) -> Sampler:
        self.data_sets.append([len(dataset), batch_size])
        return Sampler(len(dataset), self.options.seed, self.options.microbatches, batch_size,
                       self.place.data_rank, self.place.data_size)

    def _predict(self, step: int) -> Sequence[int]:
        """What this replica will probably compute in `step`: a guess for the loader's workers."""
        if not self._started or step >= self._steps:
            return ()
        position = self.engine.position
        if step in position.owes:
            return sorted(position.owes[step] | position.shadow.get(step, set()))
        known = [s for s in position.vectors if s <= step]
        if not known:
            return ()
        plan = self.options.policy.plan(position.vectors[max(known)], step, self.options.microbatches)
        return plan.work.get(position.me, ()) or plan.shadow.get(position.me, ())

    # -- going early ------------------------------------------------------------------------------------------------
    def leave(self) -> None:
        """This replica is to go: it contributes what it has computed and leaves after the step at hand, or ends the run
        with all others if they were told so, too. Returns at once; `run.steps` then ends the script with `Left` (exit code
        75). SIGTERM does this unless the script handles that signal itself. From any thread or signal handler.
        """
        self._told_to_go = True
        if hasattr(self, "engine"):
            self.engine.told_to_go = True

    def on_preempted(self, hook: Hook) -> None:
        """Call `hook(step)` in every rank when the whole job has to end early: all replicas were told to go, or too few are
        left. All parameters and optimizers are then as they are before `step`, alike on all replicas, and a checkpoint was
        written if `join` was given `checkpoint`. Nobody is waited for longer than the scheduler waits for this process."""
        self._hooks.append(hook)

    def gone(self) -> Left:
        """(Step.) All is agreed and contributed: what to raise. Runs the hooks if the whole job ends."""
        position = self.engine.position
        reason = why(position)
        if position.ending and position.formed and not self.replaying:     # else its parameters are not the run's
            self.engine.part(self.timeouts.heartbeat * 2)
            with self.pause("preempted"):
                if self.keeping is not None:
                    self.keeping.ended(position.step or 0)
                for hook in self._hooks:
                    hook(position.step or 0)
        log.warning("replica %d: %s", self.replica, reason)
        self._end("left", reason, agreed=True)
        return Left(reason)

    # -- the loop ---------------------------------------------------------------------------------------------------
    def steps(self, count: int) -> Iterator[Step]:
        """Steps 0 to `count` - 1; after a resume, from the checkpoint's on.

        Raises JoinRefused, Evicted, Stopped, NotFinite, CheckpointDamaged, RuntimeError for a wrong loop, and Left when the
        run goes on without this replica or ends early (see `leave`).
        """
        if not hasattr(self, "managed"):
            raise RuntimeError("call run.manage(model, optimizer) before run.steps")
        if self._started:
            raise RuntimeError("run.steps is called once")
        if count < 0:
            raise ValueError(f"a run has at least 0 steps, not {count}")
        self._start(count)
        try:
            while True:
                request = self.advance()
                if request is None and self.engine.position.step != self.engine.position.job.steps:
                    raise self.gone()
                if request is None:
                    break
                assert isinstance(request, ask.Begin), request
                self._step = step = Step(self, request.step)
                if self.keeping is not None:
                    self.keeping.announce()
                if step.index == count:
                    self._evaluate_last(step)
                    continue
                yield step
                if not step.complete:
                    raise left_early(step)
                self._updated(step)
        except FAILURES as error:
            self.failed(error)
            raise
        self._end("finished")

    @property
    def replaying(self) -> bool:
        """A joiner's script, over steps that the others have done."""
        joiner = self.engine.joiner
        return joiner is not None and joiner.replays

    def advance(self) -> ask.Begin | ask.Compute | ask.Commit | None:
        """(Step.) What the script is to do next."""
        joiner = self.engine.joiner
        if joiner is None:
            request = self.engine.advance()
            joiner = self.engine.joiner
            if joiner is None:
                return request
        return joiner.advance()

    def _start(self, count: int) -> None:
        self._started, self._steps = True, count
        injector = self.injector
        if injector is None:
            from recover.faults.injector import Injector
            injector = Injector()
        links = Links(self.member, self.backend, self.inner, self.place)
        self.engine = Engine(links, self.sums, self.managed, timeouts=self.timeouts, injector=injector, record=self.record)
        evaluator = self.sums.evaluator
        options = self.options
        floor, below = (self.environment.min_replicas, self.environment.below) if self.environment else (0, "wait")
        job = Job(options.microbatches, count + (evaluator is not None), options.policy, floor, below,
                  frozenset(name for name in options.skip if name[0] < count), options.poison == "skip")
        position = Position(job, self.replica, self.place.rank, self.sums.count, first=True)
        wanted = self.options.checkpoint
        if wanted is not None:
            self.keeping = Keeping(self, wanted, self.engine, count)
        script = [f"{count} steps", "no evaluation" if evaluator is None else evaluator.signature(),
                  "no checkpoints" if wanted is None else wanted.rhythm()]
        self.engine.start(position, self.options.microbatches if self.options.policy.constant else None, script)
        self.engine.hands = Hands(self._twin, lambda: snapshot.size_of(self.managed), self._copy, self._load)
        self.member.start()
        view = self.member.wait_news(self.timeouts.formation)
        self.member.vouch()
        self.engine.told_to_go = self._told_to_go
        self._obedience.begin()
        self.record.emit(events.RUN_JOINED, view=view.id, members=view.members)

    def committed(self, step: Step, request: ask.Commit) -> None:
        """(Step.) The sums are whole and in `.grad`."""
        whole = self.engine.committed
        assert whole is not None
        evaluator = self.sums.evaluator
        if evaluator is not None and evaluator.evaluation.due(step.index, self._steps):
            step.evaluation = self.evaluation = whole.scores
        if step.index == self._steps:
            return
        self._clock = whole.metrics.pop(CLOCK, None)
        step.loss, step.metrics, self._loss = whole.loss, whole.metrics, whole.loss
        self._name_buffers(whole.written)
        hashed = self.options.hash_every and (step.index + 1) % self.options.hash_every == 0
        who = [whole.gradient.who.get(i, -1) for i in range(self.options.microbatches)]
        self.engine.publisher.hold(events.make_receipt(
            step=step.index, view=request.view, members=request.members, who=who, divisor=whole.divisor, loss=step.loss,
            checksums=[self.sums.store.checksum(k) for k in range(self.sums.gradient_count)] if hashed else None,
            policy_constant=self.options.policy.constant,
            skipped=sorted(self.engine.missing)))
        if whole.divisor == 0:
            step.skipped = True
        if whole.nonfinite:
            self._not_finite(step, f"step {step.index}: {whole.nonfinite}")

    def score(self, step: int, indices: Sequence[int]) -> None:
        """(Step.) The evaluation's part that these microbatches bring along; and the time, with microbatch 0."""
        if self.options.checkpoint is not None and self.options.checkpoint.minutes is not None and 0 in indices:
            self.sums.metrics.add(0, CLOCK, time.time())
        evaluator = self.sums.evaluator
        if evaluator is not None and evaluator.evaluation.due(step, self._steps):
            self.engine.activity.turn("evaluate")
            evaluator.score(step, indices)
            self.engine.activity.turn("compute")

    def _evaluate_last(self, step: Step) -> None:
        """After the last update: a step of microbatches without a backward, which leaves no `.grad`."""
        self.engine.pipelined = True                    # FSDP has nothing to withhold
        for _ in step:
            with step.microbatch() as entry:
                entry.loss = 0.0

    def _not_finite(self, step: Step, text: str) -> None:
        if self.options.nonfinite == "raise":
            self.sums.store.clear()
            raise NotFinite(text + ' (join with nonfinite="skip" to skip such steps alike on all replicas)')
        if self.options.nonfinite == "skip":
            log.warning("%s: skipped", text)
            step.skipped = True
            self.sums.store.clear()

    def _updated(self, step: Step) -> None:
        """The script's update of the step is done."""
        self.engine.injector.at("between", step.index)
        digest = ""
        if self.options.hash_every and (step.index + 1) % self.options.hash_every == 0:
            digest = self.hash()
            self.engine.publisher.complete(step.index, digest)
            if not (self.engine.position.level or self.engine.position.caught_up):
                return                                  # a joiner says it when it has compared its state with a giver's
            parts = "".join(self.engine.agreed("hash", digest))
            short = hashlib.sha256(parts.encode()).hexdigest()[:16]
            self.engine.position.digest = f"{step.index}:{short}"           # goes with the next fence: compared by all (I5)
        if self.keeping is not None and self.replaying:
            self.keeping.saver.rhythm.due(step.index + 1, self._clock)
        elif self.keeping is not None:
            self.keeping.updated(step.index, digest, self._clock)

    def save(self) -> None:
        """A checkpoint after the step at hand, whatever was chosen at `join`; the run waits for it before the next step.

        Call it in the loop over steps, in the scripts of all replicas (or where `run.is_leader`), on all ranks of one.
        Raises RuntimeError.
        """
        if self.keeping is None:
            raise RuntimeError("run.save belongs into the loop over run.steps, and needs recover.join(checkpoint=...)")
        self.keeping.saver.asked = True

    def hash(self) -> str:
        """SHA-256 over parameters, buffers, optimizer state and everything else that training depends on."""
        fsdp.reshard(self.managed.models)
        return self.managed.digest(self.sums.store.state()["exponents"])

    def enter(self, microbatch: Microbatch, stage: int | None = None) -> None:
        """(Step.) The random state of a microbatch: its own, and of the data rank and the pipeline's stage that compute it."""
        index, part = microbatch.index, self.place.data_rank
        stage = self.place.stage if stage is None else stage
        plain = self.place.data_size == 1 and stage == 0
        seed_everything(self.seed, microbatch.step, index if plain else f"{index}/{part}/{stage}")

    def pause(self, what: str, seconds: float | None = None) -> AbstractContextManager[None]:
        """`with run.pause("checkpoint", seconds=900): ...`: what is done inside is no failure, however still it looks.

        The others go on without a replica whose training thread makes no progress while they wait for it (docs/timeouts.md).
        Wrap what takes much longer than the run has seen so far: writing a large checkpoint, an evaluation of your own, a
        compilation. what: for messages, at most 100 characters. seconds: how long it may take at most (default: 120 times
        the failure timeout, at least 10 minutes). A process that dies meanwhile is noticed as ever. Raises ValueError.
        """
        if not 1 <= len(what) <= 100:
            raise ValueError(f"a pause is named in 1 to 100 characters, not {len(what)}")
        if seconds is not None and not 0 < seconds <= 7 * 86400:
            raise ValueError(f"a pause has more than 0 seconds and at most a week, not {seconds}")
        return self.member.activity.pause(what, seconds)    # type: ignore[no-any-return]

    # -- small things -----------------------------------------------------------------------------------------------
    @property
    def seed(self) -> int:
        return self.options.seed

    @property
    def nonfinite(self) -> NonFinite:
        return self.options.nonfinite

    @property
    def replicas(self) -> tuple[int, ...]:
        """The replicas in the present view."""
        return self.engine.position.view.members if self._started else ()

    @property
    def is_leader(self) -> bool:
        """True on one replica, the lowest surviving one: for logging and saving. It may change."""
        position = self.engine.position if self._started else None
        return position is None or self.replica == min(position.givers(position.step) or self.replicas, default=self.replica)

    def before_backward(self, loss: Tensor) -> None:
        """(Step.) Lets a planned fault happen inside the backward."""
        engine = self.engine
        if engine.injector.pending and engine.launching is not None:
            step, index = engine.launching.step, engine.computed

            def fault(gradient: Tensor) -> None:
                engine.injector.at("backward", step, index)
            loss.register_hook(fault)                   # type: ignore[no-untyped-call]

    def _optimizer_steps(self, *_: object) -> None:
        if self.in_loop:
            raise RuntimeError("optimizer.step() inside the microbatch loop: the sums are not whole yet; call it after "
                               "`for microbatch in step` has ended by itself")
        if self._step is not None and not self._step.complete:
            raise left_early(self._step)

    def _name_buffers(self, written: list[str]) -> None:
        new = [name for name in written if name not in self._warned]
        if new:
            self._warned.update(new)
            how = dict(leader="kept as microbatch 0 of the step leaves them", sum="the sum of all microbatches' changes",
                       mean="the mean of all microbatches' changes")[self.options.buffers]
            log.warning("forward writes buffers, which differ between replicas by nature: %s. They are %s; choose with "
                        "recover.join(buffers=\"leader\"|\"sum\"|\"mean\").", ", ".join(new), how)

    def _cut(self) -> None:
        """(A planned fault.) Drop the data connections though nobody died."""
        if self.engine.group is not None:
            self.engine.group.sever()

    def failed(self, error: BaseException) -> None:
        """This rank's part ends with an error, ours or the script's: the others hear at once that it is gone."""
        if isinstance(error, LeftRun | Poisoned):
            log.error("%s; exit code %d", error, error.code)
        if isinstance(error, Evicted):
            self._end("evicted", str(error))
        else:
            self._end("failed", f"{type(error).__name__}: {error}")

    def _end(self, status: Literal["finished", "left", "evicted", "failed"], message: str = "", agreed: bool = False) -> None:
        """`agreed`: the others know, all ranks of this replica go together."""
        if self._ended:
            return
        self._ended = True
        position = self.engine.position
        nothing = position.step is None or (self.engine.publisher.paused and status != "finished")
        last = None if nothing or position.step is None else min(position.step, self._steps) - 1
        if status == "finished":
            self.engine.publisher.paused = False        # a joiner that came in with the last steps
            self.engine.publisher.publish(position.job.steps)
            if self.keeping is not None:
                self.keeping.finish(2 * self.timeouts.coordinator)
        elif self.keeping is not None:
            self.keeping.saver.drop("the replica ended")
        self.record.emit(events.RUN_END, status=status, last_step=last, final_loss=None if math.isnan(self._loss) else self._loss,
                         state_hash=self.hash() if status == "finished" else None, members=position.view.members,
                         message=message, view=position.view.id, step=last)
        self.engine.close(finished=status == "finished" or (agreed and bool(position.ending)), together=agreed)
        self.close()

    def close(self) -> None:
        """End this rank's part. Idempotent; also called at exit."""
        atexit.unregister(self.close)
        self._obedience.end()
        for loader in self._loaders:
            loader.close()
        if self._started and not self._ended:
            self._end("left", "the script ended before its last step")
            return
        self.member.close()
        self.backend.close()
        self.record.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, RuntimeError) and self._started and self.place.ranks > 1 and not self._ended:
            evicted = self._evicted()
            if evicted is not None:
                self.failed(evicted)
                self.close()
                raise evicted from error
        if isinstance(error, Exception) and self._started:      # else it was told to stop
            self.failed(error)
        self.close()

    def _evicted(self) -> Evicted | None:
        """An error of torch's may say no more than that a mate is gone: whether the others have gone on without this replica."""
        try:
            self.member.wait_view(NEVER, LEAVE)
        except Evicted as evicted:
            return evicted
        except (RecoverError, TimeoutError):
            pass
        return None


def left_early(step: Step) -> RuntimeError:
    return RuntimeError(f"the loop over the microbatches of step {step.index} was left early: every microbatch that "
                        "`for microbatch in step` hands out must be computed before the step can be summed")


__all__ = ["Run", "join"]
