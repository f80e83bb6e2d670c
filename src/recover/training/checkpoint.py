"""Checkpoints on the disk: what one is, how it is written so that a kill at any moment harms none, how it is read.

Theory of operation
-------------------
A checkpoint is a directory, `step-00000100`: the state after 100 steps (the next one is step 100).

    manifest.json               run facts, and SHA-256 and length of each file; its own digest too
    position-0.safetensors      tensors of the rank at position 0 of a replica, and its plain values in the header
    position-1.safetensors      ...

* It is written under another name (`.writing-...`), every file is flushed to the disk, the manifest comes last, and then
  the directory is renamed. So whatever bears the name `step-...` was whole once; what a kill left half written does not,
  is never read, and is removed when a run begins.
* Reading trusts nothing: every byte of manifest and tensors is covered by a digest, names of files are made here and not
  taken from the manifest, and nothing is unpickled: safetensors holds numbers, the header holds JSON. What else
  lies in the directory is not looked at.
* Where two replicas write the same step (both thought it was their turn), one of the renames fails, and that copy is dropped.
* The oldest are removed once there are more than `keep`; first renamed, so that a half-removed one is not mistaken for a
  damaged one. Those newer than the one that a run began from (unreadable for some member, or `resume=False`) would stand
  in its way: they are renamed to `set-aside-...`, and never removed.
"""
from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from recover.errors import CheckpointDamaged
from recover.training.state import Flat

FORMAT: Final = "recover checkpoint 1"
MANIFEST: Final = "manifest.json"
LIMIT: Final = 1 << 20
"""Bytes of a manifest."""
OFFERED: Final = 64
"""Checkpoints that are looked at, the newest first."""

WRITE_ERRORS: Final = (OSError, SafetensorError)
_NAME = re.compile(r"step-(\d{8,15})")


@dataclass(frozen=True)
class Checkpoints:
    """Where and how often: `recover.join(checkpoint=recover.Checkpoints("dir", every=100))`.

    directory: the same for all replicas, on a file system that all of them see. every: steps between two. minutes: or the
    time (by the clock of whoever computed microbatch 0). keep: how many stay, at least 1. resume: go on from the newest one
    that all replicas can read; with False the run begins anew, and what is there is set aside. One more is written after the
    last step. Raises ValueError.
    """

    directory: str | Path
    every: int | None = None
    minutes: float | None = None
    keep: int = 3
    resume: bool = True

    def __post_init__(self) -> None:
        if self.every is not None and self.every < 1:
            raise ValueError(f"checkpoints: every is a number of steps, at least 1, not {self.every}")
        if self.minutes is not None and not 0 < self.minutes < float("inf"):
            raise ValueError(f"checkpoints: minutes must be above 0, not {self.minutes}")
        if self.keep < 1:
            raise ValueError(f"checkpoints: keep at least 1, not {self.keep}")

    def rhythm(self) -> str:
        """In words; all replicas must have the same."""
        return f"checkpoints every {self.every} steps, {self.minutes} minutes"


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of a checkpoint."""

    sha256: str
    bytes: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a checkpoint is. `facts` must be those of the run that resumes; `notes` may differ (torch's version, ...)."""

    steps: int
    run_id: str
    replica: int
    facts: dict[str, Any]
    notes: dict[str, Any]
    files: list[File]               # by position
    format: str = FORMAT
    digest: str = ""

    def text(self) -> bytes:
        """As it is written: sealed, and in one form only."""
        plain = msgspec.json.encode(msgspec.structs.replace(self, digest=""), order="sorted")
        sealed = msgspec.structs.replace(self, digest=hashlib.sha256(plain).hexdigest())
        return msgspec.json.format(msgspec.json.encode(sealed, order="sorted"), indent=1) + b"\n"


@dataclass(frozen=True)
class Part:
    """What one rank keeps: its state, and what its gradient store and step 0 taught."""

    flat: Flat
    more: dict[str, Any]            # plain values: "store", "lessons", "hash"


def part_name(position: int) -> str:
    return f"position-{position}.safetensors"


# ---------------------------------------------------------------- writing

