"""What a trainer exchanges with others, as arrays and back, checked before anything is done with it.

Whatever the bytes, indices lie in the lists that they point into, slots in the cache, and what this trainer sends to
itself is what it receives from itself (I8). Of each list: how many entries each trainer has of each table, then the
entries, both packed; where its parts begin follows. A list without entries takes no place but its length in the record.
Rows that change their owner are among those that are sent: a bit for each of these tells which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from bagpipe.arrays import Int64s
from bagpipe.errors import WireError
from bagpipe.kernels.bits import first_outside
from bagpipe.oracle.design import RULES
from bagpipe.oracle.plan_shape import PlanShape, check_range, pack_rows, unpack_rows
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_plan import Exchange, Routes, Sync
from bagpipe.wire.arrays import Packing, Unpacking, pack_flags, unpack_flags
from bagpipe.wire.plan_messages import BatchHead, DividedBy, SyncHead


def pack_sync(sync: Sync, packing: Packing) -> SyncHead:
    """Put the arrays behind the others."""
    sizes: list[int] = []
    for values in _vectors(sync):
        sizes += [_pack_routes(routes, packing, rising=False) for routes in (values.send, values.receive)]
        sizes += [_pack_moved(routes, packing) for routes in (values.send, values.receive)]
        packing.add_packed(values.ids, flat_bounds(values.receive.moved()))
    for rows, gradients in _phases(sync):
        sizes.append(_pack_rows(rows, packing))
        sizes += [_pack_routes(routes, packing, rising=True) for routes in (gradients.send, gradients.receive)]
    sizes += [_pack_rows(rows, packing) for rows in (sync.drop, sync.drop_victims)]
    samples, afters = [list(samples) for samples in sync.samples], [values.slot_after for values in _vectors(sync)]
    return SyncHead(sync.rank, samples, afters[0], afters[1], afters[2], sizes)


def _pack_routes(routes: Routes, packing: Packing, rising: bool) -> int:
    if len(routes):
        packing.add_packed(routes.counts().astype(np.int32).reshape(-1))
        packing.add_packed(routes.items, flat_bounds(routes), rising=rising)
    return len(routes)


def _pack_moved(routes: Routes, packing: Packing) -> int:
    if routes.whole is None:
        return 0
    packing.add(pack_flags(routes.whole))
    return int(routes.whole.sum())


def _pack_rows(rows: RowList, packing: Packing) -> int:
    if len(rows):
        pack_rows(rows, packing)
    return len(rows)


def unpack_sync(
    head: SyncHead,
    unpacking: Unpacking,
    shape: PlanShape,
    name: str,
    iteration: int,
    rows: RowList,
    batches: Sequence[BatchHead],
) -> Sync:
    """The exchanges of an iteration in which this trainer uses `rows`; WireError if anything about them can't be."""
    division = shape.division
    assert division is not None, "plans for one trainer have no exchanges"
    _check_samples(head, division, shape.trainer, name, batches)
    reading = _Reading(head, unpacking, shape, division.trainers, name)
    afters = (head.fetched_after, head.values_after, head.later_after)
    check_range(f"{name}, slot_after of vectors", np.array(afters), -1, iteration)
    fetched, values, later_values = (
        reading.values(what, after) for what, after in zip(("fetched", "values", "later values"), afters, strict=True)
    )
    (updated, gradients), (later_updated, later_gradients) = (
        reading.gradients(what, rows) for what in ("gradients", "later gradients")
    )
    drop, drop_victims = (reading.rows(what) for what in ("drop", "drop_victims"))
    sync = Sync(
        head.rank, tuple(map(tuple, head.samples)), fetched, gradients, updated, values, later_gradients, later_updated,
        later_values, drop, drop_victims,
    )  # fmt: skip
    _check_design(sync, division, len(rows), name)
    return sync


