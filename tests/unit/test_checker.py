"""The checker of one trainer names each wrong step of a row, told to it one by one; the right steps pass.

That it notices defects of a whole system is in tests/exact/test_sabotage.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bagpipe.cache import RowCache, TableRows
from bagpipe.checker import Checker
from bagpipe.errors import ConsistencyError
from bagpipe.oracle.plan import Fetch, Plan, Victims
from bagpipe.oracle.row_list import RowList
from harness.started import start, step, train


class Told:
    """A checker, a cache and a store of one table, and the steps of row 7 in slot 1 or of row 8 in slot 2."""

    def __init__(self):
        self.cache = RowCache([2], [4], torch.device("cpu"))
        self.checker = Checker(["ad"], [2], self.cache)
        self.stored = {7: np.float32([1, 2]), 8: np.float32([3, 4])}

    def plan(self, iteration, row=7, slot=1):
        rows = RowList(np.array([row]), np.array([slot], np.int32), np.array([0, 1]))
        none = np.empty(0, np.int64), np.empty(0, np.int32), np.zeros(2, np.int64)
        waits = np.empty(0, np.int32), np.empty(0, np.int32)
        return Plan(iteration, rows, (), Fetch(*none, *waits), RowList(*none), Victims(*none), 1, 0)

    def fetch(self, iteration=0, row=7, value=None):
        values = np.array([self.stored[row] if value is None else value], np.float32)
        self.checker.fetched(self.plan(iteration), TableRows(0, np.array([row]), values))

    def insert(self, iteration=0, row=7, slot=1):
        ids, slots = np.array([row]), np.array([slot], np.int32)
        self.checker.inserted(self.plan(iteration), 0, ids, slots)
        self.cache.insert(0, ids, slots, self.stored[row][None])

    def train(self, iteration=0, row=7, slot=1):
        self.checker.training(self.plan(iteration, row, slot))

    def update(self, iteration=0):
        self.cache.data[0][1] += 1
        self.cache.mark_updated(0, np.array([1], np.int32))
        self.checker.updated(self.plan(iteration), [0])

    def evict(self, row=7, slot=1, kept=True):
        ids, slots = np.array([row]), np.array([slot], np.int32)
        rows = self.cache.copy_out(0, ids, slots)
        rows = rows if kept else TableRows(0, rows.ids[:0], rows.values[:0])
        self.checker.copied_out(0, ids, slots, rows)
        return rows

    def write(self, rows, changed=0.0):
        values = rows.values + np.float32(changed)
        self.stored |= dict(zip(rows.ids.tolist(), values, strict=True))
        self.checker.written(TableRows(0, rows.ids, values))

    def trained(self, iteration=0):
        """One iteration of row 7, which is on its way to the store then."""
        self.fetch(iteration)
        self.insert(iteration)
        self.train(iteration)
        self.update(iteration)
        return self.evict()


def test_the_right_steps_pass():
    told = Told()
    told.write(told.trained())
    told.write(told.trained(1))
    told.checker.finished()
    assert told.checker.checked_rows == 2


def read_in_flight(told):
    told.trained()
    told.fetch(1)


def read_other_bits(told):
    told.write(told.trained())
    told.fetch(1, value=[0, 0])


def insert_unfetched(told):
    told.insert()


def insert_over_another(told):
    told.fetch()
    told.insert()
    told.fetch(row=8)
    told.insert(row=8)


def insert_twice(told):
    for slot in (1, 2):
        told.fetch()
        told.insert(slot=slot)


def train_what_is_not_there(told):
    told.train()


def train_in_another_slot(told):
    told.fetch()
    told.insert()
    told.train(row=8)


def change_in_the_slot(told):
    told.fetch()
    told.insert()
    told.cache.data[0][1] += 1
    told.train()


def evict_what_is_not_there(told):
    told.evict(8, 2)


def drop_an_update(told):
    told.fetch()
    told.insert()
    told.train()
    told.update()
    told.evict(kept=False)


def write_twice(told):
    rows = told.trained()
    told.write(rows)
    told.write(rows)


def write_other_bits(told):
    told.write(told.trained(), changed=1.0)


def end_without_a_write(told):
    told.trained()
    told.checker.finished()


@pytest.mark.parametrize(
    ("steps", "names"),
    [
        (read_in_flight, ("iteration 1: row 7", "write-back of iteration 0")),
        (read_other_bits, ("iteration 1: row 7", "other bits")),
        (insert_unfetched, ("iteration 0: row 7", "slot 1", "fetched")),
        (insert_over_another, ("row 8", "slot 1", "row 7")),
        (insert_twice, ("row 7", "slot 2", "1")),
        (train_what_is_not_there, ("iteration 0: row 7", "slot 1", "nothing")),
        (train_in_another_slot, ("row 8", "slot 1", "row 7")),
        (change_in_the_slot, ("row 7", "slot 1", "initial")),
        (evict_what_is_not_there, ("after iteration -1: row 8", "slot 2")),
        (drop_an_update, ("after iteration 0: row 7", "update of iteration 0", "dropped")),
        (write_twice, ("after iteration 0: row 7", "twice", "iteration 0")),
        (write_other_bits, ("row 7", "other bits", "iteration 0")),
        (end_without_a_write, ("row 7", "iteration 0", "initial value")),
    ],
)
def test_a_wrong_step_is_named(steps, names):
    with pytest.raises(ConsistencyError) as caught:
        steps(Told())
    for name in (*names, "table 'ad'", "defect of bagpipe"):
        assert name in str(caught.value), (name, str(caught.value))


def test_threads_raise_no_false_alarm():
    for options in ({"cache": 24, "lookahead": 3}, {"cache": 24, "policy": "lru"}):
        train(*start(check=True, **options))


def test_a_loop_that_is_left_early_raises_no_false_alarm():
    net, optimizer, loader = start(check=True)
    for number, batch in enumerate(loader, start=1):
        step(net, batch, optimizer)
        if number == 6:
            break
