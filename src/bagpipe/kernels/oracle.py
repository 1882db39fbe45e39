"""The loops of the oracle, each one call for all tables of a shard: `read` a batch; `look_up` and `settle` a plan.

What is known of a row is two numbers. Its *last use* says when it was last read: iteration + 1 in the upper half, its
index among that batch's unique rows of its table in the lower (0: never). Its *location* says where it is: slot + 1
while it is in the cache, -(y + 1) since plan y evicted it, 0 if it never was there.

A shard's tables are numbered k = 0, 1, ... in its own arrays, and t = tables[k] in those of all shards. In the window's
rings, table k of the batch in column c is at begins[k, c] to begins[k + 1, c].
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bagpipe.arrays import Int32s, Int64s, NextUses, UInt64s
from bagpipe.kernels import kernel
from bagpipe.kernels.intrinsics import FAR, index, int64_at, prefetch
from bagpipe.kernels.window_map import Numbers, number, thin

HALF = 32
LOWER = 0xFFFFFFFF
_ANY_ROW = np.uint64(2**63 - 1)
KEEP = 65535
"""A next use that is not known, of a row that stays; 0: leaves after this batch; else in so many iterations."""


class RowState(NamedTuple):
    """What is known of the rows of a shard's tables."""

    last_use: Int64s
    location: Int32s
    bases: Int64s
    """[t]: where the rows of table t begin, a row being its id + base; 0 for mapped tables."""
    numbers: Numbers
    """The ids of rows of mapped tables, which are numbered as they come."""


class Rings(NamedTuple):
    """The batches of a shard that have no plan yet."""

    tables: Int64s
    begins: Int64s
    rows: Int32s
    next_use: NextUses


class Batch(NamedTuple):
    """The ids of one batch, feature by feature in the order of tables, and what `read` finds out about them."""

    addresses: UInt64s
    """Of each feature where its ids are in memory, as 64-bit numbers."""
    positions: Int64s
    """Where those of each feature begin in `inverse`; one more for the end."""
    features: Int64s
    """[t]: the first feature of table t; one more for the end."""
    last_ids: UInt64s
    """[t]: no id of table t is larger, negative ones being the largest of all."""
    inverse: Int32s
    """Of each id the index of its row among the unique ones of its table."""
    counts: Int64s
    """[t]: unique rows."""
    gaps: Int64s
    """[t, g]: rows of table t whose previous use lies g batches back, within the window; [t, 0]: rows never seen;
    behind the last of the window rows that are idle in the cache, from `find_idle`."""


class Rows(NamedTuple):
    """The rows of a plan: ids and slots of all tables, table by table."""

    ids: Int64s
    slots: Int32s
    bounds: Int64s


@kernel
def read(state: RowState, rings: Rings, batch: Batch, previous: Int64s, iteration: int, window: int, keep: int) -> int:
    """Enter the unique rows of a batch into the rings behind `window` others, and tell their previous uses there.

    The caller has set begins[0, column] to a stretch with room for all ids. A new use is noted as `keep` (0 or KEEP),
    and `previous` gets the last use that each row had. Returns -1, or the number of a feature with an id that is out of
    range: then nothing was changed. About 5 ns an id.
    """
    tables, begins, rows, next_use = rings.tables, rings.begins, rings.rows, rings.next_use
    last_use, inverse, gaps = state.last_use, batch.inverse, batch.gaps
    mask, stamp = begins.shape[1] - 1, iteration + 1
    column, mapped = iteration & mask, state.numbers.slots.shape[0] > 0
    begin = at = begins[0, column]
    for k in range(tables.shape[0]):
        t, base, first = tables[k], state.bases[tables[k]], at
        begins[k, column] = first
        gaps[t, : window + 2] = 0
        for f in range(batch.features[t], batch.features[t + 1]):
            ids, position = batch.addresses[f], batch.positions[f]
            found = inverse[position : batch.positions[f + 1]]
            count, last = found.shape[0], batch.last_ids[t]
            if mapped:
                count = thin(state.numbers, ids, found)
                number(state.numbers, t, last, state.numbers.keys[:count])
                found, ids, last = state.numbers.found, np.uint64(state.numbers.given.ctypes.data), _ANY_ROW
            for i in range(min(FAR, count)):
                if np.uint64(int64_at(ids, i)) <= last:
                    prefetch(last_use, base + int64_at(ids, i))
            for i in range(count):
                ahead = int64_at(ids, min(i + FAR, count - 1))
                if np.uint64(ahead) <= last:
                    prefetch(last_use, base + ahead)
                given = int64_at(ids, i)
                if np.uint64(given) > last:
                    begins[k + 1 :, column] = at
                    unread(state, rings, previous, iteration, window, keep)
                    return int(f)
                row = index(base + given)
                use = last_use[row]
                if use >> HALF != stamp:
                    rows[index(at)] = row
                    next_use[index(at)] = keep
                    previous[index(at - begin)] = use
                    gap = stamp - (use >> HALF)
                    if gap <= window:
                        gaps[t, gap] += 1
                        next_use[index(begins[k, (iteration - gap) & mask] + (use & LOWER))] = gap
                    elif use == 0:
                        gaps[t, 0] += 1
                    use = (stamp << HALF) | (at - first)
                    last_use[row] = use
                    at += 1
                found[index(i)] = use & LOWER
            if mapped:
                for i in range(position, batch.positions[f + 1]):
                    inverse[index(i)] = found[index(inverse[index(i)])]
        batch.counts[t] = at - first
    begins[tables.shape[0], column] = at
    return -1


