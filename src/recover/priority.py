"""Who goes first when processors are short: whoever moves news or sums, then training, then what is made ahead of time.

A member thread, a communication thread and the coordinator need the processor for microseconds, but at once: a survivor
that waits for one of them waits with all others. Loaders' workers prepare what is needed later. On a host with a
processor for each of them none of this changes anything.
"""
from __future__ import annotations

import os
import threading

FAVOURED = -10
PATIENT = 10


def favour() -> None:
    """Let the calling thread go first, where the system permits it (it takes CAP_SYS_NICE); otherwise nothing happens."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), FAVOURED)
    except OSError:
        pass


def yield_to_others() -> None:
    """Let the calling process (a loader's worker) go last."""
    os.setpriority(os.PRIO_PROCESS, 0, max(PATIENT, os.getpriority(os.PRIO_PROCESS, 0)))
