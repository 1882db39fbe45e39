"""Writes on a server without a network are decided once, and what finds no room in memory or files changes nothing."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from bagpipe.server.core import EmbeddingServer

from bagpipe.server.storage import in_files, in_memory
from bagpipe.store.local import LocalStore
from bagpipe.wire.messages import Body, Open, Part, Read, Write, Written
from harness.server_peer import (
    WIDTHS,
    Peer,
    array,
    fixture_peer,  # noqa: F401
    fixture_server,  # noqa: F401
    refused,
)


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
    rows.bytes_in_memory_max = None
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
        patch.setattr(LocalStore, "place", exhausted)
        assert "no memory" in refused(peer.write(1, [1], 1.0))
    assert peer.write(2, [1], 1.0) == Written(2)
    assert other.read([1]) == {1: 1.0}


def test_copies_of_one_write_on_many_threads_are_applied_once(peer: Peer) -> None:
    ids, rows = array([1]), np.ones(3, np.float32)
    peers = [Peer(peer.server, bytes([k])) for k in range(8)]
    for each in peers:
        each.open()
    barrier = threading.Barrier(8)

    def copy(each: Peer) -> list[Body]:
        barrier.wait(30)
        return [each.ask(Write(0, number, number, [Part(0, 1)]), ids, rows) for number in range(1, 40)]

    with ThreadPoolExecutor(8) as pool:
        for answers in pool.map(copy, peers):
            assert answers == [Written(number) for number in range(1, 40)]
    assert peer.server.stats().rows_written == 39


# Rows in files


def test_rows_in_files_take_disk_and_leave_nothing_there(tmp_path: Path) -> None:
    server = EmbeddingServer(in_files(tmp_path / "rows"))
    peer = Peer(server)
    peer.open()
    peer.write(1, [1, 2], 1.0)
    assert server.stats().bytes_on_disk > 0
    assert not list((tmp_path / "rows").iterdir())
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
        assert f"the file of table 0 in {tmp_path}/rows can't grow" in refused(answer)
        assert other.read([1, 2]) == {1: 1.0}
        assert peer.write(3, [1], 3.0) == Written(3)  # needs no more room
    assert peer.write(2, many, 2.0, passed=5) == answer
    assert server.stats().num_rows == [1, 0]
    assert peer.write(4, many, 4.0) == Written(4)
    assert other.read([0, 199_999]) == {0: 4.0, 199_999: 4.0}
    server.close()


def test_rows_of_an_earlier_version_are_refused_when_the_first_client_comes(tmp_path: Path) -> None:
    (tmp_path / "table-00000.rows").touch()
    server = EmbeddingServer(in_files(tmp_path))
    assert "of an earlier version" in refused(Peer(server).ask(Open(0, 1, WIDTHS)))
