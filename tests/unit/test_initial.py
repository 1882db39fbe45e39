"""Initial values: a pure function of (seed, table, id, column), the same compiled and in NumPy, and random enough."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import ConfigError, ValueRangeError
from bagpipe.initial import Constant, Given, Initial, Joined, Normal, Uniform, table_key
from bagpipe.kernels.random import GOLDEN, mix_numpy
from harness.examples import examples

IDS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)
KINDS: dict[str, Any] = {"uniform": Uniform, "normal": Normal}


def fill(initial: Initial, ids: Any, dim: int) -> np.ndarray:
    out = np.full((len(ids), dim), np.nan, np.float32)
    initial.fill(np.array(ids, np.int64), out)
    return out


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.int32)


@pytest.mark.parametrize("kind", KINDS)
@given(
    ids=IDS, seed=st.integers(-(2**70), 2**70), dim=st.integers(1, 40), column=st.integers(0, 50), scale=st.floats(0, 9)
)
@examples(60)
def test_the_kernel_equals_its_definition_to_the_bit(
    kind: str, ids: list[int], seed: int, dim: int, column: int, scale: float
) -> None:
    initial = KINDS[kind](seed, "ad", scale, column=column)
    expected = np.full((len(ids), dim), np.nan, np.float32)
    initial.define(np.array(ids, np.int64), expected)
    assert np.array_equal(bits(fill(initial, ids, dim)), bits(expected))
    wide = np.full((len(ids), dim + 3), 7.0, np.float32)
    initial.fill(np.array(ids, np.int64), wide[:, 1 : dim + 1])
    assert np.array_equal(bits(wide[:, 1 : dim + 1]), bits(expected)), "columns of a wider row"
    assert (wide[:, [0, -2, -1]] == 7).all()


@pytest.mark.parametrize("kind", KINDS)
@given(ids=IDS, order=st.randoms(use_true_random=False))
@examples(30)
def test_a_row_depends_neither_on_the_order_nor_on_the_grouping_of_ids(kind: str, ids: list[int], order: Any) -> None:
    initial = KINDS[kind](3, "ad", 0.5)
    whole = dict(zip(ids, fill(initial, ids, 9), strict=True))
    order.shuffle(ids)
    for one in ids:
        assert np.array_equal(fill(initial, [one], 9)[0], whole[one])


def test_values_stay_the_same_for_ever() -> None:
    """Rows that were never written are read from this function: a change would alter stores that exist."""
    assert hex(table_key(7, "ad")) == "0xf29f22d1eaa17fc2"
    ids = [0, 1, -1, 2**63 - 1, -(2**63)]
    uniform = [
        [-0.0837615430355072, 0.125833660364151],
        [-0.2278604805469513, -0.08457621932029724],
        [0.10290896892547607, 0.20804819464683533],
        [-0.24288687109947205, 0.08296927809715271],
        [0.05853012204170227, -0.07282477617263794],
    ]
    normal = [
        [-0.036510467529296875, -0.09622573852539062],
        [-0.14281463623046875, -0.3147087097167969],
        [0.0372161865234375, 0.10702896118164062],
        [0.016735076904296875, -0.4480743408203125],
        [0.4923744201660156, 0.20319366455078125],
    ]
    assert fill(Uniform(7, "ad", 0.25), ids, 2).tolist() == uniform
    assert fill(Normal(7, "ad", 0.25), ids, 2).tolist() == normal


def test_words_are_those_of_splitmix64() -> None:
    state = GOLDEN * np.arange(1, 4, dtype=np.uint64)
    assert [hex(word) for word in mix_numpy(state)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_columns_continue_where_an_earlier_vector_ends() -> None:
    for kind in KINDS.values():
        row = fill(kind(1, "t", 0.1), range(5), 7)
        assert np.array_equal(fill(kind(1, "t", 0.1, column=4), range(5), 3), row[:, 4:])


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1 / 3, 1e30])
def test_uniform_values_lie_in_their_half_open_interval(scale: float) -> None:
    drawn = fill(Uniform(0, "t", scale), range(20_000), 48)
    assert drawn.min() >= -np.float32(scale)
    assert drawn.max() < np.float32(scale) or scale == 0


def sample(kind: str, seed: int, table: str, ids: Any) -> np.ndarray:
    """Standardised: variance 1 for either kind."""
    values = fill(KINDS[kind](seed, table, 1.0), ids, 64).astype(np.float64)
    return values * np.sqrt(3) if kind == "uniform" else values


@pytest.mark.parametrize("kind", KINDS)
def test_mean_variance_and_shape_are_those_of_the_distribution(kind: str) -> None:
    drawn = sample(kind, 5, "ad", range(20_000))
    error = 1 / np.sqrt(drawn.size)
    assert abs(drawn.mean()) < 5 * error
    assert abs(drawn.var() - 1) < 10 * error
    assert abs((drawn**3).mean()) < 20 * error
    fourth = {"uniform": 1.8, "normal": 2.9}[kind]  # twelve uniform numbers fall 0.1 short of the normal's 3
    assert (drawn**4).mean() == pytest.approx(fourth, abs=50 * error)
    assert np.abs(drawn.mean(axis=0)).max() < 5 / np.sqrt(20_000), "no column is biased"
    assert np.abs(drawn.mean(axis=1)).max() < 6 / np.sqrt(64), "no row is biased"
    if kind == "normal":
        share = [(np.abs(drawn) < limit).mean() for limit in (1, 2, 3)]
        assert share == pytest.approx([0.683, 0.954, 0.997], abs=0.006)


@pytest.mark.parametrize("kind", KINDS)
def test_neighbouring_ids_columns_tables_and_seeds_do_not_correlate(kind: str) -> None:
    ids, drawn = np.arange(20_000), sample(kind, 5, "ad", range(20_000))
    others = {
        "next id": sample(kind, 5, "ad", ids + 1),
        "id of the other sign": sample(kind, 5, "ad", -ids),
        "id in another power of two": sample(kind, 5, "ad", ids << 32),
        "table of a similar name": sample(kind, 5, "ae", ids),
        "next seed": sample(kind, 6, "ad", ids),
        "next column": np.roll(drawn, 1, axis=1),
        "column half a row away": np.roll(drawn, 32, axis=1),
    }
    for name, other in others.items():
        limit = 5 / np.sqrt(drawn.size)
        start = int("id of" in name or "id in" in name)  # id 0 is its own opposite, and shifts to itself
        assert abs((drawn[start:] * other[start:]).mean()) < limit, name
        assert abs((drawn[start:] ** 2 * other[start:] ** 2).mean() - 1) < 6 * limit, name


@pytest.mark.parametrize("kind", KINDS)
def test_no_two_rows_of_a_table_are_alike(kind: str) -> None:
    drawn = fill(KINDS[kind](5, "ad", 1.0), range(-50_000, 50_000), 4)
    assert len(np.unique(drawn, axis=0)) == 100_000


def test_given_weights_are_taken_over_one_array_a_vector() -> None:
    factors, linear = np.arange(12, dtype=np.float32).reshape(4, 3), np.arange(4, dtype=np.float32)[:, None]
    given_weights = Given([factors, linear])
    assert fill(given_weights, [3, 0, 3], 4).tolist() == [[9, 10, 11, 3], [0, 1, 2, 0], [9, 10, 11, 3]]
    for wrong in (-1, 4, 2**40):
        with pytest.raises(ValueRangeError, match=f"id {wrong} is out of range for given weights of 4 rows"):
            fill(given_weights, [0, wrong], 4)
    with pytest.raises(ConfigError, match=r"shapes \[\(4, 3\), \(3, 1\)\]"):
        Given([factors, linear[:3]])
    with pytest.raises(ConfigError, match="one array"):
        Given([])


def test_vectors_of_a_row_may_have_different_origins() -> None:
    joined = Joined([Normal(1, "t"), Constant(0.5)], (6, 2))
    out = fill(joined, [4, 9], 8)
    assert np.array_equal(out[:, :6], fill(Normal(1, "t"), [4, 9], 6))
    assert (out[:, 6:] == 0.5).all()
    defined = np.empty_like(out)
    joined.define(np.array([4, 9]), defined)
    assert np.array_equal(out, defined)
    with pytest.raises(ConfigError, match=r"1 initial values for vectors of lengths \(1, 2\)"):
        Joined([Constant()], (1, 2))


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), "wide"])
def test_a_scale_that_makes_no_sense_is_refused(scale: Any) -> None:
    with pytest.raises(ConfigError, match="Uniform: scale is"):
        Uniform(0, "t", scale)
    with pytest.raises(ConfigError, match="Normal: std is"):
        Normal(0, "t", scale)
