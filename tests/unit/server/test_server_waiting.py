"""Reads on a server without a network wait for what trainers of their generation have not written yet."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.errors import StoreError
from bagpipe.store.local import LocalStore
from bagpipe.wire.messages import Failed, Open, Part, Read, Rows, Unopened, Waiting, Write, Written
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
    number = a.send(Read([Part(0, 1)], after=0), array([7]))
    assert a.heard == {}
    assert server.stats().parked == 1
    assert a.write(1, [7], 1.0, passed=0) == Written(1)  # no write waits behind a parked read
    assert a.heard == {}
    assert b.write(1, [], 0.0, passed=0, trainer=1) == Written(1)  # an empty one counts
    body, (_, rows) = a.heard[number]
    assert body == Rows(1)
    assert np.frombuffer(rows, np.float32).tolist() == [1.0] * 3
    assert server.stats().parked == 0


def test_a_refused_write_passes_nothing() -> None:
    server, _, a, b = two_trainers()
    a.write(1, [], 0.0, passed=3)
    a.send(Read([], after=3))
    b.write(1, [1, 1], 0.0, passed=3, trainer=1)
    assert a.heard == {}
    b.write(2, [1], 0.0, passed=3, trainer=1)
    assert list(a.heard) == [a.number]
    assert server.stats().refused == 1


def test_a_read_that_has_waited_long_is_asked_to_come_again() -> None:
    server, clock, a, b = two_trainers(park_s=2.0)
    b.write(1, [], 0.0, passed=4, trainer=1)
    number = a.send(Read([], after=4))
    clock.now += 1.9
    server.tick()
    assert a.heard == {}
    clock.now += 0.1
    server.tick()
    assert a.heard == {number: (Waiting([0], [-1]), ())}
    a.write(1, [], 0.0, passed=4)
    assert len(a.heard) == 1  # the read is forgotten
    assert a.ask(Read([], after=4)) == Rows(0)


def test_too_many_waiting_reads_are_asked_to_come_again_at_once() -> None:
    server, _, a, _ = two_trainers(parked_max=3)
    for _ in range(3):
        a.send(Read([], after=0))
    assert a.ask(Read([], after=0)) == Waiting([0, 1], [-1, -1])
    assert server.stats().parked == 3


def test_a_read_that_fails_when_it_goes_on_is_told_to_its_own_client(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, a, b = two_trainers()
    b.write(1, [], 0.0, passed=0, trainer=1)
    number = b.send(Read([Part(0, 1)], after=0), array([1]))

    def broken(*_: object) -> None:
        raise StoreError("the disk is gone")

    monkeypatch.setattr(LocalStore, "find", broken)
    assert a.write(1, [1], 1.0, passed=0) == Written(1)
    assert b.heard[number][0] == Failed("StoreError", "the disk is gone")


def test_whoever_waits_at_the_end_is_sent_away() -> None:
    server, _, a, _ = two_trainers()
    number = a.send(Read([], after=0))
    server.close()
    assert a.heard[number][0] == Waiting([], [])
    assert "closing" in refused(a.ask(Read([], after=0)))


# Generations


def test_a_new_generation_leaves_the_old_one_behind(peer: Peer) -> None:
    peer.write(1, [1], 1.0, passed=3)
    parked = peer.send(Read([], after=9))
    late = Peer(peer.server, b"l", generation=2)
    assert late.ask(Read([])) == Unopened()
    assert late.open().sequence == 1
    assert peer.heard[parked][0] == Waiting([], [])
    for body in (Open(0, 1, WIDTHS), Read([]), Write(0, 2, -1, [])):
        assert "this is generation 2" in refused(peer.ask(body), "GenerationOverError")
    assert late.read([1]) == {1: 1.0}
    assert late.ask(Read([], after=3)) == Rows(0)
    assert late.write(2, [1], 2.0) == Written(2)


def test_trainers_may_be_more_in_a_new_generation(peer: Peer) -> None:
    peer.write(1, [], 0.0, passed=3)
    new = [Peer(peer.server, bytes([k]), generation=1) for k in range(2)]
    for trainer, each in enumerate(new):
        each.open(trainer, 2)
    new[0].send(Read([], after=3))
    assert new[0].heard == {}
    new[1].write(1, [], 0.0, passed=3, trainer=1)
    assert list(new[0].heard) == [new[0].number]
