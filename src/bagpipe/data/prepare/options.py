"""What `prepare` can be asked for, and what follows from it for numbering and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bagpipe.config import Size, cache_size
from bagpipe.data.manifest import VOCABULARY, load_manifest
from bagpipe.data.prepare.numbering import Numbering, parse_numberings
from bagpipe.data.prepare.reading import BLOCK_BYTES
from bagpipe.data.prepare.rejected import OnError
from bagpipe.data.prepare.schema import Schema
from bagpipe.data.prepare.sources import Source
from bagpipe.data.prepare.space import resident_bytes
from bagpipe.data.prepare.vocabulary import Vocabulary
from bagpipe.data.writer import SHARD_SAMPLES
from bagpipe.errors import ConfigError
from bagpipe.kernels.idmap import IdMap

_SHARE_MIN = 64_000_000
_SLACK = 0.1


@dataclass(frozen=True, slots=True)
class Options:
    """What `prepare` is asked for beside files."""

    schema: Path | None = None
    """A TOML file that says what the columns are."""
    numbering: tuple[str, ...] = ()
    """`first`, `frequency`, `hash:SIZE` or `ids`, of all tables or as TABLE=... of one."""
    min_count: tuple[str, ...] = ()
    """Values that occur less often share a row; of all tables or as TABLE=NUMBER of one."""
    vocabulary: Path | None = None
    """Number values as this data set, prepared earlier, has them."""
    on_error: OnError = "stop"
    """What to do with lines that can't be used."""
    validation: str | None = None
    """Share of the samples to validate on, or the day with which they begin."""
    test: str | None = None
    """Share of the samples, the last ones, to test on, or the day with which they begin."""
    memory: str = "2GB"
    """How much the process may take."""
    threads: int = 2
    limit: int | None = None
    """How many samples to prepare; None: all."""
    shard_samples: int = SHARD_SAMPLES


def numberings_of(options: Options, tables: Sequence[str]) -> tuple[dict[str, Numbering], dict[str, Vocabulary], str]:
    """How each table is numbered, the vocabularies of an earlier run, and what tells that run from others."""
    directory = options.vocabulary
    if directory is None:
        return parse_numberings(tables, options.numbering, options.min_count), {}, "none"
    if options.numbering or options.min_count:
        raise ConfigError("--vocabulary says how values are numbered: leave --numbering and --min-count out")
    manifest = load_manifest(directory)
    known = {table.name: table for table in manifest.tables}
    numberings = {}
    for name in tables:
        entry = known[name].numbering if name in known else None
        if entry is None:
            raise ConfigError(
                f"{directory} says nothing of table {name!r}: give a data set prepared with the same schema"
            )
        size = known[name].rows if entry.kind == "hash" else None
        numberings[name] = Numbering(entry.kind, size, entry.min_count)
    vocabularies = {
        name: Vocabulary(directory / VOCABULARY, entry)
        for name, entry in manifest.vocabularies().items()
        if name in tables
    }
    return numberings, vocabularies, f"{directory.resolve()} ({manifest.checksum})"


def quarantine_of(schema: Schema, source: Source) -> tuple[str, bytes]:
    """How the file of lines put aside is called, and the header it needs to be read like the others."""
    if schema.format == "parquet":
        return "jsonl", b""
    if schema.columns:
        return schema.format, b""
    with source.open() as stream:
        header = stream.read(1 << 20).partition(b"\n")[0].removeprefix(b"\xef\xbb\xbf").removesuffix(b"\r")
    return schema.format, header


def memory_shares(options: Options, schema: Schema) -> tuple[int, int]:
    """Bytes for vocabularies and for sorting: what is left of the memory beside the program, blocks and a shard."""
    size = cache_size(options.memory)
    if not isinstance(size, Size):
        raise ConfigError(f"memory is {options.memory}: give bytes, such as '2GB'")
    # The program has its compiler loaded when it is measured, whether kernels are on disk already or not.
    IdMap().find_or_insert(np.zeros(1, np.int64), np.empty(1, np.int64))
    program = resident_bytes()
    left = int((size.num_bytes - program) * (1 - _SLACK))
    sample_bytes = 8 * (len(schema.categorical) + 1) + 4 * (len(schema.numeric) + 1)
    blocks = (2 * options.threads + 3) * 6 * BLOCK_BYTES
    shard = 3 * sample_bytes * options.shard_samples  # while it is collected, joined, and laid out
    shares = 2 if schema.sort else 1
    if left - blocks - shard < shares * _SHARE_MIN:
        least = program + (blocks + shard + shares * _SHARE_MIN) / (1 - _SLACK)
        raise ConfigError(
            f"memory is {options.memory}; the program takes {program / 1e6:,.0f} MB, blocks {blocks / 1e6:,.0f} and a "
            f"shard {shard / 1e6:,.0f}: give at least {least / 1e6:,.0f}MB, or fewer --threads or --shard-samples"
        )
    share = (left - blocks - shard) // shares
    return share, share
