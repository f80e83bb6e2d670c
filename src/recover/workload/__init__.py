"""Who computes which microbatch: policies, by name.

`policy("balanced")` and so on; `register` adds one. See policy.py for what a policy is and docs/policies.md for how to
write one.
"""
from __future__ import annotations

from collections.abc import Callable

from recover.workload.balanced import Balanced
from recover.workload.policy import Plan, Policy, check_plan, check_share
from recover.workload.roles import Roles, RolesRun, advance
from recover.workload.shrinking import Shrinking
from recover.workload.spares import Spares
from recover.workload.speed import Speedometer, SpeedWeighted

__all__ = ["Balanced", "Plan", "Policy", "Roles", "RolesRun", "Shrinking", "Spares", "SpeedWeighted", "Speedometer", "advance",
           "check_plan", "check_share", "policy", "register"]

Factory = Callable[[int | None, int | None], Policy]
"""(replicas at the start, microbatches per step) -> policy; None: not known where the policy is asked for"""


def _per_replica(name: str, replicas: int | None, microbatches: int | None) -> tuple[int, int]:
    if not replicas or not microbatches:
        raise ValueError(f"policy {name!r} needs to know replicas and microbatches, not {replicas} and {microbatches}")
    if microbatches % replicas:
        raise ValueError(f"policy {name!r} needs microbatches to be a multiple of replicas: {microbatches} is none of "
                         f"{replicas}; choose another number, or policy 'balanced'")
    return replicas, microbatches // replicas


_factories: dict[str, Factory] = {
    "balanced": lambda replicas, microbatches: Balanced(),
    "speed": lambda replicas, microbatches: SpeedWeighted(),
    "roles": lambda replicas, microbatches: Roles(*_per_replica("roles", replicas, microbatches)),
    "shrinking": lambda replicas, microbatches: Shrinking(_per_replica("shrinking", replicas, microbatches)[1]),
}


def policy(name: str | Policy, *, replicas: int | None = None, microbatches: int | None = None) -> Policy:
    """The policy of that name; a policy object is returned as it is.

    `replicas` (at the start) and `microbatches` (B) are needed by "roles" and "shrinking" only. Raises ValueError for
    an unknown name, listing the known ones.
    """
    if not isinstance(name, str):
        return name
    if name not in _factories:
        raise ValueError(f"there is no policy {name!r}; known are {', '.join(sorted(_factories))}")
    return _factories[name](replicas, microbatches)


def register(name: str, factory: Factory) -> None:
    """Make a policy known by name, on every replica alike. Raises ValueError if the name is taken."""
    if name in _factories:
        raise ValueError(f"policy {name!r} is already registered; choose another name")
    _factories[name] = factory
