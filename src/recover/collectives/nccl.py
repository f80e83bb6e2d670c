"""The `nccl` backend: sums of CUDA tensors by NCCL, everything else as in `tcp`.

    NcclBackend   a TcpBackend, and for each view a communicator over its members
    NcclReduce    one all_reduce: sockets carry who is ready, and whose turn it is; NCCL carries the numbers
    Communicator  torch's ProcessGroupNCCL, as far as it is used here

Theory of operation
-------------------
* NCCL knows neither failures nor numbers of operations: it matches calls by their order, and a call whose peer is gone waits
  for ever on the GPU. So nothing is given to NCCL before all members have come to the operation (their POSTs, over
  sockets), and all give their operations to NCCL in one order: the lowest member deals out *turns*. Sockets are read
  by the communication thread while the GPU computes, so both messages are hidden like the sum itself.
* A failure is found by the sockets: a process's death, silence, a goodbye, our own revoke. Then the communicator is
  *aborted*, which ends its kernels, and only after that a caller's memory is let go of (`Group.join`). NCCL's own watchdog
  is not asked, and its timeout is longer than any of ours.
* Kernels run on a stream of their own, behind what the launching stream held at the launch (the gradients), so they overlap
  with what is computed meanwhile. The communication thread asks an event now and then whether they are done, and never waits.
* A view's communicator is made in `form`, by a first sum, under its time limit; `abandon` ends that, too.

Sums have the same bits on all members, but the order of additions is NCCL's: `exact` does not depend on it, `fast` is then
repeatable only as far as NCCL is. Half types are summed by NCCL as it does, not in float32.
"""
from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from recover.collectives.contract import Group, Work
from recover.collectives.engine import Engine
from recover.collectives.frames import What
from recover.collectives.groups import EngineGroup, check_number, check_pairs
from recover.collectives.operations import Operation, describe
from recover.collectives.streams import Pieces, Stream
from recover.collectives.tcp import TcpBackend
from recover.config import Timeouts
from recover.errors import PeerLost, WireError
from recover.protocol.messages import View, ViewId

distributed: Any = torch.distributed    # what it offers depends on how it was built
_TURN = struct.Struct("<Q")
MEET = (1 << 64) - 1
"""The operation in which members hear where the store is."""


class Flight(Protocol):
    """Sums that the GPU has been given."""

    def landed(self) -> bool:
        """Whether they are done. Never waits."""


class Communicator(Protocol):
    """Calls of all members in one order. `mark`: what the caller's stream holds by now; `fly`: sum behind that; `abort`: end
    everything, also what waits for a peer; afterwards nothing touches a caller's tensor."""

    def mark(self) -> object: ...

    def fly(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], mark: object) -> Flight: ...

    def abort(self) -> None: ...


# ---------------------------------------------------------------- one sum

class NcclReduce(Operation):
    """Ready when all are; launched when it is its turn; complete when it is launched (and then its `Leg` is waited for)."""

    def __init__(self, op: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], turns: Turns) -> None:
        engine = turns.engine
        super().__init__(op, describe(What.ALL_REDUCE, inputs), [m for m in engine.members if m != engine.me])
        self._turns, self._leads = turns, engine.me == min(engine.members)
        self._turn = bytearray(_TURN.size)
        self._says: list[Stream] = []
        self._launched = False
        self.leg = Leg(turns.communicator, [t.detach() for t in inputs], [t.detach() for t in outputs])

    def start(self) -> dict[int, list[Stream]]:
        if not self._leads:
            self._expect(min(self._turns.engine.members), 0, Pieces([memoryview(self._turn)]))
            return {}
        pieces = Pieces([memoryview(self._turn)])
        streams = {peer: self._stream(0, pieces, 0, urgent=True) for peer in self.peers}
        self._says = [stream for each in streams.values() for stream in each]
        if not self.peers:
            self._turns.take(self._turns.deal(), self)
        return streams

    def posted(self, peer: int, post: Any) -> None:
        super().posted(peer, post)
        if self._leads and not self._silent:
            turn = self._turns.deal()
            self._turn[:] = _TURN.pack(turn)
            for stream in self._says:
                stream.ready = stream.total
            self._turns.take(turn, self)

    def progress(self, peer: int, phase: int) -> None:
        if not self._incomplete:
            self._turns.take(_TURN.unpack(self._turn)[0], self)

    def launch(self) -> None:
        self.leg.launch()
        self._launched = True

    @property
    def complete(self) -> bool:
        return self._launched and super().complete


