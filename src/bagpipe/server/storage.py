"""Where a server keeps its rows: memory, or files in a directory. It is made when the first client says how wide."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from bagpipe.arrays import Floats, Int64s
from bagpipe.store.local import LocalStore, MemoryStore
from bagpipe.store.mapped import RESIDENT_BYTES_MAX, MappedStore


@dataclass(frozen=True, slots=True)
class Width:
    """All that a server knows of a table."""

    width: int

    def initialise(self, ids: Int64s, out: Floats) -> None:  # noqa: ARG002
        """Never called: a row that was not written is the client's to compute."""
        raise AssertionError("a server has no initial rows")


Storage: TypeAlias = Callable[[Sequence[int]], LocalStore]
"""Makes the store of tables of these widths."""


def in_memory(bytes_max: int | None = None) -> Storage:
    """Rows in this process's memory."""
    return lambda widths: MemoryStore(list(map(Width, widths)), bytes_max=bytes_max)


def in_files(
    directory: Path | None = None, *, bytes_max: int | None = None, resident_bytes_max: int = RESIDENT_BYTES_MAX
) -> Storage:
    """Rows in files without names, in a directory, else in that of temporary files."""

    def make(widths: Sequence[int]) -> LocalStore:
        store = MappedStore(list(map(Width, widths)), directory, resident_bytes_max=resident_bytes_max)
        store.bytes_in_memory_max = bytes_max
        return store

    return make
