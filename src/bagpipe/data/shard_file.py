"""One shard, mapped into memory: columns of any of its samples, each checked when it is first touched.

Checksums and values are looked at once a chunk, so nothing that training can't take passes unseen (I8) and reading the
same data again costs nothing more.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.manifest import Manifest, ShardEntry
from bagpipe.data.samples import copy_places, spans
from bagpipe.data.shard_layout import ALIGNMENT, CHUNK_BYTES, ColumnEntry, ShardHeader, column_types, map_shard, may_be
from bagpipe.errors import ShardError, ValueRangeError

Array = NDArray[Any]
Ints = NDArray[np.int64]
Places = slice | Ints
"""Samples or values: a run of them, or a list in any order."""


class StoredColumn:
    """A column of a mapped shard."""

    def __init__(self, entry: ColumnEntry, data: NDArray[np.uint8]) -> None:
        self.name = entry.name
        self.kind, _, self.feature = entry.name.partition(":")
        self.bytes = data
        self.values: Array = data.view(np.dtype(entry.type))
        self.checksums = entry.checksums
        self.unchecked = np.ones(len(entry.checksums), dtype=bool)
        self.clean = not len(self.unchecked)

    def untouched(self, places: Places, width: int) -> list[int]:
        """The chunks of these places, of `width` values each, that were not checked yet."""
        size = width * self.values.itemsize
        if self.clean or not size:
            return []
        if isinstance(places, slice):
            chunks = np.arange(places.start * size // CHUNK_BYTES, -(-places.stop * size // CHUNK_BYTES))
        else:
            first, last = places * size // CHUNK_BYTES, (places * size + size - 1) // CHUNK_BYTES
            chunks = np.unique(spans(first, last - first + 1))
        found: list[int] = chunks[self.unchecked[chunks]].tolist()
        return found


class ShardFile:
    """A shard; safe to read from several threads."""

    def __init__(self, path: Path, entry: ShardEntry, manifest: Manifest, first_sample: int) -> None:
        self.path, self.first_sample, self.num_samples = path, first_sample, entry.samples
        self._manifest = manifest
        self._table_rows = manifest.table_rows()
        header, body = map_shard(path, entry)
        self._columns = self._find_columns(header, body)

    def copy(self, name: str, rows: Places, out: Array, slots: Places) -> None:
        """Copy a column's values of some samples to some slots of `out`."""
        self._copy(name, rows, len(self._columns[name].values) // self.num_samples, out.reshape(-1), slots)

    def bag_bounds(self, feature: str, rows: Places) -> tuple[Ints, Ints]:
        """Where the bags of some samples start and end among the values of the feature."""
        offsets = self._columns[f"offsets:{feature}"]
        if not offsets.clean:
            self._check_offsets(offsets)
        return offsets.values[:-1][rows], offsets.values[1:][rows]

    def copy_values(self, name: str, places: Places, out: Array, slots: Places) -> None:
        """Copy values of a column of bags to some slots of `out`; the bounds of the bags were asked for before."""
        self._copy(name, places, 1, out, slots)

    def ids(self, feature: str) -> Ints:
        """All ids of a feature."""
        size = len(self._columns[f"ids:{feature}"].values)
        if f"offsets:{feature}" in self._columns:
            self.bag_bounds(feature, slice(0, 0))
        out = np.empty(size, np.int64)
        self.copy_values(f"ids:{feature}", slice(0, size), out, slice(0, size))
        return out

    def _copy(self, name: str, places: Places, width: int, out: Array, slots: Places) -> None:
        column = self._columns[name]
        self._check(column, places, width)
        if isinstance(places, slice):
            assert isinstance(slots, slice)
            run = slice(places.start * width, places.stop * width)
            out[slots.start * width : slots.stop * width] = column.values[run]
        else:
            assert not isinstance(slots, slice)
            copy_places(column.values, places, width, out, slots)

    def _find_columns(self, header: ShardHeader, body: NDArray[np.uint8]) -> dict[str, StoredColumn]:
        expected = column_types(self._manifest)
        found = {entry.name: entry.type for entry in header.columns}
        fits = found.keys() == expected.keys() and all(may_be(found[name], expected[name]) for name in expected)
        if header.samples != self.num_samples or not fits or len(header.columns) != len(expected):
            raise ShardError(
                f"{self.path} has {header.samples} samples and columns {found}, the manifest says {self.num_samples} "
                f"and {expected}: write the data again"
            )
        columns = {}
        for entry in header.columns:
            in_file = entry.start % ALIGNMENT == 0 and entry.start + entry.bytes <= len(body)
            if not in_file or entry.bytes % np.dtype(entry.type).itemsize:
                raise ShardError(
                    f"{self.path}: column {entry.name!r} has {entry.bytes} bytes at {entry.start} of {len(body)}: "
                    "write the data again"
                )
            if len(entry.checksums) != -(-entry.bytes // CHUNK_BYTES):
                raise ShardError(
                    f"{self.path}: column {entry.name!r} of {entry.bytes} bytes has {len(entry.checksums)} checksums: "
                    "write the data again"
                )
            columns[entry.name] = StoredColumn(entry, body[entry.start : entry.start + entry.bytes])
        self._check_sizes(columns)
        return columns

    def _check_sizes(self, columns: dict[str, StoredColumn]) -> None:
        sizes = {"labels": self.num_samples, "dense": self.num_samples * self._manifest.dense}
        for feature in self._manifest.features:
            if feature.ids is None:
                sizes[f"offsets:{feature.name}"] = self.num_samples + 1
            else:
                sizes[f"ids:{feature.name}"] = self.num_samples * feature.ids
            if feature.weighted:
                sizes[f"weights:{feature.name}"] = len(columns[f"ids:{feature.name}"].values)
        for name, size in sizes.items():
            if len(columns[name].values) != size:
                raise ShardError(
                    f"{self.path}: column {name!r} has {len(columns[name].values)} values instead of {size}: "
                    "write the data again"
                )

    def _check(self, column: StoredColumn, places: Places, width: int) -> None:
        for chunk in column.untouched(places, width):
            self._check_chunk(column, chunk)
            self._check_values(column, chunk)
            # Two threads may check the same chunk: both find the same.
            column.unchecked[chunk] = False
            column.clean = not column.unchecked.any()

    def _check_chunk(self, column: StoredColumn, chunk: int) -> None:
        data = column.bytes[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
        checksum = zlib.crc32(data.data)
        if checksum != column.checksums[chunk]:
            first = chunk * CHUNK_BYTES // column.values.itemsize
            last = first + len(data) // column.values.itemsize - 1
            raise ShardError(
                f"{self.path} is corrupt: column {column.name!r}, samples {self._sample(column, first)} to "
                f"{self._sample(column, last)}, has checksum {checksum} instead of {column.checksums[chunk]}; "
                "copy the file again, or write the data again"
            )

    def _check_values(self, column: StoredColumn, chunk: int) -> None:
        size = CHUNK_BYTES // column.values.itemsize
        values = column.values[chunk * size : (chunk + 1) * size]
        rows = self._table_rows.get(column.feature)
        place = first_bad(column.kind, values, rows)
        if place is not None:
            raise ValueRangeError(
                f"{self.path}, sample {self._sample(column, chunk * size + place)}: {column.name!r} is "
                f"{values[place]}, {allowed(column.kind, rows)}; mend the source and write the data again"
            )

    def _check_offsets(self, offsets: StoredColumn) -> None:
        """Check all offsets at once: one that is wrong would send the reads of other samples astray."""
        for chunk in range(len(offsets.checksums)):
            self._check_chunk(offsets, chunk)
        values, end = offsets.values, len(self._columns[f"ids:{offsets.feature}"].values)
        falls = np.flatnonzero(np.diff(values) < 0)
        if values[0] != 0 or values[-1] != end or len(falls):
            row = 0 if values[0] != 0 else int(falls[0]) if len(falls) else self.num_samples - 1
            raise ShardError(
                f"{self.path}, sample {self.first_sample + row}: its bag of {offsets.feature!r} is {values[row]} to "
                f"{values[row + 1]} of {end} ids, but offsets must rise from 0 to the end; write the data again"
            )
        offsets.clean = True

    def _sample(self, column: StoredColumn, place: int) -> int:
        """The sample, counted over all shards, that owns a value of a column."""
        offsets = self._columns.get(f"offsets:{column.feature}")
        if offsets is not None and column is not offsets:
            return self.first_sample + int(np.searchsorted(offsets.values, place, side="right")) - 1
        return self.first_sample + min(place * self.num_samples // len(column.values), self.num_samples - 1)


def first_bad(kind: str, values: Array, rows: int | None) -> int | None:
    """The place of the first value of a flat column that training can't take; kind is labels, dense, ids or weights."""
    bad: NDArray[np.bool_]
    if kind == "labels":
        bad = (values != 0) & (values != 1)
    elif kind != "ids":
        bad = ~np.isfinite(values)
    elif rows is None or (values.dtype.kind == "u" and rows > np.iinfo(values.dtype).max):
        return None
    else:
        bad = values >= rows if values.dtype.kind == "u" else (values < 0) | (values >= rows)
    return int(bad.argmax()) if bad.any() else None


def allowed(kind: str, rows: int | None) -> str:
    """What `first_bad` lets pass, in words."""
    return {"labels": "must be 0 or 1", "ids": f"its table has {rows} rows"}.get(kind, "must be finite")
