"""SplitMix64: the hash behind first values, generated data, hashed categories and the division over servers.

All of them are for ever, so it may never change. Steele, Lea, Flood: Fast splittable pseudorandom number generators
(OOPSLA 2014), with Stafford's thirteenth variant of the constants. Integers only: the same bits everywhere (I1).
"""

from __future__ import annotations

import numpy as np

from bagpipe.arrays import UInt64s
from bagpipe.kernels import kernel

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The increment: the n-th word of a stream is mix(key + n * GOLDEN). Odd, so that this is a bijection of n."""
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31 = np.uint64(27), np.uint64(30), np.uint64(31)


@kernel
def mix(word: np.uint64) -> np.uint64:
    """A bijection of 64 bits in which each bit depends on all: the output function."""
    word = (word ^ (word >> _S30)) * _FIRST
    word = (word ^ (word >> _S27)) * _SECOND
    return word ^ (word >> _S31)


def mix_numpy(words: UInt64s) -> UInt64s:
    """The definition of `mix`."""
    words = (words ^ (words >> _S30)) * _FIRST
    words = (words ^ (words >> _S27)) * _SECOND
    return words ^ (words >> _S31)
