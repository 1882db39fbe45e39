"""What the kernels of `bagpipe.kernels.shares` compute, in plain Python and NumPy: tests compare them with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels.partition import SHARED
from bagpipe.kernels.shares import _ONE, Int32s, Int64s, Masks, Ranks


def define_count_shares(users: Masks, owners: Ranks, phases: Ranks, owned: Int64s, pairs: Int64s) -> None:
    """Twin of `count_shares`."""
    lists = phases, owners.astype(np.intp) + 1
    np.add.at(owned, lists, 1)
    np.add.at(pairs, lists, _flags(users)[:, : pairs.shape[2]])


def define_fill_shares(
    bounds: Int64s,
    users: Masks,
    owners: Ranks,
    phases: Ranks,
    trainers: int,
    used_bounds: Int64s,
    used: Int32s,
    owned_bounds: Int64s,
    owned: Int32s,
    source_bounds: Int64s,
    sources: Int32s,
    target_bounds: Int64s,
    targets: Int32s,
) -> None:
    """Twin of `fill_shares`."""
    for t in range(len(bounds) - 1):
        rows = np.arange(bounds[t], bounds[t + 1])
        flags = _flags(users[rows])[:, :trainers]
        own_list = phases[rows].astype(np.intp) * (trainers + 1) + owners[rows] + 1
        own_index = np.array([(own_list[:i] == own_list[i]).sum() for i in range(len(rows))], np.int32)
        for own in range(2 * (trainers + 1)):
            _extend(owned_bounds[own], t, owned, rows[own_list == own])
        for rank in range(trainers):
            mine = np.flatnonzero(flags[:, rank])
            _extend(used_bounds[rank], t, used, rows[mine])
            for own in range(2 * (trainers + 1)):
                chosen = own_list[mine] == own
                pair = (own // (trainers + 1) * trainers + rank) * (trainers + 1) + own % (trainers + 1)
                _extend(source_bounds[pair], t, sources, np.flatnonzero(chosen))
                _extend(target_bounds[own * trainers + rank], t, targets, own_index[mine][chosen])


def define_count_values(users: Masks, holders: Ranks, kinds: Ranks, flows: Int64s, pairs: Int64s) -> None:
    """Twin of `count_values`."""
    flags = _flags(users)[:, : pairs.shape[2]] & (np.arange(pairs.shape[2]) != holders[:, None])
    sent = (holders != SHARED) & (flows[kinds] >= 0)
    np.add.at(pairs, (flows[kinds][sent], holders[sent]), flags[sent])


def define_fill_values(
    bounds: Int64s,
    slots: Int32s,
    users: Masks,
    holders: Ranks,
    kinds: Ranks,
    freed: Int32s,
    flows: Int64s,
    trainers: int,
    send_bounds: Int64s,
    send: Int32s,
    receive_bounds: Int64s,
    receive: Int32s,
    after: Int32s,
) -> None:
    """Twin of `fill_values`."""
    flags, flow_of = _flags(users), flows[kinds]
    for t in range(len(bounds) - 1):
        here = np.arange(len(slots)) - bounds[t] < bounds[t + 1] - bounds[t]
        here &= np.arange(len(slots)) >= bounds[t]
        for flow, holder, rank in np.ndindex(len(after), trainers, trainers):
            chosen = here & (flow_of == flow) & (holders == holder) & flags[:, rank] & (holder != rank)
            _extend(send_bounds[(flow * trainers + holder) * trainers + rank], t, send, slots[chosen])
            _extend(receive_bounds[(flow * trainers + rank) * trainers + holder], t, receive, slots[chosen])
            after[flow, rank] = freed[chosen].max(initial=after[flow, rank])


def define_localise(
    inverse: Int32s,
    cuts: Int64s,
    rank: int,
    tables: Int64s,
    bounds: Int64s,
    used: Int32s,
    used_bounds: Int64s,
) -> Int32s:
    """Twin of `localise`."""
    index = np.empty(bounds[-1], np.int32)
    index[used] = np.arange(len(used)) - np.repeat(used_bounds[:-1], np.diff(used_bounds))
    starts = np.cumsum(cuts[:, -1]) - cuts[:, -1]
    parts = [
        index[bounds[tables[f]] + inverse[starts[f] + cuts[f, rank] : starts[f] + cuts[f, rank + 1]]]
        for f in range(len(cuts))
    ]
    return np.concatenate(parts)


def _flags(users: Masks) -> NDArray[np.bool_]:
    """[i, r]: whether bit r of users[i] is set."""
    flags: NDArray[np.bool_] = (users.astype(np.uint64)[:, None] >> np.arange(64, dtype=np.uint64)) & _ONE != 0
    return flags


def _extend(bounds: Int64s, table: int, items: Int32s, values: NDArray[Any]) -> None:
    """Append a table's part to one of the lists."""
    bounds[table + 1] = bounds[table] + len(values)
    items[bounds[table] : bounds[table + 1]] = values
