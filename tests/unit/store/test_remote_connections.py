"""How a store is connected with its servers: which ones, through shared memory or not, and by how many threads."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from bagpipe.store.remote import RemoteStore

from bagpipe.errors import ConfigError, StoreError, WireError
from harness.remote_world import (
    TABLES,
    Rows,
    fixture_worlds,  # noqa: F401
    read,
    values,
)


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
