"""Training stopped anywhere goes on elsewhere with the next batch, whoever reads it, and ends with the same bits
(I2, I4)."""

from __future__ import annotations

import json
import time
from itertools import islice

import pytest
import torch

from bagpipe.data import Loader
from bagpipe.errors import BatchError
from harness.explorer import explorer
from harness.kept import BATCH, DATA, EPOCHS, STORED, Run, assert_same_end, every, loader, undisturbed
from harness.plain import loss_of, make_batches, nothing_left  # noqa: F401
from harness.seams import Checkpoints
from harness.started import start

pytestmark = pytest.mark.usefixtures("nothing_left")


def position(run):
    """Where in the data it is."""
    return run.loop.progress()["data"]


def test_the_position_is_what_was_trained_not_what_was_read_ahead():
    run = Run(lookahead=8)
    assert (position(run)["iterations"], position(run)["batches"]) == (0, 0)
    batches = iter(run.loader)

    def trained():
        data = position(run)
        json.dumps(data)  # plain values
        assert data["loader"]["iteration"] == data["batches"] == data["iterations"]
        return data["batches"]

    batch = next(batches)
    assert batch.number == 0
    assert trained() == 0  # in hand, but no step yet
    run.model(batch.dense, batch.sparse).sum().backward()
    assert trained() == 0
    run.optimizer.step()
    assert trained() == 1
    run.optimizer.zero_grad()
    next(batches)
    assert trained() == 1
    next(batches)  # the loop went on without a step
    assert trained() == 2
    run.optimizer.step()  # there was nothing to do
    next(batches)
    assert trained() == 3
    run.loader.close()
    assert trained() == 3  # stopped before its step: it will be the first one
    run.end()


def test_in_a_further_epoch_the_position_is_one_in_that_epoch():
    run = Run(make_loader=lambda: STORED[:3], epochs=EPOCHS).train(5)
    assert {name: position(run)[name] for name in ("epoch", "iterations", "batches")} == {
        "epoch": 1, "iterations": 5, "batches": 2,
    }  # fmt: skip
    run.end()


def test_an_unfinished_iteration_of_several_batches_is_begun_again(tmp_path):
    expected = undisturbed(accumulate=4)
    Run(accumulate=4, checkpoint=every(tmp_path)).train(6).end()  # one iteration and a half
    assert Checkpoints(tmp_path).numbers() == [1]
    assert_same_end(expected, Run(accumulate=4, resume=tmp_path).train().end())


def test_a_skipped_update_counts_as_trained():
    net, optimizer, loader = start(make_batches(4))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for number, batch in enumerate(loader):
        assert loader.loop.done == loader.loop.progress()["data"]["batches"] == number
        loss = loss_of(net, batch) * (float("inf") if number == 1 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 1.0, "one was skipped"
    assert loader.loop.done == 4


def test_batches_are_numbered_on_and_a_bad_one_is_named_by_its_number(tmp_path):
    Run(checkpoint=every(tmp_path)).train(5).end()
    resumed = Run(resume=tmp_path / "00000004")
    assert next(iter(resumed.loader)).number == 4
    resumed.end()
    broken = [*STORED[:5], "no batch", *STORED[6:]]
    resumed = Run(make_loader=lambda: broken, resume=tmp_path / "00000004")
    with pytest.raises(BatchError, match="batch 5 has no ids"):
        resumed.train()
    resumed.end()


def test_a_loader_that_is_too_short_for_the_position_is_refused(tmp_path):
    Run(make_loader=lambda: STORED, checkpoint=every(tmp_path)).train(7).end()
    short = Run(make_loader=lambda: STORED[:3], resume=tmp_path / "00000006")
    with pytest.raises(BatchError, match=r"go on after 6 batches, and the loader gave 3: give the loader that was"):
        short.train()
    short.end()


def test_a_run_may_change_its_loader_as_long_as_the_batches_are_the_same(tmp_path):
    expected = undisturbed()
    for number, make in enumerate([lambda: STORED, loader] * 3):
        run = Run(make_loader=make, checkpoint=every(tmp_path), resume="auto")
        assert run.loop.done == number
        found = run.train(2 if number < 5 else None).end()
    assert_same_end(expected, found)


def test_a_loader_that_knows_positions_is_not_read_from_the_beginning(monkeypatch, tmp_path):
    Run(checkpoint=every(tmp_path)).train(6).end()
    starts = []
    reads = type(DATA).batches

    def batches(self, *args, **options):
        starts.append(options.get("start"))
        return reads(self, *args, **options)

    monkeypatch.setattr(type(DATA), "batches", batches)
    Run(make_loader=lambda: Loader(DATA, BATCH, epochs=EPOCHS, seed=1), resume=tmp_path / "00000005").train().end()
    assert [start for start in starts if start is not None] == [0, 5]  # a look at what batches are like, and the run


def test_time_in_which_training_waited_for_the_loader_is_counted(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Slow:
        def __iter__(self):
            for batch in STORED[:4]:
                clock[0] += 1.0
                yield batch

    run = Run(make_loader=Slow, driver=explorer(0, eagerness=0.0)).train()
    stats = run.loader.stats()
    assert stats["data_wait_seconds"] == stats["stall_seconds"] > 0
    run.end()
    ready = Run(make_loader=lambda: STORED, driver=explorer(0, eagerness=0.0))
    assert sum(1 for _ in islice(ready.loader, 3)) == 3
    assert ready.loader.stats()["data_wait_seconds"] == 0
    ready.end()
