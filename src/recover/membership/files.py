"""Open files: as many as the system lets us, and a clear word at the start if that can't be enough."""
from __future__ import annotations

import contextlib
import resource

PER_RANK = 6
"""That a coordinator needs for each rank: connection, two lifelines, pulse, and two while connections are renewed."""
SPARE = 128


def raise_limit(need: int, what: str) -> None:
    """Allow this process as many open files as it may have. ValueError if `what` needs more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < need:
        raise ValueError(f"{what} may need {need} open files, and this process may have {soft}: raise the limit (`ulimit -n "
                         f"{need}`, or LimitNOFILE= of its service)")


def for_coordinator(replicas: int, ranks: int) -> None:
    """ValueError if the connections of so many ranks can't be kept."""
    raise_limit(PER_RANK * replicas * ranks + SPARE, f"a coordinator for {replicas} replicas of {ranks} ranks")


def for_rank(replicas: int, ranks: int) -> None:
    """ValueError if a rank can't be connected with its peers: in the old view, the new one, and parked for the next."""
    raise_limit(3 * replicas + 2 * ranks + SPARE, f"a rank among {replicas} replicas of {ranks} ranks")
