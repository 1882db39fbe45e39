"""A loader is a data set in batches with a position that can be saved, and that nothing else can load."""

from __future__ import annotations

import json

import pytest

from bagpipe.data import Shards, generated, write
from bagpipe.data.loader import Loader
from bagpipe.errors import ConfigError
from bagpipe.types import Table

SAMPLES = 1000


def flatten(batch):
    tensors = [batch.dense, batch.labels]
    for ids in batch.sparse.values():
        tensors += [part for part in (ids.values, ids.offsets, ids.weights) if part is not None]
    return batch.number, [tensor.numpy().tobytes() for tensor in tensors]


def read(batches):
    return [flatten(batch) for batch in batches]


@pytest.fixture(scope="module")
def data():
    return generated("tiny", SAMPLES)


def loader(data, **options):
    return Loader(data, 96, **({"epochs": 3, "seed": 4} | options))


@pytest.mark.parametrize("seed", [None, 4])
def test_it_gives_the_batches_of_its_data_set_each_time_it_is_asked(data, seed):
    found = loader(data, seed=seed)
    assert len(found) == 33
    for _ in range(2):
        assert read(found) == read(data.batches(96, epochs=3, seed=seed))
    assert read(loader(data, seed=seed, start=30)) == read(data.batches(96, epochs=3, seed=seed, start=30))
    assert read(loader(data, seed=seed, workers=2)) == read(found)


def test_a_position_can_be_saved_after_any_batch_and_gives_those_that_follow(data):
    whole = read(loader(data))
    running = loader(data)
    batches = iter(running)
    for number in range(len(whole) + 1):
        state = json.loads(json.dumps(running.state_dict()))
        assert (state["iteration"], state["epoch"], state["batch"]) == (number, number // 11, number % 11)
        assert state == running.state_dict(number)
        resumed = loader(data)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert read(resumed) == whole[number:]
        next(batches, None)


def test_positions_count_on_from_where_a_loader_was_resumed(data):
    resumed = loader(data)
    resumed.load_state_dict(loader(data).state_dict(12))
    batches = iter(resumed)
    next(batches)
    assert resumed.state_dict()["iteration"] == 13
    assert resumed.state_dict(3)["iteration"] == 15
    batches.close()


def test_a_position_of_other_data_or_another_order_is_refused_with_both_values(data):
    state = loader(data).state_dict(5)
    other = generated("tiny", SAMPLES, seed=9)
    for here, text in (
        (loader(data, seed=None), r"seed 4, this loader has None"),
        (loader(data, seed=5), r"seed 4, this loader has 5"),
        (Loader(data, 50, seed=4), r"batch size 96, this loader has 50"),
        (loader(other), rf"fingerprint '{state['data']}', this loader has '{loader(other).state_dict()['data']}'"),
        (loader(data.part(0, SAMPLES)), r"data of fingerprint"),
    ):
        with pytest.raises(ConfigError, match=text):
            here.load_state_dict(state)
        assert here.state_dict()["iteration"] == 0
    for damaged in ({"iteration": -1}, {"iteration": "5"}, {"iteration": None}):
        with pytest.raises(ConfigError, match="it is damaged"):
            loader(data).load_state_dict(state | damaged)
    with pytest.raises(ConfigError, match="fingerprint None"):
        loader(data).load_state_dict({"iteration": 3})


def test_a_run_may_be_made_longer_and_its_data_moved(data, tmp_path):
    write(data, tmp_path / "here")
    state = loader(Shards(tmp_path / "here")).state_dict(20)
    (tmp_path / "here").rename(tmp_path / "there")
    longer = loader(Shards(tmp_path / "there"), epochs=5)
    longer.load_state_dict(state)
    assert read(longer) == read(data.batches(96, epochs=5, seed=4))[20:]


def test_a_peek_is_the_next_batch_and_moves_nothing(data):
    found = loader(data, start=7)
    assert flatten(found.peek()) == read(loader(data))[7]
    assert found.state_dict()["iteration"] == 7
    assert loader(data, start=99).peek().number == 32  # at the end: any batch shows what they are like
    assert loader(data.part(3, 3)).peek() is None


@pytest.mark.parametrize(
    "wrong", [{"epochs": -1}, {"start": -1}, {"workers": 0}, {"processes": -1}, {"deadline_s": 0.0}]
)
def test_wrong_arguments_are_refused_at_once_and_by_name(data, wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        Loader(data, 10, **wrong)
    with pytest.raises(ConfigError, match="batch_size is 0"):
        Loader(data, 0)


def test_data_in_memory_is_refused_only_where_other_processes_would_read_it():
    class InMemory:
        tables, num_dense, num_samples = (Table("t", 3),), 0, 5

        def batches(self, *_, **__):
            return iter([])

        def part(self, *_):
            raise AssertionError

    assert list(Loader(InMemory(), 2)) == []
    assert Loader(InMemory(), 2).state_dict(1)["data"]
    with pytest.raises(ConfigError, match="InMemory is in the memory of this process"):
        Loader(InMemory(), 2, processes=1)


def test_a_frame_is_told_how_to_become_a_data_set():
    with pytest.raises(ConfigError, match=r"is a dict: give .*from_frame"):
        Loader({"a": [1]}, 2)
