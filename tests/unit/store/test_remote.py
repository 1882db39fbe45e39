"""A store over servers: training over any network is exact, writes are applied once, reads wait for other trainers."""

from __future__ import annotations

import random
import threading
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from bagpipe.errors import BagpipeError, DeadlineError, StoreError
from bagpipe.server.limits import ServerLimits
from bagpipe.server.rows_state import Safety
from bagpipe.store import MemoryStore
from bagpipe.wire.client import PAUSE_S_MIN, Patience
from bagpipe.wire.messages import Body, Message, Opened, Read, Write
from bagpipe.wire.messages import Rows as RowsBody
from harness.calls import CUT
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

ENDURING = Patience(retry_s=5.0, deadline_s=20.0, work_s=10_000.0)

# Exactness


BATCHES = make_batches(10, last=3)


@cache
def expected():
    return train_reference(BATCHES, OPTIMIZERS["adagrad"](), "wide_deep")[0]


@examples(40, tuple(HealthCheck))
@given(
    num_servers=st.integers(1, 3),
    seed=st.integers(0, 10**6),
    trouble=st.sampled_from([{}, TROUBLE, {"breaks": 0.3}, {"breaks": 0.3, "delay": (0.0, 2.0)}]),
    bytes_max=st.sampled_from([700, 2000, 64 << 20]),
    policy=st.sampled_from(["lookahead", "lru"]),
)
def test_training_over_any_network_is_bit_identical(num_servers, seed, trouble, bytes_max, policy):
    world = World(num_servers, ServerLimits(bytes_max=bytes_max), seed, **trouble)
    patience = Patience(retry_s=0.5, deadline_s=10_000.0, work_s=10_000.0)
    found, _ = train_prepared(
        BATCHES, OPTIMIZERS["adagrad"](), "wide_deep", driver=Seeded(seed), policy=policy, cache=90, lookahead=3,
        store=lambda layouts: world.store(layouts, patience=patience),
    )  # fmt: skip
    assert_identical(expected(), found)
    world.close()


def test_a_call_that_no_message_holds_is_cut_into_pieces(worlds) -> None:
    store = worlds(3, ServerLimits(bytes_max=600)).store()
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

    def noted(message: Message, body: Body, buffers):
        sent.append(buffers[1].nbytes if isinstance(message.body, Read) and message.body.parts else None)
        return body, buffers

    store.write(1, np.arange(100), values(0, 100, 1))
    world.overhear(0, noted)
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


WRITES, SOME = 80, 7


@pytest.mark.parametrize("seeds", [range(25 * k, 25 * k + 25) for k in range(8)], ids=str)
def test_writes_are_applied_once_and_in_order_with_a_third_of_all_answers_cut(worlds, seeds: range) -> None:
    """Whoever wrote can't know whether its write was applied, and sends it again on another connection."""
    for seed in seeds:
        world = worlds(2, seed=seed, delay=(0.0, 0.3), breaks=0.05)
        chance, asked = random.Random(seed), []

        def cut(message: Message, body: Body, buffers, chance=chance, asked=asked):
            asked.append(message.body)
            return CUT if chance.random() < 1 / 3 else (body, buffers)

        store = world.store(patience=Patience(retry_s=0.3, deadline_s=10_000, work_s=10_000))
        for server in range(2):
            world.overhear(server, cut)
        for iteration in range(WRITES):
            store.write_many([(0, ids(iteration % SOME), values(iteration, 1))], passed=iteration)
        assert sum(server.stats().rows_written for server in world.servers) == WRITES
        assert sum(isinstance(body, Write) for body in asked) > WRITES * 5 // 4
        last = [max(range(k, WRITES, SOME)) for k in range(SOME)]
        found = read(store, np.arange(SOME), after=WRITES - 1)
        assert np.array_equal(found, np.concatenate([values(each, 1) for each in last]))
        world.close()


def test_every_error_is_a_typed_one(worlds) -> None:
    world = worlds(1)
    store = world.store()
    for body in ("not an array", None):
        with pytest.raises(BagpipeError):
            store.write(0, body, values(0, 1))


# Several trainers


