"""What a peer may ask of this process: bytes, connections and silence all have an end (promise I5)."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bagpipe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Limits:
    """The same on both sides: what one may not receive the other refuses to send."""

    body_bytes: int = 256 << 10
    """Of the record of a message; some 50,000 tables."""
    buffers: int = 4
    """Raw buffers of a message."""
    buffer_bytes: int = 64 << 20
    """Of one raw buffer."""
    message_bytes: int = 128 << 20
    """Of the body and all buffers of a message."""
    stranger_bytes: int = 64 << 10
    """Of a message of a peer that has not shown yet that it belongs to the run."""
    strangers: int = 64
    """Such peers; one more takes the place of the one that came first."""
    stranger_s: float = 5.0
    """How long a peer may take to show it, its handshake included."""
    connections: int = 1024
    """Of a listener in all."""
    memory_bytes: int = 256 << 20
    """Of all requests of one kind that a listener reads or answers; reads and writes are two."""
    memory_wait_s: float = 30.0
    """How long a request waits for room among them."""
    stall_s: float = 10.0
    """How long nothing may come of a message that has begun."""
    send_s: float = 60.0
    """How long a peer may take nothing of an answer."""
    bytes_per_second: int = 16 << 10
    """Of a message; one that comes more slowly is given up."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) <= 0:
                raise ConfigError(f"the limit {each.name} is {value}: give more than 0")


LIMITS = Limits()
