"""What the kernels of `bagpipe.store.chunks` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.arrays import Floats, Int64s


def define_gather(chunks: Sequence[Floats], positions: Int64s, out: Floats) -> None:
    """Twin of `_gather`."""
    for i, position in enumerate(positions.tolist()):
        if position >= 0:
            out[i] = chunks[position // len(chunks[0])][position % len(chunks[0]), : out.shape[1]]


def define_scatter(chunks: Sequence[Floats], positions: Int64s, values: Floats) -> None:
    """Twin of `_scatter`."""
    for i, position in enumerate(positions.tolist()):
        chunks[position // len(chunks[0])][position % len(chunks[0])] = values[i]
