"""Asks other coordinators again and again whether one of them acts (`standby.py` says what follows).

Each question is a connection of its own, in a thread, so that a host which does not answer delays nobody.
"""
from __future__ import annotations

import logging
import threading
import time

from recover.config import Timeouts
from recover.errors import WireError
from recover.membership import wire
from recover.membership.handshake import Caller
from recover.membership.lifeline import Address, connect
from recover.membership.standby import Standby
from recover.protocol.messages import View

log = logging.getLogger("recover.membership")


class Succession:
    """Among the coordinators at `addresses` and this one. `first` replicas make the first view. `standing_by` until it is our
    turn; `rival`: the highest incarnation that acts elsewhere. `start` once; then any thread."""

    def __init__(self, addresses: list[Address], first: int, standing_by: bool) -> None:
        self._addresses, self._first = addresses, first
        self.standing_by, self.rival = standing_by, -1
        self._over = threading.Event()
        self._lock = threading.Lock()

    def start(self, token: bytes, run_id: str, timeouts: Timeouts) -> None:
        """Begin to ask."""
        self._standby = Standby(self._first, timeouts, time.monotonic())
        for address in self._addresses:
            threading.Thread(target=self._keep_asking, args=(address, token, run_id, timeouts), name="recover-standby",
                             daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def asked(self, replica: int, view: View | None) -> None:
        """A rank of this replica came here."""
        with self._lock:
            self._standby.asked(replica, view, time.monotonic())

    def turn(self) -> int | None:
        """The incarnation to act with, once it is our turn."""
        with self._lock:
            incarnation = self._standby.turn(time.monotonic())
            self.standing_by = incarnation is None
            return incarnation

    def _keep_asking(self, address: Address, token: bytes, run_id: str, timeouts: Timeouts) -> None:
        while not self._over.wait(timeouts.heartbeat):
            try:
                found = acting(address, token, run_id, timeouts)
            except (OSError, UnicodeError, WireError) as problem:
                log.debug("%s: %s", address, problem)
                continue
            if found is not None:
                with self._lock:
                    self._standby.answered(time.monotonic())
                    self.rival = max(self.rival, found)


def acting(address: Address, token: bytes, run_id: str, timeouts: Timeouts) -> int | None:
    """The incarnation of the coordinator there if it acts. OSError, WireError if none answers."""
    sock = connect(address, timeouts, Caller(token, run_id), wire.encode(wire.StatsRequest()))
    decoder = wire.from_coordinator()
    try:
        sock.settimeout(timeouts.handshake)
        while data := sock.recv(1 << 16):
            for message in decoder.feed(data):
                if isinstance(message, wire.Stats):
                    return message.incarnation if message.acting else None
        raise OSError("it closed the connection")
    finally:
        sock.close()
