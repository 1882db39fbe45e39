"""Rows of a recorded store with one number in all columns, and what a plain dict says of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from bagpipe.store import MemoryStore
from bagpipe.store.local import LocalStore
from bagpipe.store.recorded import Recorded

WIDTHS = (3, 1)


class Ids:
    """A row that was never written is its id."""

    def __init__(self, width: int) -> None:
        self.width = width

    def initialise(self, ids: np.ndarray, out: np.ndarray) -> None:
        out[:] = ids[:, None]


TABLES = tuple(map(Ids, WIDTHS))
Table = dict[int, tuple[float, int]]
"""By id in order of first write: the value of a row, in all columns, and when it was written."""


def memory() -> MemoryStore:
    return MemoryStore(TABLES, chunk_bytes=64)


def write(store: Recorded | LocalStore, table: int, rows: dict[int, float]) -> None:
    ids = np.array(list(rows), np.int64)
    store.write(table, ids, np.repeat(np.array(list(rows.values()), np.float32)[:, None], WIDTHS[table], 1))


def contents(chunks: Iterator[tuple[np.ndarray, np.ndarray]]) -> list[tuple[int, float]]:
    found = []
    for ids, values in chunks:
        assert len(ids)
        assert (values == values[:, :1]).all()
        found += list(zip(ids.tolist(), values[:, 0].tolist(), strict=True))
    return found


def rows_of(store: Recorded, table: int = 0) -> list[tuple[int, float]]:
    return contents(store.iterate(table))


def plain(table: Table) -> list[tuple[int, float]]:
    return [(row, value) for row, (value, _) in table.items()]
