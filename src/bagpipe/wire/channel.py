"""A way for messages between a client and one server, whatever lies in between: sockets, or a simulated network."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from bagpipe.wire.messages import Message


class Channel(ABC):
    """One client's way to one server; used by one thread. Messages may be lost, doubled or late, but never altered."""

    address: str
    """Where the server is, for people."""
    trouble: str = ""
    """What is known to be wrong with the connection, if anything: for the message of whoever waited in vain."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message; its buffers must stay as they are until it is answered."""

    @abstractmethod
    def receive(self) -> Message | None:
        """A message that has arrived, or None. Raises WireError for bytes that are no message, or a key refused."""

    def take_side_door(self) -> None:  # noqa: B027 - most have none
        """Let short messages go by a shorter way from now on, if there is one to this server."""

    @abstractmethod
    def reconnect(self) -> None:
        """Begin anew with a fresh connection; whatever was under way is lost."""

    @abstractmethod
    def close(self) -> None:
        """Let go; a second call does nothing."""


class Network(ABC):
    """Makes channels, and waits on several of them."""

    def now(self) -> float:
        """Seconds of the clock that `wait` waits by; deadlines are counted on it."""
        return time.monotonic()

    @abstractmethod
    def connect(self, address: str) -> Channel:
        """A channel to the server at this address; whether it is there shows with the first answer."""

    @abstractmethod
    def wait(self, channels: Sequence[Channel], timeout_s: float) -> list[Channel]:
        """Channels on which something has arrived; empty after the timeout."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what all channels share; they must be closed."""
