"""The ways to live with failures. Each is one run's: it may remember things about the step in hand.

Theory of operation
-------------------
A strategy answers a failure with what it costs: how long everybody stands still, what becomes of the step in hand, what is
rolled back, and who trains on. A failure while everybody stands still starts that anew.

* `InStep`, this project: the others wait for detection and for new groups; the step in hand goes on, longer by what the
  survivors recompute. Who recomputes what, and who computes what in later steps, is asked of the project's own policies
  (`recover.workload`). A failure in the reduction costs the lost microbatches and nothing that was reduced. With `rejoin`
  a replica comes back once its hardware has and it was started again; the batch is B throughout.
* `CheckpointRestart`: everybody stops, waits for the hardware if it will return, restarts from what was saved. Where it
  will not return, the rest goes on, each with the microbatches it had: the batch shrinks.
* `InMemory`: the same from the memory of peers, saved every few steps.
* `DropShrink` (as torchft): the step in hand is thrown away by all, the batch shrinks until the replica is back.
* `ReplicaRejoin` (as FT-HSDP): the step is kept, everybody waits for `stall`, the batch shrinks until the replica is back.
* `SpareSwap`: a spare takes the place inside the standing job, state comes from a peer, the step is done again. Without
  a spare it waits for hardware.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from recover.simulate.cluster.engine import EDGE, Run, Strategy
from recover.simulate.cluster.forms import young_daly
from recover.simulate.cluster.model import Job, Plan
from recover.workload import Policy, policy

Indices = tuple[int, ...]


def save_interval(plan: Plan, save: float) -> int:
    """Steps between two saves: as asked for, or Young/Daly's; 0 (never) where nothing fails."""
    if plan.costs.interval:
        return plan.costs.interval
    if math.isinf(plan.mtbf):
        return 0
    return max(1, round(young_daly(save, plan.mtbf) / plan.job.step))


def save_rarely(run: Run, plan: Plan) -> None:
    """For ways that need a checkpoint only when everything dies."""
    run.save_every, run.save_cost = save_interval(plan, plan.costs.save) * plan.costs.rare, plan.costs.save


class Quotas:
    """How long steps take, and what they sum, under a policy; remembered by the members' speeds (number, if all are alike)."""

    def __init__(self, job: Job, chosen: Policy) -> None:
        self.job, self.policy, self.speeds = job, chosen, job.speeds()
        self._known: dict[tuple[float, ...] | int, tuple[float, int]] = {}

    def vector(self, members: set[int]) -> dict[int, float]:
        return {m: self.speeds[m] for m in sorted(members)}

    def step(self, members: set[int]) -> tuple[float, int]:
        """(seconds, microbatches that count)"""
        key = tuple(self.vector(members).values()) if self.job.slow else len(members)
        if key not in self._known:
            plan = self.policy.plan(self.vector(members), 0, self.job.microbatches)
            self._known[key] = (self.busy(plan.work, plan.shadow) + self.job.reduction, sum(map(len, plan.work.values())))
        return self._known[key]

    def busy(self, work: Mapping[int, Indices], shadow: Mapping[int, Indices]) -> float:
        """Seconds until the last member has computed its share."""
        return max((len(i) / self.speeds[m] for m, i in [*work.items(), *shadow.items()]), default=0.0) * self.job.microbatch


