"""From blocks of values to samples with ids: every table numbers its columns as it was told to, all at once on threads.

First appearance is by sample, then column, then place in a list, so it depends on no block boundary; what is computed
here is a function of the order of the data only (I1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bagpipe.data.manifest import NumberingEntry, VocabularyEntry
from bagpipe.data.prepare.block import Block, Category
from bagpipe.data.prepare.keymap import COUNT, MISSING, RARE, RESERVED, Clash, KeyMap
from bagpipe.data.prepare.numbering import MISSING_ID, Numbering, hash_rows
from bagpipe.data.prepare.space import Held, Space
from bagpipe.data.prepare.texts import hash_texts
from bagpipe.data.prepare.vocabulary import GROUP_ROWS, Part, Vocabulary, write_vocabulary
from bagpipe.data.prepare.words import Words
from bagpipe.data.samples import Column, Samples
from bagpipe.errors import DataError
from bagpipe.kernels.parallel import Workers

Ints = NDArray[np.int64]
Values = Literal["text", "integer"]


class Occurrences:
    """What the columns of one table hold in a block, in order of samples."""

    def __init__(self, categories: Sequence[Category], num_samples: int) -> None:
        self._categories, self._order = categories, None
        if len(categories) == 1:
            (only,) = categories
            self.keys, self.checks, self.missing = only.keys, only.checks, only.missing
            return
        owners = [_owners(category, num_samples) for category in categories]
        self._order = np.argsort(np.concatenate(owners), kind="stable")
        self.keys = np.concatenate([category.keys for category in categories])[self._order]
        self.checks = np.concatenate([category.checks for category in categories])[self._order]
        self.missing = np.concatenate([category.missing for category in categories])[self._order]

    def values(self, places: Ints) -> pa.Array:
        """The values of some occurrences."""
        if self._order is None:
            return self._categories[0].values.take(pa.array(places))
        values = pa.concat_arrays([category.values for category in self._categories])
        return values.take(pa.array(self._order[places]))

    def split(self, ids: Ints) -> list[Ints]:
        """The ids of each column."""
        if self._order is None:
            return [ids]
        back = np.empty_like(ids)
        back[self._order] = ids
        return np.split(back, np.cumsum([len(category.keys) for category in self._categories])[:-1])


def _owners(category: Category, num_samples: int) -> Ints:
    samples = np.arange(num_samples)
    return samples if category.offsets is None else np.repeat(samples, np.diff(category.offsets))


class TableEncoder:
    """One table: its columns, how its values are numbered, and the values it has seen."""

    def __init__(self, name: str, columns: tuple[str, ...], numbering: Numbering) -> None:
        self.name, self.columns, self.numbering = name, columns, numbering
        self.values: Values | None = None
        """What its values are; None: no block has come yet."""
        self.map: KeyMap | None = None
        self.words: Words | None = None
        self.earlier: Vocabulary | None = None
        """The vocabulary of an earlier run, which is not to grow."""
        self.reserved = np.zeros(RESERVED, np.int64)
        """How often the rows of missing and of rare values occurred."""
        self.settled: VocabularyEntry | None = None
        """The file of its vocabulary, once values were counted and numbered."""
        self.rows: int | None = numbering.size

    @property
    def counts_first(self) -> bool:
        """Whether a pass over the data counts its values before they are numbered."""
        return self.numbering.counts_first and self.earlier is None

    def count(self, block: Block) -> None:
        """Take the values of a block in, for `settle`."""
        found = self._occurrences(block)
        self._admit(found)

    def encode(self, block: Block) -> dict[str, Ints]:
        """The ids of each column of a block."""
        found = self._occurrences(block)
        ids = np.empty(len(found.keys), np.int64)
        if self.numbering.kind == "hash":
            assert self.rows is not None
            hash_rows(found.keys, found.missing, self.rows, ids)
        elif self.numbering.kind == "ids":
            ids[:] = found.keys.view(np.int64)
            self._check_free(found, ids)
            ids[found.missing] = MISSING_ID
        elif self.settled is not None:
            assert self.map is not None
            self.map.encode(found.keys, found.missing, ids)
        else:
            ids = self._admit(found)
        return dict(zip(self.columns, found.split(ids), strict=True))

    def settle(self, path: Path, space: Space) -> None:
        """End of counting: number the values that are not too rare, and write the vocabulary."""
        assert self.map is not None
        order = self.map.rank(self.numbering.min_count, self.numbering.kind == "frequency")
        self._settle(order, path)
        space.release(order)

    def _settle(self, order: Held, path: Path) -> None:
        assert self.map is not None
        positions, entries = order.array, self.map.entries
        self.rows = len(positions) + RESERVED
        if self.settled is None:
            kept = sum(int(entries[positions[a:b], COUNT].sum()) for a, b in self.map.runs(len(positions)))
            total = sum(int(entries[a:b, COUNT].sum()) for a, b in self.map.runs())
            self.reserved[RARE] = total - kept
            self.settled = self._write(path, lambda start, stop: positions[start:stop])
        self.map.number(positions)

    def finish(self, path: Path) -> NumberingEntry:
        """End of the data: how it was numbered, with the vocabulary written."""
        kind, min_count = self.numbering.kind, self.numbering.min_count
        if self.numbering.has_vocabulary and self.settled is None:
            assert self.map is not None
            self.rows = len(self.map) + RESERVED
            self.settled = self._write(path, lambda start, stop: np.arange(start, stop, dtype=np.uint32))
        return NumberingEntry(kind=kind, min_count=min_count, values=self.values or "text", vocabulary=self.settled)

    def restore(self, words: int, counts: Ints | None, path: Path, space: Space) -> None:
        """The state after so many values, with their counts (missing ones first) where values are counted first."""
        assert self.map is not None
        assert self.words is not None
        self.words.cut(words)
        for start in range(0, words, GROUP_ROWS):
            records = self.words.records(start, min(start + GROUP_ROWS, words))
            self.map.load(np.ascontiguousarray(records["key"]), np.ascontiguousarray(records["check"]))
        if counts is not None:
            self.reserved[MISSING] = counts[0]
            for start, stop in self.map.runs():
                self.map.entries[start:stop, COUNT] = counts[1 + start : 1 + stop]
            if self.settled is not None:
                self.settle(path, space)

    def recount(self, ids: Ints) -> None:
        """Count ids of samples that an earlier go has written."""
        if self.map is not None and self.settled is None:
            self.reserved += np.bincount(np.minimum(ids, RESERVED), minlength=RESERVED + 1)[:RESERVED]
            self.map.tally(ids)

    def counts(self) -> Iterator[bytes]:
        """The counts so far, that of missing values first, as little-endian 64-bit integers."""
        assert self.map is not None
        yield self.reserved[:1].astype("<i8").tobytes()
        for start, stop in self.map.runs():
            yield self.map.entries[start:stop, COUNT].astype("<i8").tobytes()

    def take_over(self, vocabulary: Vocabulary, space: Space) -> None:
        """Number values as an earlier run did."""
        self.earlier, self.map = vocabulary, KeyMap(space)
        for start, (values, _) in enumerate(vocabulary.groups()):
            values = values[RESERVED:] if start == 0 else values
            self.map.load(*_keys(values))
        self.rows = len(vocabulary)
        self.values = "integer" if vocabulary.integers else "text"

    def _write(self, path: Path, positions: Callable[[int, int], NDArray[np.uint32]]) -> VocabularyEntry:
        assert self.map is not None
        assert self.rows is not None
        seen, integers = self.map, self.values == "integer"

        def part(start: int, stop: int) -> Part:
            places = positions(max(start - RESERVED, 0), stop - RESERVED)
            counts = seen.entries[places, COUNT].astype(np.int64)
            seen.relieve()
            if self.earlier is not None:
                return self.earlier.group(start // GROUP_ROWS)[0], _with_reserved(counts, self.reserved, start)
            assert self.words is not None
            values = self.words.values(places, integers)
            if start == 0:
                values = pa.concat_arrays([pa.nulls(RESERVED, values.type), values])
            return values, _with_reserved(counts, self.reserved, start)

        return write_vocabulary(path, integers, self.rows, part)

    def _admit(self, found: Occurrences) -> Ints:
        assert self.map is not None
        ids = np.empty(len(found.keys), np.int64)
        try:
            fresh = self.map.admit(found.keys, found.checks, found.missing, ids, grow=self.earlier is None)
        except Clash as clash:
            raise self._clashed(found, clash) from None
        self.reserved += np.bincount(np.minimum(ids, RESERVED), minlength=RESERVED + 1)[:RESERVED]
        if len(fresh):
            assert self.words is not None
            self.words.append(found.keys[fresh], found.checks[fresh], found.values(fresh))
        return ids

    def _occurrences(self, block: Block) -> Occurrences:
        categories = [block.categories[column] for column in self.columns]
        for column, category in zip(self.columns, categories, strict=True):
            values: Values = "integer" if pa.types.is_integer(category.values.type) else "text"
            self.values = self.values or values
            if values != self.values:
                raise DataError(
                    f"column {column!r} of table {self.name!r} has {values} values, the others or the earlier "
                    f"vocabulary {self.values}: give its `kind` in the schema"
                )
        return Occurrences(categories, len(block))

    def _check_free(self, found: Occurrences, ids: Ints) -> None:
        taken = np.flatnonzero((ids == MISSING_ID) & ~found.missing)
        if len(taken):
            value = found.values(taken[:1])[0].as_py()
            raise DataError(
                f"table {self.name!r} has the value {value!r}, whose id {MISSING_ID} stands for missing values: number "
                f"it otherwise, for instance with --numbering {self.name}=first"
            )

    def _clashed(self, found: Occurrences, clash: Clash) -> DataError:
        value = found.values(np.array([clash.occurrence]))[0].as_py()
        if self.words is not None and clash.position < len(self.words):
            other = self.words.values(np.array([clash.position], np.uint32), False)[0].as_py()
        else:
            other = found.values(np.flatnonzero(found.keys == found.keys[clash.occurrence])[:1])[0].as_py()
        return DataError(
            f"values {other!r} and {value!r} of table {self.name!r} have the same 64-bit hash and would become one: "
            f"rename one of them, or number it with --numbering {self.name}=hash:SIZE, where values may share rows"
        )


def _with_reserved(counts: Ints, reserved: Ints, start: int) -> Ints:
    return np.concatenate([reserved, counts]) if start == 0 else counts


def _keys(values: pa.Array) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
    if pa.types.is_integer(values.type):
        keys = values.to_numpy(zero_copy_only=False).astype(np.int64).view(np.uint64)
        return keys, np.zeros(len(keys), np.uint32)
    return hash_texts(values)


class Encoder:
    """All tables; a context that owns threads and files."""

    def __init__(
        self,
        tables: Sequence[TableEncoder],
        directory: Path,
        memory_bytes: int,
        threads: int,
        earlier: Mapping[str, Vocabulary] = MappingProxyType({}),
    ) -> None:
        self.tables, self.space = tuple(tables), Space(directory, memory_bytes)
        self._workers = Workers(threads, "bagpipe-numbering")
        for number, table in enumerate(self.tables):
            if table.name in earlier:
                table.take_over(earlier[table.name], self.space)
            elif table.numbering.has_vocabulary:
                table.map = KeyMap(self.space)
                table.words = Words(directory, number)

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *_: object) -> None:
        self._workers.close()
        for table in self.tables:
            if table.words is not None:
                table.words.close()

    def count(self, block: Block) -> None:
        """Take in the values of all tables that count first."""
        self._run([(table, partial(table.count, block)) for table in self.tables if table.counts_first])

    def encode(self, block: Block) -> Samples:
        """The samples of a block, with ids."""
        ids: dict[str, Ints] = {}

        def encode(table: TableEncoder) -> None:
            ids.update(table.encode(block))

        self._run([(table, partial(encode, table)) for table in self.tables])
        columns = {name: _column(ids[name], block.categories[name]) for table in self.tables for name in table.columns}
        return Samples(np.ascontiguousarray(block.dense), columns, block.labels)

    def commit(self) -> dict[str, int]:
        """Bring the values seen so far to disk; how many each table has."""
        return {table.name: table.words.commit() for table in self.tables if table.words is not None}

    def _run(self, tasks: Sequence[tuple[TableEncoder, Callable[[], None]]]) -> None:
        longest_first = sorted(tasks, key=lambda task: -len(task[0].map or ()))
        self._workers.run([task for _, task in longest_first])


def _column(ids: Ints, category: Category) -> Column:
    return Column(ids[:, None] if category.offsets is None else ids, category.offsets)
