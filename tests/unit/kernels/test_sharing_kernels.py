"""The kernels that find out who uses rows, and who owns them, against their plain twins: same bits for any trainers."""

from __future__ import annotations

import copy
from itertools import pairwise

import numpy as np
import pytest

from bagpipe.kernels import sharing
from bagpipe.kernels.oracle import HALF, KEEP, Batch, Rings, Rows, RowState
from bagpipe.kernels.sharing import RowUsers, UserRings
from bagpipe.oracle.oracle import mask_type
from definitions.sharing import define_choose_owners, define_find_users, define_note_users
from harness.covering import few

SEEDS = few(5, of=25)
TRAINERS = [2, 8, 9, 33, 64]
NUM_TABLES, NUM_IDS, FIRST, COLUMNS = 3, 12, 20, 16


def assert_twins(kernel, twin, *arguments):
    """The same arrays afterwards."""
    others = copy.deepcopy(arguments)
    kernel(*arguments)
    twin(*others)
    for ours, theirs in zip(arguments, others, strict=True):
        for own, their in zip(ours, theirs, strict=True) if isinstance(ours, tuple) else [(ours, theirs)]:
            np.testing.assert_array_equal(own, their)


def random_users(random, trainers, count):
    """Masks with some bits of `trainers`, at least one; the highest often."""
    flags = random.random((count, trainers)) < random.choice([0.05, 0.5])
    flags[np.arange(count), random.choice([trainers - 1, *random.integers(0, trainers, 3)], count)] = True
    bits = np.uint64(1) << np.arange(trainers, dtype=np.uint64)
    return np.bitwise_or.reduce(np.where(flags, bits, np.uint64(0)), axis=1).astype(mask_type(trainers))


@pytest.mark.parametrize("trainers", TRAINERS)
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", few(2, of=5))
def test_the_trainers_of_its_ids_are_the_users_of_a_row(seed, ahead, trainers):
    random = np.random.default_rng(seed)
    tables = np.array([0, 1, 2] if seed else [0, 2])
    begins = np.add.outer(np.arange(len(tables) + 1) * 10, np.arange(8) * 40)
    counts = random.integers(1, 9, 3)
    begins[:, 21 % 8] = 200 + np.concatenate([[0], np.cumsum(counts[tables])])
    lengths = random.integers(0, 3, (4, trainers)) * (random.random((4, 1)) < 0.8)
    cuts = np.concatenate([np.zeros((4, 1), np.int64), np.cumsum(lengths, axis=1)], axis=1)
    positions, features = np.concatenate([[0], np.cumsum(cuts[:, -1])]), np.array([0, 1, 3, 4])
    ids = [random.integers(0, counts[t], cuts[f, -1]) for t in range(3) for f in range(features[t], features[t + 1])]
    nothing = np.empty(0, np.int64)
    batch = Batch(nothing, positions, features, nothing, np.concatenate(ids).astype(np.int32), counts, nothing)
    before = random.integers(0, 22, 320) << HALF
    previous = np.concatenate([(random.integers(14, 22, 10) << HALF) | random.permutation(10) for _ in range(3)])
    for column in range(8):  # a row's last use leads to one before, of which it has one a batch
        for k in range(len(tables)):
            before[begins[k, column] : begins[k, column] + 10] |= random.permutation(10)
    users = UserRings(random_users(random, trainers, 320), before, *random_users(random, trainers, 640).reshape(2, 320))
    bits = mask_type(trainers)(1) << np.arange(trainers, dtype=mask_type(trainers))
    rings = Rings(tables, begins, np.empty(0, np.int32), np.empty(0, np.uint16))
    used = np.full((3, trainers), 77)
    assert_twins(sharing.find_users, define_find_users, rings, users, batch, cuts, bits, 21, used)
    assert used[tables].max() <= counts.max()
    assert_twins(sharing.note_users, define_note_users, rings, users, previous, 21, 16, ahead)


