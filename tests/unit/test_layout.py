"""What lies where in a row."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bagpipe.errors import ConfigError
from bagpipe.initial import Constant, Given, Joined, Normal, Uniform
from bagpipe.layout import RowLayout
from bagpipe.optim import SGD, Adagrad, Adam, RowwiseAdagrad
from bagpipe.types import Table


def test_vectors_come_first_and_state_follows() -> None:
    layout = RowLayout(Table("ad"), (48, 1), RowwiseAdagrad(0.1), Uniform(0, "ad", 0.1))
    assert (layout.dim, layout.width, layout.columns) == (49, 51, (0, 48))
    assert RowLayout(Table("ad"), (48,), SGD(0.1), Uniform(0, "ad", 0.1)).width == 48
    assert RowLayout(Table("ad"), (48,), Adam(), Uniform(0, "ad", 0.1)).width == 144


@pytest.mark.parametrize("optimizer", [SGD(0.1), Adagrad(initial_accumulator_value=0.5)])
def test_a_fresh_row_is_its_initial_vector_and_its_initial_state(optimizer: SGD | Adagrad) -> None:
    initial = Normal(3, "ad")
    layout = RowLayout(Table("ad"), (5, 2), optimizer, initial)
    ids, expected = np.array([7, -2, 2**50]), np.empty((3, 7), np.float32)
    initial.fill(ids, expected)
    rows, defined = (np.full((3, layout.width), np.nan, np.float32) for _ in range(2))
    layout.initialise(ids, rows)
    layout.define(ids, defined)
    assert np.array_equal(rows.view(np.int32), defined.view(np.int32))
    assert np.array_equal(rows[:, :7], expected)
    assert (rows[:, 7:] == 0.5).all()


def test_the_first_columns_of_a_fresh_row_are_those_of_the_whole_one() -> None:
    weights = [np.arange(20, dtype=np.float32).reshape(4, 5), np.arange(8, dtype=np.float32).reshape(4, 2)]
    joined = Joined([Uniform(0, "ad", 0.1), Constant(0.5)], (5, 2))
    for initial in (Normal(3, "ad"), Given(weights), joined):
        layout = RowLayout(Table("ad"), (5, 2), Adagrad(initial_accumulator_value=0.5), initial)
        ids = np.array([3, 0, 1])
        whole = np.empty((3, layout.width), np.float32)
        layout.initialise(ids, whole)
        for columns in range(1, layout.width + 1):
            rows, defined = np.full((2, 3, columns), np.nan, np.float32)
            layout.initialise(ids, rows)
            layout.define(ids, defined)
            assert np.array_equal(rows.view(np.int32), whole[:, :columns].view(np.int32))
            assert np.array_equal(defined.view(np.int32), rows.view(np.int32))


@pytest.mark.parametrize("dims", [(), (0,), (8, -1)])
def test_a_vector_without_columns_is_refused(dims: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="table 'ad': vectors of lengths"):
        RowLayout(Table("ad"), dims, SGD(0.1), Uniform(0, "ad", 0.1))


def test_a_layout_can_not_be_changed() -> None:
    layout = RowLayout(Table("ad"), (8,), SGD(0.1), Uniform(0, "ad", 0.1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.dims = (9,)  # type: ignore[misc]
