"""What a store asks of its servers: reads and writes divided over them, in pieces that one message holds.

Ids are sorted by server, rows go to or come from where the caller has them, and rows that were never written are
computed here, so that they never travel and no result depends on the number of servers (I1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bagpipe.arrays import Floats, Int64s
from bagpipe.server.shards import divide, pick, place
from bagpipe.server.shared import Regions, regions
from bagpipe.store.base import RowSource, TablePart, fill_initial
from bagpipe.store.links import Buffers, Link, Request, unexpected
from bagpipe.wire.checks import check_rows, check_scanned, columns_of, totals
from bagpipe.wire.messages import (
    ALL_COLUMNS,
    Body,
    Failed,
    Part,
    Read,
    Rows,
    Scan,
    Scanned,
    Write,
    Written,
)


@dataclass(frozen=True, slots=True)
class Share:
    """Some rows of one table that one server has: which of the caller's."""

    part: int
    """Of the call."""
    order: Int64s
    """Indices into the part."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message carries."""

    shares: tuple[Share, ...]
    parts: list[Part]
    layout: Regions
    last: bool
    """Of this server's in the call."""

    @property
    def num_rows(self) -> int:
        """Of all parts."""
        return sum(part.count for part in self.parts)


def cut(parts: Sequence[TablePart], widths: Sequence[int], num_servers: int, bytes_max: int) -> list[list[Piece]]:
    """For each server the pieces of a call that go to it; at least one, which may be empty. `widths` are by table."""
    shares: list[list[Share]] = [[] for _ in range(num_servers)]
    for number, (table, ids, _) in enumerate(parts):
        order, starts = divide(table, ids, num_servers)
        for server in range(num_servers):
            if starts[server] < starts[server + 1]:
                shares[server].append(Share(number, order[starts[server] : starts[server + 1]]))
    return [_pieces(parts, widths, of_server, bytes_max) for of_server in shares]


