"""A server whose clients lay ids and rows in memory that they share with it."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from bagpipe.server.server import EmbeddingServer
from bagpipe.wire.messages import (
    Body,
    Open,
    Opened,
    Part,
    Read,
    Rows,
    Scan,
    Scanned,
    Write,
    Written,
)
from bagpipe.wire.recovery_messages import Confirm, Confirmed
from bagpipe.wire.shared import OwnMemory, regions
from harness.server_peer import (
    WIDTHS,
    Peer,
    Sharing,
    fixture_server,  # noqa: F401
    refused,
)


def test_ids_and_rows_lie_in_shared_memory(server: EmbeddingServer) -> None:
    peer = Sharing(server)
    peer.lay([4, 5], np.arange(6, dtype=np.float32))
    assert peer.ask(Write(0, 1, -1, [Part(0, 2)])) == Written(1)
    peer.lay([5, 6, 4], np.zeros(9, np.float32))
    assert peer.begin(Read([Part(0, 3)])).answer() == (Rows(2), ())
    layout = regions(3, 9)
    assert bytes(peer.own.memory[layout.flags]) == bytes([1, 0, 1])
    assert np.frombuffer(peer.own.memory[layout.rows], np.float32)[:6].tolist() == [3, 4, 5, 0, 1, 2]
    peer.lay([5, 6, 4], np.full(9, 7, np.float32))
    assert peer.begin(Read([Part(0, 1, 2), Part(0, 2, 1)])).answer() == (Rows(2), ())
    layout = regions(3, 4)
    assert bytes(peer.own.memory[layout.flags]) == bytes([1, 0, 1])
    assert np.frombuffer(peer.own.memory[layout.rows], np.float32)[:3].tolist() == [3, 4, 0]
    assert peer.ask(Scan(0, 0, 5)) == Scanned(2)
    layout = regions(5, 15)
    assert np.frombuffer(peer.own.memory[layout.ids], np.int64)[:2].tolist() == [4, 5]
    assert np.frombuffer(peer.own.memory[layout.rows], np.float32)[:6].tolist() == list(range(6))
    assert peer.ask(Confirm()) == Confirmed()
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


def test_what_a_broken_connection_left_behind_is_done_to_memory_that_nobody_reads(server: EmbeddingServer) -> None:
    """A request that was given up is answered late; the memory of the next connection stays as it is."""
    left, now = Sharing(server), Sharing(server, b"n")
    assert left.write(1, [4], 1.0) == Written(1)
    first = left.begin(Write(0, 3, -1, [Part(0, 1)]))  # one number is missing
    left.lay([4], np.full(3, 3, np.float32))
    now.lay([9], np.full(3, 7, np.float32))
    before = bytes(now.own.memory)
    assert now.begin(Write(0, 2, -1, [Part(0, 1)])).answer()[0] == Written(2)
    assert first.answer()[0] == Written(3)
    assert bytes(now.own.memory) == before
    assert now.read([4, 9]) == {4: 3.0, 9: 7.0}
    for peer in (left, now):
        peer.own.close()


def test_ids_of_a_read_that_waits_are_those_that_it_came_with(server: EmbeddingServer) -> None:
    """What a client does to its memory meanwhile spoils nothing but its own rows."""
    reader, writer = Sharing(server, trainers=2), Peer(server)
    writer.open(1, 2)
    assert writer.write(1, [4], 1.0, trainer=1, passed=0) == Written(1)
    reader.lay([4, 5], np.zeros(6, np.float32))
    reading = reader.begin(Read([Part(0, 2)], after=0))
    assert reading.words
    reader.lay([5, 4], np.zeros(6, np.float32))
    other = Peer(server)
    other.open(0, 2)
    assert other.write(1, [], 0.0, passed=0) == Written(1)
    assert reading.answer() == (Rows(1), ())
    assert bytes(reader.own.memory[regions(2, 6).flags]) == bytes([1, 0])
    reader.own.close()


def test_memory_that_a_client_has_left_is_let_go(server: EmbeddingServer) -> None:
    gc.collect()
    mapped = num_mapped()
    peers = [Sharing(server, bytes([k])) for k in range(3)]
    assert server.stats().shared == 3
    for left, peer in enumerate(peers):
        peer.break_off()
        peer.own.close()
        assert (server.stats().shared, server.stats().clients) == (2 - left, 2 - left)
    del peer, peers
    gc.collect()
    assert num_mapped() <= mapped


def test_a_client_that_introduces_itself_again_and_again_takes_memory_once(server: EmbeddingServer) -> None:
    peer = Sharing(server)
    gc.collect()
    mapped = num_mapped()
    for _ in range(20):
        peer.descriptor = os.dup(peer.own.descriptor)
        assert peer.ask(Open(0, 1, WIDTHS, "writes", len(peer.own.memory))).shared
    assert (server.stats().shared, server.stats().clients) == (1, 1)
    gc.collect()
    assert num_mapped() <= mapped
    peer.own.close()


def num_mapped() -> int:
    """Memory of clients in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:bagpipe")


@pytest.mark.parametrize("how", ["no descriptor", "another size", "not sealed", "only to read"])
def test_memory_that_is_not_as_announced_means_buffers(server: EmbeddingServer, how: str) -> None:
    own, peer = OwnMemory(1 << 16), Peer(server)
    files = set(Path("/proc/self/fd").iterdir())
    if how == "another size":
        peer.descriptor = os.dup(own.descriptor)
    elif how == "not sealed":
        peer.descriptor = os.memfd_create("bagpipe")
        os.ftruncate(peer.descriptor, 1 << 16)
    elif how == "only to read":
        peer.descriptor = os.open(f"/proc/self/fd/{own.descriptor}", os.O_RDONLY)
    opened = peer.ask(Open(0, 1, WIDTHS, "writes", 1 << 17 if how == "another size" else 1 << 16))
    assert isinstance(opened, Opened)
    assert not opened.shared
    assert server.stats().shared == 0
    assert set(Path("/proc/self/fd").iterdir()) <= files, "its descriptor is closed"
    assert peer.write(1, [1], 1.0) == Written(1)
    assert peer.read([1]) == {1: 1.0}
    own.close()
