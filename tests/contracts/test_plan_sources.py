"""What every source of plans promises to a training loop: in this process, shared by trainers, or from elsewhere.

One trainer's plans of the same data are the same from every source, and so are the parts of two trainers.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from threading import Thread

import numpy as np
import pytest
import torch

from bagpipe.data.tree_wire import types_in
from bagpipe.errors import DataError
from bagpipe.oracle.assign import Assigner
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.partition import Partition
from bagpipe.oracle.service import OracleService, PlanSettings
from bagpipe.together import divide_by
from bagpipe.trainer.divided import Divided, SharedPlans
from bagpipe.trainer.pipeline import Counters
from bagpipe.trainer.remote_plans import RemotePlans
from bagpipe.trainer.script_plans import ScriptPlans, ServedPlans, SharedLoader
from bagpipe.trainer.source import LocalPlans, Source
from benchmarks.simulated import SimulatedNetwork
from harness.served import HASTY, RUN
from harness.world import TABLES, make_batches

WIDTHS = (3, 5, 3)
CACHE = 90
COUNT = 9
FEATURES = [name for table in TABLES for name in table.features]


class Failing:
    """A loader that ends with an error after so many batches."""

    def __init__(self, batches, after):
        self._batches, self._after = batches, after

    def __iter__(self):
        yield from self._batches[: self._after]
        raise DataError("the disk is gone")


def oracle_for(source, trainers):
    source.tables = TABLES
    source.adapter.require(source.features)
    return make_oracle(TABLES, WIDTHS, CACHE, source.first_ids(), lookahead=3, policy="lookahead", trainers=trainers)


# Each opens the sources of all its trainers, as a context: batches, and after how many iterations of them to begin.


@contextmanager
def local(batches, done=0):
    source = Source(batches)
    plans = LocalPlans(source, oracle_for(source, 1))
    if done:
        plans.resume({"iterations": done, "batches": done, "loader": None})
    yield [plans]
    plans.close()


@contextmanager
def remote(batches, done=0, trainers=1):
    network = SimulatedNetwork(0, real_time=True)
    settings = PlanSettings(TABLES, WIDTHS, CACHE, 3, trainers=trainers)
    ahead = batches if not done else batches[done:]
    oracle = OracleService(lambda handler: network.listen("oracle", handler), ahead, settings, run=RUN, done=done)
    oracle.start()
    with ExitStack() as stack:
        stack.callback(network.close)
        stack.callback(oracle.close)
        opened = [
            RemotePlans(network, "oracle", run=RUN, trainer=rank, patience=HASTY, done=done) for rank in range(trainers)
        ]
        for plans in opened:
            if done:
                plans.resume({"iterations": done, "batches": done, "loader": None})
            stack.callback(plans.close)
        yield opened


@contextmanager
def shared(batches, done=0):
    source = Divided(batches, divide_by(Assigner("contiguous", 2)))
    oracle = oracle_for(source, 2)
    plans = SharedPlans(source, oracle, Partition(2, oracle.tables, oracle.places.capacity, oracle.places.guests))
    opened = [plans.of(rank) for rank in range(2)]
    if done:
        opened[0].resume({"iterations": done, "batches": done, "loader": None})
    yield opened
    for own in opened:
        own.close()
        own.close()


def remote_of_two(batches, done=0):
    return remote(batches, done, 2)


@contextmanager
def script(batches, done=0):
    network = SimulatedNetwork(0, real_time=True)
    source = SharedLoader(batches, 1)
    oracle = oracle_for(source, 2)
    source.share([], Assigner("contiguous", 2))
    described = PlanSettings(TABLES, WIDTHS, CACHE, 3, trainers=2).described(list(oracle.places.capacity))
    partition = Partition(2, oracle.tables, oracle.places.capacity, oracle.places.guests)
    first = ServedPlans(lambda handler: network.listen("first", handler), source, oracle, partition, described, run=RUN)
    if done:
        first.resume({"iterations": done, "batches": done, "loader": None})
    other = ScriptPlans(network, "first", source.adapter, types_in(make_batches(1)[0]), run=RUN, trainer=1)
    try:
        yield [first, other]
    finally:
        first.interrupt()
        other.close()
        other.close()
        first.close()
        network.close()


SOURCES = {"local": local, "remote": remote, "shared": shared, "remote, two": remote_of_two, "script": script}


def read(source, stop=None):
    """What a trainer gets, up to an error: (plan, batches) as values that compare; and the error."""
    found, stream = [], source.epoch(Counters())
    try:
        for plan, batches in stream:
            found.append(
                (
                    flat(plan),
                    [[flat(each.places) for each in own.given] for own in batches],
                    [flat(own.batch) for own in batches],
                )
            )
            if len(found) == stop:
                break
    except Exception as error:
        return found, error
    finally:
        stream.close()
    return found, None


def read_all(sources, stop=None):
    """The same of all trainers at once."""
    results = [None] * len(sources)

    def run(rank):
        results[rank] = read(sources[rank], stop)

    threads = [Thread(target=run, args=(rank,)) for rank in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def flat(part):
    """All that a value holds, in a form that compares."""
    if isinstance(part, torch.Tensor):
        return tuple(part.shape), part.tolist()
    if isinstance(part, np.ndarray):
        return part.dtype.str, part.shape, part.tobytes()
    if is_dataclass(part):
        return [flat(getattr(part, field.name)) for field in fields(part) if field.name != "sharing"]
    if isinstance(part, dict):
        return {key: flat(value) for key, value in part.items()}
    return [flat(each) for each in part] if isinstance(part, tuple | list) else part


@pytest.fixture(params=SOURCES)
def opened(request):
    return SOURCES[request.param]


@pytest.mark.parametrize("names", [("local", "remote"), ("shared", "remote, two", "script")], ids=["one", "two"])
def test_the_same_data_has_the_same_plans_in_the_same_order(names):
    found = []
    for name in names:
        with SOURCES[name](make_batches(COUNT, last=2)) as sources:
            found.append(read_all(sources))
    for results in found:
        for iterations, error in results:
            assert error is None
            assert [plan[0] for plan, _, _ in iterations] == list(range(COUNT))
        assert [[part[0] for part in own] for own, _ in results] == [[part[0] for part in own] for own, _ in found[0]]
        assert [[part[1] for part in own] for own, _ in results] == [[part[1] for part in own] for own, _ in found[0]]


def test_an_error_of_the_loader_comes_after_all_batches_before_it(opened):
    whole = make_batches(COUNT)
    with opened(whole) as sources:
        expected = read_all(sources)
    with opened(Failing(whole, 6)) as sources:
        found = read_all(sources)
    for (own, error), (everything, _) in zip(found, expected, strict=True):
        assert isinstance(error, DataError), error
        assert "the disk is gone" in str(error)
        assert len(own) == 6
        # A part tells where rows of the plan after the next will be, which goes by who uses them two batches later.
        assert [rows for rows, _, _ in own][:2] == [rows for rows, _, _ in everything][:2]


def test_a_source_is_closed_before_its_end_or_its_beginning(opened):
    with opened(make_batches(COUNT)) as sources:
        results = read_all(sources, stop=2)
        assert [len(own) for own, _ in results] == [2] * len(sources)
        for source in sources:
            source.interrupt()
    with opened(make_batches(COUNT)):
        pass


def test_a_source_goes_on_after_an_iteration_and_knows_its_position(opened):
    batches = make_batches(COUNT)
    with opened(batches) as sources:
        whole = read_all(sources)
        for source in sources:
            assert source.position(4)["batches"] == 4
            assert source.stats()["waited_s"] >= 0
    with opened(batches, 4) as sources:
        rest = read_all(sources)
        assert sources[0].position(2)["batches"] == 6
    for (own, error), (everything, _) in zip(rest, whole, strict=True):
        assert error is None
        assert len(own) == COUNT - 4
        for (_, _, given), (_, _, before) in zip(own, everything[4:], strict=True):
            assert given == before
