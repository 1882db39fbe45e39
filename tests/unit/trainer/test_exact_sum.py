"""Sums of squares: exact, rounded once, whatever the order and whoever adds which part."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.trainer.row_sync import ExactSum
from harness.examples import examples

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def total(*parts):
    """What several trainers find together."""
    packed = []
    for part in parts:
        bins = ExactSum()
        for block in part:
            bins.add_squares(np.array(block, np.float32))
        packed.append(bins.packed())
    return ExactSum.total(packed)


@examples(80)
@given(values=st.lists(FLOATS, max_size=40), cuts=st.lists(st.integers(0, 40), max_size=3), seed=st.integers(0, 99))
def test_the_sum_is_exact_and_rounded_once(values, cuts, seed):
    expected = float(sum((Fraction(value) ** 2 for value in values), Fraction(0)))
    assert total([values]) == expected
    assert expected == math.fsum(value * value for value in values)
    shuffled = np.random.default_rng(seed).permutation(np.array(values, np.float64)).tolist()
    edges = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [[shuffled[a:b]] for a, b in itertools.pairwise(edges)]
    assert total(*parts) == expected, "in other groups"
    assert total([block for (block,) in parts]) == expected, "in other blocks"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], 0.0),
        ([-0.0], 0.0),
        ([1e-45] * 3, 3 * float(np.float32(1e-45)) ** 2),
        ([2.0**-149, 2.0**127], 2.0**254),
        ([1.0, 2.0**-60], 1.0),
        ([2.0**26 + 8, 1.0], (2.0**26 + 8) ** 2 + 1),
        ([math.inf, 1.0], math.inf),
        ([-math.inf], math.inf),
        ([math.nan, math.inf], math.nan),
    ],
)
def test_the_smallest_the_largest_and_what_is_no_number(values, expected):
    found = total([values])
    assert found == expected or (math.isnan(found) and math.isnan(expected))
    split = total([values[:1]], [values[1:]], [[]])
    assert split == found or (math.isnan(split) and math.isnan(found))


def test_what_no_float_could_hold_on_the_way_is_held():
    """The largest float32 squared, a million times: far from the largest float64, and exact."""
    largest = np.finfo(np.float32).max
    values = np.full(10**6, largest, np.float32)
    assert total([values]) == float(Fraction(float(largest)) ** 2 * 10**6)
    assert total([values[:1]], [values[1:]]) == total([values])


def test_small_terms_are_not_lost_beside_large_ones():
    values = [1.0] + [2.0**-27] * 2**12
    assert total([values]) == 1.0 + 2.0**-42
    assert np.float32(1.0) + np.float32(2.0**-54) == 1.0


def test_any_shape_is_taken():
    assert total([np.ones((3, 4))]) == 12.0
    assert total([np.ones((3, 0))]) == 0.0
