"""Marks and checkpoints of a server without a network: decided once, in order, by trainer 0, in allowed directories."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.errors import BagpipeError
from bagpipe.server.rows_state import Safety
from bagpipe.store.local import LocalStore
from bagpipe.wire.messages import NotYet, Open, Opened, Part, Read, Rows, Write, Written
from bagpipe.wire.recovery_messages import (
    AskMarks,
    Confirm,
    Confirmed,
    Load,
    Mark,
    Marks,
    Save,
    Saved,
    Worked,
)
from harness.recovery_peer import (
    NAMES,
    Peer,
    fixture_server,  # noqa: F401
    made,
)
from harness.server_peer import refused

# Decided once


def test_whatever_changes_marks_or_rows_is_done_once_however_often_it_comes(server, tmp_path: Path) -> None:
    peer, checkpoints = Peer(server), Checkpoints(tmp_path / "all")
    peer.write([1], 1.0)
    point = peer.save(checkpoints, 5)  # numbers 2, 3 and 4
    peer.write([1, 2], 2.0)
    place = str(point.checkpoint)
    assert peer.order(Load, 5, place, point.checksum, NAMES) == Worked()
    assert peer.read(1, 2) == {1: 1.0}
    peer.write([1], 4.0)
    peer.order(Mark, 10, "")
    for late, outcome in (
        (Mark(0, 2, 5, ""), Written(2)),
        (Save(0, 3, 5, str(tmp_path / "all"), NAMES, None), Worked()),
        (Saved(0, 4, 5, place), Worked()),
        (Load(0, 6, 5, place, point.checksum, NAMES), Worked()),
        (Mark(0, 6, 99, ""), Worked()),
    ):
        assert peer.ask(late) == outcome, "a copy is answered as the first one was"
    assert peer.ask(AskMarks()).marks == [5, 10]
    assert peer.read(1) == {1: 4.0}
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["00000005"]


def test_after_rows_were_replaced_reads_wait_for_what_is_trained_anew(server, tmp_path: Path) -> None:
    first, second = (Peer(server, bytes([trainer]), trainer=trainer, trainers=2) for trainer in range(2))
    point = first.save(Checkpoints(tmp_path / "all"), 1)
    for peer in (first, second):
        peer.write([peer.trainer], 1.0, passed=5)
    assert server.reached == 5
    long = second.begin(Read([], after=6))
    assert first.order(Load, 1, str(point.checkpoint), point.checksum, NAMES) == Worked()
    assert server.reached == -1
    reading = first.begin(Read([], after=3))
    assert reading.words[0][0] == "waits for trainers 0 (at none), 1 (at none)", "what was passed before is undone"
    for peer in (first, second):
        peer.write([peer.trainer], 2.0, passed=3)
    assert reading.answer()[0] == Rows(0)
    for peer in (first, second):
        assert not long.answers
        peer.write([peer.trainer], 2.0, passed=6)
    assert long.answer()[0] == Rows(0)


def test_a_mark_waits_for_writes_under_way_and_writes_that_come_meanwhile_wait_for_it(server, monkeypatch) -> None:
    """So a mark has every write whole; its own trainer's and later ones are not in it, reads go on."""
    first, second, third = (Peer(server, bytes([trainer]), trainer=trainer, trainers=3) for trainer in range(3))
    other = Peer(server, b"o", trainer=0, trainers=3)
    first.write([1], 1.0)
    writing, go_on = threading.Event(), threading.Event()
    place = LocalStore.place

    def slowly(*arguments):
        if not go_on.is_set():
            writing.set()
            assert go_on.wait(30)
        return place(*arguments)

    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr(LocalStore, "place", slowly)
        under_way = pool.submit(second.write, [2, 3], 2.0)
        assert writing.wait(30)
        mark = first.begin(Mark(0, 2, 5, ""))
        assert mark.words[0][0] == "lets writes come to their end"
        later = third.begin(Write(2, 1, -1, [Part(0, 1)]), np.array([2]), np.full(1, 9, np.float32))
        mine = other.begin(Write(0, 3, -1, [Part(0, 1)]), np.array([1]), np.full(1, 9, np.float32))
        assert other.ask(Read([])) == Rows(0)
        assert not any(call.answers for call in (mark, later, mine))
        assert server._held.marks() == []
        go_on.set()
        assert under_way.result(30) == Written(1)
    assert (mark.answer()[0], later.answer()[0], mine.answer()[0]) == (Written(2), Written(1), Written(3))
    assert first.read(1, 2, 3) == {1: 9.0, 2: 9.0, 3: 2.0}
    server._held._versions.rollback(5)
    assert first.read(1, 2, 3) == {1: 1.0, 2: 2.0, 3: 2.0}


