"""The managed state as of one step, in a form that travels: a typed header, and one flat run of bytes.

Theory of operation
-------------------
* A *snapshot* is copied by the training thread while nothing changes what it holds: between the update of the step before
  and the microbatches of the next. It is one copy into one buffer; everything after that happens on the side.
* What is plain (numbers, texts, and the dicts, lists and tuples around them) goes into the header, with the bits it has.
  Every tensor is a reference into the flat bytes: dtype, shape, place. Nothing is pickled, and nothing in a header makes
  the receiver call or import anything.
* Of a `DTensor` the local part travels, from the same position of another replica, which holds the same part.
* State that only the giver has (an optimizer's, before the receiver's first step) is made anew: on the parameter's device,
  with its strides and its placements. `load_state_dict` of optimizers is not used, since it casts to the parameter's dtype.
* Replicas that are equal make equal snapshots, bit for bit: `digest` compares them.
"""
from __future__ import annotations

import hashlib
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.optim import Optimizer

from recover.gradients.shards import is_shard, local_part, stand_in
from recover.training.managed import Managed

ALIGN = 64                      # bytes: of every tensor's place
MAX_HEAD = 256 << 20            # bytes of a header
MAX_TOTAL = 1 << 42             # bytes of one rank's state
_KINDS: dict[str, Callable[[Any], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "list": list,
                                           "tuple": tuple}

Plain = None | bool | int | float | str


class Leaf(msgspec.Struct, frozen=True, array_like=True, tag="v", forbid_unknown_fields=True):
    """A plain value."""

    value: Plain


class Raw(msgspec.Struct, frozen=True, array_like=True, tag="b", forbid_unknown_fields=True):
    """Plain bytes."""

    value: bytes


class Own(msgspec.Struct, frozen=True, array_like=True, tag="o", forbid_unknown_fields=True):
    """Something that does not travel (a scheduler's function): the receiver keeps its own."""


class Ref(msgspec.Struct, frozen=True, array_like=True, tag="t", forbid_unknown_fields=True):
    """A tensor: `nbytes` of the flat bytes from `start`. `placed`: a DTensor's placements, in words; "" for others."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int
    accelerated: bool
    placed: str = ""


class Dict(msgspec.Struct, frozen=True, array_like=True, tag="d", forbid_unknown_fields=True):
    """A dict, in its order."""

    kind: str
    items: list[tuple[int | float | str, Node]]


class Sequence(msgspec.Struct, frozen=True, array_like=True, tag="s", forbid_unknown_fields=True):
    """A list or a tuple."""

    kind: str
    items: list[Node]


Node = Leaf | Raw | Own | Ref | Dict | Sequence


class Head(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the bytes mean: the state in which `step` begins. Per optimizer: its groups' scalars, and each parameter's state."""

    step: int
    total: int
    values: list[Ref]
    optimizers: list[list[tuple[Node, list[Node]]]]
    others: list[Node]
    store: Node


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


# ---------------------------------------------------------------- taking

class _Writer:
    """Gives every tensor its place, then copies them all."""

    def __init__(self) -> None:
        self.total = 0
        self._tensors: list[tuple[Ref, Tensor]] = []

    def tensor(self, tensor: Tensor) -> Ref:
        part = local_part(tensor)
        if part.layout != torch.strided or part.is_quantized:
            raise ValueError(f"a tensor of layout {part.layout} can't be given to a joiner")
        placed = ", ".join(map(str, tensor.placements)) if is_shard(tensor) else ""
        ref = Ref(str(part.dtype).removeprefix("torch."), tuple(part.shape), self.total, part.numel() * part.element_size(),
                  part.device.type != "cpu", placed)
        self.total += -(-ref.nbytes // ALIGN) * ALIGN
        self._tensors.append((ref, part))
        return ref

    def tree(self, value: Any) -> Node:
        if isinstance(value, Tensor):
            return self.tensor(value)
        if value is None or type(value) in (bool, int, float, str):
            return Leaf(value)
        if isinstance(value, bytes):
            return Raw(value)
        kind = type(value).__name__
        if isinstance(value, dict) and kind in _KINDS and all(type(key) in (int, float, str) for key in value):
            return Dict(kind, [(key, self.tree(inner)) for key, inner in value.items()])
        if isinstance(value, list | tuple) and kind in _KINDS:
            return Sequence(kind, [self.tree(inner) for inner in value])
        if callable(value):
            return Own()
        raise ValueError(f"a {kind} in a managed state_dict can't be given to a joiner: plain values, tensors, dicts, lists "
                         "and tuples can")

    def data(self) -> Tensor:
        flat = torch.empty(self.total, dtype=torch.uint8)
        with torch.no_grad():
            end = 0
            for ref, part in self._tensors:
                flat[end:ref.start].zero_()             # between two tensors: equal states make equal bytes
                if ref.nbytes:
                    view_of(flat, ref).copy_(part)
                end = ref.start + ref.nbytes
            flat[end:].zero_()
        return flat


def view_of(data: Tensor, ref: Ref) -> Tensor:
    """The tensor that `ref` names, sharing memory with `data`."""
    return data[ref.start:ref.start + ref.nbytes].view(getattr(torch, ref.dtype)).view(ref.shape)


def take(step: int, managed: Managed, store: Any) -> Snapshot:
    """A copy of the state in which `step` begins; `store`: plain values of the gradients' (`GradientStore.state`).

    Raises ValueError for state that can't travel.
    """
    writer = _Writer()
    values = [writer.tensor(value) for value in managed.first_values()]
    optimizers = [[(writer.tree({key: value for key, value in group.items() if key != "params"}),
                    [writer.tree(dict(optimizer.state.get(parameter, {}))) for parameter in group["params"]])
                   for group in optimizer.param_groups] for optimizer in managed.optimizers]
    others = [writer.tree(other.state_dict()) for other in managed.others]
    head = Head(step, writer.total, values, optimizers, others, writer.tree(store))
    return Snapshot(_ENCODER.encode(head), writer.data())


# ---------------------------------------------------------------- putting in place

def read_head(encoded: bytes) -> Head:
    """Raises ValueError for what is no header, or one whose tensors lie outside of their bytes."""
    try:
        head = _DECODER.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not the header of a snapshot: {error}") from None
    if not 0 <= head.total <= MAX_TOTAL:
        raise ValueError(f"a snapshot of {head.total} bytes")
    for ref in head.values:
        _check(ref, head.total)
    return head


def _check(ref: Ref, total: int) -> None:
    dtype = getattr(torch, ref.dtype, None)
    if not isinstance(dtype, torch.dtype) or any(size < 0 for size in ref.shape):
        raise ValueError(f"a tensor of dtype {ref.dtype} and shape {ref.shape}")
    inside = 0 <= ref.start <= total - ref.nbytes and ref.start % ALIGN == 0
    if not inside or ref.nbytes != math.prod(ref.shape) * dtype.itemsize:
        raise ValueError(f"a tensor at {ref.start} of {ref.nbytes} bytes for {ref.dtype} {ref.shape}, of {total}")


class _Reader:
    """Trees out of the header and the bytes."""

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def tensor(self, ref: Ref) -> Tensor:
        _check(ref, self._data.numel())
        return view_of(self._data, ref) if ref.nbytes else torch.empty(ref.shape, dtype=getattr(torch, ref.dtype))

    def tree(self, node: Node, own: Any = None, parameter: Tensor | None = None) -> Any:
        """The value; `own`: the receiver's at the same place. Tensors are new, on the `parameter`'s device if they were."""
        match node:
            case Leaf() | Raw():
                return node.value
            case Own():
                return own
            case Ref():
                return self.fresh(node, parameter)
            case Dict():
                mine = own if isinstance(own, dict) else {}
                return self.kind(node.kind)({key: self.tree(inner, mine.get(key), parameter) for key, inner in node.items})
        same = isinstance(own, list | tuple) and len(own) == len(node.items)
        owns = own if same else [None] * len(node.items)
        return self.kind(node.kind)([self.tree(inner, each, parameter) for inner, each in zip(node.items, owns, strict=True)])

    @staticmethod
    def kind(name: str) -> Callable[[Any], Any]:
        if name not in _KINDS:
            raise ValueError(f"a {name} in the header of a snapshot")
        return _KINDS[name]

    def fresh(self, ref: Ref, parameter: Tensor | None) -> Tensor:
        """A new tensor with these bits, as an optimizer would have made it for `parameter`."""
        source = self.tensor(ref)
        if parameter is None:
            return source.clone()
        part = local_part(parameter)
        device = part.device if ref.accelerated else torch.device("cpu")
        like = part.shape == source.shape and device == part.device
        made = (torch.empty_like(part, dtype=source.dtype) if like
                else torch.empty(source.shape, dtype=source.dtype, device=device))
        made.copy_(source)
        if not ref.placed:
            return made
        if not is_shard(parameter) or ", ".join(map(str, parameter.placements)) != ref.placed:
            raise ValueError(f"optimizer state placed {ref.placed} belongs to a parameter that is placed otherwise")
        return stand_in(made, parameter)


def load(head: Head, data: Tensor, managed: Managed) -> Any:
    """Put the state in place, to the bit; gives what `take` was given as `store`. Raises ValueError if it does not fit."""
    reader = _Reader(data)
    values = managed.first_values()
    if [(str(v.dtype).removeprefix("torch."), tuple(v.shape)) for v in values] != [(r.dtype, r.shape) for r in head.values]:
        raise ValueError("the snapshot is of another model")
    with torch.no_grad():
        for value, ref in zip(values, head.values, strict=True):
            value.copy_(reader.tensor(ref))
    if len(head.optimizers) != len(managed.optimizers) or len(head.others) != len(managed.others):
        raise ValueError(f"the others manage {len(head.optimizers)} optimizers and {len(head.others)} other objects, "
                         f"here it is {len(managed.optimizers)} and {len(managed.others)}: run.manage must be given the same")
    for optimizer, groups in zip(managed.optimizers, head.optimizers, strict=True):
        _load_optimizer(optimizer, groups, reader)
    for other, node in zip(managed.others, head.others, strict=True):
        other.load_state_dict(reader.tree(node, other.state_dict()))
    return reader.tree(head.store)


def _load_optimizer(optimizer: Optimizer, groups: list[tuple[Node, list[Node]]], reader: _Reader) -> None:
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != [len(states) for _, states in groups]:
        raise ValueError(f"an optimizer's groups have {sizes} parameters here, and {[len(s) for _, s in groups]} elsewhere")
    for group, (scalars, states) in zip(optimizer.param_groups, groups, strict=True):
        for key, value in reader.tree(scalars, group).items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)                 # a learning rate that is a tensor is shared with others
            else:
                group[key] = value
        for parameter, node in zip(group["params"], states, strict=True):
            state = reader.tree(node, None, parameter)
            if state:
                optimizer.state[parameter] = state
            else:
                optimizer.state.pop(parameter, None)
