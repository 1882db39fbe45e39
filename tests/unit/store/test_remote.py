"""A store over servers, on networks and with servers that misbehave."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagpipe.errors import BagpipeError, ConfigError, DeadlineError, StoreError, WireError
from bagpipe.server.core import EmbeddingServer
from bagpipe.server.limits import ServerLimits
from bagpipe.server.shards import servers_by_numpy
from bagpipe.server.storage import in_memory
from bagpipe.store import MemoryStore
from bagpipe.store.links import Patience
from bagpipe.store.remote import RemoteStore
from bagpipe.trainer.stages import Seeded
from bagpipe.wire.messages import Message, Read, Write
from bagpipe.wire.simulated import SimulatedNetwork
from support import OPTIMIZERS, assert_identical, make_batches, train_accelerated, train_reference

RUN = bytes(16)
FAST = Patience(retry_s=0.5, deadline_s=20.0, trainers_s=3.0)
TROUBLE = {"delay": (0.0, 0.3), "loss": 0.1, "duplicate": 0.2, "reorder": 0.3}


class Rows:
    def __init__(self, width: int) -> None:
        self.width = width

    def initialise(self, ids: np.ndarray, out: np.ndarray) -> None:
        out[:] = (ids % 1000).astype(np.float32)[:, None]


TABLES = (Rows(4), Rows(7))


class World:
    """Servers on a simulated network, and the stores of their clients."""

    def __init__(
        self, num_servers: int = 2, limits: ServerLimits | None = None, seed: int = 0, storages=(), **network
    ) -> None:
        self.network = SimulatedNetwork(seed, **network)
        self.servers = [
            EmbeddingServer(dict(storages).get(k), server=k, servers=num_servers, limits=limits, clock=self.network.now)
            for k in range(num_servers)
        ]
        self.addresses = [f"server-{k}" for k in range(num_servers)]
        self.listeners = [
            self.network.listen(address, server.handle)
            for address, server in zip(self.addresses, self.servers, strict=True)
        ]
        self.stores: list[RemoteStore] = []

    def store(self, tables=TABLES, **options) -> RemoteStore:
        options.setdefault("patience", FAST)
        options.setdefault("shared_memory", False)
        made = RemoteStore(tables, self.addresses, self.network, run=RUN, **options)
        self.stores.append(made)
        return made

    def replace(self, server: int, handler) -> None:
        """Something else listens where the server did."""
        self.listeners[server].close()
        self.listeners[server] = self.network.listen(self.addresses[server], handler)

    def close(self) -> None:
        for store in self.stores:
            store.close()
        self.network.close()
        for server in self.servers:
            server.close()


@pytest.fixture(autouse=True, scope="module")
def one_torch_thread():
    """Matrices this small gain nothing from a second thread, and where cores are few they wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*arguments, **options) -> World:
        made.append(World(*arguments, **options))
        return made[-1]

    yield make
    for world in made:
        world.close()


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def values(seed: int, num_rows: int, table: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, TABLES[table].width), np.float32)


def read(store, some: np.ndarray, table: int = 0, after: int = -1, columns: int | None = None) -> np.ndarray:
    out = np.full((len(some), columns or TABLES[table].width), np.nan, np.float32)
    store.read_many([(table, some, out)], after)
    return out


# Exactness


BATCHES = make_batches(10, last=3)


@cache
def expected():
    return train_reference(BATCHES, OPTIMIZERS["adagrad"](), "wide_deep")[0]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "bagpipe.api.open_rows",
            lambda _, layouts, *__, **___: world.store(layouts, shared_memory=shared_memory, patience=patience),
        )
        found, _ = train_accelerated(
            BATCHES, OPTIMIZERS["adagrad"](), "wide_deep", driver=Seeded(seed), policy=policy, cache=90, lookahead=3
        )
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


# Several trainers


def test_a_read_waits_until_the_other_trainer_has_written(worlds) -> None:
    world = worlds(2, real_time=True, limits=ServerLimits(park_s=0.2))
    stores = [world.store(trainer=trainer, trainers=2) for trainer in range(2)]
    some, seen = np.arange(50), []
    stores[0].write_many([], passed=0)
    reader = threading.Thread(target=lambda: seen.append(read(stores[0], some, after=0)))
    reader.start()
    begin = time.monotonic()
    while time.monotonic() < begin + 0.6:  # parked, sent away, and parked again
        for server in world.servers:
            server.tick()
        time.sleep(0.01)
    assert seen == []
    stores[0].write_many([(1, some, values(2, 50, 1))])  # no write waits behind it
    stores[1].write_many([(0, some, values(1, 50))], passed=0)
    reader.join(30)
    assert np.array_equal(seen[0], values(1, 50))


