"""Which replicas are started again, and when. Pure: the end of one life of a replica in, an answer out.

Rules, in this order:

1. Without `--restart` nobody is.
2. Who finished, or left because it was told to go, is not: somebody wanted it so.
3. A script that failed by itself before its replica had ever joined the run is not: it would fail again.
4. Nobody is started again for a run that has ended, or has nobody left who holds the parameters: a joiner could get them
   from nobody.
5. A replica may be started again `budget` times without a step committed in between. One that commits has its whole
   budget again; one that has used it up is left out for good.
6. The pause before the next start doubles with each start that brought nothing: `FIRST` seconds, at most `LONGEST`.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

FIRST: Final = 0.5
LONGEST: Final = 30.0


@dataclass(frozen=True, kw_only=True)
class Life:
    """How one life of a replica ended. `joined`: it was in the run in this life; `committed`: it committed a step in it."""

    replica: int
    how: Literal["finished", "told", "evicted", "failed", "killed"]
    joined: bool = False
    committed: bool = False


@dataclass(frozen=True)
class Again:
    """Start the replica again in `pause` seconds; it is the `count`-th start since it last committed a step."""

    replica: int
    pause: float
    count: int


@dataclass(frozen=True)
class Out:
    """The replica is not started again. `reason` is "" where nobody expects it to be."""

    replica: int
    reason: str = ""


@dataclass
class Restarts:
    """The books of one launch. `budget`: starts of a replica without a committed step; 0: none."""

    budget: int
    used: dict[int, int] = field(default_factory=dict)      # replica -> starts since it last committed
    known: set[int] = field(default_factory=set)            # replicas that had joined at some time

    def over(self, life: Life, *, going_on: bool, held: bool) -> Again | Out:
        """`going_on`: the run has not ended; `held`: another living replica holds the parameters."""
        replica = life.replica
        if life.joined:
            self.known.add(replica)
        if life.committed:
            self.used[replica] = 0
        if not self.budget or not going_on or life.how in ("finished", "told"):
            return Out(replica)
        if life.how == "failed" and replica not in self.known:
            return Out(replica, "its script failed before it had joined the run")
        if not held:
            return Out(replica, "nobody is left who holds the parameters")
        count = self.used.get(replica, 0) + 1
        if count > self.budget:
            times = "once" if self.budget == 1 else f"{self.budget} times"
            return Out(replica, f"it was started again {times} and has not committed a step since")
        self.used[replica] = count
        return Again(replica, min(LONGEST, FIRST * 2.0 ** (count - 1)), count)
