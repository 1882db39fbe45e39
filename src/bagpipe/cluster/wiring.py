"""Where roles listen and with which keys: loopback on one machine, else as asked and encrypted."""

from __future__ import annotations

import os
from typing import Literal

from bagpipe.cluster.interface import LOOPBACK
from bagpipe.cluster.settings import Introduction, Wiring
from bagpipe.errors import ClusterError
from bagpipe.wire.keys import Address, Security, new_keys


def wire(
    introductions: dict[str, Introduction], interface: str | None, security: Literal["tls", "none"]
) -> tuple[dict[str, str], Wiring]:
    """Where each role listens, and with which keys: loopback on one machine, else as asked and encrypted."""
    one_machine = len({introduction.machine for introduction in introductions.values()}) == 1
    addresses = {
        role: Address(LOOPBACK if one_machine and interface is None else introduction.address, 0)
        for role, introduction in introductions.items()
    }
    local = [role for role, address in addresses.items() if address.is_local]
    if local and not one_machine:
        role = local[0]
        raise ClusterError(
            f"{role} on {introductions[role].host} has the address {addresses[role].host}, which other machines can't "
            "reach: name a network that all have, such as --interface eth0 or --interface 10.0.0.0/24"
        )
    listener: Security = None
    client: Security = None
    if len(local) < len(addresses):
        listener, client = new_keys() if security == "tls" else ("none", "none")
    hosts = {role: str(address) for role, address in addresses.items()}
    return hosts, Wiring(os.urandom(16), listener, client)