def test_what_is_refused_has_used_up_its_number_and_changed_nothing(server, tmp_path: Path) -> None:
    peer, place = Peer(server), str(tmp_path / "all" / "00000005")
    peer.write([1], 1.0)
    peer.save(Checkpoints(tmp_path / "all"), 5)
    peer.write([1], 2.0)
    for kind, fields, error, named in (
        (Mark, (4, ""), "StoreError", "mark 4"),
        (Save, (3, place, NAMES, None), "StoreError", "no mark 3: there are [5]"),
        (Save, (5, place, ["ad", "user"], None), "StoreError", "2 names for 1 tables"),
        (Save, (5, "/nowhere", NAMES, None), "StoreError", "checkpoints in '/nowhere'"),
        (Save, (5, str(tmp_path), NAMES, None), "StoreError", "use only what is in or below"),
        (Saved, (5, "/nowhere"), "StoreError", "checkpoints in '/nowhere'"),
        (Load, (5, "relative", "", NAMES), "StoreError", "checkpoints in 'relative'"),
        (Load, (5, "/a\0b", "", NAMES), "StoreError", "checkpoints in '/a"),
        (Load, (6, place, "", NAMES), "CheckpointError", "00000006"),
        (Load, (5, place, "00ff", NAMES), "CheckpointError", "should have 00ff: it was written anew meanwhile"),
        (Load, (5, place, "", []), "StoreError", "0 names for 1 tables"),
    ):
        answer = peer.order(kind, *fields)
        assert named in refused(answer, error)
        assert answer.decided
        assert peer.ask(kind(0, peer.sequence, *fields)) == answer
    assert peer.read(1) == {1: 2.0}
    assert isinstance(peer.write([1], 3.0), Written)


def test_only_trainer_0_marks_for_all_and_nobody_speaks_for_another(server, tmp_path: Path) -> None:
    first, second = (Peer(server, bytes([trainer]), trainer=trainer, trainers=2) for trainer in range(2))
    place = str(tmp_path / "00000001")
    first.order(Mark, 1, "")
    for kind, fields in (
        (Mark, (2, "")),
        (Save, (1, place, NAMES, None)),
        (Saved, (1, place)),
        (Load, (1, place, "", NAMES)),
    ):
        assert "trainer 0 does that for all" in refused(second.order(kind, *fields))
        assert "each speaks for itself" in refused(second.ask(kind(0, 2, *fields)), "WireError")
    assert first.ask(AskMarks()).marks == [1]


def test_answers_of_recovery_are_no_requests(server) -> None:
    peer = Peer(server)
    for body in (Marks(0, 0, [], []), Confirmed(), NotYet("busy"), Worked()):
        assert "is an answer" in refused(peer.ask(body), "WireError")


def test_errors_of_bagpipe_travel_by_name_when_something_ordered_fails(server, monkeypatch) -> None:
    peer = Peer(server)

    class Odd(BagpipeError):
        pass

    def broken(*_):
        raise Odd("odd")

    monkeypatch.setattr(server._held._versions, "mark", broken)
    assert refused(peer.order(Mark, 1, ""), "Odd") == "odd"


# What is confirmed and told


def test_a_generation_is_confirmed_until_another_one_begins(server) -> None:
    peer = Peer(server)
    assert peer.ask(Confirm()) == Confirmed()
    stranger = Peer(server, b"b", opens=False)
    assert "Confirm came before Open" in refused(stranger.ask(Confirm()), "WireError")
    server.abandon(1)
    assert "this is generation 1" in refused(peer.ask(Confirm()), "GenerationOverError")
    early = Peer(server, b"c", generation=1, opens=False)
    assert "Confirm came before Open" in refused(early.ask(Confirm()), "WireError")
    opening = early.begin(Open(0, 1, [1], "writes"))
    assert "has its rows replaced" in opening.words[0][0]
    server.recover(1)
    assert isinstance(opening.answer()[0], Opened)
    assert early.ask(Confirm()) == Confirmed()
    assert "this is generation 1" in refused(peer.ask(Confirm()), "GenerationOverError")
    unheard = Peer(server, b"u", generation=2, opens=False)
    assert "Confirm came before Open" in refused(unheard.ask(Confirm()), "WireError")
    assert Peer(server, b"d", generation=1).ask(Confirm()) == Confirmed()


@pytest.mark.parametrize("rollback", [True, False])
def test_a_server_tells_the_last_complete_checkpoint_and_those_that_its_marks_may_have(tmp_path, rollback) -> None:
    """A checkpoint may be complete though whoever made it died before it could say so."""
    server = made(safety=Safety(rollback=rollback, checkpoints=(tmp_path,)))
    place = tmp_path / "all"
    peer, checkpoints = Peer(server), Checkpoints(place)
    peer.order(Mark, 1, "")
    assert server.checkpoints() == [], "nobody has said where they are"
    first = peer.save(checkpoints, 2)
    assert server.checkpoints() == [first.checkpoint]
    peer.write([1], 1.0)
    peer.order(Mark, 3, "")
    peer.order(Mark, 4, "")
    marks = [2, 3, 4] if rollback else [3, 4]
    expected = [place / f"{done:08d}" for done in (2, 3, 4)]
    assert server.checkpoints() == expected
    stranger = Peer(server, b"s", opens=False)
    assert stranger.ask(AskMarks()) == Marks(0, 0, marks, list(map(str, expected)))
    second = peer.save(checkpoints, 5)
    assert server.checkpoints() == [second.checkpoint]
    server.recover(1, first)
    assert server.checkpoints() == [first.checkpoint]
    server.recover(2)
    assert server.checkpoints() == []