@kernel
def unread(state: RowState, rings: Rings, previous: Int64s, iteration: int, window: int, keep: int) -> None:
    """Undo what `read` has noted of a batch."""
    begins = rings.begins
    mask = begins.shape[1] - 1
    column = iteration & mask
    for k in range(rings.tables.shape[0]):
        for at in range(begins[k, column], begins[k + 1, column]):
            use = previous[at - begins[0, column]]
            state.last_use[rings.rows[at]] = use
            gap = iteration + 1 - (use >> HALF)
            if gap <= window:
                rings.next_use[begins[k, (iteration - gap) & mask] + (use & LOWER)] = keep


@kernel
def refuse(rings: Rings, previous: Int64s, iteration: int, window: int, keep: int, quotas: Int64s) -> None:
    """Note `keep` again at the previous use of rows of the batch that was just read, where too many were to stay.

    At most quotas[t, g] rows of table t may stay over g iterations: the first of the batch.
    """
    begins = rings.begins
    mask = begins.shape[1] - 1
    column = iteration & mask
    for k in range(rings.tables.shape[0]):
        t = rings.tables[k]
        for at in range(begins[k, column], begins[k + 1, column]):
            use = previous[index(at - begins[0, column])]
            gap = iteration + 1 - (use >> HALF)
            if gap <= window:
                if quotas[t, gap] > 0:
                    quotas[t, gap] -= 1
                else:
                    rings.next_use[index(begins[k, (iteration - gap) & mask] + (use & LOWER))] = keep


@kernel
def find_idle(
    state: RowState, rings: Rings, batch: Batch, previous: Int64s, iteration: int, window: int, slots: Int32s
) -> None:
    """List the slots of the rows of the batch just read that are in the cache though no batch of the window uses them.

    Those of table k come from its first row's position in the batch on; their number is behind its other gaps.
    """
    begins = rings.begins
    column = iteration & (begins.shape[1] - 1)
    begin, first = begins[0, column], iteration - window
    for k in range(rings.tables.shape[0]):
        end, out = begins[k + 1, column], begins[k, column] - begin
        for at in range(begins[k, column], end):
            ahead = min(at + FAR, end - 1)
            if previous[index(ahead - begin)] >> HALF <= first:
                prefetch(state.location, rings.rows[index(ahead)])
            if previous[index(at - begin)] >> HALF <= first:
                slot = state.location[index(rings.rows[index(at)])] - 1
                if slot >= 0:
                    slots[index(out)] = slot
                    out += 1
        batch.gaps[rings.tables[k], window + 1] = out - (begins[k, column] - begin)


@kernel
def grant_idle(
    rings: Rings, iteration: int, slots: Int32s, quotas: Int64s, slot_begins: Int64s, idle_since: Int32s
) -> None:
    """Rows that `find_idle` has listed are idle no more: the first quotas[t] of table t."""
    begins = rings.begins[:, iteration & (rings.begins.shape[1] - 1)]
    for k in range(rings.tables.shape[0]):
        t, first = rings.tables[k], begins[k] - begins[0]
        for n in range(first, first + quotas[t]):
            idle_since[slot_begins[t] + slots[n]] = -1


@kernel
def look_up(
    state: RowState,
    rings: Rings,
    iteration: int,
    rows: Rows,
    next_use: NextUses,
    absent: Int32s,
    num_absent: Int64s,
    num_leaving: Int64s,
) -> None:
    """The rows of a batch: ids, next uses, and slots as far as they are in the cache; otherwise location - 1.

    Lists of each table the positions of those that are absent, from bounds[t] on; counts them, and rows that leave.
    """
    begins, location, bounds = rings.begins, state.location, rows.bounds
    column = iteration & (begins.shape[1] - 1)
    mapped = state.numbers.slots.shape[0] > 0
    for k in range(rings.tables.shape[0]):
        t = rings.tables[k]
        begin, end, base = begins[k, column], begins[k + 1, column], state.bases[t]
        out = missing = bounds[t]
        leaving = 0
        for at in range(begin, min(begin + FAR, end)):
            prefetch(location, rings.rows[at])
        for at in range(begin, end):
            ahead = rings.rows[index(min(at + FAR, end - 1))]
            prefetch(location, ahead)
            row = rings.rows[index(at)]
            slot = location[index(row)] - 1
            rows.ids[index(out)] = state.numbers.ids[index(row)] if mapped else row - base
            rows.slots[index(out)] = slot
            use = rings.next_use[index(at)]
            next_use[index(out)] = use
            leaving += use == 0
            absent[index(missing)] = out
            missing += slot < 0
            out += 1
        num_absent[t] = missing - bounds[t]
        num_leaving[t] = leaving


