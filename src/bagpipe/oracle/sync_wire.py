"""What a trainer exchanges with others, as arrays and back, checked before anything is done with it.

Whatever the bytes, indices lie in the lists that they point into, slots in the cache, and what this trainer sends to
itself is what it receives from itself (I8). Of each list: how many entries each trainer has of each table, then the
entries, both packed; where its parts begin follows. A list without entries takes no place but its length in the record.
Rows that change their owner are among those that are sent: a bit for each of these tells which.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import WireError
from bagpipe.kernels.bits import first_outside, flag_chosen
from bagpipe.oracle.plan_shape import PlanShape, check_range, pack_rows, unpack_rows
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_plan import Gradients, Lists, Sync, Values
from bagpipe.wire.arrays import Packing, Unpacking, pack_flags, unpack_flags
from bagpipe.wire.plan_messages import BatchHead, DividedBy, SyncHead

Int64s = NDArray[np.int64]

OWNED = ("owned", "partitioned")
"""Designs in which one trainer updates a row; in the others all do, each its own copy."""


def pack_sync(sync: Sync, packing: Packing) -> SyncHead:
    """Put the arrays behind the others."""
    sizes: list[int] = []
    for values in (sync.fetched, sync.values, sync.later_values):
        sizes += [_pack_lists(lists, packing, rising=False) for lists in (values.send, values.receive)]
        moves = (values.give, values.send), (values.take, values.receive)
        sizes += [_pack_moved(moved, among, packing) for moved, among in moves]
        packing.add_packed(values.taken, flat_bounds(values.take))
    for part in _parts(sync):
        sizes.append(len(part))
        if isinstance(part, Lists):
            _pack_lists(part, packing, rising=True)
        elif len(part):
            pack_rows(part, packing)
    return SyncHead(
        sync.rank, [list(samples) for samples in sync.samples], sync.fetched.slot_after, sync.values.slot_after,
        sync.later_values.slot_after, sizes,
    )  # fmt: skip


def _pack_lists(lists: Lists, packing: Packing, rising: bool) -> int:
    if len(lists):
        packing.add_packed(lists.counts().astype(np.int32).reshape(-1))
        packing.add_packed(lists.items, flat_bounds(lists), rising=rising)
    return len(lists)


def _pack_moved(moved: Lists, among: Lists, packing: Packing) -> int:
    if len(moved):
        flags = np.empty(len(among), np.bool_)
        met = flag_chosen(among.items, flat_bounds(among), moved.items, flat_bounds(moved), flags)
        assert met, "a row changes its owner without its vector"
        packing.add(pack_flags(flags))
    return len(moved)


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
    gradients, later = (reading.gradients(what, rows) for what in ("gradients", "later gradients"))
    drop, drop_victims = (reading.rows(what) for what in ("drop", "drop_victims"))
    samples = tuple(map(tuple, head.samples))
    sync = Sync(head.rank, samples, fetched, gradients, values, later, later_values, drop, drop_victims)
    _check_design(sync, division, name)
    return sync


class _Reading:
    """Takes lists from the buffers, one by one, as `_parts` names them."""

    def __init__(self, head: SyncHead, unpacking: Unpacking, shape: PlanShape, trainers: int, name: str) -> None:
        self._rank, self._sizes, self._next = head.rank, head.sizes, 0
        self._unpacking, self._shape, self._trainers, self._name = unpacking, shape, trainers, name

    def values(self, what: str, slot_after: int) -> Values:
        slots = self._shape.slots
        send, receive = (self._lists(f"{what} to {verb}", self._trainers, slots) for verb in ("send", "receive"))
        self._check_own(what, send, receive)
        give, take = self._moved(f"{what} to give", send), self._moved(f"{what} to take", receive)
        bounds = flat_bounds(take)
        taken = self._unpacking.packed_int64s(bounds, f"{what}, ids of rows to take")
        self._shape.check_ids(f"{self._name}, {what} to take", taken, bounds)
        return Values(send, receive, slot_after, give, take, taken)

    def _moved(self, what: str, among: Lists) -> Lists:
        """Those of the entries whose bit is set."""
        size = self._size()
        if not size:
            return Lists(among.items[:0], np.zeros_like(among.bounds))
        flags = unpack_flags(self._unpacking, len(among), f"{self._name}, {what}")
        before = np.concatenate([[0], np.cumsum(flags)])
        if before[-1] != size:
            raise WireError(f"{self._name}, {what}: {before[-1]} rows are flagged, and {size} announced")
        return Lists(among.items[flags], before[among.bounds])

    def gradients(self, what: str, used: RowList) -> Gradients:
        of_used = _counts(used)
        rows = self.rows(f"rows of {what}")
        send = self._lists(f"{what} to send", self._trainers, of_used, rising=True)
        add = self._lists(f"{what} to add", self._trainers, _counts(rows), rising=True)
        self._check_own(what, send, add)
        shared = self.rows(f"shared rows of {what}")
        own = self._lists(f"shared {what}", 1, of_used, rising=True)
        own_at = self._lists(f"places of shared {what}", 1, _counts(shared), rising=True)
        if not np.array_equal(own.bounds, own_at.bounds):
            raise WireError(f"{self._name}, shared {what}: there are more of them, or fewer, than of their places")
        return Gradients(rows, send, add, shared, own, own_at.items)

    def rows(self, what: str) -> RowList:
        size = self._size()
        if size:
            return unpack_rows(self._unpacking, self._shape, f"{self._name}, {what}", size)
        return RowList(np.empty(0, np.int64), np.empty(0, np.int32), np.zeros(len(self._shape.tables) + 1, np.int64))

    def _lists(self, what: str, lists: int, ends: Int64s, rising: bool = False) -> Lists:
        """So many lists, whose entries of each table are less than its `ends`."""
        tables, size = len(self._shape.tables), self._size()
        bounds = np.zeros((lists, tables + 1), np.int64)
        if not size:
            return Lists(np.empty(0, np.int32), bounds)
        counts = self._unpacking.packed_int32s(np.array([0, lists * tables]), f"{what}, by trainer and table")
        if counts.min() < 0 or int(counts.sum(dtype=np.int64)) != size:
            raise WireError(f"{self._name}, {what}: the entries of all trainers and tables must be {size}")
        ends_of = np.cumsum(counts, dtype=np.int64).reshape(lists, tables)
        bounds[:, 1:] = ends_of
        bounds[1:, 0] = ends_of[:-1, -1]
        found = Lists(np.empty(0, np.int32), bounds)
        found = Lists(self._unpacking.packed_int32s(flat_bounds(found), what, rising=rising), bounds)
        self._check(what, found, ends)
        return found

    def _size(self) -> int:
        self._next += 1
        return self._sizes[self._next - 1]

    def _check(self, what: str, lists: Lists, ends: Int64s) -> None:
        bounds = flat_bounds(lists)
        if (first := first_outside(lists.items, bounds, np.tile(ends, len(lists.bounds)))) >= 0:
            end = ends[(int(np.searchsorted(bounds, first, "right")) - 1) % len(ends)]
            raise WireError(f"{self._name}, {what}: {lists.items[first]} is there, 0 to {end - 1} are allowed")

    def _check_own(self, what: str, sent: Lists, received: Lists) -> None:
        if not np.array_equal(sent.counts()[self._rank], received.counts()[self._rank]):
            raise WireError(f"{self._name}, {what}: trainer {self._rank} sends itself another number than it receives")


def _parts(sync: Sync) -> Iterator[RowList | Lists]:
    """The lists behind those of vectors, in the order in which they travel."""
    for phase in (sync.gradients, sync.later_gradients):
        yield from (phase.rows, phase.send, phase.add, phase.shared)
        yield from (phase.own, Lists(phase.own_at, phase.own.bounds))
    yield from (sync.drop, sync.drop_victims)


def flat_bounds(lists: Lists) -> Int64s:
    """Where the parts of all trainers and tables begin; one more for the end."""
    return np.append(lists.bounds[:, :-1].reshape(-1), lists.bounds[-1, -1])


def _counts(rows: RowList) -> Int64s:
    return np.diff(rows.bounds)


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


def _check_design(sync: Sync, division: DividedBy, name: str) -> None:
    """WireError if there is something that trainers of this design never exchange, and would not look at."""
    phases = (sync.gradients, sync.later_gradients)
    vectors = (sync.fetched, sync.values, sync.later_values)
    unknown: dict[str, int] = {}
    if division.design in OWNED:
        unknown["shared rows"] = sum(len(phase.shared) + len(phase.own) for phase in phases)
    else:
        unknown["vectors"] = sum(len(each.send) + len(each.receive) for each in vectors)
        lists = [each for phase in phases for each in (phase.send, phase.add)]
        unknown["gradients of one trainer for another"] = sum(
            len(each) - int(each.counts()[sync.rank].sum()) for each in lists
        )
    if division.design != "partitioned":
        unknown["fetched vectors"] = len(sync.fetched.send) + len(sync.fetched.receive)
    if not division.moving or division.design != "owned":
        unknown["rows that change their owner"] = sum(len(each.give) + len(each.take) for each in vectors)
    if not division.delayed:
        later = sync.later_gradients
        unknown["later gradients"] = len(later.rows) + len(later.send) + len(later.add) + len(later.shared)
        unknown["later vectors"] = len(sync.later_values.send) + len(sync.later_values.receive)
    for what, count in unknown.items():
        if count:
            raise WireError(
                f"{name} has {what}, which sync.design = {division.design!r} with sync.delayed = {division.delayed} "
                "never exchanges"
            )
