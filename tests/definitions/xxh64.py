"""What the kernels of `bagpipe.kernels.xxh64` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

from bagpipe.kernels.xxh64 import Words, _round_of


def define_mix_stripes(lanes: Words, words: Words) -> None:
    """Twin of `_mix_stripes`, in Python's integers."""
    for i, word in enumerate(words.tolist()):
        lanes[i % 4] = _round_of(int(lanes[i % 4]), word)
