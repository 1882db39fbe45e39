"""The oracle's kernels and their plain twins give the same arrays."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest

from bagpipe.kernels import admit as admission
from bagpipe.kernels import window_map
from bagpipe.kernels.window_map import WindowMap
from definitions.admit import define_admit
from definitions.window_map import WindowMapByDict, define_forget

SEEDS = range(40)


def assert_twins(kernel: Callable[..., object], twin: Callable[..., object], *arguments: object) -> None:
    """Same result, and same arrays afterwards."""
    others = copy.deepcopy(arguments)
    assert kernel(*arguments) == twin(*others)
    for ours, theirs in zip(arguments, others, strict=True):
        np.testing.assert_array_equal(ours, theirs)


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
            arguments = (tables, iteration, window, int(gaps[tables, 1 : window + 2].sum()) + 3, 40, ahead)
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
