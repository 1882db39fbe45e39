"""How fast 20,000 rows of 192 bytes come from another process by id: a plain TCP socket over loopback, our channel with
and without keys, and memory that both share, one request at a time and four in flight; and, as a floor for them all,
the copy of the rows within one process.

All contestants are asked in turn, again and again, and the same process answers them: with the same rows, found by
their number, which stands for the id, and gathered by the same kernel on one thread. TCP moves ids and rows and nothing
else, into memory that is ready, and trusts what comes; the others send whole messages and check them. Ratios are those
of median times: `time_ratio_to_tcp` to TCP with as many requests in flight, `time_ratio_to_tcp_one_at_a_time` to TCP
with one. `megabytes_per_second` counts the rows only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from bagpipe.allocator import keep_freed_memory
from bagpipe.arrays import Floats, Int64s
from bagpipe.errors import PipelineError
from bagpipe.server.shared import NUM_BYTES, OwnMemory, attach, regions
from bagpipe.store.chunks import ChunkedRows
from bagpipe.wire.checks import check_read, check_rows
from bagpipe.wire.dispatch import Reply
from bagpipe.wire.keys import VARIABLE, Security, find_keys, new_keys
from bagpipe.wire.listener import Listener
from bagpipe.wire.messages import Body, Message, Open, Opened, Part, Read, Rows
from bagpipe.wire.sockets import SocketChannel, SocketNetwork
from benchmarks import Benchmark, Results

ROWS, WIDTH = 20_000, 48
TABLE_ROWS = 200_000
IN_FLIGHT = (1, 4)
TIMEOUT_S = 60.0
_RUN = bytes(16)

Fetch = Callable[[list[Int64s]], list[Floats]]
"""Rows of several requests, as many in flight as there are; valid until the next call."""


@dataclass(frozen=True)
class Addresses:
    """Where the other process answers."""

    tcp: int
    plain: str
    curve: str


@dataclass(frozen=True)
class Contestant:
    """A way to get rows."""

    name: str
    open: Callable[[Addresses], contextlib.AbstractContextManager[Fetch]]


def run(quick: bool) -> Results:
    """Everyone in turn; about half a minute."""
    keep_freed_memory()  # on both sides, as trainers and servers do: TCP has its memory ready, too
    num_rows, rounds = (500, 3) if quick else (ROWS, 60)
    rng = np.random.default_rng(0)
    with _server() as addresses, contextlib.ExitStack() as stack:
        fetches = {each.name: stack.enter_context(each.open(addresses)) for each in CONTESTANTS}
        seconds: dict[tuple[str, int], list[float]] = {(name, many): [] for many in IN_FLIGHT for name in fetches}
        for each in range(
            rounds + 3
        ):  # the first ones, in which memory is touched and connections warm up, do not count
            for (name, many), times in seconds.items():
                ids = [rng.integers(0, TABLE_ROWS, num_rows) for _ in range(many)]
                start = time.perf_counter()
                rows = fetches[name](ids)
                taken = (time.perf_counter() - start) / many
                _check(name, ids, rows)
                times.extend([taken] if each >= 3 else [])
    return [_figures(name, many, num_rows, seconds) for name, many in seconds]


def _figures(name: str, in_flight: int, num_rows: int, seconds: dict[tuple[str, int], list[float]]) -> dict[str, Any]:
    median = float(np.median(seconds[name, in_flight]))
    return {
        "transport": name,
        "in_flight": in_flight,
        "rows": num_rows,
        "ms_per_request": round(median * 1e3, 3),
        "rows_per_second": round(num_rows / median),
        "megabytes_per_second": round(num_rows * WIDTH * 4 / median / 1e6, 1),
        "time_ratio_to_tcp": round(median / float(np.median(seconds["tcp", in_flight])), 3),
        "time_ratio_to_tcp_one_at_a_time": round(median / float(np.median(seconds["tcp", 1])), 3),
    }


def _check(name: str, ids: list[Int64s], rows: list[Floats]) -> None:
    """The rows are those asked for: the first number of each is its id."""
    for wanted, got in zip(ids, rows, strict=True):
        if got.shape != (len(wanted), WIDTH) or not np.array_equal(got[:, 0], wanted.astype(np.float32)):
            raise PipelineError(f"{name} brought other rows than were asked for: a defect, please report it")


@contextlib.contextmanager
def _over_tcp(addresses: Addresses) -> Iterator[Fetch]:
    """The number of ids and the ids go out, rows come back: nothing is checked, nothing else travels."""
    with socket.create_connection(("127.0.0.1", addresses.tcp), TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        memory = np.empty((max(IN_FLIGHT), ROWS, WIDTH), np.float32)

        def fetch(ids: list[Int64s]) -> list[Floats]:
            for each in ids:
                connection.sendall(len(each).to_bytes(8, "little"))
                connection.sendall(each.data)
            found = [memory[number, : len(each)] for number, each in enumerate(ids)]
            for rows in found:
                _receive(connection, rows.data.cast("B"))
            return found

        yield fetch


@contextlib.contextmanager
def _over_channel(address: str, security: Security) -> Iterator[Fetch]:
    with _channels(1, address, security) as (network, (channel,)):
        kept: list[Message] = []

        def fetch(ids: list[Int64s]) -> list[Floats]:
            for number, each in enumerate(ids):
                channel.send(Message(_RUN, 0, number, Read([Part(0, len(each))]), [each.data]))
            kept[:] = _answers(network, {channel: len(ids)})
            kept.sort(key=lambda message: message.request)
            return [_rows(message, len(each)) for message, each in zip(kept, ids, strict=True)]

        yield fetch
        kept.clear()


@contextlib.contextmanager
def _over_shared_memory(address: str) -> Iterator[Fetch]:
    """As the store does it: a connection and a memory for each request under way, only a short message travels."""
    with _channels(max(IN_FLIGHT), address, None) as (network, channels), contextlib.ExitStack() as stack:
        memories = []
        for channel in channels:
            memories.append(own := OwnMemory())
            stack.callback(own.close)
            channel.send(Message(_RUN, 0, 0, Open(0, 1, [WIDTH], own.announcement)))
            (answer,) = _answers(network, {channel: 1})
            if not (isinstance(answer.body, Opened) and answer.body.shared):
                raise PipelineError(f"the other process can't use our memory: {answer.body}")
            channel.take_side_door()

        def fetch(ids: list[Int64s]) -> list[Floats]:
            found = []
            for own, channel, each in zip(memories, channels, ids, strict=False):
                layout = regions(len(each), len(each) * WIDTH)
                np.frombuffer(own.memory[layout.ids], np.int64)[:] = each
                channel.send(Message(_RUN, 0, 0, Read([Part(0, len(each))])))
                found.append(np.frombuffer(own.memory[layout.rows], np.float32).reshape(len(each), WIDTH))
            _answers(network, dict.fromkeys(channels[: len(ids)], 1))
            return found

        yield fetch


@contextlib.contextmanager
def _copied(addresses: Addresses) -> Iterator[Fetch]:  # noqa: ARG001
    """Rows of this process, one request after the other: what any way to get them takes at least on one thread."""
    stored, memory = _stored(), np.empty((max(IN_FLIGHT), ROWS, WIDTH), np.float32)

    def fetch(ids: list[Int64s]) -> list[Floats]:
        found = [memory[number, : len(each)] for number, each in enumerate(ids)]
        for each, rows in zip(ids, found, strict=True):
            stored.gather(each, rows)
        return found

    yield fetch


def _stored() -> ChunkedRows:
    """The rows, as a server holds them; the first number of each is its id."""
    stored = ChunkedRows(WIDTH, 1 << (TABLE_ROWS * WIDTH * 4).bit_length())
    stored.reserve(TABLE_ROWS)
    rows = stored.chunks[0][:TABLE_ROWS]
    rows[:] = np.random.default_rng(0).random((TABLE_ROWS, WIDTH), np.float32)
    rows[:, 0] = np.arange(TABLE_ROWS)
    return stored


@contextlib.contextmanager
def _channels(count: int, address: str, security: Security) -> Iterator[tuple[SocketNetwork, list[SocketChannel]]]:
    network = SocketNetwork(security)
    channels = [network.connect(address) for _ in range(count)]
    try:
        yield network, channels
    finally:
        for channel in channels:
            channel.close()
        network.close()


def _answers(network: SocketNetwork, due: dict[SocketChannel, int]) -> list[Message]:
    """So many of each channel, in the order in which they came."""
    answers: list[Message] = []
    while due := {channel: count for channel, count in due.items() if count}:
        if not (ready := network.wait(list(due), TIMEOUT_S)):
            raise PipelineError(f"the other process did not answer: {next(iter(due)).trouble}")
        for channel in due.keys() & ready:
            while due[channel] and (message := channel.receive()) is not None:
                answers.append(message)
                due[channel] -= 1
    return answers


def _rows(message: Message, num_rows: int) -> Floats:
    assert isinstance(message.body, Rows), message.body
    _, values = check_rows(message.body, message.buffers, [Part(0, num_rows)], [WIDTH])
    return values.reshape(num_rows, WIDTH)


CONTESTANTS = [
    Contestant("tcp", _over_tcp),
    Contestant("channel", lambda addresses: _over_channel(addresses.plain, None)),
    Contestant("channel with keys", lambda addresses: _over_channel(addresses.curve, find_keys("client"))),
    Contestant("shared memory", lambda addresses: _over_shared_memory(addresses.plain)),
    Contestant("copy alone", _copied),
]
"""The first is the one that others are compared with."""


@contextlib.contextmanager
def _server() -> Iterator[Addresses]:
    """Another process that answers them all, with keys in both environments for as long."""
    server, client = new_keys()
    before = os.environ.get(VARIABLE)
    command = [sys.executable, "-m", "benchmarks.transport"]
    child = subprocess.Popen(  # noqa: S603 - this module, with this interpreter
        command, env=os.environ | {VARIABLE: server.text()}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    os.environ[VARIABLE] = client.text()
    try:
        assert child.stdout is not None
        said = child.stdout.readline()
        if not said:
            raise PipelineError("the process that should answer ended: see above")
        yield msgspec.json.decode(said, type=Addresses)
    finally:
        os.environ.pop(VARIABLE)
        os.environ.update({} if before is None else {VARIABLE: before})
        child.communicate(timeout=TIMEOUT_S)  # closes its standard input, which ends it


def _answer() -> None:
    """What the other process does, until its standard input ends."""
    keep_freed_memory()
    stored = _stored()
    memories: dict[bytes, memoryview] = {}

    def handler(peer: bytes, message: Message, reply: Reply) -> None:
        body, buffers = _answer_to(message, peer, stored, memories)
        reply(Message(message.run, message.generation, message.request, body, buffers))

    plain = Listener("127.0.0.1:0", handler)
    curve = Listener("127.0.0.1:0", handler, security=find_keys("server"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer_tcp, args=(server, stored), daemon=True).start()
        addresses = Addresses(server.getsockname()[1], plain.address, curve.address)
        sys.stdout.buffer.write(msgspec.json.encode(addresses) + b"\n")
        sys.stdout.flush()
        sys.stdin.read()
    plain.close()
    curve.close()


def _answer_to(
    message: Message, peer: bytes, stored: ChunkedRows, memories: dict[bytes, memoryview]
) -> tuple[Body, list[memoryview]]:
    """Rows in buffers, or in the memory that the peer has announced."""
    body = message.body
    if isinstance(body, Open):
        foreign = None if body.shared is None else attach(body.shared)
        if foreign is not None:
            memories[peer] = foreign.memory
        return Opened(0, 1, foreign is not None, 0, b"", NUM_BYTES), []
    assert isinstance(body, Read)
    num_rows = body.parts[0].count
    if message.buffers:
        ids = check_read(body, message.buffers, [WIDTH])
        rows = np.empty((num_rows, WIDTH), np.float32)
        answer: list[memoryview] = [np.ones(num_rows, np.uint8).data, rows.data]
    else:
        memory, layout = memories[peer], regions(num_rows, num_rows * WIDTH)
        ids = check_read(body, [memory[layout.ids]], [WIDTH]).copy()
        rows = np.frombuffer(memory[layout.rows], np.float32).reshape(num_rows, WIDTH)
        answer = []
    if ids.view(np.uint64).max() >= TABLE_ROWS:  # those below 0, too
        raise PipelineError(f"rows {ids.min()} to {ids.max()} were asked for: there are {TABLE_ROWS}")
    stored.gather(ids, rows)
    return Rows(num_rows), answer


def _answer_tcp(server: socket.socket, stored: ChunkedRows) -> None:
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head, ids, rows = bytearray(8), np.empty(ROWS, np.int64), np.empty((ROWS, WIDTH), np.float32)
    with connection:
        while _receive(connection, memoryview(head)):
            wanted = ids[: int.from_bytes(head, "little")]
            _receive(connection, wanted.data.cast("B"))
            stored.gather(wanted, rows[: len(wanted)])
            connection.sendall(rows[: len(wanted)].data.cast("B"))


def _receive(connection: socket.socket, into: memoryview) -> bool:
    """Fill memory from a socket; False where it has ended."""
    while into:
        if not (count := connection.recv_into(into)):
            return False
        into = into[count:]
    return True


BENCHMARK = Benchmark("transport", "rows a second from another process: TCP, our channel, keys or none", run)

if __name__ == "__main__":
    _answer()