class Leg:
    """The GPU's part of one sum, as the engine looks at it (`staging.Stage`)."""

    def __init__(self, communicator: Communicator, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._communicator, self._inputs, self._outputs = communicator, inputs, outputs
        self._mark = communicator.mark()
        self._flight: Flight | None = None

    def launch(self) -> None:
        self._flight = self._communicator.fly(self._inputs, self._outputs, self._mark)

    def arrived(self) -> bool:
        """Before the launch: the GPU waits for the inputs by itself."""
        return self._flight is None or self._flight.landed()

    def deliver(self) -> None:
        """The outputs are written where they belong."""

    def settle(self) -> None:
        self._communicator.abort()


class Turns:
    """The one order in which a group's sums are launched. Communication thread."""

    def __init__(self, engine: Engine, communicator: Communicator) -> None:
        self.engine, self.communicator = engine, communicator
        self._dealt = self._next = 0
        self._early: dict[int, NcclReduce] = {}

    def deal(self) -> int:
        """(The lowest member.) The next one."""
        self._dealt += 1
        return self._dealt - 1

    def take(self, turn: int, operation: NcclReduce) -> None:
        """`operation` has this turn: launch what can be launched."""
        if turn < self._next or turn in self._early:
            raise WireError(f"operation {operation.op} was given the turn {turn}, which another one had")
        self._early[turn] = operation
        while (following := self._early.pop(self._next, None)) is not None:
            self._next += 1
            following.launch()
            self.engine.loop.call(partial(self.engine.moved, following))


# ---------------------------------------------------------------- the contract's side

class NcclGroup(EngineGroup):
    """See `Group`. `turns` is set once the communicator stands."""

    turns: Turns | None = None

    def all_reduce(self, op: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor],
                   after: Work[Any] | None = None) -> Work[None]:
        if self.turns is None or not self.flies(inputs):
            return super().all_reduce(op, inputs, outputs, after)
        check_pairs(inputs, outputs)
        operation = NcclReduce(check_number(op), inputs, outputs, self.turns)
        return self._engine.launch(operation, operation.leg, after)

    def flies(self, tensors: Sequence[Tensor]) -> bool:
        """Whether NCCL can sum them: all on a GPU."""
        return bool(tensors) and all(tensor.is_cuda for tensor in tensors)


