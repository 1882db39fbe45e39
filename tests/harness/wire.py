"""Listeners, networks and messages for the tests of the wire."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
from bagpipe.wire.channel import Channel, Network
from bagpipe.wire.sockets import SocketNetwork

from bagpipe.errors import BagpipeError
from bagpipe.wire.keys import Security
from bagpipe.wire.limits import Limits
from bagpipe.wire.listener import Listener
from bagpipe.wire.messages import AskStats, Failed, Message, Part, Read, Rows, Written
from bagpipe.wire.recovery_messages import Confirm, Confirmed

RUN = bytes(16)
SHORT = Limits(
    body_bytes=4096, buffer_bytes=1 << 20, message_bytes=1 << 20, handshake_s=0.5, heartbeat_s=0.1, silence_s=0.5
)
"""Limits that are reached within a test."""


def ask(body, *buffers, request=1):
    return Message(RUN, 0, request, body, [memoryview(buffer) for buffer in buffers])


def a_read(*ids, request=1):
    return ask(Read([Part(0, len(ids))]), np.array(ids, np.int64), request=request)


def answer(to, body, *buffers):
    return Message(to.run, to.generation, to.request, body, [memoryview(buffer) for buffer in buffers])


def doubling(peer, message, reply):
    """A server of rows of one number, twice the id, that can also fail."""
    if isinstance(message.body, Read):
        ids = np.frombuffer(message.buffers[0], np.int64)
        reply(answer(message, Rows(len(ids)), np.ones(len(ids), np.uint8), (2 * ids).astype(np.float32)))
    elif isinstance(message.body, Confirm):
        reply(answer(message, Confirmed()))
    elif isinstance(message.body, AskStats):
        raise BagpipeError("no statistics today")
    elif isinstance(message.body, Failed):
        raise KeyError("a secret of memory")
    else:
        reply(answer(message, Written(0)))


def get(network: Network, channel: Channel, timeout_s: float = 10.0) -> Message:
    """The next message on a channel; fails after the time."""
    deadline = network.now() + timeout_s
    while True:
        found = channel.receive()
        if found is not None:
            return found
        assert network.now() < deadline, f"nothing came: {channel.trouble}"
        network.wait([channel], deadline - network.now())


def values(message: Message) -> list[float]:
    """The rows in an answer, of one number each."""
    assert isinstance(message.body, Rows), message.body
    return np.frombuffer(message.buffers[1], np.float32).tolist()


def until(condition: Callable[[], bool], timeout_s: float = 10.0, describe=lambda: "it never became true") -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, describe()
        time.sleep(0.01)


@contextmanager
def listening(handler=doubling, security: Security = None, limits: Limits = SHORT, threads: int = 2):
    """A listener on a port of the system's choice."""
    listener = Listener("127.0.0.1:0", handler, threads, security, limits)
    try:
        yield listener
    finally:
        listener.close()


@contextmanager
def connected(address: str, security: Security = None, limits: Limits = SHORT) -> Iterator[tuple[Network, Channel]]:
    """A network and a channel of its own."""
    network = SocketNetwork(security, limits)
    channel = network.connect(address)
    try:
        yield network, channel
    finally:
        channel.close()
        network.close()


def _open_files() -> dict[str, str]:
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one that reads the directory
            found[link.name] = str(link.readlink())
    return found


@contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Fails when a thread or an open file survives; the one thread that ZeroMQ's buffers share may."""
    threads, files = set(threading.enumerate()), _open_files()
    yield
    left = [each.name for each in threading.enumerate() if each not in threads and "Garbage" not in type(each).__name__]
    assert left == []
    if "Garbage" not in "".join(type(each).__name__ for each in set(threading.enumerate()) - threads):
        until(
            lambda: _open_files().keys() <= files.keys(),
            describe=lambda: f"still open: {_open_files().items() - files.items()}",
        )


def resident_bytes() -> int:
    """Memory of this process, without what malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
