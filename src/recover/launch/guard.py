"""Two processes, each of which ends the run if the other dies: nothing is left behind, whoever is killed.

Theory of operation
-------------------
The process that the user started becomes the *front*; it forks the *supervisor* and then only forwards signals, reaps
and waits. Everything of the run descends from the supervisor.

    front killed        the supervisor reads the end of a pipe whose other end only the front holds, kills everything
                        below itself and exits
    supervisor killed   the kernel kills its children (`shim`), and what they forked becomes the front's, since that is
                        a subreaper: it kills everything below itself
    front is process 1  of a container: it reaps whatever ends up with it, and has handlers for the signals, which the
                        kernel would otherwise not even deliver to a first process

Signals are blocked from before the fork until both have their handlers, so that none is lost in between.
"""
from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType

from recover.launch.reaper import become_subreaper, descendants, sweep

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def guard(supervise: Callable[[int], int]) -> int:
    """Run `supervise(pipe)` in a process of its own and return its exit code (128 + signal if it was killed).

    `pipe` becomes readable (end of file) when this process is gone. To be called by a process with one thread.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    become_subreaper()
    elders = frozenset(descendants(os.getpid()))        # an entry script's, started before it became us: not the run's
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        _supervisor(supervise, reading)
    os.close(reading)

    def forward(number: int, frame: FrameType | None) -> None:
        try:
            os.kill(child, number)
        except ProcessLookupError:
            pass

    for number in FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    status = _wait(child)
    left = sweep(keep=elders)
    if left:
        print(f"[launch] could not end the processes {sorted(left)}", file=sys.stderr)
    os.close(writing)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        print(f"[launch] the supervisor was killed by {signal.Signals(-code).name}: the run is ended", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _supervisor(supervise: Callable[[int], int], pipe: int) -> None:
    """Never returns."""
    code = 1
    try:
        os.setsid()                         # the terminal's signals reach the front only, which forwards them
        become_subreaper()
        code = supervise(pipe)
    except BaseException:                   # noqa: BLE001 - the edge of this process: it must not run the caller's code
        traceback.print_exc()
    finally:
        sweep()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(child: int) -> int:
    while True:
        pid, status = os.waitpid(-1, 0)     # any: orphans that became ours are reaped too
        if pid == child:
            return status
