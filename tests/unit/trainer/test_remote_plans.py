"""The trainer's end: plans from an oracle elsewhere drive the same loop."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from bagpipe import optim
from bagpipe.build import PlanChoice, Spec, build_loop
from bagpipe.cluster.context import RoleWorld
from bagpipe.config import Config
from bagpipe.errors import ConfigError, WireError
from bagpipe.layers import bind
from bagpipe.layout import RowLayout
from bagpipe.oracle.service import OracleService, PlanSettings
from bagpipe.prepared import PreparedLoader, row_parameters
from bagpipe.state import of_store
from bagpipe.store import MemoryStore
from bagpipe.trainer.pipeline import Counters
from bagpipe.trainer.remote_plans import RemotePlans
from bagpipe.types import Table
from bagpipe.wire.messages import AskStats
from bagpipe.wire.plan_messages import DescribePlans, NextPlan, NoMorePlans, Planned
from benchmarks.simulated import SimulatedNetwork
from harness.flat import prepare
from harness.served import FAULTS, HASTY, RUN, Served, make_job
from harness.world import (
    TABLES,
    assert_identical,
    dense_sgd,
    initial,
    make_batches,
    make_model,
    make_reference,
    train_prepared,
    train_reference,
)


class Loop:
    """A model that trains on the plans of an oracle which reads these batches."""

    def __init__(self, batches, optimizer, *, accumulate=1, cache=300, seed=0, faults=FAULTS, **options):
        self.model = make_model()
        binding = bind(self.model, ["user", "shown", "clicked", "words"], tables=TABLES)
        self.layouts = [RowLayout(t, binding.dims(n), optimizer, initial(t)) for n, t in enumerate(binding.tables)]
        widths = tuple(layout.width for layout in self.layouts)
        self.network = SimulatedNetwork(seed, real_time=True, **faults)
        settings = PlanSettings(binding.tables, widths, cache, lookahead=4, accumulate=accumulate)
        self.oracle = OracleService(lambda handler: self.network.listen("oracle", handler), batches, settings, run=RUN)
        self.oracle.start()
        self.plans = RemotePlans(self.network, "oracle", run=RUN, patience=HASTY)
        self.store = MemoryStore(self.layouts)
        spec = Spec(
            model=self.model, binding=binding, rows=optimizer, layouts=self.layouts, plans=PlanChoice(cache),
            source=None, accumulate=accumulate, check=True, once=True, **options,
        )  # fmt: skip
        self.loop = build_loop(spec, RoleWorld(Config(), self.plans, self.store))
        self.dense = dense_sgd(list(self.model.parameters()))
        self.loader = PreparedLoader(self.loop, row_parameters(binding, torch.device("cpu")), [self.dense], {})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.loader.close()
        self.oracle.close()
        self.network.close()

    def train(self, stop=None):
        train(self.model, self.dense, self.loader, stop)

    def state(self):
        return of_store(self.model, [layout.table.name for layout in self.layouts], self.store)


def train(model, optimizer, loader, stop=None):
    """An epoch, or so many batches of it."""
    for number, batch in enumerate(loader):
        if number == stop:
            break
        nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels).backward()
        if loader.step_due:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_weighted_bags_of_64_bit_ids_train_to_the_bits_of_the_reference(name):
    make = {"sgd": lambda: optim.SGD(0.1), "adam": lambda: optim.Adam(0.01)}[name]
    batches = make_batches(15, last=2)
    expected, _ = train_reference(batches, make())
    with Loop(batches, make(), cache=60) as found:
        found.train()
        assert_identical(expected, found.state())
        assert found.plans.stats()["plan_bytes"] > 0
        assert found.loop.stats()["plan_bytes"] == found.plans.stats()["plan_bytes"]


def test_accumulated_batches_are_one_plan_and_train_to_the_bits_of_one_process():
    batches = make_batches(11)
    with Loop(batches, optim.Adagrad(0.1), accumulate=3) as remote:
        remote.train()
        assert remote.loop.stats()["iterations"] == 4
        assert remote.plans.position(4) == {"iterations": 4, "batches": 11, "loader": None}
        found = remote.state()
    model = make_model()
    prepared = prepare(
        model, dense_sgd(list(model.parameters())), batches, optim.Adagrad(0.1), features=TABLES, initial=initial,
        cache=300, accumulate=3,
    )  # fmt: skip
    train(*prepared)
    prepared[-1].close()
    loop = prepared[-1].loop
    assert_identical(of_store(model, [layout.table.name for layout in loop.layouts], loop.store), found)


def test_a_loop_that_is_left_early_has_the_rows_that_were_trained():
    batches = make_batches(15)
    expected, _ = train_prepared(batches[:6], optim.SGD(0.1))
    with Loop(batches, optim.SGD(0.1)) as found:
        found.train(stop=6)
        assert_identical(expected, found.state())


def test_a_loop_that_is_left_does_not_wait_for_a_plan_that_is_not_there():
    batches = make_batches(11)
    going_on = threading.Event()

    def slow():
        yield from batches[:10]
        going_on.wait(60)
        yield batches[10]

    with Loop(slow(), optim.SGD(0.1), faults={}, depth=20) as remote:
        for _ in remote.loader:  # a loader in this process would be waited for, until a DeadlineError
            break
        assert remote.loop.closed
        going_on.set()


def test_evaluation_and_the_position_in_the_data_work_as_in_one_process():
    batches = make_batches(8)
    with Loop(batches, optim.SGD(0.1)) as remote:
        reference = make_reference(batches, optim.SGD(0.1))
        for number, batch in enumerate(remote.loader):
            reference.step(batch)
            logits = remote.model(batch.dense, batch.sparse)
            nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
            remote.dense.step()
            remote.dense.zero_grad()
            if number == 2:
                with torch.no_grad():
                    seen = [remote.model(b.dense, b.sparse) for b in batches[:2]]
                assert all(torch.equal(a, reference.predict(b)) for a, b in zip(seen, batches[:2], strict=True))
                data = {"iterations": 3, "batches": 3, "loader": None}
                assert remote.loop.progress()["data"] == data | {"epoch": 0}
                break
        with pytest.raises(ConfigError, match="3 batches into the data"):
            remote.plans.resume({"iterations": 3, "batches": 3, "loader": None})
        remote.plans.resume({"iterations": 0, "batches": 0, "loader": None})


def test_plans_for_another_model_are_refused(tmp_path):
    job = make_job(tmp_path / "run")
    with Served(job) as served:
        plans = served.plans()
        _, _, layouts = job.model()
        plans.check(layouts)
        other = [RowLayout(Table("user", 7), layout.dims, layout.optimizer, layout.initial) for layout in layouts[:1]]
        with pytest.raises(ConfigError, match=r"plans for 4 tables and the model has 1.*'user', 1000.*'user', 7"):
            plans.check(other)
        plans.close()


class Impostor:
    """An oracle that answers what the test says."""

    def __init__(self, oracle, answer):
        self.oracle, self.answer = oracle, answer

    def handle(self, peer, message):
        if isinstance(message.body, DescribePlans):
            return self.oracle.handle(peer, message)
        return self.answer(peer, message)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (AskStats(), "AskStats came where plan 0 was due"),
        (NoMorePlans(3), "NoMorePlans came where plan 0 was due"),
        (Planned(0, ""), "settings"),
    ],
)
def test_an_answer_that_is_none_is_refused(body, reason, tmp_path):
    with Served(make_job(tmp_path / "run")) as served:
        impostor = Impostor(served.oracle, lambda *_: (body, ()))
        served.network.listen("impostor", impostor.handle)
        plans = RemotePlans(served.network, "impostor", run=RUN, patience=HASTY)
        with pytest.raises(WireError, match=reason):
            next(plans.epoch(Counters()))
        plans.close()


def test_requests_say_what_has_been_received(tmp_path):
    seen = []
    with Served(make_job(tmp_path / "run")) as served:

        def note(peer, message):
            seen.append(message.body)
            served.oracle.handle(peer, message)

        impostor = Impostor(served.oracle, note)
        served.network.listen("impostor", impostor.handle)
        plans = RemotePlans(served.network, "impostor", run=RUN, ahead=2)
        assert len(list(plans.epoch(Counters()))) == 26
        plans.close()
    assert seen[:3] == [NextPlan(0, 0, -1), NextPlan(0, 1, -1), NextPlan(0, 2, 0)]
