"""The rows of a server's store as messages carry them: in buffers, or in memory that a client shares.

Ids are copied out of shared memory before they are looked at, since the client could change them meanwhile; values are
only ever copied, so it could spoil none but its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np

from bagpipe.arrays import Int64s
from bagpipe.errors import StoreError, WireError
from bagpipe.store.base import TablePart
from bagpipe.store.versioned import VersionedStore
from bagpipe.wire.checks import check_read, check_write, columns_of, totals
from bagpipe.wire.messages import Part, Read, Rows, Scan, Scanned, Write
from bagpipe.wire.shared import Regions, regions

Buffers = Sequence[memoryview]


class RowAccess:
    """Reads and writes of any number of threads; no row may be in two of them at once, which plans guarantee."""

    def __init__(self, store: VersionedStore, widths: Sequence[int], bytes_max: int) -> None:
        self.store, self.widths = store, list(widths)
        self._bytes_max = bytes_max
        self._lock = Lock()
        self.rows_read = self.rows_written = 0

    def ids_of(self, body: Read, buffers: Buffers, memory: memoryview | None) -> Int64s:
        """The ids of a read, part after part."""
        layout = self._layout(body.parts)
        if memory is None:
            return check_read(body, buffers or (memoryview(b""),), self.widths)
        return check_read(body, [self._within(memory, layout)[layout.ids]], self.widths).copy()

    def parts_of(self, body: Write, buffers: Buffers, memory: memoryview | None) -> list[TablePart]:
        """The ids and values of a write."""
        layout = self._layout(body.parts)
        if memory is None:
            ids, values = check_write(body, buffers or (memoryview(b""),) * 2, self.widths)
        else:
            self._within(memory, layout)
            ids, values = check_write(body, [memory[layout.ids], memory[layout.rows]], self.widths)
            ids = ids.copy()
        parts, row, number = [], 0, 0
        for part in body.parts:
            size = part.count * self.widths[part.table]
            rows = (
                values[number : number + size].reshape(part.count, -1)
                if size
                else np.empty((0, self.widths[part.table]), np.float32)
            )
            parts.append((part.table, ids[row : row + part.count], rows))
            row, number = row + part.count, number + size
        return parts

    def read(self, body: Read, ids: Int64s, memory: memoryview | None) -> tuple[Rows, Buffers]:
        """The rows that were ever written, or of each the columns asked for."""
        flags = np.empty(len(ids), np.bool_)
        found, row = [], 0
        for part in body.parts:
            rows = self.store.find(part.table, ids[row : row + part.count])
            flags[row : row + part.count] = rows.there
            found.append((part, rows, int(np.count_nonzero(rows.there))))
            row += part.count
        num_floats = sum(count * columns_of(part, self.widths) for part, _, count in found)
        layout = self._layout(body.parts)
        if memory is None:
            values = np.empty(num_floats, np.float32)
        else:
            values = np.frombuffer(memory[layout.rows], np.float32)[:num_floats]
            memory[layout.flags] = flags.view(np.uint8).data
        number = 0
        for part, rows, count in found:
            size = count * columns_of(part, self.widths)
            if size:
                rows.gather(values[number : number + size].reshape(count, -1))
            number += size
        count = sum(count for _, _, count in found)
        with self._lock:
            self.rows_read += count
        return Rows(count), () if memory is not None else (flags.view(np.uint8).data, values.data)

    def write(self, parts: Sequence[TablePart]) -> None:
        """All of the rows, or none."""
        self.store.write_many(parts)
        with self._lock:
            self.rows_written += sum(len(ids) for _, ids, _ in parts)

    def scan(self, body: Scan, memory: memoryview | None) -> tuple[Scanned, Buffers]:
        """Rows of a table in order of first write."""
        layout = self._layout([Part(body.table, body.count)])
        ids, values = self.store.scan(body.table, body.start, body.start + body.count, values=body.values)
        if memory is None:
            return Scanned(len(ids)), (ids.data, values.data) if body.values else (ids.data,)
        self._within(memory, layout)
        memory[layout.ids][: ids.nbytes] = ids.view(np.uint8).data
        if values.size:
            memory[layout.rows][: values.nbytes] = values.reshape(-1).view(np.uint8).data
        return Scanned(len(ids)), ()

    def _layout(self, parts: Sequence[Part]) -> Regions:
        """What the parts take, which is refused before anything of them is allocated."""
        layout = regions(*totals("a request", parts, self.widths))
        if layout.num_bytes > self._bytes_max:
            raise StoreError(
                f"a request of {layout.num_bytes:,} B: {self._bytes_max:,} are allowed, ask for fewer rows at once"
            )
        return layout

    @staticmethod
    def _within(memory: memoryview, layout: Regions) -> memoryview:
        if layout.num_bytes > len(memory):
            raise WireError(f"a request of {layout.num_bytes:,} B in shared memory of {len(memory):,} B")
        return memory
