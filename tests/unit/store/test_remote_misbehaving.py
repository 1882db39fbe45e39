"""A store over servers that pause, die, come back empty, forget, have no room or lie."""

from __future__ import annotations

import numpy as np
import pytest
from bagpipe.server.core import EmbeddingServer
from bagpipe.store.links import Patience

from bagpipe.errors import StoreError, WireError
from bagpipe.server.limits import ServerLimits
from bagpipe.server.storage import in_memory
from bagpipe.wire.messages import Message, Read, Write
from definitions.shards import define_servers
from harness.remote_world import (
    FAST,
    fixture_worlds,  # noqa: F401
    ids,
    read,
    values,
)


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
    on_first = np.flatnonzero(define_servers(0, np.arange(20), 2) == 0)
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
