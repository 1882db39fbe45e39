"""What the kernels of `bagpipe.kernels.sharing` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.kernels.plan import HALF, LOWER
from bagpipe.kernels.sharing import Int32s, Int64s, Masks, Ranks, Stays


def define_mark_users(
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
    """Twin of `mark_users`."""
    for t in tables:
        users[starts[t] : starts[t] + counts[t]] = 0
        for f in range(features[t], features[t + 1]):
            for rank, bit in enumerate(bits):
                mine = inverse[positions[f] :][cuts[f, rank] : cuts[f, rank + 1]]
                users[starts[t] + np.unique(mine)] |= bit


def define_keep_users(
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
    """Twin of `keep_users`."""
    mask = begins.shape[1] - 1
    for t in tables:
        here = slice(starts[t], starts[t] + counts[t])
        new = slice(begins[t, iteration & mask], begins[t, iteration & mask] + counts[t])
        window_users[new], window_previous[new] = users[here], previous[here]
        mine, words = users[here], previous[here]
        for noted in (window_next, window_later)[:ahead]:
            noted[new] = 0
            known = words >> HALF > first
            mine, words = mine[known], words[known]
            at = begins[t, ((words >> HALF) - 1) & mask] + (words & LOWER)
            noted[at], words = mine, window_previous[at]


def define_choose_owners(
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
    """Twin of `choose_owners`."""
    mask = begins.shape[1] - 1
    for t in tables:
        missing = np.flatnonzero(places[bounds[t] : bounds[t + 1]] <= 0)
        for place, row in enumerate(missing.tolist(), int(fetch_bounds[t])):
            word, uses = int(words[entries[bounds[t] + row]]), []
            while iteration + 1 < word >> HALF <= iteration + length:
                at = begins[t, ((word >> HALF) - 1) & mask] + (word & LOWER)
                uses.append(int(users[at]))
                gap = (word >> HALF) - (int(previous[at]) >> HALF)
                word = int(previous[at])
                if stays[begins[t, ((word >> HALF) - 1) & mask] + (word & LOWER)] != gap:
                    uses = []
            uses += [*uses, int(users[begins[t, iteration & mask] + row])]
            tally = np.array([sum(mine >> rank & 1 for mine in uses) for rank in range(trainers)])
            equals = np.flatnonzero(tally == tally.max())
            owners[place] = equals[fetch_slots[place] % len(equals)]
