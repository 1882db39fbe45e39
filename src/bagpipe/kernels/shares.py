"""The loops that cut a plan into trainers' parts: who adds which gradients to which rows, who sends vectors to whom.

Lists of rows are flat over tables, in that order. Lists for trainers lie end to end; row k of their `bounds` says where
each table of list k begins, and one more where the list ends.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels import kernel
from bagpipe.kernels.intrinsics import index, lowest
from bagpipe.kernels.partition import SHARED

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]
Masks = NDArray[Any]
"""Unsigned, one bit a trainer."""
Ranks = NDArray[np.int8]
_ONE = np.uint64(1)


@kernel
def count_shares(users: Masks, owners: Ranks, phases: Ranks, owned: Int64s, pairs: Int64s) -> None:
    """Add up how long the lists of `fill_shares` are: owned[p, o + 1] and pairs[p, o + 1, r]. About 2 ns a row."""
    for i in range(users.shape[0]):
        phase, owner = index(phases[i]), index(owners[i] + 1)
        owned[phase, owner] += 1
        left = np.uint64(users[i])
        while left:
            pairs[phase, owner, index(lowest(left))] += 1
            left &= left - _ONE


@kernel
def fill_shares(
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
    """Write the lists, each from its first bound: rows by user, rows by phase and owner, and who adds what to what.

    A source is a row's index among its user's rows of the table (lists by phase, user, owner), a target that among its
    owner's (by phase, owner, user). Owner 0 stands for all trainers, and o + 1 for o. About 5 ns a row.
    """
    used_at, owned_at = used_bounds[:, 0].copy(), owned_bounds[:, 0].copy()
    source_at, target_at = source_bounds[:, 0].copy(), target_bounds[:, 0].copy()
    for t in range(bounds.shape[0] - 1):
        for row in range(bounds[t], bounds[t + 1]):
            i = index(row)
            phase, owner = phases[i], owners[i] + 1
            own = phase * (trainers + 1) + owner
            at = owned_at[index(own)]
            owned_at[index(own)] = at + 1
            owned[index(at)] = row
            target = at - owned_bounds[index(own), t]
            left = np.uint64(users[i])
            while left:
                rank = lowest(left)
                left &= left - _ONE
                at = used_at[index(rank)]
                used_at[index(rank)] = at + 1
                used[index(at)] = row
                pair = index((phase * trainers + rank) * (trainers + 1) + owner)
                sources[index(source_at[pair])] = at - used_bounds[index(rank), t]
                source_at[pair] += 1
                pair = index(own * trainers + rank)
                targets[index(target_at[pair])] = target
                target_at[pair] += 1
        used_bounds[:, t + 1], owned_bounds[:, t + 1] = used_at, owned_at
        source_bounds[:, t + 1], target_bounds[:, t + 1] = source_at, target_at


@kernel
def count_values(users: Masks, holders: Ranks, kinds: Ranks, flows: Int64s, pairs: Int64s) -> None:
    """Add up in pairs[f, o, r] how many rows holder o sends to their other user r; flows[kind] is their f, or -1."""
    for i in range(users.shape[0]):
        holder, flow = holders[i], flows[kinds[i]]
        if holder == SHARED or flow < 0:
            continue
        left = np.uint64(users[i]) & ~(_ONE << np.uint64(holder))
        while left:
            pairs[index(flow), index(holder), index(lowest(left))] += 1
            left &= left - _ONE


@kernel
def fill_values(
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
    """The slots of those rows by flow, holder and user, and by flow, user and holder, each list from its first bound.

    after[f, r]: the last plan that freed one of the slots that r receives.
    """
    send_at, receive_at = send_bounds[:, 0].copy(), receive_bounds[:, 0].copy()
    for t in range(bounds.shape[0] - 1):
        for row in range(bounds[t], bounds[t + 1]):
            i = index(row)
            holder, flow = holders[i], flows[index(kinds[i])]
            if holder == SHARED or flow < 0:
                continue
            left = np.uint64(users[i]) & ~(_ONE << np.uint64(holder))
            while left:
                rank = lowest(left)
                left &= left - _ONE
                pair = index((flow * trainers + holder) * trainers + rank)
                send[index(send_at[pair])] = slots[i]
                send_at[pair] += 1
                pair = index((flow * trainers + rank) * trainers + holder)
                receive[index(receive_at[pair])] = slots[i]
                receive_at[pair] += 1
                after[index(flow), index(rank)] = max(after[index(flow), index(rank)], freed[i])
        send_bounds[:, t + 1], receive_bounds[:, t + 1] = send_at, receive_at


@kernel
def localise(
    inverse: Int32s,
    cuts: Int64s,
    rank: int,
    tables: Int64s,
    bounds: Int64s,
    used: Int32s,
    used_bounds: Int64s,
) -> Int32s:
    """A trainer's ids as indices into its own rows of their table, feature by feature. About 1 ns an id.

    `inverse` has all ids of feature 0, then of feature 1, and so on; tables[f] is the table of feature f.
    """
    new, count = np.empty(bounds[-1], np.int32), 0
    for t in range(bounds.shape[0] - 1):
        for k in range(used_bounds[t], used_bounds[t + 1]):
            new[index(used[index(k)])] = k - used_bounds[t]
    for f in range(cuts.shape[0]):
        count += cuts[f, rank + 1] - cuts[f, rank]
    own = np.empty(count, np.int32)
    start = at = 0
    for f in range(cuts.shape[0]):
        begin, size = bounds[tables[f]], cuts[f, rank + 1] - cuts[f, rank]
        mine = inverse[start + cuts[f, rank] : start + cuts[f, rank + 1]]
        for i in range(size):
            own[index(at + i)] = new[index(begin + mine[i])]
        at += size
        start += cuts[f, -1]
    return own
