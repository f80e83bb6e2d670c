"""What a run's end amounts to. Pure: the ends of all replicas in, an exit code and a message out.

    code  meaning
    0     at least one replica finished, every planned fault happened, and no replica of the last view failed
    2     bad usage: nothing was started
    3     a replica ended before any replica had joined the run (its script failed; the message names it)
    4     all replicas died or failed; the message says how far the run got
    5     the run finished, but a planned fault did not happen
    6     the run finished, but a replica that is in the last view failed
    7     the coordinator did not start
    75    all replicas had to go (told to, or too few were left), and did so in order: start the run again to go on
    128+n ended by signal n: 130 for SIGINT, 143 for SIGTERM

A replica that was killed by a signal, or that left (code 75, EX_TEMPFAIL: evicted, or asked to leave), is a casualty
and no failure, if others finish. So is one that failed, when the others went on without it.
"""
from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from recover.errors import LEFT

OK: Final = 0
USAGE: Final = 2
NOT_JOINED: Final = 3
ALL_DEAD: Final = 4
FAULT_MISSED: Final = 5
MEMBER_FAILED: Final = 6
NO_COORDINATOR: Final = 7
__all__ = ["ALL_DEAD", "FAULT_MISSED", "LEFT", "MEMBER_FAILED", "NOT_JOINED", "NO_COORDINATOR", "OK", "USAGE", "ReplicaEnd",
           "Verdict", "describe", "judge"]


@dataclass(frozen=True, kw_only=True)
class ReplicaEnd:
    """The end of one replica. `codes`: exit code per rank, negative for a signal."""

    replica: int
    codes: tuple[int, ...]
    ended: bool = False                 # by the launcher, for whatever reason
    joined: bool = False
    last_step: int | None = None        # the last one that it committed, as far as its events say
    members: tuple[int, ...] | None = None      # of its last view, likewise
    message: str = ""                   # what its events say of its end
    said: str = ""                      # the last line of its output, an exception if there was one
    restarts: int = 0                   # how often it was started again

    @property
    def finished(self) -> bool:
        return all(code == 0 for code in self.codes)

    @property
    def failed(self) -> bool:
        """By its own doing: neither a signal nor the code of one that left."""
        return not self.ended and any(code > 0 and code != LEFT for code in self.codes)


@dataclass(frozen=True)
class Verdict:
    code: int
    message: str


def describe(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return {0: "finished", LEFT: "left the run"}.get(code, f"failed with exit code {code}")
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def judge(ends: Sequence[ReplicaEnd], missed: Sequence[str] = (), *, interrupted: int | None = None,
          coordinator: str | None = None) -> Verdict:
    """The verdict. `missed`: planned faults that did not happen, in words; `coordinator`: why it never started."""
    if _all_left(ends):
        why = next((end.message for end in ends if end.message), "") or f"they left {_reached(ends)}"
        return Verdict(LEFT, f"all replicas had to go: {why}. Start the run again to go on")
    if interrupted is not None:
        return Verdict(128 + interrupted, f"ended by {signal.Signals(interrupted).name} {_reached(ends)}")
    if coordinator is not None:
        return Verdict(NO_COORDINATOR, f"the coordinator did not start: {coordinator}")
    finished = [end for end in ends if end.finished]
    if len(finished) < len(ends) and not any(end.joined for end in ends):
        return Verdict(NOT_JOINED, _unjoined(ends))
    if not finished:
        return Verdict(ALL_DEAD, f"all replicas are gone {_reached(ends)}: {_causes(ends)}" + _and_missed(missed))
    members = _last_view(finished)
    failed = [end for end in ends if end.failed and (members is None or end.replica in members)]
    if failed:
        return Verdict(MEMBER_FAILED, f"the run finished, but in its last view {_causes(failed)}" + _and_missed(missed))
    if missed:
        return Verdict(FAULT_MISSED, f"the run finished{_and_missed(missed)}")
    lost = len(ends) - len(finished)
    return Verdict(OK, f"finished with {len(finished)} of {len(ends)} replicas {_reached(ends)}"
                       + (f"; {_causes([end for end in ends if not end.finished])}" if lost else ""))


def _all_left(ends: Sequence[ReplicaEnd]) -> bool:
    """Nobody finished, and whoever was in the last view left in order."""
    joined = [end for end in ends if end.joined]
    if not joined or any(end.finished for end in ends):
        return False
    members = _last_view(joined)
    last = [end for end in joined if members is None or end.replica in members]
    return bool(last) and all(LEFT in end.codes and set(end.codes) <= {0, LEFT} for end in last)


def _last_view(finished: Sequence[ReplicaEnd]) -> tuple[int, ...] | None:
    known = [end for end in finished if end.members is not None]
    return max(known, key=lambda end: -1 if end.last_step is None else end.last_step).members if known else None


def _reached(ends: Sequence[ReplicaEnd]) -> str:
    steps = [end.last_step for end in ends if end.last_step is not None]
    return f"after step {max(steps)}" if steps else "without a committed step"


def _causes(ends: Sequence[ReplicaEnd]) -> str:
    return "; ".join(f"replica {end.replica} {_cause(end)}" for end in ends)


def _cause(end: ReplicaEnd) -> str:
    if end.ended:
        return "was ended by the launcher"
    worst = next((code for code in end.codes if code not in (0, LEFT)), None)
    if worst is None:
        worst = next((code for code in end.codes if code), 0)
    again = {0: "", 1: ", started again once"}.get(end.restarts, f", started again {end.restarts} times")
    return describe(worst) + (f" ({end.said})" if worst > 0 and end.said else "") + again


def _unjoined(ends: Sequence[ReplicaEnd]) -> str:
    guilty = [end for end in ends if not end.finished and not end.ended] or [end for end in ends if not end.finished]
    return (f"before any replica had joined the run, {_causes(guilty)}. Its own output says why; "
            f"a script joins with recover.join()")


def _and_missed(missed: Sequence[str]) -> str:
    return f", but planned faults did not happen: {'; '.join(missed)}" if missed else ""
