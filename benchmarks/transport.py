"""How fast 20,000 rows of 192 bytes, and 100, come from another process by id: over TCP, TLS, a Unix socket and through
shared memory.

`store` is what a trainer has: its store, and a server that looks rows up. With `--against DIR` every turn is followed
by the same of that checkout. `wire` is what carries it, beside a floor that nothing gets below: rows are found by their
number, which stands for the id, and gathered by the same kernel on one thread of another process, so that only the way
differs. Floors are a plain TCP socket, which moves ids and rows and nothing else into memory that is ready, and trusts
what comes; the copy of the rows within one process; and AES-GCM of the same bytes, added to the time of the channel
that encrypts nothing.

All take turns, again and again. `..._ratio_to_floor` and `..._to_against` are medians over rounds; processor times are
those of both processes together.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from bagpipe.allocator import keep_freed_memory
from bagpipe.arrays import Floats, Int64s
from bagpipe.errors import MissingExtraError, PipelineError
from bagpipe.store.chunks import ChunkedRows
from bagpipe.wire.checks import check_read, check_rows
from bagpipe.wire.client import Client
from bagpipe.wire.connection import Answer, Connection, Peer
from bagpipe.wire.keys import VARIABLE, Security, find_keys, new_keys
from bagpipe.wire.listener import Listener
from bagpipe.wire.messages import Message, Open, Opened, Part, Read, Rows
from bagpipe.wire.shared import NUM_BYTES, OwnMemory, attach, regions
from bagpipe.wire.stream import SocketNetwork
from benchmarks import Benchmark, Results, source_of
from benchmarks.children import Process, call, child, end_with_parent, heard, tell
from benchmarks.transport_store import WAYS, processor_s

ROWS, FEW_ROWS, WIDTH = 20_000, 100, 48
TABLE_ROWS = 200_000
IN_FLIGHT = (1, 4)
TIMES, TURN = {ROWS: 5, FEW_ROWS: 100}, 3
"""Reads of a turn through a store, and on the wire."""
WARM_UP = 2
"""Rounds that do not count: memory is touched, and connections warm up."""
TIMEOUT_S = 60.0
_RUN = bytes(16)
_ROOT = Path(__file__).parents[1]

Fetch = Callable[[list[Int64s]], list[Floats]]
"""Rows of several requests, as many in flight as there are; valid until the next call."""
Times = dict[str, list[float]]
"""Milliseconds of each round, on the clock and on processors."""


def run(quick: bool, against: Path | None = None) -> Results:
    """The store's part, then that of the wire; about a minute, and with another checkout half a minute more."""
    return [*_store(quick, against), *_wire(quick)]


# Through stores


def _store(quick: bool, against: Path | None) -> Results:
    rounds = 1 if quick else 15
    sources = [_ROOT / "src", *([] if against is None else [source_of(against)])]
    found: dict[tuple[str, int], list[Times]] = {
        (way, num_rows): [{} for _ in sources] for num_rows in (ROWS, FEW_ROWS) for way in WAYS
    }
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-m", "benchmarks.transport_store"]
        sides: list[Process] = []
        for source in sources:
            paths = {"PYTHONPATH": os.pathsep.join((str(source), str(_ROOT)))}
            sides.append(stack.enter_context(child(command, paths)))
            (package,) = call(sides[-1:], "open", table_rows=TABLE_ROWS, width=WIDTH)
            if not Path(package).is_relative_to(source):
                raise PipelineError(f"a process that should use the package in {source} has used {package}")
        for number in range(rounds + WARM_UP):
            for (way, num_rows), of_sides in found.items():
                for side in range(len(sides)) if number % 2 else reversed(range(len(sides))):
                    times = 2 if quick else TIMES[num_rows]
                    (taken,) = call([sides[side]], "turn", way=way, num_rows=num_rows, times=times)
                    _note(of_sides[side], taken, number)
        call(sides, "close")
    return [_compared(way, num_rows, of_sides) for (way, num_rows), of_sides in found.items()]


def _note(times: Times, taken: dict[str, float], number: int) -> None:
    if number >= WARM_UP:
        for key, value in taken.items():
            times.setdefault(key, []).append(value)


def _compared(way: str, num_rows: int, of_sides: list[Times]) -> dict[str, Any]:
    ours = of_sides[0]
    row = {"part": "store", "transport": way, "in_flight": 1, "rows": num_rows} | _medians(ours)
    for theirs in of_sides[1:]:
        row |= {f"{key}_against": value for key, value in _medians(theirs).items()}
        row |= {f"{key.removesuffix('_ms')}_ratio_to_against": _ratio(ours[key], theirs[key]) for key in ours}
    return row


def _medians(times: Times) -> dict[str, float]:
    return {key: round(statistics.median(values), 3) for key, values in times.items()}


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return round(statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True)), 3)


