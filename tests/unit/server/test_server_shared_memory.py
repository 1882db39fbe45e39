"""A server whose clients lay ids and rows in memory that they share with it."""

from __future__ import annotations

import numpy as np
import pytest
from bagpipe.server.core import EmbeddingServer
from bagpipe.server.shared import OwnMemory, regions

from bagpipe.wire.messages import (
    Body,
    Open,
    Opened,
    Part,
    Read,
    Rows,
    Scan,
    Scanned,
    Unopened,
    Write,
    Written,
)
from bagpipe.wire.recovery_messages import Confirm, Confirmed
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
