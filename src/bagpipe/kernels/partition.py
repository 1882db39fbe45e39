"""The loops that divide a plan among trainers: who fetches, updates and writes each row, and who sends it to whom.

All slot spaces lie end to end, table t's at bases[t]. `state` has four numbers for each slot: the iteration that last
used its tenant (FRESH: none yet), the tenant's index among that batch's rows (-1: fetched, not used),
the plan that freed the slot for it, and its owner (SHARED: all trainers). Lists are flat over tables, in that order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import inlined, kernel

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Masks = NDArray[Any]
Ranks = NDArray[np.int8]
Flags = NDArray[np.bool_]

LAST, INDEX, FREED, OWNER = range(4)
FRESH = -1
SHARED = -1
FETCHED, NEXT, LATER = 0, 1, 2
"""How a row comes to its users: from the store; after an update in the iteration before; after an earlier one."""


@inlined
def uses(users: Any, rank: int) -> bool:
    """Whether a trainer is among the users."""
    return (np.uint64(users) >> np.uint64(rank)) & np.uint64(1) != np.uint64(0)


@kernel
def owners_of(bounds: Int64s, slots: Int32s, bases: Int64s, state: Int32s, owners: Ranks) -> None:
    """The owners of rows that are in the cache."""
    for t in range(bounds.shape[0] - 1):
        for i in range(bounds[t], bounds[t + 1]):
            owners[i] = state[bases[t] + slots[i], OWNER]


@kernel
def enter(bounds: Int64s, slots: Int32s, freed: Int32s, homes: Ranks, bases: Int64s, state: Int32s) -> None:
    """Rows that a plan fetches take their slots, and homes[i] owns them."""
    for t in range(bounds.shape[0] - 1):
        for i in range(bounds[t], bounds[t + 1]):
            place = bases[t] + slots[i]
            state[place, LAST] = FRESH
            state[place, FREED] = freed[i]
            state[place, OWNER] = homes[i]


@kernel
def use(
    iteration: int,
    bounds: Int64s,
    slots: Int32s,
    bases: Int64s,
    state: Int32s,
    owners: Ranks,
    kinds: Ranks,
    freed: Int32s,
    goes_on: Flags,
) -> None:
    """Note that a plan uses its rows: who owns each, and how it comes to its users.

    goes_on[i] is set for row i of the plan before if this one uses it.
    """
    for t in range(bounds.shape[0] - 1):
        for i in range(bounds[t], bounds[t + 1]):
            place = bases[t] + slots[i]
            last = state[place, LAST]
            owners[i] = state[place, OWNER]
            freed[i] = state[place, FREED]
            if last == FRESH:
                kinds[i] = FETCHED
            elif last == iteration - 1:
                kinds[i] = NEXT
                if state[place, INDEX] >= 0:
                    goes_on[state[place, INDEX]] = True
            else:
                kinds[i] = LATER
            state[place, LAST] = iteration
            state[place, INDEX] = i


@kernel
def find_exclusive(
    iteration: int, bounds: Int64s, slots: Int32s, bases: Int64s, state: Int32s, users: Masks, owners: Ranks
) -> None:
    """Rows of a plan's batch that leave after it and that one trainer uses: it owns them."""
    for t in range(bounds.shape[0] - 1):
        for i in range(bounds[t], bounds[t + 1]):
            place = bases[t] + slots[i]
            if state[place, LAST] != iteration:
                continue
            row = state[place, INDEX]
            mine = np.uint64(users[row])
            if mine & (mine - np.uint64(1)) == np.uint64(0):
                rank = 0
                while not uses(mine, rank):
                    rank += 1
                owners[row] = rank
                state[place, OWNER] = rank


@kernel
def find_takers(
    iteration: int,
    bounds: Int64s,
    slots: Int32s,
    bases: Int64s,
    state: Int32s,
    users: Masks,
    from_owner: bool,
    everyone: NDArray[np.uint64],
    takers: NDArray[np.uint64],
) -> None:
    """The trainers that read each fetched row from the store: all, its owner, or the owner and its first users.

    A row that no batch has used yet counts as used in this iteration, by nobody.
    """
    for t in range(bounds.shape[0] - 1):
        for i in range(bounds[t], bounds[t + 1]):
            place = bases[t] + slots[i]
            owner = state[place, OWNER]
            takers[i] = everyone[0] if owner == SHARED else np.uint64(1) << np.uint64(owner)
            if state[place, LAST] == FRESH:
                state[place, LAST] = iteration
                state[place, INDEX] = -1
            elif owner != SHARED and not from_owner:
                takers[i] |= np.uint64(users[state[place, INDEX]])


