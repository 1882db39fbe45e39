"""Applying a table's gradients to its rows in the cache: one pass, each row read and written once.

Each kernel is the NumPy definition of its optimizer in `bagpipe.optim`, operation by operation (I1): sixteen columns at
a time where a row has a multiple of that, and otherwise over views of the row, which the compiler vectorises itself.
Gradients can be checked before any row changes (I8).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bagpipe import optim
from bagpipe.kernels import inlined, kernel
from bagpipe.kernels.intrinsics import prefetch
from bagpipe.kernels.lanes import LANES, adjacent, load, root, spread, store
from bagpipe.optim import RowOptimizer

Floats = npt.NDArray[np.float32]
Slots = npt.NDArray[np.int32]

_AHEAD = 8
"""Rows that are asked for before they are needed; with its state a row is two or three times as long as in pooling."""

_ONE = np.float32(1.0)


def apply(
    optimizer: RowOptimizer,
    cache: Floats,
    slots: Slots,
    grads: Floats,
    dims: tuple[int, ...],
    scalars: optim.Scalars,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """Update cache[slots[u]] with grads[u] for u in [start, stop); `scalars` are the optimizer's for this step.

    Slots differ from each other, so threads may share a call by disjoint ranges. Cost: one pass over the rows, bound by
    memory. An optimizer without a kernel, such as a user's own, runs its NumPy definition.
    """
    stop = len(slots) if stop is None else stop
    dim = sum(dims)
    assert cache.dtype == grads.dtype == np.float32, (cache.dtype, grads.dtype)
    assert cache.shape[1] == dim + optimizer.state_width(dims), (cache.shape, dims)
    assert grads.shape == (len(slots), dim), (grads.shape, len(slots), dims)
    assert 0 <= start <= stop <= len(slots), (start, stop, len(slots))
    assert adjacent(cache), (cache.shape, cache.strides)
    assert adjacent(grads), (grads.shape, grads.strides)
    # By the very type: a subclass may define another update.
    if type(optimizer) is optim.SGD:
        _sgd(cache, slots, grads, scalars, start, stop)
    elif type(optimizer) is optim.Momentum:
        _momentum(cache, slots, grads, scalars, optimizer.nesterov, start, stop)
    elif type(optimizer) is optim.Adagrad:
        _adagrad(cache, slots, grads, scalars, start, stop)
    elif type(optimizer) is optim.RowwiseAdagrad:
        _rowwise_adagrad(cache, slots, grads, np.array(dims, np.int64), scalars, start, stop)
    elif type(optimizer) is optim.Adam:
        _adam(cache, slots, grads, (*scalars, _ONE, _ONE), False, start, stop)
    elif type(optimizer) is optim.AdamW:
        _adam(cache, slots, grads, scalars, True, start, stop)
    elif type(optimizer) is not optim.Frozen:
        apply_numpy(optimizer, cache, slots, grads, dims, scalars, start, stop)


def apply_numpy(
    optimizer: RowOptimizer,
    cache: Floats,
    slots: Slots,
    grads: Floats,
    dims: tuple[int, ...],
    scalars: optim.Scalars,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """The definition of `apply`."""
    rows = cache[slots[start:stop]]
    optimizer.apply(rows, grads[start:stop], dims, scalars)
    cache[slots[start:stop]] = rows


def first_not_finite(grads: Floats) -> int:
    """The first row of grads (rows, columns) that holds an infinity or NaN, or -1. Cost: one pass, bound by memory."""
    assert grads.dtype == np.float32, grads.dtype
    assert grads.flags.c_contiguous, "grads must be contiguous"
    return int(_first_not_finite(grads.view(np.int32)))


def scale(grads: Floats, factor: np.float32) -> None:
    """Multiply in place by one float32: a clipping factor, or a trainer's number of samples."""
    with np.errstate(all="ignore"):
        np.multiply(grads, np.float32(factor), out=grads)


def divide(grads: Floats, divisor: np.float32) -> None:
    """Divide in place by one float32: the number of samples of all trainers."""
    with np.errstate(all="ignore"):
        np.divide(grads, np.float32(divisor), out=grads)


@kernel
def _first_not_finite(bits: npt.NDArray[np.int32]) -> int:
    # Without its sign, a float's bits are in order as an integer, and all that is not finite lies at the top.
    limit, sign = np.int32(0x7F800000), np.int32(0x7FFFFFFF)
    for row in range(bits.shape[0]):
        largest = np.int32(0)
        for c in range(bits.shape[1]):
            largest = max(largest, bits[row, c] & sign)
        if largest >= limit:
            return row
    return -1


@inlined
def _ask(cache: Floats, slot: Any) -> None:
    """Ask for a row that is needed a little later."""
    for c in range(0, cache.shape[1], LANES):
        prefetch(cache, slot, c)


@kernel
def _sgd(cache: Floats, slots: Slots, grads: Floats, scalars: Any, start: int, stop: int) -> None:
    (lr,) = scalars
    dim = grads.shape[1]
    for u in range(start, stop):
        slot, coming = np.intp(slots[u]), np.intp(slots[min(u + _AHEAD, stop - 1)])
        if dim % LANES:
            _ask(cache, coming)
            w, g = cache[slot], grads[u]
            for c in range(dim):
                w[c] -= lr * g[c]
        else:
            for c in range(0, dim, LANES):
                prefetch(cache, coming, c)
                store(cache, slot, c, load(cache, slot, c) - spread(lr) * load(grads, u, c))


