"""Writes on a server without a network are decided once and in the order of their numbers, whatever comes when; what
finds no room in memory or files changes nothing."""

from __future__ import annotations

import errno
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bagpipe.server.server import REFUSALS_KEPT, EmbeddingServer, Order
from bagpipe.server.storage import in_files, in_memory
from bagpipe.store.local import LocalStore
from bagpipe.wire.messages import Body, Failed, Message, Open, Opened, Part, Read, Rows, Write, Written
from harness.calls import Call
from harness.server_peer import (
    RUN,
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


# Whatever arrives when


def test_whatever_arrives_each_number_is_applied_once_and_in_order(peer: Peer) -> None:
    """Numbers come on connections of their own, early ones and copies too; those before them let them go on."""
    server, first = peer.server, 0
    for arriving in sorted(set(itertools.permutations([1, 2, 3, 3, 2]))):
        begun = []
        for number in arriving:
            other = Peer(server)
            other.open()
            rows = np.full(3, first + number, np.float32)
            before = server.stats().rows_written
            call = other.begin(Write(0, first + number, -1, [Part(0, 1)]), array([1]), rows)
            begun.append((number, call))
            there = {number for number, _ in begun}
            decided = next(number for number in range(4) if number + 1 not in there)
            for each, other_call in begun:
                if each <= decided:
                    assert other_call.answer() == (Written(first + each), ())
                else:
                    due = f"decides about write {first + decided + 1} of trainer 0"
                    other_call.until(lambda other_call=other_call, due=due: other_call.words[-1][0] == due)
                    assert not other_call.answers
            assert server.stats().rows_written == first + decided >= before
            assert peer.read([1]) == ({1: float(first + decided)} if first + decided else {})
        first += 3


def test_a_refusal_is_the_answer_to_every_copy_also_of_those_that_came_early(peer: Peer) -> None:
    copies = [Peer(peer.server, bytes([k])) for k in range(3)]
    for copy in copies:
        copy.open()
    twice = np.zeros(6, np.float32)
    early = [copy.begin(Write(0, 2, -1, [Part(0, 2)]), array([4, 4]), twice) for copy in copies]
    assert not any(call.answers for call in early)
    assert peer.write(1, [1], 1.0) == Written(1)
    answers = [call.answer()[0] for call in early]
    assert "id 4 is written twice" in refused(answers[0])
    assert answers == [answers[0]] * 3
    assert peer.write(2, [9], 9.0) == answers[0]
    assert peer.write(3, [1], 3.0) == Written(3)
    assert peer.read([1, 4, 9]) == {1: 3.0}


def test_what_does_not_fit_decides_nothing_and_its_number_is_still_to_be_used(peer: Peer) -> None:
    early = Peer(peer.server)
    early.open()
    later = early.begin(Write(0, 2, -1, [Part(0, 1)]), array([1]), np.full(3, 2, np.float32))
    without_ids = peer.ask(Write(0, 1, -1, [Part(0, 1)]), b"", np.ones(3, np.float32))
    assert "0 bytes of ids" in refused(without_ids, "WireError")
    assert not later.answers
    assert peer.write(1, [1], 1.0) == Written(1)
    assert later.answer()[0] == Written(2)
    assert peer.read([1]) == {1: 2.0}


def test_refusals_take_no_more_room_than_announced() -> None:
    order = Order()
    for number in range(1, 200):
        order.decided(Failed("StoreError", str(number), decided=True))
    assert len(order._refusals) == REFUSALS_KEPT
    assert order.outcome(199) == Failed("StoreError", "199", decided=True)
    assert order.last == 199


def test_a_write_whose_connection_breaks_while_it_is_applied_is_applied_once(peer: Peer, monkeypatch) -> None:
    """Whoever comes back is told of it only when it is decided, and so never numbers another write like it."""
    applying, go_on = threading.Event(), threading.Event()
    place = LocalStore.place

    def slowly(*arguments):
        applying.set()
        assert go_on.wait(30)
        return place(*arguments)

    monkeypatch.setattr(LocalStore, "place", slowly)
    begun = []
    with ThreadPoolExecutor(2) as pool:
        broken = pool.submit(peer.begin, Write(0, 1, -1, [Part(0, 1)]), array([1]), np.ones(3, np.float32))
        assert applying.wait(30)
        peer.break_off()
        back = Peer(peer.server, b"b")
        welcome = back.begin(Open(0, 1, WIDTHS, "writes"))
        begun.append(welcome)
        assert "lets writes come to their end" in welcome.words[0][0]
        assert not welcome.answers
        go_on.set()
        assert broken.result(30).answers == []
    opened = welcome.answer()[0]
    assert isinstance(opened, Opened)
    assert opened.sequence == 1
    assert back.write(1, [1], 9.0) == Written(1)
    assert back.read([1]) == {1: 1.0}


def test_of_two_stores_of_one_trainer_that_both_write_one_is_told(server: EmbeddingServer) -> None:
    """Both count on from what they found: a write of one would be taken for a copy of the other's."""
    first, second, copy = (Peer(server, name) for name in (b"1", b"2", b"3"))
    for peer, store in ((first, b"one"), (second, b"two"), (copy, b"one")):
        assert peer.ask(Open(0, 1, WIDTHS, "writes", store=store)).sequence == 0
    assert first.write(1, [1], 1.0) == Written(1)
    told = second.write(1, [1], 2.0)
    assert "another store of this trainer has written meanwhile" in refused(told)
    assert isinstance(told, Failed)
    assert (told.decided, told.begun) == (True, True)
    assert copy.write(1, [1], 1.0) == Written(1), "one store has several connections"
    assert first.read([1]) == {1: 1.0}
    third = Peer(server, b"4")
    assert third.ask(Open(0, 1, WIDTHS, "writes", store=b"three")).sequence == 1
    assert third.write(2, [1], 3.0) == Written(2), "one after the other is no matter"
    for late in (1, 2):
        assert "another store" in refused(first.write(late, [1], 9.0))
    assert third.write(2, [1], 9.0) == Written(2)
    assert first.read([1]) == {1: 3.0}


def test_a_connection_that_breaks_while_its_write_waits_for_an_earlier_one_leaves_no_trace(peer: Peer) -> None:
    gone = Peer(peer.server, b"g")
    gone.open()
    early = gone.begin(Write(0, 2, -1, [Part(0, 1)]), array([1]), np.full(3, 2, np.float32))
    gone.break_off()
    early.until(lambda: not early.thread.is_alive())
    assert peer.write(1, [1], 1.0) == Written(1)
    assert peer.read([1]) == {1: 1.0}
    assert peer.write(2, [1], 3.0) == Written(2), "by a copy that came with the next connection"
    assert peer.read([1]) == {1: 3.0}


def test_a_reader_that_takes_no_answer_holds_up_no_recovery(peer: Peer) -> None:
    """Its rows are in the answer, so nobody need wait until that is sent."""
    answering, go_on = threading.Event(), threading.Event()
    slow = Peer(peer.server, b"s")
    slow.open()
    peer.write(1, [1], 1.0)
    assert peer.read([1]) == {1: 1.0}
    reply = Call.reply

    class Slow(Call):
        def reply(self, body: Body, buffers=()) -> None:
            if isinstance(body, Rows):
                answering.set()
                assert go_on.wait(30)
            reply(self, body, buffers)

    call = Slow(slow, Message(RUN, 0, 9, Read([Part(0, 1)]), [array([1]).data.cast("B")]))
    call.thread.start()
    assert answering.wait(30)
    peer.server.recover(1)
    go_on.set()
    assert call.answer()[0] == Rows(1)


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
    assert "of an earlier version" in refused(Peer(server).ask(Open(0, 1, WIDTHS, "writes")))
