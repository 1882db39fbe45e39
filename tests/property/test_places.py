"""Caches that hold different rows, with places of their own and guests for a plan: the bits are right (I1)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import BagpipeError, CapacityError
from bagpipe.oracle import capacity as capacity_module
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.partition import Division, Partition
from bagpipe.oracle.places import TURNS, make_places
from bagpipe.oracle.reader import CutIds
from bagpipe.policy_options import PolicyOptions
from bagpipe.types import Table
from definitions.division import tight_places
from harness.events import train_with_events
from harness.examples import examples
from harness.explorer import SYNCS, WRITES_BACK, any_stages
from harness.trainers import World, run
from harness.world import TABLES, assert_identical, make_batches

BATCHES = make_batches(12, size=5, last=2)
EXPECTED = {}


def expected(world):
    key = (world.optimizer, world.trainers, world.assign)
    if key not in EXPECTED:
        EXPECTED[key] = world.reference()
    return EXPECTED[key]


def tight(monkeypatch, spare=0, headroom=1.0):
    """Let caches hold no more rows than the slots of one, each at its owner; guests as many as the first batches say,
    or a part of that at first, so that the cache is divided anew."""
    parts = iter([headroom])

    def make(capacity, used, limits, trainers, *, moving):
        del limits, moving
        part = next(parts, 1.0)
        return tight_places(capacity, [max(1, round(part * rows)) for rows in used], trainers, spare)

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


def guests_do_not_wait(patch):
    """A trainer reads rows ahead of time into places that an iteration in training reads."""
    fetch, sharing = Division._fetch, Oracle._sharing
    # Of many new rows, all are trainer 0's.
    patch.setattr(Oracle, "_sharing", lambda *args: replace(
        found := sharing(*args), homes=np.zeros_like(found.homes)
    ))  # fmt: skip

    def hasty(division, rank):
        found = fetch(division, rank)
        return replace(found, slot_after=np.where(found.whole, found.slot_after, -1).astype(np.int32))

    patch.setattr(Division, "_fetch", hasty)


def homes_do_not_wait(patch):
    """A row is read into a place whose tenant is still to be copied out."""
    fetch = Division._fetch
    patch.setattr(Division, "_fetch", lambda division, rank: replace(
        found := fetch(division, rank), slot_after=np.full_like(found.slot_after, -1)
    ))  # fmt: skip


def guests_have_one_turn(patch):
    """Guests of each plan take the places of those before."""
    uses = Partition._follow

    def follow(partition, plan):
        uses(partition, plan)
        made = partition._waiting[-1]
        made.first_guests = partition._first_guests

    patch.setattr(Partition, "_follow", follow)


@pytest.mark.parametrize(
    ("defect", "settings"),
    [
        (guests_do_not_wait, {"rows": 4000, "spare": 300, "cache": 300, "lookahead": "auto"}),
        (homes_do_not_wait, {"rows": 40, "spare": 0, "cache": 40, "lookahead": 1, "policy": "lru"}),
        (guests_have_one_turn, {"rows": 40, "spare": 0, "cache": 40, "lookahead": 1, "policy": "lru"}),
    ],
)
def test_a_place_that_is_taken_too_early_is_found(monkeypatch, defect, settings):
    settings = dict(settings)
    tight(monkeypatch, settings.pop("spare"))
    defect(monkeypatch)
    tables, batches = (Table("user", 4000), *TABLES[1:]), make_batches(12, size=5, rows=settings.pop("rows"))
    world, seen = World(batches, "sgd", tables=tables, trainers=3), []
    for seed in range(12):
        try:
            run(world, seed, 20.0, [(), (WRITES_BACK,), (SYNCS,)][seed % 3], **settings)
        except BagpipeError as error:
            seen.append(str(error))
    assert any("this is a defect of bagpipe" in text for text in seen), seen


ROWS, TRAINERS, SAMPLES = 2_000, 4, 8


def zipf_batches(count, samples=SAMPLES, seed=5):
    """Ids of one feature, trainer by trainer."""
    random = np.random.default_rng(seed)
    cuts = np.array([[samples * rank for rank in range(TRAINERS + 1)]])
    return [CutIds([random.zipf(1.1, TRAINERS * samples) % ROWS], cuts) for _ in range(count)]


def oracle_for(cache, batches, design="owned", widths=(4,), **options):
    """As `make_oracle` makes it for trainers that share these batches."""
    return make_oracle(
        [Table("only", ROWS)], widths, cache, {"only": batches[0].ids[0]}, lookahead="auto", policy="lookahead",
        trainers=TRAINERS, uses_ahead=2, design=design, **options,
    )  # fmt: skip


@pytest.mark.parametrize("design", ["owned", "partitioned"])
def test_caches_hold_more_rows_than_one_has_places_and_fetch_fewer(design):
    batches, fetched, held = zipf_batches(300), {}, {}
    for each in (design, "replicated"):
        oracle = oracle_for(150, batches, each)
        places = oracle.places
        partition = Partition(TRAINERS, oracle.tables, places.capacity, places.guests, design=each, move_costs=(0.1,))
        caches, fetched[each], held[each] = [set() for _ in range(TRAINERS)], 0, 0
        for division, _ in partition.plans(oracle.plans((batch, None) for batch in batches)):
            parts = [division.part(rank, (SAMPLES,) * TRAINERS) for rank in range(TRAINERS)]
            fetched[each] += len(division.plan.fetch)
            for cache, part in zip(caches, parts, strict=True):
                assert part.rows.slots.max() < 150
                cache -= set(part.victims.ids.tolist()) | set(part.sync.drop_victims.ids.tolist())
                whole = part.fetch.whole
                cache |= set(part.fetch.ids[slice(None) if whole is None else whole].tolist())
            held[each] = max(held[each], len(set.union(*caches)))
            for cache, part in zip(caches, parts, strict=True):
                cache -= set(part.evict.ids.tolist()) | set(part.sync.drop.ids.tolist())
    assert held["replicated"] <= 150
    assert held[design] > 2 * 150, held
    assert fetched[design] < 0.75 * fetched["replicated"], fetched


@pytest.mark.parametrize("cache", [30, 40, 60, 100, 150, 400, ROWS, 2 * ROWS])
def test_no_cache_has_fewer_slots_than_places_and_what_held_a_batch_trains(cache):
    batches = zipf_batches(20)
    if cache < max(len(np.unique(batch.ids[0])) for batch in batches):
        return
    oracle = oracle_for(cache, batches)
    (slots,), (places,), (guests,) = oracle.places.slots, oracle.places.capacity, oracle.places.guests
    assert places <= cache
    assert slots >= min(cache, ROWS)
    assert slots > places or not guests
    assert len(list(oracle.plans((batch, None) for batch in batches))) == 20


def test_a_trainer_that_uses_more_rows_than_others_did_has_the_cache_divided_anew():
    """Until there would be so few homes that slots are numbered alike."""
    batches = [zipf_batches(1, samples)[0] for samples in (4, 4, 12, 12, 30, 4)]
    oracle = oracle_for(130, batches)
    first = oracle.places
    assert first.guests[0] > 0
    plans = [plan for plan, _ in oracle.plans((batch, None) for batch in batches)]
    divided = [(plan.iteration, plan.guests[0]) for plan in plans if plan.capacity]
    assert [iteration for iteration, _ in divided] == [2, 4]
    assert divided[0][1] > first.guests[0]
    assert divided[1][1] == 0
    assert all(plan.capacity == first.capacity for plan in plans if plan.capacity)


def test_a_batch_that_no_division_has_room_for_is_refused_by_the_cache_that_has():
    batches = [*zipf_batches(2, 4), CutIds([np.arange(400)], np.array([[0, 100, 200, 300, 400]]))]
    with pytest.raises(CapacityError, match=r"iteration 2 needs 400 rows .* raise `cache` to at least 40[01] rows"):
        list(oracle_for(130, batches).plans((batch, None) for batch in batches))
    assert len(list(oracle_for(401, batches).plans((batch, None) for batch in batches))) == 3


def test_several_oracles_number_slots_alike():
    tables, first = [Table("a", ROWS), Table("b", ROWS)], {"a": np.arange(30), "b": np.arange(30)}
    how = {"lookahead": "auto", "policy": "lookahead", "trainers": TRAINERS}
    assert make_oracle(tables, (4, 4), 300, first, **how).places.guests[0] > 0
    oracle = make_oracle(tables, (4, 4), 300, first, options=PolicyOptions(oracles=2), **how)
    assert oracle.places.guests == (0,)
    assert sum(oracle.capacity) == 300


@examples(100)
@given(
    capacity=st.integers(1, 500), used=st.integers(0, 200), limit=st.integers(1, 900), trainers=st.integers(2, 9),
    moving=st.booleans(),
)  # fmt: skip
def test_places_are_divided_into_homes_and_guests(capacity, used, limit, trainers, moving):
    places = make_places([capacity], [min(used, limit)], [limit], trainers, moving=moving)
    assert places.capacity == (capacity,)
    if not places.guests[0]:
        assert places.slots == (capacity,)
        return
    assert min(used, limit) <= places.guests[0]
    assert capacity < places.slots[0] <= min(limit, trainers * (capacity - TURNS * places.guests[0]))