@kernel
def _momentum_step(w: Any, v: Any, g: Any, lr: Any, momentum: Any, nesterov: bool) -> Any:
    v = momentum * v + g
    return w - lr * (g + momentum * v if nesterov else v), v


@kernel
def _momentum(cache: Floats, slots: Slots, grads: Floats, scalars: Any, nesterov: bool, start: int, stop: int) -> None:
    lr, momentum = scalars
    dim = grads.shape[1]
    lanes = spread(lr), spread(momentum)
    for u in range(start, stop):
        slot, coming = np.intp(slots[u]), np.intp(slots[min(u + _AHEAD, stop - 1)])
        if dim % LANES:
            _ask(cache, coming)
            w, v, g = cache[slot, :dim], cache[slot, dim:], grads[u]
            for c in range(dim):
                w[c], v[c] = _momentum_step(w[c], v[c], g[c], lr, momentum, nesterov)
        else:
            for c in range(0, dim, LANES):
                prefetch(cache, coming, c)
                prefetch(cache, coming, dim + c)
                some, more = load(cache, slot, c), load(cache, slot, dim + c)
                some, more = _momentum_step(some, more, load(grads, u, c), lanes[0], lanes[1], nesterov)
                store(cache, slot, c, some)
                store(cache, slot, dim + c, more)


@kernel
def _adagrad_step(w: Any, s: Any, g: Any, lr: Any, eps: Any) -> Any:
    s = s + g * g
    return w - lr * (g / (root(s) + eps)), s


@kernel
def _adagrad(cache: Floats, slots: Slots, grads: Floats, scalars: Any, start: int, stop: int) -> None:
    lr, eps = scalars
    dim = grads.shape[1]
    lanes = spread(lr), spread(eps)
    for u in range(start, stop):
        slot, coming = np.intp(slots[u]), np.intp(slots[min(u + _AHEAD, stop - 1)])
        if dim % LANES:
            _ask(cache, coming)
            w, s, g = cache[slot, :dim], cache[slot, dim:], grads[u]
            for c in range(dim):
                w[c], s[c] = _adagrad_step(w[c], s[c], g[c], lr, eps)
        else:
            for c in range(0, dim, LANES):
                prefetch(cache, coming, c)
                prefetch(cache, coming, dim + c)
                some, more = load(cache, slot, c), load(cache, slot, dim + c)
                some, more = _adagrad_step(some, more, load(grads, u, c), lanes[0], lanes[1])
                store(cache, slot, c, some)
                store(cache, slot, dim + c, more)


@kernel
def _rowwise_adagrad(
    cache: Floats, slots: Slots, grads: Floats, dims: npt.NDArray[np.int64], scalars: Any, start: int, stop: int
) -> None:
    lr, eps = scalars
    for u in range(start, stop):
        _ask(cache, np.intp(slots[min(u + _AHEAD, stop - 1)]))
        row, grad, first = cache[slots[u]], grads[u], 0
        for part in range(dims.shape[0]):
            state = grads.shape[1] + part
            w, g = row[first : first + dims[part]], grad[first : first + dims[part]]
            total = np.float32(0.0)
            for c in range(dims[part]):
                total += g[c] * g[c]
            row[state] += total / np.float32(dims[part])
            rate = lr / (root(row[state]) + eps)
            for c in range(dims[part]):
                w[c] -= rate * g[c]
            first += dims[part]


@kernel
def _adam_step(w: Any, m: Any, v: Any, g: Any, scalars: Any, decoupled: bool) -> Any:
    rate, toward_grad, toward_square, eps, keep, correction = scalars
    m = m + (g - m) * toward_grad
    v = v + (g * g - v) * toward_square
    if decoupled:
        return w * keep - rate * (m / (root(v) / correction + eps)), m, v
    return w - rate * (m / (root(v) + eps)), m, v


@kernel
def _adam(cache: Floats, slots: Slots, grads: Floats, scalars: Any, decoupled: bool, start: int, stop: int) -> None:
    dim = grads.shape[1]
    rate, toward_grad, toward_square, eps, keep, correction = scalars
    lanes = spread(rate), spread(toward_grad), spread(toward_square), spread(eps), spread(keep), spread(correction)
    for u in range(start, stop):
        slot, coming = np.intp(slots[u]), np.intp(slots[min(u + _AHEAD, stop - 1)])
        if dim % LANES:
            _ask(cache, coming)
            row, g = cache[slot], grads[u]
            w, m, v = row[:dim], row[dim : 2 * dim], row[2 * dim :]
            for c in range(dim):
                w[c], m[c], v[c] = _adam_step(w[c], m[c], v[c], g[c], scalars, decoupled)
        else:
            for c in range(0, dim, LANES):
                for part in range(3):
                    prefetch(cache, coming, part * dim + c)
                ws, ms, vs = load(cache, slot, c), load(cache, slot, dim + c), load(cache, slot, 2 * dim + c)
                ws, ms, vs = _adam_step(ws, ms, vs, load(grads, u, c), lanes, decoupled)
                store(cache, slot, c, ws)
                store(cache, slot, dim + c, ms)
                store(cache, slot, 2 * dim + c, vs)
