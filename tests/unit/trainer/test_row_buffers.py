"""Rows of lists to buffers and back: gradients scaled, sums in order of rank, vectors without their state."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagpipe import optim
from bagpipe.cache import VACANT, RowCache
from bagpipe.initial import Constant
from bagpipe.layout import RowLayout
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_plan import Routes
from bagpipe.trainer.row_sync import RowBuffers
from bagpipe.types import Table

DIMS = (3, 2, 5)
"""The second table is frozen; those of others have Adagrad's state behind their vectors."""


def make():
    optimizers = [optim.Adagrad(0.1), optim.Frozen(), optim.Adagrad(0.1)]
    layouts = [
        RowLayout(Table(f"t{number}", 20), (dim,), optimizer, Constant(0.0))
        for number, (dim, optimizer) in enumerate(zip(DIMS, optimizers, strict=True))
    ]
    widths = [layout.width for layout in layouts]
    cache = RowCache(widths, [12] * len(set(widths)), torch.device("cpu"))
    random = np.random.default_rng(0)
    for data in cache.data:
        data.copy_(torch.from_numpy(random.standard_normal(tuple(data.shape)).astype(np.float32)))
    return RowBuffers(layouts, cache), cache


def lists(*of_ranks):
    """For each rank a list for each table."""
    items = [item for of_tables in of_ranks for table in of_tables for item in table]
    counts = np.array([[len(table) for table in of_tables] for of_tables in of_ranks])
    ends = np.cumsum(counts.ravel()).reshape(counts.shape)
    starts = np.concatenate([[0], ends[:-1, -1]])[:, None]
    return Routes(np.array(items, np.int32), np.concatenate([starts, ends], 1).astype(np.int64))


def row_list(*of_tables):
    slots = [slot for table in of_tables for slot in table]
    bounds = np.cumsum([0, *map(len, of_tables)])
    return RowList(np.arange(len(slots), dtype=np.int64), np.array(slots, np.int32), bounds)


def gradients(rows=6):
    random = np.random.default_rng(1)
    return {t: torch.from_numpy(random.standard_normal((rows, DIMS[t])).astype(np.float32)) for t in (0, 2)}


def test_vectors_travel_without_the_state_behind_them():
    packing, cache = make()
    other, theirs = make()
    for data in theirs.data:
        data.fill_(-1.0)
    send = lists([[4, 1], [], [7]], [[], [3], []], [[], [], []])
    nothing = lists(*[[[], [], []]] * 3)
    buffers = packing.vectors(send, nothing)
    assert [len(buffer) for buffer in buffers] == [2 * 3 + 5, 2, 0]
    assert [len(room) for room in packing.room_for_vectors(send, nothing)] == [2 * 3 + 5, 2, 0]
    other.put_vectors(send, buffers)
    for table, slots in ((0, [4, 1]), (1, [3]), (2, [7])):
        mine, data = cache.data[cache.group[table]], theirs.data[theirs.group[table]]
        assert torch.equal(data[slots, : DIMS[table]], mine[slots, : DIMS[table]])
        assert (data[slots, DIMS[table] :] == -1).all()
        assert (data[[slot for slot in range(12) if slot not in slots]] == -1).all()


def test_rows_that_move_bring_their_state_and_whether_they_are_to_be_written():
    packing, cache = make()
    other, theirs = make()
    for data in theirs.data:
        data.fill_(-1.0)
    cache.insert(0, np.array([40, 41]), np.array([4, 1], np.int32), np.ones((2, 6), np.float32))
    cache.insert(2, np.array([70]), np.array([7], np.int32), np.full((1, 10), 2, np.float32))
    cache.mark_updated(0, np.array([1], np.int32))
    send, moved = lists([[4, 1], [3], [7]], [[2], [], []]), lists([[1], [], [7]], [[], [], []])
    buffers = packing.vectors(send, moved)
    packing.give(moved, buffers)
    assert [len(buffer) for buffer in buffers] == [2 * 3 + 2 + 5 + (3 + 1) + (5 + 1), 3]
    assert not any(dirty.any() for dirty in cache.dirty), "who has given it away does not write it"
    assert [cache.tenant_table[cache.group[t]][slot] for t, slot in ((0, 4), (0, 1), (2, 7))] == [0, VACANT, VACANT]
    other.put_vectors(send, buffers)
    other.take(moved, np.array([41, 70]), buffers)
    assert torch.equal(theirs.data[theirs.group[0]][1], torch.ones(6))
    assert torch.equal(theirs.data[theirs.group[2]][7], torch.full((10,), 2.0))
    assert (theirs.data[theirs.group[0]][4] == torch.tensor([1.0] * 3 + [-1.0] * 3)).all(), "sent, but not moved"
    [[rows]] = theirs.take_dirty()
    assert (rows.table, rows.ids.tolist()) == (0, [41])
    assert theirs.tenant_id[theirs.group[2]][7] == 70


def test_gradients_are_scaled_by_the_number_of_samples_and_frozen_rows_have_none():
    packing, _ = make()
    given = gradients()
    send = lists([[0, 5], [1, 2], [3]], [[], [0], []])
    buffers = packing.gradients(send, given, 7)
    expected = np.concatenate([(given[0][[0, 5]].numpy() * np.float32(7)).ravel(), given[2][3].numpy() * np.float32(7)])
    assert buffers[0].numpy().tobytes() == expected.tobytes()
    assert len(buffers[1]) == 0


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_sums_start_at_zero_and_go_in_order_of_rank(order):
    packing, _ = make()
    rows = row_list([4, 1], [9], [7])
    add = lists([[0, 1], [0], [0]], [[1], [0], []], [[0], [], [0]])
    random = np.random.default_rng(order[0])
    received = [torch.from_numpy(random.standard_normal(n).astype(np.float32) * 1e3**k)
                for k, n in zip(order, (2 * 3 + 5, 3, 3 + 5), strict=True)]  # fmt: skip
    received[0][0] = -0.0  # plus +0.0 is +0.0
    found = packing.sums(rows, add, received, 10)
    expected = {0: np.zeros((2, 3), np.float32), 2: np.zeros((1, 5), np.float32)}
    for (items, last), buffer in zip((([0, 1], [0]), ([1], []), ([0], [0])), received, strict=True):
        values = buffer.numpy()
        expected[0][items] += values[: 3 * len(items)].reshape(-1, 3)
        expected[2][last] += values[3 * len(items) :].reshape(-1, 5)
    flat = np.concatenate([expected[0].ravel(), expected[2].ravel()]) / np.float32(10)
    assert found.numpy().tobytes() == flat.tobytes()
    tables = dict(packing.tables(rows, found))
    assert sorted(tables) == [0, 2]
    assert [tuple(part.shape) for part in tables.values()] == [(2, 3), (1, 5)]


def test_nothing_is_a_buffer_too():
    packing, _ = make()
    empty = lists([[], [], []], [[], [], []])
    assert [len(buffer) for buffer in packing.gradients(empty, {}, 0)] == [0, 0]
    assert [len(buffer) for buffer in packing.vectors(empty, empty)] == [0, 0]
    packing.put_vectors(empty, [torch.empty(0)] * 2)
    rows = row_list([], [], [])
    assert len(packing.sums(rows, empty, [torch.empty(0)] * 2, 4)) == 0
    assert list(packing.tables(rows, torch.empty(0))) == []
