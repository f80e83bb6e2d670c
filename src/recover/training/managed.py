"""What a run manages: parameters, buffers, optimizers, schedulers. Their first values, and their hash.

The hash covers everything that training depends on: names, dtypes, shapes and bits of parameters and buffers, every
optimizer's state and its groups' scalars, `state_dict()` of whatever else is managed, and the exponents of `exact`. Two
replicas with equal hashes go on equally.
"""
from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class Managed:
    """The objects given to `run.manage`. Raises ValueError for what can't be managed."""

    def __init__(self, objects: Iterable[Any]) -> None:
        objects = tuple(objects)
        self.models = [each for each in objects if isinstance(each, nn.Module)]
        self.optimizers = [each for each in objects if isinstance(each, Optimizer)]
        self.others = [each for each in objects if not isinstance(each, nn.Module | Optimizer)]
        if not self.models:
            raise ValueError("run.manage needs the model: run.manage(model, optimizer)")
        for model in self.models:
            if isinstance(model, nn.parallel.DistributedDataParallel):
                raise ValueError("the model is wrapped in DistributedDataParallel: give run.manage the plain model; "
                                 "the run sums the gradients itself")
        for other in self.others:
            if not hasattr(other, "state_dict"):
                raise ValueError(f"run.manage can't keep a {type(other).__name__}: it has no state_dict()")
        known = {id(p) for _, p in self.parameters()}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if any(id(p) not in known for p in group["params"] if p.requires_grad):
                    raise ValueError("an optimizer updates a parameter of no managed model: give run.manage all models")

    def _prefix(self, place: int) -> str:
        return "" if len(self.models) == 1 else f"{place}."

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those that require a gradient, tied ones once, by name."""
        named: dict[int, tuple[str, nn.Parameter]] = {}
        for place, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    named.setdefault(id(parameter), (self._prefix(place) + name, parameter))
        return list(named.values())

    def named_buffers(self) -> list[tuple[str, Tensor]]:
        return [(self._prefix(place) + name, buffer) for place, model in enumerate(self.models)
                for name, buffer in model.named_buffers()]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter (frozen ones too) and buffer once, by name."""
        seen: set[int] = set()
        for place, model in enumerate(self.models):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield self._prefix(place) + name, tensor

    def names(self) -> dict[int, str]:
        """id(parameter or buffer) -> its name."""
        return {id(tensor): name for name, tensor in self.named_tensors()}

    def first_values(self) -> list[Tensor]:
        """Every parameter (frozen ones too) and buffer once: what the first replica gives to the others."""
        return [local(tensor.detach()) for _, tensor in self.named_tensors()]

    def digest(self, more: object = None) -> str:
        """The hash (SHA-256, hexadecimal) of all of it and of `more`, a plain value."""
        sink = hashlib.sha256()
        for place, model in enumerate(self.models):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                feed(sink, self._prefix(place) + name, tensor)
        for optimizer in self.optimizers:
            feed(sink, "optimizer", list(self._optimizer(optimizer)))
        for other in self.others:
            feed(sink, type(other).__name__, other.state_dict())
        feed(sink, "more", more)
        return sink.hexdigest()

    @staticmethod
    def _optimizer(optimizer: Optimizer) -> Iterator[Any]:
        for group in optimizer.param_groups:
            yield {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                yield dict(sorted(optimizer.state.get(parameter, {}).items()))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a distributed tensor (sharing its memory); any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def feed(sink: Any, name: str, value: object) -> None:
    """Hash a tree of dicts, lists, tensors and plain values; names and types are part of it."""
    if isinstance(value, Tensor):
        plain = local(value.detach()).to("cpu").contiguous()
        sink.update(f"{name}:{plain.dtype}:{tuple(plain.shape)};".encode())
        sink.update(plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b"")
    elif isinstance(value, dict):
        sink.update(f"{name}:{{{len(value)};".encode())
        for key, inner in value.items():
            feed(sink, str(key), inner)
    elif isinstance(value, list | tuple):
        sink.update(f"{name}:[{len(value)};".encode())
        for place, inner in enumerate(value):
            feed(sink, str(place), inner)
    elif callable(value):
        sink.update(f"{name}:callable;".encode())       # a scheduler's function: its address says nothing
    else:
        sink.update(f"{name}:{type(value).__name__}:{value!r};".encode())
