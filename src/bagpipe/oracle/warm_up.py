"""Rows that the first plan brings into the cache beside those of its batch, since its policy knows that they are hot.

Only where one trainer has all rows: how several divide the rows of a plan rests on who uses them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels.oracle import HALF
from bagpipe.oracle.plan import Fetch
from bagpipe.oracle.slots import Group
from bagpipe.oracle.tenants import Tenants
from bagpipe.policies.base import Policy

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


def warm_up(policy: Policy, groups: Sequence[Group], tenants: Tenants, iteration: int, fetch: Fetch) -> Fetch:
    """What the plan fetches, and behind it what its policy wants besides, as far as slots are free."""
    found: list[tuple[Int64s, Int64s, Int32s]] = []
    for group in groups:
        tables, ids = policy.hottest(group)
        chosen = np.flatnonzero(_can_be_noted(tenants, tables, ids))
        tables, ids = tables[chosen], ids[chosen]
        entries = _entries(tenants, tables, ids)
        absent = np.flatnonzero(_places(tenants, tables, entries) <= 0)[: group.slots.num_free]
        slots, freed_by = np.empty((2, len(absent)), np.int32)
        group.slots.take(slots, freed_by)
        assert (freed_by < 0).all(), "slots were freed before the first plan"
        for t in np.unique(tables[absent]).tolist():
            own = tables[absent] == t
            tenants.shard_of(t).state.location[entries[absent][own]] = slots[own] + 1
            tenants.codes[tenants.begins[t] + slots[own]] = (t << HALF) | entries[absent][own]
        policy.warmed(iteration, group, chosen[absent], slots)
        found.append((tables[absent], ids[absent], slots))
    tables, ids, slots = (np.concatenate(part) for part in zip(*found, strict=True))
    all_tables = np.concatenate([np.repeat(np.arange(len(fetch.bounds) - 1), np.diff(fetch.bounds)), tables])
    order = np.argsort(all_tables, kind="stable")
    none = np.full(len(ids), -1, np.int32)
    return Fetch(
        np.concatenate([fetch.ids, ids])[order],
        np.concatenate([fetch.slots, slots])[order],
        np.searchsorted(all_tables[order], np.arange(len(fetch.bounds))).astype(np.int64),
        np.concatenate([fetch.after, none])[order],
        np.concatenate([fetch.slot_after, none])[order],
    )


def _can_be_noted(tenants: Tenants, tables: Int64s, ids: Int64s) -> NDArray[np.bool_]:
    """Rows of tables with arrays, and of others those of the window: their maps have room for no more."""
    can: NDArray[np.bool_] = np.ones(len(ids), np.bool_)
    for t in np.unique(tables).tolist():
        shard, own = tenants.shard_of(t), tables == t
        can[own] = shard.is_known(t, ids[own])
    return can


def _entries(tenants: Tenants, tables: Int64s, ids: Int64s) -> Int64s:
    """Where these rows are noted."""
    entries = np.empty(len(ids), np.int64)
    for t in np.unique(tables).tolist():
        own = tables == t
        entries[own] = tenants.shard_of(t).rows_of(t, ids[own])
    return entries


def _places(tenants: Tenants, tables: Int64s, entries: Int64s) -> Int32s:
    places = np.empty(len(entries), np.int32)
    for t in np.unique(tables).tolist():
        own = tables == t
        places[own] = tenants.shard_of(t).state.location[entries[own]]
    return places
