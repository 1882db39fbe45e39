"""A server without a network: who may open it, which rows it answers with, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.server.server import EmbeddingServer
from bagpipe.wire.messages import (
    AskStats,
    Body,
    Failed,
    Open,
    Opened,
    Part,
    Read,
    Rows,
    Scan,
    Scanned,
    Stats,
    Write,
    Written,
)
from bagpipe.wire.recovery_messages import Confirm, Mark
from bagpipe.wire.shared import regions
from harness.examples import examples
from harness.server_peer import (
    WIDTHS,
    Peer,
    Sharing,
    array,
    fixture_peer,  # noqa: F401
    fixture_server,  # noqa: F401
    refused,
)

# Opening


def test_the_first_answer_says_who_it_is(server: EmbeddingServer) -> None:
    opened = Peer(server).open()
    assert (opened.server, opened.servers, opened.shared, opened.sequence) == (1, 3, False, 0)
    assert opened.birth == server.birth != EmbeddingServer().birth


def test_nothing_but_figures_is_answered_before_a_connection_is_opened(server: EmbeddingServer) -> None:
    peer = Peer(server)
    for body in (Read([]), Write(0, 1, 0, []), Scan(0, 0, 1), Confirm()):
        assert f"{type(body).__name__} came before Open" in refused(peer.ask(body), "WireError")
    stats = peer.ask(AskStats())
    assert isinstance(stats, Stats)
    assert (stats.num_rows, stats.clients, stats.requests) == ([], 0, 5)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (Open(0, 1, [], "writes"), "0 tables"),
        (Open(0, 1, [1] * 10_001, "writes"), "10001 tables"),
        (Open(0, 1, [3, 1 << 17], "writes"), "at most 131072 floats"),
        (Open(2, 2, WIDTHS, "writes"), "trainer 2 of 2"),
        (Open(0, 1 << 20, WIDTHS, "writes"), "4096 at most"),
    ],
)
def test_what_no_server_can_hold_is_refused(server: EmbeddingServer, body: Open, named: str) -> None:
    assert named in refused(Peer(server).ask(body))
    Peer(server, b"b").open()


def test_all_clients_must_agree_on_widths_and_trainers(server: EmbeddingServer) -> None:
    Peer(server).open(0, 2)
    other = Peer(server, b"b")
    assert "[3, 4] floats by table, others have [3, 2]" in refused(other.ask(Open(1, 2, [3, 4], "writes")))
    assert "counts 3 trainers, others 2" in refused(other.ask(Open(1, 3, WIDTHS, "reads")))
    other.open(1, 2)


def test_another_run_is_refused(peer: Peer) -> None:
    stranger = Peer(peer.server, b"s", run=bytes(16))
    for body in (Open(0, 1, WIDTHS, "writes"), Read([]), AskStats()):
        assert "serves run 00010203" in refused(stranger.ask(body), "WireError")


def test_answers_are_no_requests(peer: Peer) -> None:
    assert "Written is an answer" in refused(peer.ask(Written(1)), "WireError")


def test_a_client_is_one_until_its_connection_ends_however_often_it_says_who_it_is(server: EmbeddingServer) -> None:
    a, b = Peer(server, b"a"), Sharing(server)
    for _ in range(3):
        a.open()
        b.open()
    assert (server.stats().clients, server.stats().shared) == (2, 0), "the memory came with its first words only"
    assert a.kinds == ["", "writes", "writes", "writes"], "whoever knows the run belongs to it"
    a.break_off()
    assert server.stats().clients == 1
    b.break_off()
    assert server.stats().clients == 0
    b.own.close()


def test_reads_and_writes_take_memory_of_their_own_and_writes_come_on_connections_for_writes(server) -> None:
    peer = Peer(server)
    assert isinstance(peer.ask(Open(0, 1, WIDTHS, "reads")), Opened)
    assert peer.kinds[-1] == "reads"
    assert peer.ask(Read([])) == Rows(0)
    for body in (Write(0, 1, -1, []), Mark(0, 1, 1, "")):
        assert "on a connection for reads" in refused(peer.ask(body), "WireError")
    peer.open()
    assert peer.kinds[-1] == "writes"
    assert peer.ask(Write(0, 1, -1, [])) == Written(1)


# Rows


def test_only_rows_that_were_written_travel(peer: Peer) -> None:
    assert peer.read([1, 2]) == {}
    assert peer.write(1, [2, 9], 5.0) == Written(1)
    assert peer.read([1, 2, 9, 2]) == {2: 5.0, 9: 5.0}


def test_parts_of_several_tables_come_one_after_the_other(peer: Peer) -> None:
    parts = [Part(1, 2), Part(0, 1)]
    values = np.arange(7, dtype=np.float32)
    assert peer.ask(Write(0, 1, -1, parts), array([5, 6, 5]), values) == Written(1)
    body, (flags, rows) = peer.begin(Read([Part(0, 2), Part(1, 0), Part(1, 2)]), array([5, 6, 6, 7])).answer()
    assert body == Rows(2)
    assert flags == bytes([1, 0, 1, 0])
    assert np.frombuffer(rows, np.float32).tolist() == [4, 5, 6, 2, 3]


def test_of_each_part_the_columns_asked_for_travel(peer: Peer) -> None:
    parts = [Part(1, 2), Part(0, 2)]
    assert peer.ask(Write(0, 1, -1, parts), array([5, 6, 5, 6]), np.arange(10, dtype=np.float32)) == Written(1)
    asked = [Part(0, 2, 2), Part(1, 2, 1), Part(0, 1, 3), Part(1, 1, 2), Part(0, 1)]
    body, (flags, rows) = peer.begin(Read(asked), array([6, 9, 5, 6, 5, 6, 5])).answer()
    assert body == Rows(6)
    assert flags == bytes([1, 0, 1, 1, 1, 1, 1])
    assert np.frombuffer(rows, np.float32).tolist() == [7, 8, 0, 2, 4, 5, 6, 2, 3, 4, 5, 6]


def test_rows_are_scanned_in_order_of_first_write(peer: Peer) -> None:
    peer.write(1, [7, 3, 5], 1.0)
    body, (ids, rows) = peer.begin(Scan(0, 1, 10)).answer()
    assert body == Scanned(2)
    assert np.frombuffer(ids, np.int64).tolist() == [3, 5]
    assert len(rows) == 2 * 3 * 4
    body, (ids,) = peer.begin(Scan(0, 0, 2, values=False)).answer()
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
    "a number before the first": (Write(0, 0, -1, []), [], "write 0 of trainer 0: they are counted from 1"),
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


@examples(200)
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
    body, buffers = peer.begin(Read([Part(*part) for part in parts]), *([] if shared else [ids])).answer()
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
