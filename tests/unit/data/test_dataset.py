import random
import threading
import time

import numpy as np
import pytest
import torch

from bagpipe.data import Dataset, IndexedDataset, Shards, generated, write
from bagpipe.data.ordered import ordered_map
from bagpipe.data.samples import Column, Samples
from bagpipe.errors import ConfigError, PipelineError, ShardError
from bagpipe.types import Table
from harness.wire import until

SAMPLES = 5000


def flatten(batch):
    tensors = [batch.dense, batch.labels]
    for ids in batch.sparse.values():
        tensors += [part for part in (ids.values, ids.offsets, ids.weights) if part is not None]
    return (batch.number, list(batch.sparse), [(tensor.dtype, tensor.shape, tensor.tolist()) for tensor in tensors])


def read(dataset, *args, **kwargs):
    return [flatten(batch) for batch in dataset.batches(*args, **kwargs)]


def reader_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("bagpipe-reader")]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tiny"
    write(generated("tiny", SAMPLES), path, shard_samples=1300)
    return path


@pytest.fixture(params=["generated", "shards", "part"])
def dataset(request, stored):
    if request.param == "shards":
        return Shards(stored)
    return generated("tiny", SAMPLES) if request.param == "generated" else Shards(stored).part(700, 4000)


def test_it_is_a_dataset(dataset):
    assert isinstance(dataset, Dataset)
    assert dataset.num_dense == 4
    assert [table.name for table in dataset.tables] == ["user", "item", "city", "device"]


def test_features_have_the_shapes_and_types_that_the_layers_take(dataset):
    batch = next(iter(dataset.batches(256)))
    assert list(batch.sparse) == ["user", "item", "recent", "city", "device"]
    assert (batch.dense.dtype, batch.dense.shape) == (torch.float32, (256, 4))
    assert (batch.labels.dtype, batch.labels.shape) == (torch.float32, (256,))
    for name, ids in batch.sparse.items():
        assert ids.values.dtype == torch.int64
        assert ids.values.is_contiguous()
        if name == "recent":
            assert len(ids.offsets) == 256
            assert ids.weights.dtype == torch.float32
            assert int(ids.lengths().min()) == 0
        else:
            assert ids.values.shape == (256, 1)
            assert ids.offsets is None


def test_numeric_features_are_aligned_as_torch_aligns_them(dataset):
    assert all(batch.dense.data_ptr() % 64 == 0 for batch in dataset.batches(77))


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("batch_size", [64, 999, 40_000])
def test_batches_are_the_same_for_any_number_of_workers(dataset, batch_size, seed):
    one = read(dataset, batch_size, epochs=2, seed=seed)
    assert read(dataset, batch_size, epochs=2, seed=seed, workers=2) == one
    assert read(dataset, batch_size, epochs=2, seed=seed, workers=4) == one


@pytest.mark.parametrize("seed", [None, 3])
def test_batches_are_numbered_over_epochs_and_the_short_ones_are_kept(dataset, seed):
    batches = list(dataset.batches(512, epochs=2, seed=seed))
    each = -(-dataset.num_samples // 512)
    assert [batch.number for batch in batches] == list(range(2 * each))
    short = dataset.num_samples % 512
    assert [len(batch) for batch in batches] == 2 * ([512] * (each - 1) + [short])


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("start", [0, 1, 9, 10, 17, 20, 100])
def test_a_resumed_run_gives_what_an_undisturbed_one_would_have(dataset, start, seed):
    whole = read(dataset, 512, epochs=2, seed=seed)
    assert read(dataset, 512, epochs=2, seed=seed, start=start, workers=2) == whole[start:]


def test_an_epoch_has_the_same_samples_in_another_order(dataset):
    first, second = (
        torch.cat(
            [batch.dense[:, 0] for batch in dataset.batches(512, seed=1, epochs=2) if batch.number // each == epoch]
        )
        for each in [-(-dataset.num_samples // 512)]
        for epoch in range(2)
    )
    assert not torch.equal(first, second)
    assert torch.equal(first.sort().values, second.sort().values)


def test_a_part_has_the_samples_of_its_range(dataset):
    whole = list(dataset.batches(1000))[1]
    inner = dataset.part(500, 2500).part(500, 1500)
    assert inner.num_samples == 1000
    (batch,) = inner.batches(1000)
    assert flatten(batch)[1:] == flatten(whole)[1:]


def test_an_empty_part_has_no_batches(dataset):
    assert read(dataset.part(10, 10), 5, epochs=3) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (6, 5), (0, SAMPLES + 1)])
def test_a_part_outside_of_the_data_is_refused(dataset, start, stop):
    with pytest.raises(ConfigError, match=f"part {start} to {stop}"):
        dataset.part(start, stop)


@pytest.mark.parametrize("wrong", [{"epochs": -1}, {"start": -1}, {"workers": 0}])
def test_wrong_arguments_are_refused_at_once_and_by_name(dataset, wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} is"):
        dataset.batches(10, **wrong)


def test_reading_leaves_the_global_generators_alone(dataset):
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    read(dataset, 512, seed=4, workers=2)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())  # noqa: NPY002


def test_closing_the_iterator_early_leaves_no_thread(dataset):
    batches = dataset.batches(8, epochs=50, workers=4)
    next(batches)
    assert reader_threads()
    batches.close()
    assert not reader_threads()


def test_reading_to_the_end_leaves_no_thread(dataset):
    read(dataset, 512, workers=2)
    assert not reader_threads()


class Watched(IndexedDataset):
    """Counts reads; fails at a given sample."""

    tables, num_dense, num_samples = (Table("a", 10),), 1, 1_000_000

    def __init__(self, fails_at=None, error=None):
        self.reads, self.fails_at, self.error = [], fails_at, error

    def gather(self, samples):
        self.reads.append(samples)
        if self.fails_at is not None and self.fails_at in samples:
            raise self.error
        ids = np.zeros((len(samples), 1), dtype=np.int64)
        return Samples(ids.astype(np.float32), {"a": Column(ids)}, np.zeros(len(samples), dtype=np.float32))


def test_readers_wait_for_a_slow_consumer():
    watched = Watched()
    batches = watched.batches(50_000, workers=2)
    for taken in range(10):
        next(batches)
        until(lambda taken=taken: len(watched.reads) >= taken + 2 * 2)
        assert len(watched.reads) == taken + 2 * 2
    batches.close()


@pytest.mark.parametrize("workers", [1, 4])
def test_an_error_of_a_worker_surfaces_in_its_place_with_its_cause(workers):
    cause = ZeroDivisionError("boom")
    batches = Watched(500_000, cause).batches(50_000, workers=workers)
    for number in range(10):
        assert next(batches).number == number
    with pytest.raises(PipelineError, match=r"reader thread failed: ZeroDivisionError: boom") as caught:
        next(batches)
    assert caught.value.__cause__ is cause
    assert not reader_threads()


def test_a_typed_error_of_a_worker_surfaces_as_it_is():
    error = ShardError("shard 3 is corrupt")
    with pytest.raises(ShardError) as caught:
        list(Watched(0, error).batches(50_000, workers=2))
    assert caught.value is error


def test_ordered_results_come_in_order_whoever_finishes_first():
    def work(item):
        time.sleep(0.01 * (item % 3))
        return item

    assert list(ordered_map(work, range(20), 4, "reader")) == list(range(20))