class Draft:
    """A checkpoint that is being written, under a name that readers don't look at. `nonce`: the same on all ranks of the
    replica, and on no other. Raises OSError and SafetensorError."""

    def __init__(self, directory: Path, steps: int, nonce: str) -> None:
        self.directory, self.steps = directory, steps
        self.path = directory / f".writing-{steps:08d}-{nonce}"

    def write(self, position: int, part: Part) -> File:
        """This rank's file, flushed to the disk."""
        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / part_name(position)
        header = json.dumps({"values": part.flat.values, "more": part.more}, allow_nan=False)
        save_file(part.flat.tensors, path, metadata={"recover": header})
        with path.open("rb+") as file:
            os.fsync(file.fileno())
            return File(hashlib.file_digest(file, "sha256").hexdigest(), os.fstat(file.fileno()).st_size)

    def publish(self, manifest: Manifest) -> bool:
        """All positions are in: it gets its name. False: another replica was first, and this copy is dropped.

        Raises OSError; FileExistsError if it is another run that was first.
        """
        with (self.path / MANIFEST).open("wb") as file:
            file.write(manifest.text())
            file.flush()
            os.fsync(file.fileno())
        flush_directory(self.path)
        target = self.directory / f"step-{self.steps:08d}"
        try:
            if target.exists():
                return self._second(target, manifest)
            self.path.rename(target)
        except OSError:
            if not target.exists():
                raise
            return self._second(target, manifest)
        flush_directory(self.directory)
        return True

    def _second(self, target: Path, manifest: Manifest) -> bool:
        self.drop()
        with suppress(CheckpointDamaged):
            other, _ = read_manifest(target)
            if other.run_id != manifest.run_id:             # what an earlier run left is renamed before this one begins
                raise FileExistsError(f"{target.name} was just written by another run ({other.run_id}): two runs write to "
                                      f"{self.directory}")
        return False

    def drop(self) -> None:
        """It was not finished: nothing of it stays."""
        shutil.rmtree(self.path, ignore_errors=True)


def flush_directory(path: Path) -> None:
    """Names in it are on the disk, too."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Renamed first: whoever reads meanwhile sees all of it or nothing. Others may be removing it, too."""
    gone = path.with_name(f".removing-{path.name}-{secrets.token_hex(4)}")
    with suppress(FileNotFoundError):
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def retain(directory: Path, keep: int) -> None:
    """Only the `keep` newest stay."""
    for _, path in found(directory)[keep:]:
        remove(path)


def tidy(directory: Path, start: int) -> list[str]:
    """When a run begins after `start` steps, by one rank: removes what was left half written, sets aside what is newer.

    Gives the new names of those.
    """
    if not directory.is_dir():
        return []
    for path in directory.iterdir():
        if path.name.startswith((".writing-", ".removing-")):
            shutil.rmtree(path, ignore_errors=True)
    aside = []
    for steps, path in found(directory):
        if steps > start:
            name = f"set-aside-{path.name}-{secrets.token_hex(4)}"
            path.rename(path.with_name(name))
            aside.append(name)
    return aside


# ---------------------------------------------------------------- reading

