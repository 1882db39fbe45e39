"""What takes a server long goes on beside writes, ends when it is stopped and tells why it failed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from bagpipe.errors import DeadlineError, StoreError
from bagpipe.server.gate import Gate
from bagpipe.server.shard import Recording
from bagpipe.server.work import Work
from bagpipe.wire.messages import Written
from bagpipe.wire.recovery_messages import AskWork, Forget, Mark, ReturnTo, Save, Worked, Working
from harness.recovery_peer import Peer, made, vanish
from harness.server_peer import refused


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


def test_a_save_succeeds_however_much_is_written_meanwhile_and_memory_stays_bounded(tmp_path: Path) -> None:
    waiting, everything = [], list(range(200))
    keeping = Recording(tmp_path / "journal", 1000, checkpoints=(tmp_path,), journal_bytes=1)
    server = made(background=waiting.append, recording=keeping)
    peer = Peer(server)
    peer.write(everything, 1.0)
    peer.order(Mark, 1)
    (tmp_path / "one").mkdir()
    peer.order(Save, 1, str(tmp_path / "one"), ["ad"], None, None)
    number = peer.sequence
    peer.write(everything[:20], 2.0)
    peer.order(Mark, 2)
    peer.write(everything, 3.0)
    assert server._shard._recorded.history_bytes <= 1000
    waiting.pop()()
    assert peer.ask(AskWork(number)) == Worked()
    assert server.marks() == [1, 2]
    assert isinstance(peer.order(Forget, 2), Written), "there is no way to condense a mark that was given up"
    assert waiting == []
    server.recover(1, 2)
    assert Peer(server, generation=1).read(0, 20) == {0: 2.0, 20: 1.0}
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


def test_a_recovery_waits_again_for_what_did_not_stop_in_time(monkeypatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr("bagpipe.server.work.STOP_S", 0.0)
    server = made(background=lambda work: threading.Thread(target=work).start())
    peer = Peer(server)
    peer.write([1], 1.0)
    peer.order(Mark, 1)

    def slow(*_) -> None:
        begun.set()
        assert go_on.wait(30)

    monkeypatch.setattr(server._shard, "return_to", slow)
    peer.order(ReturnTo, 1)
    assert begun.wait(30)
    for _ in range(2):
        with pytest.raises(DeadlineError, match="the return to mark 1 did not stop within 0 s"):
            server.abandon(1)
    monkeypatch.setattr("bagpipe.server.work.STOP_S", 30.0)
    go_on.set()
    server.recover(1, 1)
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
