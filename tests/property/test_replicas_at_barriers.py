"""Copies that all trainers have are written by one of them at a barrier, and never by none (I4)."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from harness.events import train_with_events
from harness.examples import examples
from harness.explorer import FETCHES, INSERTS, SYNCS, WRITES_BACK
from harness.trainers import World, run
from harness.world import assert_identical, make_batches

BATCHES = make_batches(9, size=5, last=2)


@examples(20)
@given(
    events=st.dictionaries(
        st.integers(0, 8), st.sampled_from(["barrier", "barrier after", "skip", "save"]), min_size=2
    ),
    seed=st.integers(0, 10**6),
    last=st.sampled_from([(), (SYNCS,), ((0, WRITES_BACK),), (WRITES_BACK,), ((1, INSERTS),), ((1, FETCHES[0]),)]),
    design=st.sampled_from(["replicated", "lrpp"]),
    delayed=st.booleans(),
    policy=st.sampled_from(["lookahead", "lru"]),
    cache=st.integers(36, 60),
)
# A barrier between an iteration without a step and the leaving of rows that it leaves to one trainer.
@example({0: "save", 1: "barrier", 6: "skip", 7: "save"}, 145, (SYNCS,), "lrpp", True, "lookahead", 58)
# Rows that leave with an iteration without a step are written by a barrier right after it, by whom they are left to.
@example(
    {2: "skip", 3: "barrier", 4: "skip", 5: "barrier", 6: "skip", 7: "barrier"}, 0, (), "lrpp", True, "lookahead", 36
)
@example({3: "barrier after", 4: "skip", 5: "barrier"}, 0, (WRITES_BACK,), "lrpp", False, "lookahead", 36)
def test_each_update_is_written_once_by_one_trainer(events, seed, last, design, delayed, policy, cache):
    trained = [batch for number, batch in enumerate(BATCHES) if events.get(number) != "skip"]
    if not trained:
        return
    world = World(BATCHES, "momentum", trainers=3)
    found = run(
        world, seed, 2.0, last, train_with_events(events), design=design, delayed=delayed, policy=policy, cache=cache
    )
    assert_identical(world.reference(trained), found.state)


def written(design, **settings):
    """Rows that all trainers together write, in a run with barriers and room for all rows."""
    events = dict.fromkeys(range(9), "barrier after")
    found = run(World(BATCHES, trainers=3), loop=train_with_events(events), design=design, **settings)
    return sum(stats["written_rows"] for stats in found.stats)


@pytest.mark.parametrize("delayed", [True, False])
def test_replicas_write_no_more_than_owners(delayed):
    assert (
        written("owned", delayed=delayed) == written("replicated", delayed=delayed) == written("lrpp", delayed=delayed)
    )
