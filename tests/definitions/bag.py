"""What the kernels of `bagpipe.kernels.bag` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

from typing import Any

import numpy as np

from bagpipe.arrays import Floats, Int32s
from bagpipe.kernels.bag import Bags


def define_pool(
    cache: Floats, slots: Int32s, bags: Bags, column: int, out: Floats, start: int = 0, stop: int | None = None
) -> int:
    """Twin of `pool`: the j-th occurrence of every bag is added before the (j + 1)-th of any."""
    stop = len(bags) if stop is None else stop
    firsts, lengths = (part[start:stop] for part in _spans(bags))
    places, counted = bags.places.reshape(-1), np.zeros(stop - start, np.float32)
    inside = slice(firsts[0], firsts[-1] + lengths[-1]) if stop > start else slice(0)
    bad = np.flatnonzero((places[inside] < 0) | (places[inside] >= len(slots)))
    if bad.size:
        return int(inside.start + bad[0])
    pooled = np.zeros((stop - start, out.shape[1]), np.float32)
    for j in range(int(lengths.max(initial=0))):
        bag = np.flatnonzero(lengths > j)
        bag = bag[places[firsts[bag] + j] != bags.padding]
        occurrence = firsts[bag] + j
        rows = cache[slots[places[occurrence]], column : column + out.shape[1]]
        if bags.weights is not None:
            rows = rows * bags.weights.reshape(-1)[occurrence, None]
        pooled[bag] += rows
        counted[bag] += 1
    out[start:stop] = pooled / np.maximum(counted, 1)[:, None] if bags.mean else pooled
    return -1


def define_accumulate(grad: Floats, bags: Bags, buffer: Floats, column: int = 0) -> int:
    """Twin of `accumulate`: `np.add.at` adds occurrences one after another, in their order."""
    places = bags.places.reshape(-1)
    bad = np.flatnonzero((places < 0) | (places >= len(buffer)))
    if bad.size:
        return int(bad[0])
    bag = np.repeat(np.arange(len(bags)), _spans(bags)[1])
    kept = np.flatnonzero(places != bags.padding)
    bag = bag[kept]
    added = grad[bag]
    if bags.mean:
        added = added / np.bincount(bag, minlength=len(bags)).astype(np.float32)[bag, None]
    if bags.weights is not None:
        added = added * bags.weights.reshape(-1)[kept, None]
    np.add.at(buffer[:, column : column + grad.shape[1]], places[kept], added)
    return -1


def _spans(bags: Bags) -> tuple[Any, Any]:
    """First occurrence and number of occurrences of each bag."""
    if bags.offsets is None:
        k = bags.places.shape[1]
        return np.arange(len(bags), dtype=np.int64) * k, np.full(len(bags), k, np.int64)
    return bags.offsets, np.diff(bags.offsets, append=bags.places.size)
