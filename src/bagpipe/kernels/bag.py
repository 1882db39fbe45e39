"""Pooling rows of the cache into bags, and adding the gradients of bags back to rows.

The order of additions is fixed (I1): from +0.0, occurrences in batch order. An occurrence names its row by its place u
among the rows of the plan, and `slots[u]` says where that row lies in the cache; a place that no row has is reported,
never followed (I8).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bagpipe.arrays import Floats, Int32s, Int64s
from bagpipe.errors import BatchError, ModelError
from bagpipe.kernels import kernel
from bagpipe.kernels.intrinsics import prefetch
from bagpipe.kernels.lanes import LANES, adjacent, load, spread, store

NO_PADDING = -1
"""Places are never negative, so no occurrence equals this one."""

_AHEAD = 16
"""Rows that are asked for before they are needed; anything from 8 to 32 measured about the same."""

_NO_OFFSETS = np.empty(0, np.int64)
_NO_WEIGHTS = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Bags:
    """What one call of an embedding layer looks up; checked once, used forward and backward."""

    places: Int32s
    """(bags, k), or (occurrences,) with offsets; an `nn.Embedding` is k = 1"""
    offsets: Int64s | None = None
    """(bags,): bag i is places[offsets[i]:offsets[i + 1]], the last one runs to the end."""
    weights: Floats | None = None
    """One factor an occurrence, shaped like the places."""
    mean: bool = False
    """Divide the sum by the number of occurrences; an empty bag stays zero."""
    padding: int = NO_PADDING
    """Occurrences of this place add nothing, are not counted, and receive no gradient."""

    def __post_init__(self) -> None:
        assert self.places.dtype == np.int32, self.places.dtype
        assert self.places.flags.c_contiguous, "places must be contiguous"
        assert self.places.ndim == (2 if self.offsets is None else 1), self.places.shape
        if self.weights is not None:
            assert self.weights.dtype == np.float32, self.weights.dtype
            assert self.weights.shape == self.places.shape, (self.weights.shape, self.places.shape)
            assert self.weights.flags.c_contiguous, "weights must be contiguous"
            if self.mean:
                raise ModelError("weighted bags with mean pooling: nn.EmbeddingBag takes weights with mode='sum' only")
        if self.offsets is not None:
            assert self.offsets.dtype == np.int64, self.offsets.dtype
            bad = _first_bad_offset(self.offsets, self.places.size)
            if bad >= 0:
                value = self.offsets[bad] if bad < len(self) else "missing"
                raise BatchError(
                    f"offsets[{bad}] is {value} for {self.places.size} ids: "
                    "offsets start at 0, never decrease, and end within the ids"
                )

    def __len__(self) -> int:
        return int(self.places.shape[0] if self.offsets is None else self.offsets.shape[0])

    @property
    def single(self) -> bool:
        """Every bag is one unweighted occurrence: pooling is a copy, adding needs no division."""
        return self.offsets is None and self.weights is None and self.places.shape[1] == 1

    def _arguments(self) -> tuple[Int32s, int, Int64s, Floats, bool, int]:
        return (
            self.places.reshape(-1),
            self.places.shape[1] if self.offsets is None else 0,
            _NO_OFFSETS if self.offsets is None else self.offsets,
            _NO_WEIGHTS if self.weights is None else self.weights.reshape(-1),
            self.mean,
            self.padding,
        )


def pool(
    cache: Floats, slots: Int32s, bags: Bags, column: int, out: Floats, start: int = 0, stop: int | None = None
) -> int:
    """Pool bags start to stop into `out` (bags, dim), from the row columns [column, column + dim).

    Returns the position of the first bad place among these bags, in flattened order, or -1. Threads may share a call
    by disjoint ranges of bags. Cost: one pass over the occurrences, bound by memory.
    """
    _check(cache, out, column, bags)
    stop = len(bags) if stop is None else stop
    if bags.single and bags.padding == NO_PADDING:
        return int(_copy(cache, slots, bags.places.reshape(-1), column, out, start, stop))
    return int(_pool(cache, slots, *bags._arguments(), column, out, start, stop))


def accumulate(grad: Floats, bags: Bags, buffer: Floats, column: int = 0) -> int:
    """Add the gradients `grad` (bags, dim) of all bags to columns [column, column + dim) of `buffer` (rows, width).

    The buffer starts as +0.0 and has one row for each slot of the plan; several features of a table add one after
    another. Returns the position of the first bad place, or -1. Columns are independent of each other, so threads may
    share a call by passing disjoint column blocks. Cost: one pass over `grad`, bound by memory.
    """
    _check(buffer, grad, column, bags)
    if bags.single:
        return int(_add(grad, bags.places.reshape(-1), bags.padding, buffer, column))
    return int(_accumulate(grad, *bags._arguments(), buffer, column))


def are_at(ids: Int64s, places: Int32s, rows: Int64s) -> bool:
    """Whether each id is that of the row at its place. Cost: one pass over the ids, bound by memory."""
    return bool(_are_at(ids, places, rows))


def _check(rows: Floats, vectors: Floats, column: int, bags: Bags) -> None:
    """Kernels run without bounds checks, so a wrong shape must stop here."""
    assert rows.dtype == vectors.dtype == np.float32, (rows.dtype, vectors.dtype)
    assert rows.ndim == vectors.ndim == 2, (rows.shape, vectors.shape)
    assert vectors.shape[0] == len(bags), (vectors.shape, len(bags))
    assert 0 <= column <= column + vectors.shape[1] <= rows.shape[1], (column, vectors.shape, rows.shape)
    assert adjacent(rows), (rows.shape, rows.strides)
    assert adjacent(vectors), (vectors.shape, vectors.strides)


@kernel
def _are_at(ids: Int64s, places: Int32s, rows: Int64s) -> bool:
    for i in range(ids.shape[0]):
        if np.uint64(places[i]) >= np.uint64(rows.shape[0]) or rows[places[i]] != ids[i]:
            return False
    return True


@kernel
def _first_bad_offset(offsets: Int64s, occurrences: int) -> int:
    previous = 0
    for i in range(offsets.shape[0]):
        if offsets[i] < previous or offsets[i] > occurrences or (i == 0 and offsets[i] != 0):
            return i
        previous = offsets[i]
    return 0 if offsets.shape[0] == 0 and occurrences > 0 else -1


@kernel
def _copy(cache: Floats, slots: Int32s, places: Int32s, column: int, out: Floats, start: int, stop: int) -> int:
    unique, dim, zero = np.uint64(slots.shape[0]), out.shape[1], np.float32(0.0)
    zeros = spread(zero)
    for bag in range(start, stop):
        u = np.uint64(places[bag])
        if u >= unique:
            return bag
        slot = np.intp(slots[u])
        u = np.uint64(places[min(bag + _AHEAD, stop - 1)])
        coming = np.intp(slots[u]) if u < unique else slot
        # Adding to +0.0 is no waste: it is what turns a stored -0.0 into the sum's +0.0.
        if dim % LANES:
            for c in range(0, dim, LANES):
                prefetch(cache, coming, column + c)
            row, vector = cache[slot, column : column + dim], out[bag]
            for c in range(dim):
                vector[c] = zero + row[c]
        else:
            for c in range(0, dim, LANES):
                prefetch(cache, coming, column + c)
                store(out, bag, c, zeros + load(cache, slot, column + c))
    return -1


@kernel
def _span(bag: int, k: int, offsets: Int64s, occurrences: int) -> tuple[int, int]:
    if offsets.shape[0] == 0:
        return bag * k, bag * k + k
    return offsets[bag], offsets[bag + 1] if bag + 1 < offsets.shape[0] else occurrences


@kernel
def _pool(
    cache: Floats,
    slots: Int32s,
    places: Int32s,
    k: int,
    offsets: Int64s,
    weights: Floats,
    mean: bool,
    padding: int,
    column: int,
    out: Floats,
    start: int,
    stop: int,
) -> int:
    unique, dim, occurrences = np.uint64(slots.shape[0]), out.shape[1], places.shape[0]
    weighted = weights.shape[0] > 0
    for bag in range(start, stop):
        first, last = _span(bag, k, offsets, occurrences)
        counted = 0
        for i in range(first, last):
            if np.uint64(places[i]) >= unique:
                return i
            counted += places[i] != padding
            coming = np.uint64(places[min(i + _AHEAD, occurrences - 1)])
            if coming < unique:
                for c in range(0, dim, LANES):
                    prefetch(cache, slots[coming], column + c)
        divisor = np.float32(max(counted, 1))
        if dim % LANES:
            sums = out[bag]
            sums[:] = 0.0
            for i in range(first, last):
                if places[i] != padding:
                    row = cache[slots[places[i]], column : column + dim]
                    for c in range(dim):
                        sums[c] += row[c] * weights[i] if weighted else row[c]
            for c in range(dim if mean else 0):
                sums[c] = sums[c] / divisor
            continue
        for c in range(0, dim, LANES):
            total = spread(np.float32(0.0))
            for i in range(first, last):
                if places[i] != padding:
                    vector = load(cache, slots[places[i]], column + c)
                    total = total + (vector * spread(weights[i]) if weighted else vector)
            store(out, bag, c, total / spread(divisor) if mean else total)
    return -1


@kernel
def _add(grad: Floats, places: Int32s, padding: int, buffer: Floats, column: int) -> int:
    unique, dim = np.uint64(buffer.shape[0]), grad.shape[1]
    for bag in range(places.shape[0]):
        u = np.uint64(places[bag])
        if u >= unique:
            return bag
        if places[bag] == padding:
            continue
        row = np.intp(u)
        if dim % LANES:
            sums, vector = buffer[row, column : column + dim], grad[bag]
            for c in range(dim):
                sums[c] += vector[c]
        else:
            for c in range(0, dim, LANES):
                store(buffer, row, column + c, load(buffer, row, column + c) + load(grad, bag, c))
    return -1


@kernel
def _accumulate(
    grad: Floats,
    places: Int32s,
    k: int,
    offsets: Int64s,
    weights: Floats,
    mean: bool,
    padding: int,
    buffer: Floats,
    column: int,
) -> int:
    unique, dim, bags = np.uint64(buffer.shape[0]), grad.shape[1], grad.shape[0]
    weighted = weights.shape[0] > 0
    for bag in range(bags):
        first, last = _span(bag, k, offsets, places.shape[0])
        counted = 0
        for i in range(first, last):
            if np.uint64(places[i]) >= unique:
                return i
            counted += places[i] != padding
        divisor = np.float32(max(counted, 1))
        for i in range(first, last):
            if places[i] == padding:
                continue
            row = np.intp(places[i])
            factor = weights[i] if weighted else np.float32(1.0)
            if dim % LANES:
                sums, own = buffer[row, column : column + dim], grad[bag]
                for c in range(dim):
                    sums[c] += own[c] / divisor if mean else own[c] * factor if weighted else own[c]
                continue
            for c in range(0, dim, LANES):
                vector = load(grad, bag, c)
                if mean:
                    vector = vector / spread(divisor)
                elif weighted:
                    vector = vector * spread(factor)
                store(buffer, row, column + c, load(buffer, row, column + c) + vector)
    return -1
