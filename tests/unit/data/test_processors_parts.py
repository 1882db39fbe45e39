"""What data processors are made of, without processes: descriptions, slots, messages, and the loop of a processor."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
from dataclasses import dataclass, replace

import numpy as np
import pytest

from bagpipe.data import PRESETS, Generated, IndexedDataset, Shards, find_preset, generated, write
from bagpipe.data.described import describe, fingerprint, open_described
from bagpipe.data.order import BatchOrder
from bagpipe.data.processors import child
from bagpipe.data.processors.channel import Channel
from bagpipe.data.processors.pool import SLOTS, Job, read
from bagpipe.data.processors.slot import Slot
from bagpipe.data.samples import Column, Samples
from bagpipe.errors import ConfigError, DeadlineError, PipelineError, ShardError
from bagpipe.types import Table
from harness.wire import until


def same(first, second):
    """Whether two data sets have the same first samples, to the bit."""
    found = []
    for dataset in (first, second):
        samples = dataset.gather(np.arange(min(300, dataset.num_samples)))
        arrays = [samples.dense, samples.labels]
        for name, column in samples.columns.items():
            found.append(name)
            arrays += [part for part in (column.values, column.offsets, column.weights) if part is not None]
        found.append(([(array.dtype, array.shape, array.tobytes()) for array in arrays], dataset.tables))
    half = len(found) // 2
    return found[:half] == found[half:]


def through_json(dataset):
    return open_described(json.loads(json.dumps(describe(dataset))))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tiny"
    write(generated("tiny", 2000), path, shard_samples=700)
    return Shards(path)


@pytest.mark.parametrize("name", ["tiny", "avazu-like", "movielens-like"])
def test_generated_data_is_the_same_when_opened_from_its_description(name):
    for dataset in (
        generated(name, 400, seed=5),
        generated(name, 400, zipf=1.1, drift=0.3, day_samples=100, burst=0.2, burst_samples=50),
        generated(name, 400, top_share=0.7),
        Generated(find_preset(name).scaled(0.5), 400, 2),
    ):
        assert same(dataset, through_json(dataset))


def test_every_preset_can_be_described():
    for preset in PRESETS.values():
        assert json.loads(json.dumps(describe(generated(preset, 10))))["samples"] == 10


def test_shards_and_parts_are_the_same_when_opened_from_their_description(shards, monkeypatch):
    monkeypatch.chdir(shards.path.parent)
    for dataset in (shards, Shards(shards.path.name), shards.part(100, 900), shards.part(100, 900).part(5, 600)):
        described = describe(dataset)
        monkeypatch.chdir("/")  # another process may be anywhere
        opened = open_described(described)
        monkeypatch.chdir(shards.path.parent)
        assert same(dataset, opened)


def test_shards_that_were_replaced_are_refused(shards, tmp_path):
    shutil.copytree(shards.path, tmp_path / "data")
    described = describe(Shards(tmp_path / "data"))
    shutil.rmtree(tmp_path / "data")
    write(generated("tiny", 2000, seed=1), tmp_path / "data")
    with pytest.raises(ShardError, match="was replaced by other data"):
        open_described(described)


def test_what_no_other_process_can_open_is_refused_by_name(shards):
    class InMemory(IndexedDataset):
        tables, num_dense, num_samples = (Table("t", 3),), 0, 5

        def gather(self, samples):
            raise AssertionError

    @dataclass(frozen=True)
    class Flat:
        def masses(self, edges):
            return np.diff(edges) / edges[-1]

    preset = find_preset("tiny").reshaped(Flat())
    with pytest.raises(ConfigError, match=r"a InMemory is in the memory of this process.*processes at 0"):
        describe(InMemory().part(0, 3))
    with pytest.raises(ConfigError, match=r"'user' are drawn by a Flat.*processes at 0"):
        describe(Generated(preset, 10, 0))
    with pytest.raises(ConfigError, match="no kind of data set 'frame'"):
        open_described({"kind": "frame"})


def test_a_fingerprint_tells_data_apart_and_not_places(shards, tmp_path):
    shutil.copytree(shards.path, tmp_path / "moved")
    assert fingerprint(Shards(tmp_path / "moved")) == fingerprint(shards)
    preset = find_preset("tiny")
    different = [
        shards,
        shards.part(0, 2000),
        shards.part(0, 1999),
        shards.part(1, 2000),
        generated("tiny", 2000),
        generated("tiny", 2001),
        generated("tiny", 2000, seed=1),
        generated("tiny", 2000, burst=0.5),
        generated(replace(preset, ctr=0.3), 2000),
    ]
    assert len({fingerprint(dataset) for dataset in different}) == len(different)


def flat(samples):
    columns = [(name, c.values, c.offsets, c.weights) for name, c in samples.columns.items()]
    return [samples.dense, samples.labels, *(part for column in columns for part in column if part is not None)]


def assert_same_samples(expected, found):
    for one, other in zip(flat(expected), flat(found), strict=True):
        if isinstance(one, str):
            assert one == other
        else:
            assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())


def test_a_slot_gives_back_what_was_put_in_and_grows_for_larger_bags(shards):
    slot = Slot.make()
    reader = Slot(os.dup(slot.descriptor))
    sizes = []
    for stop in (1, 50, 3, 2000, 700):
        samples = shards.gather(np.arange(stop))
        found = reader.take(*slot.put(samples), stop)
        assert_same_samples(samples, found)
        sizes.append(os.fstat(slot.descriptor).st_size)
    assert sizes == sorted(sizes)
    assert sizes[3] > sizes[2]
    assert sizes[4] == sizes[3]
    slot.put(shards.gather(np.arange(1000, 1700)))
    assert_same_samples(shards.gather(np.arange(700)), found)  # what was taken is a copy
    slot.close()
    reader.close()


def test_samples_without_numeric_features_and_with_empty_bags_pass_through_a_slot():
    bags = Column(np.empty(0, np.int64), np.zeros(5, np.int64), np.empty(0, np.float32))
    samples = Samples(np.empty((4, 0), np.float32), {"": bags}, np.ones(4, np.float32))
    slot = Slot.make()
    assert_same_samples(samples, slot.take(*slot.put(samples), 4))
    slot.close()


def test_memory_can_not_shrink_under_its_reader(shards):
    slot = Slot.make()
    slot.put(shards.gather(np.arange(100)))
    with pytest.raises(PermissionError):
        os.ftruncate(slot.descriptor, 10)
    slot.close()
    slot.close()  # again does nothing


def test_a_message_that_does_not_fit_the_slot_is_refused(shards):
    slot = Slot.make()
    num_bytes, parts = slot.put(shards.gather(np.arange(100)))
    kind, feature, shape, start = parts[2]
    for wrong, text in (
        ((10**9, parts, 100), "1000000000 bytes in a slot of"),
        ((-1, parts, 100), "-1 bytes"),
        ((num_bytes, parts, 99), "100 samples.*instead of 99"),
        ((num_bytes, [*parts[:2], [kind, feature, [10**9, 1], start], *parts[3:]], 100), "of shape .1000000000, 1"),
        ((num_bytes, [*parts[:2], [kind, feature, [-1, -1], start], *parts[3:]], 100), "of shape .-1, -1"),
        ((num_bytes, [*parts[:2], [kind, feature, shape, -8], *parts[3:]], 100), "at byte -8"),
        ((num_bytes, [*parts[:2], [kind, feature, [50, 1], start], *parts[3:]], 100), "instead of 100"),
    ):
        with pytest.raises(PipelineError, match=text):
            slot.take(*wrong)
    slot.close()


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield tuple(map(Channel, ends))
    for end in ends:
        end.close()


def test_messages_arrive_whole_and_in_order(pair):
    ours, theirs = pair
    large = {"text": "x" * 3_000_000}
    thread = threading.Thread(target=lambda: [ours.send(message) for message in ({}, large, {"n": 2})])
    thread.start()
    assert [theirs.receive(), theirs.receive(5), theirs.receive()] == [{}, large, {"n": 2}]
    thread.join()


def test_a_stream_that_ends_says_so_also_in_the_middle_of_a_message():
    ours, theirs = socket.socketpair()
    ours.sendall(b"\x10\0\0\0{")
    ours.close()
    channel = Channel(theirs)
    assert channel.receive() is None
    assert not channel.send({"free": 0})
    channel.close()


def test_a_wait_for_a_message_has_an_end(pair):
    with pytest.raises(DeadlineError):
        pair[0].receive(0.01)


def test_a_message_of_absurd_length_is_refused():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(PipelineError, match="4294967295 bytes"):
            Channel(theirs).receive()


class Counted(IndexedDataset):
    """Counts what is read."""

    def __init__(self, whole):
        self.tables, self.num_dense, self.num_samples = whole.tables, whole.num_dense, whole.num_samples
        self.whole, self.groups = whole, 0
        self.taken, self.most_ahead = 0, 0

    def gather(self, samples):
        self.groups += 1
        self.most_ahead = max(self.most_ahead, self.groups - self.taken)
        return self.whole.gather(samples)


def test_a_processor_reads_no_more_than_it_has_slots_for_and_ends_with_its_consumer(shards, pair, monkeypatch):
    ours, theirs = pair
    counted = Counted(shards)
    monkeypatch.setattr(child, "open_described", lambda _: counted)
    job = Job({}, BatchOrder(2000, 1, None), range(2000), 64)
    slots = [Slot.make() for _ in range(SLOTS)]
    thread = threading.Thread(
        target=child.serve, args=(theirs, job.message(0, 1, []), [Slot(os.dup(slot.descriptor)) for slot in slots])
    )
    thread.start()
    messages = [ours.receive() for _ in range(SLOTS)]
    until(lambda: counted.groups == SLOTS + 1)
    sizes = [os.fstat(slot.descriptor).st_size for slot in slots]
    for group in range(SLOTS, 10):
        counted.taken += 1
        ours.send({"free": messages[-SLOTS]["slot"]})
        messages.append(ours.receive())
        until(lambda group=group: counted.groups == group + 2)
    assert counted.most_ahead == SLOTS + 1
    assert [message["group"] for message in messages] == list(range(10))
    assert sum(os.fstat(slot.descriptor).st_size for slot in slots) < 2 * sum(sizes)
    ours.close()
    thread.join(5)
    assert not thread.is_alive()
    for slot in slots:
        slot.close()


@pytest.mark.parametrize(
    ("described", "kind"), [({"kind": "frame"}, "ConfigError"), ({"kind": "shards"}, "failure: KeyError: 'path'")]
)
def test_a_processor_tells_what_went_wrong(pair, described, kind):
    ours, theirs = pair
    ours.send(Job(described, BatchOrder(10, 5, None), range(2), 1).message(0, 1, []))
    child.work(theirs)
    message = ours.receive()
    if "error" in message:
        assert message["error"] == kind
        assert "'frame'" in message["message"]
    else:
        assert f"failure: {message['failure']}" == kind
        assert "open_described" in message["trace"]


@pytest.mark.parametrize(
    "wrong", [{"epochs": -1}, {"start": -1}, {"processes": 0}, {"deadline_s": 0.0}, {"deadline_s": float("nan")}]
)
def test_wrong_arguments_are_refused_at_once_and_by_name(shards, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        read(shards, 10, **wrong)
