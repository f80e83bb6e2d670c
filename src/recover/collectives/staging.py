"""CUDA tensors on their way through sockets: by pinned host memory and a stream of their own.

Nothing here waits for the GPU. Copies are enqueued on a side stream, behind what the caller's stream holds when the
operation is launched, and the communication thread asks now and then whether they are done.
"""
from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

_streams: dict[torch.device, torch.cuda.Stream] = {}
_lock = threading.Lock()


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    with _lock:
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return _streams[device]


class Stage(Protocol):
    """What an engine asks of tensors that it can't read or write by itself."""

    def arrived(self) -> bool: ...

    def deliver(self) -> None: ...

    def settle(self) -> None: ...


class Staging:
    """Host copies of the CUDA tensors among `reads` (copied in) and `writes` (copied out); others stay as they are."""

    def __init__(self, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        self.reads = [self._host(t) for t in reads]
        self.writes = [self._host(t) for t in writes]
        self._in = [(h, t) for h, t in zip(self.reads, reads, strict=True) if t.is_cuda]
        self._out = [(t, h) for h, t in zip(self.writes, writes, strict=True) if t.is_cuda]
        self._events: list[torch.cuda.Event] = []
        for device in {t.device for _, t in self._in} | {t.device for t, _ in self._out}:
            # copies out come later on the same stream, hence behind the caller's present use of the outputs too
            _side_stream(device).wait_stream(torch.cuda.current_stream(device))
        self._copy(self._in)

    @property
    def needed(self) -> bool:
        """Whether there is a CUDA tensor at all."""
        return bool(self._in or self._out)

    def arrived(self) -> bool:
        """Whether the copies begun last are done."""
        return all(event.query() for event in self._events)  # type: ignore[no-untyped-call]

    def deliver(self) -> None:
        """Begin to copy the results out."""
        self._copy(self._out)

    def settle(self) -> None:
        """Wait for the copies under way (milliseconds: nothing that waits for a peer is among them)."""
        for event in self._events:
            event.synchronize()

    def _copy(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._events = []
        for target, source in pairs:
            stream = _side_stream(source.device if source.is_cuda else target.device)
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(stream)
            self._events.append(event)

    @staticmethod
    def _host(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) if tensor.is_cuda else tensor
