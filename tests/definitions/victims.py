"""What the kernels of `bagpipe.kernels.victims` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.arrays import Flags, Int32s, Int64s
from bagpipe.kernels.oracle import HALF, Rings, RowState
from bagpipe.oracle.slots import HELD


def define_lowest(keys: Int64s, count: int) -> Int64s:
    """Twin of `lowest`."""
    order = np.argsort(keys, kind="stable")
    return np.sort(order[keys[order] < HELD][:count])


def define_note_next_uses(
    state: RowState,
    rings: Rings,
    previous: Int64s,
    iteration: int,
    planned: int,
    slot_begins: Int64s,
    next_uses: Int32s,
) -> None:
    """Twin of `note_next_uses`."""
    begins = rings.begins[:, iteration & (rings.begins.shape[1] - 1)]
    for k, t in enumerate(rings.tables):
        rows, uses = rings.rows[begins[k] : begins[k + 1]], previous[begins[k] - begins[0] :]
        there = state.location[rows[uses[: len(rows)] >> HALF <= planned]]
        next_uses[slot_begins[t] + there[there > 0] - 1] = iteration


def define_find_absent(state: RowState, rings: Rings, members: Int64s, first: int, last: int) -> set[int]:
    """Twin of `find_absent`."""
    rows: set[int] = set()
    for iteration in range(first, last + 1):
        column = iteration & (rings.begins.shape[1] - 1)
        for k in members:
            own = rings.rows[rings.begins[k, column] : rings.begins[k + 1, column]]
            codes = (int(rings.tables[k]) << HALF) | own.astype(np.int64)
            rows.update(codes[state.location[own] <= 0].tolist())
    return rows


def define_choose_ways(
    firsts: Int64s, ways: Int64s, draws: Int64s, pinned: Flags, claims: Int32s, winners: Int64s, chosen: Int32s
) -> None:
    """Twin of `choose_ways`."""
    chosen[:] = -1
    rivals: dict[int, list[int]] = {}
    for i, (first, count) in enumerate(zip(firsts.tolist(), ways.tolist(), strict=True)):
        open_ways = first + np.flatnonzero(~pinned[first : first + count])
        if len(open_ways):
            rivals.setdefault(int(open_ways[draws[0, i] % len(open_ways)]), []).append(i)
    for slot, rows in rivals.items():
        winner = [row for number, row in enumerate(rows, 1) if draws[1, row] % number == 0][-1]
        chosen[winner] = slot
        winners[slot] = winner
        claims[slot] = 0
