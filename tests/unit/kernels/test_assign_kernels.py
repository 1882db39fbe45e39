"""Kernels that place samples, against their twins; and even parts against the best ones there are."""

import numpy as np
import pytest

from bagpipe.kernels import assign
from definitions import assign as definitions

SHAPES = [(1, 1), (1, 3), (5, 2), (9, 3), (12, 4), (40, 8), (64, 64)]


def even_sizes(samples, trainers):
    return np.diff(np.arange(trainers + 1) * samples // trainers)


@pytest.mark.parametrize(("samples", "trainers"), SHAPES)
@pytest.mark.parametrize("span", [1, 3, 100])
def test_samples_are_placed_by_score_in_even_parts(samples, trainers, span):
    scores = np.random.default_rng(2).integers(0, span, (samples, trainers)).astype(np.int32)
    found, expected = np.empty((2, samples), np.int64)
    for kernel, part in ((assign.place, found), (definitions.define_place, expected)):
        room = even_sizes(samples, trainers)
        kernel(scores, room, part)
        assert not room.any()
    assert np.array_equal(found, expected)


def make_rows(num_ids):
    return assign.Rows(*[np.zeros(num_ids, kind) for kind in (np.int32, np.uint8, np.int32, np.uint8)])


def work(kernels, batches, samples, trainers, num_entries):
    """All that is done with batches of (ids, ends) by feature; everything that is left behind."""
    memory = np.full(num_entries, assign.HOMELESS, np.uint64)
    left = []
    for stamp, features in enumerate(batches, 1):
        lengths = sum(np.diff(ends, prepend=0) for _, ends in features)
        starts = np.cumsum(lengths) - lengths
        rows, num_rows = make_rows(lengths.sum()), 0
        found = []
        for salt, (ids, _) in enumerate(features):
            found.append(np.full(len(ids), -1, np.int32))
            num_rows = kernels["find_rows"](memory, stamp, np.uint64(salt + 2**63), ids, found[-1], rows, num_rows)
        left += [num_rows, *found]
        scores = np.zeros((samples, trainers), np.int32)
        votes = kernels["weigh"](rows, num_rows, np.array([9, 9, 5, 2], np.int32))
        places, stops = np.full(lengths.sum(), -1, np.int32), starts.copy()
        for (_, ends), own in zip(features, found, strict=True):
            kernels["vote"](own, ends, votes, stops, places, scores)
        left += [votes, stops, *(places[a:b] for a, b in zip(starts, stops, strict=True)), scores.copy()]
        part = np.arange(samples) * trainers // samples
        users = np.zeros((len(rows.homes), 2), np.uint64)
        kernels["note_users"](starts, stops, places, rows.homes[:num_rows], part, users)
        left += [users.copy()]
        loads = np.bincount(part, minlength=trainers)
        left += [kernels["look_again"](starts, stops, places, users, part, loads, samples // trainers + 2, scores)]
        kernels["settle_homes"](starts, stops, places, part, rows, num_rows, 3, memory)
        left += [users, loads, scores, part, *(array[:num_rows] for array in rows), memory.copy()]
    return left


KERNELS = ("find_rows", "weigh", "vote", "note_users", "look_again", "settle_homes")


@pytest.mark.parametrize(("samples", "trainers"), SHAPES)
@pytest.mark.parametrize("num_entries", [2, 64, 1 << 16])
@pytest.mark.parametrize("longest", [1, 3])
def test_every_step_equals_its_twin(samples, trainers, num_entries, longest):
    random = np.random.default_rng(4)
    batches = []
    for _ in range(6):
        features = []
        for _ in range(4):
            lengths = random.integers(0, longest + 1, samples) if longest > 1 else np.ones(samples, np.int64)
            ids = (random.random(lengths.sum()) ** 3 * 30).astype(np.int64) * (2**58 + 3)
            features.append((ids, np.cumsum(lengths)))
        batches.append(features)
    found = work({name: getattr(assign, name) for name in KERNELS}, batches, samples, trainers, num_entries)
    twins = {name: getattr(definitions, f"define_{name}") for name in KERNELS}
    expected = work(twins, batches, samples, trainers, num_entries)
    assert len(found) == len(expected)
    for here, there in zip(found, expected, strict=True):
        assert np.array_equal(here, there)


def test_rows_are_told_apart_by_table_and_remembered_until_another_needs_their_entry():
    memory, ids = np.full(1 << 16, assign.HOMELESS, np.uint64), np.array([7, 7, 8])

    def find(stamp, salt):
        rows, places = make_rows(3), np.empty(3, np.int32)
        return rows, places, assign.find_rows(memory, stamp, np.uint64(salt), ids, places, rows, 0)

    rows, places, num_rows = find(1, 5)
    assert (num_rows, places.tolist(), rows.counts[:2].tolist()) == (2, [0, 0, 1], [2, 1])
    assert rows.homes[:2].tolist() == [assign.HOMELESS] * 2
    assign.settle_homes(np.arange(3), np.arange(1, 4), places, np.array([3, 3, 2]), rows, 2, 9, memory)
    assert find(2, 5)[0].homes[:2].tolist() == [3, 2]
    assert find(3, 6)[0].homes[:2].tolist() == [assign.HOMELESS] * 2
    assert find(4, 5)[0].homes[:2].tolist() == [3, 2]


def test_a_home_moves_when_most_samples_are_elsewhere_again_and_again():
    memory, homes = np.full(1 << 10, assign.HOMELESS, np.uint64), []
    for stamp, part in enumerate([[1, 1, 1, 2, 2], [2, 2, 2, 1, 1], [2] * 5, [2] * 5, [3, 4, 5, 6, 7]], 1):
        rows, places = make_rows(5), np.empty(5, np.int32)
        assign.find_rows(memory, stamp, np.uint64(1), np.full(5, 42), places, rows, 0)
        assign.settle_homes(np.arange(5), np.arange(1, 6), places, np.array(part), rows, 1, 9, memory)
        homes.append(int(rows.homes[0]))
    assert homes == [1, 1, 1, 2, 2]


def test_a_row_that_is_everywhere_keeps_what_it_has():
    memory = np.full(1 << 10, assign.HOMELESS, np.uint64)
    rows, places = make_rows(5), np.empty(5, np.int32)
    assign.find_rows(memory, 1, np.uint64(1), np.full(5, 42), places, rows, 0)
    before = memory.copy()
    assign.settle_homes(*np.zeros((2, 5), np.int64), places, np.zeros(5, np.int64), rows, 1, 4, memory)
    assert np.array_equal(memory, before)
