"""Samples in order of time, by an external sort: memory is bounded by a setting, the rest lies in a file (I5).

Runs of samples that fit in memory are sorted and written; then all runs are merged. Both are stable, so the order is
that of time and then of the source, whatever the memory and the size of blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bagpipe.data.prepare.block import BEGINNING, Block, Category, Place
from bagpipe.data.prepare.cells import category_of_integers, cells_of
from bagpipe.errors import DataError

BLOCK_ROWS = 1 << 15
"""Samples of a block at most."""
FAN_IN = 64
"""How many runs are merged at once."""
_RUN_BYTES_MAX = 1 << 30
_TIME, _LABEL = "time", "label"


def in_time_order(
    blocks: Iterable[Block], directory: Path, start: Place = BEGINNING, *, memory_bytes: int = 256 << 20
) -> Iterator[Block]:
    """The samples of all blocks in order of time, those of one second as they came; `directory` takes what is spooled.

    First, while everything is read, come blocks without samples, with the problems. Places are not those of the files:
    `offset` counts problems and `line` samples, and from one of them (all files are read and sorted again) the rest
    comes as it would have come.
    """
    spool = _Spool(directory, max(min(memory_bytes // 4, _RUN_BYTES_MAX), 1))
    num_problems, position = 0, 0
    with closing(spool):
        for block in blocks:
            batch = _batch(block)
            spool.add(batch)
            known = min(max(start.offset - num_problems, 0), len(block.problems))
            before, num_problems = num_problems + known, num_problems + len(block.problems)
            places = Place(0, before, 0), Place(0, num_problems, 0)
            position = block.position
            yield replace(_block(batch[:0], *places, position), problems=block.problems[known:])
        line = 0
        for batch in spool.merged():
            for first in range(min(max(start.line - line, 0), batch.num_rows), batch.num_rows, BLOCK_ROWS):
                part = batch[first : first + BLOCK_ROWS]
                begin = Place(0, num_problems, line + first)
                yield _block(part, begin, replace(begin, line=begin.line + part.num_rows), position)
            line += batch.num_rows


def _batch(block: Block) -> pa.RecordBatch:
    if block.times is None:
        raise DataError("the samples have no time to sort them by: give the schema a time column")
    columns: dict[str, Any] = {_TIME: pa.array(block.times), _LABEL: pa.array(block.labels)}
    for i in range(block.dense.shape[1]):
        columns[f"number {i}"] = pa.array(np.ascontiguousarray(block.dense[:, i]))
    for name, category in block.categories.items():
        values = category.values
        if category.offsets is not None:
            values = pa.ListArray.from_arrays(pa.array(category.offsets.astype(np.int32)), values)
        columns[f"category {name}"] = values
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _block(batch: pa.RecordBatch, start: Place, end: Place, position: int) -> Block:
    numbers = [batch.column(name).to_numpy() for name in batch.schema.names if name.startswith("number ")]
    dense = np.empty((batch.num_rows, len(numbers)), np.float32)
    for i, column in enumerate(numbers):
        dense[:, i] = column
    prefix = "category "
    categories = {
        name.removeprefix(prefix): _category(batch.column(name))
        for name in batch.schema.names
        if name.startswith(prefix)
    }
    labels, times = batch.column(_LABEL).to_numpy().copy(), batch.column(_TIME).to_numpy().copy()
    return Block(labels, dense, categories, start, end, times, position=position)


def _category(array: pa.Array) -> Category:
    offsets = None
    if pa.types.is_list(array.type):
        lengths = array.value_lengths().to_numpy()
        offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
        array = array.flatten()
    if pa.types.is_string(array.type):
        return cells_of(array).category(offsets)
    missing = array.is_null().to_numpy(zero_copy_only=False)
    return category_of_integers(array.fill_null(0).to_numpy().copy(), missing, offsets)


@dataclass(frozen=True, slots=True)
class _Run:
    """Sorted samples: these batches of the spool's file."""

    first: int
    stop: int


