"""The pipelines of several trainers: what leaves their caches does so in bounded blocks, and is counted."""

from __future__ import annotations

import pytest

from bagpipe.store.views import StoreView
from harness.covering import covered
from harness.events import train_with_events
from harness.explorer import FETCHES, INSERTS, WRITES_BACK, Together
from harness.trainers import DESIGNS, Several, World, run
from harness.world import assert_identical, make_batches

BATCHES = make_batches(9, size=9, last=2)
BARRIERS = {2: "barrier", 5: "barrier after", 6: "save"}


SCHEDULES = [(), (WRITES_BACK,), ((1, INSERTS), (2, FETCHES[0]))]


@pytest.mark.parametrize(*covered({"design": DESIGNS, "policy": ("lookahead", "lru"), "seed": (0, 1, 2)}))
def test_large_write_backs_come_in_blocks_of_bounded_size(design, policy, seed, monkeypatch):
    sizes, write_many = [], StoreView.write_many

    def noting(view, parts, passed=-1):
        sizes.append(sum(len(ids) for _, ids, _ in parts))
        write_many(view, parts, passed)

    monkeypatch.setattr(StoreView, "write_many", noting)
    monkeypatch.setattr("bagpipe.trainer.pipeline.STAGED_ROWS", 4)
    world = World(BATCHES, trainers=3)
    schedule, loop = SCHEDULES[seed], train_with_events(BARRIERS)
    found = run(world, seed, 2.0, schedule, loop, design=design, cache=60, policy=policy)
    assert_identical(world.reference(), found.state)
    assert max(sizes) == 4


@pytest.mark.parametrize(
    *covered({"design": DESIGNS, "policy": ("lookahead", "lru", "nocache"), "optimizer": ("adam", "sgd")})
)
def test_the_peak_of_a_trainer_counts_the_rows_that_it_updates(design, policy, optimizer):
    several = Several(World(BATCHES, optimizer, trainers=3), Together(1, 2.0), design=design, cache=60, policy=policy)
    found = several.run()
    caches = [one.loop.cache for one in several.ones]
    assert [cache.num_rows for cache in caches] == [0, 0, 0], "the last plan lets go of all"
    peaks = [stats["peak_rows"] for stats in found.stats]
    assert all(0 < peak <= sum(cache.capacity) for peak, cache in zip(peaks, caches, strict=True))
    if policy == "nocache":
        batch = max(sum(len(set(batch.sparse[n].values.flatten().tolist())) for n in batch.sparse) for batch in BATCHES)
        assert max(peaks) <= batch, "and nothing overlaps there"
