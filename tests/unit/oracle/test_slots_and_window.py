"""Rings: free slots of a group, and the batches of a shard."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from bagpipe.kernels.oracle import Batch, read, unread
from bagpipe.kernels.window_map import address_of
from bagpipe.oracle.oracle import mask_type
from bagpipe.oracle.shard import Shard
from bagpipe.oracle.slots import AddressedSlots, Group, Slots
from bagpipe.oracle.tables import OracleTable


@pytest.mark.parametrize("capacity", [1, 2, 7])
def test_slots_are_a_queue(capacity: int) -> None:
    random = np.random.default_rng(capacity)
    slots, twin, used = Slots(capacity), deque((slot, -1) for slot in range(capacity)), []
    for plan in range(200):
        count = int(random.integers(0, len(twin) + 1))
        taken, freed_by = slots.take(count)
        expected = [twin.popleft() for _ in range(count)]
        assert list(zip(taken.tolist(), freed_by.tolist(), strict=True)) == expected
        used += taken.tolist()
        random.shuffle(used)
        leaving, used = used[: len(used) // 2 + 1], used[len(used) // 2 + 1 :]
        slots.free(np.array(leaving, np.int32), plan)
        twin.extend((slot, plan) for slot in leaving)
        assert slots.num_free == len(twin)


@pytest.mark.parametrize("first", [0, 5, 17, 20])
def test_addressed_slots_that_were_freed_longest_ago_come_first(first: int) -> None:
    random = np.random.default_rng(first)
    slots, freed_by, used = AddressedSlots(20, first), dict.fromkeys(range(20), -1), set[int]()
    for plan in range(200):
        free = sorted(set(range(20)) - used, key=lambda slot: (slot < first, freed_by[slot], slot))
        count = int(random.integers(0, len(free) + 1))
        chosen, by = slots.take(count)
        assert chosen.tolist() == free[:count]
        assert chosen.dtype == np.int32
        assert by.tolist() == [freed_by[slot] for slot in chosen.tolist()]
        used |= set(chosen.tolist())
        leaving = random.permutation(sorted(used))[: random.integers(0, len(used) + 1)].astype(np.int32)
        slots.free(leaving, plan // 3)
        used -= set(leaving.tolist())
        freed_by |= dict.fromkeys(leaving.tolist(), plan // 3)


def test_a_group_collects_and_spreads_the_parts_of_its_tables() -> None:
    bounds, values = np.array([0, 2, 3, 3, 6]), np.array([10, 11, 20, 40, 41, 42])
    for tables, expected in ([0, 1, 2, 3], values), ([0, 3], [10, 11, 40, 41, 42]), ([2], []), ([1, 2], [20]):
        group = Group(0, tables, 1)
        own = group.collect(values, bounds)
        assert own.tolist() == list(expected)
        copied = np.zeros_like(values)
        group.spread(own, copied, bounds)
        assert group.collect(copied, bounds).tolist() == own.tolist()
        assert copied.sum() == own.sum()


@pytest.mark.parametrize("trainers", [1, 3])
def test_a_shard_keeps_its_batches_through_wraps_and_growth(trainers: int) -> None:
    random = np.random.default_rng(5)
    tables = [OracleTable("a", 50), OracleTable("b", 50), OracleTable("c", 50)]
    shard = Shard(tables, [0, 2], 6, mask_type(trainers) if trainers > 1 else None)
    features, last_ids, gaps = np.arange(4), np.full(3, 49, np.uint64), np.zeros((3, 7), np.int64)
    twin, first = deque[tuple[list[int], list[int]]](), 3
    for _ in range(3000):
        if len(twin) == 6 or (twin and random.random() < 0.5):
            counts, content = twin.popleft()
            begins = shard.rings.begins[:, first % 8]
            assert np.diff(begins).tolist() == counts
            here = slice(begins[0], begins[-1])
            assert shard.rings.rows[here].tolist() == content
            if trainers > 1:
                assert shard.users.later[here].tolist() == [row % 8 for row in content]
            first += 1
        else:
            ids = [random.integers(0, 50, random.integers(0, 40)) * (random.random() < 0.8) for _ in range(3)]
            positions = np.cumsum([0, *map(len, ids)])
            addresses = np.array([address_of(own) for own in ids], np.uint64)
            inverse, counts = np.empty(positions[-1], np.int32), np.zeros(3, np.int64)
            batch = Batch(addresses, positions, features, last_ids, inverse, counts, gaps)
            iteration = first + len(twin)
            shard.enter(batch, iteration, len(twin), 0)
            assert read(shard.state, shard.rings, batch, shard.previous, iteration, len(twin), 0) == -1
            unique = [list(dict.fromkeys(own.tolist())) for own in (ids[0], ids[2])]
            content = [*unique[0], *(row + 50 for row in unique[1])]
            for t, own in zip((0, 2), unique, strict=True):
                np.testing.assert_array_equal(np.array(own)[inverse[positions[t] : positions[t + 1]]], ids[t])
            if trainers > 1:
                begin = shard.rings.begins[0, iteration % 8]
                shard.users.later[begin : begin + len(content)] = np.array(content) % 8
            shard.entered(iteration)
            twin.append(([len(own) for own in unique], content))
    assert len(shard.rings.rows) < 4 * 6 * 80


@pytest.mark.parametrize("mapped", [False, True])
def test_a_batch_that_was_read_can_be_taken_back(mapped: bool) -> None:
    tables = [OracleTable("a", 9)]
    shard = Shard(tables, [0], 4, mapped=mapped)

    def state() -> list[list[int]]:
        begins = shard.rings.begins
        used = slice(begins[0, 0], begins[1, 0])
        return [shard.state.last_use.tolist(), shard.rings.next_use[used].tolist(), shard.state.location.tolist()]

    def enter(iteration: int, ids: list[int]) -> int:
        own = np.array(ids)
        gaps, counts = np.zeros((1, 5), np.int64), np.zeros(1, np.int64)
        positions, inverse = np.array([0, len(own)]), np.empty(len(own), np.int32)
        addresses = np.array([address_of(own)], np.uint64)
        batch = Batch(addresses, positions, np.array([0, 1]), np.array([8], np.uint64), inverse, counts, gaps)
        shard.enter(batch, iteration, iteration, 0)
        return read(shard.state, shard.rings, batch, shard.previous, iteration, iteration, 0)

    assert enter(0, [3, 4, 3, 5]) == -1
    shard.entered(0)
    before = state()
    for bad in (9, -1, 2**63 - 1, -(2**63)):
        assert enter(1, [5, 8, 3, bad, 2]) == 0
        assert state() == before
    assert enter(1, [5, 8]) == -1
    assert state() != before
    unread(shard.state, shard.rings, shard.previous, 1, 1, 0)
    assert state() == before
