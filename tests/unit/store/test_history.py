"""The loops of a store that remembers old values, beside their twins."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.kernels.idmap import IdMap
from bagpipe.store.history import NEVER, pick_earlier
from bagpipe.store.snapshot import take_old
from definitions.history import define_take_old
from definitions.idmap import IdMapByDict


@pytest.mark.parametrize("num_rows", [1, 5, 1000])
@pytest.mark.parametrize("count", [0, 1, 7, 300])
def test_rows_written_before_an_epoch_are_picked(num_rows: int, count: int) -> None:
    random = np.random.default_rng(num_rows + count)
    epochs = random.integers(0, 5, num_rows).astype(np.int32)
    epochs[random.random(num_rows) < 0.2] = NEVER
    positions = random.permutation(num_rows)[:count]
    positions[random.random(len(positions)) < 0.2] = -1
    for epoch in range(6):
        there = [position for position in positions.tolist() if position >= 0 and epochs[position] < epoch]
        found, before = pick_earlier(epochs, positions, epoch)
        assert found.tolist() == there
        assert before.tolist() == [epochs[position] for position in there]


@pytest.mark.parametrize("width", [1, 3, 48])
def test_old_values_are_taken_as_numpy_does_and_the_first_has_its_way(width: int) -> None:
    random = np.random.default_rng(width)
    first, size = 40, 60
    lines = random.permutation(size)[:25]
    index = np.full(size, -1, np.int32)
    index[lines] = np.arange(25)
    wanted = [random.random(25) < 0.7]
    wanted.append(wanted[0].copy())
    epochs = [np.full(25, 9, np.int32) for _ in range(2)]
    out = [np.zeros((25, width), np.float32) for _ in range(2)]
    asked = wanted[0].copy()
    known: dict[int, int] = {}
    for call in range(3):
        positions = random.permutation(150)[:70]
        before = np.full(70, call, np.int32)
        values = random.standard_normal((70, width), np.float32)
        for position in positions.tolist():
            known.setdefault(position, call)
        take_old(positions, before, values, first, index, wanted[0], epochs[0], out[0])
        define_take_old(positions, before, values, first, index, wanted[1], epochs[1], out[1])
    for pair in (wanted, epochs, out):
        assert np.array_equal(pair[0], pair[1])
    expected = [known.get(int(line) + first, 9) if asked[k] else 9 for k, line in enumerate(lines)]
    assert epochs[0].tolist() == expected


@pytest.mark.parametrize("size", [0, 1, 44, 45, 46, 3000, 5000])
def test_ids_beyond_the_first_are_forgotten_and_come_again(size: int) -> None:
    random = np.random.default_rng(size)
    ids = np.unique(random.integers(-(2**63), 2**63 - 1, 5000))
    ids = np.concatenate([random.permutation(ids)[:2500], np.arange(2500)])
    ours, twin = IdMap(), IdMapByDict()
    positions = [np.empty(5000, np.int64) for _ in range(2)]
    for some in (ours, twin):
        some.find_or_insert(ids, positions[0])
        some.truncate(size)
        some.truncate(size + 1)
        assert len(some) == size
    assert ours.find(ids, positions[0]) == twin.find(ids, positions[1]) == 5000 - size
    assert np.array_equal(positions[0], positions[1])
    again = random.permutation(ids)
    assert ours.find_or_insert(again, positions[0]) == twin.find_or_insert(again, positions[1]) == 5000 - size
    assert np.array_equal(positions[0], positions[1])
    assert np.array_equal(ours.ids(), twin.ids())
