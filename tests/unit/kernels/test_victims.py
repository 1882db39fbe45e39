"""Kernels that choose who leaves equal their twins, on random cases and at the edges."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.kernels.oracle import HALF, Rings, RowState
from bagpipe.kernels.victims import choose_ways, find_absent, note_next_uses
from bagpipe.oracle.slots import HELD, NEVER, SlotFacts, lowest
from definitions.victims import (
    define_choose_ways,
    define_find_absent,
    define_lowest,
    define_note_next_uses,
)


def known(location: np.ndarray) -> RowState:
    """Rows of which nothing is known but where they are."""
    nothing = np.empty(0, np.int64)
    return RowState(nothing, location, nothing, nothing)


def both_lowest(keys: list[int] | np.ndarray, count: int) -> list[int]:
    results = []
    for function in (lowest, define_lowest):
        results.append(function(np.array(keys, np.int64), count).tolist())
    assert results[0] == results[1]
    return results[0]


def test_the_smallest_keys_are_found_and_held_slots_left_alone() -> None:
    assert both_lowest([5, 3, HELD, 3, 9], 2) == [1, 3]
    assert both_lowest([5, 3, HELD, 3, 9], 3) == [0, 1, 3]
    assert both_lowest([7, 7, 7], 2) == [0, 1]


@pytest.mark.parametrize(
    ("keys", "count", "found"),
    [
        ([], 0, []),
        ([HELD, HELD], 2, []),
        ([0], 3, [0]),
        ([0, HELD - 1], 2, [0, 1]),
        ([HELD - 1, 0], 1, [1]),
        ([1, 2, 3], 0, []),
    ],
)
def test_edges_of_the_smallest_keys(keys: list[int], count: int, found: list[int]) -> None:
    assert both_lowest(keys, count) == found


def test_random_keys_of_any_range_give_what_sorting_gives() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        size, reach = int(random.integers(1, 200)), int(random.choice([1, 3, 100, 2**20, HELD]))
        keys = random.integers(0, reach, size)
        keys[random.random(size) < 0.2] = HELD
        both_lowest(keys, int(random.integers(0, size + 3)))


def test_keys_rank_tenants_and_leave_free_slots_out() -> None:
    random = np.random.default_rng(5)
    for largest_first in (False, True):
        values = np.array([0, 1, NEVER, NEVER - 1, *random.integers(0, NEVER, 200)], np.int32)
        facts = SlotFacts(np.full(len(values), NEVER, np.int32))
        facts.last[:] = random.integers(-1, 5, len(values))
        keys, last = facts.keys(values, largest_first=largest_first), facts.last
        assert ((keys == HELD) == (last < 0)).all()
        assert (keys >= 0).all()
        assert (keys <= HELD).all()
        tenants = np.flatnonzero(last >= 0)
        by_hand = sorted(tenants, key=lambda slot: ((-1 if largest_first else 1) * int(values[slot]), last[slot]))
        assert sorted(tenants, key=lambda slot: keys[slot]) == by_hand


def test_next_uses_are_noted_for_rows_that_are_cached_and_planned() -> None:
    random = np.random.default_rng(1)
    for _ in range(100):
        counts = random.integers(0, 6, 3)
        starts = np.cumsum([0, *counts[:-1]])
        total = int(counts.sum())
        entries = random.permutation(40)[:total].astype(np.int32)
        previous = (random.integers(0, 9, total) << HALF) | random.integers(0, 5, total)
        places = np.zeros(40, np.int32)
        places[entries] = np.where(random.random(total) < 0.6, 1 + np.arange(total), -random.integers(0, 9, total))
        found = []
        begins = np.zeros((4, 8), np.int64)
        begins[:, 0] = np.append(starts, total)
        rings = Rings(np.arange(3), begins, entries, np.zeros(total, np.uint16))
        for function in (note_next_uses, define_note_next_uses):
            next_uses = np.full(60, NEVER, np.int32)
            function(known(places), rings, previous, 8, 5, np.array([0, 0, 20]), next_uses)
            found.append(next_uses.tolist())
        assert found[0] == found[1]
        planned = (previous >> HALF <= 5) & (places[entries] > 0)
        assert sum(use == 8 for use in found[0]) == planned.sum()


def test_absent_rows_of_several_batches_are_listed_once() -> None:
    random = np.random.default_rng(2)
    for _ in range(100):
        batches = [random.permutation(12)[: random.integers(0, 8)] for _ in range(4)]
        begins = np.zeros((2, 8), np.int64)
        ends = np.cumsum([len(batch) for batch in batches])
        begins[1, 3:7] = ends
        begins[0, 3:7] = [0, *ends[:-1]]
        stays = [
            next((n - m for n in range(m + 1, 4) if row in batches[n]), 0)
            for m, batch in enumerate(batches)
            for row in batch
        ]
        places = random.integers(-3, 4, 12).astype(np.int32)
        entries = np.concatenate(batches).astype(np.int32)
        rings = Rings(np.array([4]), begins, entries, np.array(stays, np.uint16))
        args = known(places), rings, np.array([0]), 3, int(random.integers(3, 7))
        found = find_absent(*args).tolist()
        assert len(found) == len(set(found))
        assert set(found) == define_find_absent(*args)


def test_ways_are_drawn_among_those_that_are_not_pinned() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        num_rows, ways = int(random.integers(0, 12)), int(random.integers(1, 5))
        firsts = random.integers(0, 3, num_rows) * ways
        draws = random.integers(0, 2**62, (2, num_rows))
        pinned = random.random(3 * ways) < random.choice([0.0, 0.5, 1.0])
        results = []
        for function in (choose_ways, define_choose_ways):
            claims, winners = np.zeros(3 * ways, np.int32), np.zeros(3 * ways, np.int64)
            chosen = np.empty(num_rows, np.int32)
            function(firsts, np.full(num_rows, ways), draws, pinned, claims, winners, chosen)
            assert not claims.any()
            results.append(chosen.tolist())
        assert results[0] == results[1]
        placed = [slot for slot in results[0] if slot >= 0]
        assert len(set(placed)) == len(placed), "two rows got the same way"
        assert not pinned[placed].any()
        assert all(slot < 0 or first <= slot < first + ways for slot, first in zip(results[0], firsts, strict=True))


def test_each_of_several_rivals_for_a_way_wins_as_often() -> None:
    random = np.random.default_rng(4)
    wins = np.zeros(3)
    for _ in range(3000):
        chosen = np.empty(3, np.int32)
        zeros = np.zeros(1, np.int32), np.zeros(1, np.int64)
        choose_ways(np.zeros(3, np.int64), np.ones(3, np.int64), random.integers(0, 2**62, (2, 3)), np.zeros(1, bool), *zeros, chosen)  # fmt: skip  # noqa: E501
        wins += chosen == 0
    assert wins.sum() == 3000
    assert (abs(wins - 1000) < 120).all()
