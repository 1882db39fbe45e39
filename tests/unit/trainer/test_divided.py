"""A loader's batches, divided among trainers: each sample once, ids trainer by trainer, bad batches by their name."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from bagpipe.data import Loader, generated
from bagpipe.errors import BatchError, DataError, ValueRangeError
from bagpipe.oracle.assign import Assigner
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.partition import Partition
from bagpipe.together import divide_by
from bagpipe.trainer.divided import Divided, SharedPlans
from bagpipe.trainer.pipeline import Counters
from bagpipe.types import Batch, Ids, Table

TABLES = (Table("a", 50), Table("b", 60, ("b0", "b1")))


def batch_of(number, samples):
    """Sample i of batch n has ids that say so."""
    own = torch.arange(samples).reshape(-1, 1) + 5 * number
    sparse = {"a": Ids(own), "b0": Ids(torch.cat([own, own + 1], 1)), "b1": Ids(own + 2)}
    return Batch(own.float(), sparse, torch.zeros(samples), number=number)


def shared(batches, trainers, accumulate=1, assign="contiguous", divide=None):
    divide = divide or divide_by(Assigner(assign, trainers, 0, [table.features for table in TABLES]))
    source = Divided(batches, divide, accumulate=accumulate)
    source.tables = TABLES
    source.adapter.require(source.features)
    oracle = make_oracle(TABLES, [4, 4], 200, source.first_ids(), lookahead=3, policy="lookahead", trainers=trainers)
    return SharedPlans(source, oracle, Partition(trainers, oracle.tables, oracle.places.capacity, oracle.places.guests))


def items(plans, rank):
    """All that a trainer gets."""
    own = plans.of(rank)
    found = list(own.epoch(Counters()))
    own.close()
    return found


def iterations_until(plans, rank, kind, match):
    """The iterations that a trainer gets before an error."""
    own, found = plans.of(rank), []

    def read():
        for plan, _ in own.epoch(Counters()):
            found.append(plan.iteration)

    with pytest.raises(kind, match=match):
        read()
    own.close()
    return found


class SlowToOpen(list):
    """A loader that takes its time, in whoever opens it for an epoch."""

    def __init__(self, batches):
        super().__init__(batches)
        self.opening, self.may_open = threading.Event(), threading.Event()
        self.may_open.set()

    def __iter__(self):
        self.opening.set()
        assert self.may_open.wait(30)
        return super().__iter__()


def test_no_trainer_asks_for_plans_while_another_opens_the_loader():
    loader = SlowToOpen([batch_of(number, 4) for number in range(5)])
    plans = shared(loader, 2)
    loader.opening.clear()
    loader.may_open.clear()
    first = threading.Thread(target=lambda: plans.of(0).epoch(Counters()))
    first.start()
    assert loader.opening.wait(30)
    found, own = [], plans.of(1)

    def second():
        found.extend(own.epoch(Counters()))

    other = threading.Thread(target=second)
    other.start()
    other.join(0.2)
    loader.may_open.set()
    first.join(30)
    other.join(30)
    assert [plan.iteration for plan, _ in found] == list(range(5)), "no data, it seemed"


@pytest.mark.parametrize("assign", ["contiguous", "round_robin", "aware"])
@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("trainers", [2, 3, 4])
def test_every_sample_goes_to_one_trainer_with_its_ids(trainers, accumulate, assign):
    sizes = [5, 4, 1, 3, 6]
    batches = [batch_of(number, size) for number, size in enumerate(sizes)]
    plans = shared(batches, trainers, accumulate, assign)
    assigner = Assigner(assign, trainers, 0, [table.features for table in TABLES])
    expected = [assigner(batch).parts(batch) for batch in batches]
    for rank in range(trainers):
        number = 0
        for iteration, (plan, rewritten) in enumerate(items(plans, rank)):
            assert plan.iteration == iteration
            assert len(rewritten) == len(plan.sync.samples) == min(accumulate, len(sizes) - iteration * accumulate)
            seen = [0, 0, 0]
            for given, samples in zip(rewritten, plan.sync.samples, strict=True):
                part = expected[number][rank]
                assert samples == tuple(len(of_rank) for of_rank in expected[number])
                assert torch.equal(given.batch.dense, part.dense)
                for feature, (name, table) in enumerate([("a", 0), ("b0", 1), ("b1", 1)]):
                    length = part.sparse[name].values.numel()
                    inverse = plan.inverse[feature][seen[feature] : seen[feature] + length]
                    seen[feature] += length
                    assert plan.rows.of_table(table)[0][inverse].tolist() == part.sparse[name].values.flatten().tolist()
                number += 1
        assert number == len(sizes)


def spoilt(number):
    batch = batch_of(number, 4)
    return Batch(batch.dense, batch.sparse | {"a": Ids(torch.full((4, 1), 99))}, batch.labels, number=number)


def lacking(number):
    batch = batch_of(number, 4)
    return Batch(batch.dense, {"a": batch.sparse["a"]}, batch.labels, number=number)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("bad", [2, 3])
@pytest.mark.parametrize(("spoil", "kind", "match"), [(spoilt, ValueRangeError, "99"), (lacking, BatchError, "b0")])
def test_a_bad_batch_is_named_after_those_before_it(accumulate, bad, spoil, kind, match):
    batches = [spoil(number) if number == bad else batch_of(number, 4) for number in range(6)]
    plans = shared(batches, 3, accumulate)
    for rank in range(3):
        found = iterations_until(plans, rank, kind, rf"batch {bad}\b.*{match}")
        assert found == list(range(-(-bad // accumulate))), "a last one may have fewer batches"


def test_what_can_not_be_divided_ends_the_data():
    def divide(batch):
        if batch.number == 3:
            raise DataError("batch 3 is odd")
        return [(batch.part(0, 2), 2), (batch.part(2, len(batch)), len(batch) - 2)]

    plans = shared([batch_of(number, 4) for number in range(6)], 2, divide=divide)
    for rank in range(2):
        assert iterations_until(plans, rank, DataError, "batch 3 is odd") == [0, 1, 2]


def test_the_loader_is_let_go_of_with_the_last_trainer():
    closed = []

    class Tells:
        def __iter__(self):
            try:
                yield from (batch_of(number, 4) for number in range(30))
            finally:
                closed.append(True)

    plans = shared(Tells(), 3)
    closed.clear()  # of the look at the first batch
    owns = [plans.of(rank) for rank in range(3)]
    for own in owns:
        next(own.epoch(Counters()))
    for own in owns[:2]:
        own.close()
        own.close()
    next(owns[2].epoch(Counters()))
    assert not closed
    owns[2].close()
    assert closed == [True]


def test_a_position_is_that_of_the_common_loader():
    batches = [batch_of(number, 4) for number in range(8)]
    plans = shared(batches, 2, accumulate=2)
    own = plans.of(0)
    stream = own.epoch(Counters())
    next(stream)
    next(stream)
    position = own.position(2)
    assert position["batches"] == 4
    resumed = shared(batches, 2, accumulate=2)
    for rank in range(2):
        resumed.of(rank).resume(position)
    first = next(resumed.of(1).epoch(Counters()))
    assert np.array_equal(first[1][0].batch.dense.numpy().flatten(), batches[4].dense[2:].numpy().flatten())


@pytest.mark.parametrize("kind", ["list", "loader"])
@pytest.mark.parametrize("position", [1, 3, 4, 5, 8, 9])
def test_samples_placed_by_their_rows_are_divided_alike_from_any_position_on(monkeypatch, kind, position):
    monkeypatch.setattr("bagpipe.oracle.assign.PERIOD", 4)
    data = generated("tiny", 70)
    tables = [table.features for table in data.tables]

    def divided(after):
        shown = []
        assigner = Assigner("aware", 3, 0, tables)
        loader = Loader(data, 8, seed=1)

        def divide(batch):
            shown.append(batch.number)
            return divide_by(assigner)(batch)

        source = Divided(loader if kind == "loader" else list(loader), divide, first_needed=assigner.first_needed)
        source.tables = data.tables
        if after:
            state = {"batches": after, "loader": None}
            if kind == "loader":
                state["loader"] = loader.state_dict(after)
            source.resume(state)
        source.begin()
        found = [
            (number, [part.labels.tolist() + part.dense.tolist() for part, _ in divide(batch)])
            for number, batch in source.reading
        ]
        first = position - position % 4 if after else 0
        assert shown == list(range(first, 9))
        for given in range(
            10 - after if after else 0
        ):  # what is saved from there on does not depend on what was looked back at
            saved = source.position(given)
            assert saved["batches"] == after + given
            assert kind == "list" or saved["loader"]["iteration"] == saved["batches"]
        return found

    assert divided(position) == divided(0)[position:]
