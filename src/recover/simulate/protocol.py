"""`recover simulate protocol`: random failure schedules over the real protocol code (see `world` for what is checked).

One seed is one schedule. `run(seed)` raises `Violation` (or an assertion of the protocol itself) for a broken invariant;
`run_seeds` runs a range on all cores and names the seed that broke, with the command that replays it.
"""
from __future__ import annotations

import gc
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from recover.errors import Poisoned
from recover.protocol.coordinator import Coordinator
from recover.protocol.decision import LESSON
from recover.protocol.messages import NO_VIEW
from recover.protocol.position import Position
from recover.simulate.actor import Actor
from recover.simulate.world import World, check


@dataclass(frozen=True)
class Parts:
    """The classes that a simulation is made of; test doubles replace one to leave a rule out."""

    position: type[Position] = Position
    coordinator: type[Coordinator] = Coordinator
    actor: type[Actor] = Actor
    world: type[World] = World
    verdict: bool = True                                    # whoever is not in the last view is ended


@dataclass
class Schedule:
    """The scheduler of one simulated run."""

    world: World
    parts: Parts
    actors: dict[tuple[int, int], Actor] = field(default_factory=dict)
    running: dict[tuple[int, int], object] = field(default_factory=dict)

    def start(self, m: int, joining: bool = False) -> None:
        for p in range(self.world.positions):
            actor = self.parts.actor(self.world, m, p, joining, self.parts.position)
            self.actors[m, p], self.running[m, p] = actor, actor.run()

    def end(self, m: int, p: int) -> None:
        if self.running.pop((m, p), None):
            self.actors.pop((m, p))
            self.world.dead.add((m, p))
            self.world.doomed.add(m)

    def happens(self, what: str) -> bool:
        world = self.world
        if world.budget[what] and world.random.random() < world.rate:
            world.budget[what] -= 1
            return True
        return False

    def trouble(self) -> None:
        """Kills, freezes, leaves, joins."""
        world, rnd, budget = self.world, self.world.random, self.world.budget
        if not (world.preempted or world.frozen or any(budget.values())):
            return
        if budget["kill"]:
            sound = world.sound()
            victims = sorted(a for a in self.running if a[0] in world.entry and (a[0] not in sound or len(sound) > 1))
            if victims and self.happens("kill"):
                self.end(*rnd.choice(victims))
        sound = world.sound() if budget["freeze"] or budget["leave"] else set()
        if len(sound) > 1 and self.happens("freeze"):
            frozen = {rnd.choice(sorted(sound))}
            world.frozen, world.fragile = world.frozen | frozen, world.fragile | frozen
        elif len(sound) > 1 and self.happens("leave"):
            told = rnd.choice(sorted(sound))
            world.told.add(told)
            self.tell(told)
        if self.happens("preempt"):
            world.preempted = {m for m, _ in self.running}
        for m in sorted(world.preempted) if world.preempted and rnd.random() < .1 else ():
            if rnd.random() < .5:
                world.preempted.discard(m)
                self.tell(m)
        if not world.finished and self.happens("join"):
            self.start(max(world.entry.keys() | {m for m, _ in self.running} | world.doomed) + 1, joining=True)
        if world.frozen:
            world.frozen -= {m for m in sorted(world.frozen) if rnd.random() < .01}

    def tell(self, m: int) -> None:
        """One of its processes is told to go, as the scheduler of a machine does; the others follow."""
        position = m % self.world.positions
        if (m, position) in self.actors:
            self.actors[m, position].position.leave_asked = True

    def coordinate(self) -> None:
        """The coordinator crashes, comes back, notices deaths."""
        world, rnd = self.world, self.world.random
        if world.up and world.budget["crash"] and self.all_know_a_view() and self.happens("crash"):
            world.crash()
        elif not world.up and rnd.random() < .02:
            world.restart()
        c = world.coordinator
        if world.up and not world.rebuilding() and rnd.random() < .05:
            for m in sorted((world.doomed | world.frozen) - c.finished):
                if rnd.random() < (.8 if m in world.doomed else .2):
                    c.lost(m)
            world.deliver()
        if world.up and (c.heard or c.waiting or c.outbox):
            world.tick()

    def all_know_a_view(self) -> bool:
        """Else a run whose first members died while it formed can't form after a crash: a person starts it again."""
        return all(self.actors[a].position.latest > NO_VIEW for a in self.running if a[1] == 0 and a[0] < self.world.size)

    def clean_up(self) -> None:
        """What is left of a broken replica is ended, some time; and whoever is not in the last view (`verdict`)."""
        world = self.world
        if not world.doomed and world.final is None:
            return
        for m in sorted(world.doomed) if world.doomed else ():
            if world.random.random() < .03 and m not in world.finished:
                for p in range(world.positions):
                    self.end(m, p)
        if world.final is not None and self.parts.verdict:
            for a in [a for a in self.running if a[0] not in world.final]:
                self.end(*a)

    def advance(self) -> None:
        frozen = self.world.frozen
        ready = [a for a in self.running if a[0] not in frozen] if frozen else [*self.running]
        if ready:
            actor = self.pick(ready)
            if next(self.running[actor], "ended") == "ended":       # type: ignore[call-overload]
                self.end(*actor)

    def pick(self, ready: list[tuple[int, int]]) -> tuple[int, int]:
        """`random.choice`, number for number, without its many calls: half of a simulation's random numbers are for this."""
        count = len(ready)
        bits, draw = count.bit_length(), self.world.random.getrandbits
        number = draw(bits)
        while number >= count:
            number = draw(bits)
        return ready[number]


