"""A plan with its batches as a record and raw buffers, and back, checked before anything is done with it.

Whatever the bytes, a plan that comes out of here names slots, rows and tables that exist, and waits only for iterations
before its own (I8). Integers, packed where not said otherwise: for each list of rows their number by table, ids and
slots; of fetches the two waits, plus one; then the places of the ids by feature, then the batches (not packed), then
what several trainers exchange (`sync_wire`) and, in the design `owned`, which rows are fetched whole, a bit each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from bagpipe.arrays import Int32s
from bagpipe.data.batch_wire import pack_batch, unpack_batch
from bagpipe.errors import WireError
from bagpipe.kernels.bits import first_outside
from bagpipe.oracle.design import RULES
from bagpipe.oracle.plan import Fetch, Plan, Victims
from bagpipe.oracle.plan_shape import PlanShape, check_range, pack_rows, unpack_rows
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_wire import pack_sync, unpack_sync
from bagpipe.types import Batch
from bagpipe.wire.arrays import Packing, Unpacking, pack_flags, unpack_flags
from bagpipe.wire.plan_messages import BatchHead, Planned, PlannedPart

Sent = TypeVar("Sent")
Received = TypeVar("Received")
PackBatch = Callable[[Sent, Packing, Collection[str]], BatchHead]
"""Adds the numbers of a batch, but for the ids of these features."""
UnpackBatch = Callable[[BatchHead, Unpacking, Collection[str]], Received]
"""Takes them again."""


def pack_plan(
    plan: Plan, batches: Sequence[Batch], features: Sequence[str], fingerprint: str = ""
) -> tuple[Planned | PlannedPart, list[memoryview]]:
    """A plan, or one trainer's part of it, and its batches, whose ids of these features are in the plan."""
    return pack_plan_of(plan, batches, pack_batch, features, fingerprint)


def pack_plan_of(
    plan: Plan, batches: Sequence[Sent], pack: PackBatch[Sent], features: Sequence[str], fingerprint: str
) -> tuple[Planned | PlannedPart, list[memoryview]]:
    """The same for batches of another kind."""
    packing = Packing()
    for rows in (plan.rows, plan.fetch, plan.evict, plan.victims):
        pack_rows(rows, packing)
    for last in (plan.fetch.after, plan.fetch.slot_after):
        packing.add_packed(last + np.int32(1))
    places = np.concatenate([np.empty(0, np.int32), *plan.inverse])
    packing.add_packed(places, np.cumsum([0, *map(len, plan.inverse)]))
    heads = [pack(batch, packing, features) for batch in batches]
    record = Planned(
        plan.iteration, fingerprint, plan.lookahead, plan.hits, plan.victims.evict_after, len(plan.rows),
        len(plan.fetch), len(plan.evict), len(plan.victims), list(plan.capacity), heads,
    )  # fmt: skip
    if plan.sync is None:
        return record, packing.buffers()
    part = PlannedPart(record, pack_sync(plan.sync, packing))
    if plan.fetch.whole is not None:
        packing.add(pack_flags(plan.fetch.whole))
    return part, packing.buffers()


def unpack_plan(
    body: Planned | PlannedPart, buffers: Sequence[memoryview], shape: PlanShape, iteration: int
) -> tuple[Plan, list[Batch]]:
    """The plan of this iteration and its batches; WireError if anything about it can't be."""
    return unpack_plan_of(body, buffers, unpack_batch, shape, iteration)


