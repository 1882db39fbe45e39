"""What the kernels of `bagpipe.kernels.admit` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.arrays import Int64s


def define_admit(
    tables: Int64s,
    iteration: int,
    window: int,
    need: int,
    capacity: int,
    ahead: int,
    load: Int64s,
    total: Int64s,
    gaps: Int64s,
    shortest_refused: Int64s,
) -> int:
    """Twin of `admit`: one row at a time, each checked against every iteration that it would cross."""
    mask = len(load) - 1
    load[iteration & mask] = total[iteration & mask] = need
    near = (iteration - np.arange(1, min(ahead, window) + 1)) & mask
    total[near] += need
    refused = 0
    for gap in range(1, window + 2):
        crossed = (iteration - np.arange(1, gap)) & mask
        for t in tables:
            for row in range(gaps[t, gap]):
                if (load[crossed] >= capacity).any() or (total[crossed[ahead:]] >= capacity).any():
                    if gap <= window:  # else it is idle, and may stay by luck
                        refused += int(gaps[t, gap]) - row
                        first = shortest_refused[(iteration - gap) & mask]
                        shortest_refused[(iteration - gap) & mask] = first or gap
                    gaps[t, gap] = row
                    break
                load[crossed] += 1
                total[crossed] += 1
                total[near] -= 1
    return refused
