"""What a pipeline tells of the rows that it moves."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from bagpipe.cache import TableRows
from bagpipe.oracle.plan import Plan

Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]


class Observer(Protocol):
    """Is told of every movement of rows; the checker is one."""

    def fetched(self, plan: Plan, rows: TableRows) -> None:
        """Rows were read from the store for this plan."""

    def inserted(self, plan: Plan, table: int, ids: Ids, slots: Slots) -> None:
        """Rows are about to take their slots."""

    def copied_out(self, table: int, ids: Ids, slots: Slots, rows: TableRows) -> None:
        """Rows left their slots; `rows` are those of them that must be written."""

    def copied(self, rows: TableRows) -> None:
        """Updated rows were copied from their slots, where they stay; they will be written."""

    def flushed(self) -> None:
        """Nothing that this trainer has to write is left in the cache."""

    def dropped(self, table: int, ids: Ids, slots: Slots) -> None:
        """These rows left their slots, if they were there, and another trainer writes them."""

    def written(self, rows: TableRows) -> None:
        """The store has these rows."""
