"""Promise I1 with several trainers: whatever the settings, whoever is slow, the bits are those of the reference."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bagpipe.state import of_reference
from harness.covering import pairwise
from harness.events import expected_of, train_with_events
from harness.examples import examples
from harness.explorer import FETCHES, INSERTS, LOOP, SYNCS, WRITES_BACK, any_stages
from harness.trainers import DESIGNS, World, run, run_alone
from harness.world import OPTIMIZERS, assert_identical, make_batches

BATCHES = make_batches(9, size=5, last=2)
EXPECTED = {}
CHOICES = {
    "trainers": (1, 2, 3, 4),
    "design": DESIGNS,
    "delayed": (True, False),
    "optimizer": tuple(OPTIMIZERS),
    "assign": ("contiguous", "round_robin", "aware"),
    "lookahead": (1, 2, 5, "auto"),
    "cache": ("tight", "roomy"),
    "policy": ("lookahead", "lru", "nocache", "ideal"),
    "model": ("dlrm", "wide_deep", "deep_cross", "deepfm"),
    "last": (
        *((), (WRITES_BACK,), (INSERTS,), FETCHES, (SYNCS,)),
        *(((0, LOOP),), ((0, SYNCS),), ((1, WRITES_BACK),)),
    ),
}
ROWS = {"tight": 40, "roomy": 300}


def impossible(two):
    """What a policy leaves no choice of."""
    return (two.get("policy") == "nocache" and two.get("lookahead", 1) != 1) or (
        two.get("policy") == "ideal" and two.get("cache", "roomy") != "roomy"
    )


def expected(world):
    key = (world.model, world.optimizer, world.trainers, world.assign)
    if key not in EXPECTED:
        EXPECTED[key] = world.reference()
    return EXPECTED[key]


def test_every_two_values_of_any_two_settings_meet():
    rows = pairwise(CHOICES, impossible)
    for a, b in itertools.combinations(CHOICES, 2):
        for x, y in itertools.product(CHOICES[a], CHOICES[b]):
            assert impossible({a: x, b: y}) != any(row[a] == x and row[b] == y for row in rows)


@pytest.mark.parametrize("row", pairwise(CHOICES, impossible), ids=lambda row: "-".join(map(str, row.values())))
def test_every_pair_of_settings_is_bit_identical(row):
    world = World(BATCHES, row["optimizer"], row["model"], trainers=row["trainers"], assign=row["assign"])
    how = {
        "policy": row["policy"],
        "lookahead": row["lookahead"],
        "cache": 10_000 if row["policy"] == "ideal" else ROWS[row["cache"]],
    }
    if row["trainers"] == 1:
        found = run_alone(world, **how)
    else:
        found = run(world, last=row["last"], design=row["design"], delayed=row["delayed"], **how)
    assert_identical(expected(world), found.state)


@examples(20)
@given(
    seed=st.integers(0, 10**6),
    eagerness=st.sampled_from([0.0, 0.5, 2.0, 20.0]),
    last=any_stages(3),
    design=st.sampled_from(DESIGNS),
    delayed=st.booleans(),
    lookahead=st.sampled_from([1, 2, 3, 5, "auto"]),
    policy=st.sampled_from(["lookahead", "lru", "nocache"]),
    cache=st.integers(36, 60),
)
# A trainer is late in writing a row whose slot has a later tenant elsewhere, which it never had and gives up.
@example(0, 0.5, {WRITES_BACK}, "lrpp", False, 3, "lookahead", 36)
def test_every_schedule_is_bit_identical(seed, eagerness, last, design, delayed, lookahead, policy, cache):
    world = World(BATCHES, "adam", trainers=3)
    lookahead = 1 if policy == "nocache" else lookahead
    found = run(
        world, seed, eagerness, last, design=design, delayed=delayed, lookahead=lookahead, policy=policy, cache=cache
    )
    assert_identical(expected(world), found.state)


@examples(20)
@given(
    events=st.dictionaries(
        st.integers(0, 8), st.sampled_from(["evaluate", "save", "barrier", "barrier after", "skip", "norm"])
    ),
    seed=st.integers(0, 10**6),
    eagerness=st.sampled_from([0.0, 0.5, 2.0]),
    last=st.sampled_from([(), (SYNCS,), ((0, WRITES_BACK),), (WRITES_BACK,)]),
    design=st.sampled_from(DESIGNS),
    delayed=st.booleans(),
    policy=st.sampled_from(["lookahead", "lru"]),
    cache=st.integers(36, 60),
)
# A delayed update of a row that another trainer will write, and then a barrier before the row has left.
@example({2: "barrier after"}, 0, 0.0, ((0, WRITES_BACK),), "replicated", True, "lookahead", 36)
# The last update of a row that only one trainer has from then on, in an iteration without a step.
@example({3: "skip", 5: "skip"}, 0, 2.0, (), "lrpp", True, "lookahead", 36)
def test_what_happens_between_iterations_changes_no_bit(events, seed, eagerness, last, design, delayed, policy, cache):
    num_trained = sum(events.get(number) != "skip" for number in range(len(BATCHES)))
    if not num_trained:
        return
    world = World(BATCHES, "adagrad", trainers=3)
    loop = train_with_events(events)
    found = run(world, seed, eagerness, last, loop, design=design, delayed=delayed, policy=policy, cache=cache)
    assert found.updates == num_trained
    reference = world.make_reference()
    seen = expected_of(reference, BATCHES, events)
    assert_identical(of_reference(reference), found.state)
    assert found.results == [seen] * 3, "what trainers are told in mid-training is what the reference says"
