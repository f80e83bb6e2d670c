"""Worlds in which something happens in every schedule that the plain world never has."""
from __future__ import annotations

import random
from dataclasses import replace

from recover.simulate.world import World
from recover.workload import Balanced, Spares, SpeedWeighted


class Preempted(World):
    """The whole job is told to go, one after another, with everything else going on."""

    def __init__(self, seed, *rest):
        super().__init__(seed, *rest)
        self.budget, self.poison = dict(self.budget, preempt=1), set()      # a killer would stop it before it is told to


class Floored(World):
    """Too few members are left, some time; replicas join until there are enough again."""

    below = "wait"

    def __init__(self, seed, *rest):
        super().__init__(seed, *rest)
        floor = random.Random(seed).randint(2, self.size)
        self.job = replace(self.job, floor=floor, below=self.below)
        self.budget = dict(self.budget, leave=0, crash=0, join=8 if self.below == "wait" else 1)   # more than may be lost


class Stopping(Floored):
    """The same, but the job stops."""

    below = "stop"


class Measured(World):
    """Members measure another speed in every step, and work in proportion."""

    def __init__(self, seed, *rest):
        super().__init__(seed, *rest)
        self.job = replace(self.job, policy=SpeedWeighted())

    def speed(self, member, step):
        return 1.0 + (5 * member + 3 * step) % 4


class Warm(World):
    """Spares without work, that take over what the dead leave."""

    def __init__(self, seed, *rest):
        super().__init__(seed, *rest)
        spares = random.Random(seed).randint(1, self.size - 1)
        self.job = replace(self.job, policy=Spares(Balanced(), spares, self.size))
