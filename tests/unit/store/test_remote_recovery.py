"""Rows on servers come back from checkpoints and journals, and servers begin a new generation by message."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.errors import DeadlineError, StoreError, WireError
from bagpipe.store.links import Patience
from bagpipe.store.recovering import marks_of_servers, recover_servers
from harness.marked import (
    FACTS,
    NAMES,
    RUN,
    fixture_worlds,  # noqa: F401
    full,
    read,
    rows,
    some_rows,
)
from harness.remote_world import FAST, TROUBLE

# Checkpoints and journals


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("network", [{}, TROUBLE], ids=["calm", "trouble"])
def test_a_checkpoint_of_two_servers_is_loaded_by_any_number(worlds, servers, network) -> None:
    world = worlds(2, seed=3, **network)
    store, rng = world.store(), np.random.default_rng(0)
    for done in range(1, 4):
        for _ in range(5):
            store.write_many(some_rows(rng))
        store.keep(done, "trainer-0", b"state %d" % done)
        store.mark(done)
        world.save(store, done)
        expected = world.rows()
    store.write_many(some_rows(rng))
    other = worlds(servers, seed=4, journal=False, **network)
    other.path = world.path
    for number in range(servers):
        other.kill(number)
        other.start(number)
    loaded = other.store()
    loaded.write(0, rows(10**6), full(1, 1))
    loaded.load(3, world.directory, NAMES)
    assert other.rows() == expected
    assert loaded.marks() == [3]
    loaded.write(0, rows(10**6), full(1, 1))
    loaded.return_to(3)
    assert other.rows() == expected
    assert Checkpoints(world.directory).open(3).blob("trainer-0") == b"state 3"


def test_a_server_comes_back_from_the_checkpoint_and_its_journal(worlds) -> None:
    world = worlds(2)
    store, rng = world.store(), np.random.default_rng(0)
    for done in range(1, 6):
        store.write_many(some_rows(rng))
        store.mark(done)
        if done == 3:
            world.save(store, done)
    expected = world.rows()
    store.write_many(some_rows(rng))
    journal = world.path / "journal" / "server-1"
    assert not (journal / "start.writes").exists(), "what a checkpoint holds is not kept twice"
    world.kill(1)
    world.start(1, generation=1)
    assert world.servers[1].marks() == [3, 4, 5]
    world.generation = 1
    world.recover(5)
    assert world.rows() == expected
    assert [server.marks()[-1] for server in world.servers] == [5, 5]


@pytest.mark.parametrize("lost", [None, 0])
def test_a_checkpoint_gives_what_was_not_kept_with_its_mark_in_time(worlds, lost) -> None:
    world = worlds(2)
    store = world.store()
    store.write_many(some_rows(np.random.default_rng(0)))
    store.keep(1, "trainer-1", b"one")
    store.mark(1)
    with Checkpoints(world.directory).begin(1) as pending:
        pending.add(store.save(1, pending.directory, NAMES))
        for name in ("trainer-0", "trainer-1"):
            pending.write_blob(name, name.encode())
        pending.commit(FACTS)
    expected = world.rows()
    assert world.servers[0].usable_marks(2) == []
    if lost is not None:
        world.kill(lost)
        world.start(lost)
    world.recover(1, world.directory)
    assert world.rows() == expected
    assert world.servers[0].kept(1) == {"trainer-0": b"trainer-0", "trainer-1": b"trainer-1"}
    assert world.servers[1].kept(1) == {}


def test_where_nothing_is_left_of_a_server_all_return_to_the_checkpoint_or_the_beginning(worlds) -> None:
    world = worlds(2, journal=False)
    store, rng = world.store(), np.random.default_rng(0)
    store.write_many(some_rows(rng))
    store.keep(1, "trainer-0", b"one")
    store.mark(1)
    world.save(store, 1)
    expected = world.rows()
    store.write_many(some_rows(rng))
    store.mark(2)
    world.kill(0)
    world.start(0)
    assert [server.marks() for server in world.servers] == [[], [1, 2]]
    with pytest.raises(StoreError, match=r"server 0 has no mark 2, but \[\]"):
        world.recover(2)
    with pytest.raises(StoreError, match="server 0 could not be recovered"):
        world.store(generation=world.generation)
    world.recover(1, world.directory)
    assert world.rows() == expected
    assert world.servers[0].kept(1) == {"trainer-0": b"one"}
    assert [server.usable_marks(1) for server in world.servers] == [[1], []]
    world.store(generation=world.generation).write_many(some_rows(rng))
    world.recover(None)
    assert world.rows() == [{}, {}]
    again = world.store(generation=world.generation)
    assert again.marks() == []
    assert read(again, rows(5)).tolist() == [[5, 5, 5]]


# Recovery by message


@pytest.mark.parametrize("network", [{}, TROUBLE], ids=["calm", "trouble"])
def test_servers_are_recovered_by_message_and_who_belongs_to_the_past_is_told_at_once(worlds, network) -> None:
    world = worlds(2, seed=5, **network)
    old = world.store(patience=Patience(retry_s=0.5, deadline_s=3600.0))
    old.write(0, rows(1, 2, 3), full(1, 3))
    old.mark(1)
    old.write(0, rows(1, 2, 3), full(2, 3))
    options = {"run": RUN, "generation": 3}
    assert marks_of_servers(world.network, world.addresses, **options) == [[1], [1]]
    recover_servers(world.network, world.addresses, done=1, checkpoints=world.directory, **options)
    before = world.network.now()
    for call in (lambda: read(old, rows(1)), lambda: old.write(0, rows(1), full(9, 1)), lambda: old.mark(2)):
        with pytest.raises((WireError, StoreError), match=r"this is generation 3|halfway"):
            call()
    assert world.network.now() - before < 60, "patience is for those who may come back"
    new = world.store(generation=3)
    assert read(new, rows(1, 2, 3))[:, 0].tolist() == [1, 1, 1]
    new.write(0, rows(1), full(5, 1))
    recover_servers(world.network, world.addresses, done=1, checkpoints=world.directory, **options)
    assert read(new, rows(1))[0, 0] == 5, "a copy of the message that began a generation does nothing"
    with pytest.raises(StoreError, match="generation 3 is at work on server 0"):
        recover_servers(world.network, world.addresses, done=None, **options)
    with pytest.raises(WireError, match="a message of generation 2"):
        recover_servers(world.network, world.addresses, run=RUN, generation=2, done=1)
    with pytest.raises(StoreError, match="was told at its start"):
        recover_servers(world.network, world.addresses, run=RUN, generation=4, done=1, checkpoints=world.path.parent)
    assert read(new, rows(1))[0, 0] == 5


def test_a_read_that_waits_when_a_generation_ends_is_told_so(worlds) -> None:
    world = worlds(1)
    old = world.store(trainer=0, trainers=2)
    handle = world.servers[0].handle

    def recover_meanwhile(peer, message, reply):
        handle(peer, message, reply)
        if world.servers[0].stats().parked:
            world.recover(None)

    world.listeners[0].close()
    world.listeners[0] = world.network.listen("server-0", recover_meanwhile)
    with pytest.raises(WireError, match="this is generation 1"):
        read(old, rows(1), after=7)
    assert world.servers[0].stats().parked == 0


def test_who_comes_before_a_recovery_is_over_waits_and_not_for_ever(worlds) -> None:
    world = worlds(1)
    world.servers[0].abandon(1)
    with pytest.raises(DeadlineError, match=r"was not ready for \d+ s, since its rows are being replaced"):
        world.store(generation=1, patience=FAST)
    world.servers[0].recover(1)
    world.store(generation=1)


def test_trainers_that_count_on_read_what_was_written_before_them(worlds) -> None:
    world = worlds(1)
    store = world.store()
    store.write_many([(0, rows(1), full(1, 1))], passed=9)
    store.mark(10)
    world.recover(10)
    first, second = (
        world.store(generation=1, trainer=trainer, trainers=2, passed=9, patience=FAST) for trainer in range(2)
    )
    assert read(first, rows(1), after=9)[0, 0] == 1
    first.write_many([], passed=10)
    world.servers[0]._members.watermark._parked_max = 0  # so that it comes again by itself
    with pytest.raises(DeadlineError, match=r"for trainers 1 \(at 9\)"):
        read(first, rows(1), after=10)
    second.write_many([], passed=10)
    assert read(first, rows(1), after=10)[0, 0] == 1
