"""What a peer may ask of this process: bytes, frames, queues and silence all have an end (promise I5)."""

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
    """Of one raw buffer; no frame may be longer."""
    message_bytes: int = 128 << 20
    """Of all frames of a message."""
    queue_messages: int = 32
    """That wait in each direction of a connection. A client must not have more requests unanswered: a server drops
    answers that a client does not take, since it waits for nobody."""
    send_wait_s: float = 5.0
    """How long a client waits for room in its queue."""
    handshake_s: float = 10.0
    """How long a new connection may take to say who it is."""
    heartbeat_s: float = 5.0
    """How often a side that hears nothing asks whether the other is there."""
    silence_s: float = 30.0
    """How long it waits for the answer before it gives the connection up; also the time that one frame may take."""

    def __post_init__(self) -> None:
        for each in fields(self):
            if (value := getattr(self, each.name)) <= 0:
                raise ConfigError(f"the limit {each.name} is {value}: give more than 0")

    @property
    def frames(self) -> int:
        """Of a message: header, body and buffers."""
        return 2 + self.buffers


LIMITS = Limits()
