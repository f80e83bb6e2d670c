"""Every `*.txt` beside this file is a schedule, and below `---` the decisions and the ledger that must come of it."""
from __future__ import annotations

from pathlib import Path

import pytest
from play import parse, play

FILES = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_scenario(path):
    text = path.read_text()
    assert play(text) == text.split("---\n")[1]


def test_a_typing_error_is_named():
    with pytest.raises(ValueError, match="kil 2 at"):
        parse("replicas 2\nkil 2 at compute:0 of step 0\n")


def test_a_kill_that_does_not_happen_is_named():
    with pytest.raises(AssertionError, match="did not happen"):
        play("replicas 2\nmicrobatches 2\nkill 1 at compute:5 of step 0\n---\n")
