"""Hosts in a small network of their own: network namespaces on one bridge, whose links can be cut in one direction.

Theory of operation. Every host is a namespace with one interface, all joined by a bridge in a namespace of its own, so that
nothing of the machine's network is touched. A direction is cut by giving the sender a hardware address for the receiver that
nobody has: packets leave, and arrive nowhere, without any error to anybody, as on a broken path. Needs root and `ip`.
"""
from __future__ import annotations

import ctypes
import itertools
import os
import subprocess
from collections.abc import Iterable
from functools import cache

from harness import Script

NOBODY = "02:00:00:00:00:01"
_networks = itertools.count()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


@cache
def unavailable() -> str:
    """Why there can be no such network here; "" if there can."""
    try:
        Network(["a", "b"]).close()
    except FileNotFoundError:
        return "there is no `ip` command"
    except subprocess.CalledProcessError as error:
        return f"namespaces can't be made: {error.stderr.strip()}"
    return ""


class Network:
    """`hosts`: short names. Made at once, gone with `close`."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self.prefix = f"rcv{os.getpid() % 100000}n{next(_networks)}"
        self.hosts = list(hosts)
        self._made: list[str] = []
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        hub = self._namespace("hub")
        ip("-n", hub, "link", "add", "name", "hub0", "type", "bridge")
        ip("-n", hub, "link", "set", "hub0", "up")
        for number, host in enumerate(self.hosts):
            space = self._namespace(host)
            ip("-n", hub, "link", "add", "name", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", hub, "link", "set", f"v{number}", "master", "hub0", "up")
            ip("-n", space, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")

    def _namespace(self, host: str) -> str:
        name = self.name(host)
        ip("netns", "add", name)
        self._made.append(name)
        ip("-n", name, "link", "set", "lo", "up")
        return name

    def name(self, host: str) -> str:
        return f"{self.prefix}{host}"

    def address(self, host: str) -> str:
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def drop(self, sender: str, *receivers: str) -> None:
        """From now on nothing arrives that `sender` sends to these."""
        for receiver in receivers:
            ip("-n", self.name(sender), "neigh", "replace", self.address(receiver), "lladdr", NOBODY, "nud", "permanent", "dev",
               "eth0")

    def cut(self, one: Iterable[str], other: Iterable[str]) -> None:
        """Both directions between all of `one` and all of `other`."""
        for a, b in itertools.product(list(one), list(other)):
            self.drop(a, b)
            self.drop(b, a)

    def heal(self) -> None:
        """All links work again."""
        for name in self._made[1:]:
            ip("-n", name, "neigh", "flush", "dev", "eth0", "nud", "permanent")

    def close(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=20)
        self._made = []


def enter(space: str) -> None:
    """Move this thread into a namespace; to be called while the process has only one."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}", "rb") as file:
        if libc.setns(file.fileno(), 0x40000000) != 0:              # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"can't enter {space}")


def train(script: Script) -> None:
    """The usual script, on a host of its own."""
    import run_script

    enter(script["space"])
    run_script.train(script)
