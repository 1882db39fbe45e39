"""What clients and services see of the wire: connections that carry whole messages, in order, until they break.

Implemented by sockets (`bagpipe.wire.stream`), and in memory for tests. A connection that breaks loses what was under
way; whoever asked makes another and asks again (`bagpipe.wire.client`).
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from bagpipe.errors import DeadlineError
from bagpipe.waits import Waits
from bagpipe.wire.frames import Head
from bagpipe.wire.messages import Body, Message

TICK_S = 2.0
"""How often a handler that waits tells its peer so."""

Buffers: TypeAlias = Sequence[memoryview]
Admit: TypeAlias = Callable[[Head], bool]
"""Whether there is room for a message; raises if there never will be."""


class DroppedError(Exception):
    """A message came that there was no room for; the connection is as good as before."""

    def __init__(self, head: Head) -> None:
        super().__init__(f"a message of {head.num_bytes:,} B was dropped")
        self.head = head


class PeerGoneError(ConnectionAbortedError):
    """Nobody hears the answer to a request. Other errors of the system that a handler meets are not of its peer."""


class Connection(ABC):
    """One end of it; used by one thread at a time.

    What takes too long is a TimeoutError, a connection that has broken any other OSError. A WireError is one for good:
    the peer is none of ours, or refuses our key.
    """

    peer: str
    """The other end, for people."""

    @abstractmethod
    def send(self, message: Message, timeout_s: float, descriptor: int | None = None) -> None:
        """Send a message whole; `timeout_s` is how long nothing of it may be taken.

        A descriptor goes with it where the other end is a process of this host; elsewhere it stays behind.
        """

    @abstractmethod
    def receive(self, timeout_s: float | None, admit: Admit = lambda _: True, whole_s: float = math.inf) -> Message:
        """The next message, which begins within `timeout_s` (None: whenever it comes) and has come after `whole_s`.

        A TimeoutError means that none has begun. `admit` is called before there is memory for it; where that finds no
        room, its bytes are read and forgotten, and a DroppedError says so.
        """

    @property
    @abstractmethod
    def shares_host(self) -> bool:
        """Whether descriptors can be sent."""

    def take_descriptor(self) -> int | None:
        """The descriptor that came with the last message, if any; the caller's to close."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go; a second call does nothing."""


class Network(ABC):
    """Makes connections, and knows the clock that their deadlines are counted on."""

    @abstractmethod
    def connect(self, address: str, timeout_s: float) -> Connection:
        """A connection to whoever listens at this address; OSError if nobody does, WireError if it will never do."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def pause(self, seconds: float) -> None:
        """Let time pass."""
        time.sleep(seconds)


class Peer(Protocol):
    """Who asks, as a handler sees it; lives as long as its connection."""

    name: str
    """For people."""
    state: object
    """The handler's own."""

    def admit(self, kind: str = "") -> None:
        """It belongs to the run. From now on its requests count as those of this kind for the memory they take."""

    def reply(self, body: Body, buffers: Buffers = ()) -> None:
        """Answer its request; PeerGoneError once it is gone."""

    def still_waiting(self, why: str, progress: int = 0) -> None:
        """Tell it that it was heard, and what is waited for; PeerGoneError once it is gone."""

    def give_back(self) -> None:
        """Its request takes no memory from now on."""

    def take_descriptor(self) -> int | None:
        """The descriptor that came with its request, if any; the caller's to close."""


Answer: TypeAlias = tuple[Body, Buffers]
Handler: TypeAlias = Callable[[Peer, Message], Answer | None]
"""Answers a request, or has replied to it itself; it may block, and then tells its peer now and then why."""


class Listening(Protocol):
    """Listens until it is closed."""

    address: str
    """Where."""

    def close(self, timeout_s: float = ...) -> None:
        """Answer nobody any more; a second call does nothing."""


Listen: TypeAlias = Callable[[Handler], Listening]
"""Begins to listen."""


def wait_telling(
    peer: Peer,
    waits: Waits,
    what: Callable[[], str],
    ready: Callable[[], bool],
    progress: Callable[[], int] = lambda: 0,
) -> None:
    """Block a handler until it is so. Its peer is told what for, and decides how long it puts up with that (I7)."""
    while True:
        try:
            return waits.until(what, ready, TICK_S)
        except DeadlineError:
            peer.still_waiting(what(), progress())