def _pieces(parts: Sequence[TablePart], widths: Sequence[int], shares: Sequence[Share], bytes_max: int) -> list[Piece]:
    groups: list[list[Share]] = [[]]
    margin = regions(0, 0).num_bytes + 3 * 64
    free = bytes_max - margin
    for share in shares:
        row_bytes = parts[share.part][2].shape[1] * 4 + 9
        start = 0
        while start < len(share.order):
            count = min(free // row_bytes, len(share.order) - start)
            if count == 0 and groups[-1]:
                groups.append([])
                free = bytes_max - margin
                continue
            count = max(count, 1)  # a row that is too long for any message: the server will say so
            groups[-1].append(Share(share.part, share.order[start : start + count]))
            free -= count * row_bytes
            start += count
    return [_piece(parts, widths, group, last=group is groups[-1]) for group in groups]


def _piece(parts: Sequence[TablePart], widths: Sequence[int], shares: Sequence[Share], last: bool) -> Piece:
    named = []
    for share in shares:
        table, _, values = parts[share.part]
        columns = values.shape[1]
        named.append(Part(table, len(share.order), columns if columns < widths[table] else ALL_COLUMNS))
    return Piece(tuple(shares), named, regions(*totals("a request", named, widths)), last)


class ReadCall:
    """A read of several tables: where rows go, and which were never written."""

    def __init__(self, sources: Sequence[RowSource], parts: Sequence[TablePart], after: int) -> None:
        self.widths = [source.width for source in sources]
        self.parts, self.after = parts, after
        self._sources = sources
        self._missing = [np.empty(len(ids), np.int64) for _, ids, _ in parts]
        self._num_missing = [0] * len(parts)

    def requests(self, pieces: Sequence[Piece]) -> Iterator[Request]:
        """What one server is asked."""
        return (ReadRequest(self, piece) for piece in pieces if piece.num_rows)

    def take(self, piece: Piece, flags: np.ndarray, values: Floats) -> None:
        """Put the rows of an answer where they belong."""
        row = number = 0
        for share in piece.shares:
            out, mine = self.parts[share.part][2], flags[row : row + len(share.order)]
            size = int(np.count_nonzero(mine)) * out.shape[1]
            self._num_missing[share.part] = place(
                values[number : number + size],
                mine,
                share.order,
                out,
                self._missing[share.part],
                self._num_missing[share.part],
            )
            row, number = row + len(share.order), number + size

    def finish(self) -> None:
        """Compute the rows that were never written."""
        for (table, ids, out), missing, num_missing in zip(self.parts, self._missing, self._num_missing, strict=True):
            fill_initial(self._sources[table], ids, missing[:num_missing], out)


class ReadRequest(Request):
    """The part of a read that one message asks for."""

    def __init__(self, call: ReadCall, piece: Piece) -> None:
        self._call, self._piece = call, piece
        after = f" after iteration {call.after}" if call.after >= 0 else ""
        self.what = f"{piece.num_rows:,} rows{after}"

    def compose(self, link: Link) -> tuple[Body, Buffers]:
        """Ids in a buffer, or in shared memory."""
        return Read(self._piece.parts, self._call.after), _ids_of(self._piece, self._call.parts, link.memory)

    def accept(self, link: Link, answer: Body, buffers: Buffers) -> None:
        """Rows in buffers, or in shared memory."""
        if not isinstance(answer, Rows):
            raise unexpected(answer, "Rows")
        if link.memory is not None:
            buffers = self._within(link.memory)
        flags, values = check_rows(answer, buffers, self._piece.parts, self._call.widths)
        self._call.take(self._piece, flags.copy(), values)

    def _within(self, memory: memoryview) -> Buffers:
        flags = memory[self._piece.layout.flags]
        there, row, num_floats = np.frombuffer(flags, np.uint8), 0, 0
        for part in self._piece.parts:
            num_floats += int(np.count_nonzero(there[row : row + part.count])) * columns_of(part, self._call.widths)
            row += part.count
        return flags, memory[self._piece.layout.rows][: num_floats * 4]


class Ordered(Request):
    """What a server decides once and in order; its number is the same however often it is sent."""

    def __init__(self, what: str, make: Callable[[int, int], Body]) -> None:
        """`make(trainer, sequence)` makes the record."""
        self.what, self._make = what, make
        self._sequence: int | None = None
        self.written = self.was_refused = False

    @property
    def undecided(self) -> bool:
        """Whether it was sent, and nobody knows what has become of it."""
        return self._sequence is not None and not (self.written or self.was_refused)

    @property
    def sequence(self) -> int:
        """Its number, once it was sent."""
        assert self._sequence is not None, "it was not sent"
        return self._sequence

    def compose(self, link: Link) -> tuple[Body, Buffers]:
        """A few numbers and names."""
        if self._sequence is None:
            self._sequence = link.session.sequences[link.server] + 1
        return self._make(link.session.trainer, self._sequence), ()

    def accept(self, link: Link, answer: Body, buffers: Buffers) -> None:
        """Acknowledged."""
        if not isinstance(answer, Written) or answer.sequence != self._sequence or buffers:
            raise unexpected(answer, f"Written {self._sequence}")
        link.session.sequences[link.server] = answer.sequence
        self.written = True

    def refused(self, link: Link, failed: Failed) -> None:
        """Not applied, and never will be."""
        self.was_refused = True
        if failed.decided and self._sequence is not None:
            link.session.sequences[link.server] = self._sequence


class WriteRequest(Ordered):
    """The part of a write that one message carries."""

    def __init__(self, parts: Sequence[TablePart], piece: Piece, passed: int) -> None:
        super().__init__(
            f"a write of {piece.num_rows:,} rows",
            lambda trainer, sequence: Write(trainer, sequence, passed, piece.parts),
        )
        self._parts, self._piece = parts, piece

    def compose(self, link: Link) -> tuple[Body, Buffers]:
        """Ids and rows in buffers, or in shared memory."""
        body, _ = super().compose(link)
        ids = _ids_of(self._piece, self._parts, link.memory)
        layout = self._piece.layout
        if link.memory is None:
            values = np.empty((layout.rows.stop - layout.rows.start) // 4, np.float32)
        else:
            values = np.frombuffer(link.memory[layout.rows], np.float32)
        number = 0
        for share in self._piece.shares:
            rows = self._parts[share.part][2]
            pick(rows, share.order, values[number : number + len(share.order) * rows.shape[1]])
            number += len(share.order) * rows.shape[1]
        return body, (*ids, values.data) if link.memory is None else ()


class ScanRequest(Request):
    """Rows of one table in order of first write."""

    def __init__(self, scan: Scan, width: int) -> None:
        self._scan, self._width = scan, width
        self.ids = np.empty(0, np.int64)
        self.values = np.empty((0, width), np.float32)
        self.what = f"rows {scan.start:,} to {scan.start + scan.count:,} of table {scan.table}"

    def compose(self, link: Link) -> tuple[Body, Buffers]:  # noqa: ARG002
        """A few numbers."""
        return self._scan, ()

    def accept(self, link: Link, answer: Body, buffers: Buffers) -> None:
        """A copy, since the memory is used again."""
        if not isinstance(answer, Scanned):
            raise unexpected(answer, "Scanned")
        if link.memory is not None:
            layout = regions(self._scan.count, self._scan.count * self._width)
            ids, rows = link.memory[layout.ids][: answer.count * 8], link.memory[layout.rows]
            buffers = (ids, rows[: answer.count * self._width * 4]) if self._scan.values else (ids,)
        found, values = check_scanned(answer, buffers, self._scan, self._width)
        self.ids, self.values = found.copy(), values.copy()


def _ids_of(piece: Piece, parts: Sequence[TablePart], memory: memoryview | None) -> Buffers:
    """The ids of a piece in a buffer, or nothing once they are in the shared memory."""
    ids = np.empty(piece.num_rows, np.int64)
    if memory is not None:
        ids = np.frombuffer(memory[piece.layout.ids], np.int64)
    row = 0
    for share in piece.shares:
        np.take(parts[share.part][1], share.order, out=ids[row : row + len(share.order)], mode="clip")
        row += len(share.order)
    return () if memory is not None else (ids.data,)
