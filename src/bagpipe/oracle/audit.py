"""Follows the plans of a policy that is not Bagpipe's own, slot by slot, before anybody executes them.

A policy decides what stays and what leaves; a defect in it may cost traffic or end the run, but must not change a bit
(I1, I8): a slot with two tenants, or a row in two slots, would.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from bagpipe.arrays import Int32s, Int64s
from bagpipe.errors import BagpipeError, ConfigError, PipelineError
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.tables import OracleTable

if TYPE_CHECKING:
    from bagpipe.policies.base import Policy


class Audit:
    """Which row is in each slot, by the plans so far."""

    def __init__(self, policy: Policy, tables: Sequence[OracleTable], capacity: Sequence[int]) -> None:
        """Nobody is in any slot."""
        self._policy, self._tables = policy, tables
        self._table_in: list[Int32s] = [np.full(size, -1, np.int32) for size in capacity]
        """Of each slot of each group; -1: it is free."""
        self._id_in: list[Int64s] = [np.zeros(size, np.int64) for size in capacity]
        self._here: list[set[int]] = [set() for _ in tables]

    @contextmanager
    def asking(self, iteration: int) -> Iterator[None]:
        """What is raised within is the policy's doing."""
        try:
            yield
        except BagpipeError:
            raise
        except Exception as error:
            raise PipelineError(
                f"policy {self._policy.name!r} failed in iteration {iteration}, before anything of it was done: "
                f"{type(error).__name__}: {error}"
            ) from error

    def follow(self, plan: Plan) -> None:
        """ConfigError if this plan can't be executed after those before."""
        for what, rows in (("makes room for others", plan.victims), ("is used", plan.rows), ("leaves", plan.evict)):
            if what == "is used":
                self._fetch(plan)
            for table, own in enumerate(self._tables):
                part = slice(rows.bounds[table], rows.bounds[table + 1])
                ids, slots = rows.ids[part], rows.slots[part]
                self._check(plan, table, ids, slots, what)
                if what != "is used":
                    self._table_in[own.group][slots] = -1
                    self._here[table].difference_update(ids.tolist())

    def check_grant(self, iteration: int, asked: Int64s, gaps: Int64s, *, all_granted: bool) -> None:
        """ConfigError if stays were granted that nobody has asked for."""
        granted = gaps[:, : asked.shape[1]]
        if (granted < 0).any() or (granted > asked).any():
            reason = "more stays than were asked for, or fewer than none"
        elif all_granted and (granted[:, 1:-1] != asked[:, 1:-1]).any():
            reason = "fewer stays than were asked for, and says that all are"
        else:
            return
        raise ConfigError(
            f"policy {self._policy.name!r} can't be followed: in iteration {iteration} its grant() gives {reason}"
        )

    def _fetch(self, plan: Plan) -> None:
        fetch = plan.fetch
        for table, own in enumerate(self._tables):
            part = slice(fetch.bounds[table], fetch.bounds[table + 1])
            ids, slots = fetch.ids[part], fetch.slots[part]
            self._refuse_outside(plan, table, slots)
            for row in ids.tolist():
                if row in self._here[table]:
                    self._refuse(plan, table, row, "comes, and is in the cache already: along() or place()")
                self._here[table].add(row)
            taken = self._table_in[own.group][slots] >= 0
            self._table_in[own.group][slots], self._id_in[own.group][slots] = table, ids
            taken |= self._id_in[own.group][slots] != ids  # another one of them has come to the same slot since
            if taken.any():
                self._refuse(plan, table, int(ids[taken.argmax()]), "comes to a slot that has a row: place()")

    def _check(self, plan: Plan, table: int, ids: Int64s, slots: Int32s, what: str) -> None:
        group = self._tables[table].group
        self._refuse_outside(plan, table, slots)
        wrong = (self._table_in[group][slots] != table) | (self._id_in[group][slots] != ids)
        if wrong.any() or (what != "is used" and len(np.unique(slots)) < len(slots)):
            row = int(ids[wrong.argmax()])
            self._refuse(plan, table, row, f"{what}, and is not where it should be: place(), leaves() or keys()")

    def _refuse_outside(self, plan: Plan, table: int, slots: Int32s) -> None:
        size = len(self._table_in[self._tables[table].group])
        if len(slots) and not 0 <= int(slots.min()) <= int(slots.max()) < size:
            self._refuse(plan, table, None, f"is in none of the {size:,} slots: place()")

    def _refuse(self, plan: Plan, table: int, row: int | None, what: str) -> NoReturn:
        of = "a row" if row is None else f"row {row}"
        raise ConfigError(
            f"policy {self._policy.name!r} can't be followed: in iteration {plan.iteration} {of} of table "
            f"{self._tables[table].name!r} {what} is to be mended; nothing of this iteration was done"
        )
