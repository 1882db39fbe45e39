"""What the kernels of `bagpipe.data.prepare.texts` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from bagpipe.data.counter import LANE, R32
from bagpipe.data.prepare.texts import _WORD, Checks, Keys
from bagpipe.kernels.random import GOLDEN, mix_numpy


def define_hash_texts(texts: Iterable[bytes | None]) -> tuple[Keys, Checks]:
    """`hash_texts` in NumPy, text by text."""
    keys, checks = [], []
    for text in texts:
        length = np.full(1, 0 if text is None else len(text), np.uint64)
        key, check = length * GOLDEN, length * LANE
        padded = b"" if text is None else text + bytes(-len(text) % _WORD)
        for word in np.frombuffer(padded, "<u8"):
            key, check = mix_numpy(key ^ word), mix_numpy(check + word)
        keys.append(key[0])
        checks.append(check[0] >> R32)
    return np.array(keys, np.uint64), np.array(checks, np.uint32)