def run(seed: int, parts: Parts | None = None, positions: int | None = None) -> int:
    """One schedule to its end; returns how many views it went through."""
    parts = parts or Parts()
    world = parts.world(seed, positions, parts.coordinator)
    schedule = Schedule(world, parts)
    for m in range(world.size):
        schedule.start(m)
    turns = running = 0
    while len(schedule.running) == running or any(m in world.entry for m, _ in schedule.running):
        turns, running = turns + 1, len(schedule.running)   # whoever has entered stays in, so only an end changes that
        check(turns < 200_000, "I3: runs forever")
        schedule.trouble()
        schedule.coordinate()
        schedule.clean_up()
        try:
            schedule.advance()
        except Poisoned as stopped:                         # two died by chance at the one that can't be skipped: lawful
            check((stopped.step, stopped.index) == LESSON, "a run was stopped that was to skip", stopped)
            return views(world)
    verdict(world)
    return views(world)


def views(world: World) -> int:
    return len({key[0] for key in world.ops})


def verdict(world: World) -> None:
    """I2 and I3 over the whole run, for those who finished (a casualty may lawfully have committed other bits)."""
    check(bool(world.finished & world.level), "I3: nobody finished")
    roots = {root for m, root in world.parameters.items() if m in world.finished and root >= 0}
    check(len(roots) <= 1, "I5: replicas start from different parameters", roots)
    starts = {start for m, start in world.start.items() if m in world.finished}
    check(len(starts) <= 1, "I5: replicas begin at different steps", starts)
    for cell, values in world.committed.items():
        check(len({v for m, v in values.items() if m in world.finished}) <= 1, "I2: survivors differ", cell)
    together = {m: world.last[m] for m, why in world.endings.items() if why}
    check(len(set(together.values())) <= 1, "not all ended after the same step", together, world.endings)
    for m in world.finished:
        for step in range(world.entry[m], world.last[m]):
            missed = [(p, b) for p in range(world.positions) for b in range(world.count(step))
                      if m not in world.committed.get((step, p, b), ())]
            check(not missed, "I3: missed a step", m, step, missed)


Positions = int | range | None


def number(positions: Positions, seed: int) -> int | None:
    """Ranks per replica in the schedule of `seed`; None: its own."""
    return positions[seed % len(positions)] if isinstance(positions, range) else positions


def attempt(seed: int, parts: Parts | None, positions: Positions) -> tuple[int, int, str]:
    """(seed, views, what broke or '')."""
    if not gc.isenabled() and seed % 50 == 0:
        gc.collect()
    try:
        return seed, run(seed, parts, number(positions, seed)), ""
    except AssertionError as broken:
        return seed, 0, f"{type(broken).__name__}: {broken}"


def run_seeds(first: int, last: int, *, positions: Positions = None, parts: Parts | None = None, processes: int | None = None,
              progress: Callable[[int], None] | None = None) -> tuple[Counter[int], tuple[int, str] | None]:
    """Seeds [first, last): how many schedules had how many views, and the first seed that broke, with what it broke.

    positions: ranks per replica; a range: the seeds take turns with its numbers; None: the seed says (1 to 3).
    """
    views: Counter[int] = Counter()
    work = partial(attempt, parts=parts, positions=positions)
    with multiprocessing.get_context("fork").Pool(processes or os.cpu_count(), gc.disable) as pool:
        for done, (seed, count, broken) in enumerate(pool.imap(work, range(first, last), chunksize=50), 1):
            if broken:
                return views, (seed, broken)
            views[count] += 1
            if progress:
                progress(done)
    return views, None
