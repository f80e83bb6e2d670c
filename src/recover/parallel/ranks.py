"""torch.distributed inside a replica: initialised from torchrun's environment, which is local to the replica."""
from __future__ import annotations

import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from recover.parallel.mesh import Place


def build_mesh(place: Place) -> DeviceMesh:
    """A DeviceMesh over the ranks of this replica with the axes of `place`. Raises ValueError if torch has other ranks."""
    cuda = torch.cuda.is_available()
    if not dist.is_initialized():
        if cuda:
            torch.cuda.set_device(place.rank % torch.cuda.device_count())
        dist.init_process_group("nccl" if cuda else "gloo", rank=place.rank, world_size=place.ranks)
    if (dist.get_rank(), dist.get_world_size()) != (place.rank, place.ranks):
        raise ValueError(f"torch.distributed is initialised with rank {dist.get_rank()} of {dist.get_world_size()}, but this is "
                         f"rank {place.rank} of {place.ranks} of a replica: its groups are local to the replica")
    names, sizes = zip(*place.axes, strict=True)
    return init_device_mesh("cuda" if cuda else "cpu", sizes, mesh_dim_names=names)


def shared_token() -> bytes:
    """For a run without a launcher: a secret that the ranks of this replica share."""
    said: list[Any] = [secrets.token_hex(32)]
    dist.broadcast_object_list(said, src=0)
    return str(said[0]).encode()
