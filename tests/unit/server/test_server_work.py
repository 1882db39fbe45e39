"""What takes a server long goes on beside writes, ends when it is stopped and tells why it failed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from bagpipe.server.membership import Gate

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.point import ResumePoint
from bagpipe.errors import DeadlineError, StoreError
from bagpipe.server.rows_state import Safety
from bagpipe.server.work import Work, in_a_thread
from bagpipe.wire.messages import Read, Waiting, Written
from bagpipe.wire.recovery_messages import AskWork, Load, Mark, Save, Saved, Worked, Working
from harness.recovery_peer import FACTS, NAMES, Peer, made
from harness.server_peer import refused


def test_a_save_goes_on_beside_writes_and_is_stopped_by_a_recovery(tmp_path: Path) -> None:
    waiting = []
    server = made(background=waiting.append, safety=Safety(checkpoints=(tmp_path,)))
    peer, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    peer.write([1, 2], 1.0)
    peer.order(Mark, 1, "aa")
    pending = checkpoints.begin(1, token="aa")
    assert isinstance(peer.order(Save, 1, str(pending.directory), NAMES, None), Written)
    number, again = peer.sequence, str(tmp_path / "again" / "00000001")
    assert peer.ask(AskWork(number)) == Working(0)
    for kind, fields in ((Save, (1, again, NAMES, None)), (Load, (1, again, "", NAMES))):
        assert "saving mark 1 is under way" in refused(peer.order(kind, *fields))
    peer.write([1], 2.0)
    peer.order(Mark, 2, "bb")
    peer.write([1, 2, 3], 3.0)
    waiting.pop()()
    pending.add(peer.written_files(number))
    point = ResumePoint.of(pending.commit(FACTS))
    assert "nothing was begun with number 99" in refused(peer.ask(AskWork(99)))
    pending = checkpoints.begin(2, token="bb")
    assert isinstance(peer.order(Save, 2, str(pending.directory), NAMES, 1), Written)
    server.recover(1, point)
    waiting.pop()()
    assert list(pending.directory.iterdir()) == [], "it was never begun"
    assert server._held._versions._pins == 0
    assert Peer(server, generation=1).read(1, 2, 3) == {1: 1.0, 2: 1.0}
    other = made(safety=Safety(checkpoints=(tmp_path,)))
    other.recover(1, point)
    assert Peer(other, generation=1).read(1, 2, 3) == {1: 1.0, 2: 1.0}, "the rows of the mark"


def test_a_save_since_a_checkpoint_has_only_what_was_written_after_it(tmp_path: Path) -> None:
    server = made(safety=Safety(checkpoints=(tmp_path,)))
    peer, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    peer.write(list(range(100)), 1.0)
    peer.save(checkpoints, 1)
    peer.write([3, 100], 2.0)
    second = peer.save(checkpoints, 2)
    peer.write([4], 3.0)
    peer.order(Mark, 3, "")
    for since, expected in ((2, 1), (1, 101), (7, 101), (None, 101)):
        (tmp_path / "all" / f"since-{since}").mkdir()
        peer.order(Save, 3, str(tmp_path / "all" / f"since-{since}"), NAMES, since)
        files = peer.written_files(peer.sequence)
        assert sum(part.rows for entry in files for part in entry.rows) == expected, "all, if that is not the last one"
    assert second.open().chain == [1, 2]
    assert second.open().num_rows() == [102]
    server.recover(1, second)
    assert Peer(server, generation=1).read(2, 3, 4, 100) == {2: 1.0, 3: 2.0, 4: 1.0, 100: 2.0}


@pytest.mark.parametrize("rollback", [True, False])
@pytest.mark.parametrize("when", ["before", "in the middle", "after"])
def test_a_recovery_is_right_whenever_it_meets_what_lets_go_of_the_past(tmp_path, monkeypatch, rollback, when) -> None:
    """A complete checkpoint is announced, and layers are merged in the background while trainers write on."""
    waiting, merging, go_on = [], threading.Event(), threading.Event()
    server = made(safety=Safety(rollback=rollback, checkpoints=(tmp_path,)))
    peer, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    peer.write([1, 2, *range(100, 200)], 1.0)
    peer.save(checkpoints, 1, "aa")
    server._background = waiting.append
    peer.write([2, 3], 2.0)
    peer.order(Mark, 2, "bb")
    with checkpoints.begin(2, token="bb") as pending:
        peer.order(Save, 2, str(pending.directory), NAMES, pending.base)
        waiting.pop()()
        pending.add(peer.written_files(peer.sequence))
        point = ResumePoint.of(pending.commit(FACTS))
    peer.write([3, 4], 3.0)
    assert isinstance(peer.order(Saved, 2, str(point.checkpoint)), Written)
    assert peer.ask(AskWork(peer.sequence)) == Working(0)
    assert peer.read(1, 2, 3, 4) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 3.0}
    with ThreadPoolExecutor(2) as pool:
        letting_go, recovery = waiting.pop(), None
        if when == "in the middle":

            def pause(name: str) -> None:
                if name == "layer.merged" and not merging.is_set():
                    merging.set()
                    assert go_on.wait(30)

            monkeypatch.setattr("bagpipe.store.versioned.reach", pause)
            running = pool.submit(letting_go)
            assert merging.wait(30)
            assert peer.read(1, 2, 3, 4) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 3.0}, "nobody waits for it"
            assert isinstance(peer.write([4], 4.0), Written)
            recovery = pool.submit(server.recover, 1, point)
            go_on.set()
            running.result(30)
        elif when == "after":
            letting_go()
            assert peer.ask(AskWork(peer.sequence)) == Worked()
        server.recover(1, point) if recovery is None else recovery.result(30)
        letting_go()
    again = Peer(server, generation=1)
    assert again.read(1, 2, 3, 4) == {1: 1.0, 2: 2.0, 3: 2.0}
    assert server.checkpoints() == [point.checkpoint]
    server._background = lambda work: work()
    again.write([4], 5.0)
    checkpoints.continue_from(2)
    later = again.save(checkpoints, 3, "cc")
    assert sum(part.rows for entry in later.open().manifest.files for part in entry.rows) == 1
    server.close()


def test_a_save_succeeds_however_much_is_written_meanwhile_and_memory_stays_bounded(tmp_path: Path) -> None:
    waiting, everything = [], list(range(200))
    server = made(background=waiting.append, safety=Safety(history_bytes_max=1000, checkpoints=(tmp_path,)))
    peer, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    peer.write(everything, 1.0)
    peer.order(Mark, 1, "aa")
    pending = checkpoints.begin(1, token="aa")
    peer.order(Save, 1, str(pending.directory), NAMES, None)
    number = peer.sequence
    peer.write(everything[:20], 2.0)
    peer.order(Mark, 2, "bb")
    peer.write(everything, 3.0)
    waiting.pop()()
    pending.add(peer.written_files(number))
    points = [ResumePoint.of(pending.commit(FACTS))]
    peer.write(everything, 4.0)
    assert 2 in server._held.marks(), "which is still to be saved"
    assert server.stats().bytes_on_disk > 0, "layers beyond the limit go to files"
    pending = checkpoints.begin(2, token="bb")
    peer.order(Save, 2, str(pending.directory), NAMES, pending.base)
    waiting.pop()()
    pending.add(peer.written_files(peer.sequence))
    points.append(ResumePoint.of(pending.commit(FACTS)))
    peer.write([0], 5.0)
    assert (server._held.marks(), server.stats().bytes_on_disk) == ([], 0)
    assert peer.read(0, 1, 199) == {0: 5.0, 1: 4.0, 199: 4.0}
    for generation, (point, value) in enumerate(zip(points, (1.0, 2.0), strict=True), 1):
        server.recover(generation, point)
        assert Peer(server, generation=generation).read(0, 20, 199) == {0: value, 20: 1.0, 199: 1.0}
    server.close()


def test_a_load_that_a_recovery_stops_in_the_middle_leaves_nothing_behind(tmp_path: Path, monkeypatch) -> None:
    loading, go_on = threading.Event(), threading.Event()
    server = made(safety=Safety(rollback=False, checkpoints=(tmp_path,)))
    peer, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    peer.write([1, 2], 1.0)
    point = peer.save(checkpoints, 1)
    peer.write([2, 3], 2.0)
    versions = server._held._versions
    restore = versions.restore

    def pausing(point: ResumePoint, names: list[str], report) -> None:
        def slowly(rows: int) -> None:
            loading.set()
            assert go_on.wait(30)
            report(rows)

        restore(point, names, slowly)

    monkeypatch.setattr(versions, "restore", pausing)
    server._background = lambda work: threading.Thread(target=work).start()
    number = peer.sequence + 1
    peer.order(Load, 1, str(point.checkpoint), point.checksum, NAMES)
    assert loading.wait(30)
    assert peer.ask(Read([])) == Waiting([], []), "rows are being replaced"
    monkeypatch.setattr(versions, "restore", restore)
    with ThreadPoolExecutor(1) as pool:
        work = server._held._works[0, number]
        recovery = pool.submit(server.recover, 1, point)
        while not work._stopping.is_set():
            time.sleep(0.001)
        go_on.set()
        recovery.result(30)
    assert "was stopped" in work.failed.message
    assert Peer(server, generation=1).read(1, 2, 3) == {1: 1.0, 2: 1.0}
    server.close()


@pytest.mark.parametrize(
    "options", [{"rollback": True}, {"rollback": False}, {"history_bytes_max": 2000}], ids=["memory", "files", "little"]
)
def test_checkpoints_beside_writers_have_each_write_whole_and_all_that_was_acknowledged(tmp_path, options) -> None:
    """Trainers write all of their rows at once, one number after the other, while the first has them saved."""
    server = made(background=in_a_thread, safety=Safety(checkpoints=(tmp_path,), **options))
    trainers, checkpoints, stop = 3, Checkpoints(tmp_path / "all", keep=100), threading.Event()
    mine = [list(range(trainer * 100, trainer * 100 + 40)) for trainer in range(trainers)]
    acknowledged = [0] * trainers
    first = Peer(server, b"first", trainers=trainers)

    def write(trainer: int) -> None:
        peer = Peer(server, bytes([trainer]), trainer=trainer, trainers=trainers)
        while not stop.is_set():
            assert isinstance(peer.write(mine[trainer], acknowledged[trainer] + 1.0), Written)
            acknowledged[trainer] += 1
            assert set(peer.read(*mine[trainer]).values()) == {float(acknowledged[trainer])}

    def work_of(kind, *fields) -> int:
        assert isinstance(first.order(kind, *fields), Written)
        until = time.monotonic() + 60
        while isinstance(first.ask(AskWork(first.sequence)), Working):
            assert time.monotonic() < until
            time.sleep(0.001)
        return first.sequence

    saved = []
    with ThreadPoolExecutor(trainers) as pool:
        running = [pool.submit(write, trainer) for trainer in range(1, trainers)]
        try:
            for done in range(1, 13):
                first.write(mine[0], float(done))
                acknowledged[0] = done
                before = list(acknowledged)
                assert isinstance(first.order(Mark, done, f"{done:02x}"), Written)
                after = [number + 1 for number in acknowledged]
                with checkpoints.begin(done, token=f"{done:02x}") as pending:
                    number = work_of(Save, done, str(pending.directory), NAMES, pending.base)
                    pending.add(first.written_files(number))
                    point = ResumePoint.of(pending.commit(FACTS))
                work_of(Saved, done, str(point.checkpoint))
                saved.append((point, before, after))
        finally:
            stop.set()
        for future in running:
            future.result(60)
    assert any(len(point.open().chain) > 1 for point, _, _ in saved)
    for generation, (point, before, after) in enumerate(reversed(saved), 1):
        server.recover(generation, point)
        for trainer, rows in enumerate(mine):
            found = set(Peer(server, b"x", generation).read(*rows).values()) or {0.0}
            assert len(found) == 1, "a write is in it, or not"
            assert before[trainer] <= found.pop() <= after[trainer]
    server.close()


def test_work_that_is_stopped_in_the_middle_ends_and_says_so() -> None:
    begun, pause = threading.Event(), threading.Event()

    def do(work):
        begun.set()
        for _ in range(30_000):  # half a minute at least, in case it is never stopped
            work.report(1)
            pause.wait(0.001)
        return b"never"

    work = Work("saving", do)
    thread = threading.Thread(target=work.run)
    thread.start()
    assert begun.wait(30)
    work.stop()
    assert work.is_over
    thread.join(30)
    assert "was stopped" in work.failed.message
    assert work.result is None


def test_work_that_is_stopped_just_as_it_begins_gives_back_what_it_held() -> None:
    given_up, done = [], []
    work = Work("saving", lambda _: done.append(1) or b"", lambda: given_up.append(1))
    work._stopping.set()  # by another thread, which then finds that it has begun
    work.run()
    assert (given_up, done) == ([1], [])
    assert work.is_over
    assert "was stopped" in work.failed.message


def test_a_recovery_waits_again_for_what_did_not_stop_in_time(tmp_path: Path, monkeypatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr("bagpipe.server.work.STOP_S", 0.0)
    server = made(background=lambda work: threading.Thread(target=work).start(), safety=Safety(checkpoints=(tmp_path,)))
    peer = Peer(server)
    peer.write([1], 1.0)
    peer.order(Mark, 1, "")

    def slow(*_) -> None:
        begun.set()
        assert go_on.wait(30)

    monkeypatch.setattr(server._held._versions, "saved", slow)
    peer.order(Saved, 1, str(tmp_path / "00000001"))
    assert begun.wait(30)
    for _ in range(2):
        with pytest.raises(DeadlineError, match="letting go of what came before 1 did not stop within 0 s"):
            server.abandon(1)
    monkeypatch.setattr("bagpipe.server.work.STOP_S", 30.0)
    go_on.set()
    server.recover(1)
    server.close()


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
