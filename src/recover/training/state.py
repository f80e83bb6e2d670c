"""Everything that training depends on, taken apart into named tensors and one tree of plain values, and put back.

Theory of operation
-------------------
* What `Managed` hashes is what is kept: parameters, buffers, every optimizer's state and its groups' scalars, and
  `state_dict()` of whatever else is managed. `restore(b, flatten(a))` makes the digests of `a` and `b` equal.
* `Flat.tensors` name this rank's own parts (of a DTensor the local one), sharing memory with the managed objects until
  `copied`. `Flat.values` holds the rest and could be JSON: where a tensor belongs in it stands `{"$tensor": name}`. Dicts
  always become lists of pairs, `{"$dict": [[key, value], ...]}`, since JSON knows no numbers as keys; floats are kept to the
  bit (those that JSON lacks as text). What isn't one of the plain types is refused, never pickled: whoever reads such a
  state runs no code from it.
* Callables in a dict (a scheduler's function) are not kept: the script makes them anew.
* `restore` looks at everything before it changes anything. Parameters and buffers are written in place, since others hold
  references to them; an optimizer's state is replaced, in the dtype it had (`load_state_dict` would cast it to the
  parameter's), on the parameter's device unless it was on the CPU.

`specification` says what tensors there are: for a receiver on a wire, or a header.
"""
from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from recover.gradients.shards import is_shard, local_part, stand_in

if TYPE_CHECKING:
    from recover.training.managed import Managed

PLAIN = (type(None), bool, int, str)
Specification = list[tuple[str, str, list[int]]]
"""name, dtype ("float32"), shape; of every tensor, in order"""


class Flat(NamedTuple):
    """A state taken apart. `values` holds nothing but what JSON and msgpack hold."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


class _Group(msgspec.Struct):
    """Of an optimizer: the names of its parameters, and everything else."""

    params: list[str]
    scalars: Any


class _Optimizer(msgspec.Struct):
    """`states`: of all parameters, in order."""

    type: str
    groups: list[_Group]
    states: list[Any]


class _Values(msgspec.Struct):
    """What `Flat.values` is."""

    models: int
    optimizers: list[_Optimizer]
    others: list[tuple[str, Any]]


def flatten(managed: Managed) -> Flat:
    """The state of all managed objects. Raises ValueError that names what can't be kept."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in managed.named_tensors():
        tensors[f"model/{name}"] = local_part(tensor)
    names = managed.names()
    optimizers = [_optimizer(optimizer, f"optimizer/{n}", names, tensors) for n, optimizer in enumerate(managed.optimizers)]
    others = [[type(other).__name__, pack(other.state_dict(), f"other/{n}", tensors)] for n, other in enumerate(managed.others)]
    return Flat(tensors, {"models": len(managed.models), "optimizers": optimizers, "others": others})


def _optimizer(optimizer: Optimizer, where: str, names: Mapping[int, str], tensors: dict[str, Tensor]) -> dict[str, Any]:
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if any(id(key) not in known for key in optimizer.state):
        raise ValueError(f"{type(optimizer).__name__} keeps state that belongs to no parameter; that can't be kept")
    groups, states = [], []
    for n, group in enumerate(optimizer.param_groups):
        scalars = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": [names.get(id(p), "") for p in group["params"]],
                       "scalars": pack(scalars, f"{where}/group{n}", tensors)})
        for m, parameter in enumerate(group["params"]):
            state = optimizer.state.get(parameter, {})
            states.append(pack(dict(state), f"{where}/{n}.{m}", tensors, parameter))
    return {"type": type(optimizer).__name__, "groups": groups, "states": states}


def copied(flat: Flat) -> Flat:
    """The same on the CPU, in memory of its own."""
    with torch.no_grad():
        return Flat({name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in flat.tensors.items()},
                    flat.values)


# ---------------------------------------------------------------- putting back

def restore(managed: Managed, flat: Flat) -> None:
    """Make the managed objects what `flat` was taken from; its tensors are copied. Raises ValueError that names the
    first difference, before anything is changed."""
    targets = {f"model/{name}": local_part(tensor) for name, tensor in managed.named_tensors()}
    values = fits(flat, managed, targets)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(flat.tensors[name])
        for optimizer, kept in zip(managed.optimizers, values.optimizers, strict=True):
            _put_back(optimizer, kept, flat.tensors)
    for other, (_, saved) in zip(managed.others, values.others, strict=True):
        other.load_state_dict(_with_own_functions(other.state_dict(), unpack(saved, flat.tensors)))


def _with_own_functions(own: Any, given: Any) -> Any:
    """`given`, with the functions that stand in the receiver's own dicts at the same places."""
    if not isinstance(own, dict) or not isinstance(given, dict):
        return given
    merged = {key: _with_own_functions(own.get(key), value) for key, value in given.items()}
    functions = {key: value for key, value in own.items() if key not in given and callable(value)}
    return merged | functions if type(given) is dict else given


