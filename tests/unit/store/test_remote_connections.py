"""How a store is connected with its servers: which ones, through shared memory or not, and by how many threads."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from bagpipe.errors import ConfigError, StoreError, WireError
from bagpipe.server.client import RemoteStore
from bagpipe.server.limits import ServerLimits
from bagpipe.server.server import EmbeddingServer
from bagpipe.store import MemoryStore
from bagpipe.wire.listener import Listener
from bagpipe.wire.stream import SocketNetwork
from harness.remote_world import (
    FAST,
    RUN,
    TABLES,
    Rows,
    fixture_worlds,  # noqa: F401
    read,
    values,
)
from harness.wire import until
from harness.world import OPTIMIZERS, assert_identical, make_batches, train_prepared, train_reference


class Beside:
    """Servers on this host, in this process, whose clients come by real sockets."""

    def __init__(self, num_servers: int = 2, limits: ServerLimits | None = None) -> None:
        self.servers = [EmbeddingServer(server=k, servers=num_servers, limits=limits) for k in range(num_servers)]
        self.listeners = [Listener("127.0.0.1:0", server.handle) for server in self.servers]
        self.stores: list[RemoteStore] = []

    def store(self, tables=TABLES, network=None, **options) -> RemoteStore:
        addresses = [listener.address for listener in self.listeners]
        self.stores.append(RemoteStore(tables, addresses, network or SocketNetwork(), run=RUN, **options))
        return self.stores[-1]

    def close(self) -> None:
        for store in self.stores:
            store.close()
        for each in (*self.listeners, *self.servers):
            each.close()


@pytest.fixture
def beside() -> Iterator[Beside]:
    world = Beside()
    yield world
    world.close()


class Breaking(SocketNetwork):
    """Connections that break now and then, just before a message is sent, or just after."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def connect(self, address: str, timeout_s: float):
        connection = super().connect(address, timeout_s)
        send = connection.send

        def breaking(*arguments, **options) -> None:
            chance = self.random.random()
            if chance >= 0.05:
                send(*arguments, **options)
            if chance < 0.1:
                connection.close()
                raise ConnectionResetError("the connection broke")

        connection.send = breaking
        return connection


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


def test_shared_memory_that_must_be_and_can_not_is_said(beside, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("bagpipe.server.server.attach", lambda descriptor, _: os.close(descriptor))
        with pytest.raises(StoreError, match=r"server 0 at .* can't use our shared memory"):
            beside.store(shared_memory=True)
        assert [stats.shared for stats in beside.store(shared_memory="auto").server_stats()] == [0, 0]

    def none(*_: object) -> None:
        raise OSError("no memfd")

    monkeypatch.setattr("os.memfd_create", none)
    assert [stats.shared for stats in beside.store(shared_memory="auto").server_stats()] == [0, 0]
    with pytest.raises(StoreError, match="no shared memory here"):
        beside.store(shared_memory=True)


def test_shared_memory_is_chosen_where_it_can_be_and_given_back(beside) -> None:
    for shared_memory, connections in (("auto", 2), (True, 2), (False, 0)):
        store = beside.store(shared_memory=shared_memory)
        store.write(0, np.arange(100), values(0, 100))
        assert np.array_equal(read(store, np.arange(100)), values(0, 100))
        assert [stats.shared for stats in store.server_stats()] == [connections] * 2, "for reads and for writes"
        store.close()
        until(lambda: all(not server.stats().clients for server in beside.servers))
        assert [server.stats().shared for server in beside.servers] == [0, 0]


@pytest.mark.parametrize("shared_memory", [False, True])
def test_a_call_that_no_message_holds_is_cut_into_pieces_for_sockets_and_for_shared_memory(shared_memory) -> None:
    world = Beside(3, ServerLimits(bytes_max=600))
    store, some = world.store(shared_memory=shared_memory), np.random.default_rng(0).permutation(300)
    with MemoryStore(TABLES) as plain:
        for each in (store, plain):
            each.write_many([(1, some[:200], values(1, 200, 1)), (0, some[100:], values(2, 200))], passed=0)
        for table in (0, 1):
            assert np.array_equal(read(store, some, table, after=0), read(plain, some, table))
            assert np.array_equal(read(store, some, table, columns=3), read(plain, some, table)[:, :3])
            assert [len(part) for part, _ in store.iterate(table, 90)] == [90, 90, 20]
    world.close()


@pytest.mark.parametrize("seed", range(6))
def test_training_through_shared_memory_over_connections_that_break_is_bit_identical(seed: int) -> None:
    """Each connection has memory of its own: what is done late for one that broke harms nobody."""
    batches, world = make_batches(10, last=3), Beside(2, ServerLimits(bytes_max=2000))
    expected, _ = train_reference(batches, OPTIMIZERS["adagrad"](), "wide_deep")
    found, _ = train_prepared(
        batches, OPTIMIZERS["adagrad"](), "wide_deep", cache=90, lookahead=3,
        store=lambda layouts: world.store(layouts, network=Breaking(seed), shared_memory=True, patience=FAST),
    )  # fmt: skip
    assert_identical(expected, found)
    assert sum(server.stats().requests for server in world.servers) > 0
    world.close()


def test_threads_use_connections_of_their_own(beside) -> None:
    store = beside.store(shared_memory=True)
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
    assert (len(store._idle["reads"]) <= 4, len(store._idle["writes"])) == (True, 1)


def test_an_interrupted_call_leaves_a_store_that_works(worlds, monkeypatch: pytest.MonkeyPatch) -> None:
    world = worlds(2)
    store = world.store()
    store.write(0, np.arange(20), values(0, 20))
    with monkeypatch.context() as patch:

        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(world.network, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read(store, np.arange(20))
    assert np.array_equal(read(store, np.arange(20)), values(0, 20))


def test_an_interrupted_write_or_mark_of_unknown_outcome_ends_the_store(
    worlds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number may be taken, and rows of some servers may be written."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for call in (lambda store: store.write(0, np.arange(20), values(1, 20)), lambda store: store.mark(1)):
        store = (world := worlds(2)).store()
        with monkeypatch.context() as patch:
            patch.setattr(world.network, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                call(store)
        for again in (lambda store=store: read(store, np.arange(20)), lambda store=store: store.mark(2)):
            with pytest.raises(StoreError, match="start again"):
                again()
