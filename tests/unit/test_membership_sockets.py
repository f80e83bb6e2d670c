"""What every connection and every process is set up with."""
from __future__ import annotations

import resource
import socket

import pytest

from recover.membership import files
from recover.membership.address import tune


def test_idle_connections_are_kept_alive():
    with socket.socket() as sock:
        tune(sock)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30


def test_a_rank_that_may_open_too_few_files_says_so(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 1024))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    files.for_rank(100, 8)
    with pytest.raises(ValueError, match="a rank among 4096 replicas of 8 ranks may need"):
        files.for_rank(4096, 8)