class _Spool:
    """Sorted runs in a file."""

    def __init__(self, directory: Path, run_bytes: int) -> None:
        self._directory, self._run_bytes = directory, run_bytes
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._files: list[_RunFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """Take samples, and write a run when there are enough."""
        if not batch.num_rows:
            return
        self._held.append(batch)
        self._held_bytes += batch.nbytes
        if self._held_bytes >= self._run_bytes:
            self._write_held()

    def merged(self) -> Iterator[pa.RecordBatch]:
        """All samples in order; afterwards none are left."""
        if not self._files:
            if self._held:
                yield _sorted(self._held)
            return
        self._write_held()
        while len(runs := self._files[-1].runs) > FAN_IN:
            shorter, longer = self._files[-1], self._new_file(self._files[-1].schema)
            for first in range(0, len(runs), FAN_IN):
                longer.write(shorter.merged(runs[first : first + FAN_IN]))
            shorter.close()
        yield from self._files[-1].merged(runs)

    def _write_held(self) -> None:
        if self._held:
            run = _sorted(self._held)
            file = self._files[-1] if self._files else self._new_file(run.schema)
            rows = max(run.num_rows // FAN_IN, 1)
            file.write(run[start : start + rows] for start in range(0, run.num_rows, rows))
            self._held, self._held_bytes = [], 0

    def _new_file(self, schema: pa.Schema) -> _RunFile:
        self._files.append(_RunFile(self._directory / f"sorted-{len(self._files)}.arrow", schema))
        return self._files[-1]

    def close(self) -> None:
        """Remove what was written."""
        for file in self._files:
            file.close()


class _RunFile:
    """Runs in one Arrow file: written one after the other, then read batch by batch, from all runs at once."""

    def __init__(self, path: Path, schema: pa.Schema) -> None:
        self._path, self.schema = path, schema
        self.runs: list[_Run] = []
        self._num_batches = 0
        self._reader: Any = None
        try:
            self._file: Any = pa.OSFile(str(path), "wb")
            self._writer: Any = pa.ipc.new_file(self._file, schema)
        except OSError as error:
            raise self._failed("written", error) from error

    def write(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Add a run."""
        first = self._num_batches
        for batch in batches:
            try:
                self._writer.write_batch(batch)
            except OSError as error:
                raise self._failed("written", error) from error
            self._num_batches += 1
        self.runs.append(_Run(first, self._num_batches))

    def read(self, number: int) -> pa.RecordBatch:
        """A batch; from the first one that is read on, no more runs can be added."""
        try:
            if self._reader is None:
                self._writer.close()
                self._file.close()
                self._file = pa.OSFile(str(self._path), "rb")
                self._reader = pa.ipc.open_file(self._file)
            return self._reader.get_batch(number)
        except (OSError, pa.ArrowException) as error:
            raise self._failed("read", error) from error

    def merged(self, runs: Sequence[_Run]) -> Iterator[pa.RecordBatch]:
        """Some runs as one.

        The earliest end of what is loaded of each run tells up to where all is loaded that can come: of runs before
        the one that ends there also what has the very same time, of runs after it only what is earlier.
        """
        heads = [_Head(self, run) for run in runs]
        while heads:
            limit, nearest = min((head.last, i) for i, head in enumerate(heads))
            parts = [head.take(limit, "right" if i <= nearest else "left") for i, head in enumerate(heads)]
            yield _sorted([part for part in parts if part.num_rows])
            if not heads[nearest].advance():
                del heads[nearest]

    def close(self) -> None:
        """Remove the file."""
        if self._reader is None and not self._file.closed:
            with suppress(OSError):  # of a disk that is full, which was said already
                self._writer.close()
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _failed(self, what: str, error: Exception) -> DataError:
        return DataError(f"{self._path} can't be {what} while samples are sorted ({error}): make room on the disk")


class _Head:
    """What is loaded of a run and not yet taken."""

    def __init__(self, file: _RunFile, run: _Run) -> None:
        self._file, self._next, self._stop = file, run.first, run.stop
        self.last = 0
        self.advance()

    def advance(self) -> bool:
        """Load the next batch; False: there is none."""
        if self._next == self._stop:
            return False
        self._batch = self._file.read(self._next)
        self._times: NDArray[np.int64] = self._batch.column(_TIME).to_numpy()
        self.last = int(self._times[-1])
        self._next += 1
        return True

    def take(self, limit: int, side: Any) -> pa.RecordBatch:
        """The samples up to a time, which may be included."""
        count = int(np.searchsorted(self._times, limit, side))
        taken, self._batch, self._times = self._batch[:count], self._batch[count:], self._times[count:]
        return taken


def _sorted(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    """One batch in order of time, of equal times in the order given."""
    table = pa.Table.from_batches(batches)
    order = np.argsort(table.column(_TIME).to_numpy(), kind="stable")
    return table.take(pa.array(order)).combine_chunks().to_batches()[0]
