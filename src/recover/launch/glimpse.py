"""How far a replica got, read from the two ends of its event files (which may be long, torn, or not there at all)."""
from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from recover.events import RECEIPT, RUN_END, RUN_JOINED, VIEW_NEW, Line

END: Final = 1 << 20
"""Bytes that are read from each end of a file."""


@dataclass(frozen=True)
class Glimpse:
    """What the events of one replica say."""

    joined: bool = False
    last_step: int | None = None
    members: tuple[int, ...] | None = None
    status: str = ""                    # of its end: "finished", "left", "evicted", "failed"; "" if it did not say
    message: str = ""                   # likewise


def glimpse(directory: Path, run_id: str, replica: int, pids: Collection[int] | None = None) -> Glimpse:
    """Of all ranks of a replica; its last step is the one that all of its ranks with receipts have committed.

    `pids`: of these processes only (one life of the replica).
    """
    joined, steps, members, status, message = False, [], None, "", ""
    for path in sorted(directory.glob(f"events-replica{replica}-rank*.jsonl")):
        if pids is not None and path.stem.rpartition("-")[2] not in map(str, pids):
            continue
        last = None
        for line in _lines(path):
            if line.run_id != run_id:
                continue
            joined = joined or line.event in (RUN_JOINED, VIEW_NEW, RECEIPT)
            if line.event == RECEIPT:
                last = line.step
            if line.event in (RECEIPT, VIEW_NEW, RUN_END):
                members = _members(line) or members
            if line.event == RUN_END and status != "left":
                status, message = str(line.attributes.get("status", "")), str(line.attributes.get("message", ""))
        if last is not None:
            steps.append(last)
    return Glimpse(joined, min(steps, default=None), members, status, message)


def _members(line: Line) -> tuple[int, ...] | None:
    found = line.attributes.get("members")
    if isinstance(found, list) and found and all(isinstance(member, int) for member in found):
        return tuple(found)
    return None


def _lines(path: Path) -> Iterable[Line]:
    decoder = msgspec.json.Decoder(Line)
    for text in _ends(path):
        try:
            yield decoder.decode(text)
        except msgspec.DecodeError:
            continue                    # cut by a death, or by where we began to read


def _ends(path: Path) -> list[bytes]:
    try:
        with path.open("rb") as file:
            head = file.read(END)
            size = file.seek(0, 2)
            file.seek(max(len(head), size - END))
            return head.splitlines() + file.read(END).splitlines()
    except OSError:
        return []
