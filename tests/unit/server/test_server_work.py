"""What takes a server long goes on beside writes, ends when it is stopped and tells why it failed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.point import ResumePoint
from bagpipe.errors import DeadlineError, StoreError
from bagpipe.server.rows_state import Safety
from bagpipe.server.work import Work, in_a_thread
from bagpipe.store.local import LocalStore
from bagpipe.wire.messages import Failed, Open, Opened, Part, Write, Written
from bagpipe.wire.recovery_messages import Load, Mark, Save, Saved, Worked
from harness.calls import Call
from harness.recovery_peer import FACTS, NAMES, Peer, files_of, made
from harness.server_peer import refused


def test_a_save_goes_on_beside_writes_and_is_stopped_by_a_recovery(tmp_path: Path) -> None:
    waiting = []
    server = made(background=waiting.append, safety=Safety(checkpoints=(tmp_path,)))
    peer, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    peer.write([1, 2], 1.0)
    peer.order(Mark, 1, "aa")
    pending = checkpoints.begin(1, token="aa")
    saving, again = peer.begin_order(Save, 1, str(pending.directory), NAMES, None), str(tmp_path / "again" / "00000001")
    assert saving.words[0] == ("works on saving mark 1", 0)
    for kind, fields in ((Save, (1, again, NAMES, None)), (Load, (1, again, "", NAMES))):
        assert "saving mark 1 is under way" in refused(peer.order(kind, *fields))
    peer.write([1], 2.0)
    peer.order(Mark, 2, "bb")
    peer.write([1, 2, 3], 3.0)
    assert not saving.answers, "what waits for it held up none of them"
    waiting.pop()()
    pending.add(files_of(saving))
    point = ResumePoint.of(pending.commit(FACTS))
    pending = checkpoints.begin(2, token="bb")
    saving = peer.begin_order(Save, 2, str(pending.directory), NAMES, 1)
    server.recover(1, point)
    assert "this is generation 1" in refused(saving.answer()[0], "GenerationOverError")
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
        files = files_of(peer.begin_order(Save, 3, str(tmp_path / "all" / f"since-{since}"), NAMES, since))
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
        saving = peer.begin_order(Save, 2, str(pending.directory), NAMES, pending.base)
        waiting.pop()()
        pending.add(files_of(saving))
        point = ResumePoint.of(pending.commit(FACTS))
    peer.write([3, 4], 3.0)
    telling = peer.begin_order(Saved, 2, str(point.checkpoint))
    assert telling.words[0] == ("works on letting go of what came before 2", 0)
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
            assert telling.answer()[0] == Worked()
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
    saving = peer.begin_order(Save, 1, str(pending.directory), NAMES, None)
    peer.write(everything[:20], 2.0)
    peer.order(Mark, 2, "bb")
    peer.write(everything, 3.0)
    waiting.pop()()
    pending.add(files_of(saving))
    points = [ResumePoint.of(pending.commit(FACTS))]
    peer.write(everything, 4.0)
    assert 2 in server._held.marks(), "which is still to be saved"
    assert server.stats().bytes_on_disk > 0, "layers beyond the limit go to files"
    pending = checkpoints.begin(2, token="bb")
    saving = peer.begin_order(Save, 2, str(pending.directory), NAMES, pending.base)
    waiting.pop()()
    pending.add(files_of(saving))
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
    asked = peer.begin_order(Load, 1, str(point.checkpoint), point.checksum, NAMES)
    assert loading.wait(30)
    reading = Peer(server, b"r", opens=False).begin(Open(0, 1, [1], "reads"))
    assert reading.words[0][0] == "has its rows replaced: they become those of a checkpoint"
    later = peer.begin(Write(0, number + 1, -1, [Part(0, 0)]), b"", b"")
    assert not any(call.answers for call in (asked, reading, later))
    monkeypatch.setattr(versions, "restore", restore)
    with ThreadPoolExecutor(1) as pool:
        work = server._held._works[0, number]
        recovery = pool.submit(server.recover, 1, point)
        while not work._stopping.is_set():
            time.sleep(0.001)
        go_on.set()
        recovery.result(30)
    assert "was stopped" in work.failed.message
    for call in (asked, reading, later):
        assert "this is generation 1" in refused(call.answer()[0], "GenerationOverError")
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
                    pending.add(files_of(first.begin_order(Save, done, str(pending.directory), NAMES, pending.base)))
                    point = ResumePoint.of(pending.commit(FACTS))
                assert first.order(Saved, done, str(point.checkpoint)) == Worked()
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
    telling = peer.begin_order(Saved, 1, str(tmp_path / "00000001"))
    assert begun.wait(30)
    for _ in range(2):
        with pytest.raises(DeadlineError, match="letting go of what came before 1 did not stop within 0 s"):
            server.abandon(1)
    monkeypatch.setattr("bagpipe.server.work.STOP_S", 30.0)
    go_on.set()
    server.recover(1)
    assert "this is generation 1" in refused(telling.answer()[0], "GenerationOverError")
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


# Those that wait for it


def test_copies_of_a_save_after_a_broken_connection_get_its_outcome(tmp_path: Path) -> None:
    """It is begun once; whoever asks, when and on whichever connection, is told what came of it."""
    waiting = []
    server = made(background=waiting.append, safety=Safety(checkpoints=(tmp_path,)))
    peer, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    peer.write([1, 2], 1.0)
    peer.order(Mark, 1, "aa")
    pending = checkpoints.begin(1, token="aa")
    save = Save(0, 3, 1, str(pending.directory), NAMES, None)
    broken = peer.begin(save)
    peer.break_off()
    broken.until(lambda: not broken.thread.is_alive())
    assert broken.answers == []

    def ask_again(name: bytes) -> Call:
        again = Peer(server, name)
        assert again.opened.sequence == 3
        return again.begin(save)

    early = [ask_again(b"b"), ask_again(b"c")]
    assert [call.words[0][0] for call in early] == ["works on saving mark 1"] * 2
    (work,) = waiting
    work()
    late = ask_again(b"d")
    assert late.words == []
    found = [files_of(call) for call in (*early, late)]
    assert [[part.rows for entry in each for part in entry.rows] for each in found] == [[2]] * 3
    assert found[0] == found[1] == found[2]
    assert waiting == [work]
    server.close()


def test_copies_of_a_save_that_has_failed_get_its_failure_and_the_next_one_succeeds(tmp_path: Path) -> None:
    server = made(safety=Safety(checkpoints=(tmp_path,)))
    peer = Peer(server)
    peer.write([1], 1.0)
    peer.order(Mark, 1, "aa")
    failed = peer.order(Save, 1, str(tmp_path / "nowhere" / "00000001"), NAMES, None)
    assert "can't write" in refused(failed, "CheckpointError")
    assert Peer(server, b"b").ask(Save(0, 3, 1, str(tmp_path / "nowhere" / "00000001"), NAMES, None)) == failed
    peer.save(Checkpoints(tmp_path / "all"), 2)
    server.close()


def test_how_far_work_is_is_told_to_whoever_waits_for_it(tmp_path: Path, monkeypatch) -> None:
    told, begun = threading.Semaphore(0), threading.Event()
    server = made(background=in_a_thread, safety=Safety(checkpoints=(tmp_path,)))
    peer = Peer(server)
    peer.order(Mark, 1, "aa")

    def slowly(*_) -> None:
        (work,) = server._held._works.values()
        begun.set()
        for progress in (100, 200):
            work.report(progress)
            assert told.acquire(timeout=30)

    monkeypatch.setattr(server._held._versions, "saved", slowly)
    telling = peer.begin_order(Saved, 1, str(tmp_path / "00000001"))
    assert begun.wait(30)
    for progress in (100, 200):
        telling.until(lambda progress=progress: telling.words[-1][1] == progress)
        told.release()
    assert telling.answer()[0] == Worked()
    server.close()


def test_an_end_of_the_server_ends_what_takes_long_and_tells_whoever_waits(tmp_path: Path) -> None:
    waiting = []
    server = made(background=waiting.append, safety=Safety(checkpoints=(tmp_path,)))
    peer = Peer(server)
    peer.order(Mark, 1, "aa")
    saving = peer.begin_order(Save, 1, str(Checkpoints(tmp_path / "all").begin(1, token="aa").directory), NAMES, None)
    server.close()
    assert "closing" in refused(saving.answer()[0])
    waiting.pop()()
    assert list(tmp_path.glob("all/*/rows-*")) == []


def test_rows_are_replaced_when_nobody_uses_them_any_more_and_not_at_all_if_somebody_goes_on(tmp_path, monkeypatch):
    """Whoever comes meanwhile waits; a request that does not end is named, and then all go on as before."""
    server = made(background=in_a_thread, safety=Safety(checkpoints=(tmp_path,)))
    peer, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    peer.write([1], 1.0)
    point = peer.save(checkpoints, 1)
    peer.write([1], 2.0)
    reading, go_on = threading.Event(), threading.Event()
    find = LocalStore.find

    def slowly(*arguments):
        reading.set()
        assert go_on.wait(30)
        return find(*arguments)

    reader = Peer(server, b"r")
    with ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr("bagpipe.server.server.CLEAR_S", 0.05)
            patch.setattr(LocalStore, "find", slowly)
            slow = pool.submit(reader.read, 1)
            assert reading.wait(30)
            failed = peer.order(Load, 1, str(point.checkpoint), point.checksum, NAMES)
            assert "1 requests are still being worked on after 0.05 s" in refused(failed, "DeadlineError")
        assert peer.read(1) == {1: 2.0}, "nothing was replaced"
        loading = peer.begin_order(Load, 1, str(point.checkpoint), point.checksum, NAMES)
        waiting = Peer(server, b"w", opens=False).begin(Open(0, 1, [1], "reads"))
        assert not loading.answers
        assert waiting.words[0][0] == "has its rows replaced: they become those of a checkpoint"
        go_on.set()
        assert slow.result(30) == {1: 2.0}
    assert loading.answer()[0] == Worked()
    assert isinstance(waiting.answer()[0], Opened)
    assert peer.read(1) == {1: 1.0}
    server.close()


def test_a_load_and_a_client_that_comes_back_while_its_write_waits_do_not_wait_for_each_other(tmp_path) -> None:
    """The welcome waits for that write, and the write until rows are replaced, which waits for whoever uses them."""
    waiting = []
    server = made(background=waiting.append, safety=Safety(checkpoints=(tmp_path,)))
    server._background = lambda work: work()
    peer, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    peer.write([1], 1.0)
    point = peer.save(checkpoints, 1)
    server._background = waiting.append
    loading = peer.begin_order(Load, 1, str(point.checkpoint), point.checksum, NAMES)
    with server._alone("a test goes on"):
        peer.sequence += 1
        writing = peer.begin(Write(0, peer.sequence, -1, [Part(0, 0)]), b"", b"")
        assert "has its rows replaced" in writing.words[0][0]
        back = Peer(server, b"b", opens=False).begin(Open(0, 1, [1], "writes"))
        assert back.words[0][0] == "lets writes come to their end"
        assert server._inside == 0
        waiting.pop()()
        assert loading.answer()[0] == Worked()
    assert writing.answer()[0] == Written(peer.sequence)
    assert back.answer()[0].sequence == peer.sequence
    server.close()


def test_two_trainers_that_both_ask_for_marks_do_not_wait_for_each_other(tmp_path: Path) -> None:
    server = made()
    first, second = (Peer(server, bytes([trainer]), trainer=trainer, trainers=2) for trainer in range(2))

    def order(peer: Peer) -> list:
        return [peer.order(Mark, done, "") for done in range(1, 50)]

    with ThreadPoolExecutor(2) as pool:
        mine, others = (each.result(60) for each in [pool.submit(order, peer) for peer in (first, second)])
    assert mine == [Written(number) for number in range(1, 50)]
    assert all(isinstance(answer, Failed) and "trainer 0 does that for all" in answer.message for answer in others)
    server.close()