class Rejoining:
    """What strategies share in which single replicas go and come."""

    name = "?"

    def __init__(self, plan: Plan, chosen: Policy, *, rejoin: bool = True) -> None:
        self.plan, self.rejoin, self.constant = plan, rejoin, chosen.constant
        self.quotas = Quotas(plan.job, chosen)
        self._due: dict[int, float] = {}                    # the newest life of a replica that was started again

    def begin(self, run: Run) -> None:
        save_rarely(run, self.plan)

    def step_time(self, run: Run) -> float:
        return self.quotas.step(run.members)[0]

    def step_tokens(self, run: Run) -> float:
        job = self.plan.job
        return job.tokens_per_step * self.quotas.step(run.members)[1] / job.microbatches

    def failed(self, run: Run, replica: int) -> None:
        self._due.pop(replica, None)
        if replica not in run.members:
            return
        before = set(run.members)
        run.members.discard(replica)
        if not run.members:
            run.stall = math.inf                            # until somebody is back; then from the last save
            return
        self.mend(run, replica, before)
        run.stall = self.pause()

    def mend(self, run: Run, replica: int, before: set[int]) -> None:
        """What becomes of the step in hand."""
        run.again()

    def pause(self) -> float:
        """How long everybody stands still."""
        return self.plan.costs.detection + self.plan.costs.reform

    def back(self, run: Run, replica: int) -> None:
        if self.rejoin:
            delay = self.plan.costs.replica_restart if run.members else self.plan.costs.restart
            self._due[replica] = run.env.now + delay
            run.later(delay, replica)

    def ready(self, run: Run, replica: int) -> None:
        if run.env.now < self._due.get(replica, math.inf) - EDGE:
            return                                          # it failed again meanwhile
        del self._due[replica]
        first = not run.members
        run.members.add(replica)
        if first:
            run.roll_back()
            run.stall = 0.0
        else:
            self.enter(run)
            run.stall += self.plan.costs.join

    def enter(self, run: Run) -> None:
        """A replica comes in: from the next step on."""
        untouched = run.left > run.pace - EDGE
        run.repace()
        if untouched:
            run.left = run.pace


class InStep(Rejoining):
    """This project."""

    def __init__(self, plan: Plan, chosen: Policy, *, rejoin: bool = True) -> None:
        super().__init__(plan, chosen, rejoin=rejoin)
        self.name = f"this project, {chosen.name}" + ("" if rejoin else ", no rejoin")
        self._hand: tuple[int, dict[int, Indices], dict[int, Indices]] = (-1, {}, {})

    def mend(self, run: Run, replica: int, before: set[int]) -> None:
        job = self.plan.job
        if run.left > run.pace - EDGE and self._hand[0] != run.step:
            run.again()                                     # nobody had begun: the plan of the new view
            return
        work, shadow = self.in_hand(run, before)
        reducing = run.left <= job.reduction + EDGE
        former = self.quotas.busy({m: i for m, i in work.items() if m != replica}, shadow)
        extra = self.reassign(work, shadow, replica, run)
        if reducing:
            more = self.quotas.busy(extra, {})
        else:
            more = self.quotas.busy(work, shadow) - former
        self._hand = (run.step, work, shadow)
        run.left += max(0.0, more)
        run.repace()

    def in_hand(self, run: Run, members: set[int]) -> tuple[dict[int, Indices], dict[int, Indices]]:
        """Who owes what of the step in hand, reassignments included."""
        step, work, shadow = self._hand
        if step != run.step:
            work, shadow = self.quotas.policy.plan(self.quotas.vector(members), run.step, self.plan.job.microbatches)
        return dict(work), dict(shadow)

    def reassign(self, work: dict[int, Indices], shadow: dict[int, Indices], dead: int, run: Run) -> dict[int, Indices]:
        """The dead replica's share goes to spares that did the same, or to the others; what these get on top."""
        shadow.pop(dead, None)
        lost = set(work.pop(dead, ()))
        for spare, theirs in sorted(shadow.items()):
            if theirs and lost.issuperset(theirs):
                lost -= set(theirs)
                work[spare] = shadow.pop(spare)
        able = [m for m in sorted(run.members) if not shadow.get(m)]
        done = {m: len(i) for m, i in work.items()}
        extra = self.quotas.policy.share(sorted(lost), able, self.quotas.vector(run.members), done)
        for member, indices in extra.items():
            work[member] = (*work.get(member, ()), *indices)
        assert sum(map(len, work.values())) == self.plan.job.microbatches, "B is held"
        return extra


class DropShrink(Rejoining):
    """As torchft: every survivor throws the step away."""

    name = "drop and shrink"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, kept_quotas(plan.job))


class ReplicaRejoin(Rejoining):
    """As FT-HSDP."""

    name = "replica rejoin"

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan, kept_quotas(plan.job))

    def mend(self, run: Run, replica: int, before: set[int]) -> None:
        run.repace()

    def pause(self) -> float:
        return self.plan.costs.stall


