"""Cuts connections on which a message never ends.

ZeroMQ bounds the length of a frame and the number of whole messages that wait, but keeps every frame of a message until
the last one has come. So this thread looks at how many bytes each connection has received since its last whole message,
and closes those that are over the limit (promise I5).
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from bagpipe.wire.endpoint import CopyableSocket
from bagpipe.wire.limits import Limits

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED

_LOOK_MS = 100
_SLACK_BYTES = 32 << 20  # of the next messages, in the buffers of the kernel
_TCP_INFO_BYTES_RECEIVED = struct.Struct("=Q")
_TCP_INFO_OFFSET = 128  # of tcpi_bytes_received in Linux's struct tcp_info
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what was not sent or read when it is closed is forgotten
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Connection:
    peer: object
    messages: int
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
        self._bytes_max = limits.message_bytes + _SLACK_BYTES
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
                self._connections[descriptor] = _Connection(peer, self._messages.get(descriptor, 0))
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
                    if self._never_ends(known, descriptor, connection, drained):
                        self.cut += 1
                        _log.warning(
                            "cut the connection of %s: a message with over %d bytes", known.peer, self._bytes_max
                        )
                        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                        connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                del self._connections[descriptor]

    def _never_ends(self, known: _Connection, descriptor: int, connection: socket.socket, drained: bool) -> bool:
        before, messages = known.received, self._messages.get(descriptor, 0)
        information = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        (known.received,) = _TCP_INFO_BYTES_RECEIVED.unpack_from(information, _TCP_INFO_OFFSET)
        if messages != known.messages:
            known.messages, known.received_at_message = messages, known.received
            return False
        # bytes that were there at the last look: had they ended a message, it would have been taken since
        return drained and before - known.received_at_message > self._bytes_max


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket of ZeroMQ's by its number; a duplicate for a moment, since ZeroMQ may close it at any time."""
    with socket.socket(fileno=os.dup(descriptor)) as connection:
        yield connection
