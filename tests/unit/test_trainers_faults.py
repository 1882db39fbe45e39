"""One of several trainers fails: all end, with its cause, and nothing stays (I7)."""

from __future__ import annotations

import gc
import threading
import time

import numpy as np
import pytest
import torch

from bagpipe.cache import RowCache
from bagpipe.errors import (
    BatchError,
    GradientError,
    ModelError,
    PipelineError,
    StoreError,
    ValueRangeError,
)
from bagpipe.store import MemoryStore
from bagpipe.trainer.row_sync import RowBuffers
from bagpipe.training import train_configured
from bagpipe.types import Ids
from harness.explorer import Together
from harness.served import make_job
from harness.trainers import DESIGNS, Several, World
from harness.world import make_batches

BATCHES = make_batches(8, size=5)


class Planned(Exception):
    """What the tests let fail."""


def chain(error):
    """An error and what led to it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def fails(kind, match, several, loop, cause=None):
    """The run ends with an error of this kind, its cause attached; no thread stays, and the store is closed."""
    before = threading.enumerate()
    gc.collect()
    with pytest.raises(kind, match=match) as caught:
        several.run(loop)  # a wait that hangs would take ten minutes
    if cause is not None:
        assert any(isinstance(error, cause) for error in chain(caught.value)), list(chain(caught.value))
    until = time.monotonic() + 5
    while (
        left := [thread.name for thread in threading.enumerate() if thread not in before]
    ) and time.monotonic() < until:
        time.sleep(0.01)
    assert not left
    with pytest.raises(StoreError, match="closed"):
        several.store.read(0, np.zeros(1, np.int64), np.empty((1, several.made[0][2][0].width), np.float32))
    return caught.value


def make(scheduled, trainers=3, **options):
    world = World(BATCHES, trainers=trainers)
    return Several(world, Together(3) if scheduled else None, **({"cache": 40} | options))


@pytest.fixture(params=[False, True], ids=["threads", "scheduled"])
def scheduled(request):
    return request.param


@pytest.mark.parametrize(("design", "rank"), [("owned", 2), ("lrpp", 0)])
@pytest.mark.parametrize("moment", ["first", "forward", "between", "step", "end"])
def test_a_trainer_that_fails_ends_all(scheduled, design, rank, moment):
    def loop(one):
        mine = one.rank == rank
        if mine and moment == "first":
            raise Planned(moment)
        for number, batch in enumerate(one.batches()):
            if mine and number == 3 and moment == "forward":
                raise Planned(moment)
            one.backward(batch)
            if mine and number == 3 and moment == "between":
                raise Planned(moment)
            one.step()
            if mine and number == 3 and moment == "step":
                raise Planned(moment)
        if mine and moment == "end":
            raise Planned(moment)

    fails((Planned, PipelineError), moment, make(scheduled, design=design), loop, Planned)


def test_a_failure_in_the_middle_of_a_backward_pass_ends_all(scheduled):
    def loop(one):
        for number, batch in enumerate(one.batches()):
            if one.rank == 1 and number == 2:
                logits = one.model(batch.dense, batch.sparse)
                doubled = logits * 2

                def fail(_grad):
                    raise Planned("backward")

                doubled.register_hook(lambda grad: grad)
                logits.register_hook(fail)
                doubled.sum().backward()
            one.train(batch)

    fails((Planned, PipelineError), "backward", make(scheduled), loop, Planned)


@pytest.mark.parametrize("design", DESIGNS)
def test_what_fails_in_one_trainer_of_bagpipe_train_is_told_to_all(tmp_path, design):
    job = make_job(tmp_path / "run", "trainers=3", f"sync.design={design}", "epochs=1")

    def report(done, _note):
        if done == 3:
            raise Planned("the report")

    with pytest.raises((Planned, PipelineError), match="the report"):
        train_configured(job, report)


def test_an_interrupt_ends_all(scheduled):
    def loop(one):
        for number, batch in enumerate(one.batches()):
            if one.rank == 1 and number == 2:
                raise KeyboardInterrupt("ctrl-c")
            one.train(batch)

    fails((KeyboardInterrupt, PipelineError), "ctrl-c", make(scheduled), loop, KeyboardInterrupt)


def assert_trained(trained, number):
    """All batches before the bad one; who hears of it from another may be in the last of them."""
    assert max(trained.values()) == number
    assert min(trained.get(rank, 0) for rank in range(3)) >= number - 1


@pytest.mark.parametrize("number", [1, 4, 7])
def test_a_loader_that_fails_ends_all_after_the_batches_before(scheduled, number):
    def loader():
        for position, batch in enumerate(BATCHES):
            if position == number:
                raise Planned("loader")
            yield batch

    trained = {}

    def loop(one):
        for batch in one.batches():
            one.train(batch)
            trained[one.rank] = trained.get(one.rank, 0) + 1

    fails((Planned, PipelineError), "loader", make(scheduled, loader=loader()), loop, Planned)
    assert_trained(trained, number)


def without_feature(batch):
    return type(batch)(batch.dense, {k: v for k, v in batch.sparse.items() if k != "user"}, batch.labels)


def out_of_range(batch):
    ids = Ids(torch.full_like(batch.sparse["user"].values, 999))
    return type(batch)(batch.dense, batch.sparse | {"user": ids}, batch.labels)


@pytest.mark.parametrize(
    ("spoil", "kind", "match"),
    [(without_feature, BatchError, "batch 3.*user"), (out_of_range, ValueRangeError, "3.*user.*999")],
)
def test_a_batch_that_is_wrong_ends_all_by_its_name(scheduled, spoil, kind, match):
    batches = [*BATCHES[:3], spoil(BATCHES[3]), *BATCHES[4:]]
    trained = {}

    def loop(one):
        for batch in one.batches():
            one.train(batch)
            trained[one.rank] = trained.get(one.rank, 0) + 1

    fails((kind, PipelineError), match, make(scheduled, loader=batches), loop, kind)
    assert_trained(trained, 3)


class Failing(MemoryStore):
    """A store whose nth call of one kind fails."""

    def __init__(self, layouts, call, number):
        super().__init__(layouts)
        self.call, self.left = call, number

    def count(self, call):
        if call == self.call:
            self.left -= 1
            if self.left < 0:
                raise Planned(f"disk {call}")

    def read_many(self, parts, after=-1):
        self.count("read")
        super().read_many(parts, after)

    def write_many(self, parts, passed=-1):
        if parts:
            self.count("write")
        super().write_many(parts, passed)


@pytest.mark.parametrize(("call", "number"), [("read", 0), ("read", 7), ("write", 0), ("write", 5)])
def test_a_store_that_fails_ends_all(scheduled, call, number):
    world = World(BATCHES, trainers=3)
    several = make(scheduled, policy="lru", store=Failing(world.make()[2], call, number))
    fails((Planned, PipelineError), f"disk {call}", several, lambda one: [one.train(b) for b in one.batches()], Planned)


@pytest.mark.parametrize("design", ["owned", "lrpp"])
@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (RowCache, "insert"),
        (RowCache, "copy_out"),
        (RowBuffers, "gradients"),
        (RowBuffers, "sums"),
        (RowCache, "mark_updated"),
    ],
)
def test_a_stage_that_fails_ends_all(scheduled, monkeypatch, design, kind, method):
    several = make(scheduled, design=design)
    victim = several.loops[1].cache
    real, calls = getattr(kind, method), []

    def failing(self, *arguments):
        mine = self is victim if kind is RowCache else self._cache is victim
        if mine:
            calls.append(1)
            if len(calls) > 4:
                raise Planned("stage")
        return real(self, *arguments)

    monkeypatch.setattr(kind, method, failing)
    fails((Planned, PipelineError), "stage", several, lambda one: [one.train(b) for b in one.batches()], Planned)


@pytest.mark.parametrize(("design", "idle"), [*zip(DESIGNS, [{0}, {1}, {2}, {0, 2}], strict=True)])
def test_a_trainer_without_a_step_while_others_make_one_is_an_error_on_all(scheduled, design, idle):
    heard = {}

    def loop(one):
        try:
            for number, batch in enumerate(one.batches()):
                one.backward(batch)
                if number == 2 and one.rank in idle:
                    one.optimizer.zero_grad()
                    continue
                one.step()
        except PipelineError as error:
            heard[one.rank] = str(error)
            raise

    names = ", ".join(map(str, sorted(idle)))
    fails(PipelineError, rf"iteration 2: trainers? {names} made no optimizer", make(scheduled, design=design), loop)
    assert sorted(heard) == [0, 1, 2]
    assert all("made no optimizer.step()" in text for text in heard.values()), heard


def test_a_gradient_that_is_not_finite_on_one_trainer_is_an_error_on_all(scheduled):
    heard = {}

    def loop(one):
        try:
            for number, batch in enumerate(one.batches()):
                one.backward(batch, torch.nan if number == 2 and one.rank == 1 else 1.0)
                one.step()
        except Exception as error:
            heard[one.rank] = error
            raise

    fails((GradientError, PipelineError), "iteration 2: .*not finite", make(scheduled), loop, GradientError)
    assert sorted(heard) == [0, 1, 2]
    assert all("iteration 2" in str(error) and "not finite" in str(error) for error in heard.values())


def test_trainers_that_begin_with_other_weights_are_refused(scheduled):
    several = make(scheduled)
    with torch.no_grad():
        next(several.made[2][0].parameters()).add_(1)
    fails(
        (ModelError, PipelineError),
        "other values on trainer 2",
        several,
        lambda one: [one.train(b) for b in one.batches()],
        ModelError,
    )


@pytest.mark.parametrize("stepped", [True, False])
def test_a_trainer_that_leaves_alone_is_an_error_on_all(scheduled, stepped):
    heard = {}

    def loop(one):
        try:
            with one.loader:
                for number, batch in enumerate(one.loader):
                    one.backward(batch)
                    if number == 2 and one.rank == 1 and not stepped:
                        break
                    one.step()
                    if number == 2 and one.rank == 1:
                        break
        except PipelineError as error:
            heard[one.rank] = str(error)
            raise

    fails(PipelineError, "trainer", make(scheduled), loop)
    assert sorted(heard) == [0, 1, 2]
    assert all("trainer 1" in text for text in heard.values()), heard
