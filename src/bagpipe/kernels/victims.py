"""For policies that choose who leaves a full cache: next uses by slot, rows that will be needed, and ways of a
set-associative cache. Each loop is one walk over slots or rows."""

from __future__ import annotations

import numpy as np

from bagpipe.arrays import Flags, Int32s, Int64s
from bagpipe.kernels import kernel
from bagpipe.kernels.oracle import HALF, Rings, RowState


@kernel
def note_next_uses(
    state: RowState,
    rings: Rings,
    previous: Int64s,
    iteration: int,
    planned: int,
    slot_begins: Int64s,
    next_uses: Int32s,
) -> None:
    """A batch was read: tell the slots of its rows that are in the cache, if no batch without a plan uses them before.

    Such batches begin with iteration `planned`; a row's use in one of them knows its next use itself.
    """
    column = iteration & (rings.begins.shape[1] - 1)
    start = rings.begins[0, column]
    for k in range(rings.tables.shape[0]):
        begin = slot_begins[rings.tables[k]]
        for at in range(rings.begins[k, column], rings.begins[k + 1, column]):
            if previous[at - start] >> HALF <= planned:
                place = state.location[rings.rows[at]]
                if place > 0:
                    next_uses[begin + place - 1] = iteration


@kernel
def find_absent(state: RowState, rings: Rings, members: Int64s, first: int, last: int) -> Int64s:
    """Rows of the window's batches `first` to `last` that are not in the cache, each once; of a shard's tables k.

    Each has its table in the upper half and the row in the lower. Each use knows in how many iterations the next is
    (0: not in the window): only the last in these batches counts.
    """
    mask = rings.begins.shape[1] - 1
    most = 0
    for iteration in range(first, last + 1):
        for k in members:
            most += rings.begins[k + 1, iteration & mask] - rings.begins[k, iteration & mask]
    codes = np.empty(most, np.int64)
    count = 0
    for iteration in range(first, last + 1):
        column = iteration & mask
        for k in members:
            table = rings.tables[k] << HALF
            for at in range(rings.begins[k, column], rings.begins[k + 1, column]):
                use = rings.next_use[at]
                if (use == 0 or iteration + use > last) and state.location[rings.rows[at]] <= 0:
                    codes[count] = table | rings.rows[at]
                    count += 1
    return codes[:count]


@kernel
def choose_ways(
    firsts: Int64s, ways: Int64s, draws: Int64s, pinned: Flags, claims: Int32s, winners: Int64s, chosen: Int32s
) -> None:
    """For each row one of the ways of its set that is not pinned, drawn at random; -1 if it gets none.

    Row i's set are the slots firsts[i] to firsts[i] + ways[i]. Rows choose without looking at each other (cDLRM,
    section 5.2.1): of several that choose the same way one gets it, each as likely as the others. `claims` and
    `winners` are of all slots, and `claims` zero before and after.
    """
    for i in range(firsts.shape[0]):
        chosen[i] = -1
        open_ways = 0
        for slot in range(firsts[i], firsts[i] + ways[i]):
            open_ways += not pinned[slot]
        if open_ways == 0:
            continue
        skip = draws[0, i] % open_ways
        slot = firsts[i]
        while pinned[slot] or skip > 0:
            skip -= not pinned[slot]
            slot += 1
        claims[slot] += 1
        if draws[1, i] % claims[slot] == 0:
            if claims[slot] > 1:
                chosen[winners[slot]] = -1
            winners[slot] = i
            chosen[i] = slot
    for i in range(firsts.shape[0]):
        if chosen[i] >= 0:
            claims[chosen[i]] = 0