class NcclBackend(TcpBackend):
    """See `Backend` and `contract.create`. Raises ValueError where there is no GPU, or no NCCL in torch."""

    def __init__(self, *, run_id: str, token: bytes, timeouts: Timeouts, host: str | None = None,
                 toward: str | None = None) -> None:
        self._version = self.version()
        super().__init__(run_id=run_id, token=token, timeouts=timeouts, host=host, toward=toward)
        self.facts = {"nccl": self._version}
        self._communicator: Communicator | None = None
        self._connecting = False                        # sockets have formed the view, NCCL has not yet

    @staticmethod
    def version() -> str:
        if not torch.cuda.is_available() or not distributed.is_nccl_available():
            raise ValueError('backend="nccl" needs a GPU and a torch that was built with NCCL: choose "tcp"')
        return ".".join(map(str, torch.cuda.nccl.version()))    # type: ignore[no-untyped-call]

    def form(self, view: View, position: int, me: int, timeout: float) -> Group:
        until = time.monotonic() + timeout
        if self._engine is not None:                    # first the works have failed, then their kernels are ended
            self._engine.fail(PeerLost("closed by this rank: it forms a newer view"), ours=True)
            self._engine.released.wait(self._timeouts.drain)
        self._end()
        self._connecting = True
        try:
            return self._connected(super().form(view, position, me, timeout), until)
        finally:
            self._connecting = False

    def _connected(self, group: Group, until: float) -> NcclGroup:
        assert isinstance(group, NcclGroup)
        try:
            self._communicator = self.connect(group, max(0.0, until - time.monotonic()))
        except (RuntimeError, TimeoutError) as error:           # of torch, or of the first sum
            group.close()
            raise PeerLost(f"NCCL could not connect the members of view {group.view}: {error}") from None
        group.turns = Turns(group.engine, self._communicator)
        return group

    def abandon(self, newest: ViewId) -> None:
        super().abandon(newest)
        engine = self._engine
        if self._connecting and engine is not None and engine.view < newest:
            engine.fail(PeerLost(f"view {engine.view} is over: there is {newest}"), ours=True)

    def close(self) -> None:
        super().close()
        self._end()

    def connect(self, group: NcclGroup, timeout: float) -> Communicator:
        """A communicator of all members, that has summed once. Raises PeerLost, RuntimeError, TimeoutError."""
        first = min(group.members)
        host = self.endpoint.host
        store = None
        size, rank = len(group.members), group.members.index(group.me)
        limit = timedelta(seconds=max(1.0, timeout))
        if group.me == first:
            store = distributed.TCPStore(host, 0, size, is_master=True, timeout=limit, wait_for_workers=False)
        said = group.gather(MEET, f"{host} {store.port}".encode() if store is not None else b"").wait(timeout)
        if store is None:
            host, port = said[first].decode().split()
            store = distributed.TCPStore(host, int(port), size, is_master=False, timeout=limit)
        communicator = TorchNccl(store, rank, size, self._timeouts)
        one = torch.ones(1, device="cuda")
        flight = communicator.fly([one], [torch.empty_like(one)], communicator.mark())
        until = time.monotonic() + timeout
        while not flight.landed():
            if group.lost is not None or time.monotonic() > until:
                communicator.abort()
                raise group.lost or TimeoutError("the first sum did not end in time")
            time.sleep(0.001)
        return communicator

    def _group(self, engine: Engine) -> EngineGroup:
        return NcclGroup(engine, self._scratch)

    def _end(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.abort()


# ---------------------------------------------------------------- torch's NCCL

class TorchNccl:
    """See `Communicator`. One GPU: the current one."""

    def __init__(self, store: Any, rank: int, size: int, timeouts: Timeouts) -> None:
        nccl = distributed.ProcessGroupNCCL
        options = nccl.Options()
        options.config.blocking = 0                     # so that abort can end what has not begun
        options._timeout = timedelta(seconds=1000 * timeouts.failure_timeout)
        with _without_error_handling():
            self._group = nccl(store, rank, size, options)
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.Stream()              # type: ignore[no-untyped-call]
        self._aborted = False

    def mark(self) -> object:
        event = torch.cuda.Event()                      # type: ignore[no-untyped-call]
        event.record()
        return event

    def fly(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], mark: Any) -> Flight:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):      # the communication thread has chosen none
            self._stream.wait_event(mark)
            for source, target in zip(inputs, outputs, strict=True):
                target.copy_(source, non_blocking=True)
                self._group.allreduce([target]).wait()  # has this stream wait, not this thread
            event = torch.cuda.Event()                  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return _Recorded(event)

    def abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            self._group.abort()
            self._stream.synchronize()                  # its kernels have ended: nothing writes any more


class _Recorded:
    def __init__(self, event: Any) -> None:
        self._event = event

    def landed(self) -> bool:
        return bool(self._event.query())


@contextmanager
def _without_error_handling() -> Iterator[None]:
    """torch's watchdog ends the process when NCCL fails; here the sockets say who is lost, and the process lives on."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
