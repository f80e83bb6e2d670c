"""Sockets that a forked child must not keep alive.

A forked child (a loader's worker) inherits every descriptor. While it holds a copy of a socket, the kernel sends no end
of stream when the parent dies, and peers notice the death only by silence. Close-on-exec does not help, since a plain
fork executes nothing. So the child puts `/dev/null` over each socket that is registered here:

* `dup2`, not `close`: a closed number would be reused, and whatever in the child still believes in it would act on a
  stranger's file.
* No epoll set is touched: parent and child share it, so removing a socket there would deafen the parent.
* A socket is made and registered under one lock, which a fork takes first: none can slip through between the two.
"""
from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_lock = threading.RLock()       # reentrant: the collector may run a fork's `before` while its thread creates a socket


@contextmanager
def creating() -> Iterator[None]:
    """No fork happens inside: make sockets and `register` them here. Never wait inside."""
    lock = _lock
    with lock:
        yield


def register(sock: socket.socket) -> None:
    """From now on forked children lose `sock`. Forgotten by itself when the object goes away."""
    with creating():
        _sockets.add(sock)


def unregister(sock: socket.socket) -> None:
    """Let children keep `sock` again; harmless if it was not registered."""
    with creating():
        _sockets.discard(sock)


def open_socket(family: int, kind: int = socket.SOCK_STREAM) -> socket.socket:
    """A new registered socket."""
    with creating():
        sock = socket.socket(family, kind)
        _sockets.add(sock)
        return sock


def accept(listener: socket.socket) -> tuple[socket.socket, object]:
    """`listener.accept()` of a non-blocking listener, with the new socket registered and non-blocking."""
    with creating():
        sock, address = listener.accept()
        _sockets.add(sock)
        sock.setblocking(False)
        return sock, address


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """A registered, non-blocking `socket.socketpair()`."""
    with creating():
        pair = socket.socketpair()
        for sock in pair:
            _sockets.add(sock)
            sock.setblocking(False)
        return pair


def _before() -> None:
    _lock.acquire()


def _after_in_parent() -> None:
    _lock.release()


def _after_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for sock in list(_sockets):
        number = sock.fileno()
        if number >= 0:
            os.dup2(null, number, inheritable=False)
    os.close(null)


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
