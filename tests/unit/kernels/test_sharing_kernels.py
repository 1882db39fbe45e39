"""The kernels that find out who uses rows, and who owns them, against their plain twins: same bits for any trainers."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from bagpipe.kernels import sharing
from bagpipe.kernels.plan import HALF, KEEP
from bagpipe.oracle.lookahead import mask_type
from definitions.sharing import define_choose_owners, define_keep_users, define_mark_users

SEEDS = range(25)
TRAINERS = [2, 8, 9, 33, 64]
NUM_TABLES, NUM_IDS, FIRST, COLUMNS = 3, 12, 20, 16


def assert_twins(kernel, twin, *arguments):
    """The same arrays afterwards."""
    others = copy.deepcopy(arguments)
    kernel(*arguments)
    twin(*others)
    for ours, theirs in zip(arguments, others, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def random_users(random, trainers, count):
    """Masks with some bits of `trainers`, at least one; the highest often."""
    flags = random.random((count, trainers)) < random.choice([0.05, 0.5])
    flags[np.arange(count), random.choice([trainers - 1, *random.integers(0, trainers, 3)], count)] = True
    bits = np.uint64(1) << np.arange(trainers, dtype=np.uint64)
    return np.bitwise_or.reduce(np.where(flags, bits, np.uint64(0)), axis=1).astype(mask_type(trainers))


@pytest.mark.parametrize("trainers", TRAINERS)
@pytest.mark.parametrize("seed", range(5))
def test_each_trainer_marks_the_rows_of_its_ids(seed, trainers):
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 3, (4, trainers)) * (random.random((4, 1)) < 0.8)
    cuts = np.concatenate([np.zeros((4, 1), np.int64), np.cumsum(lengths, axis=1)], axis=1)
    positions, features = np.concatenate([[0], np.cumsum(cuts[:, -1])]), np.array([0, 1, 3, 4])
    starts, counts = np.array([0, 10, 30]), np.array([7, 12, 3])
    ids = [random.integers(0, counts[t], cuts[f, -1]) for t in range(3) for f in range(features[t], features[t + 1])]
    bits = mask_type(trainers)(1) << np.arange(trainers, dtype=mask_type(trainers))
    assert_twins(
        sharing.mark_users, define_mark_users, np.array([0, 1, 2] if seed else [2, 0]), features, starts,
        counts, positions, np.concatenate(ids).astype(np.int32), cuts, bits, np.full(40, bits[-1]),
    )  # fmt: skip


@pytest.mark.parametrize("trainers", TRAINERS)
@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_users_move_into_the_window(seed, ahead, trainers):
    random = np.random.default_rng(seed)
    counts, starts, tables = random.integers(0, 9, 3), np.array([0, 10, 20]), np.array([0, 2])
    begins = np.add.outer(np.arange(4) * 10, np.arange(8) * 40)
    users, before = random_users(random, trainers, 30), random.integers(0, 22, 320) << HALF
    previous = np.concatenate([(random.integers(14, 22, 10) << HALF) | random.permutation(10) for _ in range(3)])
    for column in range(8):  # a row's word leads to a use before, of which it has one a batch
        for t in range(3):
            before[begins[t, column] : begins[t, column] + 10] |= random.permutation(10)
    rings = random_users(random, trainers, 320), before, *random_users(random, trainers, 640).reshape(2, 320)
    assert_twins(
        sharing.keep_users,
        define_keep_users,
        tables,
        starts,
        counts,
        21,
        16,
        ahead,
        begins,
        users,
        previous,
        *rings,
    )


@pytest.mark.parametrize("count", [0, 1, 50])
def test_rows_of_the_batch_before_are_known_by_their_index(count):
    random = np.random.default_rng(count)
    previous = (random.integers(5, 9, count) << HALF) | random.choice([0, 1, 2**31 - 1], count)
    expected = [word & 0xFFFFFFFF if word >> HALF == 7 else -1 for word in previous.tolist()]
    assert sharing.find_before(previous, 7).tolist() == expected


def random_window(random, length, given_up):
    """Batches of some rows of each table: words, begins, stays and previous words; where the first batch stands.

    Some rows do not stay until their next use, and some were read by a batch that was given up.
    """
    words, begins = np.zeros(NUM_TABLES * NUM_IDS, np.int64), np.zeros((NUM_TABLES + 1, COLUMNS), np.int64)
    stays, previous, entries, position = np.zeros(600, np.uint16), np.zeros(600, np.int64), [], {}
    end = 7
    for number in range(FIRST, FIRST + length):
        for t in range(NUM_TABLES):
            begins[t, number % COLUMNS] = end
            for index, row in enumerate(random.permutation(NUM_IDS)[: random.integers(0, NUM_IDS)].tolist()):
                entry = t * NUM_IDS + row
                if entry in position and random.random() < 0.8:
                    stays[position[entry]] = number + 1 - (words[entry] >> HALF)
                previous[end], stays[end] = words[entry], random.choice([0, KEEP])
                words[entry], position[entry] = (number + 1) << HALF | index, end
                entries += [entry] if number == FIRST else []
                end += 1
        begins[NUM_TABLES, number % COLUMNS] = end
    if given_up:
        words[random.random(len(words)) < 0.3] = (FIRST + length + 1) << HALF | 5
    return words, begins, stays, previous, np.array(entries, np.int32)


@pytest.mark.parametrize("trainers", TRAINERS)
@pytest.mark.parametrize("seed", SEEDS)
def test_the_trainer_that_uses_a_row_most_becomes_its_owner(seed, trainers):
    random = np.random.default_rng(seed)
    length = int(random.choice([1, 2, COLUMNS - 1]))
    words, begins, stays, previous, entries = random_window(random, length, given_up=seed % 5 == 0)
    bounds = begins[:, FIRST % COLUMNS] - begins[0, FIRST % COLUMNS]
    places = random.integers(-2, 2, len(entries)).astype(np.int32)
    before = np.concatenate([[0], np.cumsum(places <= 0)])
    fetch_slots = random.integers(0, 1000, before[-1]).astype(np.int32)
    users, owners = random_users(random, trainers, 600), np.full(before[-1], -5, np.int8)
    assert_twins(
        sharing.choose_owners, define_choose_owners, np.array([0, 2] if seed % 2 else [0, 1, 2]), bounds,
        entries, places, FIRST, length, words, begins, stays, users, previous, trainers, before[bounds], fetch_slots,
        owners,
    )  # fmt: skip
    assert owners.max(initial=-5) < trainers
