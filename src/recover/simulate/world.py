"""What is true in a simulated run: who lives, what the network carries, what was committed.

The world runs the project's own `protocol/` code. Each position of each replica is a `recover.simulate.actor.Actor`
around a `Position`; `recover.simulate.protocol.run` advances one at random. Chance decides everything else, from one
seed: who dies (positions of a replica die alone, the rest of it lingers), who freezes and wakes up late, which connections
break though nobody died, who joins (by a view change or with the fence) or is told to leave, when news arrive, and
when the coordinator crashes and comes back with nothing.

A collective succeeds only if every member contributed; once anyone died or gave it up, each of the others may or may
not get the result. Checked after every event: I1 (each bucket sums microbatches 0..B-1 once each), I2 (a forwarded sum
is the sum of the receiver's peers; all who commit a bucket and finish committed the same), I3 (no schedule runs
forever; whoever finishes has committed every step from its entry to its exit), I4 (a view id names one membership, and
only its members contribute in it). Also: all members plan a step from the same vector, and start from the same parameters.
"""
from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from recover.protocol.coordinator import Announcement, Answered, Coordinator
from recover.protocol.decision import Job
from recover.protocol.messages import Endpoint, Report, ViewId
from recover.workload.balanced import Balanced
from recover.workload.policy import Plan, Policy

Cell = tuple[int, int, int]
"""(step, position, bucket)"""
Sum = tuple[tuple[int, tuple[int, ...]], ...]
"""What a reduced bucket contains: (member, its microbatches), sorted."""


class Violation(AssertionError):
    """An invariant was broken."""


def check(condition: bool, *what: object) -> None:
    if not condition:
        raise Violation(*what)


@dataclass
class Op:
    """One collective: who must contribute, who has, and whether it can still succeed for certain."""

    members: frozenset[int]
    given: dict[int, Any] = field(default_factory=dict)
    broken: bool = False

    def whole(self) -> bool:
        return self.given.keys() == self.members


class Shadowed:
    """A policy of the simulation: `Balanced`, with the last `spares` members shadowing the first ones (as in Roles)."""

    name, constant = "shadowed", True

    def __init__(self, spares: int) -> None:
        self.spares, self.inner = spares, Balanced()

    def plan(self, vector: dict[int, float], step: int, total: int) -> Plan:
        able = [m for m in sorted(vector) if vector[m] > 0]
        kept = able[:max(1, len(able) - self.spares)]
        work = {m: tuple(range(total))[n::len(kept)] for n, m in enumerate(kept)}
        return Plan(work, {m: work[kept[n % len(kept)]] for n, m in enumerate(able[len(kept):])})

    def share(self, lost: list[int], able: list[int], vector: dict[int, float], done: dict[int, int]) -> dict[int, Any]:
        return self.inner.share(lost, able, vector, done)


