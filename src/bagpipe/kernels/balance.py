"""Samples to trainers in parts of given sizes, at the highest total score: the linear assignment problem.

Few trainers and many samples: what is searched is the graph of trainers, in which the way from one to another costs
what the cheapest sample loses by going it. Whole numbers only, ties go to the lowest number, so that a kernel and its
twin agree (I1). About 1 ms for 16,384 samples and 8 trainers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import inlined, kernel

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

LOSS_MAX = 2**40
"""More than any sample can lose: no way."""


@kernel
def choose_best(scores: Int32s, loads: Int64s, part: Int64s) -> None:
    """Each sample to the trainer with its best score; among equals to the one with the fewest samples so far."""
    for i in range(part.shape[0]):
        best = 0
        for j in range(1, loads.shape[0]):
            gain = scores[i, j] - scores[i, best]
            if gain > 0 or (gain == 0 and loads[j] < loads[best]):
                best = j
        part[i] = best
        loads[best] += 1


@inlined
def _loss(scores: Int32s, i: int, a: int, b: int, floor: int) -> int:
    loss = np.int64(scores[i, a]) - np.int64(scores[i, b])
    return loss if loss > floor else floor  # type: ignore[return-value]


@kernel
def _cheapest(scores: Int32s, part: Int64s, a: int, b: int, floor: int, losses: Int64s, movers: Int64s) -> None:
    """Find the sample of trainer a that loses least by going to b, the first of equals, after the last one has gone."""
    loss = losses[a, b]
    for i in range(movers[a, b] + 1, part.shape[0]):
        if part[i] == a and _loss(scores, i, a, b, floor) == loss:
            movers[a, b] = i
            return
    losses[a, b], movers[a, b] = LOSS_MAX, -1
    for i in range(part.shape[0]):
        if part[i] == a:
            loss = _loss(scores, i, a, b, floor)
            if loss < losses[a, b]:
                losses[a, b], movers[a, b] = loss, i


@kernel
def _arrive(scores: Int32s, i: int, b: int, floor: int, losses: Int64s, movers: Int64s) -> None:
    """Sample i is at trainer b: it may be the one that leaves at the least loss."""
    for c in range(losses.shape[0]):
        if c != b:
            loss = _loss(scores, i, b, c, floor)
            if loss < losses[b, c] or (loss == losses[b, c] and i < movers[b, c]):
                losses[b, c], movers[b, c] = loss, i


@kernel
def _cheapest_path(losses: Int64s, excess: Int64s, distances: Int64s, before: Int64s) -> int:
    """Where the cheapest way from any trainer with too many samples to one with too few ends; -1: none is needed."""
    num_trainers = excess.shape[0]
    for a in range(num_trainers):
        distances[a] = 0 if excess[a] > 0 else LOSS_MAX
        before[a] = -1
    changed = True
    while changed:
        changed = False
        for a in range(num_trainers):
            for b in range(num_trainers):
                if distances[a] < LOSS_MAX and losses[a, b] < LOSS_MAX and distances[a] + losses[a, b] < distances[b]:
                    distances[b] = distances[a] + losses[a, b]
                    before[b] = a
                    changed = True
    end = -1
    for b in range(num_trainers):
        if excess[b] < 0 and distances[b] < LOSS_MAX and (end < 0 or distances[b] < distances[end]):
            end = b
    return end


@kernel
def _move(scores: Int32s, end: int, before: Int64s, part: Int64s, floor: int, losses: Int64s, movers: Int64s) -> int:
    """Move the cheapest sample of each hop of a path; the trainer where the path begins."""
    gone = np.full(before.shape[0], -1, np.int64)
    b = end
    while before[b] >= 0:
        gone[b] = movers[before[b], b]
        part[gone[b]] = b
        b = before[b]
    begin, b = b, end
    while before[b] >= 0:
        a = before[b]
        for c in range(before.shape[0]):
            if movers[a, c] == gone[b]:
                _cheapest(scores, part, a, c, floor, losses, movers)
        b = a
    b = end
    while before[b] >= 0:
        _arrive(scores, gone[b], b, floor, losses, movers)
        b = before[b]
    return begin


@kernel
def rebalance(scores: Int32s, excess: Int64s, part: Int64s, floor: int) -> int:
    """Move samples on cheapest paths until no trainer has too many; how many paths that took.

    From a placement by best scores, with a floor below all losses, the result has the highest total score that even
    parts allow (successive shortest paths). From any other one, a floor of 0 keeps paths free of cycles.
    """
    num_trainers = excess.shape[0]
    losses = np.full((num_trainers, num_trainers), LOSS_MAX, np.int64)
    movers = np.full((num_trainers, num_trainers), -1, np.int64)
    distances, before = np.empty(num_trainers, np.int64), np.empty(num_trainers, np.int64)
    for i in range(part.shape[0]):
        _arrive(scores, i, part[i], floor, losses, movers)
    num_paths = 0
    end = _cheapest_path(losses, excess, distances, before)
    while end >= 0:
        num_paths += 1
        excess[end] += 1
        excess[_move(scores, end, before, part, floor, losses, movers)] -= 1
        end = _cheapest_path(losses, excess, distances, before)
    return num_paths
