"""The managed state as of one step, in a form that travels: a typed header, and one flat run of bytes.

Theory of operation
-------------------
* What the state consists of, how it is taken apart and put back is `state`'s business; here its tensors are laid one behind
  the other into one buffer, and everything else goes into the header. Nothing is pickled.
* A *snapshot* is copied by the training thread while nothing changes what it holds: between the update of the step before
  and the microbatches of the next. It is one copy into one buffer; everything after that happens on the side, and so
  does what comes before: most of the time of such a copy goes into memory that was never touched, so a giver makes it ready
  (`size_of`).
* Of a `DTensor` the local part travels, from the same position of another replica, which holds the same part.
* Replicas that are equal make equal snapshots, bit for bit: `digest` compares them.
"""
from __future__ import annotations

import hashlib
import math
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from recover.gradients.shards import local_part
from recover.training.managed import Managed
from recover.training.state import Flat, Specification, flatten, restore, specification

ALIGN = 64                      # bytes: of every tensor's place
MAX_HEAD = 256 << 20            # bytes of a header
MAX_TOTAL = 1 << 42             # bytes of one rank's state
SPARE = 1 << 16                 # bytes of room beyond the tensors that can be counted beforehand


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the bytes mean: the state in which `step` begins. `store`: plain values of the gradients'."""

    step: int
    total: int
    tensors: Specification
    values: dict[str, Any]
    store: Any


class Place(NamedTuple):
    """Where a tensor lies in the bytes."""

    start: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def view(self, data: Tensor) -> Tensor:
        """The tensor, sharing memory with `data`."""
        if not self.nbytes:
            return torch.empty(self.shape, dtype=self.dtype)
        return data[self.start:self.start + self.nbytes].view(self.dtype).view(self.shape)


_DECODER = msgspec.msgpack.Decoder(Head)
_ENCODER = msgspec.msgpack.Encoder()


class Snapshot:
    """`head`: its encoding; `data`: [total] uint8, on the CPU."""

    def __init__(self, head: bytes, data: Tensor) -> None:
        self.head, self.data = head, data

    def digest(self) -> str:
        """SHA-256 over all of it, hexadecimal."""
        sink = hashlib.sha256(self.head)
        sink.update(self.data.numpy().data if self.data.numel() else b"")
        return sink.hexdigest()


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def places(tensors: Specification) -> tuple[dict[str, Place], int]:
    """name -> where it lies, and the bytes of all. Raises ValueError for what is no list of tensors."""
    found: dict[str, Place] = {}
    total = 0
    for name, kind, shape in tensors:
        dtype = getattr(torch, kind, None)
        if not isinstance(dtype, torch.dtype) or any(size < 0 for size in shape) or name in found:
            raise ValueError(f"a snapshot can't hold a tensor {name} of dtype {kind} and shape {shape}")
        found[name] = Place(total, math.prod(shape) * dtype.itemsize, dtype, tuple(shape))
        total += aligned(found[name].nbytes)
    return found, total


# ---------------------------------------------------------------- taking

def size_of(managed: Managed) -> int:
    """Bytes for a copy, as far as that can be told without asking the script's objects. Any thread."""
    tensors: list[Tensor] = [tensor for _, tensor in managed.named_tensors()]
    for optimizer in managed.optimizers:
        tensors += [value for state in list(optimizer.state.values()) for value in list(state.values())
                    if isinstance(value, Tensor)]
    return SPARE + sum(aligned(part.numel() * part.element_size()) for part in map(local_part, tensors))


def take(step: int, managed: Managed, store: Any, into: Tensor | None = None) -> Snapshot:
    """A copy of the state in which `step` begins; `store`: plain values of the gradients' (`GradientStore.state`).

    `into`: memory for it, which it keeps if it is large enough. Raises ValueError for state that can't travel.
    """
    flat = flatten(managed)
    for name, tensor in flat.tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"{name}: a tensor of layout {tensor.layout} can't be given to a joiner")
    tensors = specification(flat.tensors)
    where, total = places(tensors)
    fits = into is not None and into.numel() >= total
    data = into[:total] if into is not None and fits else torch.empty(total, dtype=torch.uint8)
    with torch.no_grad():
        for place, tensor in zip(where.values(), flat.tensors.values(), strict=True):
            end = place.start + place.nbytes
            place.view(data).copy_(tensor)
            data[end:place.start + aligned(place.nbytes)].zero_()       # equal states make equal bytes
    return Snapshot(_ENCODER.encode(Head(step, total, tensors, flat.values, store)), data)


# ---------------------------------------------------------------- putting in place

def read_head(encoded: bytes) -> Head:
    """Raises ValueError for what is no header, or one whose tensors are not what its bytes can hold."""
    try:
        head = _DECODER.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not the header of a snapshot: {error}") from None
    _, total = places(head.tensors)
    if head.total != total or total > MAX_TOTAL:
        raise ValueError(f"a snapshot of {head.total} bytes whose tensors take {total}")
    return head


def load(head: Head, data: Tensor, managed: Managed) -> Any:
    """Put the state in place, to the bit; gives what `take` was given as `store`. Raises ValueError if it does not fit."""
    where, _ = places(head.tensors)
    restore(managed, Flat({name: place.view(data) for name, place in where.items()}, head.values))
    return head.store


__all__ = ["MAX_HEAD", "Head", "Snapshot", "load", "read_head", "size_of", "take"]
