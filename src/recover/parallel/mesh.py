"""Where a rank stands inside its replica: axes, coordinates, and who holds which part of a microbatch.

A replica of S ranks is a grid with named axes, in the order that the script gives, the last one running fastest (as
torch's DeviceMesh has it). A rank's number is its *position*. Along *data* axes (names that begin with "dp", and "cp")
ranks compute different samples of the same microbatch; along "pp" they hold different stages; along any other axis
("tp", ...) they repeat the computation on parts of the same tensors. The replicate axis is not in the grid: it is ours.
"""
from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

PIPELINE = "pp"


def is_data(axis: str) -> bool:
    """Whether ranks along this axis compute different samples."""
    return axis.startswith("dp") or axis == "cp"


@dataclass(frozen=True)
class Place:
    """`axes`: (name, size), in order. Raises ValueError where they don't multiply to the ranks of the replica."""

    rank: int
    ranks: int
    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        sizes = dict(self.axes)
        if any(size < 1 for size in sizes.values()) or len(sizes) != len(self.axes):
            raise ValueError(f"the mesh {sizes} needs different names and sizes of at least 1")
        if math.prod(sizes.values()) != self.ranks:
            raise ValueError(f"the mesh {sizes} has {math.prod(sizes.values())} ranks, but the replica has {self.ranks} "
                             "(recover launch --ranks-per-replica, or WORLD_SIZE): change one of them")

    @classmethod
    def of(cls, rank: int, ranks: int, mesh: Mapping[str, int] | None) -> Place:
        """Without a mesh, a replica of several ranks is one axis "dp_shard"."""
        return cls(rank, ranks, tuple((mesh or {"dp_shard": ranks}).items()))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> where `rank` stands on it."""
        found: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, found[name] = divmod(rank, size)
        return found

    def _data(self, rank: int) -> tuple[int, int]:
        """(number among the data ranks, how many there are)"""
        at, number, count = self.coordinates(rank), 0, 1
        for name, size in self.axes:
            if is_data(name):
                number, count = number * size + at[name], count * size
        return number, count

    @property
    def data_rank(self) -> int:
        return self._data(self.rank)[0]

    @property
    def data_size(self) -> int:
        return self._data(self.rank)[1]

    @property
    def stage(self) -> int:
        """Of the pipeline; 0 without one."""
        return self.coordinates(self.rank).get(PIPELINE, 0)

    def speakers(self) -> tuple[int, ...]:
        """The positions whose losses and weights count: one for each data rank, on the last stage of a pipeline."""
        last = dict(self.axes).get(PIPELINE, 1) - 1
        found = []
        for rank in range(self.ranks):
            at = self.coordinates(rank)
            if all(value == (last if name == PIPELINE else 0) for name, value in at.items() if not is_data(name)):
                found.append(rank)
        return tuple(found)
