"""Faults on purpose: a plan says what breaks where and when, an injector in each rank makes it happen."""
from __future__ import annotations

from recover.faults.injector import DONE_FILE, Done, Injector, done_path, injector_for, read_done
from recover.faults.plan import ACTIONS, INDEXED, PLACES, RECOVERY_PLACES, Fault, FaultPlan

__all__ = ["ACTIONS", "DONE_FILE", "INDEXED", "PLACES", "RECOVERY_PLACES", "Done", "Fault", "FaultPlan", "Injector",
           "done_path", "injector_for", "read_done"]
