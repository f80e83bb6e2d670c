"""MPI with User-Level Failure Mitigation, as messages: lanes between processes, and nothing that waits.

* Every call to MPI happens on the communication thread, and none of them blocks: sends and receives are started, and
  tested by a poll of the loop. A dead process ends what is under way with it with MPI_ERR_PROC_FAILED, and nothing else.
* MPI never sees a caller's buffer: messages are made of copies. A message that MPI can't be talked out of (a send to a
  frozen process can't be cancelled) keeps a copy, so nobody waits for it, and a sum is never read once it may change.
* A `Lane` leads to one process for as long as the backend lives. Messages arrive in the order in which they were sent.
  Whoever reads them may leave one where it is (`Hold`): then nothing more is taken, and MPI holds the sender back.
"""
from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from recover.errors import PeerLost

CAPACITY = 260 << 10            # bytes of a message: one chunk of a sum, and what belongs around it
RING = 4                        # receives posted per lane
WINDOW = 4                      # messages under way per lane before more are made
TAG = 29_000                    # + position: our messages on MPI_COMM_WORLD

_lock = threading.Lock()


class Hold(Exception):
    """The reader can't take this message yet."""


def start() -> Any:
    """`mpi4py.MPI`, initialised for several threads. ValueError if it is not there, or can't survive a death."""
    with _lock:
        try:
            import mpi4py
        except ImportError:
            raise ValueError('the backend "ulfm" needs MPI: pip install "recover-training[ulfm]"') from None
        mpi4py.rc.initialize = mpi4py.rc.finalize = False       # finalising waits for the dead
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ValueError(f'the backend "ulfm" found no MPI library (pip install "recover-training[ulfm]"): {error}') \
                from None
        if not MPI.Is_initialized():
            MPI.Init_thread(MPI.THREAD_MULTIPLE)
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise ValueError("MPI was initialised without MPI_THREAD_SERIALIZED: let recover.join initialise it")
        world = MPI.COMM_WORLD
        world.Set_errhandler(MPI.ERRORS_RETURN)
        try:
            world.Get_failed().Free()
        except (NotImplementedError, MPI.Exception):
            raise ValueError("this MPI has no User-Level Failure Mitigation (Open MPI 5 has it)") from None
        return MPI


class Lane:
    """Messages to and from process `rank` of MPI_COMM_WORLD. `read(message)` takes one in; it may raise Hold."""

    def __init__(self, mpi: Any, rank: int, tag: int, read: Callable[[Lane, memoryview], None]) -> None:
        self.rank, self.failure = rank, ""
        self._mpi, self._tag, self._read = mpi, tag, read
        self._incoming: deque[tuple[Any, bytearray]] = deque()
        self._outgoing: deque[tuple[Any, bytes]] = deque()
        self._length: int | None = None                 # of the message at the head, which is held
        for _ in range(RING):
            self._post(bytearray(CAPACITY))

    @property
    def free(self) -> bool:
        """Whether one more message would not have to wait for others."""
        return len(self._outgoing) < WINDOW

    @property
    def busy(self) -> bool:
        """Whether messages are under way."""
        return bool(self._outgoing)

    def send(self, message: bytes) -> None:
        """Start it."""
        if self.failure:
            return
        try:
            request = self._mpi.COMM_WORLD.Isend([message, self._mpi.BYTE], dest=self.rank, tag=self._tag)
        except self._mpi.Exception as error:
            self._fail(error)
            return
        self._outgoing.append((request, message))

    def poll(self) -> bool:
        """Take in what has come, forget what has gone; whether there was any of it. `failure` is set if the peer is dead."""
        moved = False
        if self.failure:
            return False
        try:
            while self._outgoing and self._outgoing[0][0].Test():
                self._outgoing.popleft()
                moved = True
            for _ in range(RING):
                if not self._take():
                    break
                moved = True
        except self._mpi.Exception as error:
            self._fail(error)
        return moved

    def close(self) -> None:
        """Take back the receives; what is being sent is left to MPI."""
        incoming, self._incoming = self._incoming, deque()
        self.failure = self.failure or "the backend is closed"
        for request, _ in incoming:
            try:
                request.Cancel()
                request.Free()
            except self._mpi.Exception:                 # it has ended by itself
                pass

    def _take(self) -> bool:
        if self._length is None:
            status = self._mpi.Status()
            if not self._incoming[0][0].Test(status):
                return False
            self._length = status.Get_count(self._mpi.BYTE)
        buffer = self._incoming[0][1]
        try:
            self._read(self, memoryview(buffer)[:self._length])
        except Hold:
            return False
        self._length = None
        self._incoming.popleft()
        self._post(buffer)
        return True

    def _post(self, buffer: bytearray) -> None:
        request = self._mpi.COMM_WORLD.Irecv([buffer, self._mpi.BYTE], source=self.rank, tag=self._tag)
        self._incoming.append((request, buffer))

    def _fail(self, error: Any) -> None:
        dead = error.Get_error_class() == self._mpi.ERR_PROC_FAILED
        self.failure = "its process ended (MPI_ERR_PROC_FAILED)" if dead else f"MPI failed: {error.Get_error_string()}"

    def loss(self, peer: int) -> PeerLost:
        """What to raise for member `peer`, which is at the other end."""
        assert self.failure
        return PeerLost(self.failure, peer)
