"""Lists of rows table by table, and in blocks: what is on its way between cache and store takes bounded memory (I5)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from bagpipe.oracle.row_list import RowList

Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]

STAGED_ROWS = 1 << 17
"""Rows that are on their way to their slots at once, and as many on their way to the store: what is larger moves in
blocks."""


def blocks_of(rows: RowList) -> list[RowList]:
    """A list in blocks of at most STAGED_ROWS rows; at least one."""
    if len(rows) <= STAGED_ROWS:
        return [rows]
    blocks = []
    for first in range(0, len(rows), STAGED_ROWS):
        part = slice(first, first + STAGED_ROWS)
        blocks.append(RowList(rows.ids[part], rows.slots[part], np.clip(rows.bounds - first, 0, STAGED_ROWS)))
    return blocks


def tables_of(rows: RowList) -> Iterator[tuple[int, Ids, Slots]]:
    """The parts of a list that are not empty: table, ids, slots."""
    for table in np.flatnonzero(np.diff(rows.bounds)).tolist():
        part = slice(int(rows.bounds[table]), int(rows.bounds[table + 1]))
        yield table, rows.ids[part], rows.slots[part]