@kernel
def count_shares(
    bounds: Int64s,
    users: Masks,
    owners: Ranks,
    phases: Ranks,
    trainers: int,
    used: Int64s,
    owned: Int64s,
    pairs: Int64s,
    shared: Int64s,
    parts: Int64s,
) -> None:
    """How long the lists of `fill_shares` are, for each table; all zero before."""
    for t in range(bounds.shape[0] - 1):
        for i in range(bounds[t], bounds[t + 1]):
            phase, owner = phases[i], owners[i]
            if owner == SHARED:
                shared[phase, t] += 1
            else:
                owned[phase, owner, t] += 1
            for rank in range(trainers):
                if uses(users[i], rank):
                    used[rank, t] += 1
                    if owner == SHARED:
                        parts[phase, rank, t] += 1
                    else:
                        pairs[phase, rank, owner, t] += 1


@kernel
def fill_shares(
    bounds: Int64s,
    users: Masks,
    owners: Ranks,
    phases: Ranks,
    trainers: int,
    used_at: Int64s,
    owned_at: Int64s,
    pairs_at: Int64s,
    shared_at: Int64s,
    parts_at: Int64s,
    used: Int32s,
    owned: Int32s,
    pair_sources: Int32s,
    pair_targets: Int32s,
    shared: Int32s,
    part_sources: Int32s,
    part_targets: Int32s,
) -> None:
    """Write the lists, each from where its counter stands: rows by user; rows by owner; and who adds what to what.

    A source is a row's index among its user's rows of the table, a target that among its owner's (or the shared ones).
    """
    own_index = np.zeros((2, trainers), np.int64)
    for t in range(bounds.shape[0] - 1):
        own_index[:] = 0
        shared_index = np.zeros(2, np.int64)
        use_index = np.zeros(trainers, np.int64)
        for i in range(bounds[t], bounds[t + 1]):
            phase, owner = phases[i], owners[i]
            if owner == SHARED:
                shared[shared_at[phase]] = i
                shared_at[phase] += 1
                target = shared_index[phase]
                shared_index[phase] += 1
            else:
                owned[owned_at[phase, owner]] = i
                owned_at[phase, owner] += 1
                target = own_index[phase, owner]
                own_index[phase, owner] += 1
            for rank in range(trainers):
                if not uses(users[i], rank):
                    continue
                used[used_at[rank]] = i
                used_at[rank] += 1
                if owner == SHARED:
                    at = parts_at[phase, rank]
                    part_sources[at] = use_index[rank]
                    part_targets[at] = target
                    parts_at[phase, rank] += 1
                else:
                    at = pairs_at[phase, rank, owner]
                    pair_sources[at] = use_index[rank]
                    pair_targets[at] = target
                    pairs_at[phase, rank, owner] += 1
                use_index[rank] += 1


@kernel
def count_values(
    bounds: Int64s, users: Masks, owners: Ranks, kinds: Ranks, wanted: Flags, trainers: int, pairs: Int64s
) -> None:
    """How many rows of the wanted kinds each owner sends to each other user, for each table; all zero before."""
    for t in range(bounds.shape[0] - 1):
        for i in range(bounds[t], bounds[t + 1]):
            owner = owners[i]
            if owner == SHARED or not wanted[kinds[i]]:
                continue
            for rank in range(trainers):
                if rank != owner and uses(users[i], rank):
                    pairs[owner, rank, t] += 1


@kernel
def fill_values(
    bounds: Int64s,
    slots: Int32s,
    users: Masks,
    owners: Ranks,
    kinds: Ranks,
    freed: Int32s,
    wanted: Flags,
    trainers: int,
    pairs_at: Int64s,
    sent: Int32s,
    after: Int32s,
) -> None:
    """The slots of those rows, by owner and user; after[r]: the last plan that freed one of those that r receives."""
    for t in range(bounds.shape[0] - 1):
        for i in range(bounds[t], bounds[t + 1]):
            owner = owners[i]
            if owner == SHARED or not wanted[kinds[i]]:
                continue
            for rank in range(trainers):
                if rank != owner and uses(users[i], rank):
                    sent[pairs_at[owner, rank]] = slots[i]
                    pairs_at[owner, rank] += 1
                    after[rank] = max(after[rank], freed[i])


@kernel
def localise(inverse: Int32s, begin: int, index: Int32s, own: Int32s) -> None:
    """own[i]: the index among a trainer's rows of what inverse[i] names; index[begin + j] is that of row j."""
    for i in range(inverse.shape[0]):
        own[i] = index[begin + inverse[i]]
