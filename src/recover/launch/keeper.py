"""Keeps a coordinator running: starts it, learns its port, and starts it again when it dies.

Theory of operation
-------------------
The coordinator is off the failure-free path: when it dies, training goes on, and a new one on the same address is told
everything by the members. So it is simply started again, each time with a higher incarnation (a view's number begins
with it) and, while it keeps dying at once, ever later. Only a first one that never tells its port ends the run.
"""
from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from recover.events import COORDINATOR_END, COORDINATOR_START, Log
from recover.launch.options import Options, host_and_port
from recover.launch.output import Output
from recover.launch.reaper import Child, Children
from recover.launch.verdict import describe

COMMAND: Final = (sys.executable, "-u", "-m", "recover.membership.coordinator")
FIRST_PORT: Final = 60.0
"""Seconds that the first coordinator has to tell its port."""
PAUSES: Final = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds before the next start, by how often it died within `SETTLED` seconds."""
SETTLED: Final = 10.0


class Guest:
    """Stands in for `Keeper` where the coordinator is another launch's: nothing to keep."""

    failed: str | None = None

    def __init__(self, address: str) -> None:
        self.address: str | None = address

    def owns(self, child: Child) -> bool:
        return False

    def tick(self) -> None:
        pass

    def over(self) -> None:
        raise AssertionError("a guest has no coordinator")

    def stop(self, grace: float) -> None:
        pass


class Keeper:
    """One coordinator at a time. `address` is None until the first one listens; `failed` says why it never will."""

    def __init__(self, options: Options, children: Children, output: Output, log: Log, private: Path,
                 command: Sequence[str] = COMMAND) -> None:
        self._options, self._children, self._output, self._log = options, children, output, log
        self._private, self._command = private, tuple(command)
        self._incarnation = -1
        self._child: Child | None = None
        self._listen = options.listen
        self._started = self._next = time.monotonic()
        self._quick_deaths = 0
        self._stopping = False
        self.address: str | None = None
        self.failed: str | None = None

    def owns(self, child: Child) -> bool:
        """Whether this is the coordinator's process."""
        return child is self._child

    def tick(self) -> None:
        """Start one if it is time to, and look for the port of the first."""
        if self._child is None and not self._stopping and self.failed is None and time.monotonic() >= self._next:
            self._start()
        if self.address is None and self.failed is None:
            self._look_for_port()

    def over(self) -> None:
        """The process has ended: plan the next start."""
        assert self._child is not None
        code = self._child.code
        assert code is not None
        self._log.emit(COORDINATOR_END, incarnation=self._incarnation, exit_code=code)
        self._child = None
        if self._stopping:
            return
        if self.address is None:
            self.failed = f"it {describe(code)}; its own output says why"
            return
        quick = time.monotonic() - self._started < SETTLED
        self._quick_deaths = self._quick_deaths + 1 if quick else 0
        pause = PAUSES[min(self._quick_deaths, len(PAUSES) - 1)]
        self._next = time.monotonic() + pause
        self._output.say(f"the coordinator {describe(code)}; the next one starts in {pause:g} seconds, "
                         f"training goes on meanwhile")

    def stop(self, grace: float) -> None:
        """End it for good."""
        self._stopping = True
        if self._child is not None:
            self._children.end(self._child, grace)

    def _start(self) -> None:
        self._incarnation += 1
        options = self._options
        where = ["--events", str(options.events)] if options.events is not None else []
        self._child = self._children.start("coordinator", [
            *self._command, "--listen", self._listen, "--token-file", str(options.token_file),
            "--run-id", options.run_id, "--replicas", str(options.replicas),
            "--ranks-per-replica", str(options.ranks_per_replica),
            "--failure-timeout", repr(options.failure_timeout), "--incarnation", str(self._incarnation),
            "--max-replicas", str(options.most), "--port-file", str(self._port_file), *where], os.environ)
        self._output.follow_child(self._child.process, "[coordinator] ")
        self._started = time.monotonic()
        self._log.emit(COORDINATOR_START, incarnation=self._incarnation, address=self._listen, pid=self._child.pid)

    @property
    def _port_file(self) -> Path:
        return self._private / f"port-{self._incarnation}"

    def _look_for_port(self) -> None:
        try:
            port = int(self._port_file.read_text())
        except (FileNotFoundError, ValueError):
            if time.monotonic() - self._started > FIRST_PORT:
                self.failed = f"it did not listen within {FIRST_PORT:.0f} seconds"
            return
        host, _ = host_and_port(self._options.listen)
        self._listen = _join(host, port)                        # the next one must be found at the same place
        self.address = _join({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host), port)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
