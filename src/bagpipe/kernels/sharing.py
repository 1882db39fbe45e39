"""The loops that find out which trainers use which rows, and who owns a row for its stay in the cache.

A trainer's samples are contiguous in a batch, so each feature's ids fall into one stretch a trainer. *Users* of a row
are a bit mask over trainers. In the window, `nexts` leads from a use of a row to the next one: the row's index among
those of its table in the batch that its stay names.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import kernel
from bagpipe.kernels.plan import HALF, KEEP, LOWER

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Masks = NDArray[Any]
"""Unsigned, one bit a trainer."""
Ranks = NDArray[np.int8]
Stays = NDArray[np.uint16]


@kernel
def mark_users(inverse: Int32s, cuts: Int64s, bits: Masks, users: Masks) -> None:
    """Add each trainer's bit to the rows that its ids name; its ids of the feature are cuts[r] to cuts[r + 1]."""
    for rank in range(bits.shape[0]):
        for i in range(cuts[rank], cuts[rank + 1]):
            users[inverse[i]] |= bits[rank]


def mark_users_by_numpy(inverse: Int32s, cuts: Int64s, bits: Masks, users: Masks) -> None:
    """Twin of `mark_users`."""
    for rank, bit in enumerate(bits):
        users[np.unique(inverse[cuts[rank] : cuts[rank + 1]])] |= bit


@kernel
def link_users(
    tables: Int64s,
    starts: Int64s,
    counts: Int64s,
    previous: Int64s,
    iteration: int,
    window: int,
    begins: Int64s,
    stays: Stays,
    users: Masks,
    window_users: Masks,
    nexts: Int32s,
) -> None:
    """Move the users of a batch's rows into the window, and lead from the uses that stay until this one to it."""
    mask = begins.shape[1] - 1
    column = iteration & mask
    for t in tables:
        target = begins[t, column] - starts[t]
        for i in range(starts[t], starts[t] + counts[t]):
            window_users[target + i] = users[i]
            gap = iteration + 1 - (previous[i] >> HALF)
            if gap <= window:
                there = begins[t, (iteration - gap) & mask] + (previous[i] & LOWER)
                if stays[there] == gap:
                    nexts[there] = i - starts[t]


def link_users_by_numpy(
    tables: Int64s,
    starts: Int64s,
    counts: Int64s,
    previous: Int64s,
    iteration: int,
    window: int,
    begins: Int64s,
    stays: Stays,
    users: Masks,
    window_users: Masks,
    nexts: Int32s,
) -> None:
    """Twin of `link_users`."""
    mask = begins.shape[1] - 1
    for t in tables:
        here = slice(starts[t], starts[t] + counts[t])
        begin = begins[t, iteration & mask]
        window_users[begin : begin + counts[t]] = users[here]
        gap = iteration + 1 - (previous[here] >> HALF)
        index = np.flatnonzero(gap <= window)
        there = begins[t, (iteration - gap[index]) & mask] + (previous[here][index] & LOWER)
        staying = stays[there] == gap[index]
        nexts[there[staying]] = index[staying]


@kernel
def choose_owners(
    tables: Int64s,
    bounds: Int64s,
    places: Int32s,
    iteration: int,
    begins: Int64s,
    stays: Stays,
    users: Masks,
    nexts: Int32s,
    trainers: int,
    fetch_bounds: Int64s,
    fetch_slots: Int32s,
    owners: Ranks,
) -> None:
    """For each row of the oldest batch that is not in the cache, the trainer that uses it most while it will be.

    The first use counts half: whoever owns the row, its users read it from the store then and send a gradient only,
    where at a later use they are sent a vector too. Among equals the row's slot decides, which spreads them evenly.
    """
    mask = begins.shape[1] - 1
    tally = np.zeros(trainers, np.int32)
    for t in tables:
        fetched = fetch_bounds[t]
        first = begins[t, iteration & mask]
        for i in range(bounds[t + 1] - bounds[t]):
            if places[bounds[t] + i] > 0:
                continue
            at, when = first + i, iteration
            tally[:] = 0
            weight = 1
            while True:
                mine = np.uint64(users[at])
                for rank in range(trainers):
                    if (mine >> np.uint64(rank)) & np.uint64(1):
                        tally[rank] += weight
                weight = 2
                stay = stays[at]
                if stay == 0 or stay == KEEP:
                    break
                when += stay
                at = begins[t, when & mask] + nexts[at]
            most = tally.max()
            equals = 0
            for rank in range(trainers):
                equals += tally[rank] == most
            skip = fetch_slots[fetched] % equals
            for rank in range(trainers):
                if tally[rank] == most:
                    if skip == 0:
                        owners[fetched] = rank
                        break
                    skip -= 1
            fetched += 1


def choose_owners_by_numpy(
    tables: Int64s,
    bounds: Int64s,
    places: Int32s,
    iteration: int,
    begins: Int64s,
    stays: Stays,
    users: Masks,
    nexts: Int32s,
    trainers: int,
    fetch_bounds: Int64s,
    fetch_slots: Int32s,
    owners: Ranks,
) -> None:
    """Twin of `choose_owners`."""
    mask = begins.shape[1] - 1
    for t in tables:
        missing = np.flatnonzero(places[bounds[t] : bounds[t + 1]] <= 0)
        for place, row in enumerate(missing.tolist(), int(fetch_bounds[t])):
            at, when, seen = begins[t, iteration & mask] + row, iteration, []
            while True:
                seen.append(int(users[at]))
                if stays[at] in (0, KEEP):
                    break
                when += int(stays[at])
                at = begins[t, when & mask] + nexts[at]
            seen += seen[1:]
            tally = np.array([sum(mine >> rank & 1 for mine in seen) for rank in range(trainers)])
            equals = np.flatnonzero(tally == tally.max())
            owners[place] = equals[fetch_slots[place] % len(equals)]