def test_waiting_for_a_trainer_has_an_end_that_names_it(worlds) -> None:
    world = worlds(1, limits=ServerLimits(parked_max=1, park_s=1))
    store = world.store(trainer=0, trainers=2)
    watermark = world.servers[0]._members.watermark
    watermark.admit = lambda _: watermark._behind(7)
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


# Servers that misbehave


def test_a_server_that_was_paused_is_asked_again_and_nothing_is_doubled(worlds) -> None:
    world = worlds(2)
    store = world.store(patience=Patience(retry_s=1.0, deadline_s=60))
    store.write(0, np.arange(20), values(0, 20))
    until, backlog = world.network.now() + 10, []
    handle = world.servers[1].handle

    def paused(*message) -> None:
        backlog.append(message)
        if world.network.now() >= until:
            while backlog:
                handle(*backlog.pop(0))

    world.replace(1, paused)
    store.write(0, np.arange(20), values(1, 20))
    assert world.network.now() >= until
    assert np.array_equal(read(store, np.arange(20)), values(1, 20))
    assert sum(server.stats().rows_written for server in world.servers) == 40


@pytest.mark.parametrize("dying", [Read, Write])
def test_a_server_that_dies_in_the_middle_of_a_request_is_named_and_others_go_on(worlds, dying) -> None:
    world = worlds(2)
    store, other = world.store(trainer=0, trainers=2), world.store(trainer=1, trainers=2)
    store.write(0, np.arange(20), values(0, 20))

    def dies(peer: bytes, message: Message, reply) -> None:
        if isinstance(message.body, dying):
            world.listeners[1].close()
        else:
            world.servers[1].handle(peer, message, reply)

    world.replace(1, dies)
    begin = world.network.now()
    some = np.arange(20)
    call = (lambda: read(store, some)) if dying is Read else lambda: store.write(0, some, values(1, 20))
    with pytest.raises(
        StoreError, match=r"server 1 at server-1 did not answer for 20\.\d s, asked for .*\d rows"
    ) as caught:
        call()
    assert "wire.deadline_s" in str(caught.value)
    assert world.network.now() - begin <= FAST.deadline_s + 1
    if dying is Write:  # who knows what it has applied?
        with pytest.raises(StoreError, match="failed halfway"):
            read(store, ids(1))
    on_first = np.flatnonzero(servers_by_numpy(0, np.arange(20), 2) == 0)
    assert np.array_equal(read(other, on_first), values(int(dying is Write), 20)[on_first])


def test_a_server_that_comes_back_empty_is_noticed_before_a_row_is_read(worlds) -> None:
    world = worlds(1)
    store = world.store()
    store.write(0, ids(1), values(0, 1))
    world.replace(0, EmbeddingServer(clock=world.network.now).handle)
    with pytest.raises(StoreError, match="was started again and its rows are lost"):
        read(store, ids(1))


def test_a_server_that_is_known_to_be_gone_is_not_waited_for(worlds) -> None:
    world = worlds(2)
    gone: dict[int, str] = {}
    store = world.store(watch=gone.get)
    world.listeners[1].close()
    gone[1] = "ended with exit code -9"
    begin = world.network.now()
    with pytest.raises(StoreError, match=r"server 1 at server-1 ended with exit code -9: its rows are lost"):
        read(store, np.arange(20))
    assert world.network.now() - begin < 2


def test_a_server_that_forgot_us_is_greeted_again(worlds) -> None:
    world = worlds(1, ServerLimits(clients_max=1))
    stores = [world.store(shared_memory=shared) for shared in (True, False, True)]
    for turn in range(3):
        for number, store in enumerate(stores):
            store.write(0, ids(number), values(turn, 1)) if number == 0 else read(store, ids(0))
    assert np.array_equal(read(stores[1], ids(0)), values(2, 1))


def test_a_server_without_room_refuses_and_the_store_goes_on(worlds) -> None:
    world = worlds(1, storages={0: in_memory(bytes_max=30_000)})
    store = world.store()
    store.write(0, ids(1), values(0, 1))
    with pytest.raises(StoreError, match=r"server 0 at server-0: 4,999 more rows .* 30,000 are allowed"):
        store.write(0, np.arange(5000), values(0, 5000))
    store.write(0, ids(1, 2), values(1, 2))
    assert np.array_equal(read(store, ids(1, 2)), values(1, 2))
    assert store.num_rows(0) == 2


