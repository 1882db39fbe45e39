"""Parquet files as batches of rows, and from these to blocks of samples; row groups are streamed, not held (I5)."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bagpipe.data.prepare.block import Block, Place, Problem
from bagpipe.data.prepare.cells import Mask, Values, category_of_integers, cells_of
from bagpipe.data.prepare.convert import NOT_INTEGER, Checked, convert
from bagpipe.data.prepare.parse import any_of_list, beyond_calendar, cells_as_times, is_utf8, numbers_as_times
from bagpipe.data.prepare.schema import Categorical, Schema, Time
from bagpipe.data.prepare.sources import Source
from bagpipe.errors import DataError

_ROWS_MAX = 1 << 16
_VALUE_BYTES = 8  # at least, once it is decoded
_READ_BYTES = 1 << 18
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_NOT_UTF8 = "is not UTF-8"
_UNSIGNED_LIMIT, _SIGNED_LIMIT = 2.0**64, 2.0**63


@dataclass(frozen=True, slots=True)
class Batch:
    """A run of rows of a file."""

    rows: pa.RecordBatch
    start: Place
    end: Place
    position: int


def check_parquet(schema: Schema, source: Source) -> dict[str, str]:
    """See that a file has the columns of the schema, of types that can be read; the kind of each categorical one."""
    with _opened(source) as file:
        found = file.schema_arrow
    schema.check_columns(tuple(found.names), f"{source.path}")
    for name in schema.used:
        if name not in {column.column for column in schema.categorical}:
            _check_type(
                source, name, found.field(name).type, of_time=schema.time is not None and name == schema.time.column
            )
    kinds = {column.column: _kind(source, column, found.field(column.column).type) for column in schema.categorical}
    for table, names in schema.tables.items():
        if len({kinds[name] for name in names}) > 1:
            raise DataError(
                f"{source.path}: columns {', '.join(names)} share table {table!r}, but some are text and some whole "
                f"numbers: give them kind 'text' in the schema, or tables of their own"
            )
    return kinds


def _check_type(source: Source, name: str, kind: pa.DataType, of_time: bool) -> None:
    kind = _decoded(kind)
    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    number = number or pa.types.is_decimal(kind) or _is_text(kind) or pa.types.is_null(kind)
    moment = of_time and (pa.types.is_timestamp(kind) or pa.types.is_date(kind))
    if not number and not moment:
        wanted = "a time" if of_time else "a number"
        raise DataError(f"{source.path}: column {name!r} is {kind}, which can't be read as {wanted}: change the schema")


def _kind(source: Source, column: Categorical, kind: pa.DataType) -> str:
    value = _decoded(kind.value_type) if _is_list(kind) else _decoded(kind)
    whole = pa.types.is_integer(value) or pa.types.is_boolean(value)
    if _is_text(value) or pa.types.is_null(value):
        return column.kind or "text"
    if whole or (pa.types.is_floating(value) and column.kind != "text"):
        return column.kind or "integer"
    raise DataError(
        f"{source.path}: column {column.column!r} is {kind}, which can't be read as {column.kind or 'a category'}: "
        "text, whole numbers and lists of them can"
    )


def _decoded(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _is_text(kind: pa.DataType) -> bool:
    return any(
        is_kind(kind)
        for is_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def read_batches(
    schema: Schema, sources: Sequence[Source], start: Place, block_bytes: int
) -> Generator[Batch, None, None]:
    """The rows of all files from a place on, in batches of about `block_bytes`, none across two row groups."""
    before = sum(source.size for source in sources[: start.file])
    for number in range(start.file, len(sources)):
        source, place = sources[number], max(start, Place(number))
        with _opened(source) as file:
            for group in range(place.offset, file.num_row_groups):
                for rows, end in _of_group(schema, source, file, group, place, block_bytes):
                    source.check()
                    done = source.size * end.line // max(file.metadata.num_rows, 1)
                    yield Batch(rows, place, end, before + done)
                    place = end
        source.check()
        before += source.size


def _of_group(
    schema: Schema, source: Source, file: Any, group: int, place: Place, block_bytes: int
) -> Iterator[tuple[pa.RecordBatch, Place]]:
    details = file.metadata.row_group(group)
    first = sum(file.metadata.row_group(earlier).num_rows for earlier in range(group))
    row_bytes = max(details.total_byte_size // max(details.num_rows, 1), _VALUE_BYTES * len(schema.used))
    num_rows = min(max(block_bytes // row_bytes, 1), _ROWS_MAX)
    line, last = first, first + details.num_rows
    batches = file.iter_batches(num_rows, row_groups=[group], columns=list(schema.used), use_threads=False)
    while True:
        try:
            batch = next(batches, None)
        except (OSError, pa.ArrowException) as error:
            raise DataError(
                f"{source.path} can't be read on from row {line + 1:,}, in row group {group}: it is damaged "
                f"({error}): fetch it again"
            ) from error
        if batch is None:
            return
        skipped = max(place.line - line, 0)
        line += batch.num_rows
        if skipped < batch.num_rows:
            yield batch.slice(skipped), Place(place.file, group + (line == last), line)


def _opened(source: Source) -> Any:
    try:
        return pq.ParquetFile(source.path, pre_buffer=False, buffer_size=_READ_BYTES)
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{source.path} is not a parquet file, or damaged ({error}): check the path, or fetch it again"
        ) from error


@dataclass(frozen=True, slots=True)
class _ParquetColumns:
    """The columns of some rows."""

    order: tuple[str, ...]
    arrays: dict[str, pa.Array]
    missing: tuple[str, ...]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values())))

    def numbers(self, column: str) -> Values[np.float64]:
        array = self.arrays[column]
        if _is_text(array.type):
            return cells_of(_narrow(array)).without(self.missing).numbers()
        return _numbers(array)

    def times(self, time: Time) -> Values[np.int64]:
        array = self.arrays[time.column]
        if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
            return _moments(array)
        if _is_text(array.type) or time.kind not in ("unix", "unix_ms"):
            return cells_as_times(cells_of(_narrow(array.cast(pa.string()))).without(self.missing), time.kind)
        return numbers_as_times(_numbers(array), time.kind)

    def category(self, column: Categorical) -> Checked:
        array, offsets = self.arrays[column.column], None
        if _is_list(array.type):
            lengths = array.value_lengths().fill_null(0).to_numpy()
            offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
            array = _plain(array.flatten())
        if _is_text(array.type) or pa.types.is_null(array.type) or column.kind == "text":
            checked = self._of_texts(array, column.kind, offsets)
        else:
            found = _integers(array)
            checked = Checked(category_of_integers(found.values, found.missing, offsets), found.wrong, NOT_INTEGER)
        if offsets is not None:
            return Checked(checked.category, any_of_list(checked.wrong, offsets), checked.reason)
        return checked

    def _of_texts(self, array: pa.Array, kind: str | None, offsets: NDArray[np.int64] | None) -> Checked:
        narrow = array.cast(pa.string()) if not _is_text(array.type) else _narrow(array)
        cells = cells_of(narrow).without(self.missing)
        if kind == "integer":
            found = cells.integers()
            return Checked(category_of_integers(found.values, found.missing, offsets), found.wrong, NOT_INTEGER)
        category, wrong = cells.category(offsets), np.zeros(len(cells), np.bool_)
        try:
            category.values.validate(full=True)  # the reader takes a file's word that its strings are UTF-8
        except pa.ArrowInvalid:
            wrong = np.array([not is_utf8(cells.text(i)) for i in range(len(cells))], np.bool_)
        return Checked(category, wrong, _NOT_UTF8)

    def value(self, column: str, row: int) -> str:
        return str(_python(self.arrays[column][row]))

    def index(self, column: str) -> int:
        return self.order.index(column)

    def line(self, row: int) -> bytes:
        """A row as JSON."""
        values = {name: _python(array[row]) for name, array in self.arrays.items()}
        return json.dumps(values, default=str, ensure_ascii=False).encode()

    def kept(self, rows: NDArray[np.int64]) -> _ParquetColumns:
        """Those of some rows only."""
        arrays = {name: array.take(pa.array(rows)) for name, array in self.arrays.items()}
        return _ParquetColumns(self.order, arrays, self.missing)


class ParquetParser:
    """Makes blocks of the batches of one file."""

    def __init__(self, schema: Schema, source: Source) -> None:
        self._schema, self._file = schema, str(source.path)
        with _opened(source) as file:
            self._order = tuple(file.schema_arrow.names)

    def parse(self, batch: Batch) -> Block:
        """The samples of a batch, and the rows that give none."""
        arrays = {name: _plain(batch.rows.column(name)) for name in self._schema.used}
        columns = _ParquetColumns(self._order, arrays, self._schema.missing)
        converted, faults = convert(self._schema, columns)
        problems, first = [], batch.end.line - len(columns) + 1
        good = np.arange(len(columns))
        if faults:
            for row, fault in sorted(faults.items()):
                problems.append(Problem(self._file, first + row, fault.column, fault.reason, columns.line(row)))
            good = np.setdiff1d(good, np.fromiter(faults, np.int64, len(faults)))
            converted, _ = convert(self._schema, columns.kept(good))
        return converted.block(batch.start, batch.end, tuple(problems), batch.position, first + good)


def _python(value: pa.Scalar) -> object:
    try:
        found: object = value.as_py()
    except UnicodeDecodeError:
        found = value.cast(pa.binary()).as_py()
    return found.decode(errors="backslashreplace") if isinstance(found, bytes) else found


def _plain(array: pa.Array) -> pa.Array:
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _narrow(array: pa.Array) -> pa.Array:
    """Texts as bytes with 32-bit offsets; a block is far below 2 GB."""
    return array.cast(pa.binary())


def _split(array: pa.Array) -> tuple[NDArray[Any], Mask]:
    """Values, 0 where null, and where that is."""
    missing = array.is_null().to_numpy(zero_copy_only=False)
    return (array.fill_null(0) if array.null_count else array).to_numpy(zero_copy_only=False), missing


def _numbers(array: pa.Array) -> Values[np.float64]:
    values, missing = _split(array.cast(pa.float64(), safe=False))
    missing = missing | np.isnan(values)
    wrong = np.isinf(values)
    return Values(np.where(missing | wrong, 0.0, values), missing, wrong)


def _integers(array: pa.Array) -> Values[np.int64]:
    """Numbers above 2^63 - 1 are wrong: their bits are those of negative ones."""
    if pa.types.is_floating(array.type):
        found = _numbers(array)
        wrong = found.wrong | (found.values != np.floor(found.values)) | (np.abs(found.values) >= _SIGNED_LIMIT)
        return Values(np.where(wrong, 0.0, found.values).astype(np.int64), found.missing, wrong)
    if pa.types.is_uint64(array.type):
        unsigned, missing = _split(array)
        wrong = unsigned > np.uint64(2**63 - 1)
        return Values(np.where(wrong, 0, unsigned).astype(np.int64), missing, wrong)
    values, missing = _split(array.cast(pa.int64()))
    return Values(values, missing, np.zeros(len(values), np.bool_))


def _moments(array: pa.Array) -> Values[np.int64]:
    if pa.types.is_date(array.type):
        array = array.cast(pa.timestamp("ms"))
    per_second = _PER_SECOND[array.type.unit]
    values, missing = _split(array.cast(pa.int64()))
    seconds = values // per_second
    wrong = beyond_calendar(seconds)
    return Values(np.where(wrong, 0, seconds), missing, wrong)
