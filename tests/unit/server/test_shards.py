"""Which server has a row: fixed for ever, even, and the same in the kernel and in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.server.shards import divide, pick, place
from definitions.shards import define_divide, define_pick, define_place, define_servers

LOWEST, HIGHEST = -(2**63), 2**63 - 1
some_ids = st.lists(st.one_of(st.integers(-3, 3), st.integers(LOWEST, HIGHEST)), max_size=40)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int64)


@given(ids=some_ids, table=st.integers(0, 1000), num_servers=st.integers(1, 9))
def test_ids_are_divided_as_numpy_does_it(ids: list[int], table: int, num_servers: int) -> None:
    order, starts = divide(table, array(ids), num_servers)
    expected_order, expected_starts = define_divide(table, array(ids), num_servers)
    assert order.tolist() == expected_order.tolist()
    assert starts.tolist() == expected_starts.tolist()


def test_the_server_of_a_row_never_changes() -> None:
    ids = array([0, 1, 2, 3, -1, 10**12, LOWEST, HIGHEST])
    assert define_servers(0, ids, 7).tolist() == [6, 3, 4, 0, 6, 6, 1, 1]
    assert define_servers(25, ids, 7).tolist() == [4, 0, 5, 6, 4, 6, 5, 0]


@pytest.mark.parametrize("stride", [1, 64, 2**32, 2**40 + 1])
@pytest.mark.parametrize("table", [0, 1, 25])
def test_dense_and_strided_ids_spread_evenly(stride: int, table: int) -> None:
    for num_servers in (2, 3, 8):
        counts = np.bincount(define_servers(table, np.arange(100_000) * stride, num_servers))
        assert len(counts) == num_servers
        assert abs(counts * num_servers / 100_000 - 1).max() < 0.02


@given(width=st.integers(1, 70), num_rows=st.integers(0, 30), seed=st.integers(0, 100))
def test_rows_are_picked_and_placed_as_numpy_does_it(width: int, num_rows: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = random.integers(0, 2**32, (num_rows, width), np.uint32).view(np.float32)
    order = random.permutation(num_rows)
    found, expected = np.zeros(num_rows * width, np.float32), np.zeros(num_rows * width, np.float32)
    pick(rows, order, found)
    define_pick(rows, order, expected)
    assert found.tobytes() == expected.tobytes()

    flags = random.random(num_rows) < 0.5
    packed = rows[: np.count_nonzero(flags)].reshape(-1)
    outs, missing = np.zeros((2, num_rows, width), np.float32), np.full((2, num_rows + 2), -9)
    counts = [placed(packed, flags, order, outs[k], missing[k], 2) for k, placed in enumerate((place, define_place))]
    assert counts[0] == counts[1] == 2 + num_rows - np.count_nonzero(flags)
    assert outs[0].tobytes() == outs[1].tobytes()
    assert missing[0].tolist() == missing[1].tolist()
