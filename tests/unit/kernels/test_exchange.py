"""The kernels that move parts of rows between trainers give the bits of their twins."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.kernels import exchange

EDGES = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-38, 3.4e38, 1.0, -1.5], np.float32)


def rows_of(random, count, width, edges):
    if edges:
        return random.choice(EDGES, (count, width))
    return random.standard_normal((count, width)).astype(np.float32)


def bits(values):
    return values.view(np.uint32).tolist()


def same_bits(one, other):
    """Equal bits; of NaN only that it is one, since sums of two keep either's payload."""
    assert np.array_equal(np.isnan(one), np.isnan(other))
    numbers = ~np.isnan(one)
    assert one[numbers].view(np.uint32).tolist() == other[numbers].view(np.uint32).tolist()


@pytest.mark.parametrize("edges", [False, True])
@pytest.mark.parametrize(("count", "chosen", "width", "dim"), [(1, 1, 1, 1), (9, 4, 6, 6), (9, 9, 6, 3), (5, 0, 4, 2)])
def test_kernels_give_the_bits_of_their_twins(count, chosen, width, dim, edges):
    random = np.random.default_rng(count + chosen)
    for _ in range(20):
        rows = rows_of(random, count, width, edges)
        index = random.permutation(count)[:chosen].astype(np.int32)
        part = rows_of(random, chosen, dim, edges)
        found, expected = np.full_like(part, 7), np.full_like(part, 7)
        exchange.gather_part(rows, index, found)
        exchange.gather_part_simple(rows, index, expected)
        assert bits(found) == bits(expected)
        found, expected = rows.copy(), rows.copy()
        exchange.scatter_part(found, index, part)
        exchange.scatter_part_simple(expected, index, part)
        assert bits(found) == bits(expected), "and the columns behind stay"
        narrow = np.ascontiguousarray(rows[:, :dim])
        with np.errstate(all="ignore"):
            found, expected = narrow.copy(), narrow.copy()
            exchange.add_part(found, index, part)
            exchange.add_part_simple(expected, index, part)
            same_bits(found, expected)
            at, factor = random.permutation(chosen + 2)[:chosen].astype(np.int32), np.float32(random.integers(0, 9))
            found, expected = np.full((2, chosen + 2, dim), 5, np.float32)
            exchange.gather_scaled(narrow, index, factor, found, at)
            exchange.gather_scaled_simple(narrow, index, factor, expected, at)
            same_bits(found, expected)


def test_products_and_sums_are_of_float32():
    """Nothing is fused or carried in more digits."""
    third, part = np.full((1, 1), 1 / 3, np.float32), np.empty((1, 1), np.float32)
    exchange.gather_scaled(third, np.zeros(1, np.int32), np.float32(3), part, np.zeros(1, np.int32))
    assert part[0, 0] == np.float32(1 / 3) * np.float32(3)
    sums = np.full((1, 1), 2.0**24, np.float32)
    for _ in range(3):
        exchange.add_part(sums, np.zeros(1, np.int32), np.ones((1, 1), np.float32))
    assert sums[0, 0] == 2.0**24
