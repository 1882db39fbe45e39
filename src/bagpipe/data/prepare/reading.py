"""From raw files to blocks of samples, in the order of the files, whatever the number of threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Protocol, TypeVar

from bagpipe.data.ordered import ordered_map
from bagpipe.data.prepare.block import BEGINNING, Block, Place
from bagpipe.data.prepare.builtin import BUILTIN, builtin_schema
from bagpipe.data.prepare.parquet import ParquetParser, check_parquet, read_batches
from bagpipe.data.prepare.parse import TextParser
from bagpipe.data.prepare.schema import Schema, load_schema
from bagpipe.data.prepare.sources import Source, find_sources
from bagpipe.data.prepare.text import read_header, read_pieces
from bagpipe.errors import BagpipeError, ConfigError, DataError

BLOCK_BYTES = 4 << 20
"""About 17,000 lines of Criteo: small enough to stay in a processor's cache while it is cut, parsed and hashed."""
BLOCK_BYTES_MAX = 1 << 30


def open_sources(
    kind: str, paths: Sequence[Path], schema_file: Path | None = None
) -> tuple[Schema, tuple[Source, ...]]:
    """The schema and the files, in order; each of them can be opened and has the columns of the schema.

    `kind` is one of the built-in schemas, or anything else with a schema file.
    """
    if schema_file is not None:
        schema = load_schema(schema_file)
    elif kind in BUILTIN:
        schema = builtin_schema(kind)
    else:
        raise ConfigError(f"{kind} files need a schema that names their columns: give --schema FILE.toml")
    sources = find_sources(paths, schema.file_patterns)
    if schema_file is None:
        with sources[0].open() as stream:
            schema = builtin_schema(kind, stream.read(1000).partition(b"\n")[0])
    _check_columns(schema, sources)
    return schema, sources


def _check_columns(schema: Schema, sources: Sequence[Source]) -> None:
    """Of all files before the first is read, which may take hours."""
    if schema.format != "parquet":
        for source in sources:
            read_header(schema, source)
        return
    kinds = [check_parquet(schema, source) for source in sources]
    for source, of_columns in zip(sources, kinds, strict=True):
        for name, kind in of_columns.items():
            if kind != kinds[0][name]:
                raise DataError(
                    f"{source.path}: column {name!r} is {kind}, in {sources[0].path} it is {kinds[0][name]}: "
                    f"give it kind 'text' or 'integer' in the schema"
                )


def read_blocks(
    schema: Schema,
    sources: Sequence[Source],
    start: Place = BEGINNING,
    *,
    block_bytes: int = BLOCK_BYTES,
    threads: int = 2,
) -> Iterator[Block]:
    """The samples from a place on, in blocks of about `block_bytes` of the files, parsed by `threads` threads.

    Memory is about (2 * threads + 3) * 6 * block_bytes. A line that can't be used is a problem of its block; a file
    that can't be read, or that changes meanwhile, ends it with a DataError.
    """
    if not 1 <= block_bytes <= BLOCK_BYTES_MAX:
        raise ConfigError(f"block_bytes is {block_bytes}: give 1 to {BLOCK_BYTES_MAX}")
    if schema.format == "parquet":
        batches = read_batches(schema, sources, start, block_bytes)
        yield from _parsed(batches, [ParquetParser(schema, source).parse for source in sources], threads)
    else:
        headers = [read_header(schema, source) for source in sources]
        pieces = read_pieces(sources, headers, start, block_bytes)
        named = zip(sources, headers, strict=True)
        yield from _parsed(pieces, [TextParser(schema, str(s.path), h.columns).parse for s, h in named], threads)


class _Part(Protocol):
    @property
    def start(self) -> Place: ...


Part = TypeVar("Part", bound=_Part)


def _parsed(
    parts: Generator[Part, None, None], parsers: Sequence[Callable[[Part], Block]], threads: int
) -> Iterator[Block]:
    def parse(part: Part | BagpipeError) -> Block:
        if isinstance(part, BagpipeError):
            raise part
        return parsers[part.start.file](part)

    with (
        closing(parts),
        closing(_ahead(parts)) as ready,
        closing(ordered_map(parse, ready, threads, "parsing")) as blocks,
    ):
        yield from blocks


def _ahead(parts: Iterator[Part]) -> Generator[Part | BagpipeError, None, None]:
    """The same parts, read on a thread of their own up to two ahead, so that uncompressing does not hold up others.

    An error comes last, as a part: what was read before it is parsed and passed on first.
    """

    def read(_: int) -> Part | BagpipeError | None:
        try:
            return next(parts, None)
        except BagpipeError as error:
            return error

    with closing(ordered_map(read, itertools.count(), 1, "reading")) as ready:
        for part in ready:
            if part is None:
                return
            yield part
