"""The pipelines of several trainers: what leaves their caches does so in bounded blocks."""

from __future__ import annotations

import pytest

from bagpipe.store.views import StoreView
from several import DESIGNS, World, run
from support import assert_identical, make_batches
from trainer_events import train_with_events

BATCHES = make_batches(9, size=9, last=2)
BARRIERS = {2: "barrier", 5: "barrier after", 6: "save"}


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
@pytest.mark.parametrize("design", DESIGNS)
def test_large_write_backs_come_in_blocks_of_bounded_size(design, policy, monkeypatch):
    sizes, write_many = [], StoreView.write_many

    def noting(view, parts, passed=-1):
        sizes.append(sum(len(ids) for _, ids, _ in parts))
        write_many(view, parts, passed)

    monkeypatch.setattr(StoreView, "write_many", noting)
    monkeypatch.setattr("bagpipe.trainer.pipeline.STAGED_ROWS", 4)
    world = World(BATCHES, trainers=3)
    for seed, last in enumerate([(), ("write-back",), ((1, "prefetch"),)]):
        found = run(world, seed, 2.0, last, train_with_events(BARRIERS), design=design, cache=60, policy=policy)
        assert_identical(world.reference(), found.state)
    assert max(sizes) == 4
