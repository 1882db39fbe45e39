"""Applying a table's gradients to its rows in the cache: one pass, each row read and written once.

Each kernel is the NumPy definition of its optimizer in `bagpipe.optim`, operation by operation (I1): sixteen columns at
a time where a row has a multiple of that, and otherwise over views of the row, which the compiler vectorises itself.
All take the same arguments: cache[slots[u]] is updated with grads[u]. Gradients can be checked before (I8).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bagpipe.arrays import Floats, Int32s, Int64s
from bagpipe.kernels import inlined, kernel
from bagpipe.kernels.intrinsics import prefetch
from bagpipe.kernels.lanes import LANES, adjacent, load, root, spread, store

_AHEAD = 8
"""Rows that are asked for before they are needed; with its state a row is two or three times as long as in pooling."""
_ONE = np.float32(1.0)


def check(cache: Floats, grads: Floats) -> None:
    """What kernels take for granted of the arrays, beyond their shapes."""
    assert adjacent(cache), (cache.shape, cache.strides)
    assert adjacent(grads), (grads.shape, grads.strides)


def first_not_finite(grads: Floats) -> int:
    """The first row of grads (rows, columns) that holds an infinity or NaN, or -1. Cost: one pass, bound by memory."""
    assert grads.dtype == np.float32, grads.dtype
    assert grads.flags.c_contiguous, "grads must be contiguous"
    return int(_first_not_finite(grads.view(np.int32)))


@kernel
def _first_not_finite(bits: Int32s) -> int:
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
def _coming(slots: Int32s, u: int) -> Any:
    """The slot of the row that is needed a little later than row u."""
    return slots[min(u + _AHEAD, slots.shape[0] - 1)]


@inlined
def _ask(cache: Floats, slot: Any) -> None:
    """Ask for a whole row; where there is time for it between the columns of another, that is up to a fifth faster."""
    for c in range(0, cache.shape[1], LANES):
        prefetch(cache, slot, c)


@kernel
def sgd(cache: Floats, slots: Int32s, grads: Floats, dims: Any, scalars: Any) -> None:  # noqa: ARG001
    """`optim.SGD`."""
    (lr,) = scalars
    dim = grads.shape[1]
    for u in range(slots.shape[0]):
        slot, coming = np.intp(slots[u]), _coming(slots, u)
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
def momentum(cache: Floats, slots: Int32s, grads: Floats, dims: Any, scalars: Any) -> None:  # noqa: ARG001
    """`optim.Momentum`."""
    lr, fraction, flag = scalars
    dim, nesterov = grads.shape[1], flag != 0
    lanes = spread(lr), spread(fraction)
    for u in range(slots.shape[0]):
        slot, coming = np.intp(slots[u]), _coming(slots, u)
        if dim % LANES:
            _ask(cache, coming)
            w, v, g = cache[slot, :dim], cache[slot, dim:], grads[u]
            for c in range(dim):
                w[c], v[c] = _momentum_step(w[c], v[c], g[c], lr, fraction, nesterov)
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
def adagrad(cache: Floats, slots: Int32s, grads: Floats, dims: Any, scalars: Any) -> None:  # noqa: ARG001
    """`optim.Adagrad`."""
    lr, eps = scalars
    dim = grads.shape[1]
    lanes = spread(lr), spread(eps)
    for u in range(slots.shape[0]):
        slot, coming = np.intp(slots[u]), _coming(slots, u)
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
def rowwise_adagrad(cache: Floats, slots: Int32s, grads: Floats, dims: Int64s, scalars: Any) -> None:
    """`optim.RowwiseAdagrad`."""
    lr, eps = scalars
    for u in range(slots.shape[0]):
        _ask(cache, _coming(slots, u))
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


def adam(cache: Floats, slots: Int32s, grads: Floats, dims: Int64s, scalars: Any) -> None:  # noqa: ARG001
    """`optim.Adam`, or `optim.AdamW`, which has two scalars more."""
    _adam(cache, slots, grads, (*scalars, _ONE, _ONE)[:6], len(scalars) == 6)


@kernel
def _adam_step(w: Any, m: Any, v: Any, g: Any, scalars: Any, decoupled: bool) -> Any:
    rate, toward_grad, toward_square, eps, keep, correction = scalars
    m = m + (g - m) * toward_grad
    v = v + (g * g - v) * toward_square
    if decoupled:
        return w * keep - rate * (m / (root(v) / correction + eps)), m, v
    return w - rate * (m / (root(v) + eps)), m, v


@kernel
def _adam(cache: Floats, slots: Int32s, grads: Floats, scalars: Any, decoupled: bool) -> None:
    dim = grads.shape[1]
    rate, toward_grad, toward_square, eps, keep, correction = scalars
    lanes = spread(rate), spread(toward_grad), spread(toward_square), spread(eps), spread(keep), spread(correction)
    for u in range(slots.shape[0]):
        slot, coming = np.intp(slots[u]), _coming(slots, u)
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
