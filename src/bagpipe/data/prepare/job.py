"""`bagpipe data prepare`: raw files to shards with vocabularies, in bounded memory, to be stopped and gone on with.

After each shard everything that came before is on disk and on record; going on from there gives the same bytes as a
run that was never disturbed (I2). Before the first shard a failure leaves nothing (I6).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from bagpipe.data.manifest import MANIFEST, VOCABULARY, Manifest, TableEntry, load_manifest
from bagpipe.data.prepare.block import BEGINNING, Block, Place
from bagpipe.data.prepare.cut import part_of
from bagpipe.data.prepare.encoder import Encoder, TableEncoder
from bagpipe.data.prepare.finished import Finished, check_finished, save_finished
from bagpipe.data.prepare.numbering import describe
from bagpipe.data.prepare.options import Options, memory_shares, numberings_of, quarantine_of
from bagpipe.data.prepare.parts import Days, check_split, day_names, parts_of
from bagpipe.data.prepare.progress import Progress, Working, check_same, identities
from bagpipe.data.prepare.reading import BLOCK_BYTES, open_sources, read_blocks
from bagpipe.data.prepare.rejected import Rejected
from bagpipe.data.prepare.schema import Schema
from bagpipe.data.prepare.sorting import in_time_order
from bagpipe.data.prepare.sources import Source
from bagpipe.data.prepare.vocabulary import file_names
from bagpipe.data.shard_file import ShardFile
from bagpipe.data.writer import ShardWriter, Written, write_file
from bagpipe.errors import ConfigError, DataError
from bagpipe.types import Table

Report = Callable[[int, int, int], None]
"""Called with bytes of the files that are done, bytes in all, and samples written or counted."""

FORMATS = ("tsv", "csv", "parquet")
"""Kinds of files that need a schema of the user's."""
COUNT_SAMPLES = 1 << 22
"""Counts of a first pass are put on record after so many samples, or as many as 8 for each value, if that is more: a
count has 8 bytes, so this writes about one byte a sample."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """What became of the files."""

    manifest: Manifest
    samples_before: int
    """Samples that an earlier go had written."""
    seconds: float
    rejected: tuple[Path, ...]
    """Files of lines that can't be used."""


def prepare(
    kind: str, paths: list[Path], destination: Path, options: Options | None = None, report: Report | None = None
) -> Prepared:
    """Read raw files and write a data set; goes on where an earlier call with the same arguments was stopped.

    Of one that was finished it returns the data set as it is; other arguments are refused.
    """
    options = options or Options()
    schema, sources = open_sources(kind, paths, options.schema)
    if kind in FORMATS and schema.format != kind:
        raise ConfigError(f"{options.schema} is a schema of {schema.format} files, not of {kind}: say {schema.format}")
    return Job(kind, schema, sources, destination, options, report or (lambda *_: None)).run()


