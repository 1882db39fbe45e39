"""Routes between trainers, beside lists made pair by pair, for any number of trainers; whole plans: test_partition."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.kernels import partition
from bagpipe.oracle.oracle import mask_type


def some_masks(random, trainers, count):
    """Sets of trainers, some empty and some of all, as flags and as masks."""
    flags = random.random((count, trainers)) < random.choice([0.0, 0.1, 0.6, 1.0], (count, 1))
    masks = mask_type(trainers)
    return flags, (flags * (masks(1) << np.arange(trainers, dtype=masks))).sum(1, dtype=masks)


@pytest.mark.parametrize("trainers", [2, 8, 9, 33, 64])
@pytest.mark.parametrize("counts", [(5, 0, 17, 8), (0, 0, 0, 0)])
def test_rows_go_from_each_sender_to_each_receiver_when_they_are_due(trainers, counts):
    random, tables, total = np.random.default_rng(trainers), np.cumsum([0, *counts]), sum(counts)
    (sends, senders), (gets, receivers) = (some_masks(random, trainers, total) for _ in range(2))
    when = random.integers(-1, 3, total).astype(np.int8)
    items, bounds = partition.route(tables, senders, receivers, when, 3, trainers)
    assert bounds.shape == (3 * trainers * trainers, len(tables))
    assert (bounds[0, 0], bounds[-1, -1]) == (0, len(items))
    for number, (time, sender, receiver) in enumerate(np.ndindex(3, trainers, trainers)):
        rows = np.flatnonzero((when == time) & sends[:, sender] & gets[:, receiver])
        assert items[bounds[number, 0] : bounds[number, -1]].tolist() == rows.tolist()
        assert (bounds[number] - bounds[number, 0]).tolist() == np.searchsorted(rows, tables).tolist()


def no_homes(num_tables):
    """Of tables whose places are numbered as their slots."""
    nothing, places = np.zeros(0, np.int64), np.zeros(0, np.int32)
    lists = np.full(num_tables, partition.ALIKE, np.int64)
    return partition.Homes(lists, np.zeros(1, np.int64), nothing, nothing.copy(), places, places.copy())


@pytest.mark.parametrize("seed", range(3))
def test_free_places_are_lists_whose_oldest_is_taken_first(seed):
    random, sizes = np.random.default_rng(seed), np.array([3, 3, 5, 5])
    begins = np.concatenate([[0], np.cumsum(sizes)])
    free = np.concatenate([np.arange(size, dtype=np.int32) for size in sizes])
    homes = partition.Homes(
        np.array([0, 2]), begins, np.zeros(4, np.int64), sizes.copy(), free, np.full(16, -1, np.int32)
    )
    lists, taken = [[(place, -1) for place in range(size)] for size in sizes], [[] for _ in sizes]
    for plan in range(60):
        number = int(random.integers(4))
        last = plan - int(random.integers(4))
        since = [by if by >= -1 else -2 - by for _, by in lists[number][:1]]
        assert partition.has_place(homes, number, last) == any(by <= last for by in since)
        if lists[number] and random.random() < 0.6:
            assert partition.take_place(homes, number) == lists[number][0]
            taken[number].append(lists[number].pop(0)[0])
        elif taken[number]:
            freed = plan if random.random() < 0.5 else partition.as_victim(plan)
            lists[number].append((taken[number].pop(), freed))
            partition.free_place(homes, number, *lists[number][-1])
        assert homes.num_free.tolist() == list(map(len, lists))


def test_fetched_rows_that_the_batch_lacks_are_brought_along_by_their_owner():
    one, mask, place = np.array([0, 1]), np.ones(1, np.uint8), np.zeros(1, np.int32)
    rows = partition.Used(one, np.array([3], np.int32), mask, mask, mask, place - np.int32(1))
    fetch = partition.Taken(
        one, np.array([4], np.int32), place.copy(), np.zeros(1, np.int8), *np.zeros((2, 1), np.int32),
        np.zeros(1, np.uint8),
    )  # fmt: skip
    slots = partition.Slots(
        np.zeros(1, np.int64), np.zeros(9, np.int64), np.arange(9, dtype=np.int32), np.array([1, 2, 3], np.uint8),
        np.full(1, partition.NEVER),
    )  # fmt: skip
    homes = no_homes(1)
    found = partition.Found(mask.copy(), mask.copy(), *np.zeros((2, 1), np.int8), *np.zeros((3, 1), np.int32))
    assert partition.move_in(fetch, slots, homes)
    nothing_before = one, np.zeros(0, np.int8)
    assert partition.track_owners(5, rows, fetch, slots, homes, True, 2, 3, found, *nothing_before) == 0
    assert fetch.readers.tolist() == [1]
    assert np.flatnonzero(slots.state & partition.BROUGHT == partition.brought_by(5)).tolist() == [4]
    assert slots.state[4] & partition.OWNER == 1