@pytest.mark.parametrize("trainers", TRAINERS)
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_what_is_known_of_the_users_of_rows_is_told_table_by_table(ahead, trainers):
    random = np.random.default_rng(ahead)
    begins = np.zeros((3, 8), np.int64)
    begins[:, 7] = 5, 30, 55  # tables 2 and 0 of three
    rings = Rings(np.array([2, 0]), begins, np.empty(0, np.int32), np.empty(0, np.uint16))
    previous = (random.integers(5, 9, 60) << HALF) | random.choice([0, 1, 2**31 - 1], 60)
    users = UserRings(random_users(random, trainers, 60), previous, *random_users(random, trainers, 120).reshape(2, 60))
    bounds = np.array([0, 25, 40, 65])
    told = RowUsers(*np.zeros((3, 65), users.users.dtype), np.full(65, -7, np.int32))
    sharing.tell_users(rings, users, 7, ahead, bounds, told)
    order = [*range(30, 55), *[None] * 15, *range(5, 30)]
    words = [None if at is None else int(previous[at]) for at in order]
    for masks, ring in ((told.users, users.users), (told.next, users.next), (told.later, users.later)):
        asked = masks is told.users or ahead > (masks is told.later)
        assert masks.tolist() == [0 if at is None or not asked else int(ring[at]) for at in order]
    before = [-7 if word is None else word & 0xFFFFFFFF if word >> HALF == 7 else -1 for word in words]
    assert told.before.tolist() == before


def random_window(random, length):
    """Batches of some rows of each table: what is known of rows, rings, and each row's use before.

    Some rows do not stay until their next use.
    """
    last_use, begins = np.zeros(NUM_TABLES * NUM_IDS, np.int64), np.zeros((NUM_TABLES + 1, COLUMNS), np.int64)
    rows, next_use, previous = np.zeros(600, np.int32), np.zeros(600, np.uint16), np.zeros(600, np.int64)
    end, position = 7, {}
    for number in range(FIRST, FIRST + length):
        for t in range(NUM_TABLES):
            begins[t, number % COLUMNS] = end
            for index, own in enumerate(random.permutation(NUM_IDS)[: random.integers(0, NUM_IDS)].tolist()):
                row = t * NUM_IDS + own
                if row in position and random.random() < 0.8:
                    next_use[position[row]] = number + 1 - (last_use[row] >> HALF)
                rows[end], previous[end], next_use[end] = row, last_use[row], random.choice([0, KEEP])
                last_use[row], position[row] = (number + 1) << HALF | index, end
                end += 1
        begins[NUM_TABLES, number % COLUMNS] = end
    state = RowState(last_use, np.zeros(0, np.int32), np.arange(NUM_TABLES) * NUM_IDS, np.zeros(0, np.int64))
    return state, Rings(np.arange(NUM_TABLES), begins, rows, next_use), previous


@pytest.mark.parametrize("trainers", TRAINERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_trainer_that_uses_a_row_most_becomes_its_owner(seed, trainers):
    random = np.random.default_rng(seed)
    state, rings, previous = random_window(random, int(random.choice([1, 2, COLUMNS - 1])))
    first, *_, last = begins = rings.begins[:, FIRST % COLUMNS]
    bounds, next_use = begins - first, rings.next_use[first:last].copy()
    next_use[random.random(len(next_use)) < 0.1] = 0
    missing = random.random(len(next_use)) < 0.5
    absent, before = np.zeros(len(next_use), np.int32), np.concatenate([[0], np.cumsum(missing)])
    for start, stop in pairwise(bounds.tolist()):
        own = start + np.flatnonzero(missing[start:stop])
        absent[start : start + len(own)] = own
    slots, nothing = random.integers(0, 1000, before[-1]).astype(np.int32), np.empty(0, np.int64)
    users = UserRings(random_users(random, trainers, 600), previous, *random_users(random, trainers, 2).reshape(2, 1))
    owners = np.full(before[-1], -5, np.int8)
    assert_twins(
        sharing.choose_owners, define_choose_owners, state, rings, users, FIRST, trainers,
        Rows(nothing, slots[:0], bounds), next_use, absent, Rows(nothing, slots, before[bounds]), owners,
    )  # fmt: skip
    assert owners.max(initial=0) < trainers
    assert owners.min(initial=0) >= 0
