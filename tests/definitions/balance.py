"""What the kernels of `bagpipe.kernels.balance` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.kernels.balance import LOSS_MAX, Int32s, Int64s, _cheapest_path


def define_choose_best(scores: Int32s, loads: Int64s, part: Int64s) -> None:
    """Twin of `choose_best`."""
    for i, of_sample in enumerate(scores):
        part[i] = np.lexsort((loads, -of_sample))[0]
        loads[part[i]] += 1


def define_rebalance(scores: Int32s, excess: Int64s, part: Int64s, floor: int) -> int:
    """Twin of `rebalance` that looks at all samples for each path."""
    trainers, num_paths = len(excess), 0
    losses, movers = np.empty((trainers, trainers), np.int64), np.empty((trainers, trainers), np.int64)
    distances, before = np.empty(trainers, np.int64), np.empty(trainers, np.int64)
    while True:
        for a in range(trainers):
            for b in range(trainers):
                loss = np.maximum(scores[:, a].astype(np.int64) - scores[:, b], floor)
                loss[part != a] = LOSS_MAX
                losses[a, b], movers[a, b] = (LOSS_MAX, -1) if a == b else (loss.min(), loss.argmin())
        end = _cheapest_path(losses, excess, distances, before)
        if end < 0:
            return num_paths
        num_paths += 1
        excess[end] += 1
        while before[end] >= 0:
            part[movers[before[end], end]] = end
            end = before[end]
        excess[end] -= 1
