"""Rows on servers come back from checkpoints, and servers begin a new generation by message."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.errors import CheckpointError, DeadlineError, StoreError, WireError
from bagpipe.server.client import marks_of_servers, recover_servers
from bagpipe.wire.client import Patience
from bagpipe.wire.messages import NotYet
from bagpipe.wire.recovery_messages import Recover
from harness.calls import CUT
from harness.marked import (
    NAMES,
    RUN,
    fixture_worlds,  # noqa: F401
    full,
    read,
    rows,
    some_rows,
)
from harness.remote_world import FAST, TROUBLE

# Checkpoints


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("network", [{}, TROUBLE], ids=["calm", "trouble"])
def test_a_checkpoint_of_two_servers_is_read_by_any_number(worlds, servers, network) -> None:
    world = worlds(2, seed=3, **network)
    store, rng = world.store(), np.random.default_rng(0)
    store.write(0, np.arange(5_000, 7_000), full(3, 2_000))  # so that what changes is less than all
    for done in range(1, 4):
        for _ in range(5):
            store.write_many(some_rows(rng))
        point = world.save(store, done)
        expected = world.rows()
    assert len(point.open().chain) > 1
    store.write_many(some_rows(rng))
    other = worlds(servers, seed=4, safety={"checkpoints": (world.directory,)}, **network)
    restored = other.store()
    restored.write(0, rows(10**6), full(1, 1))
    restored.restore(point, NAMES)
    assert other.rows() == expected
    restored.write(0, rows(10**6), full(1, 1))
    restored.restore(point, NAMES)
    assert other.rows() == expected
    other.recover(point)
    assert other.rows() == expected


@pytest.mark.parametrize("told", [True, False])
def test_a_server_in_the_place_of_a_dead_one_reads_what_the_other_has_in_memory(worlds, told) -> None:
    world = worlds(2)
    store, rng = world.store(), np.random.default_rng(0)
    for done in range(1, 4):
        store.write_many(some_rows(rng))
        point = world.save(store, done, tell=told)
    expected = world.rows()
    store.write_many(some_rows(rng))
    store.mark(4, "ff")
    world.kill(1)
    world.start(1)
    assert world.servers[1].checkpoints() == []
    assert max(world.points(), key=lambda each: each.done) == point, "the other one knows where they are"
    next(point.checkpoint.glob("rows-0-*")).unlink()  # which nobody needs
    world.recover(point)
    assert world.rows() == expected
    world.recover()
    assert world.rows() == [{}, {}]
    again = world.store(generation=world.generation)
    assert read(again, rows(5)).tolist() == [[5, 5, 5]]
    with pytest.raises(CheckpointError, match="rows-0-"):
        world.recover(point)
    with pytest.raises(StoreError, match="server 0 could not be recovered"):
        world.store(generation=world.generation)


# Recovery by message


@pytest.mark.parametrize("network", [{}, TROUBLE], ids=["calm", "trouble"])
def test_servers_are_recovered_by_message_and_who_belongs_to_the_past_is_told_at_once(worlds, network) -> None:
    world = worlds(2, seed=5, **network)
    old = world.store(patience=Patience(retry_s=0.5, deadline_s=3600.0))
    old.write(0, rows(1, 2, 3), full(1, 3))
    point = world.save(old, 1)
    old.write(0, rows(1, 2, 3), full(2, 3))
    options = {"run": RUN, "generation": 3}
    told = marks_of_servers(world.network, world.addresses, **options)
    assert [(each.server, each.marks, each.checkpoints) for each in told] == [
        (0, [1], [str(point.checkpoint)]),
        (1, [1], [str(point.checkpoint)]),
    ]
    recover_servers(world.network, world.addresses, point=point, **options)
    before = world.network.now()
    for call in (lambda: read(old, rows(1)), lambda: old.write(0, rows(1), full(9, 1)), lambda: old.mark(2)):
        with pytest.raises((WireError, StoreError), match=r"this is generation 3|halfway"):
            call()
    assert world.network.now() - before < 60, "patience is for those who may come back"
    new = world.store(generation=3)
    assert read(new, rows(1, 2, 3))[:, 0].tolist() == [1, 1, 1]
    new.write(0, rows(1), full(5, 1))
    recover_servers(world.network, world.addresses, point=point, **options)
    assert read(new, rows(1))[0, 0] == 5, "a copy of the message that began a generation does nothing"
    with pytest.raises(StoreError, match="generation 3 is at work on server 0"):
        recover_servers(world.network, world.addresses, point=START, **options)
    with pytest.raises(WireError, match="a message of generation 2"):
        recover_servers(world.network, world.addresses, run=RUN, generation=2, point=point)
    elsewhere = ResumePoint(1, world.path.parent / "00000001", point.checksum)
    with pytest.raises(StoreError, match="was told at its start"):
        recover_servers(world.network, world.addresses, run=RUN, generation=4, point=elsewhere)
    assert read(new, rows(1))[0, 0] == 5


def test_a_recovery_without_progress_has_an_end(worlds) -> None:
    world = worlds(2)

    def busy(handle, peer, message):
        if isinstance(message.body, Recover):
            world.servers[1]._background = lambda _: None
        return handle(peer, message)

    world.replace(1, busy)
    with pytest.raises(
        DeadlineError, match=r"waited 3\d s for its rows .* server 1 at server-1, which works on its recovery"
    ):
        recover_servers(world.network, world.addresses, run=RUN, generation=1, point=START, patience=FAST)


def test_a_recovery_whose_answers_are_cut_is_begun_once_and_told_in_the_end(worlds) -> None:
    world = worlds(2)
    store = world.store()
    store.write(0, rows(1, 2), full(1, 2))
    point, cuts = world.save(store, 1), []

    def cut(message, *answer):
        if not isinstance(message.body, Recover) or len(cuts) == 5:
            return answer
        cuts.append(message.request)
        return CUT

    world.overhear(0, cut)
    recover_servers(world.network, world.addresses, run=RUN, generation=1, point=point, patience=FAST)
    new = world.store(generation=1)
    new.write(0, rows(1), full(5, 1))
    assert read(new, rows(1, 2))[:, 0].tolist() == [5, 1]
    assert len(cuts) == 5


def test_a_read_that_waits_when_a_generation_ends_is_told_so(worlds) -> None:
    world = worlds(1)
    old = world.store(trainer=0, trainers=2)

    def recover_meanwhile(_, body, buffers):
        if isinstance(body, NotYet):
            world.recover()
        return body, buffers

    world.overhear(0, recover_meanwhile)
    with pytest.raises(WireError, match="this is generation 1"):
        read(old, rows(1), after=7)
    assert world.servers[0].stats().parked == 0


def test_who_comes_before_a_recovery_is_over_waits_and_not_for_ever(worlds) -> None:
    world = worlds(1)
    world.servers[0].abandon(1)
    with pytest.raises(DeadlineError, match=r"waited 3\d s for a first sign of life .* which has its rows replaced"):
        world.store(generation=1, patience=FAST)
    world.servers[0].recover(1)
    world.store(generation=1)


def test_trainers_that_count_on_read_what_was_written_before_them(worlds) -> None:
    world = worlds(1)
    store = world.store()
    store.write_many([(0, rows(1), full(1, 1))], passed=9)
    world.recover(world.save(store, 10))
    first, second = (
        world.store(generation=1, trainer=trainer, trainers=2, passed=9, patience=FAST) for trainer in range(2)
    )
    assert read(first, rows(1), after=9)[0, 0] == 1
    first.write_many([], passed=10)
    with pytest.raises(DeadlineError, match=r"waits for trainers 1 \(at 9\)"):
        read(first, rows(1), after=10)
    second.write_many([], passed=10)
    assert read(first, rows(1), after=10)[0, 0] == 1