class World:
    """Everything that actors share. The names of the budgets are the kinds of trouble."""

    def __init__(self, seed: int, positions: int | None = None, coordinator: type[Coordinator] = Coordinator,
                 policy: Policy | None = None) -> None:
        shape = random.Random(seed * 7919 + 1)
        self.random = random.Random(seed)
        self.size, drawn, self.buckets, steps = (shape.randint(2, 5), shape.randint(1, 3), shape.randint(1, 3),
                                                 shape.randint(1, 6))
        self.positions = positions or drawn
        self.learned = shape.randint(1, 3)                  # buckets after step 0 taught their order
        total = shape.randint(1, 3) * self.size + shape.randint(0, 3)
        spares = shape.choice([0, 0, 1, 2])
        self.job = Job(total, steps, policy or Shadowed(spares))     # type: ignore[arg-type]
        self.rate, self.pace = shape.choice([.002, .006, .02]), shape.choice([.4, .1, .03])     # of events, of news
        self.budget = dict(kill=shape.randint(0, self.size - 1), join=shape.choice([0, 0, 1, 2]),
                           freeze=shape.choice([0, 0, 1]), leave=shape.choice([0, 0, 1, 2]),
                           crash=shape.choice([0, 0, 1, 2]), flap=shape.choice([0, 1, 3, 8]), preempt=0)
        self.chunk = shape.choice([1, 1, 1, 2, 3])          # microbatches that a replica computes at one go
        self.checkpoints = self.draw_checkpoints(seed)
        self.poison: set[tuple[int, int]] = set()           # microbatches that kill whoever computes them
        self.draw_names(seed)
        self.start: dict[int, int] = {}                     # member -> the step at which it began
        self.ops: dict[tuple[Any, ...], Op] = {}
        self.inner: dict[tuple[int, int], tuple[str, dict[int, Any]]] = {}
        self.committed: dict[Cell, dict[int, Sum]] = {}
        self.plans: dict[tuple[ViewId, int], object] = {}
        self.parameters: dict[int, int] = {}                # member -> whose first parameters it took over
        self.dead: set[tuple[int, int]] = set()
        self.doomed: set[int] = set()                       # replicas with a dead position
        self.frozen: set[int] = set()
        self.fragile: set[int] = set()                      # may be dropped though alive
        self.told: set[int] = set()                         # told to leave
        self.preempted: set[int] = set()                    # members that are still to be told that the whole job goes
        self.entry = dict.fromkeys(range(self.size), 0)
        self.last: dict[int, int] = {}
        self.endings: dict[int, str] = {}                   # why whoever went early did
        self.finished: set[int] = set()
        self.final: set[int] | None = None
        self.level = set(range(self.size))
        self.up, self.kind = True, coordinator
        self.incarnation = 0
        self.coordinator = coordinator(self.size)
        self.answers: dict[ViewId, dict[int, Report]] = {}
        for m in range(self.size):
            self.coordinator.joined(m, self.endpoints(m))

    def endpoints(self, member: int) -> tuple[Endpoint, ...]:
        return (Endpoint("host", member),)

    def draw_checkpoints(self, seed: int) -> dict[int, set[int]]:
        """member -> the steps whose checkpoints it can read: one that all can, and some that others can't. In two of three
        schedules there is none, and the run begins at step 0."""
        shape = random.Random(seed * 104_729 + 2)
        if shape.random() < 2 / 3:
            return {m: {0} for m in range(self.size)}
        common = shape.randint(0, self.job.steps)
        return {m: {common, *(s for s in range(self.job.steps + 1) if shape.random() < .4)} for m in range(self.size)}

    def draw_names(self, seed: int) -> None:
        """In one of five schedules some microbatches are skipped by agreement. In some, one kills whoever computes it, and
        nothing else does: it takes the first, who told nothing (two, if that one was ahead of the others, who then plan its
        step anew), and two who had taken it over. Nor does the coordinator crash then, and forget what it was told."""
        shape, job = random.Random(seed * 15_485_863 + 3), self.job
        self.job = replace(job, spares_killers=True)
        names = [(step, index) for step in range(1, job.steps) for index in range(job.total)]
        if len(names) < 4:
            return
        skip = frozenset(shape.sample(names, shape.randint(1, 3))) if shape.random() < .2 else frozenset()
        self.job = replace(job, skip=skip, spares_killers=True)
        spares = getattr(job.policy, "spares", 1)           # whoever shadows a microbatch dies of it, too, unannounced
        if self.size >= 5 and not spares and shape.random() < .3:
            self.poison = {shape.choice(names)} - skip
            self.budget |= dict(kill=0, freeze=0, leave=0, crash=0)

    def readable(self, member: int) -> set[int]:
        """Steps after which `member` could begin. Whoever was not there when the run began reads what all can."""
        return self.checkpoints.get(member, set.intersection(*self.checkpoints.values()))

    def count(self, step: int) -> int:
        """Buckets of a step at one position."""
        return self.buckets if step == 0 else self.learned

    def op(self, key: tuple[Any, ...], members: tuple[int, ...]) -> Op:
        op = self.ops.get(key)
        if op is None:
            op = self.ops[key] = Op(frozenset(members))
        check(op.members == frozenset(members), "I4: one view, two memberships", key)
        return op

    def speed(self, member: int, step: int) -> float:
        """What `member` has measured when it commits `step`."""
        return 1.0

    def sound(self) -> set[int]:
        """Members that nothing has happened to yet; schedules leave one of them."""
        return self.level - self.doomed - self.fragile - self.told - self.finished

    # -- the coordinator's surroundings -----------------------------------------------------------------------------
    def deliver(self) -> None:
        """Take what the coordinator sends; members hear of views by looking."""
        for output in self.coordinator.outbox:
            if isinstance(output, Answered):
                self.answers[output.view] = {m: DECODER.decode(p) for m, p in output.payloads.items()}
        self.coordinator.outbox.clear()

    def rebuilding(self) -> bool:
        return self.coordinator.heard is not None

    def crash(self) -> None:
        self.up = False

    def restart(self) -> None:
        """Its supervisor raises the incarnation at every start (`incarnation`); it knows nothing else."""
        self.up = True
        self.incarnation += 1
        self.coordinator = self.kind(self.size, self.incarnation)

    def tick(self) -> None:
        """The coordinator's timers."""
        c, rnd = self.coordinator, self.random
        if c.heard:
            silent = c.silent()
            slow = silent - self.doomed - self.frozen - c.waiting.keys()    # a joiner that never heard of a view has none to say
            newest = c.newest()
            ready = c.heard.keys() & set(newest.members if newest else ()) & self.sound()
            if silent and rnd.random() > (.05 if not slow else .002 if ready else 0):
                return                                      # the grace time isn't over
            self.fragile |= slow                            # late, and dropped though alive
            c.rebuild()
        elif c.heard is None and c.waiting and not c.pending and rnd.random() < .05:
            if rnd.random() < .3:
                c.admit()
            else:
                c.announce_join()
        self.deliver()

    def suspect(self, view: ViewId) -> None:
        if self.up and self.random.random() < .1:
            self.coordinator.suspect(view)
            self.deliver()

    def announce(self, member: int, announcement: Announcement) -> None:
        """Silent until the last of them: the simulation's `tick` decides when the grace time is over."""
        assert self.coordinator.heard is not None
        self.coordinator.heard[member] = announcement


ENCODER, DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Report)