def fits(flat: Flat, managed: Managed, targets: Mapping[str, Tensor]) -> _Values:
    """The state's values. Raises ValueError that says in words where the state and the managed objects differ."""
    try:
        values = msgspec.convert(flat.values, _Values)
    except msgspec.ValidationError as wrong:
        raise ValueError(f"not a state: {wrong}") from None
    kept = {name: tensor for name, tensor in flat.tensors.items() if name.startswith("model/")}
    for name in [*targets, *kept]:
        if name not in kept or name not in targets:
            raise ValueError(f"{name.removeprefix('model/')} is in {'the model' if name in targets else 'the saved state'} only")
        mine, theirs = targets[name], kept[name]
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype):
            raise ValueError(f"{name.removeprefix('model/')} is {tuple(mine.shape)} {mine.dtype} here and "
                             f"{tuple(theirs.shape)} {theirs.dtype} in the saved state")
    names = managed.names()
    here = [type(each).__name__ for each in (*managed.optimizers, *managed.others)]
    there = [*(each.type for each in values.optimizers), *(name for name, _ in values.others)]
    if here != there:
        raise ValueError(f"managed besides the model is {here} here and {there} in the saved state")
    for optimizer, saved in zip(managed.optimizers, values.optimizers, strict=True):
        groups = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        kept_groups = [group.params for group in saved.groups]
        if groups != kept_groups or len(saved.states) != sum(map(len, groups)):
            raise ValueError(f"the groups of {type(optimizer).__name__} hold other parameters than in the saved state "
                             f"({list(map(len, groups))} and {list(map(len, kept_groups))} of them, or in another order)")
    return values


def _put_back(optimizer: Optimizer, kept: _Optimizer, tensors: Mapping[str, Tensor]) -> None:
    states = iter(kept.states)
    for group, saved in zip(optimizer.param_groups, kept.groups, strict=True):
        scalars = unpack(saved.scalars, tensors)
        for gone in [key for key, value in group.items() if key != "params" and key not in scalars and not callable(value)]:
            del group[gone]
        for key, value in scalars.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)                 # a scheduler or a graph may hold this very tensor
            else:
                group[key] = value
        for parameter in group["params"]:
            state = unpack(next(states), tensors, parameter)
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state


# ---------------------------------------------------------------- trees

def pack(value: Any, where: str, tensors: dict[str, Tensor], parameter: Tensor | None = None) -> Any:
    """A tree of dicts, lists, tuples, tensors and plain values as one of plain values; its tensors go into `tensors`.

    `where` names the place. `parameter`: whose state it is; a DTensor in it must be sharded like that. Raises ValueError.
    """
    if isinstance(value, Tensor):
        return _pack_tensor(value, where, tensors, parameter)
    if type(value) is int and value.bit_length() > 63:
        return {"$int": str(value)}                     # a random number generator's; msgpack has no room for it
    if type(value) in PLAIN:
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, dict):
        kind = "$counter" if isinstance(value, Counter) else "$dict"
        return {kind: [[_key(key, where), pack(inner, f"{where}/{key}", tensors, parameter)] for key, inner in value.items()
                       if isinstance(inner, Tensor | nn.Module) or not callable(inner)]}
    if type(value) in (list, tuple):
        inner = [pack(each, f"{where}/{n}", tensors, parameter) for n, each in enumerate(value)]
        return inner if type(value) is list else {"$tuple": inner}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    raise ValueError(f"{where}: a {type(value).__module__}.{type(value).__qualname__} can't be kept; a managed state holds "
                     "tensors, dicts, lists, tuples, numbers and text only")


def _key(key: Any, where: str) -> Any:
    if type(key) not in (str, int):
        raise ValueError(f"{where}: the key {key!r} can't be kept; keys are text or whole numbers")
    return key


def _pack_tensor(value: Tensor, where: str, tensors: dict[str, Tensor], parameter: Tensor | None) -> dict[str, Any]:
    assert where not in tensors, f"two tensors are called {where}"
    packed: dict[str, Any] = {"$tensor": where}
    if is_shard(value):
        like = parameter if parameter is not None and is_shard(parameter) else None
        if like is None or (value.shape, value.placements, value.device_mesh) != (like.shape, like.placements, like.device_mesh):
            raise ValueError(f"{where}: a DTensor that is not sharded like its parameter can't be kept")
        packed["sharded"] = True
    elif type(value) not in (Tensor, nn.Parameter):
        raise ValueError(f"{where}: a {type(value).__qualname__} can't be kept; plain tensors and DTensors can")
    if value.device.type == "cpu":
        packed["cpu"] = True
    tensors[where] = local_part(value)
    return packed


def unpack(value: Any, tensors: Mapping[str, Tensor], parameter: Tensor | None = None) -> Any:
    """What `pack` took apart; its tensors are copies. Raises ValueError for what `pack` never makes."""
    if isinstance(value, list):
        return [unpack(each, tensors, parameter) for each in value]
    if not isinstance(value, dict):
        return value
    kind = next(iter(value), "")
    inner: Any = value.get(kind)
    if kind == "$tensor" and inner in tensors:
        copy = _fresh(tensors[inner], parameter, bool(value.get("cpu")))
        return stand_in(copy, parameter) if value.get("sharded") and parameter is not None else copy
    if kind == "$dict":
        return {key: unpack(each, tensors, parameter) for key, each in inner}
    if kind == "$counter":
        return Counter({key: unpack(each, tensors, parameter) for key, each in inner})
    if kind == "$tuple":
        return tuple(unpack(each, tensors, parameter) for each in inner)
    if kind in ("$float", "$int"):
        return float(inner) if kind == "$float" else int(inner)
    if kind == "$bytes":
        return base64.b64decode(inner)
    raise ValueError(f"not a state: {str(value)[:100]}")


def _fresh(tensor: Tensor, parameter: Tensor | None, on_cpu: bool) -> Tensor:
    """A copy as an optimizer would have made it for `parameter`: on its device, with its strides if it has its shape."""
    if parameter is None or (on_cpu and parameter.device.type != "cpu"):
        return tensor.to("cpu", copy=True)
    like = local_part(parameter)
    if like.shape != tensor.shape:
        return tensor.to(like.device, copy=True)
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


# ---------------------------------------------------------------- for a receiver

def specification(tensors: Mapping[str, Tensor]) -> Specification:
    """What tensors there are."""
    return [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in tensors.items()]


__all__ = ["Flat", "copied", "fits", "flatten", "pack", "restore", "specification", "unpack"]
