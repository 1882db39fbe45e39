"""Who leaves a full cache: the slots with the smallest keys, next uses by slot, and ways of a set-associative cache.

Keys are numbers from 0 to HELD; HELD keeps a slot out of the choice. Each loop is one walk over slots or rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import kernel
from bagpipe.kernels.oracle import HALF, Rings, RowState

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Flags = NDArray[np.bool_]

HELD = 2**62
"""The key of a slot that may not be chosen."""
NEVER = 2**31 - 1
"""The next use of a row that no batch of the window needs."""


def lowest(keys: Int64s, count: int, slots: Int32s) -> int:
    """The `count` slots with the smallest keys, in order of slots; among equal keys the first. How many there are."""
    free = np.flatnonzero(keys < HELD)
    count = min(count, len(free))
    if count:
        values = keys[free]
        largest = np.partition(values, count - 1)[count - 1]
        taken = values < largest
        taken[np.flatnonzero(values == largest)[: count - np.count_nonzero(taken)]] = True
        slots[:count] = free[taken]
    return count


def rank(values: Int32s, largest_first: bool, last: Int32s, keys: Int64s) -> None:
    """Keys by a value of each slot's tenant, the smallest or the largest first, then by its last use.

    A slot without a tenant, whose last use is -1, is HELD.
    """
    keys[:] = values
    if largest_first:
        np.subtract(NEVER, keys, out=keys)
    keys <<= 31
    keys += last
    keys[last < 0] = HELD


def hold(last: Int32s, next_uses: Int32s, used_since: int, needed_until: int, at_least: int, keys: Int64s) -> None:
    """Raise the keys of tenants that were used since an iteration, or are needed until one, to `at_least` + last use.

    HELD stays HELD; with `at_least` HELD, so do they all.
    """
    held = ((last >= used_since) | (next_uses <= needed_until)) & (keys < HELD)
    keys[held] = np.minimum(HELD, at_least + last[held].astype(np.int64))


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
def count_absent(state: RowState, rings: Rings, members: Int64s, first: int, last: int) -> int:
    """Rows of the window's batches `first` to `last` that are not in the cache, each once; of a shard's tables k.

    Each use knows in how many iterations the next is, so only the last use in these batches counts.
    """
    mask = rings.begins.shape[1] - 1
    absent = 0
    for iteration in range(first, last + 1):
        column = iteration & mask
        for k in members:
            for at in range(rings.begins[k, column], rings.begins[k + 1, column]):
                if iteration + rings.next_use[at] > last and state.location[rings.rows[at]] <= 0:
                    absent += 1
    return absent


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
