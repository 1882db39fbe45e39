"""Columns of a frame as NumPy arrays: views of its own memory wherever they can be, checked once (I8).

What is wrong is named by column and row, with what to do. Neither pandas nor polars is imported: both speak Arrow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from bagpipe.arrays import Int64s
from bagpipe.data.samples import spans
from bagpipe.errors import ConfigError, DataError, ValueRangeError

Array = NDArray[Any]

MISSING, UNSEEN = 0, 1
"""Rows of values that are absent, and of those that a given vocabulary does not have."""
NUM_SPECIAL = 2
ID_MAX = 2**63 - 1
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def to_arrow(frame: Any, columns: Sequence[str]) -> pa.Table:
    """The frame as an Arrow table; of pandas frames these columns only, since others may have to be copied."""
    if isinstance(frame, pa.Table):
        return frame
    pandas = type(frame).__module__.partition(".")[0] == "pandas" and hasattr(frame, "columns")
    if pandas:
        _refuse_unknown([name for name in frame.columns if isinstance(name, str)], columns)
    try:
        if isinstance(frame, pa.RecordBatch):
            return pa.Table.from_batches([frame])
        if pandas:
            return pa.Table.from_pandas(frame, columns=list(dict.fromkeys(columns)), preserve_index=False)
        if callable(getattr(frame, "to_arrow", None)):
            return frame.to_arrow()
        if hasattr(frame, "__arrow_c_stream__"):
            return pa.table(frame)
    except (pa.ArrowException, TypeError, ValueError) as error:
        said = ", ".join(map(str, error.args))
        raise DataError(f"the frame can't be read: {said}: give every column values of one type") from error
    hint = "call its collect() first" if hasattr(frame, "collect") else "give a pandas, polars or pyarrow frame"
    raise ConfigError(f"the frame is a {type(frame).__module__}.{type(frame).__qualname__}: {hint}")


def column_of(table: pa.Table, name: str) -> pa.ChunkedArray:
    """The column of this name."""
    _refuse_unknown(table.column_names, [name])
    return table.column(name)


def _refuse_unknown(names: Sequence[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        found = names.count(name)
        if found != 1:
            what = f"has {found} columns" if found else "has no column"
            raise ConfigError(f"the frame {what} {name!r}; its columns are {', '.join(map(repr, names))}")


def numbers(name: str, column: pa.ChunkedArray, *, null: float | None) -> Array:
    """The values of a column of numbers, all finite as float32; nulls have this value, or are refused."""
    kind = column.type
    if pa.types.is_decimal(kind):
        column = column.cast(pa.float64())
    elif not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise DataError(
            f"column {name!r} is {kind}, not numbers: convert it to floats first, or name it as categorical"
        )
    if column.null_count:
        if null is None:
            raise ValueRangeError(f"column {name!r}, row {_first_null(column)}: the label is missing: drop such rows")
        column = column.fill_null(pa.scalar(null).cast(column.type))
    values = as_numpy(column)
    if values.dtype.kind == "f":
        bad = ~(np.abs(values) <= _FLOAT32_MAX)
        if bad.any():
            row = int(bad.argmax())
            raise ValueRangeError(f"column {name!r}, row {row} is {values[row]}: give numbers that float32 can hold")
    return values


def as_numpy(column: pa.ChunkedArray | pa.Array) -> Array:
    """A column without nulls; a view of its memory if it lies in one piece."""
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks or [_none(column.type)])
    values: Array = column.to_numpy(zero_copy_only=False)
    return values


def _none(kind: pa.DataType) -> pa.Array:
    return pa.array([], kind)


def _first_null(column: pa.ChunkedArray) -> int:
    return int(pc.index(column.is_null(), True).as_py())


@dataclass(frozen=True, slots=True)
class Category:
    """A categorical column, its lists laid end to end."""

    name: str
    values: pa.ChunkedArray
    offsets: Int64s | None
    """Of lists: row i has values offsets[i] to offsets[i + 1]."""

    @property
    def is_text(self) -> bool:
        """Whether its values need a vocabulary."""
        return _is_text(self.values.type)

    def row(self, place: int) -> int:
        """The row of the frame that a value belongs to."""
        return place if self.offsets is None else int(np.searchsorted(self.offsets, place, side="right")) - 1


def category(name: str, column: pa.ChunkedArray) -> Category:
    """A column of ids or texts, or of lists of them; a list that is null is an empty bag."""
    offsets: Int64s | None = None
    kind = column.type
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = as_numpy(pc.fill_null(pc.list_value_length(column), 0)).astype(np.int64)
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        column = pc.list_flatten(column)
        if isinstance(column, pa.Array):
            column = pa.chunked_array([column])
    if pa.types.is_dictionary(column.type) and not _is_text(column.type):
        column = column.cast(column.type.value_type)
    if not (_is_text(column.type) or pa.types.is_integer(column.type) or pa.types.is_boolean(column.type)):
        raise DataError(f"column {name!r} is {kind}, {_remedy(column.type)}")
    return Category(name, column, offsets)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or _is_view(kind))


def _is_view(kind: pa.DataType) -> bool:
    return bool(getattr(pa.types, "is_string_view", lambda _: False)(kind))


def _remedy(kind: pa.DataType) -> str:
    if pa.types.is_floating(kind):
        return "and floats lose ids above 2**24: convert it to integers (in pandas .astype('Int64')) or to texts"
    if pa.types.is_null(kind):
        return "all of its values are missing: leave it out, or give it the type that it has elsewhere"
    return "which can't be ids: convert it to integers or texts"


def ids_of(column: Category, rows: int | None, missing: int | None) -> Array:
    """The ids of a column of integers as they are; nulls are `missing`, or refused."""
    values = column.values
    if values.type == pa.uint64() and (pc.max(values).as_py() or 0) > ID_MAX:
        place = int(pc.index(pc.greater(values, pa.scalar(ID_MAX, pa.uint64())), True).as_py())
        raise ValueRangeError(
            f"column {column.name!r}, row {column.row(place)}: id {values[place].as_py()} is above 2**63 - 1: "
            "view the column as signed integers first"
        )
    if values.null_count:
        if missing is None:
            row = column.row(_first_null(values))
            raise ValueRangeError(
                f"column {column.name!r}, row {row}: the id is missing: give missing=, the id that stands for it"
            )
        values = values.cast(pa.int64()).fill_null(missing)
    ids = as_numpy(values)
    if ids.dtype == bool:
        ids = ids.view(np.uint8)
    low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, 0)
    if rows is not None and not 0 <= low <= high < rows:
        place = int(((ids < 0) | (ids >= rows)).argmax())
        raise ValueRangeError(
            f"column {column.name!r}, row {column.row(place)}: id {ids[place]} is out of range for its table "
            f"({rows} rows): raise the table's rows or check the data"
        )
    return ids


class Texts:
    """The vocabulary of one table: texts numbered by first appearance, from row 2 on."""

    def __init__(self, known: pa.Array | None = None) -> None:
        self.values = pa.array([], pa.large_string()) if known is None else known
        self._frozen = known is not None

    def encode(self, column: Category) -> Array:
        """The row of each value; values not seen before are added, or are row 1 if the vocabulary was given."""
        codes, values = _codes(column.values)
        if not self._frozen:
            new = values.filter(pc.invert(pc.is_in(values, value_set=self.values))).drop_null().unique()
            self.values = pa.concat_arrays([self.values, new])
        found = pc.index_in(values, value_set=self.values)
        rows = pc.add(found.cast(pa.int64()), NUM_SPECIAL)
        rows = pc.if_else(pc.is_null(values), MISSING, pc.fill_null(rows, UNSEEN))
        # One more entry, the last, is what the code -1 of a null refers to.
        table = np.append(as_numpy(rows).astype(np.int32 if len(self.values) < 2**31 - 2 else np.int64), MISSING)
        return table[codes]


def _codes(column: pa.ChunkedArray) -> tuple[Array, pa.Array]:
    """For each value the place of its text, -1 for nulls; and the texts in order of first appearance."""
    if pa.types.is_dictionary(column.type):
        column = column.unify_dictionaries()
    else:
        column = (column.cast(pa.large_string()) if _is_view(column.type) else column).dictionary_encode()
    chunks = column.chunks
    if not chunks:
        return np.empty(0, np.int64), pa.array([], pa.large_string())
    codes = as_numpy(pa.chunked_array([pc.fill_null(chunk.indices.cast(pa.int64()), -1) for chunk in chunks]))
    texts = chunks[0].dictionary.cast(pa.large_string())
    # Categories come in an order of their own, used or not: assigned backwards, each keeps its first place.
    firsts = np.full(len(texts) + 1, len(codes), np.int64)
    firsts[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)
    order = np.argsort(firsts[:-1], kind="stable")[: int((firsts[:-1] < len(codes)).sum())]
    places = np.full(len(texts) + 1, -1, np.int64)
    places[order] = np.arange(len(order))
    return places[codes], texts.take(pa.array(order))


@dataclass(frozen=True, slots=True)
class Stored:
    """The ids of a feature, in the type that they have."""

    ids: Array
    offsets: Int64s | None

    def take(self, samples: Int64s) -> tuple[Int64s, Int64s | None]:
        """The ids of some samples, and where each begins if they are bags; in memory of their own."""
        if self.offsets is None:
            return self.ids[samples].astype(np.int64, copy=False).reshape(-1, 1), None
        starts = self.offsets[samples]
        lengths = self.offsets[samples + 1] - starts
        values = self.ids[spans(starts, lengths)].astype(np.int64, copy=False)
        return values, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
