"""The README's figures are those of the records."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_results_comes_from_the_records():
    table = subprocess.run([sys.executable, ROOT / "benchmarks" / "table.py"], capture_output=True, text=True, check=True,
                           timeout=30).stdout
    assert table in (ROOT / "README.md").read_text(), "put the output of `python benchmarks/table.py` into the README"
