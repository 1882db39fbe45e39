"""A store over servers that pause, die, come back empty, forget, have no room or lie."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from bagpipe.errors import DeadlineError, StoreError, WireError
from bagpipe.server.server import EmbeddingServer
from bagpipe.server.storage import in_memory
from bagpipe.wire.client import Patience
from bagpipe.wire.connection import PeerGoneError
from bagpipe.wire.messages import Failed, Message, Open, Opened, Read, Write, Written
from bagpipe.wire.recovery_messages import Mark, Worked
from definitions.shards import define_servers
from harness.calls import CUT
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
    until, waiting = world.network.now() + 10, []
    handle = world.servers[1].handle

    def paused(peer, message: Message):
        waiting.append(message)
        world.network.waits.until("the end of the pause", lambda: world.network.now() >= until, 20)
        return handle(peer, message)

    world.replace(1, paused)
    store.write(0, np.arange(20), values(1, 20))
    assert world.network.now() >= until
    assert len(waiting) > 2
    assert np.array_equal(read(store, np.arange(20)), values(1, 20))
    assert sum(server.stats().rows_written for server in world.servers) == 40


@pytest.mark.parametrize("dying", [Read, Write])
def test_a_server_that_dies_in_the_middle_of_a_request_is_named_and_others_go_on(worlds, dying) -> None:
    world = worlds(2)
    store, other = world.store(trainer=0, trainers=2), world.store(trainer=1, trainers=2)
    store.write(0, np.arange(20), values(0, 20))

    def dies(peer, message: Message):
        if not isinstance(message.body, dying):
            return world.servers[1].handle(peer, message)
        world.listeners[1].close()
        raise PeerGoneError("it died")

    world.replace(1, dies)
    begin = world.network.now()
    some = np.arange(20)
    call = (lambda: read(store, some)) if dying is Read else lambda: store.write(0, some, values(1, 20))
    with pytest.raises(
        StoreError, match=r"server 1 at server-1 did not answer for 20\.\d s, asked for .*\d rows"
    ) as caught:
        call()
    assert "it is not running, or not at this address" in str(caught.value)
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
    world.replace(0, EmbeddingServer(clock=world.network.now, waits=world.network.waits).handle)
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


@pytest.mark.parametrize("asking", [Open, Read, Write])
def test_a_connection_that_breaks_at_any_point_is_made_anew_and_greeted_again(worlds, asking) -> None:
    """Before a request, after it, before its answer: each is asked again, and what was done is not done twice."""
    world = worlds(2, seed=1)
    store = world.store()
    for turn in range(6):
        cuts, seen = [turn % 3 + 1], []

        def cut(message: Message, body, buffers, cuts=cuts, seen=seen):
            seen.append(type(message.body))
            if isinstance(message.body, asking) and cuts and (cuts.append(cuts.pop() - 1) or cuts[0] >= 0):
                return CUT
            return body, buffers

        world.overhear(1, cut)
        store.write(0, np.arange(20), values(turn, 20))
        assert np.array_equal(read(store, np.arange(20)), values(turn, 20))
        assert seen.count(asking) >= turn % 3 + 2
        assert sum(server.stats().rows_written for server in world.servers) == 20 * (turn + 1)


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
    world.overhear(0, lambda message, body, buffers: (body, buffers) if isinstance(body, Opened) else (Read([]), ()))
    with pytest.raises(WireError, match="Read came where Rows was due"):
        read(store, ids(1))


@pytest.mark.parametrize("change", [lambda body: Written(body.sequence + 1), lambda body: Worked()])
def test_a_write_that_is_acknowledged_by_another_number_has_an_unknown_outcome(worlds, change) -> None:
    world = worlds(1)
    store = world.store()
    world.overhear(
        0, lambda message, body, buffers: (change(body), ()) if isinstance(body, Written) else (body, buffers)
    )
    with pytest.raises(WireError, match="came where Written 1 was due"):
        store.write(0, ids(1), values(0, 1))
    with pytest.raises(StoreError, match="failed halfway"):
        store.write(0, ids(1), values(0, 1))


# Numbers that are given back, or can't be


def refusing(kind, decided: bool):
    """Requests of this kind are refused: for good, or so that their number is still to be used."""
    return lambda message, body, buffers: (
        (Failed("StoreError", "not today", decided), ()) if isinstance(message.body, kind) else (body, buffers)
    )


def test_the_number_of_a_write_that_decided_nothing_is_that_of_the_next_one(worlds) -> None:
    world = worlds(1)
    store, handle = world.store(), world.servers[0].handle
    store.write(0, ids(1), values(0, 1))

    def unfit(peer, message: Message):
        return (Failed("WireError", "no ids"), ()) if isinstance(message.body, Write) else handle(peer, message)

    for _ in range(3):
        world.replace(0, unfit)
        with pytest.raises(WireError, match="no ids"):
            store.write(0, ids(1), values(1, 1))
        world.replace(0, handle)
        assert store._session.sequences == {0: world.servers[0]._orders[0].last}
        store.write(0, ids(1), values(2, 1))
    assert np.array_equal(read(store, ids(1)), values(2, 1))
    assert world.servers[0].stats().rows_written == 4


def test_an_earlier_refusal_is_not_taken_for_that_of_a_write_without_an_answer(worlds) -> None:
    """Its number would be given to the next write, which the server would take for a copy."""
    world = worlds(1)
    store = world.store()
    world.overhear(0, refusing(Write, decided=True))
    with pytest.raises(StoreError, match="not today"):
        store.write(0, ids(1), values(0, 1))  # number 1 is applied, though it is not true what is told
    world.overhear(0, lambda message, body, buffers: None if isinstance(body, Written) else (body, buffers))
    with pytest.raises((StoreError, DeadlineError), match="a write of 1 rows"):
        store.write(0, ids(1), values(1, 1))
    with pytest.raises(StoreError, match="failed halfway"):
        store.write(0, ids(1), values(2, 1))


def test_a_refused_introduction_says_nothing_of_a_write_that_is_under_way(worlds) -> None:
    world = worlds(1)
    store = world.store()

    def applied_and_cut(message: Message, body, buffers):
        if isinstance(body, Written):
            world.overhear(0, refusing(Open, decided=False))
            return CUT
        return body, buffers

    world.overhear(0, applied_and_cut)
    with pytest.raises(StoreError, match="not today"):
        store.write(0, ids(1), values(0, 1))
    world.replace(0, world.servers[0].handle)
    with pytest.raises(StoreError, match="failed halfway"):
        store.write(0, ids(1), values(1, 1))
    assert world.servers[0].stats().rows_written == 1


def test_a_mark_whose_number_can_not_be_given_back_ends_the_store(worlds) -> None:
    """A write has the next number already, and would wait for it."""
    world = worlds(1, real_time=True)
    store, handle = world.store(), world.servers[0].handle
    arrived, go_on = threading.Event(), threading.Event()

    def unfit(peer, message: Message):
        if not isinstance(message.body, Mark):
            return handle(peer, message)
        arrived.set()
        assert go_on.wait(30)
        return Failed("WireError", "no mark"), ()

    world.replace(0, unfit)
    failures: list[BaseException] = []

    def mark() -> None:
        try:
            store.mark(1)
        except WireError as error:
            failures.append(error)

    marking = threading.Thread(target=mark)
    marking.start()
    assert arrived.wait(30)
    with store._session.numbering:
        store._session.sequences[0] += 1  # as a write does
    go_on.set()
    marking.join(30)
    assert "no mark" in str(failures[0])
    assert store._session.sequences == {0: 2}
    with pytest.raises(StoreError, match="start again"):
        store.write(0, ids(1), values(0, 1))


def test_two_stores_of_one_trainer_that_both_write_lose_nothing_in_silence(worlds) -> None:
    world = worlds(2)
    one, other = world.store(), world.store()
    one.write(0, np.arange(20), values(0, 20))
    for call in (lambda: other.write(0, np.arange(20), values(1, 20)), lambda: other.mark(1)):
        with pytest.raises(StoreError, match="another store of this trainer has written meanwhile"):
            call()
    one.write(0, np.arange(20), values(2, 20))
    later = world.store()
    later.write(0, np.arange(20), values(3, 20))
    assert np.array_equal(read(one, np.arange(20)), values(3, 20)), "to read is no matter"
    with pytest.raises(StoreError, match="another store of this trainer has written meanwhile"):
        one.write(0, np.arange(20), values(4, 20))
    assert np.array_equal(read(later, np.arange(20)), values(3, 20))