# On the wire


class Addresses(msgspec.Struct, frozen=True):
    """Where the other process answers."""

    process: int
    tcp: int
    plain: str
    keyed: str


@dataclass(frozen=True)
class Contestant:
    """A way to get rows."""

    name: str
    open: Callable[[Addresses], contextlib.AbstractContextManager[Fetch]]
    floor: tuple[str, ...] = ()
    """Others, the sum of whose times it can't be faster than."""


def _wire(quick: bool) -> Results:
    keep_freed_memory()  # on both sides, as trainers and servers do: TCP has its memory ready, too
    num_rows, rounds = (500, 1) if quick else (ROWS, 25)
    rng = np.random.default_rng(0)
    found: dict[tuple[str, int], Times] = {(each.name, many): {} for many in IN_FLIGHT for each in CONTESTANTS}
    with _other() as addresses, contextlib.ExitStack() as stack:
        fetches = {each.name: stack.enter_context(each.open(addresses)) for each in CONTESTANTS}
        for number in range(rounds + WARM_UP):
            for (name, many), times in found.items():
                wanted = [[rng.integers(0, TABLE_ROWS, num_rows) for _ in range(many)] for _ in range(1 + TURN)]
                _note(times, _turn(name, fetches[name], wanted, addresses.process), number)
    return [_figures(each, many, num_rows, found) for many in IN_FLIGHT for each in CONTESTANTS]


def _turn(name: str, fetch: Fetch, wanted: list[list[Int64s]], other: int) -> dict[str, float]:
    """The first does not count: whoever had its turn before has left its own data in the caches."""
    seconds, used_s = [], []
    for ids in wanted:
        used, start = processor_s(other), time.perf_counter()
        rows = fetch(ids)
        seconds.append(time.perf_counter() - start)
        used_s.append(processor_s(other) - used)
        _check(name, ids, rows)
        del rows  # before there are others
    return {
        key: 1e3 * statistics.median(values[1:]) / len(wanted[0])
        for key, values in {"wall_ms": seconds, "processor_ms": used_s}.items()
    }


def _figures(each: Contestant, many: int, num_rows: int, found: dict[tuple[str, int], Times]) -> dict[str, Any]:
    times = found[each.name, many]
    row: dict[str, Any] = {"part": "wire", "transport": each.name, "in_flight": many, "rows": num_rows}
    row |= _medians(times)
    if each.floor:
        floors = [found[name, many] for name in each.floor]
        row["floor"] = " + ".join(each.floor)
        for key, values in times.items():
            floor = [sum(of_round) for of_round in zip(*(floor[key] for floor in floors), strict=True)]
            row[f"{key.removesuffix('_ms')}_ratio_to_floor"] = _ratio(values, floor)
    return row


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
    with contextlib.closing(_client(address, security)) as client:

        def fetch(ids: list[Int64s]) -> list[Floats]:
            for each in ids:
                client.send(partial(_read, each), "rows")
            return [_rows(client.receive(), len(each)) for each in ids]

        yield fetch


@contextlib.contextmanager
def _over_shared_memory(address: str) -> Iterator[Fetch]:
    """As the store does it: a connection and a memory for each request under way, only a short message travels."""
    with contextlib.ExitStack() as stack:
        memories = [stack.enter_context(contextlib.closing(OwnMemory())) for _ in range(max(IN_FLIGHT))]
        clients = [stack.enter_context(contextlib.closing(_client(address, None, own))) for own in memories]

        def fetch(ids: list[Int64s]) -> list[Floats]:
            found = []
            for own, client, each in zip(memories, clients, ids, strict=False):
                layout = regions(len(each), len(each) * WIDTH)
                np.frombuffer(own.memory[layout.ids], np.int64)[:] = each
                body = Read([Part(0, len(each))])
                client.send(lambda body=body: (body, ()), "rows")  # type: ignore[misc]
                found.append(np.frombuffer(own.memory[layout.rows], np.float32).reshape(len(each), WIDTH))
            for client, _ in zip(clients, ids, strict=False):
                client.receive()
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


