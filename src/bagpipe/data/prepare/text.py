"""Text files as pieces that end on line ends, each with the exact lines and bytes that it is (I8).

A line is a sample: it ends at a newline, also one within quotes, and an empty one is skipped. The last may lack its
newline. Memory is bounded by the size of a piece (I5): a line that is longer is a problem, not a reason to read on.
"""

from __future__ import annotations

import codecs
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from bagpipe.data.prepare.block import Place
from bagpipe.data.prepare.cell_kernels import WHOLE, cut_cells_reference
from bagpipe.data.prepare.schema import Schema
from bagpipe.data.prepare.sources import Source, Stream
from bagpipe.errors import DataError

HEADER_BYTES_MAX = 1 << 20
_HEADER_READ = 1 << 12
_SKIPPED_AT_ONCE = 1 << 16
_PARQUET_MARK = b"PAR1"


@dataclass(frozen=True, slots=True)
class Header:
    """What comes before the samples of a file."""

    columns: tuple[str, ...]
    offset: int
    """Bytes before the first sample."""
    line: int
    """Lines before it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of whole lines."""

    data: bytes
    start: Place
    end: Place
    position: int
    """Bytes on disk, of all files, read up to its end."""
    cut_short: bool = False
    """It is the beginning of one line that is too long."""


def read_header(schema: Schema, source: Source) -> Header:
    """The columns of a file, checked against the schema."""
    with source.open() as stream:
        start = stream.read(_HEADER_READ)
        while not schema.columns and b"\n" not in start and len(start) < HEADER_BYTES_MAX:
            if not (more := stream.read(_HEADER_READ)):
                break
            start += more
    if start.startswith(_PARQUET_MARK) and b"\0" in start:
        raise DataError(
            f"{source.path} is a parquet file, not {schema.format}: say `prepare parquet`, with a schema that has "
            'format = "parquet"'
        )
    mark = len(codecs.BOM_UTF8) if start.startswith(codecs.BOM_UTF8) else 0
    if schema.columns:
        return Header(schema.columns, mark, 0)
    line, newline, _ = start[mark:].partition(b"\n")
    if not newline and len(start) >= HEADER_BYTES_MAX:
        raise DataError(f"{source.path} has no line end in its first {len(start):,} bytes: is it a text file?")
    [(state, cells)] = cut_cells_reference(line + b"\n", schema.cell_separator.encode(), schema.format == "csv")
    try:
        columns = tuple(cell.replace(b'""', b'"').decode() for cell in cells)
    except UnicodeDecodeError as error:
        raise DataError(f"{source.path} line 1, the header, is not UTF-8 ({error}): convert the file") from error
    if state != WHOLE:
        raise DataError(f"{source.path} line 1 is no header, it is {line[:60]!r}: give the schema columns")
    schema.check_columns(columns, f"{source.path}")
    return Header(columns, mark + len(line) + len(newline), 1)


def read_pieces(
    sources: Sequence[Source], headers: Sequence[Header], start: Place, block_bytes: int
) -> Generator[Piece, None, None]:
    """The lines of all files from a place on, in pieces of up to `block_bytes`."""
    before = sum(source.size for source in sources[: start.file])
    for file in range(start.file, len(sources)):
        source, first = sources[file], Place(file, headers[file].offset, headers[file].line)
        with source.open() as stream:
            place = max(start, first)
            stream.skip_to(place.offset)
            for piece in _cut(stream, place, block_bytes):
                source.check()
                yield replace(piece, position=before + stream.position)
        source.check()
        before += source.size


def _cut(stream: Stream, place: Place, block_bytes: int) -> Iterator[Piece]:
    pending = b""
    while True:
        if len(pending) < block_bytes:
            pending += stream.read(block_bytes - len(pending))
        ended = len(pending) < block_bytes
        cut = len(pending) if ended else pending.rfind(b"\n", 0, block_bytes) + 1
        if cut:
            piece, pending = _piece(pending[:cut], place), pending[cut:]
        elif not ended:
            piece, pending = _cut_long(stream, pending, place, block_bytes)
        else:
            return
        yield piece
        place = piece.end


def _piece(data: bytes, start: Place) -> Piece:
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    return Piece(data, start, Place(start.file, start.offset + len(data), start.line + lines), 0)


def _cut_long(stream: Stream, pending: bytes, start: Place, block_bytes: int) -> tuple[Piece, bytes]:
    """Of a line that does not end within a block, the beginning; and what was read beyond the line."""
    data, part, length = pending[:block_bytes], pending[block_bytes:], block_bytes
    while True:
        line, newline, rest = part.partition(b"\n")
        length += len(line) + len(newline)
        if newline or not (part := stream.read(_SKIPPED_AT_ONCE)):
            end = Place(start.file, start.offset + length, start.line + 1)
            return Piece(data, start, end, 0, cut_short=length > block_bytes), rest
