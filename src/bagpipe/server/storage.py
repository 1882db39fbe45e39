"""Where a server keeps its rows: memory, or files in a directory. It is made when the first client says how wide."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from bagpipe.arrays import Floats, Int64s
from bagpipe.store.directory import INDEX_NAME, StoreDirectory
from bagpipe.store.local import LocalStore
from bagpipe.store.mapped import RESIDENT_BYTES_MAX, MappedStore
from bagpipe.store.memory import MemoryStore

_ROWS = re.compile(rf"table-\d{{5}}\.(rows|ids)|{re.escape(INDEX_NAME)}(\.new)?")


@dataclass(frozen=True, slots=True)
class Width:
    """All that a server knows of a table."""

    width: int

    def initialise(self, ids: Int64s, out: Floats) -> None:  # noqa: ARG002
        """Never called: a row that was not written is the client's to compute."""
        raise AssertionError("a server has no initial rows")


@dataclass(frozen=True, slots=True)
class Rows:
    """A store, and how many threads may copy its rows at once."""

    store: LocalStore
    copiers: int


Storage: TypeAlias = Callable[[Sequence[int]], Rows]
"""Makes the store of tables of these widths."""


def in_memory(bytes_max: int | None = None) -> Storage:
    """Rows in this process's memory."""
    return lambda widths: Rows(MemoryStore(list(map(Width, widths)), bytes_max=bytes_max), copiers=64)


def in_files(
    directory: Path, *, keep: bool = False, bytes_max: int | None = None, resident_bytes_max: int = RESIDENT_BYTES_MAX
) -> Storage:
    """Rows in files of a directory that is new or empty; removed at the end unless `keep`."""

    def make(widths: Sequence[int]) -> Rows:
        tables = list(map(Width, widths))
        store = MappedStore.create(directory, tables, keep=keep, resident_bytes_max=resident_bytes_max)
        store.bytes_in_memory_max = bytes_max
        return Rows(store, copiers=2)  # its bound on the page cache counts with one reader and one writer

    return make


def remove_rows(directory: Path) -> None:
    """Remove the files of rows that a server which has died left in a directory, and nothing else that may be there.

    StoreError if somebody still uses them.
    """
    left = StoreDirectory(directory.resolve(), keep=True)  # claims it
    try:
        for path in sorted(directory.iterdir()):
            if _ROWS.fullmatch(path.name):
                path.unlink()
    finally:
        left.close()
