"""Cuts connections that ZeroMQ would let live (promise I5).

It bounds the length of a frame and the number of whole messages that wait, but keeps every frame of a message until the
last one has come; and it puts up for ever with peers that speak none, or the oldest, of its protocols. So this thread
looks at how many bytes each connection has received since its last whole message, and whether it was greeted in full.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from bagpipe.wire.endpoint import CopyableSocket
from bagpipe.wire.limits import Limits

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED

_LOOK_MS = 100
_SLACK_BYTES = 32 << 20  # of the next messages, in the buffers of the kernel
_GREETING_BYTES = 64  # that a peer of today's protocol has got and acknowledged when the handshake is over
_TCP_INFO = struct.Struct("=120x2Q")  # tcpi_bytes_acked and tcpi_bytes_received of Linux's struct tcp_info
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what was not sent or read when it is closed is forgotten
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Connection:
    peer: object
    messages: int
    since: float
    received: int = 0
    """Bytes at the last look."""
    received_at_message: int = 0
    """Bytes at the first look after its last whole message."""


class Guard:
    """Watches the connections of a bound socket through its monitor, until that is stopped."""

    def __init__(
        self, monitor: CopyableSocket, limits: Limits, messages: Mapping[int, int], is_drained: Callable[[], bool]
    ) -> None:
        """`messages` counts whole messages by file descriptor; `is_drained` says that none waits to be taken."""
        self._monitor, self._messages, self._is_drained = monitor, messages, is_drained
        self._limits = limits
        self._connections: dict[int, _Connection] = {}
        self.cut = 0
        self.thread = threading.Thread(target=self._run, name="bagpipe-guard", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with self._monitor:
            while True:
                # without connections there is nothing to look at
                if self._monitor.poll(_LOOK_MS if self._connections else None) and not self._heed():
                    return
                if self._connections:
                    self._look()

    def _heed(self) -> bool:
        """Take one event; False after the last one."""
        event = recv_monitor_message(self._monitor)
        descriptor = event["value"]
        if event["event"] == zmq.EVENT_ACCEPTED:
            with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
                peer = connection.getpeername()
                known = _Connection(peer, self._messages.get(descriptor, 0), time.monotonic())
                self._connections[descriptor] = known
        elif event["event"] == zmq.EVENT_DISCONNECTED:
            self._connections.pop(descriptor, None)
        return event["event"] != zmq.EVENT_MONITOR_STOPPED

    def _look(self) -> None:
        drained = self._is_drained()
        for descriptor, known in list(self._connections.items()):
            try:
                with _borrowed(descriptor) as connection:
                    if connection.getpeername() != known.peer:
                        raise OSError("another connection has got this number")
                    if fault := self._fault(known, descriptor, connection, drained):
                        self.cut += 1
                        _log.warning("cut the connection of %s: %s", known.peer, fault)
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        connection.shutdown(socket.SHUT_RDWR)
                        del self._connections[descriptor]
            except OSError:
                del self._connections[descriptor]

    def _fault(self, known: _Connection, descriptor: int, connection: socket.socket, drained: bool) -> str:
        """Why a connection must go, or nothing."""
        before, messages = known.received, self._messages.get(descriptor, 0)
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        acknowledged, known.received = _TCP_INFO.unpack_from(information)
        if acknowledged < _GREETING_BYTES and time.monotonic() - known.since > self._limits.handshake_s:
            return f"it did not say who it is within {self._limits.handshake_s:g} s"
        if messages != known.messages:
            known.messages, known.received_at_message = messages, known.received
        # bytes that were there at the last look: had they ended a message, it would have been taken since
        elif drained and before - known.received_at_message > self._limits.message_bytes + _SLACK_BYTES:
            return f"it sent {before - known.received_at_message} bytes of a message, and not its end"
        return ""


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket of ZeroMQ's by its number; a duplicate for a moment, since ZeroMQ may close it at any time."""
    duplicate = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=duplicate)
    except OSError:  # the number is no longer that of a socket
        os.close(duplicate)
        raise
    with connection:
        yield connection
