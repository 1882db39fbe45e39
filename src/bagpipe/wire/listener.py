"""The server's end: one ROUTER socket and a side door, and threads that wait on them and do what a message asks.

One free thread is woken for a message, and while none is free nothing is read, so that clients feel it through TCP: no
queue here grows (promise I5). Nothing that a peer sends ends a thread (promise I8).
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeAlias

import zmq

from bagpipe.errors import ConfigError, DeadlineError
from bagpipe.wire.admission import Admission
from bagpipe.wire.dispatch import Dispatcher, Handler, Reply
from bagpipe.wire.endpoint import (
    Address,
    CopyableSocket,
    check_security,
    option,
    parse_address,
    receive_frames,
    send_frames,
    set_options,
    wire_error,
)
from bagpipe.wire.frames import Frame
from bagpipe.wire.guard import EVENTS, Guard
from bagpipe.wire.keys import Keys, Security
from bagpipe.wire.limits import LIMITS, Limits
from bagpipe.wire.side_door import SideDoor, Visit, packed

__all__ = ["Handler", "Listener", "Reply"]

_LAST_ANSWERS_MS = 500  # how long a listener that closes waits for peers to take what they were answered
_log = logging.getLogger(__name__)

_Arrived: TypeAlias = tuple[bytes, list[memoryview], Callable[[list[Frame]], None]]
"""A peer, what it sent, and what sends it an answer."""


class Listener:
    """Listens on an address until it is closed; `handler` is called by several threads at once.

    Buffers of an answer are not copied: they must not change after `reply`.
    """

    def __init__(
        self, address: str, handler: Handler, threads: int = 2, security: Security = None, limits: Limits = LIMITS
    ) -> None:
        if threads < 1:
            raise ConfigError(f"a listener with {threads} threads: give at least 1")
        where = parse_address(address)
        check_security(where, "server", security)
        self._dispatcher, self._limits = Dispatcher(handler, limits), limits
        self._closing = False
        self._context: zmq.Context[CopyableSocket] = zmq.Context()
        self._admission: Admission | None = None
        self._front = self._bind(where, security)
        self.address = str(where._replace(port=_port(self._front)))
        """Where it listens, with the port that the system chose if it was left to it."""
        self._use = threading.Lock()  # of the socket, for moments
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._of_front = (option(self._front, zmq.FD), self._wake)
        self._signals = select.epoll()
        for descriptor in self._of_front:  # edges: a signal wakes one thread, and is gone when others look
            self._signals.register(descriptor, select.EPOLLIN | select.EPOLLET)
        self._side = None if isinstance(security, Keys) else self._open_side_door()
        self._messages: dict[int, int] = {}
        self._guard = Guard(self._front.get_monitor_socket(EVENTS), limits, self._messages, self._is_drained)
        self._threads = [
            threading.Thread(target=self._work, name=f"bagpipe-listener-{each}", daemon=True) for each in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def refused(self) -> int:
        """Messages that were malformed, clients whose key was not admitted, connections that were cut."""
        return self._dispatcher.refused + self._guard.cut + (self._admission.refused if self._admission else 0)

    def close(self, timeout_s: float = 10.0) -> None:
        """Finish what is being handled, join all threads and free the port; a second call does nothing."""
        if self._context.closed:
            return
        deadline = time.monotonic() + timeout_s
        self._closing = True
        os.eventfd_write(self._wake, 1)
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0))
            if thread.is_alive():
                raise DeadlineError(f"{thread.name} of {self.address} still handles a message after {timeout_s:g} s")
        with self._use:
            self._front.disable_monitor()
            self._front.close(linger=_LAST_ANSWERS_MS)
        self._guard.thread.join()
        if self._side is not None:
            self._side.close()
        self._end_context()
        self._signals.close()
        os.close(self._wake)

    def _bind(self, address: Address, security: Security) -> CopyableSocket:
        if isinstance(security, Keys):
            self._admission = Admission(self._context, security.peer)
        front = self._context.socket(zmq.ROUTER)
        front.set(zmq.ROUTER_HANDOVER, 1)  # a client that ZeroMQ connects anew keeps its name
        try:
            set_options(front, address, self._limits, security)
            host = "127.0.0.1" if address.host == "localhost" else address.host
            front.bind(str(address._replace(host=host)))
        except zmq.ZMQError as error:
            front.close()
            self._end_context()
            raise wire_error(address, error) from error
        return front

    def _end_context(self) -> None:
        self._context.term()  # which ends the thread of the admission
        if self._admission is not None:
            self._admission.thread.join()

    def _open_side_door(self) -> SideDoor | None:
        with suppress(OSError):  # everything can take the front
            return SideDoor(parse_address(self.address), self._signals)
        return None

    def _work(self) -> None:
        while (arrived := self._next()) is not None:
            peer, content, send = arrived
            del arrived
            try:
                self._dispatcher.dispatch(self.address, peer, content, send)
            except Exception:  # a defect of ours, which must not cost the thread
                _log.exception("a message to %s was lost", self.address)
            del content

    def _next(self) -> _Arrived | None:
        """The next message; None once the listener closes."""
        while not self._closing:
            for descriptor, _ in self._signals.poll(maxevents=1):
                arrived = self._at_front() if descriptor in self._of_front else self._at_side(descriptor)
                if arrived is not None:
                    return arrived
        os.eventfd_write(self._wake, 1)  # one thread tells the next
        return None

    def _at_front(self) -> _Arrived | None:
        with self._use:
            try:
                frames = receive_frames(self._front, self._limits.frames + 1)
            except zmq.Again:
                return None
            self._tell_if_something_came()
        self._count(frames)
        peer = bytes(frames[0])
        return peer, frames[1:], partial(self._send, peer)

    def _at_side(self, descriptor: int) -> _Arrived | None:
        assert self._side is not None
        visit = self._side.take(descriptor)
        return None if visit is None else (visit.peer, visit.frames, partial(self._send_to_side, visit))

    def _count(self, frames: list[memoryview]) -> None:
        """Note that a message of this connection was whole, for the guard."""
        frame = frames[-1].obj
        assert isinstance(frame, zmq.Frame)
        try:
            descriptor = frame.get(zmq.SRCFD)
        except zmq.ZMQError:  # peers that speak the oldest protocols have none, and are soon cut
            return
        assert isinstance(descriptor, int)
        self._messages[descriptor] = self._messages.get(descriptor, 0) + 1

    def _is_drained(self) -> bool:
        with self._use:
            return self._front.closed or not self._tell_if_something_came()

    def _tell_if_something_came(self) -> bool:
        """Whether a message waits. What was just done may have swallowed the signal of it, so a thread is woken."""
        if came := bool(option(self._front, zmq.EVENTS) & zmq.POLLIN):
            os.eventfd_write(self._wake, 1)
        return came

    def _send(self, peer: bytes, frames: list[Frame]) -> None:
        """Send to a peer; one that is gone, or takes nothing, gets nothing, and nobody waits for it."""
        with self._use:
            if self._front.closed:
                return
            send_frames(self._front, [peer, *frames])
            self._tell_if_something_came()

    def _send_to_side(self, visit: Visit, frames: list[Frame]) -> None:
        """As `_send`; what is too long for the side takes the front."""
        packet = packed(frames)
        if packet is None:
            self._send(visit.peer, frames)
        else:
            visit.passage.send(packet)


def _port(socket: CopyableSocket) -> int:
    endpoint = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return parse_address(endpoint.rstrip(b"\0").decode()).port
