"""XXH64 by its published values, and the kernel against its twin."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.kernels import xxh64 as kernels
from bagpipe.kernels.xxh64 import Xxh64, xxh64
from definitions.xxh64 import define_mix_stripes


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "ef46db3751d8e999"),
        (b"a", "d24ec4f1a98c6e5b"),
        (b"abc", "44bc2cf5ad770999"),
        (b"Nobody inspects the spammish repetition", "fbcea83c8a378bf1"),
    ],
)
def test_published_values_are_met(data, expected):
    assert xxh64(data) == expected


def test_the_kernel_equals_its_twin():
    random = np.random.default_rng(0)
    for stripes in (0, 1, 2, 7, 64):
        words = random.integers(0, 2**64, 4 * stripes, np.uint64, endpoint=False)
        lanes = random.integers(0, 2**64, 4, np.uint64, endpoint=False)
        expected = lanes.copy()
        kernels._mix_stripes(lanes, words)
        define_mix_stripes(expected, words)
        assert lanes.tolist() == expected.tolist()


def test_pieces_of_any_length_and_place_give_the_sum_of_the_whole():
    random = np.random.default_rng(1)
    data = random.bytes(500)
    for length in range(0, 500, 7):
        cuts = sorted(random.integers(0, length + 1, 4).tolist())
        total = Xxh64()
        for start, stop in zip([0, *cuts], [*cuts, length], strict=True):
            total.update(memoryview(data)[start:stop])
        assert total.hexdigest() == xxh64(data[:length]) == xxh64(memoryview(b"x" + data)[1 : length + 1])
    assert len({xxh64(data[:length]) for length in range(500)}) == 500
