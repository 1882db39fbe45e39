import pytest
import torch

from bagpipe.errors import BatchError, ConfigError
from bagpipe.types import Batch, Ids, Table, contiguous_parts


def jagged(values, offsets, weights=None):
    return Ids(torch.tensor(values, dtype=torch.int64), torch.tensor(offsets, dtype=torch.int64), weights)


def make_batch():
    sparse = {"a": Ids(torch.arange(6).reshape(3, 2)), "b": jagged([7, 8, 9], [0, 0, 2], torch.arange(3.0))}
    return Batch(torch.arange(6.0).reshape(3, 2), sparse, torch.arange(3.0), number=4)


def test_lengths_count_the_ids_of_each_sample():
    batch = make_batch()
    assert batch.sparse["a"].lengths().tolist() == [2, 2, 2]
    assert batch.sparse["b"].lengths().tolist() == [0, 2, 1]


@pytest.mark.parametrize("trainers", [1, 2, 3, 4, 7])
def test_parts_hold_every_sample_once_and_in_order(trainers):
    batch = make_batch()
    parts = [batch.part(start, stop) for start, stop in contiguous_parts(len(batch), trainers)]
    assert len(parts) == trainers
    assert torch.cat([part.labels for part in parts]).tolist() == [0, 1, 2]
    assert torch.cat([part.sparse["b"].values for part in parts]).tolist() == [7, 8, 9]
    assert torch.cat([part.sparse["b"].weights for part in parts]).tolist() == [0, 1, 2]
    assert torch.cat([part.sparse["b"].lengths() for part in parts]).tolist() == [0, 2, 1]
    assert torch.cat([part.sparse["a"].values for part in parts]).tolist() == batch.sparse["a"].values.tolist()
    assert {part.number for part in parts} == {4}


def test_a_part_does_not_share_the_alignment_of_the_whole():
    part = make_batch().part(1, 3)
    assert part.dense.data_ptr() % 64 == 0
    assert part.dense.tolist() == [[2, 3], [4, 5]]


def test_an_empty_batch_is_still_a_batch():
    empty = make_batch().part(1, 1)
    assert len(empty) == 0
    assert empty


@pytest.mark.parametrize(
    "arguments",
    [
        (torch.ones(3, 1), None),
        (torch.tensor(3), None),
        (torch.ones(1, 1, 1, dtype=torch.int64), None),
        (torch.tensor([1, 2]), None),
        (torch.tensor([[1, 2]]), torch.tensor([0])),
        (torch.tensor([1, 2]), torch.tensor([1])),
        (torch.tensor([1, 2]), torch.tensor([0, 3])),
        (torch.tensor([1, 2, 3]), torch.tensor([0, 2, 1])),
        (torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)),
        (torch.tensor([1, 2]), torch.tensor([0.0])),
        (torch.tensor([[1, 2]]), None, torch.ones(2)),
    ],
)
def test_ids_that_do_not_fit_together_are_refused(arguments):
    with pytest.raises(BatchError):
        Ids(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [("",), ("a", 0), ("a", -1), ("a", 2.5), ("a", True), ("a", 3, "ab"), ("a", 3, ("f", "f"))],
)
def test_a_table_that_makes_no_sense_is_refused(arguments):
    with pytest.raises(ConfigError):
        Table(*arguments)


def test_a_table_without_features_has_one_of_its_own_name():
    assert Table("ad").features == ("ad",)
    assert Table("ad", 3, ["x", "y"]).features == ("x", "y")


@pytest.mark.parametrize(("dense", "labels"), [((2, 1), (3,)), ((3,), (3,)), ((3, 1), (3, 1))])
def test_a_batch_whose_parts_differ_in_length_is_refused(dense, labels):
    with pytest.raises(BatchError, match="batch 9"):
        Batch(torch.ones(dense), {}, torch.ones(labels), number=9)


def test_no_trainers_at_all_are_refused():
    with pytest.raises(ConfigError):
        list(contiguous_parts(3, 0))