class CheckpointRestart:
    """Everybody starts again from what was saved."""

    name = "checkpoint-restart"

    def __init__(self, plan: Plan) -> None:
        self.plan, self.quotas = plan, Quotas(plan.job, kept_quotas(plan.job))
        self.constant = math.isfinite(plan.failures.repair) or math.isinf(plan.mtbf)

    def begin(self, run: Run) -> None:
        run.save_every, run.save_cost = save_interval(self.plan, self.plan.costs.save), self.plan.costs.save

    def step_time(self, run: Run) -> float:
        return self.quotas.step(run.members)[0]

    def step_tokens(self, run: Run) -> float:
        job = self.plan.job
        return job.tokens_per_step * self.quotas.step(run.members)[1] / job.microbatches

    def failed(self, run: Run, replica: int) -> None:
        run.members.discard(replica)
        if run.members:
            self.rewind(run)
        self.restart(run)

    def rewind(self, run: Run) -> None:
        run.roll_back()

    def restart(self, run: Run) -> None:
        run.stall = math.inf if run.awaited or not run.members else self.pause()

    def pause(self) -> float:
        return self.plan.costs.detection + self.plan.costs.restart

    def back(self, run: Run, replica: int) -> None:
        run.members = set(range(self.plan.job.replicas)) - run.down
        self.rewind(run)
        self.restart(run)

    def ready(self, run: Run, replica: int) -> None:
        raise AssertionError("nothing was asked for")


class InMemory(CheckpointRestart):
    """Saves go to peers' memory and hold everybody up for `memory_save`, spread over the steps between two of them."""

    name = "in-memory checkpoints"

    def begin(self, run: Run) -> None:
        save_rarely(run, self.plan)

    def step_time(self, run: Run) -> float:
        return super().step_time(run) + self.plan.costs.memory_save / self.plan.costs.memory_interval

    def rewind(self, run: Run) -> None:
        lost = run.step % self.plan.costs.memory_interval
        run.rolled_back += lost
        run.step, run.tokens, run.saving = run.step - lost, run.tokens - lost * self.step_tokens(run), 0.0
        run.saved = min(run.saved, run.step)
        run.again()

    def pause(self) -> float:
        return self.plan.costs.detection + self.plan.costs.memory_restart


class SpareSwap(CheckpointRestart):
    """A spare takes over where the failed machine was."""

    name = "spares, swapped in"

    def begin(self, run: Run) -> None:
        save_rarely(run, self.plan)

    def rewind(self, run: Run) -> None:
        run.saving = 0.0
        run.again()

    def pause(self) -> float:
        return self.plan.costs.detection + self.plan.costs.swap


def kept_quotas(job: Job) -> Policy:
    """Every replica keeps the microbatches it had, whoever else is gone."""
    if job.microbatches % job.replicas:
        raise ValueError(f"strategies that keep each replica's microbatches need B to be a multiple of the replicas: "
                         f"{job.microbatches} is none of {job.replicas}")
    return policy("shrinking", replicas=job.replicas, microbatches=job.microbatches)


Make = Callable[[Plan], Strategy]


def in_step(name: str, *, rejoin: bool = True) -> Make:
    """This project under the policy of that name."""
    return lambda plan: InStep(plan, policy(name, replicas=plan.job.replicas, microbatches=plan.job.microbatches), rejoin=rejoin)


WAYS: dict[str, Make] = {
    "balanced": in_step("balanced"), "balanced-no-rejoin": in_step("balanced", rejoin=False),
    "speed": in_step("speed"), "speed-no-rejoin": in_step("speed", rejoin=False),
    "roles": in_step("roles"), "roles-no-rejoin": in_step("roles", rejoin=False),
    "checkpoint-restart": CheckpointRestart, "in-memory": InMemory, "drop-and-shrink": DropShrink,
    "replica-rejoin": ReplicaRejoin, "spares": SpareSwap,
}
"""By the name that the command takes."""
