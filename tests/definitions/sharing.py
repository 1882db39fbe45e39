"""What the kernels of `bagpipe.kernels.sharing` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

import numpy as np

from bagpipe.arrays import Int32s, Int64s, Masks, NextUses, Ranks
from bagpipe.kernels.oracle import HALF, KEEP, LOWER, Batch, Rings, Rows, RowState
from bagpipe.kernels.sharing import UserRings


def define_find_users(
    rings: Rings, users: UserRings, batch: Batch, cuts: Int64s, bits: Masks, iteration: int, used: Int64s
) -> None:
    """Twin of `find_users`."""
    column = iteration & (rings.begins.shape[1] - 1)
    for k, t in enumerate(rings.tables):
        new = slice(rings.begins[k, column], rings.begins[k + 1, column])
        users.users[new], used[t] = 0, 0
        for rank, bit in enumerate(bits):
            rows = set[int]()
            for f in range(batch.features[t], batch.features[t + 1]):
                rows |= set(batch.inverse[batch.positions[f] :][cuts[f, rank] : cuts[f, rank + 1]].tolist())
            users.users[[new.start + row for row in rows]] |= bit
            used[t, rank] = len(rows)


def define_note_users(rings: Rings, users: UserRings, previous: Int64s, iteration: int, first: int, ahead: int) -> None:
    """Twin of `note_users`."""
    begins = rings.begins
    mask = begins.shape[1] - 1
    begin = begins[0, iteration & mask]
    for k in range(len(rings.tables)):
        new = slice(begins[k, iteration & mask], begins[k + 1, iteration & mask])
        users.previous[new] = previous[new.start - begin : new.stop - begin]
        mine, uses = users.users[new], users.previous[new]
        for noted in (users.next, users.later)[:ahead]:
            noted[new] = 0
            known = uses >> HALF > first
            mine, uses = mine[known], uses[known]
            at = begins[k, ((uses >> HALF) - 1) & mask] + (uses & LOWER)
            noted[at], uses = mine, users.previous[at]


def define_choose_owners(
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
    """Twin of `choose_owners`."""
    begins = rings.begins
    mask = begins.shape[1] - 1
    for k, t in enumerate(rings.tables):
        first = begins[k, iteration & mask] - rows.bounds[t]
        for place in range(fetch.bounds[t], fetch.bounds[t + 1]):
            row = absent[rows.bounds[t] + place - fetch.bounds[t]]
            uses: list[int] = []
            use = int(state.last_use[rings.rows[first + row]])
            while use >> HALF > iteration + 1 and next_use[row] not in (0, KEEP):
                at = begins[k, ((use >> HALF) - 1) & mask] + (use & LOWER)
                uses.append(int(users.users[at]))
                gap = (use >> HALF) - (int(users.previous[at]) >> HALF)
                use = int(users.previous[at])
                if rings.next_use[begins[k, ((use >> HALF) - 1) & mask] + (use & LOWER)] != gap:
                    uses = []
            uses += [*uses, int(users.users[first + row])]
            tally = np.array([sum(mine >> rank & 1 for mine in uses) for rank in range(trainers)])
            equals = np.flatnonzero(tally == tally.max())
            owners[place] = equals[fetch.slots[place] % len(equals)]
