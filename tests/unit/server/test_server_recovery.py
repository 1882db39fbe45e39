"""A server without a network begins a new generation from a checkpoint: who may come back, who belongs to the past, and
when rows come from memory or from files."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.errors import CheckpointError, StoreError, WireError
from bagpipe.failpoints import Fault, Faults, Killed, armed
from bagpipe.server.rows_state import Safety
from bagpipe.wire.messages import Failed, Open, Opened, Read, Rows, Scan, Write, Written
from bagpipe.wire.recovery_messages import (
    AskMarks,
    Confirm,
    Load,
    Mark,
    Marks,
    Recover,
    Save,
    Saved,
)
from harness.recovery_peer import (
    FACTS,
    NAMES,
    Peer,
    files_of,
    fixture_server,  # noqa: F401
    made,
    remove_rows_of,
)
from harness.server_peer import refused

# Generations


def test_a_recovery_lets_nothing_of_the_past_in(server, tmp_path: Path) -> None:
    old = Peer(server, trainers=2)
    old.write([1], 1.0, passed=3)
    point = old.save(Checkpoints(tmp_path / "all"), 4)
    old.write([1], 2.0)
    other = Peer(server, b"o", trainers=2)
    waiting = [old.begin(Read([], after=9)), other.begin(Write(0, old.sequence + 2, -1, []))]
    waiting.append(other.begin(Mark(0, old.sequence + 3, 5, "")))
    server.recover(2, point)
    for call in waiting:
        assert "this is generation 2" in refused(call.answer()[0], "GenerationOverError"), "who waits is told"
    place, number = str(point.checkpoint), old.sequence + 1
    for body in (
        *(Open(0, 2, [1], "writes"), Read([]), Write(0, number, -1, []), Scan(0, 0, 1), AskMarks(), Confirm()),
        *(Mark(0, number, 5, ""), Save(0, number, 4, place, NAMES, None), Saved(0, number, 4, place)),
        *(Load(0, number, 4, place, point.checksum, NAMES), Recover(0, None, "")),
    ):
        assert "this is generation 2" in refused(old.ask(body), "GenerationOverError")
    new = Peer(server, b"b", generation=2)
    assert new.opened.sequence == 0, "writes are counted anew"
    assert new.read(1) == {1: 1.0}
    assert new.ask(Read([], after=-1)) == Rows(0)
    reading = new.begin(Read([], after=0))
    assert reading.words[0][0] == "waits for trainers 0 (at none)", "nobody of this generation has passed anything"
    assert new.write([], 0.0, passed=0) == Written(1)
    assert reading.answer()[0] == Rows(0)
    with pytest.raises(StoreError, match="generation 2 is at work on server 0"):
        server.recover(2, point)
    with pytest.raises(WireError, match="generation 1 can't begin: this is generation 2"):
        server.recover(1, point)
    with pytest.raises(WireError, match="generation 1 can't begin"):
        server.abandon(1)


def test_between_the_end_of_a_generation_and_its_recovery_everybody_waits(server, tmp_path: Path) -> None:
    old = Peer(server)
    point = old.save(Checkpoints(tmp_path / "all"), 1)
    server.abandon(1)
    assert "this is generation 1" in refused(old.ask(Read([])), "GenerationOverError")
    early = Peer(server, b"b", generation=1, opens=False)
    opening = early.begin(Open(0, 1, [1], "writes"))
    assert opening.words[0][0] == "has its rows replaced: they go back to a checkpoint"
    assert "came before Open" in refused(early.ask(Read([])), "WireError")
    assert early.ask(AskMarks()) == Marks(0, 1, [1], [str(point.checkpoint)])
    assert not opening.answers
    server.recover(1, point)
    assert isinstance(opening.answer()[0], Opened)
    assert early.ask(Read([])) == Rows(0)
    with pytest.raises(StoreError, match="generation 1 is at work on server 0"):
        server.abandon(1)


@pytest.mark.parametrize("kind", [Mark, Save, Saved, Load])
def test_what_was_ordered_when_a_generation_ended_does_nothing_in_the_next(tmp_path: Path, monkeypatch, kind) -> None:
    """It had found all writers at rest; then rows were replaced."""
    server = made(safety=Safety(checkpoints=(tmp_path,)))
    old, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    old.write([1], 1.0)
    point = old.save(checkpoints, 1, "aa")
    old.write([1], 2.0)
    old.order(Mark, 2, "bb")
    place = str(checkpoints.begin(2, token="bb").directory)
    fields = {
        Mark: (3, "cc"),
        Save: (2, place, NAMES, None),
        Saved: (2, place),
        Load: (1, str(point.checkpoint), point.checksum, NAMES),
    }[kind]
    using_rows, at_rest, go_on = server._using_rows, threading.Event(), threading.Event()

    def late(peer, generation, **options):
        if peer.message.body == ordered and not at_rest.is_set():
            at_rest.set()
            assert go_on.wait(30)
        return using_rows(peer, generation, **options)

    ordered = kind(0, old.sequence + 1, *fields)
    monkeypatch.setattr(server, "_using_rows", late)
    with ThreadPoolExecutor(1) as pool:
        ordering = pool.submit(old.ask, ordered)
        assert at_rest.wait(30)
        server.recover(1, point)
        new = Peer(server, b"n", generation=1, opens=False)
        opening = new.begin(Open(0, 1, [1], "writes"))
        go_on.set()
        assert "this is generation 1" in refused(ordering.result(30), "GenerationOverError")
    assert isinstance(opening.answer()[0], Opened)
    new.sequence = 0
    new.write([1], 5.0)
    assert (new.read(1), server._held.marks(), server._held._works) == ({1: 5.0}, [1], {})
    server.close()


def test_an_iteration_of_the_past_is_not_passed_in_the_next_generation(tmp_path: Path, monkeypatch) -> None:
    """A recovery begins while a write is applied: what that passes is forgotten, however late it is noted."""
    server = made()
    old, writing, go_on = Peer(server), threading.Event(), threading.Event()
    advance = server._advance

    def late(trainer: int, iteration: int) -> None:
        if iteration == 7:
            writing.set()
            assert go_on.wait(30)
        advance(trainer, iteration)

    monkeypatch.setattr(server, "_advance", late)
    with ThreadPoolExecutor(2) as pool:
        write = pool.submit(old.write, [1], 1.0, passed=7)
        assert writing.wait(30)
        recovery = pool.submit(server.recover, 1)
        while server.generation == 0:
            time.sleep(0.001)
        with pytest.raises(TimeoutError):
            recovery.result(0.1)
        go_on.set()
        recovery.result(30)
        assert isinstance(write.result(30), Written | Failed)
    assert server.reached == -1
    reading = Peer(server, b"n", generation=1).begin(Read([], after=7))
    assert reading.words[0][0] == "waits for trainers 0 (at none)"
    server.close()
    assert "closing" in refused(reading.answer()[0])


def test_a_recovery_by_message_is_begun_once_and_its_copies_wait_for_the_same_end(tmp_path: Path) -> None:
    server = made(safety=Safety(checkpoints=(tmp_path,)))
    peer, waiting = Peer(server), []
    point = peer.save(Checkpoints(tmp_path / "all"), 1)
    server._background = waiting.append
    peer.write([1], 1.0)
    stranger = Peer(server, b"s", generation=1, opens=False)
    asked = Recover(1, str(point.checkpoint), point.checksum)
    asking = [stranger.begin(asked), Peer(server, b"t", generation=1, opens=False).begin(asked)]
    assert [call.words[0] for call in asking] == [("works on its recovery", 0)] * 2
    assert "is being recovered" in refused(stranger.ask(Recover(0, None, "")))
    broken = Peer(server, b"u", generation=1, opens=False)
    lost = broken.begin(asked)
    broken.break_off()
    lost.until(lambda: not lost.thread.is_alive())
    (work,) = waiting
    work()
    told = Marks(0, 1, [1], [str(point.checkpoint)])
    assert [call.answer()[0] for call in asking] == [told] * 2
    assert stranger.ask(asked) == told
    assert waiting == [work]
    new = Peer(server, b"n", generation=1)
    assert new.read(1) == {}
    new.write([1], 2.0)
    assert new.ask(asked) == told
    assert new.read(1) == {1: 2.0}, "a late copy does nothing"
    for place in ("/etc", str(tmp_path), str(tmp_path / "all" / ".." / ".."), "00000001"):
        assert f"checkpoints in '{place}'" in refused(stranger.ask(Recover(1, place, "")))


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
                assert f"generation {generation}: this is generation" in refused(answer, "GenerationOverError")
                generation, acknowledged = generation + 1, 0
            else:
                pytest.fail(str(answer))
            peer = self.join(generation)

    def join(self, generation: int) -> Peer:
        return Peer(self.server, bytes([self.trainer, generation]), generation, self.trainer, TRAINERS)


def row_of(generation: int, trainer: int) -> int:
    return generation * TRAINERS + trainer


POINTS = ["to nothing", "in memory", "from files"]


@pytest.mark.parametrize("way", POINTS)
def test_writes_and_recoveries_at_once_mix_no_generations_and_lose_nothing(tmp_path: Path, way: str) -> None:
    """A write is acknowledged in its generation and undone with it, or refused; none gets into the next."""
    server = made(safety=Safety(rollback=way == "in memory", checkpoints=(tmp_path,)))
    before, point = {}, START
    if way != "to nothing":
        before = dict.fromkeys(range(GENERATIONS * TRAINERS), -1.0)
        first = Peer(server, b"first", trainers=TRAINERS)
        first.write(list(before), -1.0)
        point = first.save(Checkpoints(tmp_path / "all"), 1, "aa")
        if way == "in memory":
            remove_rows_of(point)
    stop = threading.Event()
    writers = [Writer(server, trainer, stop) for trainer in range(TRAINERS)]
    with ThreadPoolExecutor(TRAINERS) as pool:
        try:
            running = [pool.submit(writer.run) for writer in writers]
            for generation in range(1, GENERATIONS):
                busy = writers[generation % TRAINERS]
                assert busy.wrote[generation - 1].wait(60), f"nobody could write in generation {generation - 1}"
                server.recover(generation, point)
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
    server.close()


# Where rows come from


def test_rows_come_from_memory_if_the_mark_is_that_of_the_checkpoint_and_else_from_its_files(tmp_path: Path) -> None:
    """Two attempts make a checkpoint of the same number, which differ: the token tells whose rows a mark has."""
    lost, here = (made(safety=Safety(checkpoints=(tmp_path,))) for _ in range(2))
    points = []
    for server, value, token in ((lost, 1.0, "aa"), (here, 2.0, "bb")):
        peer = Peer(server)
        peer.write([1], value)
        peer.order(Mark, 3, "cc")
        points.append(peer.save(Checkpoints(tmp_path / token), 5, token))
        peer.write([1, 2], 9.0)
    remove_rows_of(points[1])
    here.recover(1, points[1])
    assert Peer(here, generation=1).read(1, 2) == {1: 2.0}, "no file is needed"
    here.recover(2, points[0])
    assert Peer(here, generation=2).read(1, 2) == {1: 1.0}, "the rows of the checkpoint, not those of its own mark"
    remove_rows_of(points[0])
    here.recover(3, points[0])
    assert Peer(here, generation=3).read(1, 2) == {1: 1.0}, "what was read is a mark of its own"
    with pytest.raises(CheckpointError, match="rows-0-00000"):
        here.recover(4, points[1])


@pytest.mark.parametrize("why", ["no way back", "too little memory", "an older mark", "no token"])
def test_where_memory_does_not_lead_back_rows_are_read_from_files(tmp_path: Path, why: str, caplog) -> None:
    options = {"no way back": {"rollback": False}, "too little memory": {"history_bytes_max": 200}}.get(why, {})
    server = made(safety=Safety(checkpoints=(tmp_path,), **options))
    peer, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    peer.write([1, 2], 1.0)
    point = peer.save(checkpoints, 1, "" if why == "no token" else "aa")
    peer.write(list(range(2, 200)), 2.0)
    if why == "an older mark":
        peer.save(checkpoints, 2, "bb")
    assert ("the way back in memory is given up" in caplog.text) == (why == "too little memory")
    server.recover(1, point)
    again = Peer(server, generation=1)
    assert again.read(1, 2, 3) == {1: 1.0, 2: 1.0}
    again.write([2], 3.0)
    checkpoints.continue_from(1)
    later = again.save(checkpoints, 2, "cc")
    assert [part.rows for entry in later.open().manifest.files for part in entry.rows] == [1], "what it has is known"
    remove_rows_of(point)
    with pytest.raises(CheckpointError):
        server.recover(2, point)
    server.close()


def test_a_server_in_the_place_of_a_dead_one_reads_its_share_of_the_checkpoint(tmp_path: Path) -> None:
    ids = list(range(100))
    whole = made(safety=Safety(checkpoints=(tmp_path,)))
    peer = Peer(whole)
    peer.write(ids, 1.0)
    point = peer.save(Checkpoints(tmp_path / "all"), 1)
    found = {}
    for number in range(3):
        share = made(server=number, servers=3, generation=4, safety=Safety(checkpoints=(tmp_path,)))
        assert share.birth != whole.birth
        assert "this is generation 4" in refused(Peer(share).opened, "GenerationOverError"), (
            "who knew the dead one is refused"
        )
        share.recover(4, point)
        part = Peer(share, generation=4).read(*ids)
        assert share.stats().num_rows == [len(part)]
        assert 10 < len(part) < 60
        assert not part.keys() & found.keys()
        found |= part
        share.close()
    assert found == dict.fromkeys(ids, 1.0)


# What goes wrong


@pytest.mark.parametrize("damage", ["missing", "another by now", "cut off", "a bit", "no manifest"])
def test_a_recovery_that_fails_lets_nobody_in_until_one_succeeds(server, tmp_path: Path, damage: str) -> None:
    peer, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    peer.write([1], 1.0)
    good = peer.save(checkpoints, 1)
    peer.write([1, 2], 2.0)
    bad = peer.save(checkpoints, 2)
    (rows,) = bad.checkpoint.glob("rows-*")
    data = rows.read_bytes()
    if damage == "missing":
        bad = ResumePoint(3, tmp_path / "all" / "00000003", "00")
    elif damage == "another by now":
        bad = ResumePoint(2, bad.checkpoint, good.checksum)
    elif damage == "no manifest":
        (bad.checkpoint / "manifest.json").unlink()
    else:
        rows.write_bytes(data[:-1] if damage == "cut off" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError):
        server.recover(1, bad)
    for _ in range(2):
        new = Peer(server, b"b", generation=1)
        assert "server 0 could not be recovered" in refused(new.opened)
        assert "came before Open" in refused(new.ask(Read([])), "WireError")
        stranger = Peer(server, b"s", generation=1, opens=False)
        told = stranger.ask(Recover(bad.done, str(bad.checkpoint), bad.checksum))
        assert refused(told, "CheckpointError"), "by message it is told the same"
    server.recover(1, good)
    assert Peer(server, b"b", generation=1).read(1, 2) == {1: 1.0}


@pytest.mark.parametrize(
    ("way", "cut"),
    [
        ("in memory", "layer.dropped"),
        ("in memory", "layer.merged"),
        ("in memory", "server.loaded"),
        ("from files", "server.loaded"),
    ],
)
def test_a_recovery_that_is_cut_off_anywhere_is_done_again(tmp_path: Path, way: str, cut: str) -> None:
    """The checkpoint is complete, and whoever made it died before it could say so."""
    server = made(safety=Safety(rollback=way == "in memory", checkpoints=(tmp_path,)))
    peer, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    peer.write([1, 2], 1.0)
    peer.save(checkpoints, 1, "aa")
    peer.write([2, 3], 2.0)
    with checkpoints.begin(2, token="bb") as pending:
        peer.order(Mark, 2, "bb")
        pending.add(files_of(peer.begin_order(Save, 2, str(pending.directory), NAMES, pending.base)))
        point = ResumePoint.of(pending.commit(FACTS))
    peer.write([3, 4], 3.0)
    if way == "from files":
        server.recover(1)
    with armed(Faults(Fault(cut))), pytest.raises(Killed):
        server.recover(2, point)
    assert "could not be recovered" in refused(Peer(server, generation=2).opened)
    server.recover(2, point)
    assert Peer(server, generation=2).read(1, 2, 3, 4) == {1: 1.0, 2: 2.0, 3: 2.0}
    server.close()


def test_a_server_tells_what_it_holds_at_any_time(tmp_path: Path, monkeypatch) -> None:
    server, seen = made(safety=Safety(rollback=False, checkpoints=(tmp_path,))), []
    assert server.stats().num_rows == []
    peer = Peer(server)
    peer.write([1, 2, 3], 1.0)
    point = peer.save(Checkpoints(tmp_path / "all"), 1)
    peer.write([4], 2.0)
    restore = server._held._versions.restore

    def watched(point: ResumePoint, names: list[str], report) -> None:
        restore(point, names, lambda rows: (report(rows), seen.append(server.stats().num_rows)))

    monkeypatch.setattr(server._held._versions, "restore", watched)
    peer.order(Load, 1, str(point.checkpoint), point.checksum, NAMES)
    server.recover(1, point)
    assert seen == [[3], [3]], "rows are being replaced"
    assert server.stats().num_rows == [3]
    server.close()
    assert server.stats().num_rows == []
