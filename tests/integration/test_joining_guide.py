"""The recipes in docs/joining.md, run as scripts: the page's own code, on tiny models."""
from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "joining.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

DATA = """
import json, os
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
text = torch.randint(0, 16, (64, 7)).clamp(max=3)          # few symbols: quickly learned
dataset = torch.utils.data.TensorDataset(text[:, :-1], text[:, 1:])

"""
HUGGING_FACE = DATA + BLOCKS[1] + """

from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                     num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=8))
dataset = torch.utils.data.TensorDataset(text, text)        # the library's loss moves labels on by itself
print(json.dumps(train(model, dataset, steps=3, microbatches=4)))
"""
TITAN = DATA + BLOCKS[2] + """

def build_stage(index, count):
    torch.manual_seed(index)
    first = [torch.nn.Embedding(16, 8)] if index == 0 else []
    last = [torch.nn.Linear(8, 16)] if index == count - 1 else []
    return torch.nn.Sequential(*first, torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), *last)

def loss_fn(logits, y):
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())

losses = train(build_stage, loss_fn, dataset, steps=3, microbatches=6)
if os.environ["RANK"] == "0":
    print(json.dumps(losses))
"""

pytestmark = pytest.mark.integration


def run(command: list[str]) -> list[float]:
    """The losses that the script printed."""
    done = subprocess.run([sys.executable, *command], env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, timeout=50,
                          capture_output=True, text=True, check=False)
    found = re.search(r"\[-?\d[\d., e-]*\]", done.stdout)
    assert done.returncode == 0 and found, done.stdout[-2000:] + done.stderr[-4000:]
    losses: list[float] = json.loads(found.group())
    return losses


def learns(losses: list[float]) -> bool:
    return len(losses) == 3 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]


def test_the_page_has_before_and_after() -> None:
    assert len(BLOCKS) == 3
    assert "Accelerator" in BLOCKS[0] and "recover" not in BLOCKS[0]


def test_the_hugging_face_recipe(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script = tmp_path / "script.py"
    script.write_text(HUGGING_FACE)
    assert learns(run([str(script)]))


def test_the_torchtitan_recipe(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TITAN)
    assert learns(run(["-m", "recover.cli", "launch", "--replicas", "1", "--ranks-per-replica", "2", str(script)]))
