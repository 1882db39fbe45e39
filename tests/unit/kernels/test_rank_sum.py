import numpy as np
import pytest
import torch

from bagpipe.kernels.rank_sum import sum_parts
from definitions.rank_sum import define_sum_parts

SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3.4e38, -3.4e38, 1.0, np.nan], np.float32)


@pytest.mark.parametrize("total", [None, 1.0, 3.0, 16384.0, 0.0])
@pytest.mark.parametrize(("ranks", "length"), [(1, 1), (2, 0), (3, 17), (4, 2048), (2, 5000)])
def test_the_kernel_and_its_twin_give_the_same_bits(ranks, length, total):
    drawn = np.random.default_rng(ranks * length)
    parts = drawn.standard_normal((ranks, length)).astype(np.float32)
    special = drawn.random(parts.shape) < 0.2
    parts[special] = drawn.choice(SPECIAL, special.sum())
    found, expected = torch.full((length,), 9.0), np.full(length, 9.0, np.float32)
    sum_parts(torch.from_numpy(parts), found, total)
    define_sum_parts(parts, expected, total)
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found.numpy()), nan)
    np.testing.assert_array_equal(found.numpy().view(np.int32)[~nan], expected.view(np.int32)[~nan])


def test_the_kernel_gives_the_bits_of_the_operations_of_torch():
    parts = torch.randn(3, 100)
    found = torch.empty(100)
    sum_parts(parts, found, 7.0)
    expected = torch.zeros(100)
    for part in parts:
        expected += part
    assert torch.equal(found, expected / 7.0)
