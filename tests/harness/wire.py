"""Listeners, connections and messages for the tests of the wire."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from bagpipe.errors import BagpipeError
from bagpipe.wire.connection import Connection
from bagpipe.wire.frames import HEADER_BYTES, decode, encode, read_head
from bagpipe.wire.keys import Security
from bagpipe.wire.limits import Limits
from bagpipe.wire.listener import Listener
from bagpipe.wire.messages import AskStats, Failed, Message, Part, Read, Rows, Written
from bagpipe.wire.recovery_messages import Confirm, Confirmed
from bagpipe.wire.stream import SocketNetwork

RUN = bytes(16)
MB = 1 << 20
SHORT = Limits(
    body_bytes=4096, buffer_bytes=MB, message_bytes=MB, stranger_bytes=16 << 10, strangers=8, stranger_s=0.5,
    stall_s=0.5, send_s=0.5, memory_bytes=4 * MB, memory_wait_s=0.5,
)  # fmt: skip
"""Limits that are reached within a test."""


def ask(body, *buffers, request=1):
    return Message(RUN, 0, request, body, [memoryview(buffer) for buffer in buffers])


def a_read(*ids, request=1):
    return ask(Read([Part(0, len(ids))]), np.array(ids, np.int64), request=request)


def doubling(peer, message):
    """A server of rows of one number, twice the id, that can also fail."""
    if peer.state is None:
        peer.state = "admitted"
        peer.admit()
    if isinstance(message.body, Read):
        ids = np.frombuffer(message.buffers[0], np.int64)
        return Rows(len(ids)), [memoryview(bytes(b"\1" * len(ids))), memoryview((2 * ids).astype(np.float32))]
    if isinstance(message.body, Confirm):
        return Confirmed(), ()
    if isinstance(message.body, AskStats):
        raise BagpipeError("no statistics today")
    if isinstance(message.body, Failed):
        raise KeyError("a secret of memory")
    return Written(0), ()


def admitted(handler):
    """The same handler, for peers who need not introduce themselves."""

    def handle(peer, message):
        if peer.state is None:
            peer.state = "admitted"
            peer.admit()
        return handler(peer, message)

    return handle


def get(connection: Connection, timeout_s: float = 10.0) -> Message:
    """The next message."""
    return connection.receive(timeout_s)


def call(connection: Connection, message: Message) -> Message:
    """The answer to a message."""
    connection.send(message, 10.0)
    return get(connection)


def values(message: Message) -> list[float]:
    """The rows in an answer, of one number each."""
    assert isinstance(message.body, Rows), message.body
    return np.frombuffer(message.buffers[1], np.float32).tolist()


def until(condition: Callable[[], bool], timeout_s: float = 20.0, describe=lambda: "it never became true") -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.01)


@contextmanager
def listening(handler=doubling, security: Security = None, limits: Limits = SHORT, host: str = "127.0.0.1"):
    """A listener on a port of the system's choice."""
    listener = Listener(f"{host}:0", handler, security, limits)
    try:
        yield listener
    finally:
        listener.close()


@contextmanager
def connected(
    address: str, security: Security = None, limits: Limits = SHORT, *, local: bool = False
) -> Iterator[Connection]:
    """A connection, by TCP unless it may stay `local`."""
    connection = SocketNetwork(security, limits, local=local).connect(address, 10.0)
    try:
        yield connection
    finally:
        connection.close()


def open_files() -> dict[str, str]:
    """Descriptors of this process, and what they are."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that reads the directory
            found[link.name] = str(link.readlink())
    return found


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fails when a thread or an open file survives."""
    threads, files = set(threading.enumerate()), open_files()
    yield
    until(
        lambda: not set(threading.enumerate()) - threads,
        describe=lambda: f"threads that stay: {set(threading.enumerate()) - threads}",
    )
    until(
        lambda: open_files().keys() <= files.keys(),
        describe=lambda: f"still open: {open_files().items() - files.items()}",
    )


def resident_bytes() -> int:
    """Memory of this process, without what malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def frames_of(message: Message) -> list[bytes]:
    """The header, the body and the buffers of a message, as they are sent."""
    whole, *buffers = map(bytes, encode(message))
    return [whole[:HEADER_BYTES], whole[HEADER_BYTES:], *buffers]


def message_of(frames: Sequence[bytes]) -> Message:
    """The message of these frames, whose header announces the lengths that they have: nothing else is put right."""
    header, body, *buffers = frames
    announced = bytearray(header)
    announced[12:16] = len(body).to_bytes(4, "little")
    for place, buffer in enumerate(buffers):
        announced[40 + 8 * place : 48 + 8 * place] = len(buffer).to_bytes(8, "little")
    return decode(read_head(bytes(announced)), body, list(map(memoryview, buffers)))


def travelled(message: Message) -> Message:
    """The same, as it arrives."""
    return message_of(frames_of(message))
