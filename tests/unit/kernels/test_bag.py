"""Pooling and gradient accumulation: kernels against their NumPy twins, bit for bit, and against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.errors import BatchError, ModelError
from bagpipe.kernels.bag import Bags, accumulate, are_at, pool
from definitions.bag import define_accumulate, define_pool
from harness.examples import examples


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.int32)


def values(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Ordinary numbers with edge cases strewn in: signed zeros, denormals, huge and tiny ones."""
    array = rng.standard_normal(shape).astype(np.float32)
    edge = np.array([0.0, -0.0, 1e-45, -1e-40, 3e38, -3e38, 1e-30, 16777216.0], np.float32)
    chosen = rng.random(shape) < 0.1
    array[chosen] = rng.choice(edge, int(chosen.sum()))
    return array


def make(
    rng: np.random.Generator, *, unique: int, num_bags: int, k: int | None, kind: str, padding: bool
) -> tuple[Bags, np.ndarray]:
    """Bags over `unique` rows (k ids each, or jagged with empty ones), and the slots of the rows."""
    slots = rng.permutation(4 * unique)[:unique].astype(np.int32)
    offsets = None
    if k is None:
        lengths = rng.integers(0, 5, num_bags)
        offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
        shape: tuple[int, ...] = (int(lengths.sum()),)
    else:
        shape = (num_bags, k)
    places = rng.integers(0, unique, shape, dtype=np.int32)
    weights = values(rng, shape) if kind == "weighted" else None
    return Bags(places, offsets, weights, kind == "mean", 1 if padding else -1), slots


CASES = {
    "seed": st.integers(0, 2**32 - 1),
    "dim": st.sampled_from([1, 3, 15, 16, 17, 32, 48, 50]),
    "k": st.sampled_from([None, 0, 1, 2, 5]),
    "kind": st.sampled_from(["sum", "mean", "weighted"]),
    "padding": st.booleans(),
    "before": st.sampled_from([0, 1, 16]),
    "after": st.sampled_from([0, 5]),
}


@given(**CASES)
@examples(150)
def test_pooling_equals_its_twin_to_the_bit(
    seed: int, dim: int, k: int | None, kind: str, padding: bool, before: int, after: int
) -> None:
    rng = np.random.default_rng(seed)
    bags, slots = make(rng, unique=int(rng.integers(2, 9)), num_bags=11, k=k, kind=kind, padding=padding)
    cache = values(rng, (4 * len(slots), before + dim + after))
    expected, out = np.full((11, dim), np.nan, np.float32), np.full((11, dim), np.nan, np.float32)
    with np.errstate(all="ignore"):
        assert define_pool(cache, slots, bags, before, expected) == -1
    assert pool(cache, slots, bags, before, out, 0, 4) == pool(cache, slots, bags, before, out, 4, 11) == -1
    assert np.array_equal(bits(out), bits(expected))


@given(**CASES)
@examples(150)
def test_accumulating_equals_its_twin_to_the_bit(
    seed: int, dim: int, k: int | None, kind: str, padding: bool, before: int, after: int
) -> None:
    rng = np.random.default_rng(seed)
    bags, slots = make(rng, unique=int(rng.integers(2, 9)), num_bags=11, k=k, kind=kind, padding=padding)
    grad = values(rng, (11, dim))
    expected = np.zeros((len(slots), before + dim + after), np.float32)
    buffer = expected.copy()
    for _ in range(2):  # two features of the table, one after the other
        with np.errstate(all="ignore"):
            assert define_accumulate(grad, bags, expected, before) == -1
        assert accumulate(grad, bags, buffer, before) == -1
    assert np.array_equal(bits(buffer), bits(expected))


def test_a_gradient_may_be_split_into_blocks_of_columns() -> None:
    rng = np.random.default_rng(3)
    bags, slots = make(rng, unique=5, num_bags=40, k=3, kind="sum", padding=False)
    grad = values(rng, (40, 48))
    whole, blocks = np.zeros((len(slots), 48), np.float32), np.zeros((len(slots), 48), np.float32)
    accumulate(grad, bags, whole)
    accumulate(grad[:, :20], bags, blocks)
    accumulate(grad[:, 20:], bags, blocks, 20)
    assert np.array_equal(bits(whole), bits(blocks))


def test_sums_start_at_positive_zero_and_go_in_batch_order() -> None:
    big, small = np.float32(2**24), np.float32(1.0)
    cache = np.array([[-0.0], [big], [small], [-big]], np.float32)
    slots = np.arange(4, dtype=np.int32)
    out = np.empty((3, 1), np.float32)
    bags = Bags(np.array([[0, 0, 0], [1, 2, 3], [1, 3, 2]], np.int32))
    assert pool(cache, slots, bags, 0, out) == -1
    assert not np.signbit(out[0, 0]), "-0.0 added to +0.0 is +0.0"
    assert out[1, 0] == 0.0, "2**24 + 1 rounds to 2**24, so the order shows"
    assert out[2, 0] == 1.0
    single = Bags(np.array([[0], [1], [2]], np.int32))
    assert pool(cache, slots, single, 0, out) == -1
    assert not np.signbit(out[0, 0])
    buffer = np.zeros((1, 1), np.float32)
    assert accumulate(np.array([[big], [small], [-big]], np.float32), Bags(np.zeros((3, 1), np.int32)), buffer) == -1
    assert buffer[0, 0] == 0.0


