"""The tables as the oracle knows them, and where it notes what it knows of each row: two small numbers a row.

Tables of known, moderate size use arrays addressed by id, all in one. The others are mapped: memory follows the rows
that are in the cache, in the window, or were written back lately (I5). Plans are the same either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import ConfigError
from bagpipe.kernels.window_map import WindowMap

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

ROWS_DIRECT_MAX = 64_000_000
"""Tables with more rows are mapped."""
BYTES_DIRECT_MAX = 4_000_000_000
"""So are the largest ones when the arrays of all would take more."""
_BYTES_A_ROW = 12
_NO_KEYS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class OracleTable:
    """An id space: its features, in the order of a batch's ids, and the slot space that its rows live in."""

    name: str
    rows: int | None = None
    """Ids are in [0, rows); None: any 64-bit id."""
    features: tuple[str, ...] = ()
    """The features whose ids are rows of this table; empty: one feature of the table's own name."""
    group: int = 0
    """Tables of equal row width share the slot space of this number."""
    width: int | None = None
    """Floats in a row, for messages."""

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ConfigError(f"table {self.name!r} has {self.rows} rows: give at least 1, or leave the size out")
        if self.group < 0:
            raise ConfigError(f"table {self.name!r} is in group {self.group}: groups are numbered from 0")
        if not self.features:
            object.__setattr__(self, "features", (self.name,))


def described(tables: Sequence[OracleTable]) -> str:
    """The tables of a group, for messages."""
    names = ", ".join(repr(table.name) for table in tables[:3]) + (", ..." if len(tables) > 3 else "")
    width = tables[0].width
    return f"{'table' if len(tables) == 1 else 'tables'} {names}" + (f" (rows of {width} floats)" if width else "")


class DirectRows:
    """Words and places of several tables, addressed by table base + id."""

    def __init__(self, tables: Sequence[OracleTable], members: Sequence[int]) -> None:
        sizes = {t: tables[t].rows or 0 for t in members}
        self.bases: Int64s = np.zeros(len(tables), np.int64)
        for t, base in zip(members, np.cumsum([0, *sizes.values()]), strict=False):
            self.bases[t] = base
        total = sum(sizes.values())
        self.words: Int64s = np.zeros(total, np.int64)
        self.places: Int32s = np.zeros(total, np.int32)
        self.keys = _NO_KEYS

    def entries(self, ids: Int64s) -> Int64s:
        """Where rows are noted, less their table's base."""
        return ids

    def ids(self, tables: int | Int64s, entries: Int64s) -> Int64s:
        """The ids of entries of a table, or of one table each."""
        return entries - self.bases[tables]


class MappedRows:
    """Words and places of one table, addressed through a map."""

    def __init__(self, num_tables: int) -> None:
        self.map = WindowMap()
        self.bases: Int64s = np.zeros(num_tables, np.int64)

    @property
    def words(self) -> Int64s:
        """The word of each entry."""
        return self.map.words

    @property
    def places(self) -> Int32s:
        """The place of each entry."""
        return self.map.places

    @property
    def keys(self) -> Int64s:
        """The id of each entry."""
        return self.map.keys

    def entries(self, ids: Int64s) -> Int64s:
        """Where rows are noted; room for them has been reserved."""
        entries = np.empty(len(ids), np.int64)
        self.map.find_or_take(ids, entries)
        return entries

    def ids(self, tables: int | Int64s, entries: Int64s) -> Int64s:  # noqa: ARG002 - the same call as for direct rows
        """The ids of entries."""
        return self.map.keys[entries]


Rows = DirectRows | MappedRows


def is_direct(tables: Sequence[OracleTable], rows_max: int, bytes_max: int) -> list[bool]:
    """Which tables get arrays: those of at most rows_max rows, smallest first, as long as bytes_max is kept."""
    direct = [False] * len(tables)
    left = min(bytes_max // _BYTES_A_ROW, 2**31 - 1)
    for t in sorted(range(len(tables)), key=lambda t: tables[t].rows or 0):
        rows = tables[t].rows
        if rows is not None and rows <= min(rows_max, left):
            direct[t] = True
            left -= rows
    return direct
