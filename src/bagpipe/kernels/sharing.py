"""The loops that find out which trainers use which rows, and who owns a row for its stay in the cache.

A trainer's samples are contiguous in a batch, so each feature's ids fall into one stretch a trainer. *Users* of a row
are a bit mask over trainers. In the window, `previous` has a row's word before each use of it, which leads to the use
before that one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bagpipe.arrays import Int32s, Int64s, Masks, NextUses, Ranks
from bagpipe.kernels import kernel
from bagpipe.kernels.intrinsics import FAR, index, lowest, num_bits, prefetch
from bagpipe.kernels.oracle import HALF, KEEP, LOWER, Batch, Rings, Rows, RowState

_ONE = np.uint64(1)


class UserRings(NamedTuple):
    """Beside the rows in `Rings`, where there are several trainers."""

    users: Masks
    """The trainers that use each row."""
    previous: Int64s
    """The last use of each row before this one."""
    next: Masks
    later: Masks
    """The trainers that use each row at its next use, and at the one after that; none: the window does not tell."""


class RowUsers(NamedTuple):
    """Of the rows of a batch, table by table."""

    users: Masks
    next: Masks
    later: Masks
    """As in `UserRings`."""
    before: Int32s
    """Those that the batch before uses too: their index in it; -1: it does not."""


@kernel
def find_users(
    rings: Rings, users: UserRings, batch: Batch, cuts: Int64s, bits: Masks, iteration: int, used: Int64s
) -> None:
    """The trainers whose ids name each row of the batch just read. About 0.5 ns an id, and 1 ns a row and user.

    The ids of trainer r are cuts[f, r] to cuts[f, r + 1] of feature f. used[t, r]: how many rows of table t it uses.
    """
    begins = rings.begins
    mask = begins.shape[1] - 1
    for k in range(rings.tables.shape[0]):
        t = rings.tables[k]
        own = users.users[begins[k, iteration & mask] : begins[k + 1, iteration & mask]]
        own[:] = 0
        for f in range(batch.features[t], batch.features[t + 1]):
            for rank in range(bits.shape[0]):
                bit = bits[rank]
                mine = batch.inverse[batch.positions[f] + cuts[f, rank] : batch.positions[f] + cuts[f, rank + 1]]
                for i in range(mine.shape[0]):
                    own[index(mine[i])] |= bit
        used[t] = 0
        for row in range(own.shape[0]):
            left = np.uint64(own[index(row)])
            while left:
                used[t, lowest(left)] += 1
                left &= left - _ONE


@kernel
def note_users(rings: Rings, users: UserRings, previous: Int64s, iteration: int, first: int, ahead: int) -> None:
    """Note the users of the batch just read where its rows were used before. About 8 ns a row for each `ahead`.

    At the last use of each row in the window, which begins with batch `first`, they are noted as the users of the next
    one, and at that before as those after it, as far as so many uses `ahead` are asked for (0 to 2).
    """
    begins = rings.begins
    mask = begins.shape[1] - 1
    start = begins[0, iteration & mask]
    for k in range(rings.tables.shape[0]):
        begin, end = begins[k, iteration & mask], begins[k + 1, iteration & mask]
        users.previous[begin:end] = previous[begin - start : end - start]
        if ahead > 0:
            users.next[begin:end] = 0
        if ahead > 1:
            users.later[begin:end] = 0
        for at in range(begin, end if ahead > 0 else begin):
            far = users.previous[index(min(at + FAR, end - 1))]
            place = begins[k, ((far >> HALF) - 1) & mask] + (far & LOWER)
            prefetch(users.next, place)
            if ahead > 1:
                prefetch(users.previous, place)
            mine_now, use = users.users[index(at)], users.previous[index(at)]
            if use >> HALF > first:
                last = index(begins[k, ((use >> HALF) - 1) & mask] + (use & LOWER))
                users.next[last] = mine_now
                if ahead > 1:
                    use = users.previous[last]
                    if use >> HALF > first:
                        users.later[index(begins[k, ((use >> HALF) - 1) & mask] + (use & LOWER))] = mine_now


@kernel
def tell_users(rings: Rings, users: UserRings, iteration: int, ahead: int, bounds: Int64s, told: RowUsers) -> None:
    """What is known of who uses the rows of the oldest batch; of uses to come as many as `note_users` was asked for."""
    begins = rings.begins[:, iteration & (rings.begins.shape[1] - 1)]
    for k in range(rings.tables.shape[0]):
        begin, end, out = begins[k], begins[k + 1], bounds[rings.tables[k]]
        told.users[out : out + end - begin] = users.users[begin:end]
        if ahead > 0:
            told.next[out : out + end - begin] = users.next[begin:end]
        if ahead > 1:
            told.later[out : out + end - begin] = users.later[begin:end]
        for at in range(begin, end):
            use = users.previous[index(at)]
            told.before[index(out + at - begin)] = use & LOWER if use >> HALF == iteration else -1


@kernel
def one_of(users: Any, number: int) -> int:
    """One of the users, by a number that spreads them evenly."""
    left = np.uint64(users)
    for _ in range(np.uint32(number) % np.uint32(num_bits(left))):
        left &= left - _ONE
    return int(lowest(left))


@kernel
def choose_owners(
    state: RowState,
    rings: Rings,
    users: UserRings,
    iteration: int,
    trainers: int,
    rows: Rows,
    next_use: NextUses,
    absent: Int32s,
    fetch: Rows,
    owners: Ranks,
) -> None:
    """For each row of the oldest batch that is not in the cache, the trainer that uses it most while it will be.

    The first use counts half: whoever owns the row, its users read it from the store then and send a gradient only,
    where at a later use they are sent a vector too. Among equals the row's slot decides, which spreads them evenly.
    A row's last use leads to its latest in the window, and from there `previous` to the one before.
    """
    begins = rings.begins
    mask = begins.shape[1] - 1
    tally = np.zeros(trainers, np.int32)
    for k in range(rings.tables.shape[0]):
        t = rings.tables[k]
        first, fetched, start = begins[k, iteration & mask], fetch.bounds[t], rows.bounds[t]
        count = fetch.bounds[t + 1] - fetched
        again = np.empty(count, np.int32)
        used_again = 0
        for n in range(count):
            at, stays = first + absent[start + n] - start, next_use[absent[start + n]]
            if stays == 0 or stays == KEEP:
                owners[fetched + n] = one_of(users.users[at], fetch.slots[fetched + n])
            else:
                again[used_again] = n
                used_again += 1
                prefetch(state.last_use, rings.rows[at])
        for n in again[:used_again]:
            use = state.last_use[rings.rows[first + absent[start + n] - start]]
            last = begins[k, ((use >> HALF) - 1) & mask] + (use & LOWER)
            prefetch(users.users, last)
            prefetch(users.previous, last)
        for n in again[:used_again]:
            here = first + absent[start + n] - start
            tally[:] = 0
            use = state.last_use[rings.rows[here]]
            while use >> HALF > iteration + 1:
                at = begins[k, ((use >> HALF) - 1) & mask] + (use & LOWER)
                left = np.uint64(users.users[at])
                while left:
                    tally[lowest(left)] += 2
                    left &= left - _ONE
                use, gap = users.previous[at], (use >> HALF) - (users.previous[at] >> HALF)
                if rings.next_use[begins[k, ((use >> HALF) - 1) & mask] + (use & LOWER)] != gap:
                    tally[:] = 0  # it leaves in between
            left = np.uint64(users.users[here])
            while left:
                tally[lowest(left)] += 1
                left &= left - _ONE
            most, equals = tally.max(), np.uint64(0)
            for rank in range(trainers):
                if tally[rank] == most:
                    equals |= _ONE << np.uint64(rank)
            owners[fetched + n] = one_of(equals, fetch.slots[fetched + n])