def test_a_read_waits_until_the_other_trainer_has_written(worlds) -> None:
    world = worlds(2, real_time=True)
    stores = [world.store(trainer=trainer, trainers=2) for trainer in range(2)]
    some, seen = np.arange(50), []
    stores[0].write_many([], passed=0)
    reader = threading.Thread(target=lambda: seen.append(read(stores[0], some, after=0)))
    reader.start()
    until(lambda: all(server.stats().parked for server in world.servers), 60)
    assert seen == []
    stores[0].write_many([(1, some, values(2, 50, 1))])  # no write waits behind it
    stores[1].write_many([(0, some, values(1, 50))], passed=0)
    reader.join(30)
    assert np.array_equal(seen[0], values(1, 50))


def test_a_read_waits_as_long_as_it_takes_on_one_connection(worlds) -> None:
    """Its server says again and again that it waits, so nobody takes it for dead, and asks nothing twice."""
    world = worlds(1)
    stores = [world.store(trainer=trainer, trainers=2, patience=ENDURING) for trainer in range(2)]
    stores[0].write_many([(0, ids(1), values(0, 1))], passed=0)
    asked, server, begin = [], world.servers[0], world.network.now()

    def late(message: Message, body: Body, buffers):
        asked.append(type(body))
        if world.network.now() > begin + 500:
            server._advance(1, 0)
        return body, buffers

    world.overhear(0, late)
    assert np.array_equal(read(stores[0], ids(1), after=0), values(0, 1))
    assert world.network.now() > begin + 500
    assert asked.count(Opened) == 1
    assert asked.count(RowsBody) == 1


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
    store = worlds(1).store(trainer=0, trainers=2)
    store.write_many([], passed=9)
    with pytest.raises(
        DeadlineError, match=r"waited 3\d s for 2 rows after iteration 7 from .* waits for trainers 1 \(at none\)"
    ):
        read(store, ids(1, 2), after=7)


def test_reads_that_find_no_room_to_wait_come_again_without_hurry(worlds) -> None:
    world = worlds(1, limits=ServerLimits(waiting_bytes=7))
    store = world.store(trainer=0, trainers=2)
    handle, asked = world.servers[0].handle, []

    def write_in_the_end(peer, message: Message):
        if isinstance(message.body, Read):
            asked.append(world.network.now())
            if len(asked) == 10:
                world.servers[0]._advance(1, 3)
        return handle(peer, message)

    store.write_many([], passed=3)
    world.replace(0, write_in_the_end)
    read(store, ids(1), after=3)
    assert len(asked) == 10
    assert np.diff(asked).min() >= 0.99 * PAUSE_S_MIN
    assert world.servers[0].stats().parked == 0


# Several things at once of one trainer


def test_a_save_that_waits_holds_up_no_later_writes_and_they_come_after_it(worlds, tmp_path) -> None:
    """Numbers are given in the order of calls: what is written while a save goes on is not in it."""
    world = worlds(2, real_time=True, safety=Safety(checkpoints=(tmp_path,)), background=(waiting := []).append)
    store = world.store()
    store.write(0, np.arange(20), values(0, 20))
    store.mark(1)
    saved: list[list] = []
    directory = tmp_path / "00000001"
    directory.mkdir()
    saving = threading.Thread(target=lambda: saved.append(store.save(1, directory, ["ad", "user"])))
    saving.start()
    until(lambda: len(waiting) == 2, 60)
    for turn in range(1, 5):
        store.write(0, np.arange(20), values(turn, 20))
        assert np.array_equal(read(store, np.arange(20)), values(turn, 20))
    store.mark(2)
    assert saved == []
    for work in waiting:
        work()
    saving.join(30)
    assert sum(part.rows for entry in saved[0] for part in entry.rows) == 20
    assert store._session.sequences == {0: 8, 1: 8}


@pytest.mark.parametrize("seed", range(10))
def test_marks_and_writes_of_several_threads_keep_their_numbers_over_any_network(worlds, seed: int) -> None:
    """Whichever comes first on its own connection, each is decided in its turn."""
    world = worlds(2, seed=seed, real_time=True, delay=(0.0, 0.005), breaks=0.05)
    store = world.store(patience=Patience(retry_s=0.5, deadline_s=60))
    failures: list[BaseException] = []

    def mark() -> None:
        try:
            for done in range(1, 15):
                store.mark(done)
        except BaseException as error:
            failures.append(error)

    marking = threading.Thread(target=mark)
    marking.start()
    for turn in range(15):
        store.write(0, np.arange(10), values(turn, 10))
        assert np.array_equal(read(store, np.arange(10)), values(turn, 10))
    marking.join(60)
    assert failures == []
    for server in world.servers:
        assert server._held.marks()[-1] == 14
        assert server._orders[0].last == 15 + 14
