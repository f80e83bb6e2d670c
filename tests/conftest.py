"""Tests import helpers that lie beside them (doubles, harnesses) by name. `pytest -m slow` runs what is marked `slow`, too."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in ("unit", "simulation", "integration", "scenarios", "."):
    path = str(Path(__file__).parent / folder)
    if path not in sys.path:
        sys.path.insert(0, path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "slow" not in config.getoption("-m"):
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="the long suite: pytest -m slow"))