@contextlib.contextmanager
def _encrypted(addresses: Addresses) -> Iterator[Fetch]:  # noqa: ARG001
    """Ids and as many bytes as their rows, encrypted and decrypted in one thread; the rows are those of each id."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise MissingExtraError("AES-GCM needs the cryptography package: pip install 'bagpipe[cluster]'") from error
    cipher, nonce = AESGCM(bytes(32)), bytes(12)
    memory = np.zeros((max(IN_FLIGHT), ROWS, WIDTH), np.float32)

    def fetch(ids: list[Int64s]) -> list[Floats]:
        found = [memory[number, : len(each)] for number, each in enumerate(ids)]
        for each, rows in zip(ids, found, strict=True):
            cipher.decrypt(nonce, cipher.encrypt(nonce, each.data.cast("B"), None), None)
            cipher.decrypt(nonce, cipher.encrypt(nonce, rows.data.cast("B"), None), None)
            rows[:, 0] = each
        return found

    yield fetch


CONTESTANTS = [
    Contestant("plain socket", _over_tcp),
    Contestant("copy alone", _copied),
    Contestant("AES-GCM alone", _encrypted),
    Contestant("tcp", lambda addresses: _over_channel(addresses.plain, None), ("plain socket",)),
    Contestant("tls", lambda addresses: _over_channel(addresses.keyed, find_keys("client")), ("tcp", "AES-GCM alone")),
    Contestant("shared memory", lambda addresses: _over_shared_memory(addresses.plain), ("copy alone",)),
]


def _client(address: str, security: Security, own: OwnMemory | None = None) -> Client:
    """Over TCP, or where memory is shared over a Unix socket."""

    def introduce(client: Client, connection: Connection) -> None:
        hello = Open(0, 1, [WIDTH], "reads", own.num_bytes if own else 0)
        opened = client.ask_first(connection, hello, "a first sign of life", own.descriptor if own else None)
        if not (isinstance(opened, Opened) and opened.shared == (own is not None)):
            raise PipelineError(f"the other process can't use our memory: {opened}")

    network = SocketNetwork(security, local=own is not None)
    return Client(network, address, "the other process", run=_RUN, hello=introduce)


def _read(ids: Int64s) -> Answer:
    return Read([Part(0, len(ids))]), [ids.data]


def _rows(message: Message, num_rows: int) -> Floats:
    assert isinstance(message.body, Rows), message.body
    _, values = check_rows(message.body, message.buffers, [Part(0, num_rows)], [WIDTH])
    return values.reshape(num_rows, WIDTH)


def _stored() -> ChunkedRows:
    """The rows, as a server holds them; the first number of each is its id."""
    stored = ChunkedRows(WIDTH, 1 << (TABLE_ROWS * WIDTH * 4).bit_length())
    stored.reserve(TABLE_ROWS)
    rows = stored.chunks[0][:TABLE_ROWS]
    rows[:] = np.random.default_rng(0).random((TABLE_ROWS, WIDTH), np.float32)
    rows[:, 0] = np.arange(TABLE_ROWS)
    return stored


@contextlib.contextmanager
def _other() -> Iterator[Addresses]:
    """Another process that answers them all, with keys in both environments for as long."""
    server, client = new_keys()
    before = os.environ.get(VARIABLE)
    with child([sys.executable, "-m", "benchmarks.transport"], {VARIABLE: server.text()}) as process:
        os.environ[VARIABLE] = client.text()
        try:
            yield msgspec.json.decode(heard(process), type=Addresses)
        finally:
            os.environ.pop(VARIABLE)
            os.environ.update({} if before is None else {VARIABLE: before})


# The other process


def _answer() -> None:
    """What it does, until its standard input ends."""
    end_with_parent()
    keep_freed_memory()
    stored = _stored()
    plain = Listener("127.0.0.1:0", partial(_answered, stored))
    keyed = Listener("127.0.0.1:0", partial(_answered, stored), find_keys("server"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=_answer_tcp, args=(server, stored), daemon=True).start()
        tell(Addresses(os.getpid(), server.getsockname()[1], plain.address, keyed.address))
        sys.stdin.read()


def _answered(stored: ChunkedRows, peer: Peer, message: Message) -> Answer:
    """Rows in buffers, or in the memory that came with the first message."""
    body = message.body
    if isinstance(body, Open):
        descriptor = peer.take_descriptor()
        peer.state = None if descriptor is None else attach(descriptor, body.shared_bytes)
        peer.admit(body.kind)
        return Opened(0, 1, peer.state is not None, 0, b"", NUM_BYTES), ()
    assert isinstance(body, Read)
    num_rows, memory = body.parts[0].count, peer.state
    if isinstance(memory, memoryview):
        layout = regions(num_rows, num_rows * WIDTH)
        ids = check_read(body, [memory[layout.ids]], [WIDTH]).copy()
        rows = np.frombuffer(memory[layout.rows], np.float32).reshape(num_rows, WIDTH)
        answer: tuple[memoryview, ...] = ()
    else:
        ids = check_read(body, message.buffers, [WIDTH])
        rows = np.empty((num_rows, WIDTH), np.float32)
        answer = np.ones(num_rows, np.uint8).data, rows.data
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


BENCHMARK = Benchmark("transport", "rows from another process over TCP, TLS, Unix sockets, shared memory", run, run)

if __name__ == "__main__":
    _answer()
