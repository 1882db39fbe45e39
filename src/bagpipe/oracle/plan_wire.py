"""A plan with its batches as a record and raw buffers, and back, checked before anything is done with it.

Whatever the bytes, a plan that comes out of here names slots, rows and tables that exist, and waits only for iterations
before its own (I8). Integers: for each list of rows their number by table, the slots and, of fetches, the two waits;
then the places of the ids by feature, then the batches. The ids of rows have 64 bits, everything else 32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache import group_by_width
from bagpipe.data.batch_wire import pack_batch, unpack_batch
from bagpipe.errors import WireError
from bagpipe.oracle.plan import Fetch, Plan, Victims
from bagpipe.oracle.row_list import RowList
from bagpipe.types import Batch, Table
from bagpipe.wire.arrays import Packing, Unpacking
from bagpipe.wire.plan_messages import BatchHead, Planned, PlansDescribed

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class PlanShape:
    """What all plans of a run must fit."""

    tables: tuple[Table, ...]
    group: tuple[int, ...]
    """The slot space of each table."""
    capacity: tuple[int, ...]
    """The slots of each space."""
    accumulate: int = 1
    fingerprint: str = ""

    @classmethod
    def of(cls, described: PlansDescribed) -> PlanShape:
        """What an oracle has described; WireError if it contradicts itself."""
        tables = tuple(Table(table.name, table.rows, tuple(table.features)) for table in described.tables)
        groups, widths = group_by_width([table.width for table in described.tables])
        features = [name for table in tables for name in table.features]
        if not tables or len(widths) != len(described.capacity) or len(set(features)) != len(features):
            raise WireError(
                f"plans of {len(tables)} tables with rows of {len(widths)} widths for {len(described.capacity)} slot "
                "spaces, or of a feature in two tables: run the same release on both sides"
            )
        return cls(tables, tuple(groups), tuple(described.capacity), described.accumulate, described.fingerprint)

    @property
    def features(self) -> list[tuple[str, int]]:
        """The features of all plans, in order, each with its table."""
        return [(name, number) for number, table in enumerate(self.tables) for name in table.features]


def pack_plan(
    plan: Plan, batches: Sequence[Batch], features: Sequence[str], fingerprint: str = ""
) -> tuple[Planned, list[memoryview]]:
    """A plan and its batches, whose ids of these features are in the plan."""
    packing = Packing()
    for rows in (plan.rows, plan.fetch, plan.evict, plan.victims, plan.flush):
        packing.add(np.diff(rows.bounds).astype(np.int32))
        packing.add(rows.ids)
        packing.add(rows.slots)
    packing.add(plan.fetch.after)
    packing.add(plan.fetch.slot_after)
    for inverse in plan.inverse:
        packing.add(inverse)
    heads = [pack_batch(batch, packing, features) for batch in batches]
    record = Planned(
        plan.iteration, fingerprint, plan.lookahead, plan.hits, plan.victims.evict_after, len(plan.rows),
        len(plan.fetch), len(plan.evict), len(plan.victims), len(plan.flush), heads,
    )  # fmt: skip
    return record, packing.buffers()


def unpack_plan(
    record: Planned, buffers: Sequence[memoryview], shape: PlanShape, iteration: int
) -> tuple[Plan, list[Batch]]:
    """The plan of this iteration and its batches; WireError if anything about it can't be."""
    name = f"the plan of iteration {iteration}"
    if record.iteration != iteration:
        raise WireError(f"the plan of iteration {record.iteration} came where {iteration} was due")
    if record.fingerprint != shape.fingerprint:
        raise WireError(
            f"{name} is for settings {record.fingerprint}, and those before it were for {shape.fingerprint}: "
            "the oracle was started again with others, start the run again"
        )
    if not 1 <= len(record.batches) <= shape.accumulate:
        raise WireError(f"{name} has {len(record.batches)} batches: 1 to {shape.accumulate} are allowed")
    unpacking = Unpacking(name, buffers)
    lists = [
        _rows(unpacking, shape, f"{name}, {what}", count)
        for what, count in (
            ("rows", record.num_rows),
            ("fetch", record.num_fetch),
            ("evict", record.num_evict),
            ("victims", record.num_victims),
            ("flush", record.num_flush),
        )
    ]
    rows, fetched, evict, leaving, flush = lists
    waits = [unpacking.int32s(len(fetched), what) for what in ("after", "slot_after")]
    for what, last in zip(("after", "slot_after"), waits, strict=True):
        _check_range(f"{name}, {what}", last, -1, iteration)
    if record.evict_after >= iteration:
        raise WireError(f"{name} has evict_after {record.evict_after}: an earlier iteration is allowed")
    fetch = Fetch(fetched.ids, fetched.slots, fetched.bounds, *waits)
    victims = Victims(leaving.ids, leaving.slots, leaving.bounds, record.evict_after)
    inverse = _inverse(unpacking, shape, name, rows, record.batches)
    names = [feature for feature, _ in shape.features]
    batches = [unpack_batch(head, unpacking, names) for head in record.batches]
    unpacking.finish()
    plan = Plan(iteration, rows, inverse, fetch, evict, victims, flush, record.lookahead, record.hits)
    return plan, batches


def _rows(unpacking: Unpacking, shape: PlanShape, name: str, count: int) -> RowList:
    counts = unpacking.int32s(len(shape.tables), "rows by table")
    if counts.min() < 0 or int(counts.sum(dtype=np.int64)) != count:
        raise WireError(f"{name}: {count} rows, by table {counts[:8].tolist()}: their sum must be that")
    ids, slots = unpacking.int64s(count, "ids"), unpacking.int32s(count, "slots")
    bounds = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=bounds[1:])
    rows = RowList(ids, slots, bounds)
    for number, table in enumerate(shape.tables):
        of_table, places = rows.of_table(number)
        _check_range(f"{name}, slots of table {table.name!r}", places, 0, shape.capacity[shape.group[number]])
        if table.rows is not None:
            _check_range(f"{name}, ids of table {table.name!r}", of_table, 0, table.rows)
    return rows


def _inverse(
    unpacking: Unpacking, shape: PlanShape, name: str, rows: RowList, heads: Sequence[BatchHead]
) -> tuple[Int32s, ...]:
    """For each feature the places of its ids, of all batches."""
    counts = np.diff(rows.bounds).tolist()
    num_ids = [{feature.name: feature.num_ids for feature in head.features} for head in heads]
    inverse = []
    for feature, table in shape.features:
        try:
            length = sum(of_batch[feature] for of_batch in num_ids)
        except KeyError:
            raise WireError(f"{name} has a batch without feature {feature!r}") from None
        places = unpacking.int32s(length, f"places of feature {feature!r}")
        _check_range(f"{name}, places of feature {feature!r}", places, 0, counts[table])
        inverse.append(places)
    return tuple(inverse)


def _check_range(what: str, values: NDArray[Any], least: int, end: int) -> None:
    if not len(values):
        return
    smallest, largest = int(values.min()), int(values.max())
    if smallest < least or largest >= end:
        wrong = smallest if smallest < least else largest
        raise WireError(f"{what}: {wrong} is there, {least} to {end - 1} are allowed")
