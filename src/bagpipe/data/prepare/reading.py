"""From raw files to blocks of samples, in the order of the files, whatever the number of threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bagpipe.data.prepare.block import BEGINNING, Block, Place
from bagpipe.data.prepare.schema import Schema
from bagpipe.data.prepare.sources import Source


def open_sources(
    kind: str, paths: Sequence[Path], schema_file: Path | None = None
) -> tuple[Schema, tuple[Source, ...]]:
    """The schema (`kind`: criteo, avazu, movielens; or parquet with a schema file) and the files, in order and checked:
    each can be opened and has the columns of the schema."""
    raise NotImplementedError


def read_blocks(
    schema: Schema, sources: Sequence[Source], start: Place = BEGINNING, *, block_bytes: int = 4 << 20, threads: int = 2
) -> Iterator[Block]:
    """The samples from a place on, in blocks of about `block_bytes` of the files, parsed by `threads` threads.

    Memory is about (2 * threads + 3) * 6 * block_bytes. A line that can't be used is a problem of its block; a file
    that can't be read, or that changes meanwhile, ends it with a DataError.
    """
    raise NotImplementedError
