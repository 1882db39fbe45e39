"""Which server holds a row, and the ids of a call divided over servers and their rows brought together again.

The server of row (table, id) among M: x = id + (table + 1) * 0x9E3779B97F4A7C15, mixed by x ^= x >> 30,
x *= 0xBF58476D1CE4E5B9, x ^= x >> 27, x *= 0x94D049BB133111EB, x ^= x >> 31, all modulo 2**64; then the upper half of x
times M, divided by 2**32. It never changes, since rows that are kept on disk lie where it says.
"""

from __future__ import annotations

import numpy as np

from bagpipe.arrays import Flags, Floats, Int64s
from bagpipe.kernels import inlined, kernel
from bagpipe.kernels.random import GOLDEN, mix
from bagpipe.store.libc import memcpy, prefetch_bytes

_HALF = np.uint64(32)
_AHEAD = 8


@inlined
def _server(table: int, key: np.int64, num_servers: int) -> np.int64:
    bits = mix(np.uint64(key) + np.uint64(table + 1) * GOLDEN)
    return np.int64(((bits >> _HALF) * np.uint64(num_servers)) >> _HALF)


@kernel
def _divide(table: int, ids: Int64s, starts: Int64s, order: Int64s) -> None:
    """A counting sort. Cost: two passes over the ids, and the hash twice."""
    num_servers = starts.shape[0] - 1
    for i in range(ids.shape[0]):
        starts[_server(table, ids[i], num_servers) + 1] += 1
    for number in range(num_servers):
        starts[number + 1] += starts[number]
    places = starts.copy()
    for i in range(ids.shape[0]):
        server = _server(table, ids[i], num_servers)
        order[places[server]] = i
        places[server] += 1


def divide(table: int, ids: Int64s, num_servers: int) -> tuple[Int64s, Int64s]:
    """Indices of the ids, server by server in the order given, and where each server's begin (one more for the end)."""
    order = np.empty(len(ids), np.int64)
    starts = np.zeros(num_servers + 1, np.int64)
    _divide(table, ids, starts, order)
    return order, starts


@kernel
def pick(rows: Floats, order: Int64s, out: Floats) -> None:
    """out[i] = rows[order[i]], where `out` has one dimension. Cost: one read and one write of each row."""
    row_bytes = rows.shape[1] * 4
    source, target = rows.ctypes.data, out.ctypes.data
    for i in range(order.shape[0]):
        if i + _AHEAD < order.shape[0]:
            prefetch_bytes(source + order[i + _AHEAD] * row_bytes, row_bytes)
        memcpy(target + i * row_bytes, source + order[i] * row_bytes, row_bytes)


@kernel
def _place(source: int, flags: Flags, order: Int64s, out: Floats, missing: Int64s, num_missing: int) -> int:
    """Cost: one read and one write of each row."""
    row_bytes = out.shape[1] * 4
    target = out.ctypes.data
    for i in range(order.shape[0]):
        if flags[i]:
            memcpy(target + order[i] * row_bytes, source, row_bytes)
            source += row_bytes
        else:
            missing[num_missing] = order[i]
            num_missing += 1
    return num_missing


def place(rows: Floats, flags: Flags, order: Int64s, out: Floats, missing: Int64s, num_missing: int) -> int:
    """out[order[i]] = the next of `rows` (of one dimension) where flags[i], else add order[i] to `missing`; its length.

    `missing` holds `num_missing` already.
    """
    return _place(rows.ctypes.data, flags, order, out, missing, num_missing)
