import numpy as np
import pytest

from bagpipe.data.order import BLOCK_SAMPLES, WINDOW_BLOCKS, BatchOrder
from bagpipe.errors import ConfigError

WINDOW = BLOCK_SAMPLES * WINDOW_BLOCKS


def epoch(order, number=0):
    first = number * order.epoch_batches
    return [order.samples(first + place) for place in range(order.epoch_batches)]


@pytest.mark.parametrize("seed", [None, 0, 7])
@pytest.mark.parametrize(("num_samples", "batch_size"), [(1, 1), (10, 3), (1024, 1024), (1025, 64), (100_001, 5000)])
def test_every_sample_comes_once_an_epoch_and_only_the_last_batch_is_short(num_samples, batch_size, seed):
    order = BatchOrder(num_samples, batch_size, seed)
    for number in range(2):
        batches = epoch(order, number)
        assert all(len(batch) == batch_size for batch in batches[:-1])
        assert sorted(np.concatenate(batches).tolist()) == list(range(num_samples))


def test_without_a_seed_samples_keep_their_order():
    assert np.concatenate(epoch(BatchOrder(1000, 96))).tolist() == list(range(1000))


def test_each_epoch_and_each_seed_has_another_order():
    orders = [np.concatenate(epoch(BatchOrder(5000, 100, seed), number)) for seed in (1, 2) for number in range(3)]
    for place, one in enumerate(orders):
        assert all((one != other).mean() > 0.9 for other in orders[:place])


def test_the_order_of_samples_does_not_depend_on_the_batch_size():
    whole = np.concatenate(epoch(BatchOrder(70_000, 70_000, 3), 1))
    assert (np.concatenate(epoch(BatchOrder(70_000, 333, 3), 1)) == whole).all()


def test_a_batch_needs_none_before_it():
    order = BatchOrder(70_000, 512, 3)
    late = BatchOrder(70_000, 512, 3).samples(200)
    for number in range(200):
        order.samples(number)
    assert (order.samples(200) == late).all()


def test_a_window_mixes_samples_from_all_over_the_data():
    samples = BatchOrder(50 * WINDOW, WINDOW, 5).samples(7)
    blocks = np.unique(samples // BLOCK_SAMPLES)
    assert len(blocks) == WINDOW_BLOCKS
    assert np.ptp(blocks) > 25 * WINDOW_BLOCKS
    halves = np.unique(samples[: WINDOW // 2] // BLOCK_SAMPLES, return_counts=True)[1]
    assert halves.min() > 0.4 * BLOCK_SAMPLES


def test_a_batch_size_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="batch_size is 0"):
        BatchOrder(10, 0)
