"""Vouches for a rank whose interpreter is busy: a small process beside it, which tells the coordinator that it runs.

Theory of operation
-------------------
Heartbeats come from a thread of the rank's interpreter. A native call that holds the interpreter lock (a compiler, a
regular expression, a driver that starts) silences them, though nothing is wrong. What still can speak must do without
that interpreter, and must know a stopped process from a running one:

* the kernel's keep-alive answers know nothing of a stopped process, and a C thread would need a compiler here;
* a process of its own on the same host sees in `/proc` whether the rank is stopped, traced or dead, and falls silent.

The rank connects to the coordinator, proves itself, and hands the socket to the *helper* (`pulse_helper.py`, run by a bare
interpreter: some megabytes, no import of ours). The helper sends one ready-made frame per heartbeat as long as the rank
runs, and ends when the rank ends (its end of a socket pair closes), or the coordinator does; then the rank starts another.
The end of the helper proves nothing to anybody, and a rank without one is judged by its heartbeats alone.
"""
from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from recover import forks
from recover.config import Timeouts
from recover.errors import WireError
from recover.membership import wire
from recover.membership.handshake import Caller
from recover.membership.lifeline import Address, connect

log = logging.getLogger("recover.membership")

HELPER = Path(__file__).with_name("pulse_helper.py")
LOOK = 0.5
"""Seconds between looks at whether the helper is there."""


class Pulse:
    """Keeps a helper for one life of one rank. Where there is no /proc nothing is started.

    `where`: the coordinator that has welcomed the rank; None while there is none.
    """

    def __init__(self, where: Callable[[], Address | None], timeouts: Timeouts, caller: Callable[[], Caller],
                 message: wire.Pulse) -> None:
        self._where, self._timeouts, self._caller = where, timeouts, caller
        self._frame = wire.encode(message)
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to keep one; at most once."""
        if self._thread is None and Path(f"/proc/{os.getpid()}/stat").exists():
            self._thread = threading.Thread(target=self._keep, name="recover-pulse", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """No more of it; takes a second at most."""
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1)

    def _keep(self) -> None:
        while not self._over.is_set():
            address = self._where()
            try:
                if address is not None:
                    self._one(address)
            except (OSError, UnicodeError, WireError, subprocess.SubprocessError) as problem:
                log.debug("pulse: %s", problem)
            self._over.wait(LOOK)

    def _one(self, address: Address) -> None:
        """One helper, from its start until it ends or another coordinator has taken over. `ours` closes with this process,
        however that ends."""
        sock = connect(address, self._timeouts, self._caller(), self._frame)
        try:
            ours, theirs = forks.socket_pair()
            try:
                command = [sys.executable, "-I", "-S", str(HELPER), str(os.getpid()), str(sock.fileno()), str(theirs.fileno()),
                           repr(self._timeouts.heartbeat), self._frame.hex()]
                helper = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                          stderr=subprocess.DEVNULL, pass_fds=(sock.fileno(), theirs.fileno()))
                theirs.close()
                sock.close()
                while helper.poll() is None and self._where() in (address, None) and not self._over.wait(LOOK):
                    pass
            finally:
                ours.close()
                theirs.close()
            helper.wait(1)
        finally:
            sock.close()
