"""Which address of this host the peers shall connect to."""
from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915           # Linux: the IPv4 address of an interface
_GLOBAL, _LOOPBACK = "00", "10"     # scopes in /proc/net/if_inet6; a link-local address means nothing elsewhere


def choose(host: str | None, toward: str | None) -> str:
    """The address to listen on and to advertise.

    `host`: an address of this host, an interface's name, or a host name; else the address from which this host
    reaches `toward` ("host:port"; of several, separated by commas, the first that has a route); else loopback.
    ValueError if `host` is none of these, or an address that means "all".
    """
    if host:
        return _named(host)
    for target in (toward or "").split(","):
        found = _route(target.strip()) if target.strip() else None
        if found:
            return found
    return "127.0.0.1"


def split(target: str) -> tuple[str, int]:
    """("host", port) of "host:port" or "[v6]:port"; port 0 if there is none."""
    if target.startswith("["):
        host, _, rest = target[1:].partition("]")
        port = rest.removeprefix(":")
    elif target.count(":") == 1:
        host, _, port = target.partition(":")
    else:
        host, port = target, ""
    return host, int(port) if port.isdigit() else 0


def family(address: str) -> socket.AddressFamily:
    """IPv4 or IPv6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[object, ...]]:
    """Family and socket address of a peer; OSError if the name has none. May ask a name server: not for the loop."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    kind, _, _, _, address = found[0]
    return kind, address


def _named(host: str) -> str:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        pass
    else:
        if address.is_unspecified:
            raise ValueError(f"{host} means every address: name the one that the other hosts should connect to")
        return host
    if host in [name for _, name in socket.if_nameindex()]:
        found = _ipv4_of(host) or _ipv6_of(host)
        if found is None:
            raise ValueError(f"interface {host} has no address that other hosts could use")
        return found
    try:
        return str(resolve(host, 0)[1][0])
    except OSError:
        interfaces = ", ".join(name for _, name in socket.if_nameindex())
        raise ValueError(f"{host!r} is neither an address nor an interface of this host ({interfaces})") from None


def _ipv4_of(interface: str) -> str | None:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            return socket.inet_ntoa(fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, request)[20:24])
        except OSError:
            return None


def _ipv6_of(interface: str, table: Path = Path("/proc/net/if_inet6")) -> str | None:
    lines = table.read_text().splitlines() if table.exists() else []
    for line in lines:
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope in (_GLOBAL, _LOOPBACK):
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None


def _route(target: str) -> str | None:
    host, port = split(target)
    try:
        kind, address = resolve(host, port or 9)
        with socket.socket(kind, socket.SOCK_DGRAM) as sock:
            sock.connect(address)                       # sends nothing: for datagrams it only looks up the route
            return str(sock.getsockname()[0])
    except OSError:
        return None
