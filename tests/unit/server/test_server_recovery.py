"""A server that is returned to marks, without a network: what it decides once, what it refuses, who may come back."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import Facts, TableEntry
from bagpipe.errors import BagpipeError, DeadlineError, StoreError, WireError
from bagpipe.failpoints import Fault, Faults, Killed, armed
from bagpipe.server.blobs import BLOBS_MAX, Pieces
from bagpipe.server.core import EmbeddingServer
from bagpipe.server.gate import Gate
from bagpipe.server.limits import ServerLimits
from bagpipe.server.shard import Recording
from bagpipe.server.storage import in_files, remove_rows
from bagpipe.server.work import Work
from bagpipe.store.mapped import MappedStore
from bagpipe.wire.messages import Failed, Message, Open, Opened, Part, Read, Rows, Unopened, Waiting, Write, Written
from bagpipe.wire.recovery_messages import (
    AskBlob,
    AskKept,
    AskMarks,
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
    Recover,
    ReturnTo,
    Save,
    Settle,
    Worked,
    Working,
)

RUN = bytes(range(16))


class Peer:
    """A client of one table with rows of one number, which numbers what it sends by itself."""

    def __init__(self, server, name=b"a", generation=0, trainer=0, trainers=1, opens=True):
        self.server, self.name, self.generation, self.trainer = server, name, generation, trainer
        self.heard, self.request = [], 0
        if not opens:
            return
        opened = self.ask(Open(trainer, trainers, [1]))
        self.sequence = opened.sequence if isinstance(opened, Opened) else 0
        self.opened = opened

    def send(self, body, *buffers):
        self.request += 1
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        self.server.handle(self.name, Message(RUN, self.generation, self.request, body, views), self.heard.append)

    def ask(self, body, *buffers):
        self.send(body, *buffers)
        return self.heard.pop().body

    def order(self, kind, *fields):
        self.sequence += 1
        return self.ask(kind(self.trainer, self.sequence, *fields))

    def write(self, ids, value, passed=-1):
        self.sequence += 1
        rows = np.full(len(ids), value, np.float32)
        return self.ask(Write(self.trainer, self.sequence, passed, [Part(0, len(ids))]), np.array(ids, np.int64), rows)

    def read(self, *ids):
        self.send(Read([Part(0, len(ids))]), np.array(ids, np.int64))
        message = self.heard.pop()
        assert isinstance(message.body, Rows), message.body
        flags = np.frombuffer(message.buffers[0], np.bool_)
        there = np.array(ids)[flags].tolist()
        return dict(zip(there, np.frombuffer(message.buffers[1], np.float32).tolist(), strict=True))

    def keep(self, done, name, blob, *, offset=0, part=None, num_bytes=None, crc32=None):
        body = Keep(
            done, name, len(blob) if num_bytes is None else num_bytes, zlib.crc32(blob) if crc32 is None else crc32,
            offset,
        )  # fmt: skip
        return self.ask(body, blob[offset:] if part is None else part)


def made(**options):
    options.setdefault("background", lambda work: work())
    return EmbeddingServer(run=RUN, **options)


@pytest.fixture
def server():
    one = made()
    yield one
    one.close()


def refused(answer, error="StoreError"):
    assert isinstance(answer, Failed), answer
    assert answer.error == error, answer
    return answer.message


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


# Generations


def test_a_recovery_lets_nothing_of_the_past_in(server) -> None:
    old = Peer(server, trainers=2)
    old.write([1], 1.0, passed=3)
    old.order(Mark, 4)
    old.write([1], 2.0)
    old.send(Read([], after=9))
    server.recover(2, 4)
    assert old.heard.pop().body == Waiting([], []), "who waits is sent away"
    for body in (Open(0, 2, [1]), Read([]), Write(0, 4, -1, []), Mark(0, 4, 5), Keep(4, "a", 0, 0, 0), AskMarks()):
        assert "this is generation 2" in refused(old.ask(body), "WireError")
    new = Peer(server, b"b", generation=2)
    assert new.opened.sequence == 0, "writes are counted anew"
    assert new.read(1) == {1: 1.0}
    assert new.ask(Read([], after=-1)) == Rows(0)
    new.send(Read([], after=0))
    assert new.heard == [], "nobody of this generation has passed anything"
    assert new.write([], 0.0, passed=0) == Rows(0), "the read goes on, after the write was answered"
    assert new.heard.pop().body == Written(1)
    with pytest.raises(StoreError, match="generation 2 is at work on server 0"):
        server.recover(2, 4)
    with pytest.raises(WireError, match="generation 1 can't begin: this is generation 2"):
        server.recover(1, 4)
    with pytest.raises(WireError, match="generation 1 can't begin"):
        server.abandon(1)


def test_between_the_end_of_a_generation_and_its_recovery_everybody_waits(server) -> None:
    old = Peer(server)
    old.order(Mark, 1)
    server.abandon(1)
    assert "this is generation 1" in refused(old.ask(Read([])), "WireError")
    early = Peer(server, b"b", generation=1)
    assert early.opened == Waiting([], [])
    assert early.ask(Read([])) == Waiting([], [])
    assert early.ask(AskMarks()) == Marks(0, 1, [1])
    server.recover(1, 1)
    assert isinstance(Peer(server, b"b", generation=1).opened, Opened)


def test_a_recovery_that_fails_lets_nobody_in_until_one_succeeds(server) -> None:
    Peer(server).order(Mark, 1)
    with pytest.raises(StoreError, match=r"server 0 has no mark 7, but \[1\]"):
        server.recover(1, 7)
    assert "server 0 could not be recovered" in refused(Peer(server, b"b", generation=1).opened)
    server.recover(1, 1)
    assert isinstance(Peer(server, b"b", generation=1).opened, Opened)


def test_a_recovery_by_message_is_begun_once_and_its_copies_ask_how_far_it_is() -> None:
    waiting = []
    server = made(background=waiting.append)
    peer = Peer(server)
    peer.order(Mark, 1)
    peer.write([1], 1.0)
    stranger = Peer(server, b"s", generation=1, opens=False)
    assert stranger.ask(Recover(1, None)) == Working(0)
    assert "is being recovered" in refused(stranger.ask(Recover(2, None)))
    (work,) = waiting
    work()
    for _ in range(2):
        assert stranger.ask(Recover(1, None)) == Marks(0, 1, [1])
    assert waiting == [work]
    new = Peer(server, b"n", generation=1)
    assert new.read(1) == {}
    new.write([1], 2.0)
    assert new.ask(Recover(1, None)) == Marks(0, 1, [1])
    assert new.read(1) == {1: 2.0}, "a late copy does nothing"
    assert "checkpoints in '/etc'" in refused(stranger.ask(Recover(1, "/etc")))


# What takes long


def test_a_save_goes_on_beside_writes_and_is_stopped_by_a_recovery(tmp_path: Path) -> None:
    waiting = []
    server = made(background=waiting.append, recording=Recording(checkpoints=(tmp_path,)))
    peer = Peer(server)
    peer.write([1, 2], 1.0)
    peer.order(Mark, 1)
    (tmp_path / "one").mkdir()
    assert isinstance(peer.order(Save, 1, str(tmp_path / "one"), ["ad"], None, None), Written)
    number = peer.sequence
    assert peer.ask(AskWork(number)) == Working(0)
    assert "saving mark 1 is under way" in refused(peer.order(ReturnTo, 1))
    peer.write([1], 2.0)
    peer.order(Mark, 2)
    peer.order(Forget, 2)
    waiting.pop()()
    assert peer.ask(AskWork(number)) == Worked()
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["rows-0-00000.safetensors"]
    assert "nothing was begun with number 99" in refused(peer.ask(AskWork(99)))
    assert isinstance(peer.order(Save, 2, str(tmp_path / "one"), ["ad"], None, None), Written)
    server.recover(1, 2)
    waiting.pop()()
    assert len(list((tmp_path / "one").iterdir())) == 1, "it was never begun"
    assert server._shard._recorded._history._marks[0].pins == 0


def test_a_journal_that_has_grown_long_is_condensed_beside_writes_and_gives_way_to_a_save(tmp_path: Path) -> None:
    waiting = []
    keeping = Recording(tmp_path / "journal", checkpoints=(tmp_path,), journal_bytes=1)
    server = made(background=waiting.append, recording=keeping)
    peer = Peer(server)
    for done in (1, 2, 3, 4):
        peer.write([1, 2], float(done))
        peer.order(Mark, done)
    peer.order(Forget, 4)
    assert len(waiting) == 1
    peer.write([2], 5.0)
    waiting.pop()()
    assert server._shard._recorded._condensed.marks() == [4]
    peer.order(Mark, 5)
    before = server._shard._journal.num_bytes()
    peer.order(Forget, 5)
    assert server._shard._journal.num_bytes() < before
    assert waiting, "it is still longer than one byte"
    (tmp_path / "one").mkdir()
    assert isinstance(peer.order(Save, 5, str(tmp_path / "one"), ["ad"], None, None), Written)
    assert len(waiting) == 2
    waiting.pop(0)()
    assert server._shard._recorded._condensed.marks() == [4], "it was never begun"
    waiting.pop()()
    assert peer.ask(AskWork(peer.sequence)) == Worked()
    vanish(server)
    back = made(recording=keeping)
    back.recover(1, 5)
    assert Peer(back, generation=1).read(1, 2) == {1: 4.0, 2: 5.0}
    back.close()


def test_work_that_is_stopped_in_the_middle_ends_and_says_so() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def do(work):
        begun.set()
        go_on.wait(10)
        work.report(1)
        return b"never"

    work = Work("saving", do)
    thread = threading.Thread(target=work.run)
    thread.start()
    begun.wait(10)
    stopping = threading.Thread(target=work.stop)
    stopping.start()
    while not work._stopping.is_set():
        pass
    go_on.set()
    thread.join(10)
    stopping.join(10)
    assert work.is_over
    assert "was stopped" in work.failed.message
    assert work.result is None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StoreError("the disk is full"), "the disk is full"),
        (MemoryError(), "no memory"),
        (KeyError("secret"), "failed inside the server"),
    ],
)
def test_work_that_fails_tells_why_but_nothing_of_the_inside(error, told) -> None:
    def do(_):
        raise error

    work = Work("saving", do)
    work.run()
    work.run()
    assert told in work.failed.message
    assert "secret" not in work.failed.message


def test_a_closed_gate_lets_nobody_in_and_waits_for_those_inside() -> None:
    gate = Gate()
    with gate.entered() as first:
        assert first
        with pytest.raises(DeadlineError, match="1 requests are still being worked on after 0 s"):
            gate.close("a", 0)
        with gate.entered() as second:
            assert not second
    gate.close("a", 0)
    gate.close("b", 0)
    gate.open("a")
    with gate.entered() as third:
        assert not third, "it is closed for another reason too"
    gate.open("b")
    with gate.entered() as fourth:
        assert fourth


# What outlives a server


def recording(path: Path) -> Recording:
    return Recording(path / "journal", checkpoints=(path,))


def vanish(server: EmbeddingServer) -> None:
    """As the system does for a process that ends: nothing more is written, and what was locked is free."""
    server._shard._journal._claim.close()


def test_a_server_with_a_journal_comes_back_and_serves_nobody_before_it_is_told(tmp_path: Path) -> None:
    server = made(recording=recording(tmp_path))
    peer = Peer(server)
    peer.write([1, 2], 1.0)
    peer.keep(1, "trainer-0", b"state")
    peer.order(Mark, 1)
    peer.write([2, 3], 2.0)
    with pytest.raises(StoreError, match="in use"):
        made(recording=recording(tmp_path))
    vanish(server)
    back = made(recording=recording(tmp_path))
    assert (back.marks(), back.kept(1), back.usable_marks(1)) == ([1], {"trainer-0": b"state"}, [1])
    assert "has come back and waits" in refused(Peer(back).opened)
    assert back.birth != server.birth
    back.recover(1, 1)
    new = Peer(back, generation=1)
    assert new.read(1, 2, 3) == {1: 1.0, 2: 1.0}
    assert back.stats().num_rows == [2]
    back.close()


def test_a_server_tells_what_it_holds_also_while_rows_are_replaced(tmp_path: Path, monkeypatch) -> None:
    server = made(recording=recording(tmp_path))
    peer = Peer(server)
    peer.write([1, 2], 1.0)
    peer.order(Mark, 1)
    peer.write([3], 2.0)
    peer.order(Mark, 2)
    entry = TableEntry(name="ad", rows=9, dims=(1,), width=1, optimizer="sgd")
    with Checkpoints(tmp_path / "kept").begin(2) as pending:
        pending.add(server._shard._recorded.save(2, pending.directory, ["ad"]))
        pending.commit(Facts(tables=(entry,)))
    seen = []
    server._shard.load(2, tmp_path / "kept", ["ad"], lambda _: seen.append(server.stats().num_rows))
    assert seen == [[3]]
    peer.write([4], 3.0)
    peer.order(Mark, 3)
    vanish(server)
    back = made(recording=recording(tmp_path))
    assert back.marks(tmp_path / "kept") == [2, 3]
    assert back.stats().num_rows == [0], "it has come back and waits"
    monkeypatch.setattr("bagpipe.store.recorded.reach", lambda point: seen.append((point, back.stats().num_rows)))
    back.recover(1, 3)
    assert ("journal.replayed", [4]) in seen
    back.close()
    assert back.stats().num_rows == []


def test_a_server_that_died_before_its_first_mark_begins_anew(tmp_path: Path) -> None:
    server = made(recording=recording(tmp_path))
    Peer(server).write([1], 1.0)
    vanish(server)
    back = made(recording=recording(tmp_path))
    assert back.marks() == []
    back.recover(1)
    new = Peer(back, generation=1)
    assert new.read(1) == {}
    new.write([1], 3.0)
    new.order(Mark, 5)
    assert back.marks() == [5]
    back.close()


@pytest.mark.parametrize(
    "point", ["server.return.begun", "history.returned", "journal.rolled_back", "server.return.done"]
)
def test_a_server_that_dies_while_it_returns_comes_back_to_the_same_mark(tmp_path: Path, point: str) -> None:
    server = made(recording=recording(tmp_path))
    peer = Peer(server)
    peer.write([1, 2], 1.0)
    peer.order(Mark, 1)
    peer.write([2, 3], 2.0)
    with armed(Faults(Fault(point))), pytest.raises(Killed):
        server.recover(1, 1)
    vanish(server)
    back = made(recording=recording(tmp_path), generation=2)
    back.recover(2, 1)
    assert Peer(back, generation=2).read(1, 2, 3) == {1: 1.0, 2: 1.0}
    back.close()


def test_rows_in_files_of_a_server_that_died_make_room_for_those_of_the_next(tmp_path: Path) -> None:
    place = tmp_path / "rows"
    server = made(storage=in_files(place, keep=True))
    Peer(server).write([1], 1.0)
    with pytest.raises(StoreError, match="in use"):
        remove_rows(place)
    server.close()
    (place / "notes.txt").touch()
    assert len(list(place.iterdir())) > 1
    remove_rows(place)
    assert [path.name for path in place.iterdir()] == ["notes.txt"]
    (place / "notes.txt").unlink()
    again = made(storage=in_files(place, keep=True))
    assert Peer(again).read(1) == {}
    again.close()
    assert MappedStore.open(place, [type("Width", (), {"width": 1})()]).num_rows(0) == 0


def test_many_threads_write_while_recoveries_come_and_no_old_write_survives_one(server) -> None:
    """A write is acknowledged in its generation and undone with it, or refused; none is mixed into the next."""
    stop, wrong = threading.Event(), []

    def write_for_ever(name: int) -> None:
        generation = 0
        while not stop.is_set():
            peer = Peer(server, bytes([name, generation]), generation=generation, trainer=name, trainers=3)
            answer = peer.opened
            while isinstance(answer, Opened | Written):
                answer = peer.write([name], float(generation))
            if not isinstance(answer, Failed | Unopened | Waiting):
                wrong.append(answer)
            generation = server._members.generation

    threads = [threading.Thread(target=write_for_ever, args=(name,)) for name in range(3)]
    server.recover(1)
    for thread in threads:
        thread.start()
    for generation in range(2, 40):
        server.recover(generation, None)
        late = Peer(server, b"x", generation=generation, trainers=3)
        found = late.read(0, 1, 2) if isinstance(late.opened, Opened) else {}
        assert set(found.values()) <= {float(generation)}
    stop.set()
    for thread in threads:
        thread.join(30)
    assert wrong == []


def test_errors_of_bagpipe_travel_by_name_when_something_ordered_fails(server) -> None:
    peer = Peer(server)

    class Odd(BagpipeError):
        pass

    def broken(_):
        raise Odd("odd")

    server._shard.mark = broken
    assert refused(peer.order(Mark, 1), "Odd") == "odd"
