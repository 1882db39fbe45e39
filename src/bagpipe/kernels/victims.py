"""Who leaves a full cache: the slots with the smallest keys, next uses by slot, and ways of a set-associative cache.

Keys are numbers from 0 to HELD; HELD keeps a slot out of the choice. Each loop is one walk over slots or rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import kernel
from bagpipe.kernels.plan import HALF

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Stays = NDArray[np.uint16]
Flags = NDArray[np.bool_]

HELD = 2**62
"""The key of a slot that may not be chosen."""
NEVER = 2**31 - 1
"""The next use of a row that no batch of the window needs."""
_BUCKETS = 2048


@kernel
def lowest(keys: Int64s, count: int, slots: Int32s) -> int:
    """The `count` slots with the smallest keys, in order of slots; among equal keys the first. How many there are.

    Narrows down the largest key to take by counting keys in buckets: two or three walks, about 1 ns a slot each.
    """
    low, high, candidates = HELD, 0, 0
    for i in range(keys.shape[0]):
        if keys[i] < HELD:
            low, high, candidates = min(low, keys[i]), max(high, keys[i]), candidates + 1
    count = min(count, candidates)
    if count == 0:
        return 0
    left = count
    counts = np.empty(_BUCKETS, np.int64)
    while True:  # `left` of the keys from low to high are to be taken, and all keys below low
        width = (high - low) // _BUCKETS + 1
        counts[:] = 0
        for i in range(keys.shape[0]):
            if low <= keys[i] <= high:
                counts[(keys[i] - low) // width] += 1
        bucket = 0
        while counts[bucket] < left:
            left -= counts[bucket]
            bucket += 1
        low += bucket * width
        high = low + width - 1
        if width == 1:
            break
    found = 0
    for i in range(keys.shape[0]):
        if keys[i] < low or (keys[i] == low and left > 0):
            left -= keys[i] == low
            slots[found] = i
            found += 1
    return found


def lowest_by_numpy(keys: Int64s, count: int, slots: Int32s) -> int:
    """Twin of `lowest`."""
    order = np.argsort(keys, kind="stable")
    chosen = np.sort(order[keys[order] < HELD][:count])
    slots[: len(chosen)] = chosen
    return len(chosen)


@kernel
def rank(values: Int32s, largest_first: bool, last: Int32s, keys: Int64s) -> None:
    """Keys by a value of each slot's tenant, the smallest or the largest first, then by its last use.

    A slot without a tenant, whose last use is -1, is HELD. About 1 ns a slot.
    """
    for i in range(values.shape[0]):
        value = np.int64(NEVER) - values[i] if largest_first else np.int64(values[i])
        keys[i] = (value << 31) + last[i] if last[i] >= 0 else HELD


def rank_by_numpy(values: Int32s, largest_first: bool, last: Int32s, keys: Int64s) -> None:
    """Twin of `rank`."""
    value = NEVER - values.astype(np.int64) if largest_first else values.astype(np.int64)
    keys[:] = np.where(last >= 0, (value << 31) + last, HELD)


@kernel
def hold(last: Int32s, next_uses: Int32s, used_since: int, needed_until: int, at_least: int, keys: Int64s) -> None:
    """Raise the keys of tenants that were used since an iteration, or are needed until one, to `at_least` + last use.

    HELD stays HELD; with `at_least` HELD, so do they all.
    """
    for i in range(keys.shape[0]):
        if (last[i] >= used_since or next_uses[i] <= needed_until) and keys[i] < HELD:
            keys[i] = min(HELD, at_least + last[i])


def hold_by_numpy(
    last: Int32s, next_uses: Int32s, used_since: int, needed_until: int, at_least: int, keys: Int64s
) -> None:
    """Twin of `hold`."""
    held = ((last >= used_since) | (next_uses <= needed_until)) & (keys < HELD)
    keys[held] = np.minimum(HELD, at_least + last[held].astype(np.int64))


@kernel
def note_next_uses(
    tables: Int64s,
    starts: Int64s,
    counts: Int64s,
    entries: Int32s,
    previous: Int64s,
    places: Int32s,
    iteration: int,
    planned: int,
    begins: Int64s,
    next_uses: Int32s,
) -> None:
    """A batch was read: tell the slots of its rows that are in the cache, if no batch without a plan uses them before.

    Such batches begin with iteration `planned`; a row's use in one of them knows its next use itself.
    """
    for t in tables:
        for i in range(starts[t], starts[t] + counts[t]):
            if previous[i] >> HALF <= planned:
                place = places[entries[i]]
                if place > 0:
                    next_uses[begins[t] + place - 1] = iteration


def note_next_uses_by_numpy(
    tables: Int64s,
    starts: Int64s,
    counts: Int64s,
    entries: Int32s,
    previous: Int64s,
    places: Int32s,
    iteration: int,
    planned: int,
    begins: Int64s,
    next_uses: Int32s,
) -> None:
    """Twin of `note_next_uses`."""
    for t in tables:
        here = slice(starts[t], starts[t] + counts[t])
        there = places[entries[here][previous[here] >> HALF <= planned]]
        next_uses[begins[t] + there[there > 0] - 1] = iteration


@kernel
def count_absent(
    tables: Int64s, begins: Int64s, first: int, last: int, entries: Int32s, stays: Stays, places: Int32s
) -> int:
    """Rows of the window's batches `first` to `last` that are not in the cache, each once.

    `stays` tells each use in how many iterations the next is, so only the last use in these batches counts.
    """
    mask = begins.shape[1] - 1
    absent = 0
    for iteration in range(first, last + 1):
        column = iteration & mask
        for t in tables:
            for i in range(begins[t, column], begins[t + 1, column]):
                if iteration + stays[i] > last and places[entries[i]] <= 0:
                    absent += 1
    return absent


def count_absent_by_numpy(
    tables: Int64s, begins: Int64s, first: int, last: int, entries: Int32s, _stays: Stays, places: Int32s
) -> int:
    """Twin of `count_absent`."""
    rows: set[int] = set()
    for iteration in range(first, last + 1):
        column = iteration & (begins.shape[1] - 1)
        for t in tables:
            own = entries[begins[t, column] : begins[t + 1, column]]
            rows.update(own[places[own] <= 0].tolist())
    return len(rows)


@kernel
def mark_needed(
    tables: Int64s, begins: Int64s, first: int, last: int, entries: Int32s, places: Int32s, marks: Int32s
) -> None:
    """Mark the slots of rows of the window's batches `first` to `last` with `first`. The tables share slots."""
    mask = begins.shape[1] - 1
    for iteration in range(first, last + 1):
        column = iteration & mask
        for t in tables:
            for i in range(begins[t, column], begins[t + 1, column]):
                place = places[entries[i]]
                if place > 0:
                    marks[place - 1] = first


def mark_needed_by_numpy(
    tables: Int64s, begins: Int64s, first: int, last: int, entries: Int32s, places: Int32s, marks: Int32s
) -> None:
    """Twin of `mark_needed`."""
    for column in np.arange(first, last + 1) & (begins.shape[1] - 1):
        for t in tables:
            found = places[entries[begins[t, column] : begins[t + 1, column]]]
            marks[found[found > 0] - 1] = first


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


def choose_ways_by_numpy(
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
