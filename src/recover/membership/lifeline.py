"""Connections that say nothing and end the moment this process is killed.

Theory of operation
-------------------
The kernel closes the descriptors of a killed process only after it has taken down its memory: tens of milliseconds for a
process that has imported torch, some 100 ms more per gigabyte. That is how late peers would hear the end of stream.
The descriptors of a thread that has a table of its own are closed when that *thread* ends, and taking down the memory
is left to the last thread. So two threads hold one connection to the coordinator each, in tables of their own: at most
one of them is the last thread, so the other connection ends at once.

* A keeper thread (in the process's table) connects, proves itself, and hands the connection to a holder. The holder takes
  a table with nothing else in it, waits in `recv` for the coordinator's end of stream, and ends. It runs next to no
  Python: a garbage collection there would close descriptors in the wrong table, so none may happen until it waits.
* A holder keeps no copy of what else the process has open: a pipe's other end would wait for its end of stream for ever.
* Forked children don't inherit these connections: a fork copies the table of the thread that forks.
* An end of stream counts as a death only if it is clean: the network may break a connection, the kernel of a dead process
  closes it in order.
* Where a thread can't have a table of its own (not Linux), there are no lifelines; detection is then as late as above.
"""
from __future__ import annotations

import ctypes
import errno
import gc
import logging
import signal
import socket
import threading
from collections.abc import Callable

from recover import forks
from recover.config import Timeouts
from recover.errors import WireError
from recover.membership import wire
from recover.membership.address import tune
from recover.membership.handshake import Caller

log = logging.getLogger("recover.membership")

HOLDERS = 2
RETRY = 0.2
LOOK = 0.5
"""Seconds between two tries to connect, and between looks at whether all holders still hold."""
SETTLE = 0.02
"""Seconds after which a holder that is ready is surely in `recv`."""
CLOSE_RANGE_UNSHARE = 2
LAST = 0xFFFFFFFF


Address = tuple[str, int]


class Lifelines:
    """`HOLDERS` connections that speak for one life of one rank, renewed while they are wanted.

    `where`: the coordinator that has welcomed the rank; None while there is none.
    """

    def __init__(self, where: Callable[[], Address | None], timeouts: Timeouts, caller: Callable[[], Caller],
                 greeting: wire.Lifeline) -> None:
        self._where, self._timeouts, self._caller = where, timeouts, caller
        self._greeting = wire.encode(greeting)
        self._over = threading.Event()
        self._libc = own_tables()

    def start(self) -> None:
        """Begin to connect; nothing where the system can't do it."""
        if self._libc is not None:
            threading.Thread(target=self._keep, name="recover-lifelines", daemon=True).start()

    def close(self) -> None:
        """No more of them. Those that are held end when the coordinator closes them, or with the process."""
        self._over.set()

    def _keep(self) -> None:
        holders: list[threading.Thread] = []
        failed = False
        while not self._over.wait(LOOK if len(holders) == HOLDERS else RETRY if failed else 0):
            holders = [holder for holder in holders if holder.is_alive()]
            address = self._where()
            failed = address is None
            if address is None or len(holders) == HOLDERS:
                continue
            try:
                holders.append(self._hand_over(connect(address, self._timeouts, self._caller(), self._greeting)))
            except (OSError, UnicodeError, WireError) as problem:
                log.debug("lifeline: %s", problem)
                failed = True

    def _hand_over(self, sock: socket.socket) -> threading.Thread:
        """Start a holder of `sock`; afterwards the process's own table does not have it any more."""
        assert self._libc is not None
        ready = threading.Event()
        holder = threading.Thread(target=hold, args=(self._libc, sock.fileno(), ready), name="recover-lifeline", daemon=True)
        collects = gc.isenabled()
        gc.disable()
        try:
            holder.start()
            ready.wait(self._timeouts.handshake)
            self._over.wait(SETTLE)
        finally:
            if collects:
                gc.enable()
            sock.close()
        return holder


def connect(address: Address, timeouts: Timeouts, caller: Caller, greeting: bytes) -> socket.socket:
    """A blocking connection to the coordinator, which has been sent `greeting` behind the handshake. OSError, WireError."""
    problem: OSError | WireError = OSError(f"{address[0]} has no address")
    for family, kind, _, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = forks.open_socket(family, kind)
        try:
            sock.settimeout(timeouts.handshake)
            sock.connect(where)
            _prove(sock, caller, greeting)
            return sock
        except (OSError, WireError) as error:
            sock.close()
            problem = error
    raise problem


def _prove(sock: socket.socket, caller: Caller, greeting: bytes) -> None:
    tune(sock)
    sock.sendall(caller.hello)
    while not caller.passed:
        data = sock.recv(4096)
        if not data:
            raise OSError("the coordinator closed the connection")
        sock.sendall(caller.feed(data))
    sock.sendall(greeting)
    sock.setblocking(True)


def hold(libc: ctypes.CDLL, number: int, ready: threading.Event) -> None:
    """(Holder thread.) Keep descriptor `number`, and nothing else, in a table of this thread's own until it ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    byte = ctypes.create_string_buffer(1)
    if libc.close_range(number + 1, LAST, CLOSE_RANGE_UNSHARE) == 0:
        libc.close_range(0, number - 1, 0)
        ready.set()
        while libc.recv(number, byte, 1, 0) < 0 and ctypes.get_errno() == errno.EINTR:
            pass
        libc.close(number)
    ready.set()


def own_tables() -> ctypes.CDLL | None:
    """The C library, if a thread can have a descriptor table of its own here (Linux 5.9 and newer)."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.close_range.argtypes = [ctypes.c_uint, ctypes.c_uint, ctypes.c_int]
        libc.recv.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int]
        libc.recv.restype = ctypes.c_ssize_t
    except (OSError, AttributeError):
        return None
    return libc
