"""Real text as a map-style dataset of next-byte prediction.

By default the text is the source of this machine's Python standard library (a few MB that every machine with Python
has); any other file goes by its name. Files are taken in sorted order, so that replicas that read the same library or
the same file see the same bytes at the same place.
"""
from __future__ import annotations

import os
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

LIMIT = 8 << 20     # bytes: read no more than this
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}


class Text:
    """`text[i]` -> (x, y): int64 [block] each, where y is x moved on by one byte. Blocks do not overlap."""

    def __init__(self, data: bytes, block: int) -> None:
        if block < 1:
            raise ValueError(f"block={block} must be at least 1")
        if len(data) <= block:
            raise ValueError(f"the text has {len(data)} bytes, one block of {block} needs {block + 1}: "
                             "take a longer text or a smaller block")
        self._data = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.block = block

    def __len__(self) -> int:
        return (len(self._data) - 1) // self.block

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        piece = self._data[index * self.block:(index + 1) * self.block + 1].to(torch.int64)
        return piece[:-1], piece[1:]


def load(path: str | Path | None, block: int, limit: int = LIMIT) -> Text:
    """The text of `path`, or of the standard library if None; at most `limit` bytes of it."""
    return Text(read_library(limit) if path is None else read_file(Path(path), limit), block)


def read_file(path: Path, limit: int = LIMIT) -> bytes:
    if not path.is_file():
        raise ValueError(f"there is no text file {path}: give another by --text, or leave --text away for the source "
                         "of Python's standard library")
    with path.open("rb") as file:
        return file.read(limit)


def read_library(limit: int = LIMIT, root: Path | None = None) -> bytes:
    """The .py files under `root` (the standard library if None) in sorted order, one after the other."""
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    found = bytearray()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - SKIPPED)     # in place: this is what os.walk goes on with, in this order
        for name in sorted(name for name in files if name.endswith(".py")):
            found += Path(folder, name).read_bytes()
            if len(found) >= limit:
                return bytes(found[:limit])
    if not found:
        raise ValueError(f"no Python source under {root}: name a text file by --text")
    return bytes(found)