@pytest.mark.parametrize("k", [1, 3, None])
@pytest.mark.parametrize("wrong", [6, -1, 2**31 - 1, -(2**31)])
def test_the_first_place_that_no_row_has_is_reported_and_not_followed(k: int | None, wrong: int) -> None:
    rng = np.random.default_rng(1)
    bags, slots = make(rng, unique=6, num_bags=30, k=k, kind="sum", padding=False)
    places, position = bags.places.copy(), bags.places.size // 2
    places.reshape(-1)[[position, -1]] = wrong
    bad = Bags(places, bags.offsets)
    cache, grad = values(rng, (24, 16)), values(rng, (30, 16))
    for run in (pool, define_pool):
        assert run(cache, slots, bad, 0, np.empty((30, 16), np.float32)) == position
    for add in (accumulate, define_accumulate):
        assert add(grad, bad, np.zeros((6, 16), np.float32)) == position


def test_bags_outside_a_range_are_neither_read_nor_written() -> None:
    rng = np.random.default_rng(2)
    bags, slots = make(rng, unique=6, num_bags=30, k=2, kind="mean", padding=False)
    places = bags.places.copy()
    places[:10], places[20:] = -1, -1
    out = np.full((30, 16), 7.0, np.float32)
    assert pool(values(rng, (24, 16)), slots, Bags(places, mean=True), 0, out, 10, 20) == -1
    assert (out[:10] == 7).all()
    assert (out[20:] == 7).all()


@pytest.mark.parametrize("offsets", [[1, 2], [0, 3, 2], [0, 9], [0, -1], []])
def test_offsets_that_lead_astray_are_refused(offsets: list[int]) -> None:
    with pytest.raises(BatchError, match=r"offsets\[\d\] is .* offsets start at 0, never decrease"):
        Bags(np.zeros(4, np.int32), np.array(offsets, np.int64))


def test_weighted_means_are_refused_as_torch_refuses_them() -> None:
    with pytest.raises(ModelError, match="mode='sum' only"):
        Bags(np.zeros((2, 2), np.int32), None, np.ones((2, 2), np.float32), True)


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("jagged", [False, True])
@pytest.mark.parametrize("kind", ["sum", "mean", "weighted"])
def test_forward_and_backward_are_those_of_embedding_bag(kind: str, jagged: bool, padding: bool) -> None:
    rng = np.random.default_rng(5)
    bags, _ = make(rng, unique=9, num_bags=50, k=None if jagged else 4, kind=kind, padding=padding)
    layer = torch.nn.EmbeddingBag(9, 24, mode="mean" if kind == "mean" else "sum", padding_idx=1 if padding else None)
    cache = layer.weight.detach().numpy()
    slots = np.arange(9, dtype=np.int32)
    weights: Any = None
    if kind == "weighted":
        weights = rng.random(bags.places.shape).astype(np.float32)
        bags = Bags(bags.places, bags.offsets, weights, padding=bags.padding)
    ids = torch.from_numpy(bags.places)
    offsets = None if bags.offsets is None else torch.from_numpy(bags.offsets.astype(np.int32))
    expected = layer(ids, offsets, None if weights is None else torch.from_numpy(weights))
    out = np.empty((50, 24), np.float32)
    assert pool(cache, slots, bags, 0, out) == -1
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=1e-5, atol=1e-6)
    grad = rng.standard_normal((50, 24)).astype(np.float32)
    expected.backward(torch.from_numpy(grad))
    assert layer.weight.grad is not None
    buffer = np.zeros((9, 24), np.float32)
    assert accumulate(grad, bags, buffer) == -1
    np.testing.assert_allclose(buffer, layer.weight.grad.numpy(), rtol=1e-5, atol=1e-5)


def test_an_embedding_with_padding_looks_the_row_up_and_gives_it_no_gradient() -> None:
    layer = torch.nn.Embedding(6, 16, padding_idx=2)
    with torch.no_grad():
        layer.weight[2] = 5.0
    ids = np.array([[0], [2], [5], [2], [0]])
    slots, out, buffer = np.arange(6, dtype=np.int32), np.empty((5, 16), np.float32), np.zeros((6, 16), np.float32)
    expected = layer(torch.from_numpy(ids[:, 0]))
    assert pool(layer.weight.detach().numpy(), slots, Bags(ids.astype(np.int32)), 0, out) == -1
    assert np.array_equal(out, expected.detach().numpy())
    grad = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    expected.backward(torch.from_numpy(grad))
    assert accumulate(grad, Bags(ids.astype(np.int32), padding=2), buffer) == -1
    assert layer.weight.grad is not None
    assert np.array_equal(buffer, layer.weight.grad.numpy())
    assert (buffer[2] == 0).all()


def test_ids_are_those_of_the_rows_at_their_places_or_not() -> None:
    rows = np.array([7, -3, 2**62], np.int64)
    ids, places = np.array([2**62, 7, 7, -3], np.int64), np.array([2, 0, 0, 1], np.int32)
    assert are_at(ids, places, rows)
    assert are_at(ids[:0], places[:0], rows[:0])
    for position in range(4):
        other = ids.copy()
        other[position] += 1
        assert not are_at(other, places, rows)
        for place in (3, -1):
            outside = places.copy()
            outside[position] = place
            assert not are_at(ids, outside, rows)
