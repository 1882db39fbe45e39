import numpy as np
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


@pytest.mark.parametrize("order", [[2, 0, 1], [0, 1, 2], [1], [], [2, 2, 0]])
@pytest.mark.parametrize(
    "of", [lambda order: torch.tensor(order, dtype=torch.int64), lambda order: np.array(order, int)]
)
def test_samples_are_taken_in_any_order_with_their_bags_and_weights(order, of):
    batch = make_batch()
    taken = batch.take(of(order))
    assert (len(taken), taken.number) == (len(order), 4)
    assert taken.labels.tolist() == order
    assert taken.dense.tolist() == [[2 * sample, 2 * sample + 1] for sample in order]
    assert taken.sparse["a"].values.tolist() == [[2 * sample, 2 * sample + 1] for sample in order]
    bags, weights = [[], [7, 8], [9]], [[], [0, 1], [2]]
    found = [taken.sparse["b"].part(place, place + 1) for place in range(len(order))]
    assert [bag.values.tolist() for bag in found] == [bags[sample] for sample in order]
    assert [bag.weights.tolist() for bag in found] == [weights[sample] for sample in order]


@pytest.mark.parametrize("width", [0, 1, 3])
def test_ids_without_bags_keep_their_width_and_their_weights(width):
    ids = Ids(torch.arange(4 * width).reshape(4, width), None, torch.rand(4, width))
    order = torch.tensor([3, 1, 0, 2])
    taken = ids.take(order)
    assert taken.values.shape == (4, width)
    assert torch.equal(taken.values, ids.values[order])
    assert torch.equal(taken.weights, ids.weights[order])


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_random_bags_arrive_where_their_sample_goes(kind):
    random = np.random.default_rng(0)
    for samples in (1, 2, 50):
        lengths = random.integers(0, 4, samples)
        offsets = torch.from_numpy(np.cumsum(lengths) - lengths).to(kind)
        values = torch.from_numpy(random.integers(-9, 9, lengths.sum())).to(kind)
        ids = Ids(values, offsets, torch.from_numpy(random.random(lengths.sum())))
        order = random.permutation(samples)
        taken = ids.take(order)
        assert (taken.values.dtype, taken.offsets.dtype) == (kind, kind)
        for place, sample in enumerate(order.tolist()):
            there, here = taken.part(place, place + 1), ids.part(sample, sample + 1)
            assert torch.equal(there.values, here.values)
            assert torch.equal(there.weights, here.weights)


def test_what_is_taken_from_columns_of_one_tensor_stands_alone():
    together = torch.arange(12).reshape(4, 3)
    sparse = {str(column): Ids(together[:, column : column + 1]) for column in range(3)}
    batch = Batch(together.float()[:, :2], sparse, together.float()[:, 2])
    taken = batch.take(torch.tensor([3, 2, 1, 0]))
    tensors = [taken.dense, taken.labels, *(ids.values for ids in taken.sparse.values())]
    assert all(tensor.is_contiguous() for tensor in tensors)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 5
    together.zero_()
    assert taken.sparse["1"].values.tolist() == [[10], [7], [4], [1]]
    assert batch.take(torch.arange(4)).sparse["1"].values.data_ptr() != together[:, 1:].data_ptr()


@pytest.mark.parametrize("order", [np.array([0.0]), np.array([[0]]), torch.tensor([0], dtype=torch.int32)])
def test_an_order_of_anything_but_sample_numbers_is_refused(order):
    with pytest.raises(BatchError, match="one int64 number a sample"):
        make_batch().take(order)
