"""Marks of a server without a network are decided once, and what is kept with them comes in pieces and is bounded."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bagpipe.errors import BagpipeError, StoreError
from bagpipe.server.blobs import BLOBS_MAX, Pieces
from bagpipe.server.limits import ServerLimits
from bagpipe.server.shard import Recording
from bagpipe.wire.messages import Read, Rows, Waiting, Written
from bagpipe.wire.recovery_messages import (
    AskBlob,
    AskKept,
    AskWork,
    Blob,
    Forget,
    Keep,
    Keeping,
    Kept,
    KeptBlob,
    Load,
    Mark,
    Marks,
    ReturnTo,
    Save,
    Settle,
    Worked,
    Working,
)
from harness.recovery_peer import (
    Peer,
    fixture_server,  # noqa: F401
    made,
    recording,
    vanish,
)
from harness.server_peer import refused

# Decided once


def test_a_mark_a_return_and_a_forgetting_are_done_once_however_often_they_come(server) -> None:
    peer = Peer(server)
    peer.write([1], 1.0)
    assert peer.order(Mark, 5) == Written(2)
    peer.write([1], 2.0)
    assert peer.order(Mark, 10) == Written(4)
    peer.write([1, 2], 3.0)
    assert peer.order(ReturnTo, 5) == Written(6)
    assert peer.ask(AskWork(6)) == Worked()
    assert peer.read(1, 2) == {1: 1.0}
    peer.write([1], 4.0)
    for late in (Mark(0, 2, 5), Mark(0, 4, 10), ReturnTo(0, 6, 5), Forget(0, 4, 99)):
        assert peer.ask(late) == Written(late.sequence), "a copy is answered as the first one was"
    assert server.marks() == [5]
    assert peer.read(1) == {1: 4.0}
    assert peer.order(Forget, 6) == Written(8)
    assert server.marks() == []
    assert peer.order(Settle, 5) == Written(9)


def test_after_a_return_reads_wait_for_what_is_trained_anew(server) -> None:
    first, second = (Peer(server, bytes([trainer]), trainer=trainer, trainers=2) for trainer in range(2))
    first.order(Mark, 1)
    for peer in (first, second):
        peer.write([peer.trainer], 1.0, passed=5)
    assert server.reached == 5
    second.send(Read([], after=6))
    first.order(ReturnTo, 1)
    assert second.heard.pop().body == Waiting([], [])
    first.send(Read([], after=3))
    assert first.heard == [], "what was passed before is undone"
    for peer in (first, second):
        peer.write([peer.trainer], 2.0, passed=3)
    assert Rows(0) in [message.body for message in first.heard]


def test_what_is_refused_has_used_up_its_number(server) -> None:
    peer = Peer(server)
    peer.order(Mark, 5)
    for kind, fields, named in (
        (Mark, (4,), "mark 4"),
        (ReturnTo, (3,), r"no mark 3: there are [5]"),
        (Save, (3, "/nowhere", ["ad"], None, None), "checkpoints in '/nowhere'"),
        (Load, (5, "relative", ["ad"]), "checkpoints in 'relative'"),
        (Load, (5, "/a\0b", ["ad"]), "checkpoints in '/a"),
    ):
        answer = peer.order(kind, *fields)
        assert named in refused(answer)
        assert answer.decided
        assert peer.ask(kind(0, peer.sequence, *fields)) == answer
    assert isinstance(peer.write([1], 1.0), Written)


def test_only_trainer_0_marks_for_all_and_nobody_speaks_for_another(server) -> None:
    first, second = (Peer(server, bytes([trainer]), trainer=trainer, trainers=2) for trainer in range(2))
    assert "trainer 0 does that for all" in refused(second.order(Mark, 1))
    assert "each speaks for itself" in refused(second.ask(Mark(0, 1, 1)), "WireError")
    assert second.keep(1, "trainer-1", b"mine") == Keeping(4)
    first.order(Mark, 1)
    assert server.usable_marks(2) == []
    first.keep(1, "trainer-0", b"too")
    assert server.usable_marks(2) == [1]
    assert server.usable_marks(3) == []


def test_answers_of_recovery_are_no_requests(server) -> None:
    peer = Peer(server)
    for body in (Marks(0, 0, []), Keeping(0), Kept([]), Blob(), Working(0), Worked()):
        assert "is an answer" in refused(peer.ask(body), "WireError")


def test_errors_of_bagpipe_travel_by_name_when_something_ordered_fails(server) -> None:
    peer = Peer(server)

    class Odd(BagpipeError):
        pass

    def broken(_):
        raise Odd("odd")

    server._shard.mark = broken
    assert refused(peer.order(Mark, 1), "Odd") == "odd"


# What is kept


def test_pieces_may_come_twice_and_late(server) -> None:
    peer, blob = Peer(server), bytes(range(100))
    assert peer.keep(1, "trainer-0", blob, offset=50, part=blob[50:]) == Keeping(0), "from the beginning, please"
    assert peer.keep(1, "trainer-0", blob, part=blob[:50]) == Keeping(50)
    assert peer.keep(1, "trainer-0", blob, part=blob[:50]) == Keeping(50)
    assert peer.keep(1, "trainer-0", blob, offset=80, part=blob[80:]) == Keeping(50)
    assert peer.keep(1, "trainer-0", blob, offset=50, part=blob[50:]) == Keeping(100)
    assert peer.keep(1, "trainer-0", blob, offset=50, part=blob[50:]) == Keeping(100), "its last piece, asked again"
    peer.order(Mark, 1)
    assert peer.ask(AskKept(1)) == Kept([KeptBlob("trainer-0", 100, zlib.crc32(blob))])
    peer.send(AskBlob(1, "trainer-0", 90, 1000))
    assert bytes(peer.heard.pop().buffers[0]) == blob[90:]
    peer.keep(1, "trainer-0", b"other")
    assert server.kept(1) == {"trainer-0": b"other"}
    assert peer.ask(AskKept(2)) == Kept([])
    assert "nothing is kept as trainer-9" in refused(peer.ask(AskBlob(1, "trainer-9", 0, 1)))


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"num_bytes": 1 << 40}, "StoreError", "a server keeps 1,000 of one"),
        ({"offset": 1, "part": b"12345678"}, "WireError", "ends at byte 9: the whole has 8"),
        ({"part": b""}, "WireError", "without bytes"),
        ({"crc32": 7}, "WireError", "another checksum"),
    ],
)
def test_pieces_that_can_not_be_are_refused(options, error, named) -> None:
    server = made(limits=ServerLimits(blob_bytes_max=1000, kept_bytes_max=10**13))
    peer = Peer(server)
    assert named in refused(peer.keep(1, "trainer-0", b"12345678", **options), error)
    assert peer.keep(1, "trainer-0", b"12345678") == Keeping(8)
    assert "needs 1" in refused(peer.ask(Keep(1, "a", 0, 0, 0)), "WireError")


def test_what_is_kept_is_bounded_over_all_marks() -> None:
    server = made(limits=ServerLimits(kept_bytes_max=100))
    peer = Peer(server)
    peer.keep(1, "trainer-0", bytes(60))
    assert "60 are kept already and 100 are allowed" in refused(peer.keep(1, "trainer-1", bytes(60)))
    peer.order(Mark, 1)
    peer.order(Mark, 2)
    peer.order(Forget, 2)
    assert peer.keep(2, "trainer-1", bytes(60)) == Keeping(60)


def test_blobs_that_are_never_finished_are_given_up_one_by_one() -> None:
    pieces, kept = Pieces(100, 10_000), []
    for number in range(BLOBS_MAX + 1):
        assert pieces.take(Keep(1, f"blob-{number}", 10, 0, 0), memoryview(b"12345"), kept.append) == 5
    assert pieces.take(Keep(1, "blob-0", 10, 0, 5), memoryview(b"67890"), kept.append) == 0
    with pytest.raises(StoreError, match="are under way, and 9 are allowed"):
        Pieces(100, 9).take(Keep(1, "a", 20, 0, 0), memoryview(bytes(10)), kept.append)
    assert kept == []


def test_what_could_not_be_kept_is_taken_anew() -> None:
    pieces, kept, crc32 = Pieces(100, 10_000), [], zlib.crc32(b"12345")

    def full(_):
        raise StoreError("the disk is full")

    for _ in range(2):
        with pytest.raises(StoreError, match="full"):
            pieces.take(Keep(1, "a", 5, crc32, 0), memoryview(b"12345"), full)
    assert pieces.take(Keep(1, "a", 5, crc32, 0), memoryview(b"12345"), kept.append) == 5
    assert kept == [b"12345"]


def test_what_is_kept_on_the_disk_counts_also_when_the_server_has_come_back(tmp_path: Path) -> None:
    server = made(recording=recording(tmp_path))
    peer = Peer(server)
    peer.order(Mark, 1)
    peer.keep(1, "trainer-0", bytes(1000))
    peer.keep(2, "trainer-0", bytes(500))
    held = server._shard.kept_bytes
    assert 1500 <= held < 2000
    peer.write([1], 1.0)
    peer.order(Mark, 3)
    assert server._shard.kept_bytes < held - 500, "what was kept for a mark that was never made is gone"
    vanish(server)
    back = made(recording=recording(tmp_path), limits=ServerLimits(kept_bytes_max=1500))
    assert back._shard.kept_bytes >= 1000
    back.recover(1, 1)
    assert "are kept already and 1,500 are allowed" in refused(Peer(back, generation=1).keep(1, "b", bytes(600)))
    back.close()


@pytest.mark.parametrize("journal", [True, False])
def test_threads_keep_state_and_ask_how_much_there_is_at_once(journal: bool, tmp_path: Path) -> None:
    server = made(recording=Recording(tmp_path / "journal" if journal else None))
    Peer(server).order(Mark, 1)

    def keep(number: int) -> None:
        for turn in range(20):
            server._shard.keep(1, f"{number}-{turn}", b"x")
            assert server._shard.kept_bytes > 0

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(keep, range(4)))
    assert len(server.kept(1)) == 80
    server.close()
