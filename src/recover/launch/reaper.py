"""Processes: start them so that they can't outlive the run, notice their ends, and end whatever is left of them.

Theory of operation
-------------------
* Every child leads a session and process group of its own, so that one signal reaches it with all that it forked (a
  loader's workers). When a child ends, its group is killed *before* the child is reaped: as long as the zombie is
  there, its number can't belong to anybody else.
* Both processes of the launcher (see `guard`) are *subreapers*: an orphan of the run becomes their child, whoever its
  parent was, even if it made a session of its own. `sweep` kills the descendants until there are none.
* A stopped process (SIGSTOP) can't handle SIGTERM, but SIGKILL ends it: every polite request has a deadline.
* Children are started by the main thread only: PR_SET_PDEATHSIG (see `shim`) follows the thread that forked.
"""
from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SHIM = Path(__file__).with_name("shim.py")
PR_SET_CHILD_SUBREAPER = 36


@dataclass(eq=False)
class Child:
    """A process that was started here: `name` for people, `code` once it is over (negative: the signal)."""

    name: str
    pid: int
    process: subprocess.Popen[bytes] = field(repr=False)
    code: int | None = None
    ended: bool = False                     # by us
    deadline: float | None = None           # when a polite end becomes SIGKILL


class Children:
    """The children of this process. All waits are bounded; only the main thread may start one."""

    def __init__(self) -> None:
        self._alive: dict[int, Child] = {}

    @property
    def alive(self) -> tuple[Child, ...]:
        """Those that are not over."""
        return tuple(self._alive.values())

    def start(self, name: str, command: Sequence[str], environ: Mapping[str, str]) -> Child:
        """Start a program with pipes for its output and nothing to read. OSError if the shim can't be started."""
        assert threading.current_thread() is threading.main_thread(), "the parent-death signal follows the thread"
        shim = [sys.executable, "-I", "-S", str(SHIM), str(os.getpid())]
        process = subprocess.Popen([*shim, *command], env=dict(environ), start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        child = Child(name, process.pid, process)
        self._alive[child.pid] = child
        return child

    def end(self, child: Child, grace: float, number: int = signal.SIGTERM) -> None:
        """Ask a child to end, and kill its group when `grace` seconds have passed (at once if 0)."""
        if child.code is not None:
            return
        child.ended = True
        deadline = time.monotonic() + grace
        child.deadline = deadline if child.deadline is None else min(child.deadline, deadline)
        if grace > 0:
            os.kill(child.pid, number)      # it is not reaped, so the number is still its own
        else:
            kill_group(child.pid)

    def expect(self, child: Child, grace: float) -> None:
        """A child that should end by itself is killed if it has not within `grace` seconds."""
        if child.code is None and child.deadline is None:
            child.deadline = time.monotonic() + grace

    def enforce(self) -> None:
        """Kill those whose grace has passed."""
        now = time.monotonic()
        for child in self.alive:
            if child.deadline is not None and child.deadline <= now:
                kill_group(child.pid)

    def reap(self) -> Iterator[Child]:
        """The children that are over, with their code set; orphans that became ours are reaped on the way."""
        while True:
            try:
                seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if seen is None:
                return
            child = self._alive.pop(seen.si_pid, None)
            if child is not None:
                kill_group(child.pid)       # before it is reaped: the group's number is still taken
            os.waitpid(seen.si_pid, 0)
            if child is None:
                continue
            child.code = seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
            child.process.returncode = child.code       # reaped behind its back
            yield child


def kill_group(pid: int) -> None:
    """SIGKILL to a process group, if it still exists."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def become_subreaper() -> None:
    """Orphans among our descendants become our children (Linux; elsewhere nothing happens)."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        pass


def descendants(root: int, keep: frozenset[int] = frozenset()) -> set[int]:
    """All processes below `root` that are not zombies, by /proc; empty where there is none. `keep` hides subtrees."""
    children: dict[int, list[int]] = {}
    zombies = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue                        # it ended meanwhile
        children.setdefault(int(parent), []).append(int(entry.name))
        if state in "ZX":
            zombies.add(int(entry.name))
    found: set[int] = set()
    waiting = [root]
    while waiting:
        below = [pid for pid in children.get(waiting.pop(), []) if pid not in keep]
        waiting += below
        found.update(below)
    return found - zombies


def sweep(timeout: float = 5.0, keep: frozenset[int] = frozenset()) -> set[int]:
    """Kill and reap all descendants but `keep`'s subtrees; returns those still there after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        left = descendants(os.getpid(), keep)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
        _reap_all()
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.005)


def _reap_all() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
