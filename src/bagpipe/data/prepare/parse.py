"""A piece of a text file to a block of samples; what can't be used is named by line and column (I8)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bagpipe.data.prepare import cell_kernels as kernels
from bagpipe.data.prepare.block import Block, Problem
from bagpipe.data.prepare.cells import Cells, Mask, Values, category_of_integers
from bagpipe.data.prepare.convert import Checked, Fault, convert, shown
from bagpipe.data.prepare.schema import Categorical, Schema, Time
from bagpipe.data.prepare.text import Piece
from bagpipe.data.prepare.times import HOURS, ISO

_QUOTE_FAULTS = {
    kernels.OPEN_QUOTE: "a quote is not closed in this line (a cell can't go on in the next one)",
    kernels.AFTER_QUOTE: "text follows the closing quote of a cell",
}
_YEAR_1, _YEAR_10000 = -62_135_596_800, 253_402_300_800
_WAYS = {"yymmddhh": HOURS, "iso": ISO}


def beyond_calendar(seconds: NDArray[np.int64] | NDArray[np.float64]) -> Mask:
    """Times outside the years in which days have names."""
    result: Mask = (seconds < _YEAR_1) | (seconds >= _YEAR_10000)
    return result


def numbers_as_times(found: Values[np.float64], kind: str) -> Values[np.int64]:
    """Seconds since 1970 from numbers that count seconds or milliseconds since then."""
    seconds = np.floor(found.values / 1000 if kind == "unix_ms" else found.values)
    wrong = found.wrong | beyond_calendar(seconds)
    return Values(np.where(wrong, 0, seconds).astype(np.int64), found.missing, wrong)


def cells_as_times(cells: Cells, kind: str) -> Values[np.int64]:
    """Seconds since 1970 from texts."""
    return cells.times(_WAYS[kind]) if kind in _WAYS else numbers_as_times(cells.numbers(), kind)


def cells_as_category(cells: Cells, kind: str | None, offsets: NDArray[np.int64] | None) -> Checked:
    """Categories from texts, checked; with offsets, the cells are those of lists."""
    if kind != "integer":
        wrong = np.zeros(len(cells) if offsets is None else len(offsets) - 1, np.bool_)
        return Checked(cells.category(offsets), wrong)
    found = cells.integers()
    category = category_of_integers(found.values, found.missing, offsets)
    return Checked(category, found.wrong if offsets is None else any_of_list(found.wrong, offsets))


def any_of_list(marked: Mask, offsets: NDArray[np.int64]) -> Mask:
    """Which lists have a marked value."""
    before = np.concatenate(([0], np.cumsum(marked)))
    result: Mask = before[offsets[1:]] > before[offsets[:-1]]
    return result


@dataclass(frozen=True, slots=True)
class _TextColumns:
    """The used columns of some lines."""

    order: tuple[str, ...]
    """All columns of the file."""
    cells: dict[str, Cells]
    missing: tuple[str, ...]

    def __len__(self) -> int:
        return len(next(iter(self.cells.values())))

    def numbers(self, column: str) -> Values[np.float64]:
        return self.cells[column].numbers()

    def times(self, time: Time) -> Values[np.int64]:
        return cells_as_times(self.cells[time.column], time.kind)

    def category(self, column: Categorical) -> Checked:
        cells = self.cells[column.column]
        if column.separator is None:
            return cells_as_category(cells, column.kind, None)
        offsets, parts = cells.split(column.separator)
        return cells_as_category(parts.without(self.missing), column.kind, offsets)

    def value(self, column: str, row: int) -> str:
        return self.cells[column].text(row).decode(errors="replace")

    def index(self, column: str) -> int:
        return self.order.index(column)

    def kept(self, rows: NDArray[np.int64]) -> _TextColumns:
        """Those of some lines only."""
        kept = {name: Cells(c.data, c.starts[rows], c.lengths[rows]) for name, c in self.cells.items()}
        return _TextColumns(self.order, kept, self.missing)


class _Lines:
    """The lines of a piece while it is parsed: those that may still give a sample, and the problems of the others."""

    def __init__(self, file: str, piece: Piece, starts: NDArray[np.int32]) -> None:
        self._file, self._piece, self._starts = file, piece, starts
        self.rows = np.arange(len(starts))
        self.problems: dict[int, Problem] = {}

    def text(self, line: int) -> bytes:
        """A line as it stands in the file, without its end."""
        end = self._starts[line + 1] if line + 1 < len(self._starts) else len(self._piece.data)
        return self._piece.data[self._starts[line] : end].removesuffix(b"\n").removesuffix(b"\r")

    def refuse(self, line: int, column: str | None, reason: str, text: bytes | None = None) -> None:
        """A line gives no sample."""
        text = self.text(line) if text is None else text
        self.problems[line] = Problem(self._file, self._piece.start.line + line + 1, column, reason, text)

    def drop(self, faults: Mapping[int, Fault]) -> NDArray[np.int64]:
        """Refuse some of the rows; the others."""
        for row, fault in faults.items():
            self.refuse(int(self.rows[row]), fault.column, fault.reason)
        kept = np.setdiff1d(np.arange(len(self.rows)), np.fromiter(faults, np.int64, len(faults)))
        self.rows = self.rows[kept]
        return kept


class TextParser:
    """Makes blocks of the pieces of one file."""

    def __init__(self, schema: Schema, file: str, columns: tuple[str, ...]) -> None:
        self._schema, self._file, self._columns = schema, file, columns
        slots = {name: slot for slot, name in enumerate(schema.used)}
        self._slots = np.array([slots.get(name, -1) for name in columns], np.int32)
        self._separator = np.frombuffer(schema.cell_separator.encode(), np.uint8)

    def parse(self, piece: Piece) -> Block:
        """The samples of a piece, and the lines that give none."""
        lines, columns = self._cut(piece)
        if faults := self._undecodable(piece.data, lines, columns):
            columns = columns.kept(lines.drop(faults))
        converted, faults = convert(self._schema, columns)
        if faults:
            converted, _ = convert(self._schema, columns.kept(lines.drop(faults)))
        problems = tuple(lines.problems[line] for line in sorted(lines.problems))
        numbers = piece.start.line + 1 + lines.rows
        return converted.block(piece.start, piece.end, problems, piece.position, numbers)

    def _cut(self, piece: Piece) -> tuple[_Lines, _TextColumns]:
        raw = b"" if piece.cut_short else piece.data
        num_lines, num_slots = 0 if piece.cut_short else piece.end.line - piece.start.line, len(self._schema.used)
        starts, states = np.empty(num_lines, np.int32), np.empty(num_lines, np.uint8)
        counts = np.empty(num_lines, np.int32)
        cells = np.zeros((2, num_slots, num_lines), np.int32)
        quotes = self._schema.format == "csv" and b'"' in raw
        data = np.frombuffer(raw, np.uint8)
        _, num_doubled = kernels.cut_cells(
            data, self._separator, quotes, self._slots, starts, states, counts, cells[0], cells[1]
        )
        if num_doubled:
            data = _undouble(raw, cells[0], cells[1])
        columns = {
            name: Cells(data, cells[0, slot], cells[1, slot]).without(self._schema.missing)
            for slot, name in enumerate(self._schema.used)
        }
        lines = _Lines(self._file, piece, starts)
        table = _TextColumns(self._columns, columns, self._schema.missing)
        if piece.cut_short:
            lines.refuse(0, None, f"the line is longer than {len(piece.data):,} bytes", piece.data)
        return lines, self._whole(lines, table, states, counts)

    def _whole(
        self, lines: _Lines, columns: _TextColumns, states: NDArray[np.uint8], counts: NDArray[np.int32]
    ) -> _TextColumns:
        """The rows of lines that have all their columns; of the others only the empty ones are no problem."""
        expected = len(self._columns)
        whole = (states == kernels.WHOLE) & (counts == expected)
        if whole.all():
            return columns
        for line in map(int, np.flatnonzero(~whole)):
            if states[line] == kernels.WHOLE:
                found = "1 column" if counts[line] == 1 else f"{counts[line]} columns"
                lines.refuse(line, None, f"has {found}, {expected} expected")
            elif states[line] != kernels.EMPTY:
                lines.refuse(line, None, _QUOTE_FAULTS[int(states[line])])
        lines.rows = np.flatnonzero(whole)
        return columns.kept(lines.rows)

    def _undecodable(self, data: bytes, lines: _Lines, columns: _TextColumns) -> dict[int, Fault]:
        """Rows with a cell that is not UTF-8; of columns that are not used nobody asks."""
        if is_utf8(data):
            return {}
        faults = {}
        for row, line in enumerate(map(int, lines.rows)):
            if not is_utf8(lines.text(line)):
                for name in sorted(columns.cells, key=self._columns.index):
                    text = columns.cells[name].text(row)
                    if not is_utf8(text):
                        faults[row] = Fault(name, f"{shown(text.decode(errors='backslashreplace'))} is not UTF-8")
                        break
        return faults


def is_utf8(data: bytes | NDArray[np.uint8]) -> bool:
    """Whether bytes are text."""
    whole = pa.Array.from_buffers(
        pa.large_string(), 1, [None, pa.py_buffer(np.array([0, len(data)])), pa.py_buffer(data)]
    )
    try:
        whole.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _undouble(raw: bytes, starts: NDArray[np.int32], lengths: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Write the cells with doubled quotes, which have negative lengths, anew behind all others."""
    extra, size = [], len(raw)
    for place in np.argwhere(lengths < 0):
        slot, line = map(int, place)
        start = int(starts[slot, line])
        text = raw[start : start + ~int(lengths[slot, line])].replace(b'""', b'"')
        starts[slot, line], lengths[slot, line] = size, len(text)
        extra.append(text)
        size += len(text)
    return np.frombuffer(b"".join([raw, *extra]), np.uint8)
