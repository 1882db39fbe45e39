"""The loops that find out which trainers use which rows, and who owns a row for its stay in the cache.

A trainer's samples are contiguous in a batch, so each feature's ids fall into one stretch a trainer. *Users* of a row
are a bit mask over trainers. In the window, `previous` has a row's word before each use of it, which leads to the use
before that one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import kernel
from bagpipe.kernels.masks import index, lowest
from bagpipe.kernels.plan import HALF, KEEP, LOWER
from bagpipe.kernels.prefetch import FAR, prefetch

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Masks = NDArray[Any]
"""Unsigned, one bit a trainer."""
Ranks = NDArray[np.int8]
Stays = NDArray[np.uint16]
_ONE = np.uint64(1)


@kernel
def mark_users(
    tables: Int64s,
    features: Int64s,
    starts: Int64s,
    counts: Int64s,
    positions: Int64s,
    inverse: Int32s,
    cuts: Int64s,
    bits: Masks,
    users: Masks,
) -> None:
    """The trainers whose ids name each row. About 0.5 ns an id.

    Table t has features[t] to features[t + 1], and its rows from starts[t] on. The ids of feature f begin at
    positions[f], and there those of trainer r are cuts[f, r] to cuts[f, r + 1].
    """
    for t in tables:
        own = users[starts[t] : starts[t] + counts[t]]
        own[:] = 0
        for f in range(features[t], features[t + 1]):
            for rank in range(bits.shape[0]):
                bit = bits[rank]
                mine = inverse[positions[f] + cuts[f, rank] : positions[f] + cuts[f, rank + 1]]
                for i in range(mine.shape[0]):
                    own[index(mine[i])] |= bit


@kernel
def keep_users(
    tables: Int64s,
    starts: Int64s,
    counts: Int64s,
    iteration: int,
    first: int,
    ahead: int,
    begins: Int64s,
    users: Masks,
    previous: Int64s,
    window_users: Masks,
    window_previous: Int64s,
    window_next: Masks,
    window_later: Masks,
) -> None:
    """Move the users of a batch's rows, and their words before it, into the window, which begins with batch `first`.

    At the last use of each row there they are noted as the users of the next one, and at that before as those after it,
    as far as so many uses `ahead` are asked for (0 to 2). About 8 ns a row for each.
    """
    mask = begins.shape[1] - 1
    for t in tables:
        begin, start, count = begins[t, iteration & mask], starts[t], counts[t]
        window_users[begin : begin + count] = users[start : start + count]
        window_previous[begin : begin + count] = previous[start : start + count]
        if ahead > 0:
            window_next[begin : begin + count] = 0
        if ahead > 1:
            window_later[begin : begin + count] = 0
        for i in range(count if ahead > 0 else 0):
            far = previous[index(min(start + i + FAR, start + count - 1))]
            place = begins[t, ((far >> HALF) - 1) & mask] + (far & LOWER)
            prefetch(window_next, place)
            if ahead > 1:
                prefetch(window_previous, place)
            mine, word = users[index(start + i)], previous[index(start + i)]
            if word >> HALF > first:
                at = index(begins[t, ((word >> HALF) - 1) & mask] + (word & LOWER))
                window_next[at] = mine
                if ahead > 1:
                    word = window_previous[at]
                    if word >> HALF > first:
                        window_later[index(begins[t, ((word >> HALF) - 1) & mask] + (word & LOWER))] = mine


def find_before(previous: Int64s, iteration: int) -> Int32s:
    """Rows that the batch before uses too: their index in it, -1 for others."""
    return np.where(previous >> HALF == iteration, previous & LOWER, -1).astype(np.int32)


@kernel
def one_of(users: Any, number: int) -> int:
    """One of the users, by a number that spreads them evenly."""
    count, left = 0, np.uint64(users)
    while left:
        count += 1
        left &= left - _ONE
    left = np.uint64(users)
    for _ in range(number % count):
        left &= left - _ONE
    return int(lowest(left))


@kernel
def choose_owners(
    tables: Int64s,
    bounds: Int64s,
    entries: Int32s,
    places: Int32s,
    iteration: int,
    length: int,
    words: Int64s,
    begins: Int64s,
    stays: Stays,
    users: Masks,
    previous: Int64s,
    trainers: int,
    fetch_bounds: Int64s,
    fetch_slots: Int32s,
    owners: Ranks,
) -> None:
    """For each row of the oldest batch that is not in the cache, the trainer that uses it most while it will be.

    The first use counts half: whoever owns the row, its users read it from the store then and send a gradient only,
    where at a later use they are sent a vector too. Among equals the row's slot decides, which spreads them evenly.
    A row's word leads to its last use in the window of that many batches, and from there `previous` to the one before.
    """
    mask = begins.shape[1] - 1
    most_absent = 0
    for t in tables:
        most_absent = max(most_absent, fetch_bounds[t + 1] - fetch_bounds[t])
    missing, again = np.empty((2, most_absent + 1), np.int32)
    tally = np.zeros(trainers, np.int32)
    for t in tables:
        first, start, fetched = begins[t, iteration & mask], bounds[t], fetch_bounds[t]
        absent = used_again = 0
        for i in range(bounds[t + 1] - start):
            missing[index(absent)] = i
            absent += places[index(start + i)] <= 0
        for k in range(absent):
            i = missing[k]
            if stays[first + i] == 0 or stays[first + i] == KEEP:
                owners[fetched + k] = one_of(users[first + i], fetch_slots[fetched + k])
            else:
                again[used_again] = k
                used_again += 1
                prefetch(words, entries[start + i])
        for k in again[:used_again]:
            word = words[entries[start + missing[k]]]
            if word >> HALF <= iteration + length:
                last = begins[t, ((word >> HALF) - 1) & mask] + (word & LOWER)
                prefetch(users, last)
                prefetch(previous, last)
        for k in again[:used_again]:
            i = missing[k]
            tally[:] = 0
            word = words[entries[start + i]]
            if word >> HALF > iteration + length:  # by a batch that was given up: what follows is not known
                word = ((iteration + 1) << HALF) | i
            while word >> HALF > iteration + 1:
                at = begins[t, ((word >> HALF) - 1) & mask] + (word & LOWER)
                left = np.uint64(users[at])
                while left:
                    tally[lowest(left)] += 2
                    left &= left - _ONE
                word, gap = previous[at], (word >> HALF) - (previous[at] >> HALF)
                if stays[begins[t, ((word >> HALF) - 1) & mask] + (word & LOWER)] != gap:
                    tally[:] = 0  # it leaves in between
            left = np.uint64(users[first + i])
            while left:
                tally[lowest(left)] += 1
                left &= left - _ONE
            most, equals = tally.max(), np.uint64(0)
            for rank in range(trainers):
                if tally[rank] == most:
                    equals |= _ONE << np.uint64(rank)
            owners[fetched + k] = one_of(equals, fetch_slots[fetched + k])
