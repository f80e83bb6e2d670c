"""The contract's face of an engine, for any thread."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from recover.collectives.contract import GATHER_LIMIT, Group, Work
from recover.collectives.engine import Engine
from recover.collectives.operations import SUMMED, AllReduce, Copy, Gather, Operation, Scratch
from recover.collectives.staging import Staging
from recover.errors import PeerLost


class EngineGroup(Group):
    """See `Group`: checks arguments, builds operations, hands them to the engine."""

    def __init__(self, engine: Engine, scratch: Scratch) -> None:
        self.view, self.members, self.me = engine.view, engine.members, engine.me
        self._engine, self._scratch = engine, scratch

    @property
    def engine(self) -> Engine:
        return self._engine

    @property
    def lost(self) -> PeerLost | None:
        return self._engine.lost

    @property
    def on_loss(self) -> Callable[[PeerLost], None] | None:
        return self._engine.on_loss

    @on_loss.setter
    def on_loss(self, callback: Callable[[PeerLost], None] | None) -> None:
        self._engine.on_loss = callback
        if self._engine.lost is not None:
            self._engine.notify()

    def all_reduce(self, op: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor],
                   after: Work[Any] | None = None) -> Work[None]:
        check_pairs(inputs, outputs)
        staging = _staging(inputs, outputs)
        operation = AllReduce(check_number(op), staging.reads if staging else inputs, staging.writes if staging else outputs,
                              self.me, self.members, self._scratch)
        return self._engine.launch(operation, staging, after)

    def broadcast(self, op: int, tensors: Sequence[Tensor], root: int) -> Work[None]:
        self._member(root)
        return self._copy(op, tensors, root, [m for m in self.members if m != root])

    def send(self, op: int, tensors: Sequence[Tensor], to: int) -> Work[None]:
        self._other(to)
        return self._copy(op, tensors, self.me, [to])

    def receive(self, op: int, tensors: Sequence[Tensor], source: int) -> Work[None]:
        self._other(source)
        return self._copy(op, tensors, source, [self.me])

    def gather(self, op: int, payload: bytes, after: Work[Any] | None = None) -> Work[dict[int, bytes]]:
        if len(payload) > GATHER_LIMIT:
            raise ValueError(f"gather takes at most {GATHER_LIMIT} bytes per member, not {len(payload)}")
        peers = [m for m in self.members if m != self.me]
        return self._engine.launch(Gather(check_number(op), bytes(payload), self.me, peers), None, after)

    def revoke(self) -> None:
        self._engine.fail(PeerLost("revoked by this rank"), ours=True)

    def join(self, timeout: float) -> None:
        if self._engine.loop.here():
            raise RuntimeError("join waits for the communication thread: don't call it from a callback")
        if not self._engine.released.wait(timeout):
            raise TimeoutError(f"buffers are still in use after {timeout} s (was the group revoked?)")

    def sever(self) -> None:
        self._engine.sever()

    def close(self) -> None:
        self._engine.fail(PeerLost("closed by this rank"), ours=True)

    def _copy(self, op: int, tensors: Sequence[Tensor], source: int, destinations: Sequence[int]) -> Work[None]:
        for tensor in tensors:
            _check_layout(tensor)
        mine = self.me == source
        staging = _staging(tensors, []) if mine else _staging([], tensors)
        host = (staging.reads if mine else staging.writes) if staging else tensors
        operation: Operation = Copy(check_number(op), host, self.me, source, destinations)
        return self._engine.launch(operation, staging, None)

    def _member(self, member: int) -> None:
        if member not in self.members:
            raise ValueError(f"{member} is not a member of view {self.view}: {self.members}")

    def _other(self, member: int) -> None:
        self._member(member)
        if member == self.me:
            raise ValueError("a member does not send to itself")


def check_number(op: int) -> int:
    if not 0 <= op < 1 << 64:
        raise ValueError(f"operation number {op} is not in [0, 2**64)")
    return op


def _check_layout(tensor: Tensor) -> None:
    if not tensor.is_contiguous() or tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"collectives take contiguous tensors on cpu or cuda, not strides {tensor.stride()} "
                         f"on {tensor.device}")


def check_pairs(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs for {len(outputs)} outputs")
    for source, target in zip(inputs, outputs, strict=True):
        _check_layout(source)
        _check_layout(target)
        if source.dtype not in SUMMED:
            raise ValueError(f"all_reduce can't sum {source.dtype}: it takes {sorted(map(str, SUMMED))}")
        if source.dtype != target.dtype or source.shape != target.shape:
            raise ValueError(f"input is {source.dtype} {tuple(source.shape)}, "
                             f"its output {target.dtype} {tuple(target.shape)}")
        if source.numel() and source.data_ptr() == target.data_ptr():
            raise ValueError("input and output share memory: give all_reduce separate outputs")


def _staging(reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Staging | None:
    if not any(tensor.is_cuda for tensor in (*reads, *writes)):
        return None
    return Staging(reads, writes)
