"""Checkpoints on the disk: whole or not there, damage is found wherever it is, and no code runs from them."""
from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from recover.errors import CheckpointDamaged
from recover.training import checkpoint
from recover.training.checkpoint import Checkpoints, Draft, Manifest, Part, common, found, load, offers, retain, tidy
from recover.training.state import Flat

FACTS = {"seed": 3, "microbatches": 12, "mesh": {"dp_shard": 1}, "data": [[100, 2]]}


def part(value: float = 1.0) -> Part:
    return Part(Flat({"model/w": torch.full((7,), value), "model/none": torch.empty(0, 3)}, {"others": [], "x": None}),
                {"store": {"learned": None}, "lessons": None, "hash": ""})


def written(directory: Path, steps: int, positions: int = 1, facts=FACTS, value: float = 1.0) -> Path:
    draft = Draft(directory, steps, "r0-nonce")
    files = [draft.write(position, part(value + position)) for position in range(positions)]
    assert draft.publish(Manifest(steps=steps, run_id="run", replica=0, facts=facts, notes={}, files=files))
    return directory / f"step-{steps:08d}"


def test_what_is_read_is_what_was_written(tmp_path):
    path = written(tmp_path, 5, positions=2)
    for position in (0, 1):
        got = load(path, position)
        assert torch.equal(got.flat.tensors["model/w"], torch.full((7,), 1.0 + position))
        assert got.flat.tensors["model/none"].shape == (0, 3)
        assert (got.flat.values, got.more) == (part().flat.values, part().more)
    with pytest.raises(CheckpointDamaged, match="position 2"):
        load(path, 2)
    assert offers(tmp_path, 0, FACTS)[0][0][0] == 5


def test_any_flipped_bit_is_found(tmp_path):
    path = written(tmp_path, 5)
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in range(len(content)):
            file.write_bytes(content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1:])
            with pytest.raises(CheckpointDamaged):
                load(path, 0)
        file.write_bytes(content)
    load(path, 0)


@pytest.mark.parametrize("harm", [
    lambda path: (path / "manifest.json").unlink(), lambda path: (path / "position-0.safetensors").unlink(),
    lambda path: (path / "manifest.json").write_bytes(b""), lambda path: os.truncate(path / "position-0.safetensors", 40),
    lambda path: (path / "manifest.json").write_bytes(b"{" * (2 << 20)),
    lambda path: shutil.copy(path.parent / "step-00000005" / "manifest.json", path / "manifest.json")])
def test_a_damaged_one_is_passed_over_and_named(tmp_path, harm):
    written(tmp_path, 5)
    harm(written(tmp_path, 10))
    readable, damaged = offers(tmp_path, 0, FACTS)
    assert [steps for steps, _ in readable] == [5]
    assert len(damaged) == 1
    assert "step-00000010" in damaged[0]


def test_another_version_is_named(tmp_path, monkeypatch):
    path = written(tmp_path, 5)
    monkeypatch.setattr(checkpoint, "FORMAT", "recover checkpoint 2")
    with pytest.raises(CheckpointDamaged, match="recover checkpoint 1"):
        load(path, 0)


@pytest.mark.parametrize(("mine", "said"), [({"seed": 4}, "seed is 3 there and 4 here"), ({"data": []}, "data is"),
                                            ({"mesh": {"tp": 2}}, "another number of replicas, not with another mesh"),
                                            ({"skip": []}, "skip is None there")])
def test_another_runs_is_refused_with_both_values(tmp_path, mine, said):
    written(tmp_path, 5)
    with pytest.raises(ValueError, match=said):
        offers(tmp_path, 0, FACTS | mine)


def test_what_is_half_written_is_not_seen_and_goes(tmp_path):
    written(tmp_path, 5)
    Draft(tmp_path, 10, "r1-x").write(0, part())
    (tmp_path / "notes.txt").write_text("not ours")
    assert [steps for steps, _ in found(tmp_path)] == [5]
    assert tidy(tmp_path, 5) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step-00000005"]


def test_newer_ones_are_set_aside_and_kept(tmp_path):
    for steps in (5, 10):
        written(tmp_path, steps)
    (name,) = tidy(tmp_path, 5)
    assert name.startswith("set-aside-step-00000010")
    assert [steps for steps, _ in found(tmp_path)] == [5]
    assert (tmp_path / name / "manifest.json").exists()


def test_the_newest_are_kept(tmp_path):
    for steps in (5, 10, 15, 100):
        written(tmp_path, steps)
    retain(tmp_path, 2)
    assert [steps for steps, _ in found(tmp_path)] == [100, 15]
    assert len(list(tmp_path.iterdir())) == 2


def test_two_that_write_the_same_step(tmp_path):
    first = written(tmp_path, 5)
    draft = Draft(tmp_path, 5, "r1-x")
    file = draft.write(0, part(9.0))
    assert not draft.publish(Manifest(steps=5, run_id="run", replica=1, facts=FACTS, notes={}, files=[file]))
    assert list(tmp_path.iterdir()) == [first]
    assert float(load(first, 0).flat.tensors["model/w"][0]) == 1.0


def test_two_runs_in_one_directory_are_told(tmp_path):
    first = written(tmp_path, 5)
    draft = Draft(tmp_path, 5, "r1-x")
    file = draft.write(0, part(9.0))
    with pytest.raises(FileExistsError, match="two runs write to"):
        draft.publish(Manifest(steps=5, run_id="other", replica=1, facts=FACTS, notes={}, files=[file]))
    assert list(tmp_path.iterdir()) == [first]


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_nothing_is_unpickled(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, 5)
    bomb = pickle.dumps(Bomb())
    for name in (".metadata", "__0_0.distcp", "data.pkl"):
        (path / name).write_bytes(bomb)
    load(path, 0)                                       # what else lies there is not looked at
    (path / "position-0.safetensors").write_bytes(bomb)
    with pytest.raises(CheckpointDamaged):
        load(path, 0)
    sealed = written(tmp_path, 10)                      # even if the manifest vouches for it
    torch.save({"w": Bomb()}, sealed / "position-0.safetensors")
    data = (sealed / "position-0.safetensors").read_bytes()
    manifest, _ = checkpoint.read_manifest(sealed)
    file = checkpoint.File(hashlib.sha256(data).hexdigest(), len(data))
    (sealed / "manifest.json").write_bytes(msgspec.structs.replace(manifest, files=[file]).text())
    with pytest.raises(CheckpointDamaged, match="can't be read"):
        load(sealed, 0)
    assert not (tmp_path / "exploded").exists()
    pickle.loads(bomb)
    assert (tmp_path / "exploded").exists()             # it would have


def test_what_all_can_read():
    a, b, c = (5, "a"), (10, "b"), (10, "c")
    assert common([[], []]) is None
    assert common([[b, a], [a, b]]) == b
    assert common([[b, a], [c, a]]) == a
    with pytest.raises(ValueError, match="no checkpoint is readable for all"):
        common([[b], []])
    with pytest.raises(ValueError, match="no checkpoint is readable for all"):
        common([[b], [c]])


@pytest.mark.parametrize("wrong", [{"every": 0}, {"minutes": 0}, {"minutes": float("nan")}, {"keep": 0}])
def test_mistakes(wrong):
    with pytest.raises(ValueError, match="checkpoints: "):
        Checkpoints("d", **wrong)
