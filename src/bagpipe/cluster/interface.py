"""Under which address a role is reached: that of the network interface that the user names, on the role's own node."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from bagpipe.errors import ConfigError

LOOPBACK = "127.0.0.1"
_SIOCGIFADDR = 0x8915


def find_address(interface: str) -> str:
    """This machine's address on an interface, given by its name (eth0), its address, or a network (10.0.0.0/24)."""
    mine = addresses()
    if any(name == interface for name, _ in mine):
        return next(address for name, address in mine if name == interface)
    try:
        network = ipaddress.ip_network(interface, strict=False)
    except ValueError:
        network = None
    if network is not None:
        for _, address in mine:
            if ipaddress.ip_address(address) in network:
                return address
    listed = ", ".join(f"{name} {address}" for name, address in mine)
    raise ConfigError(
        f"interface {interface!r} is not on {socket.gethostname()}, which has {listed}: give the name of one, its "
        "address, or a network such as 10.0.0.0/24 that all machines have an address in"
    )


def addresses() -> list[tuple[str, str]]:
    """The interfaces of this machine that have an address, with it; IPv4 first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # it has none
            found.append((name, socket.inet_ntoa(answer[20:24])))
    return found + _addresses_6()


def _addresses_6() -> list[tuple[str, str]]:
    try:
        lines = Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    found = []
    for fields in map(str.split, lines):
        address = ipaddress.IPv6Address(bytes.fromhex(fields[0]))
        if not address.is_link_local:  # which says nothing without its interface
            found.append((fields[5], str(address)))
    return found
