"""A server without a network is returned to a mark: who may come back, who belongs to the past, what outlives it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.manifest import Facts, FileEntry, TableEntry
from bagpipe.errors import StoreError, WireError
from bagpipe.failpoints import Fault, Faults, Killed, armed
from bagpipe.server.shard import Recording
from bagpipe.wire.messages import Failed, Open, Opened, Read, Rows, Unopened, Waiting, Write, Written
from bagpipe.wire.recovery_messages import AskMarks, AskWork, Keep, Mark, Marks, Recover, Save, Settle, Working
from harness.recovery_peer import (
    Peer,
    fixture_server,  # noqa: F401
    made,
    recording,
    vanish,
)
from harness.server_peer import refused

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


GENERATIONS, TRAINERS, LAST_WRITES = 20, 3, 25


class Writer:
    """A trainer that writes until its generation is over, and then in the next; in the last one `LAST_WRITES` times.

    Every generation has rows of its own: whoever reads those of earlier ones reads what nobody may write any more.
    """

    def __init__(self, server, trainer: int, stop: threading.Event) -> None:
        self.server, self.trainer, self.stop = server, trainer, stop
        self.wrote = [threading.Event() for _ in range(GENERATIONS)]
        """By generation: set at the first write that was acknowledged."""

    def run(self) -> None:
        generation, peer, acknowledged = 0, self.join(0), 0
        while not (self.stop.is_set() or (generation == GENERATIONS - 1 and acknowledged == LAST_WRITES)):
            answer = peer.opened
            if isinstance(answer, Opened):
                answer = peer.write([row_of(generation, self.trainer)], acknowledged + 1.0)
            if isinstance(answer, Written):
                acknowledged += 1
                self.wrote[generation].set()
                continue
            if isinstance(answer, Failed):
                assert f"generation {generation}: this is generation" in refused(answer, "WireError")
                generation, acknowledged = generation + 1, 0
            else:
                assert isinstance(answer, Unopened | Waiting), answer
                self.stop.wait(0.001)  # a recovery is under way
            peer = self.join(generation)

    def join(self, generation: int) -> Peer:
        return Peer(self.server, bytes([self.trainer, generation]), generation, self.trainer, TRAINERS)


def row_of(generation: int, trainer: int) -> int:
    return generation * TRAINERS + trainer


@pytest.mark.parametrize("mark", [None, 1], ids=["to nothing", "to a mark"])
def test_writes_and_recoveries_at_once_mix_no_generations_and_lose_nothing(server, mark) -> None:
    """A write is acknowledged in its generation and undone with it, or refused; none gets into the next."""
    before = {}
    if mark is not None:
        before = dict.fromkeys(range(GENERATIONS * TRAINERS), -1.0)
        first = Peer(server, b"first", trainers=TRAINERS)
        first.write(list(before), -1.0)
        first.order(Mark, mark)
    stop = threading.Event()
    writers = [Writer(server, trainer, stop) for trainer in range(TRAINERS)]
    with ThreadPoolExecutor(TRAINERS) as pool:
        try:
            running = [pool.submit(writer.run) for writer in writers]
            for generation in range(1, GENERATIONS):
                busy = writers[generation % TRAINERS]
                assert busy.wrote[generation - 1].wait(60), f"nobody could write in generation {generation - 1}"
                server.recover(generation, mark)
                past = range(row_of(generation, 0))
                found = Peer(server, b"x", generation, trainers=TRAINERS).read(*past)
                assert found == {row: before[row] for row in past if row in before}
            for future in running:
                future.result(60)
        finally:
            stop.set()
    last = {row_of(GENERATIONS - 1, trainer): float(LAST_WRITES) for trainer in range(TRAINERS)}
    found = Peer(server, b"y", GENERATIONS - 1, trainers=TRAINERS).read(*range(GENERATIONS * TRAINERS))
    assert found == before | last, "nothing that came late, and all that was acknowledged"


# What outlives a server


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


def test_a_server_comes_back_to_marks_after_a_checkpoint_in_a_directory_of_the_script(tmp_path: Path) -> None:
    places = Recording(tmp_path / "journal", checkpoints=(tmp_path / "run", tmp_path / "script"))
    server = made(recording=places)
    peer = Peer(server)
    peer.write([1, 2], 1.0)
    peer.order(Mark, 10)
    entry = TableEntry(name="ad", rows=9, dims=(1,), width=1, optimizer="sgd")
    with Checkpoints(tmp_path / "script" / "kept").begin(10) as pending:
        peer.order(Save, 10, str(pending.directory), ["ad"], None, None)
        saved = peer.ask_for_buffers(AskWork(peer.sequence))[0]
        pending.add(msgspec.json.decode(saved, type=list[FileEntry]))
        pending.commit(Facts(tables=(entry,)))
    peer.order(Settle, 10)
    peer.write([2], 2.0)
    peer.order(Mark, 20)
    vanish(server)
    back = made(recording=places)
    assert back.marks() == [10, 20]
    back.recover(1, 20)
    assert Peer(back, generation=1).read(1, 2) == {1: 1.0, 2: 2.0}
    back.close()


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
