"""The loops that divide plans among trainers: who updates each row and how it comes to its users; what goes to whom.

All slot spaces lie end to end, table t's at bases[t]. `state` has a word for each slot: in the upper half the plan that
freed its tenant's place, in the lower the tenant's owner + 1 (0: all trainers update it), LEAVES, and of one that was
brought along and not used yet the plan that did. Lists of rows are flat over tables, in that order. Sets of trainers
are bit masks.

A tenant's place is that in its owner's cache, of which `Homes` knows the free ones; or its slot, on all trainers, where
places are numbered as the slots are.
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
ALIKE = -1
"""Instead of the number of a table's first list: places are numbered as the slots are."""
_ONE = np.uint64(1)


class Homes(NamedTuple):
    """Free home places, oldest first, in a list for each group and trainer; the lists are rings, end to end."""

    lists: Int64s
    """Of each table the list of its group and trainer 0, or ALIKE."""
    begins: Int64s
    """Where each list begins; one more for the end."""
    first: Int64s
    num_free: Int64s
    """Of each list where its oldest place is, and how many there are."""
    places: Int32s
    freed: Int32s
    """By which plan each was freed: its evictions, or as `as_victim` has it; -1: it had no tenant."""


class Slots(NamedTuple):
    """What is known from plan to plan."""

    bases: Int64s
    state: Int64s
    places: Int32s
    """Where the tenant of each slot is."""
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
    """Which plan freed the slot of each; found: its place."""
    homes: Ranks
    """Who should own each from then on; found: who does."""
    places: Int32s
    """Found: where each is at its owner."""
    rows: Int32s
    """Found: which row of the plan each is; -1: it is brought along."""
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
    """The plan that must be copied out before those take each who are sent it, or read it without owning it."""
    places: Int32s
    """Where each is at who has its newest vector before the iteration."""
    moved: Int32s
    """Where each is at who updates it."""


@kernel
def as_victim(iteration: int) -> int:
    """What freed a place whose tenant was a victim of this plan: whoever takes it, in that plan or later, waits for
    nothing, as victims leave before rows are inserted."""
    return -2 - iteration


@kernel
def take_place(homes: Homes, number: int) -> tuple[int, int]:
    """The place of a list that has been free for longest, and what freed it."""
    size = homes.begins[number + 1] - homes.begins[number]
    at = homes.begins[number] + homes.first[number]
    homes.first[number] = (homes.first[number] + 1) % size
    homes.num_free[number] -= 1
    return homes.places[at], homes.freed[at]


@kernel
def free_place(homes: Homes, number: int, place: int, freed: int) -> None:
    """Put a place behind the free ones of a list."""
    size = homes.begins[number + 1] - homes.begins[number]
    at = homes.begins[number] + (homes.first[number] + homes.num_free[number]) % size
    homes.num_free[number] += 1
    homes.places[at], homes.freed[at] = place, freed


@kernel
def has_place(homes: Homes, number: int, last: int) -> bool:
    """Whether a list has a place that was freed by plan `last` or before."""
    if homes.num_free[number] == 0:
        return False
    freed = homes.freed[homes.begins[number] + homes.first[number]]
    return (freed if freed >= -1 else as_victim(freed)) <= last


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
def move_in(fetch: Taken, slots: Slots, homes: Homes) -> bool:
    """Give the rows that a plan fetches places at their homes, or, where none is free, at the trainer that has most
    free ones, who owns them then. False if there is no place: more rows are in the caches than there are slots.

    Before rows move, which take a place each and free another one only afterwards.
    """
    trainers = slots.bits.shape[0] - 1
    for t in range(fetch.bounds.shape[0] - 1):
        first = homes.lists[t]
        for n in range(fetch.bounds[t], fetch.bounds[t + 1]):
            i = index(n)
            slot = index(slots.bases[t] + fetch.slots[i])
            place = int(fetch.slots[i])
            if first == ALIKE:
                # Whoever has evicted an earlier tenant may still have it there, also if a later one was a victim.
                fetch.freed[i] = max(fetch.freed[i], slots.state[slot] >> HALF)
            else:
                owner = int(fetch.homes[i])
                if homes.num_free[first + owner] == 0:
                    owner = int(np.argmax(homes.num_free[first : first + trainers]))
                    if homes.num_free[first + owner] == 0:
                        return False
                place, freed = take_place(homes, first + owner)
                fetch.homes[i], fetch.freed[i] = owner, max(-1, freed)
            fetch.places[i] = slots.places[slot] = place
    return True


