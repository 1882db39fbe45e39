"""What the kernels of `bagpipe.kernels.partition` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.kernels.oracle import HALF
from bagpipe.kernels.partition import (
    FETCHED,
    LATER,
    LEAVES,
    NEVER,
    NEXT,
    NOW,
    OWNER,
    SHORT,
    Costs,
    Int32s,
    Int64s,
    Masks,
    Ranks,
    _places,
)


def define_follow(
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
    table = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    for i in np.flatnonzero(~fetched & (costs[table] < NEVER)).tolist():
        mine, after, later = (int(part[i]) for part in (users, next_users, later_users))
        owner = define_better_owner(int(holders[i]), mine, after, later, float(costs[table[i]]), int(slots[i]))
        words[i] = (words[i] & ~OWNER) | (owner + 1)
    state[places] = words
    owners[:], freed[:] = (words & OWNER) - 1, words >> HALF
    kinds[:] = np.where(fetched, FETCHED, np.where(before >= 0, NEXT, LATER))
    begins = np.repeat(bounds_before[:-1], np.diff(bounds))
    phases_before[(begins + before)[kinds == NEXT]] = NOW
    takers[:] = bits[owners[fetched]] | (users[fetched] * users.dtype.type(users_read))
    return int(fetched.sum())


def define_better_owner(holder: int, users: int, after: int, later: int, cost: float, number: int) -> int:
    """Twin of `better_owner`."""
    uses = (after,) if cost < SHORT else (after, later)

    def worth(rank: int) -> int:
        return (users >> rank & 1) + 2 * sum(int(use) >> rank & 1 for use in uses)

    others = [rank for rank in range(64) if users >> rank & 1 and rank != holder and worth(rank) - worth(holder) > cost]
    most = max(map(worth, others), default=0)
    equals = [rank for rank in others if worth(rank) == most]
    return equals[number % len(equals)] if equals else holder
