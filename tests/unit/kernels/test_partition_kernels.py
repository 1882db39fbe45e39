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


def test_fetched_rows_that_the_batch_lacks_are_brought_along_by_their_owner():
    one, mask, place = np.array([0, 1]), np.ones(1, np.uint8), np.zeros(1, np.int32)
    rows = partition.Used(one, np.array([3], np.int32), mask, mask, mask, place - np.int32(1))
    fetch = partition.Taken(one, np.array([4], np.int32), place, np.zeros(1, np.int8), np.zeros(1, np.uint8))
    slots = partition.Slots(
        np.zeros(1, np.int64), np.zeros(9, np.int64), np.array([1, 2, 3], np.uint8), np.full(1, partition.NEVER)
    )  # fmt: skip
    found = partition.Found(mask.copy(), mask.copy(), *np.zeros((2, 1), np.int8), place.copy())
    assert partition.track_owners(5, rows, fetch, slots, True, found, one, np.zeros(0, np.int8)) == 0
    assert fetch.readers.tolist() == [1]
    assert np.flatnonzero(slots.state & partition.BROUGHT == partition.brought_by(5)).tolist() == [4]
    assert slots.state[4] & partition.OWNER == 1
