"""`torch.compile` and `exact`: kernels that are chosen by measuring differ from process to process, and so do their bits."""
from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

MEASURED = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")
"""Settings of inductor that time candidates on the machine at hand and take the fastest."""


def refuse_measured(models: Iterable[nn.Module]) -> None:
    """Raises ValueError where a model was compiled, or everything is to be, with kernels chosen by measuring."""
    for where, config in settings(models):
        found = [name for name in MEASURED if config.get(name)]
        if found:
            raise ValueError(f'reduction="exact" needs the same kernels on every replica, but {where} is compiled with '
                             f'{", ".join(found)}, which chooses them by measuring: compile without mode="max-autotune" (the '
                             'default mode is fine), or take reduction="fast"')


def settings(models: Iterable[nn.Module]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(what, inductor's settings for it)"""
    inductor: Any = sys.modules.get("torch._inductor.config")
    if inductor is not None:
        yield "everything", {name: getattr(inductor, name, False) for name in MEASURED}
    for model in models:
        for name, module in model.named_modules():
            for compiled in (module, getattr(module, "_compiled_call_impl", None)):
                config = getattr(compiled, "get_compiler_config", None)     # of an OptimizedModule, or of module.compile()
                if config is not None:
                    yield name or type(module).__name__, config() or {}
