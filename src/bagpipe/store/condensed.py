"""All rows of one mark beside a journal, in the place of what was logged before it: a journal stays bounded (I5).

It has the form of a checkpoint of this store's rows alone, and so is complete or invisible (I6).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.disk import Disk
from bagpipe.checkpoint.manifest import Facts, TableEntry
from bagpipe.checkpoint.reading import Checkpoint
from bagpipe.checkpoint.shards import Report, write_rows
from bagpipe.store.versioned import RowReader


class Condensed:
    """The rows of a mark in a directory of their own, and of the one before as long as the journal goes on from it."""

    def __init__(self, directory: Path, disk: Disk, widths: Sequence[int]) -> None:
        self._files = Checkpoints(directory, keep=2, full_every=1, disk=disk)
        self._tables = [(str(table), width) for table, width in enumerate(widths)]

    @property
    def names(self) -> list[str]:
        """Of the tables in it."""
        return [name for name, _ in self._tables]

    def marks(self) -> list[int]:
        """The marks whose rows are there."""
        return [checkpoint.done for checkpoint in self._files.list()]

    def open(self, done: int) -> Checkpoint:
        """The rows of a mark."""
        return self._files.open(done)

    def write(self, done: int, snapshot: RowReader, report: Report | None = None) -> None:
        """Write the rows of a mark; those of the one before stay until they are discarded.

        `report` is told how many bytes are done.
        """
        entries = [
            TableEntry(name=name, rows=None, dims=(width,), width=width, optimizer="none")
            for name, width in self._tables
        ]
        with self._files.begin(done, full=True) as pending:
            pending.add(write_rows(self._files.disk, pending.directory, snapshot, self._tables, report=report))
            pending.commit(Facts(tables=tuple(entries)))

    def discard(self, which: Callable[[int], bool]) -> None:
        """Remove the rows of marks for which this is true."""
        self._files.discard(which)
