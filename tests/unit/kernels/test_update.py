"""Updates of rows in the cache: each kernel against the NumPy definition of its optimizer, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.kernels.update import first_not_finite
from bagpipe.optim import SGD, Adagrad, Adam, AdamW, Frozen, Momentum, RowOptimizer, RowwiseAdagrad
from bagpipe.schedules import Cosine
from definitions.update import define_first_not_finite
from harness.examples import examples

OPTIMIZERS: dict[str, RowOptimizer] = {
    "sgd": SGD(0.1),
    "momentum": Momentum(0.1, 0.9),
    "nesterov": Momentum(Cosine(0.1, 30), 0.9, nesterov=True),
    "adagrad": Adagrad(0.1, lr_decay=0.01, initial_accumulator_value=0.1),
    "rowwise_adagrad": RowwiseAdagrad(0.1),
    "adam": Adam(0.01),
    "adamw": AdamW(0.01, weight_decay=0.1),
    "frozen": Frozen(),
}
DIMS = [(48,), (16,), (1,), (5,), (17,), (48, 1), (3, 20, 1), (32, 32)]


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.int32)


def gradients(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    array = (rng.standard_normal(shape) * 10.0 ** rng.integers(-8, 4, shape)).astype(np.float32)
    edge = np.array([0.0, -0.0, 1e-45, -1e-40, 1e18, -1e18, 1.0], np.float32)
    chosen = rng.random(shape) < 0.2
    array[chosen] = rng.choice(edge, int(chosen.sum()))
    return array


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(seed=st.integers(0, 2**32 - 1), dims=st.sampled_from(DIMS), step=st.integers(1, 10_000))
@examples(40)
def test_a_kernel_equals_its_definition_to_the_bit(name: str, seed: int, dims: tuple[int, ...], step: int) -> None:
    optimizer, rng, unique = OPTIMIZERS[name], np.random.default_rng(seed), 23
    slots = rng.permutation(60)[:unique].astype(np.int32)
    cache = rng.standard_normal((60, sum(dims) + optimizer.state_width(dims))).astype(np.float32)
    cache[:, sum(dims) :] = optimizer.initial_state(dims)
    expected = cache.copy()
    for number in (step, step + 1, step + 2):
        grads, scalars = gradients(rng, (unique, sum(dims))), optimizer.scalars(number)
        rows = expected[slots]
        optimizer.apply(rows, grads, dims, scalars)
        expected[slots] = rows
        optimizer.apply_in_cache(cache, slots, grads, dims, scalars)
        assert np.array_equal(bits(cache), bits(expected))


def test_an_optimizer_without_a_kernel_runs_its_numpy_definition() -> None:
    class Signs(SGD):
        """A user's own: moves against the sign."""

        def _apply(self, rows: Any, grads: Any, dims: Any, *scalars: Any) -> None:
            rows -= scalars[0] * np.sign(grads)

    cache = np.zeros((3, 2), np.float32)
    grads = np.array([[3.0, -8.0]], np.float32)
    Signs(0.5).apply_in_cache(cache, np.array([2], np.int32), grads, (2,), (np.float32(0.5),))
    assert cache.tolist() == [[0, 0], [0, 0], [-0.5, 0.5]]


@given(seed=st.integers(0, 2**32 - 1), bad=st.sampled_from([np.inf, -np.inf, np.nan, -np.nan]), dim=st.integers(1, 70))
@examples(60)
def test_the_first_row_that_is_not_finite_is_found(seed: int, bad: float, dim: int) -> None:
    rng = np.random.default_rng(seed)
    grads = gradients(rng, (40, dim))
    grads[3, dim // 2], grads[5, 0] = np.finfo(np.float32).max, -np.finfo(np.float32).max
    assert first_not_finite(grads) == define_first_not_finite(grads) == -1
    rows = np.sort(rng.integers(0, 40, 2))
    grads[rows, rng.integers(0, dim, 2)] = bad
    assert first_not_finite(grads) == define_first_not_finite(grads) == rows[0]


def test_no_rows_at_all_are_updated_and_finite() -> None:
    empty = np.empty((0, 8), np.float32)
    for optimizer in (SGD(0.1), RowwiseAdagrad(0.1)):
        cache = np.zeros((4, 8 + optimizer.state_width((8,))), np.float32)
        optimizer.apply_in_cache(cache, np.empty(0, np.int32), empty, (8,), optimizer.scalars(1))
    assert first_not_finite(empty) == -1
