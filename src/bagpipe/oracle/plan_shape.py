"""What the plans of a run must fit; each part of a plan checks itself against it when it arrives (I8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int32s, Int64s
from bagpipe.cache import group_by_width, num_bytes
from bagpipe.errors import WireError
from bagpipe.types import Table

if TYPE_CHECKING:
    from bagpipe.wire.plan_messages import DividedBy, PlansDescribed

ANY = -1
"""The number of rows of a table that has no fixed one."""


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
    division: DividedBy | None = None
    """How plans are divided, where several trainers share them."""
    trainer: int = 0
    """Whose parts come."""
    widths: tuple[int, ...] = ()
    """Floats of a row of each space."""
    bytes_max: int = 0
    """What all slots may take, however they are divided."""

    @classmethod
    def of(cls, described: PlansDescribed, trainer: int = 0) -> PlanShape:
        """What an oracle has described to a trainer; WireError if it contradicts itself."""
        tables = tuple(Table(table.name, table.rows, tuple(table.features)) for table in described.tables)
        groups, widths = group_by_width([table.width for table in described.tables])
        features = [name for table in tables for name in table.features]
        if not tables or len(widths) != len(described.capacity) or len(set(features)) != len(features):
            raise WireError(
                f"plans of {len(tables)} tables with rows of {len(widths)} widths for {len(described.capacity)} slot "
                "spaces, or of a feature in two tables: run the same release on both sides"
            )
        capacity = tuple(described.capacity)
        size = num_bytes([slots + 1 for slots in capacity], widths)  # the first division has rounded down
        return cls(
            tables, tuple(groups), capacity, described.accumulate, described.fingerprint, described.division, trainer,
            tuple(widths), size,
        )  # fmt: skip

    def divided_anew(self, capacity: Sequence[int], name: str) -> PlanShape:
        """The shape from a plan on that divides the slots anew, if it does; WireError if it can't."""
        if not capacity:
            return self
        if (
            len(capacity) != len(self.capacity)
            or min(capacity) < 1
            or num_bytes(capacity, self.widths) > self.bytes_max
        ):
            raise WireError(
                f"{name} divides the cache into {list(capacity)} slots of {list(self.widths)} floats: one number "
                f"above 0 for each width is allowed, and {self.bytes_max:,} bytes in all"
            )
        return replace(self, capacity=tuple(capacity))

    @property
    def features(self) -> list[tuple[str, int]]:
        """The features of all plans, in order, each with its table."""
        return [(name, number) for number, table in enumerate(self.tables) for name in table.features]

    @cached_property
    def slots(self) -> Int64s:
        """How many slots the rows of each table may be in."""
        return np.array([self.capacity[group] for group in self.group], np.int64)

    @cached_property
    def _num_rows(self) -> Int64s:
        return np.array([ANY if table.rows is None else table.rows for table in self.tables], np.int64)

    def check_slots(self, name: str, slots: Int32s, bounds: Int64s) -> None:
        """WireError if there are no such slots; they go table by table, and those of several lists end to end."""
        ends = np.tile(self.slots, (len(bounds) - 1) // len(self.tables))
        if (first := first_outside(slots, bounds, ends)) >= 0:
            raise self._wrong(f"{name}, slots", slots, bounds, ends, first)

    def check_ids(self, name: str, ids: Int64s, bounds: Int64s) -> None:
        """The same of ids; tables of any number of rows have all."""
        ends = np.tile(self._num_rows, (len(bounds) - 1) // len(self.tables))
        counts = np.where(ends == ANY, 0, np.diff(bounds))
        if counts.sum() < len(ids):
            ids = ids[np.repeat(ends != ANY, np.diff(bounds))]
            bounds = np.concatenate([[0], np.cumsum(counts)])
        if (first := first_outside(ids, bounds, ends)) >= 0:
            raise self._wrong(f"{name}, ids", ids, bounds, ends, first)

    def _wrong(self, what: str, numbers: NDArray[Any], bounds: Int64s, ends: Int64s, first: int) -> WireError:
        segment = int(np.searchsorted(bounds, first, "right")) - 1
        table = self.tables[segment % len(self.tables)]
        return WireError(
            f"{what} of table {table.name!r}: {numbers[first]} is there, 0 to {ends[segment] - 1} are allowed"
        )


def first_outside(numbers: NDArray[Any], bounds: Int64s, ends: Int64s) -> int:
    """The first number that is negative, or not less than its segment's end; -1: there is none."""
    # without a sign, one that is negative is greater than all ends
    wrong = numbers.view(f"u{numbers.itemsize}") >= np.repeat(ends.astype(np.uint64), np.diff(bounds))
    return int(wrong.argmax()) if wrong.any() else -1


def check_bounds(name: str, bounds: Int64s, num_segments: int, length: int) -> None:
    """WireError unless these say where so many segments of a list begin, and at last where it ends."""
    fits = bounds.shape == (num_segments + 1,) and bounds[0] == 0 and bounds[-1] == length
    if not fits or bool((bounds[1:] < bounds[:-1]).any()):
        raise WireError(
            f"{name}: {length} entries, and bounds {bounds.reshape(-1)[:8].tolist()}: {num_segments + 1} numbers from "
            f"0 to {length} that never fall are allowed"
        )


def check_range(what: str, values: NDArray[Any], least: int, end: int) -> None:
    """WireError if one of these is less, or is `end` or more."""
    if not len(values):
        return
    smallest, largest = int(values.min()), int(values.max())
    if smallest < least or largest >= end:
        wrong = smallest if smallest < least else largest
        raise WireError(f"{what}: {wrong} is there, {least} to {end - 1} are allowed")
