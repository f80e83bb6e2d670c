"""The direction of imports between layers: read from the syntax tree, so that lazy imports inside functions count too.

Each package of `recover` has a tier; it may import its own tier and the tiers below, never one above, and the packages
form no cycle. `events` and `faults` stand aside: they know only `errors` and `config`; `membership` writes events, and
what is at or above `training` may use both. The pure parts touch no clock, thread or socket.
"""
from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src" / "recover"

TIERS = {
    "errors": 0, "config": 0, "forks": 0, "priority": 0,
    "protocol": 1, "workload": 1,
    "collectives": 2, "membership": 2,
    "gradients": 3, "parallel": 3,
    "training": 4,
    "cli": 5, "launch": 5, "report": 5, "simulate": 5,
}
ASIDE = {"events", "faults"}
ASIDE_MAY_USE = {"errors", "config"}
TORCH = {"collectives", "gradients", "training", "parallel"}
PURE = {"protocol", "workload"}
IMPURE_MODULES = {"asyncio", "multiprocessing", "os", "queue", "select", "selectors", "signal", "socket", "subprocess",
                  "threading", "time"}


def imported(source: str, module: str) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything that `module` (dotted, `.__init__` included) imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[:-node.level] if node.level else []
            name = ".".join(base + ([node.module] if node.module else []))
            yield node.lineno, name
            yield from ((node.lineno, f"{name}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.dump(node.func):
            yield from ((node.lineno, argument.value) for argument in node.args[:1]
                        if isinstance(argument, ast.Constant) and isinstance(argument.value, str))


def package(name: str) -> str | None:
    """`recover.protocol.messages` -> `protocol`; None for the package itself and for others' modules."""
    parts = name.split(".")
    return parts[1] if parts[0] == "recover" and len(parts) > 1 else None


def may_import(importer: str, target: str) -> bool:
    if importer == target:
        return True
    if importer in ASIDE:
        return target in ASIDE_MAY_USE
    if target in ASIDE:
        return TIERS[importer] >= TIERS["training"] or (importer, target) == ("membership", "events")
    return TIERS[target] <= TIERS[importer]


def offences(source: str, module: str) -> list[str]:
    """What the imports of one module break, as `module:line: what`. The facade `recover/__init__.py` may use all."""
    importer = package(module)
    if importer in (None, "__init__"):
        return []
    known = TIERS.keys() | ASIDE
    found = []
    for line, name in imported(source, module):
        top, target = name.split(".")[0], package(name)
        if name == "recover":
            continue                # `from recover import x` is judged by its second name, `recover.x`
        if target is not None and target not in known and not target.startswith("__"):
            found.append(f"{module}:{line}: recover.{target} has no tier")
        elif target in known and not may_import(importer, target):
            found.append(f"{module}:{line}: {importer} must not import {target}")
        if top == "torch" and importer not in TORCH:
            found.append(f"{module}:{line}: {importer} must not import torch")
        if top in IMPURE_MODULES and importer in PURE:
            found.append(f"{module}:{line}: {importer} is pure and must not import {top}")
    return found


def modules() -> list[tuple[str, str]]:
    """(dotted name, source) of every module of the package."""
    return [(".".join(["recover", *path.relative_to(SOURCE).with_suffix("").parts]), path.read_text(encoding="utf-8"))
            for path in sorted(SOURCE.rglob("*.py"))]


def graph(sources: list[tuple[str, str]]) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for module, source in sources:
        importer = package(module)
        targets = {package(name) for _, name in imported(source, module)} & (TIERS.keys() | ASIDE)
        if importer in TIERS or importer in ASIDE:
            edges.setdefault(importer, set()).update(targets - {importer})
    return edges


def cycle(edges: dict[str, set[str]]) -> set[str]:
    """Packages on a cycle: what remains after those without imports have been taken away again and again."""
    left = dict(edges)
    while free := [name for name, targets in left.items() if not targets & left.keys()]:
        for name in free:
            del left[name]
    return set(left)


def test_no_import_runs_backwards() -> None:
    sources = modules()
    assert len(sources) > 5, f"found next to nothing under {SOURCE}"
    assert [offence for module, source in sources for offence in offences(source, module)] == []


def test_every_package_has_a_tier() -> None:
    tops = {package(module) for module, _ in modules()} - {"__init__", "__main__", "_version", None}
    assert tops <= TIERS.keys() | ASIDE


def test_packages_form_no_cycle() -> None:
    assert cycle(graph(modules())) == set()


@pytest.mark.parametrize(("module", "source", "said"), [
    ("recover.protocol.step", "from recover.membership import client", "protocol must not import membership"),
    ("recover.protocol.step", "from recover import training", "protocol must not import training"),
    ("recover.protocol.step", "from ..gradients.exact import add", "protocol must not import gradients"),
    ("recover.collectives.tcp", "def f():\n    import recover.training.run", "collectives must not import training"),
    ("recover.workload.roles", "if TYPE_CHECKING:\n    import recover.launch.env", "workload must not import launch"),
    ("recover.membership.client", "importlib.import_module('recover.launch')", "membership must not import launch"),
    ("recover.errors", "from recover.protocol.messages import View", "errors must not import protocol"),
    ("recover.events", "from recover.protocol.messages import View", "events must not import protocol"),
    ("recover.membership.client", "from recover.faults import Injector", "membership must not import faults"),
    ("recover.launch.supervisor", "import torch.distributed as dist", "launch must not import torch"),
    ("recover.simulate.world", "from torch import nn", "simulate must not import torch"),
    ("recover.protocol.step", "import time", "protocol is pure and must not import time"),
    ("recover.training.run", "from recover.novelty import x", "recover.novelty has no tier"),
])
def test_a_backward_import_is_found(module: str, source: str, said: str) -> None:
    assert any(said in offence for offence in offences(source, module))


@pytest.mark.parametrize(("module", "source"), [
    ("recover.training.run", "from recover.events import EventLog\nimport torch\nfrom recover.faults import Injector"),
    ("recover.protocol.step", "from recover.workload.policy import Plan\nimport dataclasses"),
    ("recover.cli", "def launch():\n    from recover.launch.supervisor import Supervisor"),
    ("recover.__init__", "from recover.training import Run"),
    ("recover.gradients.__init__", "from .buckets import Bucket\nfrom ..errors import LateGradient"),
])
def test_a_forward_import_is_not(module: str, source: str) -> None:
    assert offences(source, module) == []


def test_a_cycle_is_found() -> None:
    sources = [("recover.protocol.a", "import recover.workload.b"), ("recover.workload.b", "import recover.protocol.a"),
               ("recover.errors", "import os")]
    assert cycle(graph(sources)) == {"protocol", "workload"}


def test_what_may_not_import_torch_does_not_load_it() -> None:
    """Not even by way of the facade: a coordinator that loads torch takes seconds to come back."""
    check = "import recover.protocol, recover.workload, sys; sys.exit('torch' in sys.modules)"
    path = {"PYTHONPATH": str(SOURCE.parent)}
    loaded = subprocess.run([sys.executable, "-c", check], env=path, timeout=30, check=False)
    assert loaded.returncode == 0
