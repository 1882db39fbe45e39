"""Rows that change their owners: one trainer at a time has a row to write, and the bits are right (I1, I4)."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bagpipe.cache import RowCache
from bagpipe.errors import BagpipeError
from bagpipe.trainer.row_sync import RowBuffers
from harness.events import train_with_events
from harness.examples import examples
from harness.explorer import SYNCS, any_stages
from harness.trainers import World, run
from harness.world import assert_identical, make_batches

BATCHES = make_batches(9, size=5, last=2)
REFERENCES = {}


def expected(world, trained=None):
    key = (world.optimizer, world.trainers, None if trained is None else tuple(batch.number for batch in trained))
    if key not in REFERENCES:
        REFERENCES[key] = world.reference(trained)
    return REFERENCES[key]


@examples(25)
@given(
    events=st.dictionaries(
        st.integers(0, 8), st.sampled_from(["evaluate", "save", "barrier", "barrier after", "skip", "norm"]), max_size=4
    ),
    seed=st.integers(0, 10**6),
    eagerness=st.sampled_from([0.0, 0.5, 2.0, 20.0]),
    last=any_stages(3),
    trainers=st.integers(2, 4),
    optimizer=st.sampled_from(["sgd", "rowwise_adagrad", "adam"]),
    delayed=st.booleans(),
    lookahead=st.sampled_from([2, 3, 5, "auto"]),
    policy=st.sampled_from(["lookahead", "lru"]),
    cache=st.integers(36, 60),
)
# Nothing is ever updated before a row changes its owner: it may not be written then.
@example({0: "skip", 1: "skip", 2: "skip"}, 0, 2.0, set(), 3, "sgd", True, 5, "lookahead", 60)
# A barrier right after a row has changed its owner.
@example({2: "barrier after", 4: "barrier", 5: "skip"}, 1, 0.0, {SYNCS}, 2, "sgd", True, 5, "lookahead", 60)
def test_rows_go_with_their_users_whatever_happens(
    events, seed, eagerness, last, trainers, optimizer, delayed, lookahead, policy, cache
):
    trained = [batch for number, batch in enumerate(BATCHES) if events.get(number) != "skip"]
    if not trained:
        return
    world = World(BATCHES, optimizer, trainers=trainers)
    found = run(
        world, seed, eagerness, last, train_with_events(events), delayed=delayed, lookahead=lookahead, policy=policy,
        cache=cache,
    )  # fmt: skip
    assert_identical(expected(world, trained), found.state)


def counted(patch, **settings):
    """How many rows have changed their owner in a run, which ends as it must."""
    moves, take = [], RowBuffers.take

    def counting(packing, moved, ids, buffers):
        moves.append(len(moved))
        take(packing, moved, ids, buffers)

    patch.setattr(RowBuffers, "take", counting)
    world = World(BATCHES, settings.pop("optimizer"), trainers=3)
    assert_identical(expected(world), run(world, **settings).state)
    return sum(moves)


@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad", "adagrad", "adam"])
def test_rows_change_their_owners_with_any_optimizer_unless_that_is_switched_off(monkeypatch, optimizer):
    assert counted(monkeypatch, optimizer=optimizer) > 0
    assert counted(monkeypatch, optimizer=optimizer, moving=False) == 0
    for design in ("partitioned", "replicated", "lrpp"):
        assert counted(monkeypatch, optimizer=optimizer, design=design) == 0


def test_rows_with_little_state_move_more_often(monkeypatch):
    moves = [counted(monkeypatch, optimizer=optimizer) for optimizer in ("sgd", "adagrad", "adam")]
    assert moves == sorted(moves, reverse=True)
    assert moves[0] > 2 * moves[2]


# Each defect takes a monkeypatch and puts itself in.


def the_old_owner_still_writes(patch):
    patch.setattr(RowCache, "give", lambda cache, table, slots: cache.dirty[cache.group[table]][slots])


def the_new_owner_does_not_write(patch):
    take = RowCache.take
    patch.setattr(RowCache, "take", lambda cache, table, ids, slots, _: take(cache, table, ids, slots, False))


def state_stays_behind(patch):
    take = RowBuffers.take

    def without(packing, moved, ids, buffers):
        for _, _, part in packing._tails(moved, buffers):
            part[:, :-1] = 0.5
        take(packing, moved, ids, buffers)

    patch.setattr(RowBuffers, "take", without)


def a_row_is_taken_for_another(patch):
    take = RowBuffers.take
    patch.setattr(
        RowBuffers, "take", lambda packing, moved, ids, buffers: take(packing, moved, ids[::-1].copy(), buffers)
    )


DEFECTS = {
    the_old_owner_still_writes: "is written by a barrier without being here",
    the_new_owner_does_not_write: "to be written after it changed its owner",
    state_stays_behind: "came to its new owner with another state",
    a_row_is_taken_for_another: "is written by a barrier without being here",
}


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_what_goes_wrong_with_a_move_is_found(monkeypatch, defect):
    defect(monkeypatch)
    world = World(BATCHES, "rowwise_adagrad", trainers=3)
    with pytest.raises(BagpipeError, match=DEFECTS[defect]):
        run(world, loop=train_with_events({3: "barrier", 6: "barrier after"}), lookahead=5)
