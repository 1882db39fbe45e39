"""A store over servers: training over any network is exact, writes are applied once, reads wait for other trainers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from bagpipe.store.links import Patience
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from bagpipe.errors import BagpipeError, DeadlineError, StoreError
from bagpipe.server.limits import ServerLimits
from bagpipe.store import MemoryStore
from bagpipe.wire.messages import Message, Read
from harness.examples import examples
from harness.explorer import Seeded
from harness.remote_world import (
    TABLES,
    TROUBLE,
    Rows,
    World,
    fixture_worlds,  # noqa: F401
    ids,
    read,
    values,
)
from harness.wire import until
from harness.world import OPTIMIZERS, assert_identical, make_batches, train_prepared, train_reference

# Exactness


BATCHES = make_batches(10, last=3)


@cache
def expected():
    return train_reference(BATCHES, OPTIMIZERS["adagrad"](), "wide_deep")[0]


@examples(40, tuple(HealthCheck))
@given(
    num_servers=st.integers(1, 3),
    shared_memory=st.booleans(),
    seed=st.integers(0, 10**6),
    trouble=st.sampled_from([{}, TROUBLE, {"loss": 0.3}, {"duplicate": 0.5, "reorder": 0.5, "delay": (0.0, 2.0)}]),
    bytes_max=st.sampled_from([700, 2000, 64 << 20]),
    policy=st.sampled_from(["lookahead", "lru"]),
)
def test_training_over_any_network_is_bit_identical(num_servers, shared_memory, seed, trouble, bytes_max, policy):
    world = World(num_servers, ServerLimits(bytes_max=bytes_max), seed, **trouble)
    patience = Patience(retry_s=0.5, deadline_s=10_000.0)
    found, _ = train_prepared(
        BATCHES, OPTIMIZERS["adagrad"](), "wide_deep", driver=Seeded(seed), policy=policy, cache=90, lookahead=3,
        store=lambda layouts: world.store(layouts, shared_memory=shared_memory, patience=patience),
    )  # fmt: skip
    assert_identical(expected(), found)
    world.close()


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_call_that_no_message_holds_is_cut_into_pieces(worlds, shared_memory: bool) -> None:
    store = worlds(3, ServerLimits(bytes_max=600)).store(shared_memory=shared_memory)
    with MemoryStore(TABLES) as plain:
        some = np.random.default_rng(0).permutation(300)
        for each in (store, plain):
            each.write_many([(1, some[:200], values(1, 200, 1)), (0, some[100:], values(2, 200))], passed=0)
        for table in (0, 1):
            assert np.array_equal(read(store, some, table, after=0), read(plain, some, table))
            assert np.array_equal(read(store, some, table, columns=3), read(plain, some, table)[:, :3])
            chunks = list(store.iterate(table, 90))
            assert [len(part) for part, _ in chunks] == [90, 90, 20]
            assert sorted(store.ids(table).tolist()) == sorted(plain.ids(table).tolist())


def test_only_the_columns_that_are_asked_for_travel(worlds) -> None:
    world = worlds(1)
    store, sent = world.store(), []

    def spied(peer: bytes, message: Message, reply: Callable[[Message], None]) -> None:
        def noted(answer: Message) -> None:
            sent.append(answer.buffers[1].nbytes if isinstance(message.body, Read) and message.body.parts else None)
            reply(answer)

        world.servers[0].handle(peer, message, noted)

    store.write(1, np.arange(100), values(0, 100, 1))
    world.replace(0, spied)
    for columns in (7, 2):
        del sent[:]
        assert np.array_equal(read(store, np.arange(150), 1, columns=columns)[:100], values(0, 100, 1)[:, :columns])
        assert sent[-1] == 100 * columns * 4


def test_first_columns_are_cut_into_fewer_pieces_than_whole_rows(worlds) -> None:
    world = worlds(1, ServerLimits(bytes_max=2000))
    store, requests = world.store([Rows(64)]), []
    for columns in (64, 4):
        before = world.servers[0].stats().requests
        store.read(0, np.arange(500), np.empty((500, columns), np.float32))
        requests.append(world.servers[0].stats().requests - before)
    assert requests[0] > 4 * requests[1] > 4


def test_a_row_that_is_longer_than_any_message_is_refused(worlds) -> None:
    store = worlds(1, ServerLimits(bytes_max=300)).store([Rows(1000)])
    with pytest.raises(StoreError, match=r"server 0 at server-0: .*300 are allowed"):
        store.read(0, ids(1), np.empty((1, 1000), np.float32))


def test_writes_are_applied_once_however_often_they_arrive(worlds) -> None:
    world = worlds(2, seed=5, duplicate=0.8, loss=0.2, reorder=0.5, delay=(0.0, 1.0))
    store = world.store(patience=Patience(retry_s=0.3, deadline_s=1000))
    for iteration in range(30):
        store.write_many([(0, ids(iteration % 7), values(iteration, 1))], passed=iteration)
    assert sum(server.stats().rows_written for server in world.servers) == 30
    assert sum(server.stats().requests for server in world.servers) > 100
    last = [max(range(k, 30, 7)) for k in range(7)]
    assert np.array_equal(read(store, np.arange(7), after=29), np.concatenate([values(each, 1) for each in last]))


def test_every_error_is_a_typed_one(worlds) -> None:
    world = worlds(1)
    store = world.store()
    for body in ("not an array", None):
        with pytest.raises(BagpipeError):
            store.write(0, body, values(0, 1))


# Several trainers


def test_a_read_waits_until_the_other_trainer_has_written(worlds) -> None:
    world = worlds(2, real_time=True, limits=ServerLimits(park_s=0.2))
    stores = [world.store(trainer=trainer, trainers=2) for trainer in range(2)]
    some, seen = np.arange(50), []
    stores[0].write_many([], passed=0)
    reader = threading.Thread(target=lambda: seen.append(read(stores[0], some, after=0)))
    reader.start()
    before = [server.stats().requests for server in world.servers]

    def came_again() -> bool:
        for server in world.servers:
            server.tick()
        return all(server.stats().requests >= first + 2 for server, first in zip(world.servers, before, strict=True))

    until(came_again, 60)  # parked, sent away, and parked again
    assert seen == []
    stores[0].write_many([(1, some, values(2, 50, 1))])  # no write waits behind it
    stores[1].write_many([(0, some, values(1, 50))], passed=0)
    reader.join(30)
    assert np.array_equal(seen[0], values(1, 50))


def test_who_is_alone_neither_tells_what_it_has_passed_nor_waits_for_it(worlds) -> None:
    for trainers in (1, 2):
        world = worlds(2)
        stores = [world.store(trainer=trainer, trainers=trainers) for trainer in range(trainers)]
        before = [stats.requests for stats in stores[0].server_stats()]
        for store in stores:
            store.write_many([], passed=3)
        more = [stats.requests - number for stats, number in zip(stores[0].server_stats(), before, strict=True)]
        assert more == ([1, 1] if trainers == 1 else [1 + 2, 1 + 2]), "to ask for the statistics is a request"
        read(stores[0], ids(1, 2, 3), after=3 if trainers == 2 else 9)


def test_waiting_for_a_trainer_has_an_end_that_names_it(worlds) -> None:
    world = worlds(1, limits=ServerLimits(parked_max=1, park_s=1))
    store = world.store(trainer=0, trainers=2)
    watermark = world.servers[0]._members.watermark
    watermark.admit = lambda read: read.send_away(watermark.behind(7))
    store.write_many([], passed=9)
    with pytest.raises(DeadlineError, match=r"2 rows after iteration 7 and waited 3 s for trainers 1 \(at none\)"):
        read(store, ids(1, 2), after=7)


def test_too_many_waiting_reads_come_again_without_hurry(worlds) -> None:
    world = worlds(1, limits=ServerLimits(parked_max=1, park_s=1000))
    store = world.store(trainer=0, trainers=2)
    other = world.store(trainer=1, trainers=2)
    handle, asked = world.servers[0].handle, []

    def write_in_the_end(peer: bytes, message: Message, reply) -> None:
        if isinstance(message.body, Read):
            asked.append(world.network.now())
            if len(asked) == 10:
                world.servers[0]._members.watermark.advance(1, 3)
        handle(peer, message, reply)

    other.write_many([], passed=1)
    store.write_many([], passed=3)
    world.servers[0]._members.watermark._parked_max = 0
    world.replace(0, write_in_the_end)
    read(store, ids(1), after=3)
    assert len(asked) == 10
    assert np.diff(asked).min() >= 0.04
