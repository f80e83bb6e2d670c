"""ReCoVer keeps an LLM pre-training run on its failure-free trajectory while machines die under it.

The public names; everything else may change. `join` and `Run` load torch when they are first used, so that the parts
that do without (the coordinator, the launcher, the audit) start fast.
"""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from recover.errors import (
    CheckpointDamaged,
    Diverged,
    Evicted,
    FaultMissed,
    JoinRefused,
    LateGradient,
    Left,
    NotFinite,
    Poisoned,
    RecoverError,
    Stopped,
)

if TYPE_CHECKING:
    from recover.training.checkpoint import Checkpoints
    from recover.training.run import Run, join
    from recover.training.sampling import Microbatch
    from recover.training.step import Step

__version__ = "0.1.0"
__all__ = ["CheckpointDamaged", "Checkpoints", "Diverged", "Evicted", "FaultMissed", "JoinRefused", "LateGradient", "Left",
           "Microbatch", "NotFinite", "Poisoned", "RecoverError", "Run", "Step", "Stopped", "__version__", "join"]

_LAZY = {"Checkpoints": "recover.training.checkpoint",
         "join": "recover.training.run", "Run": "recover.training.run", "Step": "recover.training.step",
         "Microbatch": "recover.training.sampling"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'recover' has no attribute {name!r}")
    import importlib
    return getattr(importlib.import_module(_LAZY[name]), name)
