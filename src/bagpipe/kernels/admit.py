"""Which rows may stay in the cache until their next use: the arithmetic that proves that the cache can't overflow.

For each iteration in the window it keeps two sums over a slot space: `load`, the rows of that batch and those that stay
across it, which never exceeds the capacity; and `total`, which adds the rows that are on their way for the next
iterations, so that prefetching finds free slots too. Costs a few microseconds a batch, whatever its size.
"""

from __future__ import annotations

from bagpipe.arrays import Int64s
from bagpipe.kernels import kernel


@kernel
def admit(
    tables: Int64s,
    iteration: int,
    window: int,
    need: int,
    capacity: int,
    ahead: int,
    load: Int64s,
    total: Int64s,
    gaps: Int64s,
    shortest_refused: Int64s,
) -> int:
    """Enter a batch of `need` rows behind `window` others; lower gaps[t, g] to the rows that may stay over g batches.

    Stays are granted from the shortest to the longest, in order of tables. A row that stays from p to b takes a slot in
    the iterations between; in the last `ahead` of them it would have had one anyway, for its prefetch. With `ahead` 0
    no choice of stays that fits is larger: batches come in order of b, and where another choice has a stay instead of
    one granted here, it ends no earlier and can be swapped for it. Returns the number of rows that may not stay.
    Behind the window's gaps are rows that are idle in the cache: they would stay across all of it.
    """
    mask = load.shape[0] - 1
    load[iteration & mask] = need
    total[iteration & mask] = need
    room = need
    granted = 0
    refused = 0
    for gap in range(1, window + 2):
        left = room
        column = (iteration - gap) & mask
        for t in tables:
            allowed = min(gaps[t, gap], left)
            if gap <= window and allowed < gaps[t, gap]:
                refused += gaps[t, gap] - allowed
                if shortest_refused[column] == 0:
                    shortest_refused[column] = gap
            gaps[t, gap] = allowed
            left -= allowed
        granted += room - left
        if gap > window:
            break
        room = min(left, capacity - load[column])
        if gap > ahead:
            room = max(0, min(room, capacity - total[column]))
    crossing = granted
    for gap in range(1, window + 1):
        for t in tables:
            crossing -= gaps[t, gap]
        column = (iteration - gap) & mask
        load[column] += crossing
        total[column] += crossing
        if gap <= ahead:
            total[column] += need - granted
    return refused
