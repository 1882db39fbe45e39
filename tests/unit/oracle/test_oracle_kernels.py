"""The oracle's kernels and their plain twins give the same arrays."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest

from bagpipe.kernels import admit as admission
from bagpipe.kernels import plan as loops
from bagpipe.kernels import window_map
from bagpipe.kernels.window_map import WindowMap
from definitions.admit import define_admit
from definitions.plan import (
    define_count_gaps,
    define_count_outside,
    define_find_uniques,
    define_link,
    define_look_up,
    define_settle,
)
from definitions.window_map import WindowMapByDict, define_forget

SEEDS = range(40)


def assert_twins(kernel: Callable[..., object], twin: Callable[..., object], *arguments: object) -> None:
    """Same result, and same arrays afterwards."""
    others = copy.deepcopy(arguments)
    assert kernel(*arguments) == twin(*others)
    for ours, theirs in zip(arguments, others, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("ids", [[], [0], [9], [10], [-1], [2**63 - 1, -(2**63)], list(range(-3, 13))])
def test_ids_outside_a_table_are_counted(ids: list[int]) -> None:
    assert_twins(loops.count_outside, define_count_outside, np.array(ids, np.int64), 10)


@pytest.mark.parametrize("seed", SEEDS)
def test_unique_rows_are_found_in_order_of_first_occurrence(seed: int) -> None:
    random = np.random.default_rng(seed)
    words = random.integers(0, 6, 50) << 32 | random.integers(0, 9, 50)
    ids = random.integers(0, 40, random.integers(0, 120))
    count = int(random.integers(0, 3))
    assert_twins(
        loops.find_uniques, define_find_uniques, ids, 10, words, 5,
        np.zeros(150, np.int32), np.zeros(150, np.int64), 7, count, np.zeros(130, np.int32), 4,
    )  # fmt: skip


def random_window(
    random: np.random.Generator, num_tables: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Words of a batch of iteration 20, whose rows were seen in earlier batches of eight rows a table, or never."""
    starts = np.arange(num_tables) * 10
    counts = random.integers(0, 9, num_tables)
    previous = np.zeros(10 * num_tables, np.int64)
    for t in range(num_tables):
        uses = random.permutation(np.arange(10 * 8))[: counts[t]]
        previous[starts[t] : starts[t] + counts[t]] = (uses // 8 + 11) << 32 | uses % 8
        previous[starts[t] : starts[t] + counts[t]][random.random(counts[t]) < 0.2] = 0
    begins = np.add.outer(np.arange(num_tables + 1) * 8, np.arange(8) * 8 * num_tables)
    return starts, counts, previous, begins


@pytest.mark.parametrize("seed", SEEDS)
def test_gaps_are_counted_and_linked(seed: int) -> None:
    random = np.random.default_rng(seed)
    starts, counts, previous, begins = random_window(random, 3)
    tables, gaps = np.array([0, 2]), np.full((3, 7), -5)
    window = int(random.integers(0, 6))
    assert_twins(loops.count_gaps, define_count_gaps, tables, starts, counts, previous, 20, window, gaps)
    gaps[:, 3:] = np.minimum(gaps[:, 3:], 1)
    assert_twins(
        loops.link, define_link, tables, starts, counts, np.arange(30, dtype=np.int32), previous, 20, window,
        gaps, bool(seed % 2), int(random.choice([0, loops.KEEP])), begins,
        np.zeros(200, np.int32), np.zeros(200, np.uint16),
    )  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("mapped", [False, True])
def test_rows_are_looked_up_and_settled(seed: int, mapped: bool) -> None:
    random = np.random.default_rng(seed)
    counts = random.integers(0, 40, 3)
    bounds = np.concatenate([[0], np.cumsum(counts)])
    entries = np.concatenate([t * 50 + random.permutation(50)[: counts[t]] for t in range(3)]).astype(np.int32)
    stays = random.choice([0, 1, 7, loops.KEEP], len(entries)).astype(np.uint16)
    places = random.integers(-9, 60, 150).astype(np.int32)
    tables, slots = np.array([0, 1, 2]), np.zeros(len(entries), np.int32)
    misses, leaves = np.zeros((2, 3), np.int64)
    look_up = (tables, bounds, entries, stays, places, slots, misses, leaves)
    assert_twins(loops.look_up, define_look_up, *look_up)
    fetch_bounds, evict_bounds = (np.concatenate([[0], np.cumsum(part)]) for part in (misses, leaves))
    num_fetched, num_evicted = fetch_bounds[-1], evict_bounds[-1]
    keys = np.arange(150) * 7 if mapped else np.empty(0, np.int64)
    assert_twins(
        loops.settle, define_settle, tables, bounds, entries, stays, places, np.arange(3) * 50, keys, 9, 3,
        np.zeros(len(entries), np.int64), slots,
        fetch_bounds, np.zeros(num_fetched, np.int64), random.permutation(num_fetched).astype(np.int32),
        np.zeros(num_fetched, np.int32), evict_bounds, np.zeros(num_evicted, np.int64), np.zeros(num_evicted, np.int32),
        np.array([0, 0, 200]), np.full(400, -1),
    )  # fmt: skip


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_stays_are_admitted_like_one_row_at_a_time(ahead: int) -> None:
    for seed in range(60):
        random = np.random.default_rng(seed)
        load, total, refused = np.zeros((3, 16), np.int64)
        tables = np.array([0, 2])
        for iteration in range(30):
            window = min(iteration, int(random.integers(5, 8)))
            gaps = random.integers(0, 4, (3, 9))
            refused[iteration & 15] = 0
            arguments = (tables, iteration, window, int(gaps[tables, 1 : window + 1].sum()) + 3, 40, ahead)
            assert_twins(admission.admit, define_admit, *arguments, load, total, gaps, refused)
            assert load.max() <= max(40, arguments[3])


def largest_choice(capacity: int, uses: list[set[int]]) -> int:
    """How many stays fit at best, by trying all choices."""
    stays = [
        (p, b)
        for b in range(len(uses))
        for row in uses[b]
        for p in [max([p for p in range(b) if row in uses[p]], default=-1)]
        if p >= 0
    ]
    best = 0
    for chosen in range(2 ** len(stays)):
        picked = [stay for i, stay in enumerate(stays) if chosen >> i & 1]
        loads = [len(uses[y]) + sum(p < y < b for p, b in picked) for y in range(len(uses))]
        if max(loads) <= capacity:
            best = max(best, len(picked))
    return best


def test_no_choice_of_stays_is_larger() -> None:
    for seed in range(60):
        random = np.random.default_rng(seed)
        uses = [set(random.choice(5, 2, replace=False).tolist()) for _ in range(6)]
        load, total, refused = np.zeros((3, 8), np.int64)
        granted = 0
        for b, rows in enumerate(uses):
            gaps = np.zeros((1, 8), np.int64)
            for row in rows:
                earlier = [p for p in range(b) if row in uses[p]]
                if earlier:
                    gaps[0, b - earlier[-1]] += 1
            admission.admit(np.array([0]), b, b, len(rows), 3, 0, load, total, gaps, refused)
            granted += int(gaps.sum())
        assert granted == largest_choice(3, uses)


EXTREME = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 2**53 + 1]


