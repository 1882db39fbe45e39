"""Who gets which sample: every one once, in parts of even size, whatever the number of trainers."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from bagpipe.errors import BatchError, ConfigError
from bagpipe.oracle.assign import Assigner, Assignment
from bagpipe.types import contiguous_parts
from support import make_batches


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
    assert_valid(Assigner(name, trainers).assign(samples), samples, trainers)


def test_contiguous_parts_are_those_of_the_types():
    for samples in range(9):
        bounds = Assigner("contiguous", 3).assign(samples).bounds
        assert list(pairwise(bounds)) == list(contiguous_parts(samples, 3))


def test_samples_go_round():
    assignment = Assigner("round_robin", 3).assign(7)
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
