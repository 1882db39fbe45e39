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
from bagpipe.kernels.intrinsics import FAR, index, lowest, prefetch
from bagpipe.kernels.oracle import HALF
from bagpipe.kernels.sharing import one_of

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Masks = NDArray[Any]
"""Unsigned, one bit a trainer."""
Ranks = NDArray[np.int8]
Costs = NDArray[np.float64]

SHARED = -1
"""The owner of a row that all trainers have."""
OWNER = 0xFF
LEAVES = 0x100
"""The tenant is evicted by the plan that is followed just now."""
FETCHED, NEXT, LATER = 0, 1, 2
"""How a row comes to its users: from the store; after an update in the iteration before; after an earlier one."""
NEVER = np.inf
"""The cost of a move of rows that keep their owner."""
NOW, AFTERWARDS = 0, 1
"""When a row is updated: before the next iteration, which uses it; or beside that one."""
SHORT = 0.5
"""Where a move costs less than this part of a vector, only a row's next use counts: it may move again after that."""
_ONE = np.uint64(1)


@kernel
def better_owner(holder: int, users: Any, after: Any, later: Any, cost: float, number: int) -> int:
    """Who should own a row from this use on: who has it now, or a user of it for whom the next two uses speak more.

    A user who becomes the owner is sent the vector anyway. If the old one does not use the row, a gradient less is sent
    now; at a later use of the new one a vector and a gradient less, and at one of the old one that much more. All in
    vectors, as is the cost. Among equals a number decides, which spreads them evenly.
    """
    had = np.uint64(holder)
    if cost < SHORT:
        later = np.uint64(0)
    gain = 0 if (users >> had) & _ONE else 1
    gain -= 2 * int((after >> had) & _ONE) + 2 * int((later >> had) & _ONE)
    best, equals, left = cost, np.uint64(0), users & ~(_ONE << had)
    if gain + 4 <= cost:
        return holder
    while left:
        rank = np.uint64(lowest(left))
        left &= left - _ONE
        own = gain + 2 * int((after >> rank) & _ONE) + 2 * int((later >> rank) & _ONE)
        if own > best:
            best, equals = float(own), _ONE << rank
        elif own == best and equals:
            equals |= _ONE << rank
    return one_of(equals, number) if equals else holder


def mark_leaving(bounds: Int64s, slots: Int32s, bases: Int64s, state: Int64s) -> None:
    """Mark the rows that a plan evicts."""
    state[_places(bounds, slots, bases)] |= LEAVES


@kernel
def follow(
    bounds: Int64s,
    slots: Int32s,
    users: Masks,
    next_users: Masks,
    later_users: Masks,
    before: Int32s,
    bounds_before: Int64s,
    fetch_bounds: Int64s,
    fetch_slots: Int32s,
    fetch_freed: Int32s,
    homes: Ranks,
    bits: Masks,
    users_read: bool,
    costs: Costs,
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
    A row that LEAVES and has one user is that user's. One that was in the cache may change its owner, where that is
    worth its table's cost; the last one, who holds its newest vector, sends it to its users as ever. Rows that are
    fetched come in the order of rows; returns how many were met.
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
            holder = owner = (word & OWNER) - 1
            if fetched:
                state[place] = word
                takers[f] = bits[owner] | users[i] if users_read else bits[owner]
                f += 1
                kinds[i] = FETCHED
            elif before[i] >= 0:
                kinds[i] = NEXT
                phases_before[index(bounds_before[t] + before[i])] = NOW
            else:
                kinds[i] = LATER
            if costs[t] < NEVER and not fetched:
                owner = better_owner(
                    holder, mine, np.uint64(next_users[i]), np.uint64(later_users[i]), costs[t], slots[i]
                )
                if owner != holder:
                    state[place] = (word & ~OWNER) | (owner + 1)
            holders[i], owners[i] = holder, owner
            freed[i] = word >> HALF
        met += f - fetch_bounds[t]
    return met


def writers_of(bounds: Int64s, slots: Int32s, bases: Int64s, state: Int64s, trainers: int) -> Ranks:
    """The trainers that write rows of the cache to the store: their owners, or what the slot says if all have them.

    They are no longer marked.
    """
    places = _places(bounds, slots, bases)
    owners = (state[places] & OWNER) - 1
    state[places] &= ~LEAVES
    return np.where(owners == SHARED, slots % trainers, owners).astype(np.int8)


def _places(bounds: Int64s, slots: Int32s, bases: Int64s) -> Int64s:
    """Where the slots of a flat list are noted."""
    return np.repeat(bases, np.diff(bounds)) + slots
