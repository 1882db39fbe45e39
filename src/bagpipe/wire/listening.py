"""How a service listens: on a socket, or in a simulated network; it knows only that messages come and are answered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from bagpipe.wire.dispatch import Handler
from bagpipe.wire.keys import Security
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.listener import Listener

LOOPBACK = "tcp://127.0.0.1:0"


class Listening(Protocol):
    """Listens until it is closed."""

    address: str
    """Where."""

    def close(self, timeout_s: float = ...) -> None:
        """Finish what is being handled; a second call does nothing."""


Listen: TypeAlias = Callable[[Handler], Listening]
"""Begins to listen."""


def on_socket(
    address: str = LOOPBACK, *, threads: int = 2, security: Security = None, limits: Limits = LIMITS
) -> Listen:
    """On a TCP port, by default one of this machine's that is free."""
    return lambda handler: Listener(address, handler, threads, security, limits)
