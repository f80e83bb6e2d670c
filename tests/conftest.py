"""Tests import helpers that lie beside them (doubles, harnesses) by name."""
from __future__ import annotations

import sys
from pathlib import Path

for folder in ("unit", "simulation", "integration", "scenarios", "."):
    path = str(Path(__file__).parent / folder)
    if path not in sys.path:
        sys.path.insert(0, path)
