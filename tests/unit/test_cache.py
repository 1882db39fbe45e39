"""Slots: what is put in comes out once it was updated, and the size is divided as the data needs it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.cache import RowCache, divide, group_by_width
from bagpipe.config import Size
from bagpipe.errors import CapacityError
from bagpipe.kernels import move
from definitions.move import define_gather, define_scatter
from harness.examples import examples


def slots(*numbers):
    return np.array(numbers, np.int32)


def make():
    return RowCache([3, 2, 3], [6, 4], torch.device("cpu"))


def rows(count, width, start=0.0):
    return (start + np.arange(count * width)).astype(np.float32).reshape(count, width)


def test_tables_of_equal_width_share_a_slot_space():
    assert group_by_width([3, 2, 3]) == ([0, 1, 0], [3, 2])
    cache = make()
    assert [tuple(part.shape) for part in cache.data] == [(6, 3), (4, 2)]
    assert cache.num_bytes == 4 * (6 * 3 + 4 * 2)


def test_only_rows_that_were_updated_come_out():
    cache = make()
    cache.insert(0, np.array([10, 11]), slots(5, 0), rows(2, 3))
    cache.insert(2, np.array([10, 12]), slots(1, 2), rows(2, 3, 50))
    cache.mark_updated(0, slots(0))
    cache.mark_updated(2, slots(1, 2))
    out = cache.copy_out(0, np.array([10, 11]), slots(5, 0))
    assert out.ids.tolist() == [11]
    assert out.values.tolist() == [[3, 4, 5]]
    (dirty,) = cache.take_dirty()
    assert [(part.table, part.ids.tolist()) for part in dirty] == [(2, [10, 12])]
    assert dirty[0].values.tolist() == rows(2, 3, 50).tolist()
    assert list(cache.take_dirty()) == [[]]


def test_a_new_tenant_is_clean():
    cache = make()
    cache.insert(1, np.array([1]), slots(3), rows(1, 2))
    cache.mark_updated(1, slots(3))
    cache.insert(1, np.array([2]), slots(3), rows(1, 2, 7))
    assert list(cache.take_dirty()) == [[]]
    assert cache.read(1, slots(3)).tolist() == [[7, 8]]


def test_first_columns_leave_those_behind_them_as_they_are():
    cache = make()
    cache.insert(0, np.array([1, 2]), slots(4, 1), rows(2, 3))
    cache.insert(2, np.array([3, 4]), slots(1, 0), rows(2, 2, 50))
    assert cache.read(0, slots(4, 1, 0)).tolist() == [[0, 1, 2], [50, 51, 5], [52, 53, 0]]
    assert cache.tenant_id[0][:2].tolist() == [4, 3]


@pytest.mark.parametrize("columns", [1, 4, 7])
def test_moving_rows_gives_what_its_twin_gives(columns):
    rng = np.random.default_rng(columns)
    at = rng.permutation(20)[:9].astype(np.int32)
    values = rng.random((9, columns), np.float32)
    moved, simple = np.full((2, 20, 7), np.float32(0.5))
    move.scatter(moved, at, values)
    define_scatter(simple, at, values)
    assert moved.tobytes() == simple.tobytes()
    out, expected = np.empty((2, 9, 7), np.float32)
    move.gather(moved, at, out)
    define_gather(simple, at, expected)
    assert out.tobytes() == expected.tobytes()


def test_a_kept_row_counts_as_written_and_stays():
    cache = make()
    cache.insert(1, np.array([1, 2]), slots(3, 0), rows(2, 2))
    cache.mark_updated(1, slots(0))
    assert cache.copy_kept(1, np.array([1, 2]), slots(3, 0)).ids.tolist() == [2]
    assert cache.copy_kept(1, np.array([1, 2]), slots(3, 0)).ids.tolist() == []
    cache.mark_updated(1, slots(3))
    assert [part.ids.tolist() for block in cache.take_dirty() for part in block] == [[1]]


@pytest.mark.parametrize("most", [1, 2, 3, 5, 9, 100])
def test_updated_rows_come_in_blocks_of_bounded_size(most):
    for seed in range(20):
        random = np.random.default_rng(seed)
        cache = RowCache([3, 2, 3], [17, 6], torch.device("cpu"))
        tables, expected = random.choice([0, 2], 17), set()
        for table, own in ((0, np.flatnonzero(tables == 0)), (2, np.flatnonzero(tables == 2)), (1, np.arange(6))):
            cache.insert(table, own * 10, own.astype(np.int32), rows(len(own), cache.widths[cache.group[table]]))
            updated = own[random.random(len(own)) < random.random()]
            cache.mark_updated(table, updated.astype(np.int32))
            expected |= {(table, row) for row in (updated * 10).tolist()}
        blocks = list(cache.take_dirty(most))
        sizes = [sum(len(part.ids) for part in block) for block in blocks]
        assert sorted((part.table, row) for block in blocks for part in block for row in part.ids) == sorted(expected)
        assert max(sizes) <= most
        assert all(one + other > most for one, other in pairwise(sizes)), "no more than needed"
        assert all(len({part.table for part in block}) == len(block) for block in blocks)


def test_a_row_that_leaves_between_two_blocks_is_in_none():
    cache = make()
    cache.insert(0, np.arange(6), np.arange(6, dtype=np.int32), rows(6, 3))
    cache.mark_updated(0, np.arange(6, dtype=np.int32))
    blocks = cache.take_dirty(2)
    found = next(blocks)
    assert cache.copy_out(0, np.arange(1, 4), slots(1, 2, 3)).ids.tolist() == [2, 3]
    cache.insert(2, np.array([70, 71]), slots(2, 3), rows(2, 3))
    found += [part for block in blocks for part in block]
    assert [(part.table, part.ids.tolist()) for part in found] == [(0, [0, 1]), (0, [4, 5])]


def test_a_size_in_rows_and_in_bytes_is_divided_as_the_first_batch_is():
    assert divide(100, [8, 2], [30, 10], [None, None]) == [75, 25]
    assert divide(Size(4 * (8 * 60 + 2 * 20)), [8, 2], [30, 10], [None, None]) == [60, 20]


def test_what_a_width_can_not_use_goes_to_the_others():
    assert divide(100, [8, 2], [30, 10], [40, None]) == [40, 60]
    assert divide(100, [8, 2], [5, 5], [8, 9]) == [8, 9]
    assert divide(100, [8, 2, 4], [10, 10, 10], [12, None, 1000]) == [12, 44, 44]


def test_a_width_without_a_row_in_the_first_batch_gets_a_slot_at_least():
    assert min(divide(100, [8, 2], [30, 0], [None, None])) >= 1


def test_all_rows_of_known_tables_for_a_policy_that_keeps_them():
    assert divide(1, [8, 2, 8], [5, 5, 5], [7, 9, 20], whole=True) == [27, 9]


@given(data=st.data(), in_bytes=st.booleans())
@examples(150)
def test_a_division_fits_the_size_and_the_first_batch_or_says_what_would(data, in_bytes):
    number = data.draw(st.integers(1, 4))
    widths = data.draw(st.lists(st.integers(1, 4), min_size=number, max_size=number))
    needed = data.draw(st.lists(st.integers(0, 50), min_size=number, max_size=number))
    most = [data.draw(st.one_of(st.none(), st.integers(max(1, need), need + 60))) for need in needed]
    total = data.draw(st.integers(1, 4000))
    group, distinct = group_by_width(widths)
    price = [4 * width if in_bytes else 1 for width in distinct]
    try:
        found = divide(Size(total) if in_bytes else total, widths, needed, most)
    except CapacityError as error:
        enough = str(error).split("cache=")[1].split(",")[0]
        retry = Size(int(enough.strip("'").removesuffix("KB")) * 1000) if in_bytes else int(enough)
        found, total = divide(retry, widths, needed, most), retry.num_bytes if in_bytes else retry
    assert sum(slots * cost for slots, cost in zip(found, price, strict=True)) <= total
    for each, slots_ in enumerate(found):
        own = [position for position in range(number) if group[position] == each]
        assert slots_ >= max(1, sum(needed[position] for position in own))
        if all(most[position] is not None for position in own):
            assert slots_ <= sum(most[position] for position in own)


def test_the_error_names_every_width():
    with pytest.raises(CapacityError, match=r"1,000 bytes .* 30 rows of 8 floats, 10 rows of 2 floats: .*cache='2KB'"):
        divide(Size(1000), [8, 2], [30, 10], [None, None])
