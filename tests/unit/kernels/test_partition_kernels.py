"""The kernels that divide plans among trainers against their plain twins: same bits for any number of trainers."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from bagpipe.kernels import partition, shares
from bagpipe.kernels.partition import HALF, LEAVES, OWNER, SHARED
from bagpipe.oracle.oracle import mask_type
from definitions.partition import define_follow
from definitions.shares import (
    define_count_shares,
    define_count_values,
    define_fill_shares,
    define_fill_values,
    define_localise,
)

TRAINERS = [2, 8, 9, 33, 64]
BASES = np.array([0, 60, 0, 60])


def assert_twins(kernel, twin, *arguments):
    """The same result, and the same arrays afterwards."""
    others = copy.deepcopy(arguments)
    ours, theirs = kernel(*arguments), twin(*others)
    for mine, other in zip((*arguments, ours), (*others, theirs), strict=True):
        np.testing.assert_equal(mine, other)


@dataclass
class Rows:
    """Rows of four tables, of two slot spaces with 60 slots each."""

    bounds: np.ndarray
    slots: np.ndarray
    users: np.ndarray
    owners: np.ndarray
    kinds: np.ndarray
    phases: np.ndarray
    freed: np.ndarray

    @property
    def places(self):
        return np.repeat(BASES, np.diff(self.bounds)) + self.slots


def some_rows(random, trainers, empty=False):
    """Rows as plans have them; tables may have none."""
    counts = np.zeros(4, np.int64) if empty else random.integers(0, 30, 4) * (random.random(4) < 0.8)
    bounds, free = np.concatenate([[0], np.cumsum(counts)]), [random.permutation(60), random.permutation(60)]
    slots = [free[t % 2][:30][: counts[t]] if t < 2 else free[t % 2][30:][: counts[t]] for t in range(4)]
    total = int(bounds[-1])
    flags = random.random((total, trainers)) < random.choice([0.05, 0.5])
    flags[np.arange(total), random.choice([trainers - 1, *random.integers(0, trainers, 3)], total)] = True
    bits = np.uint64(1) << np.arange(trainers, dtype=np.uint64)
    users = np.bitwise_or.reduce(np.where(flags, bits, np.uint64(0)), axis=1).astype(mask_type(trainers))
    owners = random.integers(-1, trainers, total) if random.random() < 0.8 else np.full(total, SHARED)
    owners[random.random(total) < 0.1] = trainers - 1
    return Rows(
        bounds, np.concatenate(slots).astype(np.int32), users, owners.astype(np.int8),
        random.integers(0, 3, total).astype(np.int8), random.integers(0, 2, total).astype(np.int8),
        random.integers(-1, 50, total).astype(np.int32),
    )  # fmt: skip


def some_masks(random, trainers, count):
    """Masks of trainers, often none."""
    flags = random.random((count, trainers)) < random.choice([0.0, 0.3, 0.8], (count, 1))
    bits = np.uint64(1) << np.arange(trainers, dtype=np.uint64)
    return np.bitwise_or.reduce(np.where(flags, bits, np.uint64(0)), axis=1).astype(mask_type(trainers))


def some_state(random, trainers):
    """Words of all slots; no row is marked."""
    return (random.integers(-1, 2**31 - 1, 120) << HALF) | random.integers(0, trainers + 1, 120)


cases = pytest.mark.parametrize(
    ("trainers", "seed"),
    [
        pytest.param(trainers, seed, marks=pytest.mark.long if 1 < seed < 6 else ())
        for trainers, seed in [*itertools.product(TRAINERS, range(6)), (2, 99), (64, 99)]
    ],
)


def made(trainers, seed):
    random = np.random.default_rng(seed)
    return random, some_rows(random, trainers, empty=seed == 99), some_state(random, trainers)


@cases
def test_rows_that_leave_are_marked_and_written_by_their_owner(trainers, seed):
    _, rows, state = made(trainers, seed)
    partition.mark_leaving(rows.bounds, rows.slots, BASES, state)
    assert (state & LEAVES != 0).sum() == len(rows.slots)
    owners = (state[np.repeat(BASES, np.diff(rows.bounds)) + rows.slots] & OWNER) - 1
    writers = partition.writers_of(rows.bounds, rows.slots, BASES, state, trainers)
    expected = [slot % trainers if owner == SHARED else owner for slot, owner in zip(rows.slots, owners, strict=True)]
    assert writers.tolist() == expected
    assert not (state & LEAVES).any()


@cases
@pytest.mark.parametrize(("users_read", "moving"), [(True, False), (False, False), (True, True)])
def test_a_plan_takes_its_rows(trainers, seed, users_read, moving):
    random, rows, state = made(trainers, seed)
    if moving:  # nobody shares rows in that design
        state |= (state & partition.OWNER) == 0
    total = len(rows.slots)
    state[rows.places[random.random(total) < 0.3]] |= LEAVES
    fetched = random.random(total) < 0.4
    fetch_bounds = np.concatenate([[0], np.cumsum(fetched)])[rows.bounds]
    count = int(fetched.sum())
    before = np.where(random.random(total) < 0.5, random.integers(0, 10, total), -1).astype(np.int32)
    bits = mask_type(trainers)(1) << np.arange(trainers, dtype=mask_type(trainers))
    outputs = np.zeros((3, total), np.int8)
    assert_twins(
        partition.follow, define_follow, rows.bounds, rows.slots, rows.users,
        some_masks(random, trainers, total), some_masks(random, trainers, total), before,
        np.arange(5) * 10, fetch_bounds, rows.slots[fetched], rows.freed[fetched],
        random.integers(0 if moving else -1, trainers, count).astype(np.int8),
        np.append(bits, np.bitwise_or.reduce(bits)), users_read,
        np.array([0.1, partition.NEVER, 1.02, 2.5]) if moving else np.full(4, partition.NEVER),
        BASES, state, *outputs, np.zeros(total, np.int32), np.full(50, partition.AFTERWARDS, np.int8),
        np.zeros(count, rows.users.dtype),
    )  # fmt: skip


def test_fetched_rows_that_the_batch_lacks_are_not_met():
    one, none = np.array([0, 1]), np.zeros(1, np.int8)
    met = partition.follow(
        one, np.array([3], np.int32), *np.ones((3, 1), np.uint8), np.array([-1], np.int32), one, one,
        np.array([4], np.int32), np.zeros(1, np.int32), none, np.array([1, 2, 3], np.uint8), True,
        np.full(1, partition.NEVER), np.zeros(1, np.int64), np.zeros(9, np.int64),
        none.copy(), none.copy(), none.copy(), np.zeros(1, np.int32),
        none.copy(), np.zeros(1, np.uint8),
    )  # fmt: skip
    assert met == 0


def room(counts, tables=4):
    """Lists of these lengths: their bounds, of which the first are known, and their items."""
    ends = np.cumsum(counts)
    bounds = np.full((np.size(counts), tables + 1), -9)
    bounds[:, 0] = ends - np.ravel(counts)
    return bounds, np.full(ends[-1], -9, np.int32)


@cases
def test_shares_are_counted_and_listed(trainers, seed):
    _, rows, _ = made(trainers, seed)
    owned, pairs = np.zeros((2, trainers + 1), np.int64), np.zeros((2, trainers + 1, trainers), np.int64)
    assert_twins(shares.count_shares, define_count_shares, rows.users, rows.owners, rows.phases, owned, pairs)
    lists = [part for counts in (pairs.sum((0, 1)), owned, pairs.transpose(0, 2, 1), pairs) for part in room(counts)]
    assert_twins(
        shares.fill_shares, define_fill_shares, rows.bounds, rows.users, rows.owners, rows.phases, trainers,
        *lists,
    )  # fmt: skip
    assert all((items >= 0).all() for items in lists), "every place of every list was written"


@pytest.mark.parametrize(("trainers", "seed"), [(2, 0), (2, 1), (2, 99), (8, 2), (9, 3), (33, 4), (64, 5)])
@pytest.mark.parametrize("flows", [[-1, 1, 2], [-1, 1, 1], [0, 1, 2], [-1, -1, -1]])
def test_vectors_that_are_sent_are_counted_and_listed(trainers, seed, flows):
    _, rows, _ = made(trainers, seed)
    pairs = np.zeros((3, trainers, trainers), np.int64)
    chosen = np.array(flows)
    assert_twins(shares.count_values, define_count_values, rows.users, rows.owners, rows.kinds, chosen, pairs)
    lists = [part for counts in (pairs, pairs.transpose(0, 2, 1)) for part in room(counts)]
    assert_twins(
        shares.fill_values, define_fill_values, rows.bounds, rows.slots, rows.users, rows.owners, rows.kinds,
        rows.freed, chosen, trainers, *lists, np.full((3, trainers), -1, np.int32),
    )  # fmt: skip
    assert all((items >= 0).all() for items in lists), "every place of every list was written"


@pytest.mark.parametrize("seed", range(10))
def test_ids_become_indices_into_a_trainers_own_rows(seed):
    random = np.random.default_rng(seed)
    bounds, tables = np.array([0, 6, 6, 20]), np.array([0, 2, 2])
    lengths = random.integers(0, 6, (3, 4))
    cuts = np.concatenate([np.zeros((3, 1), np.int64), np.cumsum(lengths, axis=1)], axis=1)
    sizes = np.diff(bounds)[tables]
    features = [random.integers(0, size, cut[-1]) for size, cut in zip(sizes, cuts, strict=True)]
    inverse = np.concatenate(features).astype(np.int32)
    for rank in range(4):
        own = [bounds[t] + ids[cut[rank] : cut[rank + 1]] for t, ids, cut in zip(tables, features, cuts, strict=True)]
        used = np.unique(np.concatenate(own)).astype(np.int32)
        arguments = inverse, cuts, rank, tables, bounds, used, np.searchsorted(used, bounds)
        assert_twins(shares.localise, define_localise, *arguments)
