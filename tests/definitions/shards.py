"""What the kernels of `bagpipe.server.shards` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.arrays import Flags, Floats, Int64s
from bagpipe.kernels.random import GOLDEN, mix_numpy
from bagpipe.server.shards import _HALF


def define_divide(table: int, ids: Int64s, num_servers: int) -> tuple[Int64s, Int64s]:
    """Twin of `divide`."""
    servers = define_servers(table, ids, num_servers)
    starts = np.append(0, np.cumsum(np.bincount(servers, minlength=num_servers)))
    return np.argsort(servers, kind="stable"), starts


def define_pick(rows: Floats, order: Int64s, out: Floats) -> None:
    """Twin of `pick`."""
    out[:] = rows[order].reshape(-1)


def define_place(rows: Floats, flags: Flags, order: Int64s, out: Floats, missing: Int64s, num_missing: int) -> int:
    """Twin of `place`."""
    out[order[flags]] = rows.reshape(-1, out.shape[1])
    absent = order[~flags]
    missing[num_missing : num_missing + len(absent)] = absent
    return num_missing + len(absent)


def define_servers(table: int, ids: Int64s, num_servers: int) -> Int64s:
    """Twin of `_server` over an array: the server of each row."""
    bits = mix_numpy(ids.astype(np.uint64) + np.uint64((table + 1) * int(GOLDEN) % 2**64))
    return (((bits >> _HALF) * np.uint64(num_servers)) >> _HALF).astype(np.int64)
