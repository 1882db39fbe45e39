"""The loops of the oracle: from ids to unique rows, stays, slots, fetches and evictions, each in one walk.

A row's *word* says when it was last read: iteration + 1 in the upper half, its index in that batch's unique rows in the
lower (0: never). A row's *place* says where it is: slot + 1 while it is in the cache, -(y + 1) since plan y evicted it,
0 if it never was there. Lists are flat over tables; in the window's arrays, table t of the batch in ring column c is at
begins[t, c] to begins[t + 1, c].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import kernel
from bagpipe.kernels.prefetch import FAR, prefetch

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Stays = NDArray[np.uint16]

HALF = 32
LOWER = 0xFFFFFFFF
KEEP = 65535
"""A stay without a known end; 0: leaves after this batch; otherwise the number of iterations until the next use."""


@kernel
def count_outside(ids: Int64s, rows: int) -> int:
    """How many ids are not in [0, rows). No early exit, so that it runs at the speed of memory."""
    outside = 0
    for i in range(ids.shape[0]):
        outside += (ids[i] < 0) | (ids[i] >= rows)
    return outside


@kernel
def find_uniques(
    ids: Int64s,
    base: int,
    words: Int64s,
    iteration: int,
    entries: Int32s,
    previous: Int64s,
    start: int,
    count: int,
    inverse: Int32s,
    position: int,
) -> int:
    """Append the rows of a feature not yet seen in this batch, with their former words; point each id to its row.

    `count` rows of the table stand already at entries[start:]; returns how many there are now. About 4 ns an id.
    """
    stamp = iteration + 1
    num_ids = ids.shape[0]
    for i in range(min(FAR, num_ids)):
        prefetch(words, base + ids[i])
    for i in range(num_ids):
        prefetch(words, base + ids[min(i + FAR, num_ids - 1)])
        entry = base + ids[i]
        word = words[entry]
        if word >> HALF != stamp:
            entries[start + count] = entry
            previous[start + count] = word
            word = (stamp << HALF) | count
            words[entry] = word
            count += 1
        inverse[position + i] = word & LOWER
    return count


@kernel
def count_gaps(
    tables: Int64s, starts: Int64s, counts: Int64s, previous: Int64s, iteration: int, window: int, gaps: Int64s
) -> None:
    """gaps[t, g]: rows of table t whose previous use lies g batches back, g <= window; gaps[t, 0]: rows never seen."""
    for t in tables:
        gaps[t, : window + 1] = 0
        for i in range(starts[t], starts[t] + counts[t]):
            gap = iteration + 1 - (previous[i] >> HALF)
            if gap <= window:
                gaps[t, gap] += 1
            elif previous[i] == 0:
                gaps[t, 0] += 1


@kernel
def link(
    tables: Int64s,
    starts: Int64s,
    counts: Int64s,
    entries: Int32s,
    previous: Int64s,
    iteration: int,
    window: int,
    quotas: Int64s,
    limited: bool,
    default: int,
    begins: Int64s,
    window_entries: Int32s,
    stays: Stays,
) -> None:
    """Move a batch's unique rows into the window and tell their previous uses there that they stay until this one.

    If stays are limited, at most quotas[t, g] rows of table t may stay over g iterations: the first of the batch.
    """
    mask = begins.shape[1] - 1
    column = iteration & mask
    for t in tables:
        target = begins[t, column] - starts[t]
        for i in range(starts[t], starts[t] + counts[t]):
            window_entries[target + i] = entries[i]
            stays[target + i] = default
        for i in range(starts[t], starts[t] + counts[t]):
            gap = iteration + 1 - (previous[i] >> HALF)
            there = begins[t, (iteration - gap) & mask] + (previous[i] & LOWER)
            if not limited:
                # Without a branch: a row that is not in the window sets its own stay, to what it is already.
                stays[there if gap <= window else target + i] = gap if gap <= window else default
            elif gap <= window and quotas[t, gap] > 0:
                quotas[t, gap] -= 1
                stays[there] = gap


@kernel
def look_up(
    tables: Int64s,
    bounds: Int64s,
    entries: Int32s,
    stays: Stays,
    places: Int32s,
    found: Int32s,
    misses: Int64s,
    leaves: Int64s,
) -> None:
    """The place of each row of a batch; how many of each table are not in the cache, and how many leave after it."""
    for t in tables:
        absent = leaving = 0
        last = bounds[t + 1] - 1
        for i in range(bounds[t], min(bounds[t] + FAR, bounds[t + 1])):
            prefetch(places, entries[i])
        for i in range(bounds[t], bounds[t + 1]):
            prefetch(places, entries[min(i + FAR, last)])
            place = places[entries[i]]
            found[i] = place
            absent += place <= 0
            leaving += stays[i] == 0
        misses[t] = absent
        leaves[t] = leaving


@kernel
def settle(
    tables: Int64s,
    bounds: Int64s,
    entries: Int32s,
    stays: Stays,
    places: Int32s,
    bases: Int64s,
    keys: Int64s,
    iteration: int,
    acknowledged: int,
    ids: Int64s,
    slots: Int32s,
    fetch_bounds: Int64s,
    fetch_ids: Int64s,
    fetch_slots: Int32s,
    fetch_after: Int32s,
    evict_bounds: Int64s,
    evict_ids: Int64s,
    evict_slots: Int32s,
    tenant_begins: Int64s,
    tenants: Int64s,
) -> None:
    """Turn the places found into slots: rows that are absent take theirs from fetch_slots, rows that leave give it up.

    An entry's id is keys[entry], or entry - bases[t] where there are no keys. A fetch waits for the plan that evicted
    its row, and at least for iteration `acknowledged`.
    """
    mapped = keys.shape[0] > 0
    for t in tables:
        fetched = fetch_bounds[t]
        evicted = evict_bounds[t]
        last, last_fetch = bounds[t + 1] - 1, fetch_bounds[t + 1] - 1
        for i in range(bounds[t], bounds[t + 1]):
            prefetch(places, entries[min(i + FAR, last)])
            if mapped:
                prefetch(keys, entries[min(i + FAR, last)])
            place = slots[i]
            entry = entries[i]
            row = keys[entry] if mapped else entry - bases[t]
            if place <= 0:
                prefetch(tenants, tenant_begins[t] + fetch_slots[min(fetched + FAR, last_fetch)])
                fetch_ids[fetched] = row
                fetch_after[fetched] = max(-place - 1, acknowledged)
                place = fetch_slots[fetched] + 1
                fetched += 1
                places[entry] = place
                tenants[tenant_begins[t] + place - 1] = (t << HALF) | entry
            ids[i] = row
            slots[i] = place - 1
            if stays[i] == 0:
                evict_ids[evicted] = row
                evict_slots[evicted] = place - 1
                evicted += 1
                places[entry] = -(iteration + 1)
