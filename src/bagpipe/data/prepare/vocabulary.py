"""Vocabularies on disk: for each table a parquet file whose line i says which value row i stands for, and how often.

Any tool reads them. Row groups have the same number of lines, so that one row is found without reading the others.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bagpipe.data.manifest import VocabularyEntry
from bagpipe.errors import ConfigError, ShardError

GROUP_ROWS = 1 << 16
_READ_BYTES = 1 << 22
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")
_NAME_LENGTH = 100

Part = tuple[pa.Array, NDArray[np.int64]]


def file_names(tables: Sequence[str]) -> dict[str, str]:
    """A name for the file of each table: the table's own where every file system takes it."""
    names: dict[str, str] = {}
    taken: set[str] = set()
    for number, table in enumerate(tables):
        name = _UNSAFE.sub("_", table)[:_NAME_LENGTH]
        if name != table or name.lower() in taken:
            name = f"{name}.{number}"
        # A dot and a number is what no name has of its own, as dots are replaced.
        names[table] = f"{name}.parquet"
        taken.add(name.lower())
    return names


def write_vocabulary(path: Path, integers: bool, rows: int, part: Callable[[int, int], Part]) -> VocabularyEntry:
    """Write the values and counts of all rows, as `part(start, stop)` has them; the file is there as a whole or not."""
    schema = pa.schema([("value", pa.int64() if integers else pa.string()), ("count", pa.int64())])
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(exist_ok=True)
        with pq.ParquetWriter(temporary, schema, use_dictionary=False, compression="snappy") as writer:
            for start in range(0, rows, GROUP_ROWS):
                values, counts = part(start, min(start + GROUP_ROWS, rows))
                columns = [values.cast(schema[0].type), pa.array(counts, pa.int64())]
                writer.write_batch(pa.record_batch(columns, schema=schema))
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
            entry = VocabularyEntry(file=path.name, bytes=temporary.stat().st_size, checksum=_crc(file))
        temporary.rename(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ShardError(
            f"{path} can't be written ({error.strerror or error}): free space or choose another directory"
        ) from error
    return entry


class Vocabulary:
    """A vocabulary that was written."""

    def __init__(self, directory: Path, entry: VocabularyEntry) -> None:
        self.path = directory / entry.file
        try:
            size = self.path.stat().st_size
            with self.path.open("rb") as file:
                found = _crc(file)
            self._file = pq.ParquetFile(self.path)
        except (OSError, pa.ArrowException) as error:
            raise ShardError(f"{self.path} can't be read ({error}): restore it, or prepare the data again") from error
        if (size, found) != (entry.bytes, entry.checksum):
            raise ShardError(
                f"{self.path} has {size} bytes and checksum {found}, the manifest says {entry.bytes} and "
                f"{entry.checksum}: copy the file again, or prepare the data again"
            )
        self._open_group: tuple[int, pa.RecordBatch] | None = None

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    @property
    def integers(self) -> bool:
        """Whether the values are numbers, not texts."""
        return bool(pa.types.is_integer(self._file.schema_arrow.field("value").type))

    def groups(self) -> Iterator[Part]:
        """The values and counts of all rows, some at a time."""
        for number in range(self._file.num_row_groups):
            yield self.group(number)

    def group(self, number: int) -> Part:
        """The values and counts of rows from GROUP_ROWS * number on."""
        if self._open_group is None or self._open_group[0] != number:
            table = self._file.read_row_group(number, use_threads=False).combine_chunks()
            self._open_group = number, table
        table = self._open_group[1]
        return _one(table.column("value")), _one(table.column("count")).to_numpy()

    def look_up(self, rows: Iterable[int]) -> list[tuple[Any, int]]:
        """The value (None: none of its own) and the count of each row."""
        found = []
        for row in rows:
            if not 0 <= row < len(self):
                raise ConfigError(f"row {row} is not in {self.path}, which has {len(self)} rows: give 0 to the last")
            values, counts = self.group(row // GROUP_ROWS)
            found.append((values[row % GROUP_ROWS].as_py(), int(counts[row % GROUP_ROWS])))
        return found


def _one(column: pa.ChunkedArray) -> pa.Array:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _crc(file: Any) -> int:
    checksum = 0
    while data := file.read(_READ_BYTES):
        checksum = zlib.crc32(data, checksum)
    return checksum
