"""Numbers in few bits against their plain twins: any numbers come back, in as many bits as the largest needs."""

from __future__ import annotations

import numpy as np
import pytest

from bagpipe.kernels import bits
from definitions.bits import define_find_widths, define_pack_bits, define_unpack_bits

TYPES = {np.int32: np.uint64(2**32 - 1), np.int64: np.uint64(2**64 - 1)}


def some_numbers(random, dtype):
    """Segments of numbers of different sizes, some empty, some rising, some at the ends of the type."""
    segments = []
    for _ in range(random.integers(0, 7)):
        count, most = random.integers(0, 40), int(random.choice([1, 2, 3, 255, 4096, np.iinfo(dtype).max]))
        segment = random.integers(0, most, count, dtype=dtype)
        if random.random() < 0.5:
            segment.sort()
        if count and random.random() < 0.2:
            segment[random.integers(count)] = random.choice([np.iinfo(dtype).min, -1, np.iinfo(dtype).max])
        segments.append(segment)
    bounds = np.cumsum([0, *map(len, segments)]).astype(np.int64)
    return np.concatenate([np.empty(0, dtype), *segments]), bounds


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rising", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_numbers_come_back_as_from_the_twins(dtype, rising, seed):
    numbers, bounds = some_numbers(np.random.default_rng(seed), dtype)
    mask, count = TYPES[dtype], len(bounds) - 1
    widths, theirs = np.full((2, count), -1, np.int64)
    bits.find_widths(numbers, bounds, rising, mask, widths)
    define_find_widths(numbers, bounds, rising, mask, theirs)
    assert widths.tolist() == theirs.tolist()
    num_words = -(-int(widths @ np.diff(bounds)) // bits.WORD)
    words, others = np.zeros((2, num_words), np.uint32)
    bits.pack_bits(numbers, bounds, rising, mask, widths, words)
    define_pack_bits(numbers, bounds, rising, mask, widths, others)
    assert words.tolist() == others.tolist()
    for unpack in (bits.unpack_bits, define_unpack_bits):
        found = np.full_like(numbers, 7)
        assert unpack(words, bounds, rising, mask, widths, found) == 0
        assert found.tolist() == numbers.tolist()


@pytest.mark.parametrize("rising", [False, True])
def test_any_bits_and_widths_are_read_alike(rising):
    random = np.random.default_rng(1)
    for dtype, mask in TYPES.items():
        for _ in range(20):
            widths = random.integers(0, mask.item().bit_length() + 1, 4)
            bounds = np.cumsum([0, *random.integers(0, 9, 4)])
            words = random.integers(0, 2**32, -(-int(widths @ np.diff(bounds)) // bits.WORD), dtype=np.uint32)
            ours, theirs = np.zeros((2, bounds[-1]), dtype)
            left = bits.unpack_bits(words, bounds, rising, mask, widths, ours)
            assert left == define_unpack_bits(words, bounds, rising, mask, widths, theirs)
            assert ours.tolist() == theirs.tolist()


def test_a_rising_list_takes_the_bits_of_its_steps():
    numbers, bounds, widths = np.arange(5000, 9000, 3, dtype=np.int32), np.array([0, 1334]), np.zeros(1, np.int64)
    bits.find_widths(numbers, bounds, False, TYPES[np.int32], widths)
    assert widths.tolist() == [14]
    bits.find_widths(numbers[1:] - numbers[0], np.array([0, 1333]), True, TYPES[np.int32], widths)
    assert widths.tolist() == [2]


@pytest.mark.parametrize("seed", range(30))
def test_numbers_outside_are_found(seed):
    random = np.random.default_rng(seed)
    counts = random.integers(0, 12, 4)
    bounds, ends = np.cumsum([0, *counts]), random.integers(0, 2**40, 4)
    numbers = (random.random(bounds[-1]) * np.repeat(ends, counts)).astype(np.int64)
    if seed % 3 and len(numbers):
        numbers[random.integers(len(numbers))] = random.choice([-1, 2**41])
    wrong = [i for i, number in enumerate(numbers.tolist()) if not 0 <= number < np.repeat(ends, counts)[i]]
    assert bits.first_outside(numbers, bounds, ends) == min(wrong, default=-1)
