"""From the columns of a file, of whatever format, to samples; and which rows are none, for what reason.

A row with something wrong is named by the first column, in the order of the file, where something is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Floats
from bagpipe.data.prepare.block import Block, Category, Place, Problem
from bagpipe.data.prepare.cells import Mask, Values
from bagpipe.data.prepare.schema import Categorical, Numeric, Schema, Time

NOT_INTEGER = "is not a whole number of 64 bits"
_SHOWN_MAX = 60
_DAY_SECONDS, _HOUR_SECONDS = 86_400, 3_600


@dataclass(frozen=True, slots=True)
class Checked:
    """Categories, and the rows where they are wrong."""

    category: Category
    wrong: Mask
    reason: str = NOT_INTEGER


class Columns(Protocol):
    """The columns of a run of rows."""

    def __len__(self) -> int: ...

    def numbers(self, column: str) -> Values[np.float64]:
        """A column as numbers."""
        ...

    def times(self, time: Time) -> Values[np.int64]:
        """A column as seconds since 1970."""
        ...

    def category(self, column: Categorical) -> Checked:
        """A column as categories."""
        ...

    def value(self, column: str, row: int) -> str:
        """What the file has there."""
        ...

    def index(self, column: str) -> int:
        """Where in the order of the file a column is."""
        ...


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a row is no sample."""

    column: str
    reason: str


@dataclass(frozen=True, slots=True)
class Converted:
    """The samples of a run of rows."""

    labels: Floats
    dense: Floats
    categories: Mapping[str, Category]
    times: NDArray[np.int64] | None

    def block(
        self, start: Place, end: Place, problems: tuple[Problem, ...], position: int, lines: NDArray[np.int64]
    ) -> Block:
        """As a block."""
        return Block(self.labels, self.dense, self.categories, start, end, self.times, problems, position, lines)


class _Faults:
    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self.of_row: dict[int, Fault] = {}

    def add(self, rows: Mask, column: str, reason: str) -> None:
        """The reason is what follows the value, or stands alone."""
        for row in map(int, np.flatnonzero(rows)):
            known = self.of_row.get(row)
            if known is None or self._columns.index(column) < self._columns.index(known.column):
                value = f"{shown(self._columns.value(column, row))} " if reason.startswith("is ") else ""
                self.of_row[row] = Fault(column, value + reason)


def shown(value: str) -> str:
    """A value in quotes, the start of it if it is long; bytes that are no text came as `\\xff` and stay so."""
    return repr(value if len(value) <= _SHOWN_MAX else value[:_SHOWN_MAX] + "...").replace("\\\\", "\\")


def convert(schema: Schema, columns: Columns) -> tuple[Converted, dict[int, Fault]]:
    """The samples of all rows, and the rows among them that have something wrong (their values mean nothing)."""
    faults = _Faults(columns)
    labels = _labels(schema, columns, faults)
    times = None if schema.time is None else _times(schema.time, columns, faults)
    dense = np.empty((len(columns), len(schema.numeric)), np.float32)
    for i, numeric in enumerate(schema.numeric):
        if numeric.transform == "hour_of_day":
            assert times is not None, "the schema was checked"
            dense[:, i] = times % _DAY_SECONDS // _HOUR_SECONDS / 24
        else:
            dense[:, i] = _numbers(numeric, columns, faults)
    categories = {}
    for column in schema.categorical:
        checked = columns.category(column)
        categories[column.column] = checked.category
        faults.add(checked.wrong, column.column, checked.reason)
    return Converted(labels, dense, categories, times), faults.of_row


def _labels(schema: Schema, columns: Columns, faults: _Faults) -> Floats:
    label = schema.label
    found = columns.numbers(label.column)
    faults.add(found.wrong, label.column, "is not a number")
    faults.add(found.missing, label.column, "the label is missing")
    if label.at_least is not None:
        return (found.values >= label.at_least).astype(np.float32)
    neither = (found.values != 0) & (found.values != 1)
    faults.add(neither & ~found.wrong, label.column, "is not 0 or 1")
    return found.values.astype(np.float32)


def _times(time: Time, columns: Columns, faults: _Faults) -> NDArray[np.int64]:
    found = columns.times(time)
    faults.add(found.wrong, time.column, f"is not a time of the kind {time.kind}")
    faults.add(found.missing, time.column, "the time is missing")
    return found.values


def _numbers(numeric: Numeric, columns: Columns, faults: _Faults) -> Floats:
    found = columns.numbers(numeric.column)
    faults.add(found.wrong, numeric.column, "is not a number")
    values = found.values
    if numeric.transform == "log":
        # In float64 and rounded once, so that the result does not depend on the last bit of a machine's logarithm.
        values = np.log1p(np.maximum(values, 0.0))
    with np.errstate(over="ignore"):
        floats = values.astype(np.float32)
    faults.add(~np.isfinite(floats), numeric.column, "is too large for a 32-bit number")
    return floats
