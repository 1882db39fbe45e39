"""What every policy's plans must keep: coverage, capacity, and the result of synchronous training in any order."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np

from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.tables import OracleTable
from definitions.plan_execution import ADVERSARIES, Execution, any_order, listed

Batches = Sequence[Sequence[Sequence[int]]]
"""Ids by batch and feature."""


def make_plans(
    tables: Sequence[OracleTable],
    capacity: Sequence[int],
    batches: Batches,
    readings: Sequence[int] = (),
    **options: object,
) -> list[Plan]:
    """The plans of some batches; each knows its iteration. Before each batch in `readings` another reading begins."""
    oracle = Oracle(tables, capacity, **options)  # type: ignore[arg-type]
    source = [([np.array(ids, np.int64) for ids in batch], number) for number, batch in enumerate(batches)]
    plans = []
    for begin, end in itertools.pairwise([0, *readings, len(source)]):
        for plan, number in oracle.plans(source[begin:end], more=end < len(source)):
            assert plan.iteration == number
            plans.append(plan)
    oracle.close()
    return plans


def check_contract(plans: Sequence[Plan], groups: Sequence[int], capacity: Sequence[int], batches: Batches) -> None:
    """Every row of x is in its slot at x; slots have one tenant and lie within the cache; all rows leave at the end,
    and before the slots are divided anew."""
    tenant: dict[tuple[int, int], tuple[int, int]] = {}
    for plan, batch in zip(plans, batches, strict=True):
        if plan.capacity:
            assert not tenant
            assert (plan.fetch.slot_after == plan.iteration - 1).all()
            capacity = plan.capacity
        for row, slot in listed(plan.victims, groups):
            assert tenant.pop(slot) == row
            assert plan.victims.evict_after < plan.iteration
        for row, slot in listed(plan.fetch, groups):
            assert slot not in tenant
            assert 0 <= slot[1] < capacity[slot[0]]
            tenant[slot] = row
        assert all(-1 <= after < plan.iteration for after in [*plan.fetch.after, *plan.fetch.slot_after])
        rows = listed(plan.rows, groups)
        assert all(tenant[slot] == row for row, slot in rows)
        assert len(set(rows)) == len(rows) == plan.hits + len({*rows} & {*listed(plan.fetch, groups)})
        features = iter(zip(batch, plan.inverse, strict=True))
        for t in range(len(groups)):
            ids, _ = plan.rows.of_table(t)
            num_features = len(batch) // len(groups)
            for values, inverse in itertools.islice(features, num_features):
                assert ids[inverse].tolist() == list(values)
        for row, slot in listed(plan.evict, groups):
            assert tenant.pop(slot) == row
    assert not tenant


def run_in_several_orders(plans: list[Plan], groups: Sequence[int], seed: int) -> None:
    chance = random.Random(seed)
    for schedule in [any_order(chance), *chance.sample(list(ADVERSARIES.values()), 2)]:
        Execution(plans, groups).run(schedule)
