"""What can go wrong, and who is to blame.

A user's mistake raises `ValueError` (or `TypeError`, `RuntimeError` for calls at the wrong moment) and says what to
change. What the world does to a run raises one of these; a training script never sees those marked *inside*, since the
run recovers from them by itself::

    RecoverError
    |-- PeerLost            inside   a collective ended without a result: its output is garbage, its input untouched
    |-- ViewChanged         inside   an exchange was overtaken by a newer view
    |-- CoordinatorLost     inside   the connection to the coordinator broke; it is being renewed
    |-- WireError           inside   a peer or a stranger sent what no member would send; its connection is dropped
    |-- JoinRefused                  the coordinator did not let this rank in, and says why
    |-- LeftRun                      this rank is no part of the run any more
    |   |-- ReplicaBroken            a rank of this replica died: the others leave with it
    |   `-- Evicted                  the others went on without this replica
    |-- Stopped                      the run ended without finishing (nobody level is left, the launcher said so, ...)
    |-- Poisoned                     a microbatch kills whoever computes it
    |-- NotFinite                    NaN or inf in a gradient: step, microbatch and parameter
    |-- LateGradient                 a gradient arrived after its bucket had left
    |-- WorkerLost                   a data loader's worker process died
    |-- Diverged                     replicas that must be equal are not (invariant I5)
    |-- CheckpointDamaged            no checkpoint of the directory can be read, and why
    `-- FaultMissed                  a planned fault did not happen

`ReplicaBroken` and `Evicted` are `SystemExit`s too: a script that does not catch them ends with exit code `LEFT`, which tells
launchers "left the run, and may be started again" from a failure. So is `Poisoned`, with `POISONED`. `Left` is no error at
all: it is how `run.steps` ends a script whose replica was told to go.
"""
from __future__ import annotations

from typing import Final

LEFT: Final = 75
"""Exit code of a rank that left the run or was evicted: EX_TEMPFAIL."""
POISONED: Final = 65
"""Exit code of a rank of a run that a microbatch has stopped: EX_DATAERR."""


class RecoverError(Exception):
    """Base of everything that the world does to a run."""


class PeerLost(RecoverError):
    """A collective ended without a result; `peer` is the member to blame where that is known.

    `unheard`: members that this rank itself could not reach, or did not hear, over their data connections.
    """

    def __init__(self, reason: str, peer: int | None = None, unheard: tuple[int, ...] = ()) -> None:
        super().__init__(reason if peer is None else f"peer {peer}: {reason}")
        self.reason = reason
        self.peer = peer
        self.unheard = unheard


class ViewChanged(RecoverError):
    """An exchange was overtaken by a newer view."""


class CoordinatorLost(RecoverError):
    """The connection to the coordinator broke."""


class WireError(RecoverError):
    """Bytes that no member of this run would send."""


class JoinRefused(RecoverError):
    """The coordinator did not let this rank in."""


class LeftRun(RecoverError, SystemExit):
    """This rank is no part of the run any more. Not caught, it ends the process with `LEFT`."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.code = LEFT


class ReplicaBroken(LeftRun):
    """A rank of this replica died: the others leave with it."""


class Evicted(LeftRun):
    """The others went on without this replica."""


class Stopped(RecoverError):
    """The run ended without finishing."""


class Poisoned(RecoverError, SystemExit):
    """A microbatch kills whoever computes it. Not caught, it ends the process with `POISONED`."""

    def __init__(self, step: int, index: int) -> None:
        super().__init__(step, index)
        self.step, self.index, self.code = step, index, POISONED

    def __str__(self) -> str:
        return (f"two replicas have died while they computed microbatch {self.index} of step {self.step}, after one that had "
                f"it to compute: look at its samples. To go on without it, join with skip=[({self.step}, {self.index})], or with "
                'poison="skip"')


class NotFinite(RecoverError):
    """NaN or inf in a gradient."""


class LateGradient(RecoverError):
    """A gradient arrived after its bucket had left."""


class WorkerLost(RecoverError):
    """A data loader's worker process died."""


class Diverged(RecoverError):
    """Replicas that must be equal are not (I5)."""


class CheckpointDamaged(RecoverError):
    """What was written is not what is there."""


class FaultMissed(RecoverError):
    """A planned fault did not happen."""


class Left(SystemExit):
    """This replica was told to go and has gone in order: the process ends with `LEFT`, after its `finally` clauses."""

    def __init__(self, reason: str) -> None:
        super().__init__(LEFT)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason
