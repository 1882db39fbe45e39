"""Who gets which sample: every one once, in parts of even size, whatever the number of trainers."""

from itertools import pairwise

import numpy as np
import pytest
import torch

import bagpipe.kernels.assign
from bagpipe import optim
from bagpipe.errors import BatchError, ConfigError
from bagpipe.kernels.assign import HOMELESS
from bagpipe.oracle.assign import Assigner, Assignment, Aware
from bagpipe.types import contiguous_parts
from harness.world import TABLES, assert_identical, make_batches, train_reference

FEATURES = [table.features for table in TABLES]


@pytest.fixture
def short_period(monkeypatch):
    """Homes are forgotten every five batches."""
    monkeypatch.setattr(bagpipe.oracle.assign, "PERIOD", 5)


def assert_valid(assignment, samples, trainers):
    """A stable division into parts of even size."""
    bounds = assignment.bounds
    assert len(bounds) == trainers + 1
    assert (bounds[0], bounds[-1]) == (0, samples)
    assert np.ptp(np.diff(bounds)) <= 1
    order = np.arange(samples) if assignment.order is None else assignment.order
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(samples))
    for start, stop in pairwise(bounds):
        assert (np.diff(order[start:stop]) > 0).all()


@pytest.mark.parametrize("name", ["contiguous", "round_robin"])
@pytest.mark.parametrize("trainers", [1, 2, 3, 8])
@pytest.mark.parametrize("samples", [0, 1, 2, 7, 8, 50])
def test_every_sample_goes_to_one_trainer_and_parts_are_even(name, trainers, samples):
    assert_valid(Assigner(name, trainers).assign(0, samples), samples, trainers)


def test_contiguous_parts_are_those_of_the_types():
    for samples in range(9):
        bounds = Assigner("contiguous", 3).assign(0, samples).bounds
        assert list(pairwise(bounds)) == list(contiguous_parts(samples, 3))


def test_samples_go_round():
    assignment = Assigner("round_robin", 3).assign(0, 7)
    assert assignment.order.tolist() == [0, 3, 6, 1, 4, 2, 5]
    assert assignment.bounds == (0, 3, 5, 7)


@pytest.mark.parametrize("name", ["contiguous", "round_robin"])
def test_parts_hold_the_samples_that_were_assigned(name):
    batch = make_batches(1, size=7)[0]
    assignment = Assigner(name, 4)(batch)
    parts = assignment.parts(batch)
    order = torch.arange(7) if assignment.order is None else torch.from_numpy(assignment.order)
    assert [len(part) for part in parts] == np.diff(assignment.bounds).tolist()
    assert torch.equal(torch.cat([part.labels for part in parts]), batch.labels[order])
    assert torch.equal(torch.cat([part.dense for part in parts]), batch.dense[order])
    words = torch.cat([part.sparse["words"].lengths() for part in parts])
    assert torch.equal(words, batch.sparse["words"].lengths()[order])
    assert {part.number for part in parts} == {batch.number}


def test_contiguous_parts_do_not_copy_ids():
    batch = make_batches(1, size=6)[0]
    parts = Assigner("contiguous", 2)(batch).parts(batch)
    assert parts[1].sparse["user"].values.data_ptr() == batch.sparse["user"].values[3:].data_ptr()


def test_parts_can_be_uneven_and_empty():
    batch = make_batches(1, size=6)[0]
    parts = Assignment(None, (0, 0, 5, 6)).parts(batch)
    assert [len(part) for part in parts] == [0, 5, 1]


def test_an_assignment_of_another_batch_is_refused():
    with pytest.raises(BatchError, match="batch 0 has 6 samples, its assignment 5"):
        Assignment(None, (0, 5)).parts(make_batches(1, size=6)[0])


@pytest.mark.parametrize(("name", "trainers", "named"), [("random", 2, "'random'"), ("contiguous", 0, "trainers is 0")])
def test_an_unknown_name_or_no_trainers_are_refused(name, trainers, named):
    with pytest.raises(ConfigError, match=named):
        Assigner(name, trainers)


def test_only_names_matter_to_a_division_by_position():
    for name in ("contiguous", "round_robin"):
        assert Assigner(name, 2).first_needed(1234) == 1234


def groups_of_rows(num_batches, samples, groups, seed=0):
    """Batches in which each sample belongs to a group, and has five ids of its group's own ten."""
    random = np.random.default_rng(seed)
    for _ in range(num_batches):
        group_of = random.permutation(np.arange(samples) % groups)
        yield group_of, [group_of * 10 + random.integers(0, 10, samples) for _ in range(5)]


def trainer_of(assignment):
    """The trainer of each sample."""
    trainers = np.repeat(np.arange(len(assignment.bounds) - 1), np.diff(assignment.bounds))
    part = np.empty_like(trainers)
    part[np.arange(len(trainers)) if assignment.order is None else assignment.order] = trainers
    return part


