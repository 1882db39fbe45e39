"""Two hashes of each text of an Arrow array, straight from its buffers: the same on every machine and for ever.

They decide which row a category has where categories are hashed, so the definition may never change:

    words  = the bytes, 8 at a time as little-endian numbers, the last ones filled up with zeros
    key    = length * GOLDEN, then for each word: key = mix(key ^ word)
    check  = length * LANE,   then for each word: check = mix(check + word); of it the upper 32 bits

with `mix` and GOLDEN of SplitMix64 and LANE of `bagpipe.data.counter`, all modulo 2^64. Two texts of the same length of
up to 8 bytes never have the same key; two others do with probability 2^-64, and also the same check with 2^-96.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bagpipe.data.counter import LANE, R32
from bagpipe.kernels import kernel
from bagpipe.kernels.random import GOLDEN, mix

Bytes = NDArray[np.uint8]
Offsets = NDArray[np.int32] | NDArray[np.int64]
Keys = NDArray[np.uint64]
Checks = NDArray[np.uint32]

_WORD = 8
_EIGHT = np.uint64(8)
_ZERO = np.uint64(0)
_WIDE = (pa.large_string(), pa.large_binary())
_NARROW = (pa.string(), pa.binary())


@kernel
def _hash(offsets: Offsets, data: Bytes, keys: Keys, checks: Checks) -> None:
    """About 8 ns for a text of 8 bytes."""
    for i in range(len(keys)):
        position, end = np.int64(offsets[i]), np.int64(offsets[i + 1])
        length = np.uint64(end - position)
        key, check = length * GOLDEN, length * LANE
        while position < end:
            word = _ZERO
            if position + _WORD <= end:
                for j in range(_WORD):
                    word |= np.uint64(data[position + j]) << (np.uint64(j) * _EIGHT)
            else:
                for j in range(end - position):
                    word |= np.uint64(data[position + j]) << (np.uint64(j) * _EIGHT)
            position += _WORD
            key = mix(key ^ word)
            check = mix(check + word)
        keys[i] = key
        checks[i] = check >> R32


def hash_buffers(offsets: Offsets, data: Bytes) -> tuple[Keys, Checks]:
    """The key and the check of each text data[offsets[i]:offsets[i + 1]]; those of an empty one are 0."""
    keys, checks = np.empty(len(offsets) - 1, np.uint64), np.empty(len(offsets) - 1, np.uint32)
    _hash(_frozen(offsets), _frozen(data), keys, checks)
    return keys, checks


def hash_texts(array: pa.Array) -> tuple[Keys, Checks]:
    """The key and the check of each text (string or binary, of either offset size); 0 where it is null."""
    keys, checks = hash_buffers(*text_buffers(array))
    if array.null_count:  # Arrow lets a null have bytes
        nulls = array.is_null().to_numpy(zero_copy_only=False)
        keys[nulls] = 0
        checks[nulls] = 0
    return keys, checks


def text_buffers(array: pa.Array) -> tuple[Offsets, Bytes]:
    """The offsets (one more than there are texts) and the bytes of an array of texts; views, not to be written."""
    if array.type not in _NARROW + _WIDE:
        raise TypeError(f"an array of {array.type} has no texts")
    size: type[np.int64] | type[np.int32] = np.int64 if array.type in _WIDE else np.int32
    _, offsets_buffer, data_buffer = array.buffers()
    if offsets_buffer is None or offsets_buffer.size == 0:  # Arrow lets an empty array go without
        return _frozen(np.zeros(1, size)), _frozen(np.empty(0, np.uint8))
    offsets = np.frombuffer(offsets_buffer, size)[array.offset : array.offset + len(array) + 1]
    data = np.empty(0, np.uint8) if data_buffer is None else np.frombuffer(data_buffer, np.uint8)
    return _frozen(offsets), _frozen(data)


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    """Never written, so that one compiled kernel serves both arrays of Arrow's and of ours."""
    view = array.view()
    view.flags.writeable = False
    return view
