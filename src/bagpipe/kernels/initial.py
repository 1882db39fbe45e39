"""Counter-based initial values: every element is a hash of (key, id, column), whoever asks and in whatever order (I1).

A 64-bit word is the splitmix64 output function of a state that the key, the id and the column determine; everything is
integer arithmetic until one last float32 multiplication, so any processor gives the same bits.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bagpipe.kernels import kernel

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# The increment and the output function of splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
# generators, OOPSLA 2014, with Stafford's thirteenth variant of the constants).
GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S40 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(40)
_S16, _S32, _S48, _LOW16 = np.uint64(16), np.uint64(32), np.uint64(48), np.uint64(0xFFFF)
_ONE, _THREE = np.uint64(1), np.uint64(3)

_UNIFORM_CENTRE = 2**23
_NORMAL_CENTRE = 12 * (2**16 - 1)
UNIFORM_UNIT = 2.0**-23
"""What the integers of `fill_uniform` are multiplied with to lie in [-1, 1)."""
NORMAL_UNIT = 2.0**-17
"""What the integers of `fill_normal` are multiplied with to have a variance of 1."""


@kernel
def _mix(word: np.uint64) -> np.uint64:
    word = (word ^ (word >> _S30)) * _FIRST
    word = (word ^ (word >> _S27)) * _SECOND
    return word ^ (word >> _S31)


@kernel
def fill_uniform(key: np.uint64, ids: Ids, column: int, unit: np.float32, out: Floats) -> None:
    """out[i, c] = (top 24 bits of word(key, ids[i], column + c) - 2**23) * unit. Cost: one hash an element."""
    for i in range(ids.shape[0]):
        state = _mix(key ^ _mix(np.uint64(ids[i]) + GAMMA)) + GAMMA * np.uint64(column)
        for c in range(out.shape[1]):
            word = _mix(state + GAMMA * (np.uint64(c) + _ONE))
            out[i, c] = np.float32(np.int32(word >> _S40) - np.int32(_UNIFORM_CENTRE)) * unit


@kernel
def fill_normal(key: np.uint64, ids: Ids, column: int, unit: np.float32, out: Floats) -> None:
    """out[i, c] = (twice the sum of twelve 16-bit integers, less its mean) * unit. Cost: three hashes an element.

    The sum of twelve uniform numbers is close to normal; it ends at six standard deviations.
    """
    for i in range(ids.shape[0]):
        state = _mix(key ^ _mix(np.uint64(ids[i]) + GAMMA)) + GAMMA * (_THREE * np.uint64(column))
        for c in range(out.shape[1]):
            total = np.uint64(0)
            for j in range(3):
                word = _mix(state + GAMMA * (_THREE * np.uint64(c) + np.uint64(j) + _ONE))
                total += (word & _LOW16) + ((word >> _S16) & _LOW16) + ((word >> _S32) & _LOW16) + (word >> _S48)
            out[i, c] = np.float32(np.int32(total + total) - np.int32(_NORMAL_CENTRE)) * unit


def mix_numpy(words: Words) -> Words:
    """The output function of splitmix64."""
    words = (words ^ (words >> _S30)) * _FIRST
    words = (words ^ (words >> _S27)) * _SECOND
    return words ^ (words >> _S31)


def words_numpy(key: np.uint64, ids: Ids, first: int, count: int) -> Words:
    """Words first to first + count of the row of each id, (ids, count)."""
    state = mix_numpy(key ^ mix_numpy(ids.astype(np.uint64) + GAMMA))
    return mix_numpy(state[:, None] + GAMMA * np.arange(first + 1, first + count + 1, dtype=np.uint64))


def fill_uniform_numpy(key: np.uint64, ids: Ids, column: int, unit: np.float32, out: Floats) -> None:
    """The definition of `fill_uniform`."""
    words = words_numpy(key, ids, column, out.shape[1])
    out[:] = ((words >> _S40).astype(np.int32) - np.int32(_UNIFORM_CENTRE)).astype(np.float32) * unit


def fill_normal_numpy(key: np.uint64, ids: Ids, column: int, unit: np.float32, out: Floats) -> None:
    """The definition of `fill_normal`."""
    words = words_numpy(key, ids, 3 * column, 3 * out.shape[1])
    quarters = [(words >> np.uint64(shift)) & _LOW16 for shift in (0, 16, 32, 48)]
    total = np.sum(quarters, axis=0).reshape(len(ids), out.shape[1], 3).sum(axis=2)
    out[:] = ((total + total).astype(np.int32) - np.int32(_NORMAL_CENTRE)).astype(np.float32) * unit