def test_a_window_map_gives_each_id_an_entry_of_its_own() -> None:
    known = WindowMap()
    ids = np.array([*EXTREME, *EXTREME, 77], np.int64)
    known.reserve(len(ids), 0, 0)
    entries = np.empty(len(ids), np.int64)
    known.find_or_take(ids, entries)
    assert len(set(entries.tolist())) == len(EXTREME) + 1
    np.testing.assert_array_equal(known.keys[entries], ids)
    again = np.empty(len(ids), np.int64)
    known.find_or_take(ids, again)
    np.testing.assert_array_equal(again, entries)


def test_a_window_map_follows_the_rows_in_use() -> None:
    """Ten thousand iterations with new ids in each need no more memory than the rows of a few."""
    known = WindowMap()
    random = np.random.default_rng(0)
    entry_of: dict[int, int] = {}
    for iteration in range(10_000):
        ids = np.append(random.integers(-(2**63), 2**63 - 1, 20), iteration % 3)
        known.reserve(len(ids), iteration, iteration - 4)
        entries = np.empty(len(ids), np.int64)
        known.find_or_take(ids, entries)
        known.words[entries] = (iteration + 1) << 32
        known.places[entries] = -(iteration + 1)
        known.places[entries[-1]] = 1 + iteration % 3
        assert entry_of.setdefault(int(ids[-1]), int(entries[-1])) == entries[-1], "a resident row was moved"
    assert len(known.words) <= 512
    assert len(known) <= len(known.words)
    assert known.nbytes < 32_000


def test_a_window_map_equals_its_twin_through_growth_and_forgetting() -> None:
    random = np.random.default_rng(1)
    known, twin = WindowMap(), WindowMapByDict()
    for iteration in range(300):
        ids = random.integers(0, 3 + 2 * iteration, random.integers(0, 60)) * 2**40
        ours, theirs = np.empty((2, len(ids)), np.int64)
        for one, entries in ((known, ours), (twin, theirs)):
            one.reserve(len(ids), iteration, iteration - 5)
            one.find_or_take(ids, entries)
            one.words[entries] = (iteration + 1) << 32
            one.places[entries] = np.where(ids % 7 == 0, 1, -(iteration + 1))
        np.testing.assert_array_equal(ours, theirs)
        assert len(known) == len(twin)
    assert len(known.words) > window_map.NUM_ENTRIES_MIN


@pytest.mark.parametrize("seed", SEEDS)
def test_forgetting_empties_what_no_plan_can_need(seed: int) -> None:
    random = np.random.default_rng(seed)
    words, places = random.integers(0, 12, 60) << 32, random.integers(-12, 4, 60).astype(np.int32)
    places[words == 0] = 0
    keep_read, keep_plan = (int(bound) for bound in random.integers(0, 12, 2))
    free = np.zeros(60, np.int32)
    assert_twins(window_map.forget, define_forget, words, places, keep_read, keep_plan, free)