class Job:
    """One run."""

    def __init__(
        self,
        kind: str,
        schema: Schema,
        sources: tuple[Source, ...],
        destination: Path,
        options: Options,
        report: Report,
    ) -> None:
        if options.limit is not None and options.limit < 1:
            raise ConfigError(f"limit is {options.limit}: give at least 1 sample")
        check_split(options.validation, options.test, day_names(sources) if schema.time is None else None)
        self.schema, self.sources, self.destination, self.options = schema, sources, destination, options
        self.origin = f"{kind}: {', '.join(source.path.name for source in sources[:10])}"
        self.numberings, self.earlier, vouched = numberings_of(options, tuple(schema.tables))
        self.settings = {
            "schema": schema.model_dump_json(),
            "limit": str(options.limit),
            "shard-samples": str(options.shard_samples),
            "vocabulary": vouched,
        } | {f"numbering of {table}": text for table, text in describe(self.numberings).items()}
        self.working = Working(destination)
        self.rejected = Rejected(destination, options.on_error, *quarantine_of(schema, sources[0]))
        self._shares = memory_shares(options, schema)
        self._report, self._done_bytes = report, 0
        self._counts, self._counted = 0, 0
        self._here = (BEGINNING, 0, 0)
        self._ended = False

    @property
    def total_bytes(self) -> int:
        """Bytes that are read in all."""
        passes = 2 if any(numbering.counts_first for numbering in self.numberings.values()) and not self.earlier else 1
        return passes * sum(source.size for source in self.sources)

    def run(self) -> Prepared:
        """Do what is still to be done."""
        began = time.monotonic()
        try:
            finished = self._finished()
            progress = self._take_up() if finished is None else None
        except BaseException:
            self.working.close()
            raise
        if finished is not None:
            return self._prepared(finished, finished.samples, began)
        done = None if progress is None else Written(progress.features, progress.shards)
        tables = tuple(Table(name, self.numberings[name].size, columns) for name, columns in self.schema.tables.items())
        self.writer = ShardWriter(
            self.destination,
            tables,
            len(self.schema.numeric),
            shard_samples=self.options.shard_samples,
            origin=self.origin,
            growing={name for name, numbering in self.numberings.items() if numbering.has_vocabulary},
            on_shard=self._save,
            done=done,
        )
        with self.writer:
            try:
                manifest = self._run(progress)
            except BaseException:
                self._leave()
                raise
        self.rejected.close(keep=True)
        self.working.remove()
        before = sum(shard.samples for shard in progress.shards) if progress is not None else 0
        return self._prepared(manifest, before, began)

    def _finished(self) -> Manifest | None:
        """The data set, if an earlier go with the same arguments has finished it; what it may have left is removed."""
        if not (self.destination / MANIFEST).exists():
            return None
        if self.working.exists:
            self.working.open()
        manifest = load_manifest(self.destination)
        made_of = self._made_of()
        check_finished(self.destination, manifest, made_of, identities(self.sources), self.options.on_error)
        self.working.remove()
        return manifest

    def _made_of(self) -> dict[str, str]:
        return self.settings | {"validation": str(self.options.validation), "test": str(self.options.test)}

    def _take_up(self) -> Progress | None:
        """Where to go on, if an earlier go came that far."""
        if not self.working.exists:
            return None
        self.working.open()
        progress = self.working.load()
        if progress is not None:
            remedy = f"give the same, or remove {self.destination} and begin anew"
            check_same(f"{self.destination} was begun", progress, self.settings, identities(self.sources), remedy)
            if progress.skipped and progress.on_error != self.options.on_error:
                raise ConfigError(
                    f"{self.destination} was begun with on-error {progress.on_error}, which has put {progress.skipped} "
                    f"lines aside, now it is {self.options.on_error}: give the same"
                )
        self.working.tidy(progress)
        self.rejected.restore(progress.skipped if progress else 0, progress.rejected if progress else {})
        if progress is None:
            self.working.remove(with_vocabularies=True)
        return progress

    def _leave(self) -> None:
        # What is on disk decides, not what this process remembers: it may have been interrupted in between.
        progress = self.working.load()
        self.rejected.close(keep=progress is not None)
        if progress is not None:
            self.writer.keep(len(progress.shards))
            self.working.close()
        else:
            self.working.remove(with_vocabularies=True)

    def _run(self, progress: Progress | None) -> Manifest:
        if progress is None:
            self.working.open()
        self.days = Days(self.sources, progress.days if progress is not None else ())
        tables = tuple(
            TableEncoder(name, columns, self.numberings[name]) for name, columns in self.schema.tables.items()
        )
        self._files = file_names([table.name for table in tables])
        threads, vocabulary_bytes = self.options.threads, self._shares[0]
        with Encoder(tables, self.working.path, vocabulary_bytes, threads, self.earlier) as self.encoder:
            if progress is not None:
                self._restore(progress)
            if any(table.counts_first and table.settled is None for table in tables):
                self._count()
            if not self._ended:
                self._encode()
            return self.writer.finish(self._complete)

    def _restore(self, progress: Progress) -> None:
        self._here = (progress.place, progress.samples_after, progress.problems_after)
        self._ended, self._counts, self._counted = progress.ended, progress.counts, progress.counted
        for number, table in enumerate(self.encoder.tables):
            table.values = progress.values.get(table.name, table.values)
            table.settled = progress.settled.get(table.name)
            if table.words is not None:
                path = self.working.counts_path(progress.counts, number)
                counts = np.memmap(path, "<i8", "r") if table.counts_first else None
                table.restore(progress.words[table.name], counts, self._vocabulary_path(table), self.encoder.space)
        self._recount(progress)

    def _recount(self, progress: Progress) -> None:
        """Count the values of shards that an earlier go has written, which also checks these."""
        tables = tuple(
            TableEntry(name=table.name, rows=_rows(table), features=table.columns) for table in self.encoder.tables
        )
        manifest = Manifest(
            samples=self.writer.num_samples,
            dense=len(self.schema.numeric),
            tables=tables,
            features=progress.features,
            shards=progress.shards,
        )
        first = 0
        for entry in progress.shards:
            shard = ShardFile(self.destination / entry.file, entry, manifest, first)
            for table in self.encoder.tables:
                for column in table.columns:
                    table.recount(shard.ids(column))
            first += entry.samples

    def _count(self) -> None:
        """The first pass: how often each value occurs."""
        since, days = 0, Days(self.sources)  # of their own, to find samples out of order before shards are written
        for block, done, known in self._blocks():
            if self.options.on_error == "stop":
                self.rejected.add(block.problems[known:])
            part = part_of(block, done, min(len(block), done + self._room(self._counted)))
            self.encoder.count(part)
            days.add(part)
            self._counted += len(part)
            since += len(part)
            self._here = (block.end, 0, 0)
            self._told(block, self._counted)
            if self._room(self._counted) == 0:
                break
            if since >= max(COUNT_SAMPLES, 8 * sum(len(t.map or ()) for t in self.encoder.tables if t.counts_first)):
                self._write_counts()
                self._save(Written((), ()))
                since = 0
        self._here = (BEGINNING, 0, 0)
        self._write_counts()
        for table in self.encoder.tables:
            if table.counts_first:
                table.settle(self._vocabulary_path(table), self.encoder.space)
        self._save(Written((), ()))

    def _encode(self) -> None:
        """The pass that writes shards."""
        self._done_bytes = self.total_bytes - sum(source.size for source in self.sources)
        for block, done, known in self._blocks():
            self.rejected.add(block.problems[known:])
            while done < len(block) and self._room(self.writer.num_samples):
                stop = min(len(block), done + min(self.writer.room, self._room(self.writer.num_samples)))
                part = part_of(block, done, stop)
                samples = self.encoder.encode(part)
                self.days.add(part)
                done = stop
                at_end = done == len(block)
                self._here = (block.end, 0, 0) if at_end else (block.start, done, len(block.problems))
                self.writer.add(samples.batch(0, len(samples), self.writer.num_samples))
            self._told(block, self.writer.num_samples)
            if not self._room(self.writer.num_samples):
                break
        self._ended = True
        self.writer.flush()

    def _blocks(self) -> Iterator[tuple[Block, int, int]]:
        """Blocks from here on, each with the samples and problems at its beginning that are done already."""
        place, samples, problems = self._here
        blocks = self._read(place)
        with closing(blocks):
            for block in blocks:
                done, known = min(samples, len(block)), min(problems, len(block.problems))
                samples, problems = samples - done, problems - known
                yield block, done, known

    def _read(self, place: Place) -> Generator[Block, None, None]:
        start = BEGINNING if self.schema.sort else place
        blocks = read_blocks(self.schema, self.sources, start, block_bytes=BLOCK_BYTES, threads=self.options.threads)
        if self.schema.sort:
            directory = self.working.path / "sorted"
            directory.mkdir(exist_ok=True)
            blocks = in_time_order(blocks, directory, place, memory_bytes=self._shares[1])
        return cast(Generator[Block, None, None], blocks)

    def _room(self, samples: int) -> int:
        """How many more samples are wanted."""
        return 2**62 if self.options.limit is None else self.options.limit - samples

    def _told(self, block: Block, samples: int) -> None:
        self._report(self._done_bytes + block.position, self.total_bytes, samples)

    def _write_counts(self) -> None:
        self._counts += 1
        for number, table in enumerate(self.encoder.tables):
            if table.counts_first:
                write_file(self.working.counts_path(self._counts, number), table.counts(), "wb")

    def _save(self, written: Written) -> None:
        """Put on record what is finished."""
        place, samples, problems = self._here
        tables = self.encoder.tables
        self.working.save(
            Progress(
                settings=self.settings,
                sources=identities(self.sources),
                ended=self._ended,
                file=place.file,
                offset=place.offset,
                line=place.line,
                samples_after=samples,
                problems_after=problems,
                counted=self._counted,
                counts=self._counts,
                words=self.encoder.commit(),
                values={table.name: table.values for table in tables if table.values is not None},
                settled={table.name: table.settled for table in tables if table.settled is not None},
                days=self.days.ranges(),
                features=written.features,
                shards=written.shards,
                skipped=self.rejected.count,
                on_error=self.options.on_error,
                rejected=self.rejected.commit(),
            )
        )

    def _complete(self, manifest: Manifest) -> Manifest:
        if not manifest.samples:
            raise DataError(
                f"{self.sources[0].path} has no line that gives a sample ({self.rejected.count} were put aside)"
            )
        tables = []
        for entry, table in zip(manifest.tables, self.encoder.tables, strict=True):
            numbering = table.finish(self._vocabulary_path(table))
            tables.append(entry.model_copy(update={"rows": table.rows, "numbering": numbering}))
        days = self.days.ranges()
        update = {
            "tables": tuple(tables),
            "numeric": tuple(column.column for column in self.schema.numeric),
            "parts": parts_of(days, self.options.validation, self.options.test),
            "days": days,
            "skipped": self.rejected.count,
        }
        manifest = manifest.model_copy(update=update).sealed()
        save_finished(
            self.destination,
            Finished(
                manifest=manifest.checksum,
                settings=self._made_of(),
                sources=identities(self.sources),
                on_error=self.options.on_error,
            ),
        )
        return manifest

    def _vocabulary_path(self, table: TableEncoder) -> Path:
        return self.destination / VOCABULARY / self._files[table.name]

    def _prepared(self, manifest: Manifest, before: int, began: float) -> Prepared:
        paths = (self.rejected.list_path, self.rejected.lines_path)
        return Prepared(manifest, before, time.monotonic() - began, tuple(path for path in paths if path.exists()))


def _rows(table: TableEncoder) -> int | None:
    if not table.numbering.has_vocabulary:
        return table.numbering.size
    return table.rows if table.rows is not None else len(table.map or ()) + 2
