"""Ids in the loop look like ids to everyone but the embedding layers."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.nn import functional

from bagpipe.errors import ModelError
from bagpipe.handles import STAMPS, Handles, evaluation_base, table_of, training_base

ROW_IDS = [np.array([5, 0, 2**62 + 1]), np.array([-7, 9])]


def handles(table=0, places=((0, 1), (2, 1)), row_ids=ROW_IDS):
    return Handles.wrap(torch.tensor(places) + training_base(table, 3), row_ids)


MOVES = {
    "rows": lambda ids: ids[1:],
    "columns": lambda ids: ids[:, 0],
    "mask": lambda ids: ids[torch.tensor([True, False])],
    "list": lambda ids: ids[[1, 0]],
    "reshape": lambda ids: ids.reshape(-1),
    "view": lambda ids: ids.view(4, 1),
    "flatten": lambda ids: torch.flatten(ids),
    "transpose": lambda ids: ids.T,
    "permute": lambda ids: ids.permute(1, 0),
    "unsqueeze": lambda ids: ids.unsqueeze(-1),
    "expand": lambda ids: ids.unsqueeze(0).expand(3, 2, 2),
    "cat": lambda ids: torch.cat([ids, ids], 1),
    "stack": lambda ids: torch.stack([ids, ids]),
    "flip": lambda ids: ids.flip(0),
    "gather": lambda ids: ids.gather(1, torch.tensor([[1], [0]])),
    "clone": lambda ids: ids.clone(),
    "detach": lambda ids: ids.detach(),
    "long": lambda ids: ids.long(),
    "to": lambda ids: ids.to("cpu", non_blocking=True),
    "to the same type": lambda ids: ids.to(torch.int64),
    "contiguous": lambda ids: ids.T.contiguous(),
    "repeat": lambda ids: ids.repeat(2, 1),
    "unbind": lambda ids: ids.unbind(1)[1],
    "split": lambda ids: torch.split(ids, 1)[1],
    "iterate": lambda ids: list(ids)[1],
}
COMPUTATIONS = {
    "compare": lambda ids: ids != 0,
    "compare with itself": lambda ids: ids == ids,
    "add": lambda ids: ids + 1,
    "from the left": lambda ids: 1 - ids,
    "modulo": lambda ids: ids % 3,
    "float": lambda ids: ids.float(),
    "int": lambda ids: (ids % 2**31).int(),
    "to another type": lambda ids: ids.to(torch.float64),
    "sum": lambda ids: ids.sum(),
    "where": lambda ids: torch.where(ids == 0, 4, ids),
    "pad": lambda ids: functional.pad(ids, (0, 1)),
    "with others": lambda ids: torch.cat([ids, torch.zeros(2, 1, dtype=torch.int64)], 1),
    "index": lambda ids: torch.arange(10)[ids[:1]],
    "lookup": lambda ids: functional.embedding(ids[:1], torch.arange(12.0).reshape(6, 2)),
    "one hot": lambda ids: functional.one_hot(ids[:1], 6),
    "unique": lambda ids: ids.unique(),
    "copy": copy.deepcopy,
}


@pytest.mark.parametrize("name", MOVES)
def test_moving_ids_keeps_them_handles(name):
    move = MOVES[name]
    moved, plain = move(handles()), move(handles().ids())
    assert isinstance(moved, Handles)
    assert not isinstance(plain, Handles)
    assert torch.equal(moved.ids(), plain)
    assert moved.shape == plain.shape


@pytest.mark.parametrize("name", COMPUTATIONS)
def test_computing_with_ids_gives_what_ids_give(name):
    compute = COMPUTATIONS[name]
    found, plain = compute(handles()), compute(handles().ids())
    assert type(found) is torch.Tensor
    assert found.dtype == plain.dtype
    assert torch.equal(found, plain)


def test_ids_of_several_tables_may_lie_in_one_tensor():
    both = torch.cat([handles().reshape(-1), handles(1, (0, 1))])
    assert isinstance(both, Handles)
    assert both.tolist() == [5, 0, 2**62 + 1, 0, -7, 9]
    other_batch = handles(row_ids=[np.array([1, 2, 3])])
    assert type(torch.cat([handles(), other_batch])) is torch.Tensor


def test_they_print_compare_and_describe_themselves_as_ids():
    ids = handles()
    assert repr(ids) == repr(ids.ids())
    assert ids.tolist() == [[5, 0], [2**62 + 1, 0]]
    assert ids[0, 0].item() == 5
    assert ids.numpy().tolist() == ids.tolist()
    assert (len(ids), ids.dim(), ids.numel(), ids.dtype, ids.size(0)) == (2, 2, 4, torch.int64, 2)
    assert {ids: 1}[ids] == 1


@pytest.mark.parametrize(
    "change", [lambda ids: ids.__setitem__(0, 1), lambda ids: ids.add_(1), lambda ids: ids.zero_()]
)
def test_they_can_not_be_changed_in_place(change):
    ids = handles()
    with pytest.raises(ModelError, match="changed in place"):
        change(ids)
    assert ids.tolist() == handles().tolist()


def test_a_handle_names_its_table_and_never_that_of_another_batch():
    bases = {training_base(0, iteration) for iteration in range(STAMPS)}
    bases |= {evaluation_base(0, number) for number in range(STAMPS)}
    assert len(bases) == 2 * STAMPS
    assert min(bases) >= 2**48
    assert max(bases) + 2**48 - 1 < 2**63
    assert table_of(training_base(65_535, 70_000) + 2**32 - 1) == 65_535
