"""Caches that hold different rows: each trainer has places of its own, and guests for a plan; the bits are right (I1)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import CapacityError, ConsistencyError
from bagpipe.oracle import capacity as capacity_module
from bagpipe.oracle import partition as partition_module
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.partition import Division, Partition
from bagpipe.oracle.places import TURNS, Places, make_places, num_homes
from bagpipe.oracle.reader import CutIds
from bagpipe.types import Table
from definitions.division import tight_places
from harness.events import train_with_events
from harness.examples import examples
from harness.explorer import INSERTS, LOOP, SYNCS, WRITES_BACK, any_stages
from harness.trainers import World, run
from harness.world import assert_identical, make_batches

BATCHES = make_batches(12, size=5, last=2)
EXPECTED = {}


def expected(world):
    key = (world.optimizer, world.trainers, world.assign)
    if key not in EXPECTED:
        EXPECTED[key] = world.reference()
    return EXPECTED[key]


def tight(monkeypatch, spare=0, headroom=1.0):
    """Let caches hold no more rows than the slots of one, each at its owner; guests as many as the first batches say,
    or a part of that, so that the cache is divided anew."""

    def make(capacity, used, limits, trainers, *, moving):
        del limits, moving
        return tight_places(capacity, [max(1, round(headroom * rows)) for rows in used], trainers, spare)

    monkeypatch.setattr(capacity_module, "make_places", make)
    monkeypatch.setattr(capacity_module, "num_bytes", lambda *_: 2**60)  # places may take more than the slots did


@examples(40)
@given(
    seed=st.integers(0, 10**6),
    eagerness=st.sampled_from([0.0, 0.5, 2.0, 20.0]),
    last=any_stages(3),
    trainers=st.integers(2, 4),
    optimizer=st.sampled_from(["sgd", "rowwise_adagrad"]),
    assign=st.sampled_from(["contiguous", "aware"]),
    design=st.sampled_from(["owned", "partitioned"]),
    delayed=st.booleans(),
    lookahead=st.sampled_from([1, 2, 3, 5, "auto"]),
    policy=st.sampled_from(["lookahead", "lru", "frequency"]),
    cache=st.integers(36, 60),
    spare=st.sampled_from([0, 3, 12]),
    headroom=st.sampled_from([0.8, 1.0, 1.2]),
    events=st.dictionaries(
        st.integers(0, 11), st.sampled_from(["evaluate", "save", "barrier", "barrier after", "norm"]), max_size=2
    ),
)
def test_tight_places_change_no_bit_under_any_schedule(
    seed, eagerness, last, trainers, optimizer, assign, design, delayed, lookahead, policy, cache, spare, headroom,
    events,
):  # fmt: skip
    world = World(BATCHES, optimizer, trainers=trainers, assign=assign)
    with pytest.MonkeyPatch.context() as patch:
        tight(patch, spare, headroom)
        found = run(
            world, seed, eagerness, last, train_with_events(events), design=design, delayed=delayed,
            lookahead=lookahead, policy=policy, cache=cache, policy_options={"sample": 3},
        )  # fmt: skip
    assert_identical(expected(world), found.state)
