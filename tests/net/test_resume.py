"""Training stopped after any iteration goes on elsewhere with the next batch, and ends with the same bits (I2, I4)."""

from __future__ import annotations

import io
import json
import time
from itertools import islice

import pytest
import torch
from torch.utils.data import DataLoader

import bagpipe
from bagpipe.data import Loader, generated
from bagpipe.errors import BatchError, ConfigError, ModelError
from harness.explorer import explorer
from harness.plain import loss_of, make_batches, make_net, nothing_left, sgd  # noqa: F401
from harness.resumed import BATCH, EPOCHS, SAMPLES, Session, assert_same_end

pytestmark = pytest.mark.usefixtures("nothing_left")

DATA = generated("tiny", SAMPLES)
STORED = list(DATA.batches(BATCH, epochs=EPOCHS, seed=1))


def shuffling():
    """A torch DataLoader over ready batches, in another order each epoch, fixed by a generator of its own."""
    generator = torch.Generator()
    generator.manual_seed(11)
    return DataLoader(STORED[:3], batch_size=None, shuffle=True, generator=generator)


LOADERS = {
    "loader": (lambda: Loader(DATA, BATCH, epochs=EPOCHS, seed=1), {}),
    "loader, read several times": (lambda: Loader(DATA, BATCH, seed=1), {"epochs": EPOCHS}),
    "loader on threads": (lambda: Loader(DATA, BATCH, epochs=EPOCHS, seed=1, workers=2), {"accumulate": 2}),
    "list": (lambda: STORED, {}),
    "list, read several times": (lambda: STORED[:3], {"epochs": EPOCHS, "accumulate": 4}),
    "generator": (lambda: iter(STORED), {}),
    "torch DataLoader": (lambda: DataLoader(STORED, batch_size=None), {}),
    "torch DataLoader that shuffles": (shuffling, {"epochs": EPOCHS}),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_stopped_after_any_iteration_ends_with_the_same_bits(kind):
    make, options = LOADERS[kind]
    undisturbed = Session(make(), **options)
    saved = undisturbed.train()
    expected = undisturbed.end()
    assert len(saved) == -(-9 // options.get("accumulate", 1))
    for number, state in enumerate(saved, start=1):
        resumed = Session(make(), state, **options)
        left = resumed.train()
        assert len(left) == len(saved) - number
        assert_same_end(expected, resumed.end())


@pytest.mark.parametrize("kind", ["loader", "loader, read several times", "list"])
def test_a_run_stopped_after_every_iteration_ends_with_the_same_bits(kind):
    make, options = LOADERS[kind]
    undisturbed = Session(make(), **options)
    undisturbed.train()
    expected = undisturbed.end()
    state = None
    for number in range(1, 10):
        session = Session(make(), state, **options)
        (state,) = session.train(1)
        position = torch.load(io.BytesIO(state), weights_only=True)["rows"]["data"]
        assert (position["iterations"], position["batches"]) == (number, number)
        found = session.end()
    assert_same_end(expected, found)
    assert Session(make(), state, **options).train() == []


def test_the_position_is_what_was_trained_not_what_was_read_ahead():
    session = Session(Loader(DATA, BATCH, epochs=EPOCHS, seed=1), lookahead=8)
    data = session.loop.state_dict()["data"]
    assert (data["iterations"], data["batches"], data["loader"]["iteration"]) == (0, 0, 0)
    batches = iter(session.loop)

    def position():
        data = session.loop.state_dict()["data"]
        json.dumps(data)  # plain values
        assert data["loader"]["iteration"] == data["batches"] == data["iterations"]
        return data["batches"]

    batch = next(batches)
    assert batch.number == 0
    assert position() == 0  # in hand, but no step yet
    loss = session.model(batch.dense, batch.sparse).sum()
    loss.backward()
    assert position() == 0
    session.rows.step()
    assert position() == 1
    next(batches)
    assert position() == 1
    next(batches)  # the loop went on without a step
    assert position() == 2
    session.rows.step()  # there was nothing to do
    assert position() == 3
    next(batches)
    session.loop.close()
    assert position() == 3  # stopped before its step: it will be the first one
    session.loop.store.close()


def test_an_unfinished_iteration_of_several_batches_is_begun_again():
    options = {"accumulate": 4}
    undisturbed = Session(STORED, **options)
    undisturbed.train()
    expected = undisturbed.end()
    first = Session(STORED, **options)
    first.train(6)  # one iteration and a half
    first.dense.zero_grad()
    saved = first.save()
    first.end()
    resumed = Session(STORED, saved, **options)
    resumed.train()
    assert_same_end(expected, resumed.end())


def test_a_skipped_update_counts_as_trained():
    net, rows = make_net(), bagpipe.optim.SGD(0.1)
    loop = bagpipe.accelerate(net, make_batches(4), rows, cache=60)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with loop:
        for number, batch in enumerate(loop):
            loss = loss_of(net, batch) * (float("inf") if number == 1 else 1.0)
            scaler.scale(loss).backward()
            rows.step(scaler=scaler)
            scaler.update()
            assert loop.state_dict()["data"]["batches"] == number + 1
            net.zero_grad()


def test_batches_are_numbered_on_and_a_bad_one_is_named_by_its_number():
    session = Session(Loader(DATA, BATCH, epochs=EPOCHS, seed=1))
    state = session.train(4)[-1]
    session.end()
    resumed = Session(Loader(DATA, BATCH, epochs=EPOCHS, seed=1), state)
    assert next(iter(resumed.loop)).number == 4
    resumed.end()
    broken = [*STORED[:5], "no batch", *STORED[6:]]
    resumed = Session(broken, state)
    with pytest.raises(BatchError, match="batch 5 has no ids"):
        resumed.train()
    resumed.end()


def test_a_position_in_other_data_is_refused_before_anything_changes():
    session = Session(Loader(DATA, BATCH, epochs=EPOCHS, seed=1))
    saved = session.train(3)[-1]
    session.end()
    state = torch.load(io.BytesIO(saved), weights_only=True)["rows"]
    other = Session(Loader(DATA, BATCH, epochs=EPOCHS, seed=2))
    with pytest.raises(ConfigError, match="seed 1, this loader has 2"):
        other.loop.load_state_dict(state)
    assert other.rows.updates == 0
    assert other.loop.store.num_rows(0) == 0
    with pytest.raises(ModelError, match=r"'three' batches into the data"):
        other.loop.load_state_dict(state | {"data": {"batches": "three"}})
    assert len(other.train()) == 9
    other.end()


def test_a_loader_that_is_too_short_for_the_position_is_refused():
    session = Session(STORED)
    state = session.train(6)[-1]
    session.end()
    short = Session(STORED[6:], state)
    with pytest.raises(BatchError, match=r"go on after 6 batches, and the loader gave 3.*leave 'data' out"):
        short.train()
    short.end()


def test_without_a_position_the_loop_begins_with_the_first_batch_it_is_given():
    undisturbed = Session(STORED)
    undisturbed.train()
    expected = undisturbed.end()
    first = Session(STORED)
    saved = torch.load(io.BytesIO(first.train(6)[-1]), weights_only=True)
    first.end()
    del saved["rows"]["data"]
    file = io.BytesIO()
    torch.save(saved, file)
    rest = Session(STORED[6:], file.getvalue())
    rest.train()
    assert_same_end(expected, rest.end())


def test_a_run_may_change_its_loader_as_long_as_the_batches_are_the_same():
    undisturbed = Session(STORED)
    undisturbed.train()
    expected = undisturbed.end()
    state = None
    for number, make in enumerate([lambda: STORED, lambda: Loader(DATA, BATCH, epochs=EPOCHS, seed=1)] * 3):
        session = Session(make(), state)
        state = session.train(1 if number < 5 else None)[-1]
        found = session.end()
    assert_same_end(expected, found)


def test_a_loader_that_knows_positions_is_not_read_from_the_beginning(monkeypatch):
    session = Session(Loader(DATA, BATCH, epochs=EPOCHS, seed=1))
    state = session.train(5)[-1]
    session.end()
    starts = []
    reads = type(DATA).batches

    def batches(self, *args, **options):
        starts.append(options.get("start"))
        return reads(self, *args, **options)

    monkeypatch.setattr(type(DATA), "batches", batches)
    resumed = Session(Loader(DATA, BATCH, epochs=EPOCHS, seed=1), state)
    resumed.train()
    resumed.end()
    assert starts == [0, 5]  # a look at what batches are like, and the run


def test_time_in_which_training_waited_for_the_loader_is_counted(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    class Slow:
        def __iter__(self):
            for batch in STORED[:4]:
                clock[0] += 1.0
                yield batch

    session = Session(Slow(), driver=explorer(0, eagerness=0.0))
    session.train()
    stats = session.loop.stats()
    assert stats["data_wait_seconds"] == stats["stall_seconds"] > 0
    session.end()
    prepared = Session(STORED, driver=explorer(0, eagerness=0.0))
    assert sum(1 for _ in islice(prepared.loop, 3)) == 3
    assert prepared.loop.stats()["data_wait_seconds"] == 0
    prepared.end()