@kernel
def settle(
    state: RowState,
    rings: Rings,
    iteration: int,
    acknowledged: int,
    rows: Rows,
    next_use: NextUses,
    absent: Int32s,
    fetch: Rows,
    fetch_after: Int32s,
    evict: Rows,
    slot_begins: Int64s,
    row_in_slot: Int64s,
) -> None:
    """Give the absent rows their slots, those of `fetch`, and take them from the rows that leave, which `evict` lists.

    A fetch waits for the plan that evicted its row, and at least for iteration `acknowledged`. row_in_slot has the
    table in the upper half and the row in the lower; the slots of table t begin there at slot_begins[t].
    """
    column = iteration & (rings.begins.shape[1] - 1)
    for k in range(rings.tables.shape[0]):
        t = rings.tables[k]
        first = rings.begins[k, column] - rows.bounds[t]
        begin, last = slot_begins[t], fetch.bounds[t + 1] - 1
        missing = rows.bounds[t]
        for at in range(fetch.bounds[t], fetch.bounds[t + 1]):
            prefetch(row_in_slot, begin + fetch.slots[index(min(at + FAR, last))])
            out = absent[index(missing)]
            missing += 1
            row, slot = rings.rows[index(first + out)], fetch.slots[index(at)]
            fetch.ids[index(at)] = rows.ids[index(out)]
            fetch_after[index(at)] = max(-rows.slots[index(out)] - 2, acknowledged)
            rows.slots[index(out)] = slot
            state.location[index(row)] = slot + 1
            row_in_slot[index(begin + slot)] = (t << HALF) | row
        at = evict.bounds[t]
        if at < evict.bounds[t + 1]:
            for out in range(rows.bounds[t], rows.bounds[t + 1]):
                if next_use[index(out)] == 0:
                    evict.ids[index(at)] = rows.ids[index(out)]
                    evict.slots[index(at)] = rows.slots[index(out)]
                    state.location[index(rings.rows[index(first + out)])] = -(iteration + 1)
                    at += 1


@kernel
def rest(
    slots: Int32s, next_use: NextUses, iteration: int, idle_since: Int32s, queue: Int32s, end: int
) -> tuple[int, int]:
    """A batch has its rows in these slots: those of unknown next use are idle from now on, the others no more.

    Idle ones go to the end of the queue (slots and iterations). Returns how many more are idle, and the end.
    """
    more, last = 0, slots.shape[0] - 1
    for i in range(slots.shape[0]):
        prefetch(idle_since, slots[index(min(i + FAR, last))])
        slot = index(slots[index(i)])
        more -= idle_since[slot] >= 0
        if next_use[index(i)] == KEEP:
            idle_since[slot] = iteration
            queue[0, end] = slot
            queue[1, end] = iteration
            end += 1
            more += 1
        else:
            idle_since[slot] = -1
    return more, end


@kernel
def pop_idle(queue: Int32s, begin: int, end: int, idle_since: Int32s, slots: Int32s) -> int:
    """Fill `slots` with those idle for longest, which are idle no more; where the queue begins now."""
    count = 0
    while count < slots.shape[0] and begin < end:
        slot = queue[0, begin]
        if idle_since[slot] == queue[1, begin]:  # else it was used since
            slots[count] = slot
            idle_since[slot] = -1
            count += 1
        begin += 1
    assert count == slots.shape[0]
    return begin


@kernel
def list_tenants(
    state: RowState,
    shard: int,
    shard_of: Int64s,
    slots: Int32s,
    begin: int,
    row_in_slot: Int64s,
    plan: int,
    at: Int64s,
    rows: Rows,
) -> None:
    """Append the rows in these slots, which begin at `begin`, to the lists of their tables, and note that a plan evicts
    them. Of tables of one shard; at[t] is the end of each list."""
    mapped, last = state.numbers.slots.shape[0] > 0, slots.shape[0] - 1
    for i in range(slots.shape[0]):
        prefetch(row_in_slot, begin + slots[index(min(i + FAR, last))])
        code = row_in_slot[index(begin + slots[index(i)])]
        t, row = code >> HALF, code & LOWER
        if shard_of[t] == shard:
            rows.ids[index(at[t])] = state.numbers.ids[index(row)] if mapped else row - state.bases[t]
            rows.slots[index(at[t])] = slots[index(i)]
            at[t] += 1
            state.location[index(row)] = -(plan + 1)
