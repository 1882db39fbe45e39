"""The loops that divide plans among trainers: who updates each row and how it comes to its users; what goes to whom.

All slot spaces lie end to end, table t's at bases[t]. `state` has a word for each slot: in the upper half the plan that
freed it for its tenant, in the lower the tenant's owner + 1 (0: all trainers update it), LEAVES, and of one that was
brought along and not used yet the plan that did. Lists of rows are flat over tables, in that order. Sets of trainers
are bit masks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int32s, Int64s, Masks, Ranks
from bagpipe.kernels import kernel
from bagpipe.kernels.intrinsics import FAR, index, lowest, prefetch
from bagpipe.kernels.oracle import HALF
from bagpipe.kernels.sharing import one_of

ALL = -1
"""The owner of a row that all trainers update."""
OWNER = 0xFF
LEAVES = 0x100
"""The tenant is evicted by the plan that is followed just now."""
BROUGHT_AT = 9
BROUGHT = 0x3FFFFF << BROUGHT_AT
"""Where the plan that brought a tenant along is, as `brought_by` has it; 0: none, or it was used since."""
FETCHED, NEXT, LATER = 0, 1, 2
"""How a row comes to its users: from the store; after an update in the iteration before; after an earlier one."""
NOW, AFTERWARDS = 0, 1
"""When a row is updated: before the next iteration, which uses it; or beside that one."""
NEVER = np.inf
"""The cost of a move of rows that keep their owner."""
SHORT = 0.5
"""Where a move costs less than this part of a vector, only a row's next use counts: it may move again after that."""
_ONE = np.uint64(1)


class Slots(NamedTuple):
    """What is known from plan to plan."""

    bases: Int64s
    state: Int64s
    bits: Masks
    """The mask of each trainer; the last, where ALL points, is that of all."""
    costs: NDArray[np.float64]
    """What a move of a row of each table sends more, in vectors."""


class Used(NamedTuple):
    """The rows of a plan."""

    bounds: Int64s
    slots: Int32s
    users: Masks
    next_users: Masks
    later_users: Masks
    before: Int32s
    """Their index among those of their table in the plan before; -1: it does not use them."""


class Taken(NamedTuple):
    """Of each table those among them that are fetched, in the same order, and behind them rows brought along."""

    bounds: Int64s
    slots: Int32s
    freed: Int32s
    homes: Ranks
    """Who owns each from then on."""
    readers: Masks
    """Found: who reads each from the store."""


class Found(NamedTuple):
    """What is found out about the rows of a plan."""

    held: Masks
    """Who has the newest vector of each before the plan's iteration."""
    updaters: Masks
    """Who updates each with the gradients of that iteration."""
    arrival: Ranks
    """FETCHED, NEXT or LATER."""
    phase: Ranks
    """NOW or AFTERWARDS; known when the next plan is followed."""
    freed: Int32s
    """Which plan freed the slot of each."""


@kernel
def brought_by(iteration: int) -> int:
    """A plan as a number that is not 0; of a row that waits for four million plans it may be wrong, and the row is sent
    later than it could be."""
    return (iteration % 0x3FFFFF + 1) << BROUGHT_AT


@kernel
def better_owner(holder: int, users: Any, after: Any, later: Any, cost: float, number: int) -> int:
    """The current owner, or a user whose next two uses save more traffic than the move costs.

    A user who becomes the owner is sent the vector anyway. If the old one does not use the row, a gradient less is sent
    now; at a later use of the new one a vector and a gradient less, and at one of the old one that much more. All in
    vectors, as is the cost. Among equals a number decides, which spreads them evenly.
    """
    had = np.uint64(holder)
    if cost < SHORT:
        later = np.uint64(0)
    others = users & ~(_ONE << had)
    both, either = others & after & later, others & (after | later)
    best = both if both else either if either else others  # those for whom most next uses speak
    gain = 1 - int((users >> had) & _ONE) - 2 * int((after >> had) & _ONE) - 2 * int((later >> had) & _ONE)
    gain += 4 if both else 2 if either else 0
    return one_of(best, number) if best and gain > cost else holder