class _Reading:
    """Takes lists from the buffers, one by one, as `pack_sync` puts them there."""

    def __init__(self, head: SyncHead, unpacking: Unpacking, shape: PlanShape, trainers: int, name: str) -> None:
        self._rank, self._sizes, self._next = head.rank, head.sizes, 0
        self._unpacking, self._shape, self._trainers, self._name = unpacking, shape, trainers, name

    def values(self, what: str, slot_after: int) -> Exchange:
        slots = self._shape.slots
        send, receive = (self._routes(f"{what} to {verb}", slots) for verb in ("send", "receive"))
        self._check_own(what, send, receive)
        send, receive = self._moved(f"{what} to give", send), self._moved(f"{what} to take", receive)
        bounds = flat_bounds(receive.moved())
        ids = self._unpacking.packed_int64s(bounds, f"{what}, ids of rows to take")
        self._shape.check_ids(f"{self._name}, {what} to take", ids, bounds)
        return Exchange(send, receive, slot_after, ids)

    def _moved(self, what: str, among: Routes) -> Routes:
        """The same with a bit for each item, if any is set."""
        size = self._size()
        if not size:
            return among
        flags = unpack_flags(self._unpacking, len(among), f"{self._name}, {what}")
        if (flagged := int(flags.sum())) != size:
            raise WireError(f"{self._name}, {what}: {flagged} rows are flagged, and {size} announced")
        return replace(among, whole=flags)

    def gradients(self, what: str, used: RowList) -> tuple[RowList, Exchange]:
        rows = self.rows(f"rows of {what}")
        send = self._routes(f"{what} to send", np.diff(used.bounds), rising=True)
        receive = self._routes(f"{what} to add", np.diff(rows.bounds), rising=True)
        self._check_own(what, send, receive)
        return rows, Exchange(send, receive)

    def rows(self, what: str) -> RowList:
        size = self._size()
        if size:
            return unpack_rows(self._unpacking, self._shape, f"{self._name}, {what}", size)
        return RowList(np.empty(0, np.int64), np.empty(0, np.int32), np.zeros(len(self._shape.tables) + 1, np.int64))

    def _routes(self, what: str, ends: Int64s, rising: bool = False) -> Routes:
        """A list for each trainer, whose entries of each table are less than its `ends`."""
        trainers, tables, size = self._trainers, len(self._shape.tables), self._size()
        bounds = np.zeros((trainers, tables + 1), np.int64)
        if not size:
            return Routes(np.empty(0, np.int32), bounds)
        counts = self._unpacking.packed_int32s(np.array([0, trainers * tables]), f"{what}, by trainer and table")
        if counts.min() < 0 or int(counts.sum(dtype=np.int64)) != size:
            raise WireError(f"{self._name}, {what}: the entries of all trainers and tables must be {size}")
        bounds[:, 1:] = np.cumsum(counts, dtype=np.int64).reshape(trainers, tables)
        bounds[1:, 0] = bounds[:-1, -1]
        flat = flat_bounds(Routes(np.empty(0, np.int32), bounds))
        found = Routes(self._unpacking.packed_int32s(flat, what, rising=rising), bounds)
        self._check(what, found, ends)
        return found

    def _size(self) -> int:
        self._next += 1
        return self._sizes[self._next - 1]

    def _check(self, what: str, routes: Routes, ends: Int64s) -> None:
        bounds = flat_bounds(routes)
        if (first := first_outside(routes.items, bounds, np.tile(ends, len(routes.bounds)))) >= 0:
            end = ends[(int(np.searchsorted(bounds, first, "right")) - 1) % len(ends)]
            raise WireError(f"{self._name}, {what}: {routes.items[first]} is there, 0 to {end - 1} are allowed")

    def _check_own(self, what: str, sent: Routes, received: Routes) -> None:
        if not np.array_equal(sent.counts()[self._rank], received.counts()[self._rank]):
            raise WireError(f"{self._name}, {what}: trainer {self._rank} sends itself another number than it receives")


def _vectors(sync: Sync) -> tuple[Exchange, Exchange, Exchange]:
    return sync.fetched, sync.values, sync.later_values


def _phases(sync: Sync) -> tuple[tuple[RowList, Exchange], tuple[RowList, Exchange]]:
    return (sync.updated, sync.gradients), (sync.later_updated, sync.later_gradients)


def flat_bounds(routes: Routes) -> Int64s:
    """Where the parts of all trainers and tables begin; one more for the end."""
    return np.append(routes.bounds[:, :-1].reshape(-1), routes.bounds[-1, -1])


def _check_samples(head: SyncHead, division: DividedBy, trainer: int, name: str, batches: Sequence[BatchHead]) -> None:
    if head.rank != trainer or trainer >= division.trainers:
        raise WireError(f"{name} is for trainer {head.rank} of {division.trainers}, and came to trainer {trainer}")
    if len(head.samples) != len(batches) or any(len(samples) != division.trainers for samples in head.samples):
        raise WireError(
            f"{name} has the samples of {list(map(len, head.samples))} trainers in its batches: {len(batches)} batches "
            f"for {division.trainers} trainers are allowed"
        )
    for batch, samples in zip(batches, head.samples, strict=True):
        if batch.num_samples != samples[head.rank]:
            raise WireError(
                f"{name} has a batch of {batch.num_samples} samples, and says that trainer {head.rank} has "
                f"{samples[head.rank]}"
            )


def _check_design(sync: Sync, division: DividedBy, num_rows: int, name: str) -> None:
    """WireError if there is something that trainers of this design never exchange, and would not look at."""
    rules = RULES[division.design]
    vectors, later = _vectors(sync), (sync.later_updated, sync.later_gradients.send, sync.later_gradients.receive)
    sent = sum(len(gradients.send) for _, gradients in _phases(sync))
    unknown: dict[str, int] = {}
    if rules.copies:
        unknown["vectors"] = sum(not each.empty for each in vectors)
    else:
        unknown["gradients of a row for several trainers"] = max(0, sent - num_rows)
    if rules.copies or rules.users_read:
        unknown["fetched vectors"] = not sync.fetched.empty
    if not division.moving or not rules.moves:
        moved = [routes.whole is not None for each in vectors for routes in (each.send, each.receive)]
        unknown["rows that change their owner"] = sum(moved)
    if not division.delayed:
        unknown["later gradients"] = sum(len(each) for each in later)
        unknown["later vectors"] = not sync.later_values.empty
    for what, count in unknown.items():
        if count:
            raise WireError(
                f"{name} has {what}, which sync.design = {division.design!r} with sync.delayed = {division.delayed} "
                "never exchanges"
            )
