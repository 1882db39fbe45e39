"""A server without a network: what it answers, what it refuses, what waits and what is decided once."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bagpipe.errors import StoreError
from bagpipe.server.core import EmbeddingServer
from bagpipe.server.limits import ServerLimits
from bagpipe.server.shared import OwnMemory, regions
from bagpipe.server.storage import in_files, in_memory
from bagpipe.store.local import LocalStore
from bagpipe.wire.messages import (
    AskStats,
    Body,
    Failed,
    Message,
    Open,
    Opened,
    Part,
    Read,
    Rows,
    Scan,
    Scanned,
    Stats,
    Sync,
    Synced,
    Unopened,
    Waiting,
    Write,
    Written,
)

RUN = bytes(range(16))
WIDTHS = [3, 2]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Peer:
    """A client that says what it is told to, and keeps what it hears."""

    def __init__(self, server: EmbeddingServer, name: bytes = b"a", generation: int = 0, run: bytes = RUN) -> None:
        self.server, self.name, self.generation, self.run = server, name, generation, run
        self.heard: dict[int, tuple[Body, tuple[bytes, ...]]] = {}
        self.number = 0

    def send(self, body: Body, *buffers: np.ndarray, number: int | None = None) -> int:
        self.number = self.number + 1 if number is None else number
        views = [memoryview(buffer.reshape(-1).view(np.uint8)) for buffer in buffers]
        self.server.handle(self.name, Message(self.run, self.generation, self.number, body, views), self.hear)
        return self.number

    def hear(self, message: Message) -> None:
        assert (message.run, message.generation) == (self.run, self.generation)
        assert message.request not in self.heard
        self.heard[message.request] = message.body, tuple(map(bytes, message.buffers))

    def ask(self, body: Body, *buffers: np.ndarray, number: int | None = None) -> Body:
        return self.heard.pop(self.send(body, *buffers, number=number))[0]

    def open(self, trainer: int = 0, trainers: int = 1, widths: list[int] | None = None) -> Opened:
        answer = self.ask(Open(trainer, trainers, widths or WIDTHS))
        assert isinstance(answer, Opened), answer
        return answer

    def write(self, sequence: int, ids: list[int], value: float, passed: int = -1, trainer: int = 0) -> Body:
        rows = np.full((len(ids), 3), value, np.float32)
        return self.ask(Write(trainer, sequence, passed, [Part(0, len(ids))]), array(ids), rows)

    def read(self, ids: list[int]) -> dict[int, float]:
        """The rows that are there, which have one value in all columns."""
        number = self.send(Read([Part(0, len(ids))]), array(ids))
        body, (flags, rows) = self.heard.pop(number)
        there = [key for key, flag in zip(ids, flags, strict=True) if flag]
        values = np.frombuffer(rows, np.float32).reshape(-1, 3)
        assert body == Rows(len(there))
        assert (values == values[:, :1]).all()
        return dict(zip(there, values[:, 0].tolist(), strict=True))


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int64)


@pytest.fixture
def server():
    made = EmbeddingServer(server=1, servers=3)
    yield made
    made.close()


@pytest.fixture
def peer(server: EmbeddingServer) -> Peer:
    made = Peer(server)
    made.open()
    return made


def refused(answer: Body, error: str = "StoreError") -> str:
    assert isinstance(answer, Failed), answer
    assert answer.error == error, answer
    return answer.message


# Opening


def test_the_first_answer_says_who_it_is(server: EmbeddingServer) -> None:
    opened = Peer(server).open()
    assert (opened.server, opened.servers, opened.shared, opened.sequence) == (1, 3, False, 0)
    assert opened.birth == server.birth != EmbeddingServer().birth


def test_nothing_but_figures_is_answered_before_a_connection_is_opened(server: EmbeddingServer) -> None:
    peer = Peer(server)
    for body in (Read([]), Write(0, 1, 0, []), Scan(0, 0, 1), Sync()):
        assert peer.ask(body) == Unopened()
    stats = peer.ask(AskStats())
    assert isinstance(stats, Stats)
    assert (stats.num_rows, stats.clients, stats.requests) == ([], 0, 5)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (Open(0, 1, []), "0 tables"),
        (Open(0, 1, [1] * 10_001), "10001 tables"),
        (Open(0, 1, [3, 1 << 17]), "at most 131072 floats"),
        (Open(2, 2, WIDTHS), "trainer 2 of 2"),
        (Open(0, 1 << 20, WIDTHS), "4096 at most"),
    ],
)
def test_what_no_server_can_hold_is_refused(server: EmbeddingServer, body: Open, named: str) -> None:
    assert named in refused(Peer(server).ask(body))
    Peer(server, b"b").open()


def test_all_clients_must_agree_on_widths_and_trainers(server: EmbeddingServer) -> None:
    Peer(server).open(0, 2)
    other = Peer(server, b"b")
    assert "[3, 4] floats by table, others have [3, 2]" in refused(other.ask(Open(1, 2, [3, 4])))
    assert "counts 3 trainers, others 2" in refused(other.ask(Open(1, 3, WIDTHS)))
    other.open(1, 2)


def test_another_run_is_refused(peer: Peer) -> None:
    stranger = Peer(peer.server, b"s", run=bytes(16))
    for body in (Open(0, 1, WIDTHS), Read([]), AskStats()):
        assert "serves run 00010203" in refused(stranger.ask(body), "WireError")


def test_answers_are_no_requests(peer: Peer) -> None:
    assert "Written is an answer" in refused(peer.ask(Written(1)), "WireError")


def test_the_client_that_was_silent_longest_is_forgotten_and_may_open_again() -> None:
    server = EmbeddingServer(limits=ServerLimits(clients_max=2))
    a, b, c = (Peer(server, name) for name in (b"a", b"b", b"c"))
    a.open(), b.open()
    a.ask(Read([]))
    c.open()
    assert b.ask(Read([])) == Unopened()
    assert a.ask(Read([])) == Rows(0)
    b.open()
    assert server.stats().clients == 2


# Rows


def test_only_rows_that_were_written_travel(peer: Peer) -> None:
    assert peer.read([1, 2]) == {}
    assert peer.write(1, [2, 9], 5.0) == Written(1)
    assert peer.read([1, 2, 9, 2]) == {2: 5.0, 9: 5.0}


def test_parts_of_several_tables_come_one_after_the_other(peer: Peer) -> None:
    parts = [Part(1, 2), Part(0, 1)]
    values = np.arange(7, dtype=np.float32)
    assert peer.ask(Write(0, 1, -1, parts), array([5, 6, 5]), values) == Written(1)
    number = peer.send(Read([Part(0, 2), Part(1, 0), Part(1, 2)]), array([5, 6, 6, 7]))
    body, (flags, rows) = peer.heard[number]
    assert body == Rows(2)
    assert flags == bytes([1, 0, 1, 0])
    assert np.frombuffer(rows, np.float32).tolist() == [4, 5, 6, 2, 3]


def test_of_each_part_the_columns_asked_for_travel(peer: Peer) -> None:
    parts = [Part(1, 2), Part(0, 2)]
    assert peer.ask(Write(0, 1, -1, parts), array([5, 6, 5, 6]), np.arange(10, dtype=np.float32)) == Written(1)
    asked = [Part(0, 2, 2), Part(1, 2, 1), Part(0, 1, 3), Part(1, 1, 2), Part(0, 1)]
    number = peer.send(Read(asked), array([6, 9, 5, 6, 5, 6, 5]))
    body, (flags, rows) = peer.heard[number]
    assert body == Rows(6)
    assert flags == bytes([1, 0, 1, 1, 1, 1, 1])
    assert np.frombuffer(rows, np.float32).tolist() == [7, 8, 0, 2, 4, 5, 6, 2, 3, 4, 5, 6]


def test_rows_are_scanned_in_order_of_first_write(peer: Peer) -> None:
    peer.write(1, [7, 3, 5], 1.0)
    number = peer.send(Scan(0, 1, 10))
    body, (ids, rows) = peer.heard[number]
    assert body == Scanned(2)
    assert np.frombuffer(ids, np.int64).tolist() == [3, 5]
    assert len(rows) == 2 * 3 * 4
    number = peer.send(Scan(0, 0, 2, values=False))
    body, (ids,) = peer.heard[number]
    assert (body, np.frombuffer(ids, np.int64).tolist()) == (Scanned(2), [7, 3])


BAD = {
    "no such table": (Read([Part(2, 1)]), [array([1])], "table 2: there are 2"),
    "too few ids": (Read([Part(0, 2)]), [array([1])], "8 bytes of ids"),
    "no ids": (Read([Part(0, 2)]), [], "0 bytes of ids"),
    "too many buffers": (Read([Part(0, 1)]), [array([1])] * 2, "2 buffers"),
    "too few values": (Write(0, 1, -1, [Part(0, 1)]), [array([1]), np.zeros(2, np.float32)], "8 bytes of values"),
    "no values": (Write(0, 1, -1, [Part(0, 1)]), [array([1])], "1 buffers"),
    "too many columns": (Read([Part(0, 1, 4)]), [array([1])], "has 4 columns of rows of table 0: there are 3"),
    "columns of another table": (Read([Part(0, 1, 3), Part(1, 1, 3)]), [array([1, 1])], "table 1: there are 2"),
    "columns without end": (Read([Part(0, 0, 1 << 62)]), [], "has 4611686018427387904 columns"),
    "a part of a row": (Write(0, 1, -1, [Part(0, 1, 1)]), [array([1]), np.zeros(1, np.float32)], "written whole"),
    "a whole row as a part": (Write(0, 1, -1, [Part(0, 1, 3)]), [array([1]), np.zeros(3, np.float32)], "written whole"),
    "a table that is not there": (Scan(7, 0, 1), [], "table 7"),
    "another trainer": (Write(1, 1, -1, []), [], "a write of trainer 1 from trainer 0"),
    "a write too early": (Write(0, 3, -1, []), [], "1 is missing"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_refused_and_decides_nothing(peer: Peer, name: str) -> None:
    body, buffers, named = BAD[name]
    assert named in refused(peer.ask(body, *buffers), "WireError")
    assert peer.server.stats().rows_written == 0
    assert peer.server.stats().refused == 1
    assert peer.write(1, [1], 1.0) == Written(1)


@pytest.mark.parametrize(
    "body",
    [
        Read([Part(0, 1 << 40)]),
        Read([Part(0, 1 << 40, 1)]),
        Write(0, 1, -1, [Part(0, 1 << 40)]),
        Scan(0, 0, 1 << 40),
    ],
)
def test_a_request_beyond_the_limit_is_refused_before_anything_is_allocated(peer: Peer, body: Body) -> None:
    assert "67,108,864 are allowed" in refused(peer.ask(body))


def test_a_table_or_a_row_twice_in_one_write_is_refused_for_good(peer: Peer) -> None:
    twice = peer.ask(Write(0, 1, -1, [Part(0, 1), Part(0, 1)]), array([1, 2]), np.zeros(6, np.float32))
    assert "named twice" in refused(twice)
    assert isinstance(twice, Failed)
    assert twice.decided
    assert "id 4 is written twice" in refused(peer.write(2, [4, 4], 1.0))
    assert peer.read([1, 2, 4]) == {}
    assert peer.write(3, [4], 1.0) == Written(3)


@settings(max_examples=200, deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 4), st.one_of(st.integers(0, 4), st.integers(0, 2**62))), max_size=4
    ),
    num_ids=st.one_of(st.none(), st.integers(0, 8)),
    shared=st.booleans(),
)
def test_any_columns_give_the_rows_asked_for_or_a_typed_error(parts, num_ids, shared) -> None:
    server = EmbeddingServer()
    peer = Sharing(server) if shared else Peer(server)
    if not shared:
        peer.open()
    peer.ask(Write(0, 1, -1, [Part(0, 2), Part(1, 2)]), array([0, 2, 0, 2]), np.arange(10, dtype=np.float32))
    stored = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(6, 10, dtype=np.float32).reshape(2, 2)
    total = sum(count for _, count, _ in parts)
    fits = all(table < 2 and columns <= WIDTHS[table] for table, _, columns in parts)
    ids = np.arange(total if num_ids is None or shared else num_ids)
    wanted = [np.arange(count) + sum(c for _, c, _ in parts[:k]) for k, (_, count, _) in enumerate(parts)]
    layout = regions(total, sum(count * (columns or WIDTHS[t]) for t, count, columns in parts) if fits else 0)
    if shared:
        peer.own.memory[layout.ids] = ids.data.cast("B") if total else b""
    number = peer.send(Read([Part(*part) for part in parts]), *([] if shared else [ids]))
    body, buffers = peer.heard[number]
    if not fits or len(ids) != total:
        refused(body, "WireError")
    else:
        rows = np.frombuffer(peer.own.memory[layout.rows] if shared and total else b"".join(buffers[1:]), np.float32)
        expected = [
            stored[table][np.isin((0, 2), mine), : columns or None].ravel()
            for (table, _, columns), mine in zip(parts, wanted, strict=True)
        ]
        expected = np.concatenate([np.empty(0, np.float32), *expected])
        assert body == Rows(int(np.isin(ids, (0, 2)).sum()))
        assert rows[: len(expected)].tolist() == expected.tolist()
    server.close()
    if shared:
        peer.own.close()


# Writes are decided once


def test_a_repeated_write_is_acknowledged_and_not_applied(peer: Peer) -> None:
    assert peer.write(1, [1], 1.0) == Written(1)
    assert peer.write(2, [1], 2.0) == Written(2)
    assert peer.write(1, [1], 1.0) == Written(1)
    assert peer.write(2, [1], 9.0) == Written(2)
    assert peer.read([1]) == {1: 2.0}
    assert peer.server.stats().rows_written == 2
    assert peer.open().sequence == 2


def test_a_write_without_room_changes_nothing_and_a_late_copy_stays_refused(tmp_path: Path) -> None:
    rows = in_memory(bytes_max=20_000)(WIDTHS)
    server = EmbeddingServer(lambda _: rows)
    peer = Peer(server)
    peer.open()
    peer.write(1, [1], 1.0)
    parts = [Part(0, 2), Part(1, 9000)]
    ids, values = array([1, 2, *range(9000)]), np.zeros(6 + 18_000, np.float32)
    answer = peer.ask(Write(0, 2, 5, parts), ids, values)
    assert "20,000 are allowed" in refused(answer)
    assert peer.read([1, 2]) == {1: 1.0}
    assert server.stats().num_rows == [1, 0]
    rows.store.bytes_in_memory_max = None
    assert peer.ask(Write(0, 2, 5, parts), ids, values) == answer  # its sender was told that nothing has changed
    assert server.stats().num_rows == [1, 0]
    assert peer.write(3, [2], 3.0) == Written(3)
    assert peer.read([1, 2]) == {1: 1.0, 2: 3.0}


def test_running_out_of_memory_is_refused_and_others_go_on(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    other = Peer(peer.server, b"b")
    other.open()
    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "find", exhausted)
        assert "no memory" in refused(peer.ask(Read([Part(0, 1)]), array([1])))
        patch.setattr(LocalStore, "write_many", exhausted)
        assert "no memory" in refused(peer.write(1, [1], 1.0))
    assert peer.write(2, [1], 1.0) == Written(2)
    assert other.read([1]) == {1: 1.0}


def test_copies_of_one_write_on_many_threads_are_applied_once(peer: Peer) -> None:
    ids, rows = array([1]), np.ones(3, np.float32)
    peers = [Peer(peer.server, bytes([k])) for k in range(8)]
    for each in peers:
        each.open()
    barrier = threading.Barrier(8)

    def copy(each: Peer) -> None:
        barrier.wait()
        for sequence in range(1, 40):
            while isinstance(each.ask(Write(0, sequence, sequence, [Part(0, 1)]), ids, rows), Failed):
                pass

    threads = [threading.Thread(target=copy, args=(each,)) for each in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert peer.server.stats().rows_written == 39


# Reads wait for trainers


def two_trainers(**limits: float) -> tuple[EmbeddingServer, Clock, Peer, Peer]:
    clock = Clock()
    server = EmbeddingServer(limits=ServerLimits(**limits), clock=clock)  # type: ignore[arg-type]
    peers = [Peer(server, bytes([k])) for k in range(2)]
    for trainer, peer in enumerate(peers):
        peer.open(trainer, 2)
    return server, clock, peers[0], peers[1]


def test_a_read_is_answered_by_the_write_of_the_last_trainer() -> None:
    server, _, a, b = two_trainers()
    number = a.send(Read([Part(0, 1)], after=0), array([7]))
    assert a.heard == {}
    assert server.stats().parked == 1
    assert a.write(1, [7], 1.0, passed=0) == Written(1)  # no write waits behind a parked read
    assert a.heard == {}
    assert b.write(1, [], 0.0, passed=0, trainer=1) == Written(1)  # an empty one counts
    body, (_, rows) = a.heard[number]
    assert body == Rows(1)
    assert np.frombuffer(rows, np.float32).tolist() == [1.0] * 3
    assert server.stats().parked == 0


def test_a_refused_write_passes_nothing() -> None:
    server, _, a, b = two_trainers()
    a.write(1, [], 0.0, passed=3)
    a.send(Read([], after=3))
    b.write(1, [1, 1], 0.0, passed=3, trainer=1)
    assert a.heard == {}
    b.write(2, [1], 0.0, passed=3, trainer=1)
    assert list(a.heard) == [a.number]
    assert server.stats().refused == 1


def test_a_read_that_has_waited_long_is_asked_to_come_again() -> None:
    server, clock, a, b = two_trainers(park_s=2.0)
    b.write(1, [], 0.0, passed=4, trainer=1)
    number = a.send(Read([], after=4))
    clock.now += 1.9
    server.tick()
    assert a.heard == {}
    clock.now += 0.1
    server.tick()
    assert a.heard == {number: (Waiting([0], [-1]), ())}
    a.write(1, [], 0.0, passed=4)
    assert len(a.heard) == 1  # the read is forgotten
    assert a.ask(Read([], after=4)) == Rows(0)


def test_too_many_waiting_reads_are_asked_to_come_again_at_once() -> None:
    server, _, a, _ = two_trainers(parked_max=3)
    for _ in range(3):
        a.send(Read([], after=0))
    assert a.ask(Read([], after=0)) == Waiting([0, 1], [-1, -1])
    assert server.stats().parked == 3


def test_a_read_that_fails_when_it_goes_on_is_told_to_its_own_client(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, a, b = two_trainers()
    b.write(1, [], 0.0, passed=0, trainer=1)
    number = b.send(Read([Part(0, 1)], after=0), array([1]))

    def broken(*_: object) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(LocalStore, "find", broken)
    assert a.write(1, [1], 1.0, passed=0) == Written(1)
    assert b.heard[number][0] == Failed("StoreError", "the disk is gone")


# Generations


def test_a_new_generation_leaves_the_old_one_behind(peer: Peer) -> None:
    peer.write(1, [1], 1.0, passed=3)
    parked = peer.send(Read([], after=9))
    late = Peer(peer.server, b"l", generation=2)
    assert late.ask(Read([])) == Unopened()
    assert late.open().sequence == 1
    assert peer.heard[parked][0] == Waiting([], [])
    for body in (Open(0, 1, WIDTHS), Read([]), Write(0, 2, -1, [])):
        assert "this is generation 2" in refused(peer.ask(body), "WireError")
    assert late.read([1]) == {1: 1.0}
    assert late.ask(Read([], after=3)) == Rows(0)
    assert late.write(2, [1], 2.0) == Written(2)


def test_trainers_may_be_more_in_a_new_generation(peer: Peer) -> None:
    peer.write(1, [], 0.0, passed=3)
    new = [Peer(peer.server, bytes([k]), generation=1) for k in range(2)]
    for trainer, each in enumerate(new):
        each.open(trainer, 2)
    new[0].send(Read([], after=3))
    assert new[0].heard == {}
    new[1].write(1, [], 0.0, passed=3, trainer=1)
    assert list(new[0].heard) == [new[0].number]


# Shared memory


class Sharing(Peer):
    def __init__(self, server: EmbeddingServer, name: bytes = b"s", size: int = 1 << 16) -> None:
        super().__init__(server, name)
        self.own = OwnMemory(size)
        opened = self.ask(Open(0, 1, WIDTHS, self.own.announcement))
        assert isinstance(opened, Opened)
        assert opened.shared

    def lay(self, ids: list[int], values: np.ndarray) -> None:
        layout = regions(len(ids), len(ids) * 3)
        self.own.memory[layout.ids] = array(ids).data.cast("B")
        self.own.memory[layout.rows] = values.data.cast("B")


def test_ids_and_rows_lie_in_shared_memory(server: EmbeddingServer) -> None:
    peer = Sharing(server)
    peer.lay([4, 5], np.arange(6, dtype=np.float32))
    assert peer.ask(Write(0, 1, -1, [Part(0, 2)])) == Written(1)
    peer.lay([5, 6, 4], np.zeros(9, np.float32))
    number = peer.send(Read([Part(0, 3)]))
    assert peer.heard[number] == (Rows(2), ())
    layout = regions(3, 9)
    assert bytes(peer.own.memory[layout.flags]) == bytes([1, 0, 1])
    assert np.frombuffer(peer.own.memory[layout.rows], np.float32)[:6].tolist() == [3, 4, 5, 0, 1, 2]
    peer.lay([5, 6, 4], np.full(9, 7, np.float32))
    number = peer.send(Read([Part(0, 1, 2), Part(0, 2, 1)]))
    assert peer.heard[number] == (Rows(2), ())
    layout = regions(3, 4)
    assert bytes(peer.own.memory[layout.flags]) == bytes([1, 0, 1])
    assert np.frombuffer(peer.own.memory[layout.rows], np.float32)[:3].tolist() == [3, 4, 0]
    assert peer.ask(Scan(0, 0, 5)) == Scanned(2)
    layout = regions(5, 15)
    assert np.frombuffer(peer.own.memory[layout.ids], np.int64)[:2].tolist() == [4, 5]
    assert np.frombuffer(peer.own.memory[layout.rows], np.float32)[:6].tolist() == list(range(6))
    assert peer.ask(Sync()) == Synced()
    assert server.stats().shared == 1
    peer.own.close()


def test_a_client_with_shared_memory_may_send_buffers_all_the_same(server: EmbeddingServer) -> None:
    peer = Sharing(server)
    assert peer.write(1, [1], 2.0) == Written(1)
    assert peer.read([1]) == {1: 2.0}
    peer.own.close()


@pytest.mark.parametrize("body", [Read([Part(0, 4000)]), Write(0, 1, -1, [Part(0, 4000)]), Scan(0, 0, 4000)])
def test_what_would_lie_beyond_the_shared_memory_is_refused(server: EmbeddingServer, body: Body) -> None:
    peer = Sharing(server)
    assert "in shared memory of 65,536 B" in refused(peer.ask(body), "WireError")
    peer.own.close()


def test_a_copy_of_a_request_does_not_write_over_shared_memory(server: EmbeddingServer) -> None:
    peer = Sharing(server)
    peer.lay([4], np.ones(3, np.float32))
    peer.ask(Write(0, 1, -1, [Part(0, 1)]))
    first = peer.send(Read([Part(0, 1)]))
    peer.lay([9], np.full(3, 7, np.float32))
    before = bytes(peer.own.memory)
    heard = len(peer.heard)
    opened = Open(0, 1, WIDTHS, peer.own.announcement)
    for number in (first, first - 1):
        peer.ask(opened, number=100)  # nor after a copy of the first message of all
        peer.send(Read([Part(0, 1)]), number=number)
    assert len(peer.heard) == heard
    assert bytes(peer.own.memory) == before
    peer.own.close()


def test_memory_that_a_client_has_left_is_let_go(server: EmbeddingServer) -> None:
    peers = [Sharing(server, bytes([k])) for k in range(3)]
    assert server.stats().shared == 3
    peers[0].own.close()
    server.tick()
    assert (server.stats().shared, server.stats().clients) == (2, 2)
    assert peers[0].ask(Read([])) == Unopened()
    for peer in peers:
        peer.own.close()
    Peer(server, b"x").open()
    assert (server.stats().shared, server.stats().clients) == (0, 1)


def test_memory_that_is_not_there_means_buffers(server: EmbeddingServer) -> None:
    own = OwnMemory(1 << 16)
    own.close()
    opened = Peer(server).ask(Open(0, 1, WIDTHS, own.announcement))
    assert isinstance(opened, Opened)
    assert not opened.shared
    assert server.stats().shared == 0


# Files, and the end


def test_rows_in_files_are_synced_and_kept(tmp_path: Path) -> None:
    server = EmbeddingServer(in_files(tmp_path / "rows", keep=True))
    peer = Peer(server)
    peer.open()
    peer.write(1, [1, 2], 1.0)
    assert peer.ask(Sync()) == Synced()
    assert (tmp_path / "rows" / "index.json").exists()
    assert server.stats().bytes_on_disk > 0
    server.close()
    server.close()
    assert "closing" in refused(peer.ask(Read([])))


def test_a_full_disk_is_told_to_the_writer_and_the_server_goes_on(tmp_path: Path, monkeypatch) -> None:
    server = EmbeddingServer(in_files(tmp_path / "rows"))
    peer, other = Peer(server), Peer(server, b"b")
    peer.open()
    other.open()
    peer.write(1, [1], 1.0)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    many = list(range(200_000))
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        answer = peer.write(2, many, 2.0, passed=5)
        assert "table-00000.rows" in refused(answer)
        assert other.read([1, 2]) == {1: 1.0}
        assert peer.write(3, [1], 3.0) == Written(3)  # needs no more room
    assert peer.write(2, many, 2.0, passed=5) == answer
    assert server.stats().num_rows == [1, 0]
    assert peer.write(4, many, 4.0) == Written(4)
    assert other.read([0, 199_999]) == {0: 4.0, 199_999: 4.0}
    server.close()


def test_a_directory_in_use_is_refused_when_the_first_client_comes(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    server = EmbeddingServer(in_files(tmp_path))
    assert "not empty" in refused(Peer(server).ask(Open(0, 1, WIDTHS)))


def test_whoever_waits_at_the_end_is_sent_away() -> None:
    server, _, a, _ = two_trainers()
    number = a.send(Read([], after=0))
    server.close()
    assert a.heard[number][0] == Waiting([], [])
    assert "closing" in refused(a.ask(Read([], after=0)))