@pytest.mark.parametrize("trainers", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("samples", [0, 1, 2, 7, 50])
def test_aware_parts_are_even_and_stable_too(trainers, samples):
    assigner = Aware(trainers, 0, [1, 2, 1], entries=64)
    random = np.random.default_rng(0)
    for number in range(4):
        lengths = random.integers(0, 4, samples)
        ids = [random.integers(0, 20, samples) for _ in range(3)] + [random.integers(-9, 9, lengths.sum())]
        offsets = [None, None, None, np.cumsum(lengths) - lengths]
        assert_valid(assigner.assign(number, samples, ids, offsets), samples, trainers)


@pytest.mark.parametrize("trainers", [2, 4])
def test_samples_of_a_kind_come_together_where_their_rows_are(trainers):
    """Groups share no rows, so none needs to change hands; within a few batches each group is with one trainer."""
    assigner = Aware(trainers, 0, [5], entries=1 << 12)
    num_pairs = []
    for number, (group_of, ids) in enumerate(groups_of_rows(20, 16 * trainers, trainers)):
        part = trainer_of(assigner.assign(number, 16 * trainers, ids, ()))
        num_pairs.append(len(set(zip(group_of.tolist(), part.tolist(), strict=True))))
    assert num_pairs[0] > trainers
    assert num_pairs[-1] == trainers


def homes_of(assigner, ids):
    """(samples, ids a sample): the number of each id's row, and of each row its home as it is remembered."""
    kernels, memory = bagpipe.kernels.assign, assigner._memory.copy()
    columns = [np.empty(own.size, kind) for kind in (np.int32, np.uint8, np.int32, np.uint8) for own in [np.ravel(ids)]]
    rows, places = kernels.Rows(*columns), np.empty(np.size(ids), np.int32)
    num_rows = kernels.find_rows(memory, 60_000, assigner._salts[0], np.ravel(ids), places, rows, 0)
    return places.reshape(np.shape(ids)).T, rows.homes[:num_rows]


@pytest.mark.parametrize(("trainers", "most"), [(2, 1.2), (4, 1.25), (8, 1.25)])
def test_samples_are_placed_near_the_optimum_of_the_papers_program(trainers, most):
    """Section 3.3: samples in even parts, so that the fewest of their rows are at home elsewhere.

    Found: 1.11, 1.16 and 1.16 times the least cost; parts as they come cost 1.43 to 1.47 times it. The program does not
    see that samples of one trainer share what they fetch. Counted like that, the second look at where the others are
    makes up for it: 0.96, 1.00 and 1.01 times the rows that its optimum fetches.
    """
    optimize = pytest.importorskip("scipy.optimize")
    samples, random = 8 * trainers, np.random.default_rng(trainers)
    size, assigner = samples // trainers, Aware(trainers, 0, [6], entries=1 << 14)
    cost, fetched = np.zeros(3, int), np.zeros(3, int)
    for number in range(40):
        ids = np.array([random.zipf(1.3, samples) % 400 for _ in range(6)])
        rows, homes = homes_of(assigner, ids)
        needs = np.zeros((samples, len(homes)), bool)
        np.put_along_axis(needs, rows, True, axis=1)
        elsewhere = (homes[:, None] != np.arange(trainers)) & (homes != HOMELESS)[:, None]
        costs = needs.astype(int) @ elsewhere
        optimum = optimize.linear_sum_assignment(np.repeat(costs, size, axis=1))[1] // size
        ours = trainer_of(assigner.assign(number, samples, list(ids), ()))
        for k, part in enumerate((ours, optimum, np.arange(samples) // size) if number >= 10 else ()):
            cost[k] += costs[np.arange(samples), part].sum()
            fetched[k] += sum((needs[part == rank].any(0) & elsewhere[:, rank]).sum() for rank in range(trainers))
    assert cost[1] <= cost[0] <= most * cost[1]
    assert fetched[0] <= 1.05 * fetched[1]
    assert fetched[0] < 0.9 * fetched[2]


def test_it_is_a_function_of_the_data_trainers_and_seed(short_period):
    batches = make_batches(12, size=16)
    alike, again, other = (Assigner("aware", 3, seed, FEATURES) for seed in (0, 0, 1))
    orders = [[assigner(batch).order for batch in batches] for assigner in (alike, again)]
    assert all(np.array_equal(here, there) for here, there in zip(*orders, strict=True))
    assert any(not np.array_equal(order, np.arange(16)) for order in orders[0])
    for batch in batches:
        assert_valid(other(batch), 16, 3)


@pytest.mark.parametrize("number", [0, 1, 4, 5, 7, 9, 10])
def test_one_that_starts_anywhere_goes_on_alike_from_the_batch_that_it_names(short_period, number):
    batches = make_batches(12, size=16)
    whole, fresh = Assigner("aware", 3, 7, FEATURES), Assigner("aware", 3, 7, FEATURES)
    expected = [whole(batch).order for batch in batches]
    first = fresh.first_needed(number)
    assert number - 5 < first <= number
    for batch in batches[first:]:
        assert np.array_equal(fresh(batch).order, expected[batch.number])


def test_homes_outlive_a_batch_but_not_a_period(short_period):
    """The same samples each time, in another order: they go where they were, until all is forgotten."""
    turned = np.arange(16)[::-1]
    ids = [np.arange(16), np.arange(16) + 50]
    assigner = Assigner("aware", 2, 0, [["user"], ["ad"]])
    parts = [
        trainer_of(assigner.assign(number, 16, ids if number == 0 else [i[turned] for i in ids])) for number in range(6)
    ]
    for part in parts[1:5]:
        assert np.array_equal(part, parts[0][turned])
    assert np.array_equal(parts[5], parts[0])
    assert not np.array_equal(parts[0], parts[0][turned])


def test_shapes_of_ids_and_views_of_one_array_make_no_difference():
    random = np.random.default_rng(0)
    together = random.integers(0, 30, (16, 4))
    ways = [
        ([together[:, k] for k in range(4)], ()),
        ([together[:, k : k + 1].astype(np.int32) for k in range(4)], ()),
        ([together[:, k].copy() for k in range(4)], [np.arange(16)] * 4),
    ]
    orders = []
    for ids, offsets in ways:
        assigner = Aware(3, 0, [2, 1, 1], entries=1 << 12)
        orders.append([assigner.assign(number, 16, ids, offsets).order for number in range(3)])
    for order in orders[1:]:
        assert np.array_equal(order, orders[0])


def test_features_of_one_table_share_their_rows():
    """A row that one feature brought to a trainer draws samples there by another feature of the same table."""
    first, second = np.arange(8), np.arange(8) + 100

    def order(num_features):
        assigner = Aware(2, 0, num_features, entries=1 << 12)
        before = trainer_of(assigner.assign(0, 8, [first, second], ()))
        return before, trainer_of(assigner.assign(1, 8, [second[::-1], first[::-1]], ()))

    before, after = order([2])
    assert np.array_equal(before[::-1], after)
    before, after = order([1, 1])
    assert not np.array_equal(before[::-1], after)


def test_training_with_aware_parts_is_training_on_the_samples_in_that_order():
    batches = make_batches(5, size=9, last=3)
    assigned, losses = train_reference(batches, optim.Adagrad(0.1), "wide_deep", 3, Assigner("aware", 3, 0, FEATURES))
    assigner = Assigner("aware", 3, 0, FEATURES)
    arranged = [batch.take(assigner(batch).order) for batch in batches]
    expected, expected_losses = train_reference(arranged, optim.Adagrad(0.1), "wide_deep", 3)
    assert losses == expected_losses
    assert_identical(expected, assigned)


@pytest.mark.parametrize(
    ("ids", "offsets", "named"),
    [
        ([np.arange(4)], (), "ids of 1 features: give those of all 2"),
        ([np.arange(4), np.arange(5)], (), "5 ids of feature 1 can't be those of 4 samples"),
        ([np.arange(4), np.arange(4.0)], (), "feature 1 are float64"),
        ([np.arange(4), np.arange(3)], [None, np.array([0, 1, 2])], "3 ids of feature 1"),
        ([np.arange(4), np.arange(3)], [None, np.array([1, 1, 2, 2])], "3 ids of feature 1"),
        ([np.arange(4), np.arange(3)], [None, np.array([0, 2, 1, 2])], "3 ids of feature 1"),
        ([np.arange(4), np.arange(3)], [None, np.array([0, 1, 2, 4])], "3 ids of feature 1"),
    ],
)
def test_ids_that_do_not_fit_are_refused_and_leave_no_trace(ids, offsets, named):
    good = [np.arange(4), np.arange(4) % 2]
    assigner, other = (Aware(2, 0, [1, 1], entries=1 << 10) for _ in range(2))
    for number in range(3):
        with pytest.raises(BatchError, match=named):
            assigner.assign(number, 4, ids, offsets)
        orders = [each.assign(number, 4, good, ()).order for each in (assigner, other)]
        assert np.array_equal(*orders)


def test_a_batch_out_of_turn_is_refused_with_the_batch_to_begin_at():
    assigner = Assigner("aware", 2, 0, [["user"]])
    ids = [np.arange(4)]
    for number, first in ((3, 0), (1999, 1000)):
        with pytest.raises(BatchError, match=f"batch {number} comes out of turn.*from batch {first} on"):
            assigner.assign(number, 4, ids)
    assigner.assign(1000, 4, ids)
    assigner.assign(1001, 4, ids)
    with pytest.raises(BatchError, match="batch 1001 comes out of turn"):
        assigner.assign(1001, 4, ids)
    assigner.assign(1002, 4, ids)


def test_too_many_trainers_or_no_features_are_refused():
    with pytest.raises(ConfigError, match=r"trainers is 65.*64 at most"):
        Assigner("aware", 65, 0, FEATURES)
    with pytest.raises(ConfigError, match="name the features"):
        Assigner("aware", 2)