def test_a_write_that_only_some_servers_took_ends_the_store(worlds) -> None:
    world = worlds(2, storages={1: in_memory(bytes_max=30_000)})
    store = world.store()
    with pytest.raises(StoreError, match="30,000 are allowed"):
        store.write(0, np.arange(5000), values(0, 5000))
    for call in (lambda: read(store, ids(1)), lambda: store.write(0, ids(1), values(0, 1)), store.stats):
        with pytest.raises(StoreError, match=r"failed halfway .*30,000.* from a checkpoint"):
            call()


def test_a_server_that_answers_something_else_is_not_believed(worlds) -> None:
    world = worlds(1)
    store = world.store()

    def wrong(peer: bytes, message: Message, reply) -> None:
        reply(Message(message.run, message.generation, message.request, Read([])))

    world.replace(0, wrong)
    with pytest.raises(WireError, match="answered Read where Rows was due"):
        read(store, ids(1))


# Setting up


def test_servers_in_another_order_are_refused(worlds) -> None:
    world = worlds(2)
    world.addresses.reverse()
    with pytest.raises(StoreError, match=r"server 0 at server-1 is server 1 of 2, not 0 of 2"):
        world.store()


def test_too_few_servers_are_refused(worlds) -> None:
    world = worlds(2)
    world.addresses.pop()
    with pytest.raises(StoreError, match=r"is server 0 of 2, not 0 of 1"):
        world.store()


def test_no_server_at_all_is_said_at_once(worlds) -> None:
    world = worlds(1)
    world.addresses.clear()
    with pytest.raises(ConfigError, match="without servers"):
        world.store()


def test_a_server_that_is_not_there_is_named_at_the_deadline(worlds) -> None:
    world = worlds(1)
    world.addresses[0] = "nowhere"
    with pytest.raises(StoreError, match=r"server 0 at nowhere did not answer for 20\.\d s, asked for a first sign of"):
        world.store()


def test_errors_of_a_server_keep_their_type(worlds) -> None:
    world = worlds(1)
    world.store()
    with pytest.raises(StoreError, match=r"server 0 at server-0: .*others have \[4, 7\]"):
        world.store([Rows(5), Rows(7)])
    with pytest.raises(WireError, match="serves run"):
        RemoteStore(TABLES, world.addresses, world.network, run=b"x" * 16)


def test_shared_memory_that_must_be_and_can_not_is_said(worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    world = worlds(1)
    monkeypatch.setattr("bagpipe.server.clients.attach", lambda _: None)
    with pytest.raises(StoreError, match=r"server 0 at server-0 can't use our shared memory"):
        world.store(shared_memory=True)
    store = world.store(shared_memory="auto")
    assert store.server_stats()[0].shared == 0

    def none(*_: object) -> None:
        raise OSError("no memfd")

    monkeypatch.setattr("os.memfd_create", none)
    world.store(shared_memory="auto")
    with pytest.raises(StoreError, match="no shared memory here"):
        world.store(shared_memory=True)


def test_shared_memory_is_chosen_where_it_can_be(worlds) -> None:
    world = worlds(2)
    store = world.store(shared_memory="auto")
    store.write(0, np.arange(100), values(0, 100))
    assert np.array_equal(read(store, np.arange(100)), values(0, 100))
    assert [stats.shared for stats in store.server_stats()] == [1, 1]
    store.close()
    for server in world.servers:
        server.tick()
        assert server.stats().shared == 0


def test_threads_use_connections_of_their_own(worlds) -> None:
    world = worlds(2, real_time=True)
    store = world.store(shared_memory=True)
    store.write(0, np.arange(4000), values(0, 4000))
    failures: list[BaseException] = []

    def reader(seed: int) -> None:
        try:
            for _ in range(20):
                some = np.random.default_rng(seed).integers(0, 4000, 300)
                assert np.array_equal(read(store, some), values(0, 4000)[some])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(20):
        store.write(0, np.arange(5000, 5100), values(turn, 100))
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(store._idle) <= 5


def test_an_interrupted_call_leaves_a_store_that_works(worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    world = worlds(2)
    store = world.store(shared_memory=True)
    store.write(0, np.arange(20), values(0, 20))
    with monkeypatch.context() as patch:

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(world.network, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read(store, np.arange(20))
    assert np.array_equal(read(store, np.arange(20)), values(0, 20))


def test_every_error_is_a_typed_one(worlds) -> None:
    world = worlds(1)
    store = world.store()
    for body in ("not an array", None):
        with pytest.raises(BagpipeError):
            store.write(0, body, values(0, 1))