@kernel
def track_owners(
    iteration: int,
    rows: Used,
    fetch: Taken,
    slots: Slots,
    homes: Homes,
    users_read: bool,
    sent_before: int,
    turns: int,
    found: Found,
    bounds_before: Int64s,
    phase_before: Ranks,
) -> int:
    """Let a plan take its rows; those that it fetches are owned by their homes. About 6 ns a row.

    Rows are read from the store by who updates them, and by their users if these read too. Rows of the plan before
    that this one uses have to be updated NOW. A row that LEAVES and has one user is updated by that one alone. One that
    was in the cache may change its owner, where that is worth its table's cost; who held it sends it to its users as
    ever. A row that is brought along is read by its owner, who sends it to its first users. Returns how many rows of
    the batch were fetched.

    A row that the plan before does not use is sent with the plan `sent_before` plans before this one; others with the
    one before. A row moves if its new owner has a place that is free by then: freed by an earlier plan than that with
    which the row is sent. Its old owner, who may use it once more, has its place back after this plan.

    Who does not own a row has it in a place that the plan `turns` before used. Where it is sent, nothing waits for that
    plan: the exchange is part of a later iteration. Where users read it, they do so ahead of time, and wait.
    """
    met = 0
    for t in range(rows.bounds.shape[0] - 1):
        f, last, base, cost = fetch.bounds[t], rows.bounds[t + 1] - 1, slots.bases[t], slots.costs[t]
        first = homes.lists[t]
        for row in range(rows.bounds[t], rows.bounds[t + 1]):
            ahead = base + rows.slots[index(min(row + FAR, last))]
            prefetch(slots.state, ahead)
            prefetch(slots.places, ahead)
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
            where = moved = slots.places[place]
            freed = word >> HALF if first == ALIKE else np.int64(-1)
            if fetched:
                if first != ALIKE and users_read:
                    freed = max(-1, iteration - turns)
                fetch.readers[f] = slots.bits[owner] | rows.users[i] if users_read else slots.bits[owner]
                fetch.rows[f] = row
                f += 1
                found.arrival[i] = FETCHED
            else:
                sent = iteration - sent_before
                found.arrival[i] = LATER
                if rows.before[i] >= 0:
                    found.arrival[i] = NEXT
                    phase_before[index(bounds_before[t] + rows.before[i])] = NOW
                elif word & BROUGHT == brought_by(iteration - 1):
                    found.arrival[i] = NEXT
                if found.arrival[i] == NEXT:
                    sent = iteration - 1
                if cost < NEVER:
                    after, later = np.uint64(rows.next_users[i]), np.uint64(rows.later_users[i])
                    owner = better_owner(holder, users, after, later, cost, rows.slots[i])
                    if first != ALIKE and owner != holder:
                        if has_place(homes, first + owner, sent - 1):
                            moved, freed_by = take_place(homes, first + owner)
                            freed = max(-1, freed_by)
                            free_place(homes, first + holder, where, iteration)
                            slots.places[place] = moved
                        else:
                            owner = holder
            slots.state[place] = (word & ~(OWNER | BROUGHT)) | (owner + 1)
            found.held[i], found.updaters[i] = slots.bits[holder], slots.bits[owner]
            found.freed[i], found.places[i], found.moved[i] = freed, where, moved
        met += f - fetch.bounds[t]
        for n in range(f, fetch.bounds[t + 1]):
            place, owner = base + fetch.slots[n], fetch.homes[n]
            slots.state[place] = (np.int64(fetch.freed[n]) << HALF) | brought_by(iteration) | (owner + 1)
            fetch.readers[n] = slots.bits[owner]
            fetch.rows[n] = -1
    return met


@kernel
def places_at(tables: Int64s, users: Masks, bit: Any, found: Found, lists: Int64s, first_guest: Int64s) -> Int32s:
    """Where each row of a plan is at one trainer: at home, or in the next place for a guest; anywhere if it is not
    there at all. About 1 ns a row.

    `first_guest` is by table that of its group, the same number for all of them.
    """
    places = np.empty(users.shape[0], np.int32)
    guests = np.zeros(lists.max() + 2, np.int64)
    for t in range(tables.shape[0] - 1):
        first, count = first_guest[t], guests[lists[t] + 1]
        for row in range(tables[t], tables[t + 1]):
            i = index(row)
            if found.held[i] & bit or lists[t] == ALIKE:
                places[i] = found.places[i]
            elif found.updaters[i] & bit:
                places[i] = found.moved[i]
            else:
                places[i] = first + count
                count += users[i] & bit != 0
        guests[lists[t] + 1] = count
    return places


def mark_leaving(bounds: Int64s, slots: Int32s, known: Slots) -> None:
    """Mark the rows that a plan evicts."""
    known.state[np.repeat(known.bases, np.diff(bounds)) + slots] |= LEAVES


@kernel
def move_out(bounds: Int64s, slots: Int32s, known: Slots, homes: Homes, freed: int) -> tuple[Ranks, Int32s]:
    """The trainers that write rows of the cache to the store, and where they have them: their owners, or what the slot
    says if all update them.

    They are no longer marked, and their places are free, freed by this.
    """
    writers, places = np.empty(slots.shape[0], np.int8), np.empty(slots.shape[0], np.int32)
    trainers = known.bits.shape[0] - 1
    for t in range(bounds.shape[0] - 1):
        last, first = bounds[t + 1] - 1, homes.lists[t]
        for i in range(bounds[t], bounds[t + 1]):
            ahead = known.bases[t] + slots[index(min(i + FAR, last))]
            prefetch(known.state, ahead)
            prefetch(known.places, ahead)
            slot = slots[index(i)]
            place = index(known.bases[t] + slot)
            owner = (known.state[place] & OWNER) - 1
            writers[index(i)] = slot % trainers if owner == ALL else owner
            places[index(i)] = known.places[place]
            known.state[place] &= ~LEAVES
            if first != ALIKE:
                free_place(homes, first + owner, known.places[place], freed)
    return writers, places


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