@kernel
def track_owners(
    iteration: int,
    rows: Used,
    fetch: Taken,
    slots: Slots,
    users_read: bool,
    found: Found,
    bounds_before: Int64s,
    phase_before: Ranks,
) -> int:
    """Let a plan take its rows: those that it fetches move in, owned by their homes. About 6 ns a row.

    Rows are read from the store by who updates them, and by their users if these read too. Rows of the plan before
    that this one uses have to be updated NOW. A row that LEAVES and has one user is updated by that one alone. One that
    was in the cache may change its owner, where that is worth its table's cost; who held it sends it to its users as
    ever. A row that is brought along is read by its owner, who sends it to its first users. Returns how many rows of
    the batch were fetched.
    """
    met = 0
    for t in range(rows.bounds.shape[0] - 1):
        f, last, base, cost = fetch.bounds[t], rows.bounds[t + 1] - 1, slots.bases[t], slots.costs[t]
        for row in range(rows.bounds[t], rows.bounds[t + 1]):
            prefetch(slots.state, base + rows.slots[index(min(row + FAR, last))])
            i = index(row)
            place = index(base + rows.slots[i])
            word = slots.state[place]
            users = np.uint64(rows.users[i])
            fetched = f < fetch.bounds[t + 1] and fetch.slots[index(f)] == rows.slots[i]
            if fetched:
                word = (np.int64(fetch.freed[f]) << HALF) | (word & LEAVES) | (fetch.homes[f] + 1)
            if word & LEAVES and users & (users - _ONE) == np.uint64(0):
                word = (word & ~OWNER) | (lowest(users) + 1)
            holder = owner = (word & OWNER) - 1
            if fetched:
                fetch.readers[f] = slots.bits[owner] | rows.users[i] if users_read else slots.bits[owner]
                f += 1
                found.arrival[i] = FETCHED
            else:
                if cost < NEVER:
                    after, later = np.uint64(rows.next_users[i]), np.uint64(rows.later_users[i])
                    owner = better_owner(holder, users, after, later, cost, rows.slots[i])
                found.arrival[i] = LATER
                if rows.before[i] >= 0:
                    found.arrival[i] = NEXT
                    phase_before[index(bounds_before[t] + rows.before[i])] = NOW
                elif word & BROUGHT == brought_by(iteration - 1):
                    found.arrival[i] = NEXT
            slots.state[place] = (word & ~(OWNER | BROUGHT)) | (owner + 1)
            found.held[i], found.updaters[i] = slots.bits[holder], slots.bits[owner]
            found.freed[i] = word >> HALF
        met += f - fetch.bounds[t]
        for n in range(f, fetch.bounds[t + 1]):
            place, owner = base + fetch.slots[n], fetch.homes[n]
            slots.state[place] = (np.int64(fetch.freed[n]) << HALF) | brought_by(iteration) | (owner + 1)
            fetch.readers[n] = slots.bits[owner]
    return met


def mark_leaving(bounds: Int64s, slots: Int32s, known: Slots) -> None:
    """Mark the rows that a plan evicts."""
    known.state[np.repeat(known.bases, np.diff(bounds)) + slots] |= LEAVES


@kernel
def writers_of(bounds: Int64s, slots: Int32s, known: Slots) -> Ranks:
    """The trainers that write rows of the cache to the store: their owners, or what the slot says if all update them.

    They are no longer marked.
    """
    writers, trainers = np.empty(slots.shape[0], np.int8), known.bits.shape[0] - 1
    for t in range(bounds.shape[0] - 1):
        last = bounds[t + 1] - 1
        for i in range(bounds[t], bounds[t + 1]):
            prefetch(known.state, known.bases[t] + slots[index(min(i + FAR, last))])
            slot = slots[index(i)]
            place = index(known.bases[t] + slot)
            owner = (known.state[place] & OWNER) - 1
            writers[index(i)] = slot % trainers if owner == ALL else owner
            known.state[place] &= ~LEAVES
    return writers


@kernel
def route(
    tables: Int64s, senders: Masks, receivers: Masks, when: Ranks, times: int, trainers: int
) -> tuple[Int32s, Int64s]:
    """Lists of rows (by index) for each time, sender and receiver, end to end; -1: the row is not sent.

    `tables` are the bounds of rows by table. Row k of the second result says where each table of list k begins, and
    one more where it ends. About 3 ns a row and receiver.
    """
    counts = np.zeros(times * trainers * trainers, np.int64)
    for i in range(senders.shape[0]):
        left = np.uint64(senders[i]) if when[i] >= 0 and receivers[i] else np.uint64(0)
        while left:
            first = (when[i] * trainers + lowest(left)) * trainers
            left &= left - _ONE
            to = np.uint64(receivers[i])
            while to:
                counts[index(first + lowest(to))] += 1
                to &= to - _ONE
    bounds = np.empty((counts.shape[0], tables.shape[0]), np.int64)
    ends = np.cumsum(counts)
    at = ends - counts
    bounds[:, 0] = at
    items = np.empty(ends[-1], np.int32)
    for t in range(tables.shape[0] - 1):
        for row in range(tables[t], tables[t + 1]):
            i = index(row)
            left = np.uint64(senders[i]) if when[i] >= 0 and receivers[i] else np.uint64(0)
            while left:
                first = (when[i] * trainers + lowest(left)) * trainers
                left &= left - _ONE
                to = np.uint64(receivers[i])
                while to:
                    pair = index(first + lowest(to))
                    to &= to - _ONE
                    items[index(at[pair])] = row
                    at[pair] += 1
        bounds[:, t + 1] = at
    return items, bounds


@kernel
def renumber(tables: Int64s, masks: Masks, bit: Any, when: Ranks, time: int) -> tuple[Int32s, Int64s, Int32s]:
    """Rows with this bit (and time, if it is not -1): which, their bounds by table, their numbers within their tables.

    Numbers are by the index of the row, and mean nothing where it is not among these. About 1 ns a row.
    """
    chosen, numbers = np.empty(masks.shape[0], np.int32), np.empty(masks.shape[0], np.int32)
    bounds = np.zeros(tables.shape[0], np.int64)
    count = 0
    for t in range(tables.shape[0] - 1):
        for row in range(tables[t], tables[t + 1]):
            i = index(row)
            numbers[i] = count - bounds[t]
            chosen[index(count)] = row
            count += (masks[i] & bit != 0) & ((time < 0) | (when[i] == time))
        bounds[t + 1] = count
    return chosen[:count], bounds, numbers
