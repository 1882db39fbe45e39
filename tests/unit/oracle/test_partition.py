"""Plans divided among trainers, beside a division with dictionaries, field by field."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import numpy as np
import pytest

from bagpipe.oracle.design import DESIGNS
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.partition import Partition
from bagpipe.oracle.reader import Reader
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies import POLICIES
from bagpipe.policies.lookahead import RAMP
from definitions.division import cut, tight_places
from definitions.plain_partition import SimplePartition
from harness.covering import few

TABLES = [OracleTable("a", 24), OracleTable("b", None, ("b0", "b1"), group=1), OracleTable("c", 5)]
SIZES = (24, 30, 30, 5)


def random_batches(random, trainers, count):
    """For each batch the samples of each trainer; some have none."""
    return [
        [
            [tuple(int(random.integers(0, size)) for size in SIZES) for _ in range(random.integers(rank == 0, 3))]
            for rank in range(trainers)
        ]
        for _ in range(count)
    ]


def planned(batches, trainers, *, capacity, ahead=2, **options):
    """The whole plans of these batches, with the samples of each trainer."""
    lookahead, policy = options.pop("lookahead"), options.pop("policy")
    oracle = Oracle(TABLES, capacity, lookahead, policy, trainers=trainers, uses_ahead=ahead, **options)
    source = ((cut(parts, len(SIZES)), tuple(map(len, parts))) for parts in batches)
    found = list(oracle.plans(source))
    oracle.close()
    return found


def differing(ours, theirs, name=""):
    """The names of all fields that differ."""
    if is_dataclass(ours):
        assert type(ours) is type(theirs)
        return [
            each
            for field in fields(ours)
            for each in differing(getattr(ours, field.name), getattr(theirs, field.name), f"{name}.{field.name}")
        ]
    if isinstance(ours, tuple):
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [each for i, (mine, other) in pairs for each in differing(mine, other, f"{name}[{i}]")]
    if isinstance(ours, np.ndarray):
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape and np.array_equal(ours, theirs)
        return [] if same else [name]
    return [] if ours == theirs else [name]


@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("seed", few(4, of=16))
def test_parts_are_those_of_a_division_with_dictionaries(design, delayed, seed):
    random = np.random.default_rng([seed, delayed, DESIGNS.index(design)])
    trainers, policy = int(random.integers(2, 5)), str(random.choice(sorted(POLICIES)))
    lookahead = [1, 2, 3, 7, "auto"][random.integers(5)]
    batches = random_batches(random, trainers, int(random.integers(1, 12)))
    capacity = [40, 60] if policy == "ideal" else [16, 17]
    found = planned(batches, trainers, lookahead=lookahead, policy=policy, capacity=capacity, threads=1 + seed % 2)
    costs = random.choice([0.2, 1.2, 2.2], 3).tolist() if seed % 2 else ()
    partition = Partition(trainers, TABLES, capacity, design=design, delayed=delayed, move_costs=costs)
    ours = [[d.part(rank, samples) for rank in range(trainers)] for d, samples in partition.plans(found)]
    twin = SimplePartition(trainers, TABLES, design, delayed, costs)
    theirs = twin.parts([plan for plan, _ in found], [samples for _, samples in found])
    assert [differing(*pair) for pairs in zip(ours, theirs, strict=True) for pair in zip(*pairs, strict=True)] == [
        [] for _ in batches for _ in range(trainers)
    ]


@pytest.mark.parametrize("design", ["owned", "partitioned"])
@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("spare", [0, 4])
@pytest.mark.parametrize("seed", few(4, of=16))
def test_places_are_those_of_a_division_with_dictionaries(design, delayed, spare, seed):
    random = np.random.default_rng([seed, delayed, spare])
    trainers, policy = int(random.integers(2, 5)), str(random.choice(sorted({*POLICIES} - {"ideal"})))
    lookahead = [1, 2, 3, 7, "auto"][random.integers(5)]
    batches = random_batches(random, trainers, int(random.integers(1, 16)))
    places = tight_places([16, 17], [4, 4], trainers, spare)
    found = planned(batches, trainers, lookahead=lookahead, policy=policy, capacity=places.slots, places=places)
    costs = random.choice([0.2, 1.2, 2.2], 3).tolist() if seed % 2 else ()
    how = {"design": design, "delayed": delayed}
    partition = Partition(trainers, TABLES, places.capacity, places.guests, move_costs=costs, **how)
    ours = [[d.part(rank, samples) for rank in range(trainers)] for d, samples in partition.plans(found)]
    twin = SimplePartition(trainers, TABLES, **how, costs=costs, capacity=places.capacity, guests=places.guests)
    theirs = twin.parts([plan for plan, _ in found], [samples for _, samples in found])
    assert [differing(*pair) for pairs in zip(ours, theirs, strict=True) for pair in zip(*pairs, strict=True)] == [
        [] for _ in batches for _ in range(trainers)
    ]


@pytest.mark.parametrize("lookahead", [1, 4, 8])
def test_a_row_is_owned_by_the_trainer_that_uses_it_most_as_far_as_the_oracle_sees(lookahead):
    random = np.random.default_rng(lookahead)
    batches = random_batches(random, 3, 30)
    found = planned(batches, 3, lookahead=lookahead, policy="lookahead", capacity=[40, 60])
    features = [t for t, table in enumerate(TABLES) for _ in table.features]

    def uses(number, rank, table, row):
        """Whether a trainer uses a row in a batch."""
        return any(s[f] == row for s in batches[number][rank] for f in range(len(SIZES)) if features[f] == table)

    for plan, _ in found:
        x, homes = plan.iteration, iter(plan.sharing.homes.tolist())
        for t in range(len(TABLES)):
            for row, slot in zip(*(column.tolist() for column in plan.fetch.of_table(t)), strict=True):
                seen = range(x, min(x + lookahead, x + RAMP * (x + 1), len(batches)))
                tally = [sum(uses(y, rank, t, row) * (1 if y == x else 2) for y in seen) for rank in range(3)]
                equals = [rank for rank in range(3) if tally[rank] == max(tally)]
                assert next(homes) == equals[slot % len(equals)]


@pytest.mark.parametrize(
    ("lookahead", "policy", "seen"), [(1, "lookahead", 0), (4, "lookahead", 2), ("auto", "lookahead", 2), (1, "lru", 1)]
)
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_who_uses_a_row_next_is_known_as_far_as_the_oracle_sees(ahead, lookahead, policy, seen):
    random = np.random.default_rng(5)
    batches = random_batches(random, 3, 30)
    features = [t for t, table in enumerate(TABLES) for _ in table.features]

    def users(number, table, row):
        """The trainers that use a row in a batch, as a mask."""
        used = [
            any(sample[f] == row for sample in samples for f in range(len(SIZES)) if features[f] == table)
            for samples in batches[number]
        ]
        return sum(flag << rank for rank, flag in enumerate(used))

    known = [0, 0]
    for plan, _ in planned(batches, 3, lookahead=lookahead, policy=policy, capacity=[40, 60], ahead=ahead):
        leaving = {(t, row) for t in range(3) for row in plan.evict.of_table(t)[0].tolist()}
        keys = [(t, row) for t in range(3) for row in plan.rows.of_table(t)[0].tolist()]
        for i, key in enumerate(keys):
            uses = [mask for x in range(plan.iteration + 1, len(batches)) if (mask := users(x, *key))]
            found = int(plan.sharing.next_users[i]), int(plan.sharing.later_users[i])
            for place, mask in enumerate(found):
                assert mask in (0, *uses[place : place + 1])
                known[place] += mask != 0
            assert found == (0, 0) or key not in leaving or policy == "lru"
            assert found[0] or not found[1]
    assert [number > 0 for number in known] == [place < min(ahead, seen) for place in range(2)], known


def test_divided_plans_do_not_depend_on_the_oracles_threads_or_on_who_asks_first(monkeypatch):
    monkeypatch.setattr(Reader, "ids_shared_min", 0)
    batches = random_batches(np.random.default_rng(3), 4, 10)
    parts = []
    for threads, order in (1, range(4)), (3, (2, 0, 3, 1)):
        found = planned(batches, 4, lookahead=5, policy="lookahead", capacity=[40, 60], threads=threads)
        divisions = list(Partition(4, TABLES, [40, 60]).plans(found))
        cut_later = [{rank: d.part(rank, samples) for rank in order} for d, samples in reversed(divisions)]
        parts.append([of_plan[rank] for of_plan in cut_later for rank in range(4)])
    assert not [name for ours, theirs in zip(*parts, strict=True) for name in differing(ours, theirs)]


@pytest.mark.parametrize(
    ("lookahead", "policy", "saves"),
    [
        ("auto", "lookahead", True),
        (4, "lookahead", True),
        (4, "lru", False),
        (4, "ideal", False),
        (1, "nocache", True),
    ],
)
def test_lrpp_saves_rows_only_where_they_leave_right_after_their_last_use(lookahead, policy, saves):
    """What `bagpipe` warns of: where they stay, every row is exchanged, as with replicated."""
    batches = random_batches(np.random.default_rng(6), 3, 300)
    exchanged = {}
    for design in ("lrpp", "replicated"):
        lone = policy != "lookahead" or design != "lrpp"
        plans = planned(batches, 3, lookahead=lookahead, policy=policy, capacity=[40, 60], keep_lone=lone)
        parts = [[division.part(rank, samples).sync for rank in range(3)] for division, samples in Partition(
            3, TABLES, [40, 60], design=design).plans(plans)]  # fmt: skip
        before_the_end = parts[:30]  # as data ends, rows leave
        exchanged[design] = sum(len(p.updated) + len(p.later_updated) for part in before_the_end for p in part)
    assert (exchanged["lrpp"] < exchanged["replicated"]) == saves
    assert exchanged["lrpp"] <= exchanged["replicated"]


def test_lrpp_exchanges_no_row_that_one_trainer_uses_once_whatever_the_lookahead():
    """What that saves, and what it fetches more with "auto", where such rows would be idle in a cache with room."""
    random, trainers = np.random.default_rng(3), 4
    source = [[[(int(row),) for row in random.zipf(1.2, 12) % 4000] for _ in range(trainers)] for _ in range(400)]
    counts = {}
    for design in ("replicated", "lrpp"):
        for lookahead in ("auto", 40):
            oracle = Oracle(
                [OracleTable("only", 4000)], [4000], lookahead, trainers=trainers, keep_lone=design != "lrpp"
            )
            divided = Partition(trainers, oracle.tables, oracle.capacity, design=design)
            exchanged = fetched = lone = 0
            batches = ((cut(parts, 1), tuple(map(len, parts))) for parts in source)
            for division, samples in divided.plans(oracle.plans(batches)):
                syncs = [division.part(rank, samples).sync for rank in range(2)]
                shared = np.intersect1d(*[np.append(s.updated.ids, s.later_updated.ids) for s in syncs])
                if division.plan.iteration < 100:  # long before any window sees the end of the data
                    exchanged += len(shared)
                    fetched += len(division.plan.fetch)
                    users = division.plan.sharing.users
                    gone = np.isin(division.plan.rows.ids, division.plan.evict.ids) & (users & (users - 1) == 0)
                    lone += np.count_nonzero(gone)
                    if design == "lrpp":
                        assert not np.isin(division.plan.rows.ids[gone], shared).any()
            counts[design, lookahead] = exchanged, fetched, lone
    total = counts["replicated", "auto"][0]
    assert counts["replicated", 40][0] == total, "all rows of all batches"
    for lookahead in ("auto", 40):
        exchanged, _, lone = counts["lrpp", lookahead]
        assert exchanged == total - lone
        assert exchanged < 0.95 * total
    assert counts["lrpp", "auto"][1] > counts["replicated", "auto"][1], "rows that would have been idle come again"
    assert counts["lrpp", "auto"][1] <= counts["lrpp", 40][1]
