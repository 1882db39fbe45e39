"""Reads on a server without a network wait for what trainers of their generation have not written yet."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.errors import StoreError
from bagpipe.store.local import LocalStore
from bagpipe.wire.messages import Failed, NotYet, Open, Opened, Part, Read, Rows, Write, Written
from harness.server_peer import (
    WIDTHS,
    Peer,
    array,
    fixture_peer,  # noqa: F401
    fixture_server,  # noqa: F401
    refused,
    two_trainers,
)


def test_a_read_is_answered_by_the_write_of_the_last_trainer() -> None:
    server, _, a, b = two_trainers()
    reading = a.begin(Read([Part(0, 1)], after=0), array([7]))
    assert reading.words[0] == ("waits for trainers 0 (at none), 1 (at none)", 0)
    assert server.stats().parked == 1
    assert a.write(1, [7], 1.0, passed=0) == Written(1)  # no write waits behind a parked read
    reading.until(lambda: reading.words[-1][0] == "waits for trainers 1 (at none)")
    assert not reading.answers
    assert b.write(1, [], 0.0, passed=0, trainer=1) == Written(1)  # an empty one counts
    body, (_, rows) = reading.answer()
    assert body == Rows(1)
    assert np.frombuffer(rows, np.float32).tolist() == [1.0] * 3
    assert server.stats().parked == 0


def test_a_read_that_need_not_wait_is_answered_without_a_word() -> None:
    _, _, a, b = two_trainers()
    a.write(1, [], 0.0, passed=3)
    b.write(1, [], 0.0, passed=4, trainer=1)
    for after in (-1, 0, 3):
        reading = a.begin(Read([], after=after))
        assert reading.answer()[0] == Rows(0)
        assert (reading.words, reading.given_back) == ([], False)


def test_a_refused_write_passes_nothing() -> None:
    server, _, a, b = two_trainers()
    a.write(1, [], 0.0, passed=3)
    reading = a.begin(Read([], after=3))
    b.write(1, [1, 1], 0.0, passed=3, trainer=1)
    assert server.reached == -1
    told = len(reading.words)
    reading.until(lambda: len(reading.words) > told)
    assert not reading.answers
    b.write(2, [1], 0.0, passed=3, trainer=1)
    assert reading.answer()[0] == Rows(0)
    assert server.stats().refused == 1


def test_a_parked_read_gives_its_bytes_back_and_is_told_again_and_again_what_it_waits_for() -> None:
    """So the read that one of those before it waits for finds room, however many wait."""
    _, _, a, b = two_trainers()
    reading = a.begin(Read([Part(0, 3)], after=0), array([1, 2, 3]))
    assert reading.given_back
    reading.until(lambda: len(reading.words) >= 3)
    for trainer, peer in enumerate((a, b)):
        peer.write(1, [2], 1.0, passed=0, trainer=trainer)
    body, (flags, _) = reading.answer()
    assert (body, flags) == (Rows(1), bytes([0, 1, 0])), "its ids were kept"


def test_reads_beyond_the_memory_for_those_that_wait_are_asked_to_come_again() -> None:
    server, _, a, b = two_trainers(waiting_bytes=40)
    waiting = [a.begin(Read([Part(0, 2)], after=0), array([1, 2])) for _ in range(2)]
    again = a.begin(Read([Part(0, 2)], after=0), array([1, 2]))
    assert again.answer() == (NotYet("waits for trainers 0 (at none), 1 (at none)", again=True), ())
    assert not again.given_back
    small = a.begin(Read([Part(0, 1)], after=0), array([1]))
    assert not small.answers, "there is room for this one"
    assert server.stats().parked == 3
    for trainer, peer in enumerate((a, b)):
        peer.write(1, [2], 1.0, passed=0, trainer=trainer)
    assert [call.answer()[0] for call in (*waiting, small)] == [Rows(1), Rows(1), Rows(0)]
    assert (server.stats().parked, server._waiting_bytes) == (0, 0)
    reading = b.begin(Read([Part(0, 5)], after=1), array([1, 2, 3, 4, 5]))
    assert not reading.answers, "all of the room is there again"
    b.break_off()
    reading.until(lambda: not reading.thread.is_alive())
    assert (server.stats().parked, server._waiting_bytes) == (0, 0), "also when a connection breaks"


def test_a_read_that_fails_when_it_goes_on_is_told_to_its_own_client(monkeypatch: pytest.MonkeyPatch) -> None:
    server, _, a, b = two_trainers()
    b.write(1, [], 0.0, passed=0, trainer=1)
    reading = b.begin(Read([Part(0, 1)], after=0), array([1]))

    def broken(*_: object) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(LocalStore, "find", broken)
    assert a.write(1, [1], 1.0, passed=0) == Written(1)
    assert reading.answer()[0] == Failed("StoreError", "the disk is gone")
    assert (server.stats().parked, server.stats().refused) == (0, 1)


def test_whoever_waits_at_the_end_is_told_so() -> None:
    server, _, a, b = two_trainers()
    reading = a.begin(Read([], after=0))
    early = b.begin(Write(1, 2, 0, []))
    server.close()
    for call in (reading, early):
        assert "closing" in refused(call.answer()[0])
    assert "closing" in refused(a.ask(Read([], after=0)))
    server.close()


# Generations


def test_a_new_generation_leaves_the_old_one_behind(peer: Peer) -> None:
    peer.write(1, [1], 1.0, passed=3)
    parked, early = peer.begin(Read([], after=9)), peer.begin(Write(0, 3, -1, []))
    late = Peer(peer.server, b"l", generation=2)
    assert "came before Open" in refused(late.ask(Read([])), "WireError")
    assert not parked.answers
    assert late.open().sequence == 1
    for call in (parked, early):
        assert "this is generation 2" in refused(call.answer()[0], "GenerationOverError")
    for body in (Open(0, 1, WIDTHS, "writes"), Read([]), Write(0, 2, -1, [])):
        assert "this is generation 2" in refused(peer.ask(body), "GenerationOverError")
    assert late.read([1]) == {1: 1.0}
    assert late.ask(Read([], after=3)) == Rows(0)
    assert late.write(2, [1], 2.0) == Written(2)
    assert late.read([1]) == {1: 2.0}


def test_a_connection_is_of_the_generation_in_which_it_was_opened(peer: Peer) -> None:
    Peer(peer.server, b"l", generation=2).open()
    peer.generation = 2
    assert "came before Open" in refused(peer.ask(Read([])), "WireError")
    assert isinstance(peer.ask(Open(0, 1, WIDTHS, "writes")), Opened)
    assert peer.ask(Read([])) == Rows(0)


def test_trainers_may_be_more_in_a_new_generation(peer: Peer) -> None:
    peer.write(1, [], 0.0, passed=3)
    new = [Peer(peer.server, bytes([k]), generation=1) for k in range(2)]
    for trainer, each in enumerate(new):
        each.open(trainer, 2)
    reading = new[0].begin(Read([], after=3))
    assert reading.words[0][0] == "waits for trainers 1 (at none)", "the other one stays as far as it was"
    new[1].write(1, [], 0.0, passed=3, trainer=1)
    assert reading.answer()[0] == Rows(0)
