"""Kernels that place samples, against their twins; and even parts against the best ones there are."""

from itertools import product

import numpy as np
import pytest

from bagpipe.kernels import assign, balance
from bagpipe.kernels.balance import LOSS_MAX
from definitions import assign as definitions
from definitions.balance import define_choose_best, define_rebalance

SHAPES = [(1, 1), (1, 3), (5, 2), (9, 3), (12, 4), (40, 8), (64, 64)]


def even_sizes(samples, trainers):
    return np.diff(np.arange(trainers + 1) * samples // trainers)


def best_total(scores, sizes):
    """The highest total score of parts of these sizes: all fillings of all prefixes, by dynamic programming."""
    best = {(0,) * len(sizes): 0}
    for of_sample in scores.tolist():
        longer = {}
        for loads, total in best.items():
            for trainer, score in enumerate(of_sample):
                if loads[trainer] < sizes[trainer]:
                    after = (*loads[:trainer], loads[trainer] + 1, *loads[trainer + 1 :])
                    longer[after] = max(longer.get(after, -LOSS_MAX), total + score)
        best = longer
    return best[tuple(sizes.tolist())]


def placed(scores, floor=-LOSS_MAX):
    """Even parts by the kernels."""
    part, loads = np.empty(len(scores), np.int64), np.zeros(scores.shape[1], np.int64)
    balance.choose_best(scores, loads, part)
    balance.rebalance(scores, loads - even_sizes(*scores.shape), part, floor)
    return part


@pytest.mark.parametrize(("samples", "trainers"), [(1, 3), (5, 2), (8, 3), (11, 3), (13, 4), (10, 5)])
@pytest.mark.parametrize("kind", ["random", "alike", "drawn to one", "few values"])
def test_even_parts_have_the_highest_total_score(samples, trainers, kind):
    random = np.random.default_rng(0)
    for _ in range(20):
        scores = random.integers(0, 2 if kind == "few values" else 30, (samples, trainers)).astype(np.int32)
        if kind == "alike":
            scores[:] = scores[0]
        if kind == "drawn to one":
            scores[:, 0] += 50
        part = placed(scores)
        sizes = even_sizes(samples, trainers)
        assert np.array_equal(np.bincount(part, minlength=trainers), sizes)
        assert scores[np.arange(samples), part].sum() == best_total(scores, sizes)


def test_the_exact_solver_of_these_tests_agrees_with_trying_everything():
    random = np.random.default_rng(1)
    for _ in range(5):
        scores, sizes = random.integers(0, 9, (6, 3)), even_sizes(6, 3)
        parts = [p for p in product(range(3), repeat=6) if np.array_equal(np.bincount(p, minlength=3), sizes)]
        assert best_total(scores, sizes) == max(scores[np.arange(6), p].sum() for p in parts)


@pytest.mark.parametrize(("samples", "trainers"), SHAPES)
@pytest.mark.parametrize("span", [1, 3, 100])
@pytest.mark.parametrize("floor", [0, -LOSS_MAX])
def test_placing_equals_its_twin(samples, trainers, span, floor):
    random = np.random.default_rng(2)
    scores = random.integers(0, span, (samples, trainers)).astype(np.int32)
    found, expected = [], []
    for results, choose, rebalance in (
        (found, balance.choose_best, balance.rebalance),
        (expected, define_choose_best, define_rebalance),
    ):
        part, loads = np.empty(samples, np.int64), np.zeros(trainers, np.int64)
        choose(scores, loads, part)
        results += [part.copy(), loads]
        if floor == 0:  # from any placement, not only from the best one
            part = np.random.default_rng(3).integers(0, trainers, samples)
        excess = np.bincount(part, minlength=trainers) - even_sizes(samples, trainers)
        results += [rebalance(scores, excess, part, floor), part, excess]
    for here, there in zip(found, expected, strict=True):
        assert np.array_equal(here, there)
    assert not found[-1].any()


def make_rows(num_ids):
    return assign.Rows(*[np.zeros(num_ids, kind) for kind in (np.int32, np.uint8, np.int32, np.uint8)])


def work(kernels, batches, samples, trainers, num_entries):
    """All that is done with batches of (ids, ends) by feature; everything that is left behind."""
    memory = np.full(num_entries, assign.HOMELESS, np.uint64)
    left = []
    for stamp, features in enumerate(batches, 1):
        starts = np.zeros(samples + 1, np.int64)
        starts[1:] = sum(ends for _, ends in features)
        rows, num_rows = make_rows(starts[-1]), 0
        places, cursors = np.full(starts[-1], -1, np.int32), starts[:-1].copy()
        for salt, (ids, ends) in enumerate(features):
            num_rows = kernels["find_rows"](
                memory, stamp, np.uint64(salt + 2**63), ids, ends, cursors, places, rows, num_rows
            )
        left += [num_rows, places.copy(), cursors]
        scores = np.zeros((samples, trainers), np.int32)
        kernels["vote"](starts, places, rows, np.array([9, 9, 5, 2], np.int32), scores)
        left += [starts, places[: starts[-1]], scores.copy()]
        part = np.arange(samples) * trainers // samples
        users = np.zeros((len(rows.homes), 2), np.uint64)
        kernels["note_users"](starts, places, rows.homes[:num_rows], part, users)
        left += [users.copy()]
        loads = np.bincount(part, minlength=trainers)
        left += [kernels["look_again"](starts, places, users, part, loads, samples // trainers + 2, scores)]
        kernels["settle_homes"](starts, places, part, rows, num_rows, 3, memory)
        left += [users, loads, scores, part, *(array[:num_rows] for array in rows), memory.copy()]
    return left


KERNELS = ("find_rows", "vote", "note_users", "look_again", "settle_homes")


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
    memory, ends = np.full(1 << 16, assign.HOMELESS, np.uint64), np.arange(1, 4)
    ids = np.array([7, 7, 8])

    def find(stamp, salt):
        rows, places = make_rows(3), np.empty(3, np.int32)
        cursors = np.arange(3)
        num_rows = assign.find_rows(memory, stamp, np.uint64(salt), ids, ends, cursors, places, rows, 0)
        return rows, places, num_rows

    rows, places, num_rows = find(1, 5)
    assert (num_rows, places.tolist(), rows.counts[:2].tolist()) == (2, [0, 0, 1], [2, 1])
    assert rows.homes[:2].tolist() == [assign.HOMELESS] * 2
    assign.settle_homes(np.arange(4), places, np.array([3, 3, 2]), rows, 2, 9, memory)
    assert find(2, 5)[0].homes[:2].tolist() == [3, 2]
    assert find(3, 6)[0].homes[:2].tolist() == [assign.HOMELESS] * 2
    assert find(4, 5)[0].homes[:2].tolist() == [3, 2]


def test_a_home_moves_when_most_samples_are_elsewhere_again_and_again():
    memory, ends = np.full(1 << 10, assign.HOMELESS, np.uint64), np.arange(1, 6)
    homes = []
    for stamp, part in enumerate([[1, 1, 1, 2, 2], [2, 2, 2, 1, 1], [2] * 5, [2] * 5, [3, 4, 5, 6, 7]], 1):
        rows, places = make_rows(5), np.empty(5, np.int32)
        ids = np.full(5, 42)
        assign.find_rows(memory, stamp, np.uint64(1), ids, ends, np.arange(5), places, rows, 0)
        assign.settle_homes(np.arange(6), places, np.array(part), rows, 1, 9, memory)
        homes.append(int(rows.homes[0]))
    assert homes == [1, 1, 1, 2, 2]


def test_a_row_that_is_everywhere_keeps_what_it_has():
    memory = np.full(1 << 10, assign.HOMELESS, np.uint64)
    rows, places = make_rows(5), np.empty(5, np.int32)
    assign.find_rows(memory, 1, np.uint64(1), np.full(5, 42), np.arange(1, 6), np.arange(5), places, rows, 0)
    before = memory.copy()
    assign.settle_homes(np.zeros(6, np.int64), places, np.zeros(5, np.int64), rows, 1, 4, memory)
    assert np.array_equal(memory, before)
