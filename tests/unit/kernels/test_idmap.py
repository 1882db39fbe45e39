"""The id map gives the positions that a plain dict gives, whatever the ids, and regular ids spread like random ones."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import StoreError
from bagpipe.kernels import idmap
from bagpipe.kernels.idmap import IdMap, mixed_by_numpy
from definitions.idmap import IdMapByDict
from harness.examples import examples

LOWEST, HIGHEST = -(2**63), 2**63 - 1
EDGES = [LOWEST, LOWEST + 1, -(2**32), -1, 0, 1, 2**24, 2**24 + 1, 2**32, HIGHEST - 1, HIGHEST]

ids_of_one_call = st.lists(
    st.one_of(st.integers(-3, 20), st.sampled_from(EDGES), st.integers(LOWEST, HIGHEST)), max_size=60
)


def array(ids: list[int]) -> np.ndarray:
    return np.array(ids, np.int64)


@examples(150)
@given(st.lists(st.tuples(st.booleans(), ids_of_one_call), max_size=12))
def test_it_equals_a_dict_after_any_calls(calls: list[tuple[bool, list[int]]]) -> None:
    ours, twin = IdMap(), IdMapByDict()
    for inserts, ids in calls:
        results = []
        for each in (ours, twin):
            positions = np.full(len(ids), -7, np.int64)
            call = each.find_or_insert if inserts else each.find
            results.append((call(array(ids), positions), positions.tolist()))
        assert results[0] == results[1]
        assert len(ours) == len(twin)
    assert ours.ids().tolist() == twin.ids().tolist()


def test_positions_survive_growth_and_follow_first_insertion() -> None:
    ids = np.random.default_rng(0).integers(LOWEST, HIGHEST, 200_000)
    ours, positions = IdMap(), np.empty(200_000, np.int64)
    for part in np.array_split(np.arange(200_000), 7):
        assert ours.find_or_insert(ids[part], positions[part[0] : part[-1] + 1]) == len(part)
    assert np.array_equal(positions, np.arange(200_000))
    assert ours.find(ids[::-1].copy(), positions) == 0
    assert np.array_equal(positions, np.arange(200_000)[::-1])
    assert np.array_equal(ours.ids(10, 20), ids[10:20])


def test_an_id_repeated_within_a_call_gets_one_position() -> None:
    ours, positions = IdMap(), np.empty(6, np.int64)
    assert ours.find_or_insert(array([5, -5, 5, 5, 0, -5]), positions) == 3
    assert positions.tolist() == [0, 1, 0, 0, 2, 1]


def test_a_call_of_no_ids_does_nothing() -> None:
    ours, nothing = IdMap(), np.empty(0, np.int64)
    assert ours.find(nothing, nothing) == 0
    assert ours.find_or_insert(nothing, nothing) == 0
    assert len(ours) == 0


def test_ids_whose_mixed_bits_are_equal_are_told_apart() -> None:
    ids = np.arange(300_000)
    in_order = np.argsort(mixed_by_numpy(ids), kind="stable")
    bits = mixed_by_numpy(ids)[in_order]
    equal = np.flatnonzero(bits[1:] == bits[:-1])
    assert len(equal) > 3
    first, second = ids[in_order[equal]], ids[in_order[equal + 1]]
    ours, positions = IdMap(), np.empty(len(equal), np.int64)
    ours.find_or_insert(first, positions)
    assert ours.find(second, positions) == len(equal)
    assert ours.find_or_insert(second, positions) == len(equal)
    assert ours.find(second, positions) == 0
    assert np.array_equal(ours.ids()[positions], second)


def test_reserving_makes_room_so_that_inserting_allocates_nothing() -> None:
    ours = IdMap()
    ours.reserve(10_000)
    nbytes = ours.nbytes
    ours.find_or_insert(np.arange(10_000), np.empty(10_000, np.int64))
    assert ours.nbytes == nbytes


def test_memory_stays_within_what_the_module_says() -> None:
    ours = IdMap()
    for start in range(0, 300_000, 1000):
        ours.find_or_insert(np.arange(start, start + 1000), np.empty(1000, np.int64))
        if len(ours) >= 10_000:
            assert 19 * len(ours) <= ours.nbytes <= 25 * len(ours)


def test_more_ids_than_can_be_told_apart_are_refused_and_nothing_changes() -> None:
    ours = IdMap()
    ours.find_or_insert(array([1]), np.empty(1, np.int64))
    with pytest.raises(StoreError, match=r"3,006,477,107.*more servers"):
        ours.reserve(idmap.NUM_IDS_MAX)
    assert ours.ids().tolist() == [1]


@pytest.mark.parametrize("stride", [1, 2, 3, 64, 4096, 2**20, 2**32, 2**40, 10**9 + 7, -1])
def test_regular_ids_do_not_cluster(stride: int) -> None:
    num_ids = 2**16
    ids = np.arange(num_ids, dtype=np.int64) * np.int64(stride)  # wraps around for the widest strides, still distinct
    homes = (mixed_by_numpy(ids) * np.uint64(num_ids)) >> np.uint64(32)
    loads = np.bincount(homes.astype(np.int64), minlength=num_ids)
    # Of balls thrown at random into as many bins, 1/e of the bins stay empty and none gets as many as 12.
    assert (loads == 0).mean() == pytest.approx(np.exp(-1), abs=0.02)
    assert loads.max() < 12


def test_the_kernel_mixes_like_its_numpy_twin() -> None:
    ids = np.concatenate([array(EDGES), np.random.default_rng(1).integers(LOWEST, HIGHEST, 1000)])
    ours = IdMap()
    ours.find_or_insert(ids, np.empty(len(ids), np.int64))
    words = ours._slots[ours._slots != 0]
    by_position = words[np.argsort(words & np.uint64(0xFFFFFFFF))]
    assert np.array_equal(by_position >> np.uint64(32), mixed_by_numpy(ours.ids()))
