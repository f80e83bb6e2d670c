"""What of a parameter lies on this rank: all of it, or the local part of a `DTensor` (FSDP2, tensor parallel).

Buckets hold local parts only; a rank's position in its replica holds the same part in every replica, so sums over
replicas need no more. A local part may be empty (fewer rows than ranks).

Nothing here imports `torch.distributed.tensor` (that alone takes as long as half of torch): whoever made a DTensor has.
"""
from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_shard(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """What lies on this rank, detached and sharing memory; the tensor itself unless it is a DTensor."""
    with torch.no_grad():
        return tensor.to_local() if is_shard(tensor) else tensor.detach()


def stand_in(view: Tensor, parameter: Tensor) -> Tensor:
    """A gradient for `parameter` whose local part is `view` (of the local part's shape, sharing memory)."""
    if not is_shard(parameter):
        return view
    kind = sys.modules["torch.distributed.tensor"].DTensor
    gradient: Tensor = kind.from_local(view, parameter.device_mesh, parameter.placements, run_check=False,
                                       shape=parameter.shape, stride=parameter.stride())
    return gradient


def describe(parameter: Tensor) -> str:
    """Its shape in words; of a DTensor also the local shape, the placements and the mesh."""
    shape = str(tuple(parameter.shape))
    if not is_shard(parameter):
        return shape
    mesh = parameter.device_mesh
    placements = ", ".join(str(placement) for placement in parameter.placements)
    return f"{shape}, here {tuple(local_part(parameter).shape)}, placed {placements} on a mesh {tuple(mesh.shape)}"
