"""What the kernels of `bagpipe.kernels.plan` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.kernels.plan import HALF, LOWER, Int32s, Int64s, Stays


def define_count_outside(ids: Int64s, rows: int) -> int:
    """Twin of `count_outside`."""
    return int(((ids < 0) | (ids >= rows)).sum())


def define_find_uniques(
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
    """Twin of `find_uniques`."""
    stamp = iteration + 1
    sorted_entries, first = np.unique(ids + base, return_index=True)
    fresh = (ids + base)[np.sort(first[words[sorted_entries] >> HALF != stamp])]
    total = count + len(fresh)
    entries[start + count : start + total] = fresh
    previous[start + count : start + total] = words[fresh]
    words[fresh] = (stamp << HALF) | np.arange(count, total)
    inverse[position : position + len(ids)] = words[ids + base] & LOWER
    return total


def define_count_gaps(
    tables: Int64s, starts: Int64s, counts: Int64s, previous: Int64s, iteration: int, window: int, gaps: Int64s
) -> None:
    """Twin of `count_gaps`."""
    for t in tables:
        words = previous[starts[t] : starts[t] + counts[t]]
        gap = np.where(words == 0, 0, iteration + 1 - (words >> HALF))
        gaps[t, : window + 1] = np.bincount(gap[gap <= window], minlength=window + 1)


def define_link(
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
    """Twin of `link`."""
    mask = begins.shape[1] - 1
    for t in tables:
        here = slice(starts[t], starts[t] + counts[t])
        there = slice(begins[t, iteration & mask], begins[t, iteration & mask] + counts[t])
        window_entries[there] = entries[here]
        stays[there] = default
        gap = iteration + 1 - (previous[here] >> HALF)
        for g in range(1, window + 1):
            staying = previous[here][gap == g][: quotas[t, g] if limited else None] & LOWER
            stays[begins[t, (iteration - g) & mask] + staying] = g
            quotas[t, g] -= len(staying) if limited else 0


def define_look_up(
    tables: Int64s,
    bounds: Int64s,
    entries: Int32s,
    stays: Stays,
    places: Int32s,
    found: Int32s,
    misses: Int64s,
    leaves: Int64s,
) -> None:
    """Twin of `look_up`."""
    for t in tables:
        here = slice(bounds[t], bounds[t + 1])
        found[here] = places[entries[here]]
        misses[t] = (found[here] <= 0).sum()
        leaves[t] = (stays[here] == 0).sum()


def define_settle(
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
    """Twin of `settle`."""
    for t in tables:
        here = slice(bounds[t], bounds[t + 1])
        fetch, evict = slice(fetch_bounds[t], fetch_bounds[t + 1]), slice(evict_bounds[t], evict_bounds[t + 1])
        place, entry, absent, leaving = slots[here], entries[here], slots[here] <= 0, stays[here] == 0
        ids[here] = keys[entry] if len(keys) else entry - bases[t]
        fetch_ids[fetch] = ids[here][absent]
        fetch_after[fetch] = np.maximum(-place[absent] - 1, acknowledged)
        place[absent] = fetch_slots[fetch] + 1
        places[entry] = place
        tenants[tenant_begins[t] + fetch_slots[fetch]] = (t << HALF) | entry[absent].astype(np.int64)
        place -= 1
        evict_ids[evict] = ids[here][leaving]
        evict_slots[evict] = place[leaving]
        places[entry[leaving]] = -(iteration + 1)
