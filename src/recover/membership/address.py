"""Addresses of coordinators, and what every connection between ranks and a coordinator is set to."""
from __future__ import annotations

import contextlib
import socket
from pathlib import Path

MIN_TOKEN = 8


def parse_address(text: str) -> tuple[str, int]:
    """From "host:port" or "[v6]:port" to (host, port); ValueError says what is wrong."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address: write HOST:PORT, or [HOST]:PORT for IPv6")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} is ambiguous: write [{host}]:{port}")
    return host, int(port)


def parse_addresses(text: str) -> list[tuple[str, int]]:
    """Several addresses, separated by commas; ValueError if there is none."""
    addresses = [parse_address(part) for part in text.split(",") if part.strip()]
    if not addresses:
        raise ValueError("no address of a coordinator: write HOST:PORT, several separated by commas")
    return addresses


def show_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def read_token(path: Path) -> bytes:
    """The secret of the run. ValueError if it is too short to be one, OSError if it can't be read."""
    token = path.read_bytes().strip()
    if len(token) < MIN_TOKEN:
        raise ValueError(f"the token in {path} has {len(token)} bytes: write at least {MIN_TOKEN} random ones into it")
    return token


def tune(sock: socket.socket) -> None:
    """Small messages leave at once, and an idle connection survives middleboxes that forget."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, option):
            with contextlib.suppress(OSError):          # not every platform allows it; heartbeats flow anyway
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
