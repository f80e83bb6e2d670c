"""The supervisor behind `recover launch`: starts coordinator and ranks, ends what is left, gives the verdict."""
from __future__ import annotations

from recover.launch.options import Options
from recover.launch.supervisor import launch

__all__ = ["Options", "launch"]
