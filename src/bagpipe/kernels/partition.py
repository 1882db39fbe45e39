"""The loops that follow plans through the slots: who owns each row, how it comes to its users, who reads and writes it.

All slot spaces lie end to end, table t's at bases[t]. `state` has a word for each slot: in the upper half the plan that
freed it for its tenant, in the lower the tenant's owner + 1 (0: all trainers have it) and LEAVES. Lists of rows are
flat over tables, in that order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import kernel
from bagpipe.kernels.masks import index, lowest
from bagpipe.kernels.plan import HALF
from bagpipe.kernels.prefetch import FAR, prefetch
from bagpipe.kernels.sharing import one_of

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Masks = NDArray[Any]
"""Unsigned, one bit a trainer."""
Ranks = NDArray[np.int8]
Flags = NDArray[np.bool_]

SHARED = -1
"""The owner of a row that all trainers have."""
OWNER = 0xFF
LEAVES = 0x100
"""The tenant is evicted by the plan that is followed just now."""
FETCHED, NEXT, LATER = 0, 1, 2
"""How a row comes to its users: from the store; after an update in the iteration before; after an earlier one."""
NOW, AFTERWARDS = 0, 1
"""When a row is updated: before the next iteration, which uses it; or beside that one."""
_ONE = np.uint64(1)


@kernel
def mark_leaving(bounds: Int64s, slots: Int32s, bases: Int64s, state: Int64s) -> None:
    """Mark the rows that a plan evicts."""
    for t in range(bounds.shape[0] - 1):
        last = bounds[t + 1] - 1
        for i in range(bounds[t], bounds[t + 1]):
            prefetch(state, bases[t] + slots[min(i + FAR, last)])
            state[index(bases[t] + slots[i])] |= LEAVES


def mark_leaving_by_numpy(bounds: Int64s, slots: Int32s, bases: Int64s, state: Int64s) -> None:
    """Twin of `mark_leaving`."""
    state[_places(bounds, slots, bases)] |= LEAVES


@kernel
def follow(
    bounds: Int64s,
    slots: Int32s,
    users: Masks,
    before: Int32s,
    bounds_before: Int64s,
    fetch_bounds: Int64s,
    fetch_slots: Int32s,
    fetch_freed: Int32s,
    homes: Ranks,
    bits: Masks,
    users_read: bool,
    moving: Flags,
    bases: Int64s,
    state: Int64s,
    holders: Ranks,
    owners: Ranks,
    kinds: Ranks,
    freed: Int32s,
    phases_before: Ranks,
    takers: Masks,
) -> int:
    """Let a plan take its rows: those that it fetches move in, owned by their homes. About 6 ns a row.

    Finds who owns each row and how it comes to its users; the trainers that read it from the store (its owner, with its
    users if they read too; bits[SHARED] stands for all); and which rows of the plan before have to be updated NOW.
    A row that LEAVES and has one user is that user's. One of a table that is moving always belongs to one of its users;
    its last owner, who holds its newest vector, sends it to them as ever. `homes` are left as those who own the rows
    that are fetched. These come in the order of rows; returns how many were met.
    """
    met = 0
    for t in range(bounds.shape[0] - 1):
        f, last = fetch_bounds[t], bounds[t + 1] - 1
        for row in range(bounds[t], bounds[t + 1]):
            prefetch(state, bases[t] + slots[index(min(row + FAR, last))])
            i = index(row)
            place = index(bases[t] + slots[i])
            word = state[place]
            mine = np.uint64(users[i])
            fetched = f < fetch_bounds[t + 1] and fetch_slots[index(f)] == slots[i]
            if fetched:
                word = (np.int64(fetch_freed[f]) << HALF) | (word & LEAVES) | (homes[f] + 1)
            if word & LEAVES and mine & (mine - _ONE) == np.uint64(0):
                word = (word & ~OWNER) | (lowest(mine) + 1)
                state[place] = word
            holders[i] = (word & OWNER) - 1
            if moving[t] and (mine >> np.uint64((word & OWNER) - 1)) & _ONE == np.uint64(0):
                word = (word & ~OWNER) | (one_of(mine, slots[i]) + 1)
                state[place] = word
            owner = (word & OWNER) - 1
            if fetched:
                state[place] = word
                homes[f] = owner
                takers[f] = bits[owner] | users[i] if users_read else bits[owner]
                f += 1
                kinds[i] = FETCHED
            elif before[i] >= 0:
                kinds[i] = NEXT
                phases_before[index(bounds_before[t] + before[i])] = NOW
            else:
                kinds[i] = LATER
            owners[i] = owner
            freed[i] = word >> HALF
        met += f - fetch_bounds[t]
    return met


def follow_by_numpy(
    bounds: Int64s,
    slots: Int32s,
    users: Masks,
    before: Int32s,
    bounds_before: Int64s,
    fetch_bounds: Int64s,
    fetch_slots: Int32s,
    fetch_freed: Int32s,
    homes: Ranks,
    bits: Masks,
    users_read: bool,
    moving: Flags,
    bases: Int64s,
    state: Int64s,
    holders: Ranks,
    owners: Ranks,
    kinds: Ranks,
    freed: Int32s,
    phases_before: Ranks,
    takers: Masks,
) -> int:
    """Twin of `follow`."""
    places, fetched_places = _places(bounds, slots, bases), _places(fetch_bounds, fetch_slots, bases)
    fetched = np.isin(places, fetched_places)
    assert np.array_equal(places[fetched], fetched_places), "the twin knows no other order"
    words = state[places]
    words[fetched] = (fetch_freed.astype(np.int64) << HALF) | (words[fetched] & LEAVES) | (homes + 1)
    single = users & (users - users.dtype.type(1)) == 0
    own = single & (words & LEAVES != 0)
    words[own] = (words[own] & ~OWNER) | (np.log2(users[own].astype(np.float64)).astype(np.int64) + 1)
    holders[:] = (words & OWNER) - 1
    for i in np.flatnonzero(np.repeat(moving, np.diff(bounds))):
        ranks = [rank for rank in range(64) if int(users[i]) >> rank & 1]
        if holders[i] not in ranks:
            words[i] = (words[i] & ~OWNER) | (ranks[slots[i] % len(ranks)] + 1)
    state[places] = words
    owners[:], freed[:] = (words & OWNER) - 1, words >> HALF
    kinds[:] = np.where(fetched, FETCHED, np.where(before >= 0, NEXT, LATER))
    begins = np.repeat(bounds_before[:-1], np.diff(bounds))
    phases_before[(begins + before)[kinds == NEXT]] = NOW
    homes[:] = owners[fetched]
    takers[:] = bits[owners[fetched]] | (users[fetched] * users.dtype.type(users_read))
    return int(fetched.sum())


@kernel
def writers_of(bounds: Int64s, slots: Int32s, bases: Int64s, state: Int64s, trainers: int, writers: Ranks) -> None:
    """The trainers that write rows of the cache to the store: their owners, or what the slot says if all have them.

    They are no longer marked.
    """
    for t in range(bounds.shape[0] - 1):
        last = bounds[t + 1] - 1
        for i in range(bounds[t], bounds[t + 1]):
            prefetch(state, bases[t] + slots[min(i + FAR, last)])
            place = index(bases[t] + slots[i])
            owner = (state[place] & OWNER) - 1
            writers[i] = slots[i] % trainers if owner == SHARED else owner
            state[place] &= ~LEAVES


def writers_of_by_numpy(
    bounds: Int64s, slots: Int32s, bases: Int64s, state: Int64s, trainers: int, writers: Ranks
) -> None:
    """Twin of `writers_of`."""
    places = _places(bounds, slots, bases)
    owners = (state[places] & OWNER) - 1
    writers[:] = np.where(owners == SHARED, slots % trainers, owners)
    state[places] &= ~LEAVES


def _places(bounds: Int64s, slots: Int32s, bases: Int64s) -> Int64s:
    """Where the slots of a flat list are noted."""
    return np.repeat(bases, np.diff(bounds)) + slots
