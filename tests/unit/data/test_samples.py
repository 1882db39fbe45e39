"""What a data processor packs from NumPy is, byte by byte, what a batch of the same samples is packed to."""

import numpy as np
import pytest

from bagpipe.data.samples import Column, Samples, SentBatch
from bagpipe.wire.codec import pack, unpack

SIZE = 7


def make_samples(seed=0):
    generator = np.random.default_rng(seed)
    bags = np.concatenate([[0], np.cumsum(generator.integers(0, 4, SIZE))])
    columns = {
        "narrow": Column(generator.integers(-9, 9, (SIZE, 2))),
        "wide": Column(generator.integers(2**40, 2**41, (SIZE, 1))),
        "none": Column(np.empty((SIZE, 0), np.int64)),
        "bags": Column(generator.integers(0, 99, bags[-1]), bags),
        "weighted": Column(generator.integers(-(2**31), 2**31, bags[-1]), bags, generator.random(bags[-1], np.float32)),
    }
    dense = generator.random((SIZE, 3), np.float32)
    dense[0, 0] = -0.0
    return Samples(dense, columns, generator.random(SIZE, np.float32))


@pytest.mark.parametrize(("start", "stop"), [(0, SIZE), (2, 5), (3, 3), (SIZE - 1, SIZE)])
def test_samples_are_packed_to_the_bytes_of_their_batch(start, stop):
    samples = make_samples()
    batch = samples.batch(start, stop, 5)
    body, buffers = pack(SentBatch(5, samples.part(start, stop)))
    expected, others = pack(SentBatch.of(batch))
    assert body == expected
    assert [bytes(buffer) for buffer in buffers] == [bytes(buffer) for buffer in others]
    came = unpack(body, buffers, SentBatch).batch()
    assert came.dense.numpy().tobytes() == samples.dense[start:stop].tobytes()
    assert came.labels.numpy().tobytes() == samples.labels[start:stop].tobytes()
    for name, ids in batch.sparse.items():
        assert came.sparse[name].values.equal(ids.values), name
        assert came.sparse[name].lengths().equal(ids.lengths()), name


def test_a_part_of_a_part_is_the_part():
    samples = make_samples()
    once, twice = samples.part(2, 6), samples.part(1, 7).part(1, 5)
    for name, column in once.columns.items():
        for field in ("values", "offsets", "weights"):
            np.testing.assert_array_equal(getattr(column, field), getattr(twice.columns[name], field))
    np.testing.assert_array_equal(once.dense, twice.dense)
