"""Several trainers read a row's optimizer state only where it is updated, and nothing ever looks at it elsewhere."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bagpipe.cache import RowCache
from bagpipe.store.views import StoreView
from harness.trainers import DESIGNS, World, run
from harness.world import assert_identical, make_batches

BATCHES = make_batches(9, size=9, last=2)


@pytest.fixture
def reads(monkeypatch):
    """How many rows are read while training, by trainer, table and columns; in the cache other columns become NaN."""
    found, read_many, insert = Counter(), StoreView.read_many, RowCache.insert

    def noted(view, parts, after=-1):
        for table, ids, values in parts:
            found[view._trainer, table, values.shape[1]] += len(ids)
        read_many(view, parts, after)

    def poisoned(cache, table, ids, slots, values):
        insert(cache, table, ids, slots, values)
        cache.data[cache.group[table]].numpy()[slots, values.shape[1] :] = np.nan

    monkeypatch.setattr(StoreView, "read_many", noted)
    monkeypatch.setattr(RowCache, "insert", poisoned)
    return found


@pytest.mark.parametrize(("policy", "delayed"), [("lookahead", True), ("lookahead", False), ("lru", True)])
@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_who_does_not_update_a_row_reads_its_vectors_only(reads, optimizer, policy, delayed):
    world = World(BATCHES, optimizer, "deepfm", trainers=3)
    found = run(world, design="owned", cache=60, policy=policy, delayed=delayed)
    assert_identical(world.reference(), found.state)
    layouts = world.make()[2]
    whole, narrow = (
        {rank: sum(reads[rank, t, getattr(layout, size)] for t, layout in enumerate(layouts)) for rank in range(3)}
        for size in ("width", "dim")
    )
    assert min(whole.values()) > 0
    assert min(narrow.values()) > 0
    assert sum(reads.values()) == sum(whole.values()) + sum(narrow.values())
    for rank, stats in enumerate(found.stats):
        mine = {key: rows for key, rows in reads.items() if key[0] == rank}
        assert stats["fetched_rows"] == sum(mine.values())
        assert stats["fetched_bytes"] == sum(4 * columns * rows for (_, _, columns), rows in mine.items())


@pytest.mark.parametrize(("design", "optimizer"), [("owned", "sgd"), *((each, "adam") for each in DESIGNS[1:])])
def test_rows_are_read_whole_where_they_have_no_state_or_their_readers_update_them(reads, design, optimizer):
    world = World(BATCHES, optimizer, "deepfm", trainers=3)
    found = run(world, design=design, cache=60)
    assert_identical(world.reference(), found.state)
    widths = [layout.width for layout in world.make()[2]]
    assert reads
    assert all(columns == widths[table] for _, table, columns in reads)
