"""A side door between processes of one host: short messages over a Unix-domain socket, past ZeroMQ and its threads.

A message through ZeroMQ wakes a thread more on either side, which is most of what a request for a few rows in shared
memory takes. Only processes of the same user meet here, nobody with keys does, and a client stays the one that it
is at the front: it says the name of its connection there first. What is long, or has buffers, takes the front (I5).
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from contextlib import suppress
from typing import NamedTuple

from bagpipe.wire.endpoint import Address
from bagpipe.wire.frames import HEADER_BYTES, Frame

NAME_BYTES = 16
PACKET_BYTES_MAX = 16 << 10
CLIENTS_MAX = 256

_KIND = socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
_CREDENTIALS = struct.Struct("3i")
_ONCE = select.EPOLLIN | select.EPOLLONESHOT


def packed(frames: list[Frame]) -> bytes | None:
    """A message as one packet; None if it must take the front."""
    if len(frames) != 2 or len(frames[0]) + len(frames[1]) > PACKET_BYTES_MAX:
        return None
    return b"".join(frames)


class DoorClosedError(Exception):
    """The other side has left, or sends what is no packet."""


class Passage:
    """One connection through the door; several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._use = threading.Lock()
        self.descriptor = connection.fileno()

    def send(self, packet: bytes) -> bool:
        """Whether it could be sent: False where the other side takes nothing, or has left."""
        with self._use, suppress(OSError):
            return self._connection.send(packet) == len(packet)
        return False

    def receive(self) -> list[memoryview] | None:
        """The frames of a message that has come, or None."""
        try:
            packet = self._connection.recv(PACKET_BYTES_MAX + 1)
        except BlockingIOError:
            return None
        except OSError as error:
            raise DoorClosedError from error
        if not 0 < len(packet) <= PACKET_BYTES_MAX:
            raise DoorClosedError
        view = memoryview(packet)
        return [view[:HEADER_BYTES], view[HEADER_BYTES:]]

    def close(self) -> None:
        """A second call does nothing."""
        with self._use:
            self._connection.close()


class Visit(NamedTuple):
    """A message of a client."""

    peer: bytes
    frames: list[memoryview]
    passage: Passage


class SideDoor:
    """The server's side. Each descriptor is armed once in `signals`, so that one thread at a time looks at it."""

    def __init__(self, address: Address, signals: select.epoll) -> None:
        """Raises OSError where there is no such thing, or the name is taken."""
        self._signals = signals
        self._passages: dict[int, tuple[Passage, bytes]] = {}
        self._door = socket.socket(socket.AF_UNIX, _KIND)
        try:
            self._door.bind(_path(address))
            self._door.listen()
        except OSError:
            self._door.close()
            raise
        signals.register(self._door, _ONCE)

    def take(self, descriptor: int) -> Visit | None:
        """What came on a descriptor that was signalled: a client, its name, or a message of it."""
        if descriptor == self._door.fileno():
            self._admit()
            return None
        if descriptor not in self._passages:
            return None
        passage, peer = self._passages[descriptor]
        try:
            frames = passage.receive()
        except DoorClosedError:
            self._forget(descriptor)
            return None
        if frames is not None and not peer:
            peer = b"".join(frames)
            if len(peer) != NAME_BYTES:
                self._forget(descriptor)
                return None
            self._passages[descriptor] = passage, peer
            frames = None
        self._signals.modify(descriptor, _ONCE)
        return None if frames is None else Visit(peer, frames, passage)

    def close(self) -> None:
        """Let go of all clients; no thread may look any more. A second call does nothing."""
        self._door.close()
        while self._passages:
            self._passages.popitem()[1][0].close()

    def _admit(self) -> None:
        with suppress(OSError):  # it has left already
            connection, _ = self._door.accept()
            connection.setblocking(False)
            if len(self._passages) < CLIENTS_MAX and _is_ours(connection):
                passage = Passage(connection)
                self._passages[passage.descriptor] = passage, b""
                self._signals.register(passage.descriptor, _ONCE)
            else:
                connection.close()
        self._signals.modify(self._door, _ONCE)

    def _forget(self, descriptor: int) -> None:
        self._signals.unregister(descriptor)
        self._passages.pop(descriptor)[0].close()


def enter(address: Address, name: bytes) -> Passage | None:
    """The client's side; None if there is no door of our user at this address."""
    connection = socket.socket(socket.AF_UNIX, _KIND)
    with suppress(OSError):
        connection.connect(_path(address))
        passage = Passage(connection)
        if _is_ours(connection) and passage.send(name):
            return passage
    connection.close()
    return None


def _path(address: Address) -> str:
    """In the namespace of names without files, which is that of the network: what sees the port sees the door."""
    host = "127.0.0.1" if address.host == "localhost" else address.host
    return f"\0bagpipe-{host}:{address.port}"


def _is_ours(connection: socket.socket) -> bool:
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(found)[1] == os.geteuid())
