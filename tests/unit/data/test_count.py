"""The counting kernels equal their NumPy twins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.data import count
from bagpipe.data.count import NUM_WORDS
from definitions import count as definitions
from harness.examples import examples


def both(name, *arguments):
    """The outcome of a kernel and of its twin, each on copies of the arguments."""
    results = []
    for function in (getattr(count, name), getattr(definitions, f"define_{name}")):
        own = [each.copy() if isinstance(each, np.ndarray) else each for each in arguments]
        returned = function(*own)
        results.append((returned, [each.tolist() if isinstance(each, np.ndarray) else each for each in own]))
    return results


@examples(100)
@given(
    bags=st.lists(st.lists(st.integers(-1, 8), max_size=5), max_size=40),
    first=st.integers(0, 100),
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_accesses_are_counted_as_the_twin_does(bags, first, sizes, seed):
    words = np.zeros((9, NUM_WORDS), np.int64)
    words[:, count.LAST] = np.random.default_rng(seed).integers(0, first + 1, 9)
    positions = np.array([position for bag in bags for position in bag], np.int64)
    offsets = np.cumsum([0, *map(len, bags)])
    sizes = np.array(sizes, np.int64)
    stops = (first + len(bags)) // sizes * sizes
    ours, twin = both("count_accesses", positions, offsets, first, words, sizes, stops, np.zeros(len(sizes), np.int64))
    assert ours == twin


@pytest.mark.parametrize("limit", [1, 2, 5, 100])
def test_rows_are_counted_by_their_accesses(limit):
    words = np.random.default_rng(0).integers(0, 9, (200, NUM_WORDS))
    rows, counts = np.zeros(limit, np.int64), words[:, count.TOTAL].tolist()
    assert count.count_rows(words, count.TOTAL, rows) == sum(each >= limit for each in counts)
    assert rows.tolist() == [0, *(counts.count(each) for each in range(1, limit))]


def words_of_a_day(seed):
    random = np.random.default_rng(seed)
    words = random.integers(0, 4, (100, NUM_WORDS))
    words[:, count.TOTAL] *= random.integers(0, 2, 100)
    words[:, count.LEVEL] = random.integers(0, 8, 100)
    return words


@pytest.mark.parametrize("seed", range(5))
def test_levels_and_the_end_of_a_day_are_those_of_the_twins(seed):
    words = words_of_a_day(seed)
    counts, levels = (
        sorted({today for today in words[:, count.TODAY].tolist() if today}),
        words[:, count.LEVEL].tolist(),
    )
    expected = [
        2 * counts.index(today) + 2 if today else level
        for today, level in zip(words[:, count.TODAY].tolist(), levels, strict=True)
    ]
    count.set_levels(words, np.array(counts))
    assert words[:, count.LEVEL].tolist() == expected
    for is_day in (True, False):
        ours, twin = both("close_day", words, np.zeros(4, np.int64), np.zeros(5, np.int64), is_day)
        assert ours == twin


@pytest.mark.parametrize("name", ["count_accesses", "close_day"])
def test_no_rows_and_no_samples_are_fine(name):
    words, none, zero = np.empty((0, NUM_WORDS), np.int64), np.empty(0, np.int64), np.zeros(1, np.int64)
    arguments = {
        "count_accesses": (none, zero, 0, words, zero + 1, zero, zero),
        "close_day": (words, zero, np.zeros(5, np.int64), True),
    }
    ours, twin = both(name, *arguments[name])
    assert ours == twin
