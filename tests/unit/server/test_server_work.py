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
from recovery_peer import Peer, made, vanish
from server_peer import refused


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