def found(directory: Path) -> list[tuple[int, Path]]:
    """(steps, path) of what bears a checkpoint's name, the newest first."""
    try:
        names = [(path, _NAME.fullmatch(path.name)) for path in directory.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(((int(match[1]), path) for path, match in names if match), reverse=True)


def read_manifest(path: Path) -> tuple[Manifest, str]:
    """The manifest of a checkpoint and its identity (32 hexadecimal digits). Raises CheckpointDamaged."""
    try:
        with (path / MANIFEST).open("rb") as file:
            text = file.read(LIMIT + 1)
        manifest = msgspec.json.decode(text[:LIMIT], type=Manifest)
    except OSError as error:
        raise CheckpointDamaged(f"{path}: its manifest can't be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointDamaged(f"{path}: its manifest is no manifest: {error}") from None
    if manifest.format != FORMAT:
        raise CheckpointDamaged(f"{path}: its format is {manifest.format!r}; this version reads {FORMAT!r}")
    if manifest.text() != text or path.name != f"step-{manifest.steps:08d}":
        raise CheckpointDamaged(f"{path}: its manifest was altered after it was written")
    return manifest, hashlib.sha256(text).hexdigest()[:32]


def check_file(path: Path, expected: File, *, thorough: bool) -> None:
    """Raises CheckpointDamaged unless the file is what the manifest says (`thorough`: every byte, else its length)."""
    try:
        with path.open("rb") as file:
            length = os.fstat(file.fileno()).st_size
            digest = hashlib.file_digest(file, "sha256").hexdigest() if thorough and length == expected.bytes else None
    except OSError as error:
        raise CheckpointDamaged(f"{path} can't be read: {error.strerror}") from None
    if length != expected.bytes:
        raise CheckpointDamaged(f"{path} has {length} bytes; its manifest says {expected.bytes}")
    if digest is not None and digest != expected.sha256:
        raise CheckpointDamaged(f"{path} is damaged: its SHA-256 is {digest[:16]}..., not {expected.sha256[:16]}...")


def load(path: Path, position: int) -> Part:
    """This rank's part, checked byte for byte. Raises CheckpointDamaged."""
    manifest, _ = read_manifest(path)
    if position >= len(manifest.files):
        raise CheckpointDamaged(f"{path} has nothing for position {position}")
    file = path / part_name(position)
    check_file(file, manifest.files[position], thorough=True)
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            header = json.loads((opened.metadata() or {}).get("recover", ""))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        return Part(Flat(tensors, header["values"]), header["more"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointDamaged(f"{file} can't be read: {type(error).__name__}: {error}") from None


def past(facts: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """What is to be skipped later may change: whoever is stopped by a microbatch skips it from then on."""
    found = dict(facts)
    if "skip" in found:
        found["skip"] = [name for name in found["skip"] if name[0] < steps]
    return found


def compare(path: Path, manifest: Manifest, facts: Mapping[str, Any]) -> None:
    """Raises ValueError that names what differs: the checkpoint is of another run."""
    facts = past(facts, manifest.steps)
    if manifest.facts.get("mesh") != facts.get("mesh"):
        raise ValueError(f"{path} was written by replicas of the mesh {manifest.facts.get('mesh')}, and here they are "
                         f"{facts.get('mesh')}: a run can be resumed with another number of replicas, not with another mesh "
                         "inside them")
    differs = [key for key in {**manifest.facts, **facts} if manifest.facts.get(key) != facts.get(key)]
    if differs:
        said = "; ".join(f"{key} is {manifest.facts.get(key)!r} there and {facts.get(key)!r} here" for key in differs)
        raise ValueError(f"{path} is a checkpoint of another run: {said}. Choose another directory, or resume=False")


def offers(directory: Path, position: int, facts: Mapping[str, Any]) -> tuple[list[tuple[int, str]], list[str]]:
    """((steps, identity) of checkpoints that this rank can read, newest first; what is wrong with others, in words).

    The newest is read byte by byte, of the others only the length is looked at (they are read in full when chosen). Raises
    ValueError for another run's.
    """
    readable: list[tuple[int, str]] = []
    damaged: list[str] = []
    for steps, path in found(directory)[:OFFERED]:
        try:
            manifest, identity = read_manifest(path)
            compare(path, manifest, facts)
            if position >= len(manifest.files):
                raise CheckpointDamaged(f"{path} has nothing for position {position}")
            check_file(path / part_name(position), manifest.files[position], thorough=not readable)
        except CheckpointDamaged as wrong:
            damaged.append(str(wrong))
        else:
            readable.append((steps, identity))
    return readable, damaged


def common(offered: Sequence[Sequence[tuple[int, str]]]) -> tuple[int, str] | None:
    """The newest that all can read; None if nobody has any. Raises ValueError if there is none that all can read."""
    if not any(offered):
        return None
    shared = set(offered[0]).intersection(*offered[1:])
    if not shared:
        said = "; ".join(f"{len(each)} ({', '.join(str(steps) for steps, _ in each[:4]) or 'none'})" for each in offered)
        raise ValueError("no checkpoint is readable for all replicas; they can read, newest first: " + said + ". All must see "
                         "the same directory; or begin anew with resume=False")
    return max(shared)


__all__ = ["Checkpoints", "Draft", "File", "Manifest", "Part"]
