"""Data processors over the wire: any batch, the same whoever gives it, and no more in memory than announced."""

from __future__ import annotations

import pytest

from bagpipe.data import describe, generated
from bagpipe.data.service import GROUPS_KEPT, DataOrder, DataProcessorService, RemoteBatches
from bagpipe.errors import ConfigError, WireError
from bagpipe.types import Batch
from bagpipe.wire.frames import encode
from bagpipe.wire.messages import AskStats, Failed
from bagpipe.wire.plan_messages import GetBatch, GotBatch
from benchmarks.simulated import SimulatedNetwork
from harness.calls import ask_once
from harness.served import RUN

DATA = generated("tiny", 700)
ORDER = DataOrder(describe(DATA), batch_size=3, num_batches=300, seed=5)
"""64 batches of a group, 234 of an epoch: the second epoch begins within a group."""


def flatten(batch: Batch):
    tensors = [batch.dense, batch.labels]
    for ids in batch.sparse.values():
        tensors += [part for part in (ids.values, ids.offsets, ids.weights) if part is not None]
    return batch.number, list(batch.sparse), [(t.dtype, tuple(t.shape), t.numpy().tobytes()) for t in tensors]


@pytest.fixture
def network():
    return SimulatedNetwork(3, delay=(0.0, 0.1), breaks=0.1)


@pytest.fixture
def start(network):
    """Starts processors; all are closed at the end."""
    started = []

    def start(place=0, places=1, order=ORDER):
        service = DataProcessorService(
            lambda handler: network.listen(f"p{place}", handler), order, run=RUN, processor=place, processors=places
        )
        service.start()
        started.append(service)
        return service

    yield start
    for service in started:
        service.close()


def ask(service, body, run=RUN):
    return ask_once(service.handle, body, run)


@pytest.mark.parametrize("places", [1, 2, 3])
def test_batches_come_in_order_whatever_the_number_of_processors(places, network, start):
    services = [start(place, places) for place in range(places)]
    remote = RemoteBatches(network, [service.address for service in services], ORDER, run=RUN)
    expected = list(DATA.batches(3, epochs=2, seed=5))[:300]
    assert [flatten(batch) for batch in remote] == [flatten(batch) for batch in expected]
    assert all(service.status().batches >= 40 for service in services)
    assert remote.stats()["bytes_received"] > 0


def test_reading_can_begin_anywhere(network, start):
    start()
    remote = RemoteBatches(network, ["p0"], ORDER, run=RUN, start=231)
    expected = list(DATA.batches(3, epochs=2, seed=5))[231:300]
    assert [flatten(batch) for batch in remote] == [flatten(batch) for batch in expected]


def test_a_processor_gives_any_batch_and_its_replacement_the_same_bytes(start):
    first = start(1, 3)
    given = [ask(first, GetBatch(number, ORDER.fingerprint())) for number in (299, 0, 150, 0)]
    first.close()
    second = start(1, 3)
    again = [ask(second, GetBatch(number, ORDER.fingerprint())) for number in (299, 0, 150, 0)]
    assert [list(map(bytes, encode(each))) for each in given] == [list(map(bytes, encode(each))) for each in again]
    assert [each.body.number for each in given] == [299, 0, 150, 0]


def test_a_processor_keeps_a_few_groups_only(start):
    service = start()
    for number in range(0, 300, 10):
        ask(service, GetBatch(number, ORDER.fingerprint()))
        assert len(service._groups) <= GROUPS_KEPT
    status = service.status()
    assert (status.batches, status.last_batch, status.groups_read) == (30, 290, 5)


@pytest.mark.parametrize(
    ("body", "run", "reason"),
    [
        (AskStats(), RUN, "a data processor was sent AskStats"),
        (GetBatch(0, ORDER.fingerprint()), bytes(16), "another run"),
        (GetBatch(0, "elsewhere"), RUN, "batch 0 of data and order elsewhere"),
        (GetBatch(300, ORDER.fingerprint()), RUN, "batch 300: there are 300"),
    ],
)
def test_a_processor_refuses_what_it_can_not_answer(body, run, reason, start):
    with pytest.raises(WireError, match=reason):
        ask(start(), body, run)


@pytest.mark.parametrize(
    "other",
    [
        DataOrder(describe(DATA), 3, 300, 6),
        DataOrder(describe(DATA), 3, 300),
        DataOrder(describe(DATA), 4, 300, 5),
        DataOrder(describe(generated("tiny", 700, 1)), 3, 300, 5),
    ],
    ids=["another seed", "no shuffle", "another batch size", "other data"],
)
def test_batches_of_another_order_are_never_taken(other, network, start):
    start(order=other)
    remote = RemoteBatches(network, ["p0"], ORDER, run=RUN)
    with pytest.raises(WireError, match="the data processor at p0: batch 0 of data and order"):
        next(iter(remote))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda good: (GotBatch(1), good.buffers), "batch 1 came where 0 was due"),
        (lambda good: (GotBatch(0), good.buffers), "batch 1 came as batch 0"),
        (lambda good: (GotBatch(0), ()), "batch 0 has no buffers"),
        (lambda good: (AskStats(), ()), "AskStats came where batch 0 was due"),
        (lambda good: (Failed("WireError", "no"), ()), "the data processor at p0: no"),
    ],
)
def test_an_answer_that_is_none_is_refused(answer, reason, start):
    good = ask(start(), GetBatch(1, ORDER.fingerprint()))
    network = SimulatedNetwork()
    network.listen("p0", lambda *_: answer(good))
    with pytest.raises(WireError, match=reason):
        next(iter(RemoteBatches(network, ["p0"], ORDER, run=RUN)))


def test_what_can_not_be_is_refused(network):
    with pytest.raises(ConfigError, match="data processor 2 of 2"):
        DataProcessorService(lambda handler: network.listen("p", handler), ORDER, run=RUN, processor=2, processors=2)
    with pytest.raises(ConfigError, match="no data processors"):
        RemoteBatches(network, [], ORDER, run=RUN)
    with pytest.raises(ConfigError, match="num_batches is 0"):
        DataOrder(describe(DATA), 3, 0)
