"""The replicas of one launch: their processes, life after life, and what their events say of them."""
from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from recover.launch.glimpse import Glimpse, glimpse
from recover.launch.output import Source
from recover.launch.reaper import Child
from recover.launch.restarts import Life
from recover.launch.verdict import LEFT, ReplicaEnd

LAST_WORDS: Final = 0.5
"""Seconds that the last words of a failed rank may take to be read."""


@dataclass(eq=False)
class Rank:
    """One rank's process. `errors`: what it prints to its standard error."""

    replica: int
    rank: int
    child: Child
    errors: Source


@dataclass(eq=False)
class Replica:
    """One replica: the ranks of its present (or last) life, and how often it was started again."""

    number: int
    events: Path
    run_id: str
    ranks: list[Rank] = field(default_factory=list)
    starts: int = 0

    @property
    def over(self) -> bool:
        return all(rank.child.code is not None for rank in self.ranks)

    @property
    def finished(self) -> bool:
        return all(rank.child.code == 0 for rank in self.ranks)

    def glimpse(self) -> Glimpse:
        """What the events of this life say."""
        return glimpse(self.events, self.run_id, self.number, [rank.child.pid for rank in self.ranks])

    def ever_joined(self) -> bool:
        return glimpse(self.events, self.run_id, self.number).joined

    def holds(self) -> bool:
        """Whether it lives and has the parameters of a run that has begun: a first member, or a joiner that has committed."""
        return not self.over and (self.starts == 1 or self.glimpse().last_step is not None)

    def life(self) -> Life:
        """How the life that is over ended."""
        seen = self.glimpse()
        return Life(replica=self.number, how=self._how(seen), joined=seen.joined, committed=seen.last_step is not None)

    def _how(self, seen: Glimpse) -> Literal["finished", "told", "evicted", "failed", "killed"]:
        codes = [rank.child.code or 0 for rank in self.ranks if not rank.child.ended] or [-9]
        if any(code < 0 for code in codes):
            return "killed"
        if any(code not in (0, LEFT) for code in codes):
            return "failed"
        if not any(codes):
            return "finished"
        return "told" if seen.status == "left" else "evicted"

    def end(self) -> ReplicaEnd:
        """For the verdict."""
        seen = self.glimpse()
        culprit = next((rank for rank in self.ranks if (rank.child.code or 0) not in (0, LEFT) and not rank.child.ended), None)
        if culprit is not None:
            culprit.errors.ended.wait(LAST_WORDS)
        return ReplicaEnd(
            replica=self.number, codes=tuple(rank.child.code or 0 for rank in self.ranks),
            ended=all(rank.child.ended for rank in self.ranks if rank.child.code), joined=seen.joined or self.ever_joined(),
            last_step=seen.last_step, members=seen.members, message=seen.message, restarts=self.starts - 1,
            said=culprit.errors.last if culprit is not None else "")
