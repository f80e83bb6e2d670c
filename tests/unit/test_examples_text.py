"""The example's dataset and model."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

# The examples are scripts, not a package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import model
import text


def test_items_are_consecutive_blocks_and_the_target_is_one_byte_on() -> None:
    data = bytes(range(100))
    dataset = text.Text(data, block=8)
    assert len(dataset) == (100 - 1) // 8
    seen = []
    for index in range(len(dataset)):
        x, y = dataset[index]
        assert x.dtype == y.dtype == torch.int64
        assert x.shape == y.shape == (8,)
        assert torch.equal(x + 1, y)
        seen += x.tolist()
    assert seen == list(range(12 * 8))


def test_the_last_block_has_its_target() -> None:
    assert len(text.Text(bytes(16), block=8)) == 1      # a second block would lack the byte after it
    assert len(text.Text(bytes(17), block=8)) == 2


@pytest.mark.parametrize("index", [-1, 12])
def test_outside_is_an_index_error(index: int) -> None:
    with pytest.raises(IndexError, match=f"block {index} of 12"):
        text.Text(bytes(range(100)), block=8)[index]


def test_a_text_shorter_than_a_block_is_refused() -> None:
    with pytest.raises(ValueError, match="has 8 bytes, one block of 8 needs 9"):
        text.Text(bytes(8), block=8)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no text file .*nowhere\.txt"):
        text.load(tmp_path / "nowhere.txt", 8)


def test_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(bytes(range(100)))
    assert text.read_file(path, limit=10) == bytes(range(10))


def test_the_library_is_read_in_sorted_order_without_packages_and_tests(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "z/c.py", "m/d.py", "m/notes.txt", "site-packages/x.py", "test/t.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"<{name}>")
    assert text.read_library(root=tmp_path) == b"<a.py><b.py><m/d.py><z/c.py>"
    assert text.read_library(limit=8, root=tmp_path) == b"<a.py><b"


def test_an_empty_library_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Python source"):
        text.read_library(root=tmp_path)


def test_this_machines_library_is_enough_for_the_demo() -> None:
    assert len(text.read_library(limit=1 << 20)) == 1 << 20


TINY = model.Config(block=8, layers=1, heads=2, width=16)


def test_the_model_sees_no_later_byte() -> None:
    torch.manual_seed(0)
    gpt = model.GPT(TINY).eval()
    x = torch.randint(256, (2, 8))
    changed = x.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    with torch.no_grad():
        before, after = gpt(x), gpt(changed)
    assert before.shape == (2, 8, 256)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_embedding_and_output_are_one_parameter() -> None:
    gpt = model.GPT(TINY)
    assert gpt.head.weight is gpt.bytes.weight
    assert len(list(gpt.parameters())) == len({id(parameter) for parameter in gpt.parameters()})


def test_it_learns_a_batch_by_heart() -> None:
    torch.manual_seed(0)
    gpt = model.GPT(model.Config(block=8, layers=1, heads=2, width=16, dropout=0.0))
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    x, y = torch.randint(256, (2, 8)), torch.randint(256, (2, 8))
    losses = []
    for _ in range(40):
        loss = model.loss_fn(gpt(x), y)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[0] == pytest.approx(5.545, abs=0.2)       # ln 256: knows nothing
    assert losses[-1] < 0.7 * losses[0]


def test_a_sequence_that_is_too_long_is_named() -> None:
    with pytest.raises(ValueError, match="9 bytes does not fit block=8"):
        model.GPT(TINY)(torch.zeros(1, 9, dtype=torch.int64))


def test_a_width_that_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="width=10 must be a multiple of heads=4"):
        model.Config(width=10)
