"""ScratchPipe's six stages in lockstep, without any wait: what keeps it right is only who may leave the cache.

Batch x is planned in cycle x, collects in x + 1 (missing rows from the store, victims from the cache), exchanges in
x + 2, inserts in x + 3 (missing rows into the cache, victims into the store) and trains in x + 4. In a cycle everybody
reads before anybody writes. The four read-after-write hazards of the paper's figure 8 are told apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from bagpipe.oracle.plan import Plan

COLLECT, INSERT, TRAIN = 1, 3, 4


class Hazard(Exception):
    """A row was read before an earlier batch had written it; the number is the paper's."""

    def __init__(self, number: int, row: int, iteration: int) -> None:
        super().__init__(f"RAW-{number}: row {row} at iteration {iteration}")
        self.number = number


class Lockstep:
    """One run of a list of plans of one table; a row's value is the tuple of iterations that updated it."""

    def __init__(self, plans: Sequence[Plan], update_late: bool = False) -> None:
        """`update_late`: updates are written a cycle later, as if training were two stages."""
        self.plans, self.late = plans, int(update_late)
        self.store: dict[int, tuple[int, ...]] = {}
        self.slots: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.expected: dict[int, tuple[int, ...]] = {}
        self.collected: dict[int, tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]] = {}

    def run(self) -> None:
        """All cycles; raises `Hazard`."""
        for cycle in range(len(self.plans) + TRAIN + self.late + 1):
            if collecting := self._plan(cycle - COLLECT):
                self._collect(collecting)
            if training := self._plan(cycle - TRAIN):
                self._forward(training)
            if inserting := self._plan(cycle - INSERT):
                self._insert(inserting)
            if updating := self._plan(cycle - TRAIN - self.late):
                self._update(updating)

    def _plan(self, x: int) -> Plan | None:
        return self.plans[x] if 0 <= x < len(self.plans) else None

    def _collect(self, plan: Plan) -> None:
        missing = {row: self.store.get(row, ()) for row in plan.fetch.ids.tolist()}
        victims = {}
        for row, slot in zip(plan.victims.ids.tolist(), plan.victims.slots.tolist(), strict=True):
            tenant, value = self.slots.get(slot, (None, ()))
            if tenant != row:
                raise Hazard(3, row, plan.iteration)
            if value != self._planned_value(row, plan.iteration):
                raise Hazard(2, row, plan.iteration)
            victims[row] = value
        for row, value in missing.items():
            if value != self._planned_value(row, plan.iteration):
                raise Hazard(4, row, plan.iteration)
        self.collected[plan.iteration] = missing, victims

    def _planned_value(self, row: int, before: int) -> tuple[int, ...]:
        """What synchronous training would have made of a row."""
        return tuple(plan.iteration for plan in self.plans[:before] if row in plan.rows.ids)

    def _insert(self, plan: Plan) -> None:
        missing, victims = self.collected.pop(plan.iteration)
        self.store |= victims
        for row, slot in zip(plan.fetch.ids.tolist(), plan.fetch.slots.tolist(), strict=True):
            self.slots[slot] = row, missing[row]

    def _forward(self, plan: Plan) -> None:
        for row, slot in zip(plan.rows.ids.tolist(), plan.rows.slots.tolist(), strict=True):
            if self.slots[slot] != (row, self._planned_value(row, plan.iteration)):
                raise Hazard(1, row, plan.iteration)

    def _update(self, plan: Plan) -> None:
        for row, slot in zip(plan.rows.ids.tolist(), plan.rows.slots.tolist(), strict=True):
            self.slots[slot] = row, (*self.slots[slot][1], plan.iteration)
