"""Counter-based random numbers: a hash of (key, counter), so any sample can be drawn alone, on any thread.

Integers only, no math library and no generator state, so the same seed gives the same data on every machine (I1).
"""

from __future__ import annotations

import hashlib
from math import isqrt

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import kernel
from bagpipe.kernels.random import GOLDEN, mix

UInts = NDArray[np.uint64]

LANE = np.uint64(0xD1342543DE82EF95)
"""Distance between neighbouring streams of one key: far from every small multiple of GOLDEN."""
LOW = np.uint64(0xFFFFFFFF)
ONE, R32 = np.uint64(1), np.uint64(32)
FEISTEL_ROUNDS = 2


def derive_key(*parts: object) -> np.uint64:
    """The 64-bit key of a stream, from what names it."""
    text = "\x1f".join(str(part) for part in parts)
    return np.uint64(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))


@kernel
def below(word: np.uint64, limit: np.uint64) -> np.uint64:
    """A number in [0, limit) from the upper half of a random word; the limit is at most 2^32."""
    return ((word >> R32) * limit) >> R32


@kernel
def permute(rank: np.uint64, rows: np.uint64, side: np.uint64, key: np.uint64) -> np.uint64:
    """Where a keyed bijection of [0, rows) takes a rank; `side` is `feistel_side(rows)`.

    A Feistel network on the digits of the rank in base `side`. Its domain exceeds `rows` by less than `side`, so
    walking the cycle until it falls in range almost never takes a second turn.
    """
    lefts = (rows + side - ONE) // side
    while True:
        left = rank // side
        right = rank - left * side
        turn = key
        for _ in range(FEISTEL_ROUNDS):
            left += below(mix(turn + right * GOLDEN), lefts)
            if left >= lefts:
                left -= lefts
            turn += LANE
            right += below(mix(turn + left * GOLDEN), side)
            if right >= side:
                right -= side
            turn += LANE
        rank = left * side + right
        if rank < rows:
            return rank


@kernel
def shuffle(words: NDArray[np.int64], key: np.uint64) -> None:
    """Put the elements in a random order, in place (Fisher and Yates); up to 2^32 of them, about 3 ns each."""
    for last in range(len(words) - 1, 0, -1):
        other = np.int64(below(mix(key + np.uint64(last) * GOLDEN), np.uint64(last + 1)))
        words[last], words[other] = words[other], words[last]


def feistel_side(rows: int) -> np.uint64:
    """The base in which `permute` splits a rank: the square root of the rows, rounded up."""
    return np.uint64(isqrt(rows - 1) + 1)


def below_reference(words: UInts, limits: UInts | np.uint64) -> UInts:
    """`below` for arrays, in NumPy."""
    return ((words >> R32) * limits) >> R32