def unpack_plan_of(
    body: Planned | PlannedPart,
    buffers: Sequence[memoryview],
    unpack: UnpackBatch[Received],
    shape: PlanShape,
    iteration: int,
) -> tuple[Plan, list[Received]]:
    """The same for batches of another kind."""
    name = f"the plan of iteration {iteration}"
    record, head = (body.plan, body.sync) if isinstance(body, PlannedPart) else (body, None)
    _check_record(record, shape, name, iteration)
    shape = shape.divided_anew(record.capacity, name)
    if (head is None) != (shape.division is None):
        raise WireError(f"{name} is {'whole' if head is None else 'divided'}, and was described as the opposite")
    unpacking = Unpacking(name, buffers)
    plan, batches = _unpack(record, unpacking, unpack, shape, name)
    if head is not None:
        sync = unpack_sync(head, unpacking, shape, name, iteration, plan.rows, record.batches)
        plan = replace(plan, sync=sync)
    if shape.division is not None and RULES[shape.division.design].users_read:
        whole = unpack_flags(unpacking, len(plan.fetch), f"{name}, rows to fetch whole")
        plan = replace(plan, fetch=replace(plan.fetch, whole=whole))
    unpacking.finish()
    return plan, batches


def _check_record(record: Planned, shape: PlanShape, name: str, iteration: int) -> None:
    if record.iteration != iteration:
        raise WireError(f"the plan of iteration {record.iteration} came where {iteration} was due")
    if record.fingerprint != shape.fingerprint:
        raise WireError(
            f"{name} is for settings {record.fingerprint}, and those before it were for {shape.fingerprint}: "
            "the oracle was started again with others, start the run again"
        )
    if not 1 <= len(record.batches) <= shape.accumulate:
        raise WireError(f"{name} has {len(record.batches)} batches: 1 to {shape.accumulate} are allowed")
    if record.evict_after >= iteration:
        raise WireError(f"{name} has evict_after {record.evict_after}: an earlier iteration is allowed")


def _unpack(
    record: Planned, unpacking: Unpacking, unpack: UnpackBatch[Received], shape: PlanShape, name: str
) -> tuple[Plan, list[Received]]:
    iteration = record.iteration
    lists = [
        unpack_rows(unpacking, shape, f"{name}, {what}", count)
        for what, count in (
            ("rows", record.num_rows),
            ("fetch", record.num_fetch),
            ("evict", record.num_evict),
            ("victims", record.num_victims),
        )
    ]
    rows, fetched, evict, leaving = lists
    after, slot_after = (
        unpacking.packed_int32s(np.array([0, len(fetched)]), what) - np.int32(1) for what in ("after", "slot_after")
    )
    for what, last in (("after", after), ("slot_after", slot_after)):
        check_range(f"{name}, {what}", last, -1, iteration)
    fetch = Fetch(fetched.ids, fetched.slots, fetched.bounds, after, slot_after)
    victims = Victims(leaving.ids, leaving.slots, leaving.bounds, record.evict_after)
    inverse = _inverse(unpacking, shape, name, rows, record.batches)
    names = [feature for feature, _ in shape.features]
    batches = [unpack(head, unpacking, names) for head in record.batches]
    plan = Plan(
        iteration, rows, inverse, fetch, evict, victims, record.lookahead, record.hits, capacity=tuple(record.capacity)
    )
    return plan, batches


def _inverse(
    unpacking: Unpacking, shape: PlanShape, name: str, rows: RowList, heads: Sequence[BatchHead]
) -> tuple[Int32s, ...]:
    """For each feature the places of its ids, of all batches."""
    counts = np.diff(rows.bounds)
    num_ids = [{feature.name: feature.num_ids for feature in head.features} for head in heads]
    lengths = []
    for feature, _ in shape.features:
        try:
            lengths.append(sum(of_batch[feature] for of_batch in num_ids))
        except KeyError:
            raise WireError(f"{name} has a batch without feature {feature!r}") from None
    bounds = np.cumsum([0, *lengths])
    places = unpacking.packed_int32s(bounds, "places of ids")
    ends = counts[[table for _, table in shape.features]]
    if (first := first_outside(places, bounds, ends)) >= 0:
        number = int(np.searchsorted(bounds, first, "right")) - 1
        raise WireError(
            f"{name}, places of feature {shape.features[number][0]!r}: {places[first]} is there, 0 to "
            f"{ends[number] - 1} are allowed"
        )
    return tuple([places[begin:end] for begin, end in pairwise(bounds.tolist())])
