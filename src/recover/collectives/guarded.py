"""The paper's guarded all-reduce: detect, repair, record, reduce again, until a sum stands that all survivors have.

For comparison with `ulfm`, and for programs that have no coordinator. A run does not use it: there the protocol decides which
sums are whole, and needs no agreement per bucket while nothing fails.

    detect   a point-to-point message of the sum fails (MPI_ERR_PROC_FAILED, or MPI_ERR_REVOKED: somebody else saw it first);
             `MPI_Comm_iagree` then tells all whether *all* have the sum. Without it (`agree=False`) a sum may stand at some
             survivors and not at others
    repair   `MPI_Comm_revoke` wakes everyone, `MPI_Comm_shrink` makes the communicator of the living
    record   who is gone
    reduce   again from the inputs: sums are out of place, in rank order, so no copy of the input had to be kept

Agreement and shrinking wait for every living process of the communicator: a frozen one holds them up until the limit, then
PeerLost is raised, and only `conform` to a view without it helps. All ranks must call the same things in the same order.
"""
from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recover.collectives import mpi
from recover.collectives.operations import ALIGNED, SUMMED, Ordered, raw
from recover.errors import PeerLost

PAUSE = 0.0002                  # seconds between looks at MPI
SLICE, RESULT = 28_001, 28_002  # tags


class Guarded:
    """Sums over a communicator that shrinks. `limit`: seconds without an answer of MPI after which PeerLost is raised."""

    def __init__(self, limit: float, agree: bool = True) -> None:
        """Over all processes of the MPI job. ValueError as for the backend `ulfm`."""
        self._mpi = mpi.start()
        self._limit, self._agree = limit, agree
        self._comm = self._mpi.COMM_WORLD.Dup()
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._pending: list[Any] = []                   # requests of the sum under way: MPI writes into their copies
        self.lost: list[int] = []
        """Ranks in MPI_COMM_WORLD of those that are gone, in the order in which that was found."""

    @property
    def members(self) -> list[int]:
        """The others and us: ranks in MPI_COMM_WORLD, in order."""
        return self._ranks(self._comm)

    def all_reduce(self, source: Tensor, output: Tensor) -> list[int]:
        """Sum `source` of all survivors into `output`; gives back whose terms are in it (ranks in MPI_COMM_WORLD)."""
        if source.dtype not in SUMMED or source.shape != output.shape or source.dtype != output.dtype:
            raise ValueError(f"can't sum {source.dtype} {tuple(source.shape)} into {output.dtype} {tuple(output.shape)}")
        while True:
            whole = self._reduce(source.reshape(-1), output.reshape(-1))
            if not self._agree and whole:
                return self.members
            if self._agree and self._agreed(whole):
                return self.members
            self.repair()

    def repair(self) -> None:
        """Go on with the living."""
        before = self.members
        self._comm.Revoke()
        for request in self._pending:                   # which ends them, one way or another
            try:
                self._finish(request, "a revoked message")
            except self._mpi.Exception:
                pass
        self._pending = []
        fresh = self._shrunk()
        fresh.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._comm = fresh                              # the old one is not freed: that would be collective
        self.lost += [rank for rank in before if rank not in self.members]

    def conform(self, view: Sequence[int]) -> None:
        """Make the members exactly those of a view (ranks in MPI_COMM_WORLD, rising), which all of them call.

        Who lives, but is not in the view, is left out. PeerLost if the view names one that is not here: the view is wrong,
        and whoever made it must hear of that.
        """
        members = self.members
        missing = [rank for rank in view if rank not in members]
        if missing:
            raise PeerLost(f"the view names processes {missing}, but MPI has only {members}", missing[0])
        if list(view) == members:
            return
        group = self._comm.Get_group()
        self._comm = self._comm.Create_group(group.Incl([members.index(rank) for rank in view]))
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)

    def _ranks(self, comm: Any) -> list[int]:
        group, world = comm.Get_group(), self._mpi.COMM_WORLD.Get_group()
        found: list[int] = self._mpi.Group.Translate_ranks(group, list(range(group.size)), world)
        return found

    def _shrunk(self) -> Any:
        """By a thread of its own, since MPI_Comm_shrink waits (and MPI_Comm_ishrink of Open MPI 5.0.11 fails with
        MPI_ERR_INTERN on a revoked communicator)."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(self._comm.Shrink()), daemon=True)
        thread.start()
        thread.join(self._limit)
        if not found:
            raise PeerLost(f"shrinking did not end within {self._limit} s: somebody lives, but does not answer")
        return found[0]

    def _agreed(self, whole: bool) -> bool:
        flag = array("i", [whole])
        try:
            self._finish(self._comm.Iagree(flag), "the agreement")
        except self._mpi.Exception:                     # agreed all the same, but somebody is dead
            return False
        return bool(flag[0])

    def _finish(self, request: Any, what: str) -> None:
        until = time.monotonic() + self._limit
        while not request.Test():
            if time.monotonic() > until:
                raise PeerLost(f"{what} did not end within {self._limit} s: somebody lives, but does not answer")
            time.sleep(PAUSE)

    def _reduce(self, source: Tensor, output: Tensor) -> bool:
        """Slices to their owners, who add them in rank order, and the sums to all. Whether that went through."""
        try:
            count, me = self._comm.size, self._comm.rank
            size = -(-source.numel() // (count * ALIGNED)) * ALIGNED
            cuts = [slice(min(r * size, source.numel()), min((r + 1) * size, source.numel())) for r in range(count)]
            terms = [source[cuts[me]] if r == me else torch.empty_like(source[cuts[me]]) for r in range(count)]
            self._exchange(SLICE, lambda r: source[cuts[r]], lambda r: terms[r])
            Ordered(terms, output[cuts[me]]).add(0, terms[me].nbytes)
            self._exchange(RESULT, lambda r: output[cuts[me]], lambda r: output[cuts[r]])
        except self._mpi.Exception:
            return False
        return True

    def _exchange(self, tag: int, give: Callable[[int], Tensor], take: Callable[[int], Tensor]) -> None:
        """Send `give(r)` to every other rank and receive `take(r)`, through copies: MPI never sees a caller's memory."""
        others = [r for r in range(self._comm.size) if r != self._comm.rank]
        coming = {r: bytearray(take(r).nbytes) for r in others}
        self._pending = [self._comm.Irecv([coming[r], self._mpi.BYTE], source=r, tag=tag) for r in others]
        self._pending += [self._comm.Isend([raw(give(r)).tobytes(), self._mpi.BYTE], dest=r, tag=tag) for r in others]
        while self._pending:                            # all are looked at: a dead rank must not hide behind a slow one
            self._pending = [request for request in self._pending if not request.Test()]
            time.sleep(PAUSE)
        for r in others:
            if coming[r]:
                raw(take(r))[:] = memoryview(coming[r])
