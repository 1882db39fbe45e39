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


def test_a_window_map_gives_each_id_of_each_table_a_row_of_its_own() -> None:
    known = WindowMap()
    ids = np.array([*EXTREME, *EXTREME, 77], np.int64)
    known.reserve(3 * len(ids), 0, 0)
    rows = [known.number(table, ids).copy() for table in range(3)]
    assert len(np.unique(np.concatenate(rows))) == 3 * (len(EXTREME) + 1)
    for table in range(3):
        np.testing.assert_array_equal(known.ids[rows[table]], ids)
        np.testing.assert_array_equal(known.number(table, ids), rows[table])


def test_a_record_of_a_window_map_lies_in_one_cache_line() -> None:
    known = WindowMap()
    for _ in range(6):
        known.reserve(len(known.ids), 0, 0)
        known.number(0, np.arange(len(known.ids) // 2))
        assert known.ids.__array_interface__["data"][0] % 32 == 0
        assert known.ids.strides == known.last_use.strides == known.location.strides == (32,)


def test_a_window_map_follows_the_rows_in_use() -> None:
    """Ten thousand iterations with new ids in each need no more memory than the rows of a few."""
    known = WindowMap()
    random = np.random.default_rng(0)
    row_of: dict[tuple[int, int], int] = {}
    for iteration in range(10_000):
        ids = np.append(random.integers(-(2**63), 2**63 - 1, 20), iteration % 3)
        known.reserve(len(ids), iteration, iteration - 4)
        rows = known.number(iteration % 2, ids)
        known.last_use[rows] = (iteration + 1) << 32
        known.location[rows] = -(iteration + 1)
        known.location[rows[-1]] = 1 + iteration % 3
        assert row_of.setdefault((iteration % 2, int(ids[-1])), int(rows[-1])) == rows[-1], "a resident row was moved"
    assert len(known.last_use) <= 512
    assert len(known) <= len(known.last_use)


def test_a_window_map_equals_its_twin_through_growth_and_forgetting() -> None:
    random = np.random.default_rng(1)
    known, twin = WindowMap(), WindowMapByDict()
    for iteration in range(300):
        ids, table = random.integers(0, 3 + 2 * iteration, random.integers(0, 60)) * 2**40, int(random.integers(0, 4))
        found = []
        for one in (known, twin):
            one.reserve(len(ids), iteration, iteration - 5)
            found.append(one.number(table, ids).copy())
            one.last_use[found[-1]] = (iteration + 1) << 32
            one.location[found[-1]] = np.where(ids % 7 == 0, 1, -(iteration + 1))
        np.testing.assert_array_equal(*found)
        assert len(known) == len(twin)
    assert len(known.last_use) > window_map.NUM_ROWS_MIN


@pytest.mark.parametrize("seed", SEEDS)
def test_forgetting_empties_what_no_plan_can_need(seed: int) -> None:
    random = np.random.default_rng(seed)
    words, places = random.integers(0, 12, 60) << 32, random.integers(-12, 4, 60).astype(np.int32)
    places[words == 0] = 0
    keep_read, keep_plan = (int(bound) for bound in random.integers(0, 12, 2))
    free = np.zeros(60, np.int32)
    assert_twins(window_map.forget, define_forget, words, places, keep_read, keep_plan, free)
