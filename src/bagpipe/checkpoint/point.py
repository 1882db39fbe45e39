"""A complete checkpoint with all that it builds on, and the points that a run continues from, each with one of them.

Rows come out for any number of servers, whatever number wrote them. A point means the same in every process.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bagpipe.arrays import Floats, Int64s
from bagpipe.checkpoint.disk import Disk
from bagpipe.checkpoint.manifest import MANIFEST, MANIFEST_BYTES_MAX, Manifest, TableEntry, decode_manifest
from bagpipe.checkpoint.rows import ALL, Report, check_file, of_shard, read_file, read_shard
from bagpipe.errors import CheckpointError
from bagpipe.kernels.idmap import IdMap
from bagpipe.os_errors import failing
from bagpipe.store.base import Store

BLOB_SUFFIX = ".safetensors"
_CHAIN_MAX = 10_000


def directory_name(done: int) -> str:
    """Of the checkpoint after so many iterations, in the directory of checkpoints."""
    return f"{done:08d}"


class Checkpoint:
    """A checkpoint and those that it builds on, oldest first; open to read."""

    def __init__(self, disk: Disk, links: Sequence[tuple[Path, Manifest]], checksum: str) -> None:
        self._disk, self.checksum = disk, checksum
        self._links = tuple(links)
        self.directory, self.manifest = self._links[-1]
        tables = [(table.name, table.width) for table in self.manifest.tables]
        for directory, manifest in self._links:
            if [(table.name, table.width) for table in manifest.tables] != tables:
                raise CheckpointError(f"{self.directory} builds on {directory}, which has other tables: use another")

    @property
    def done(self) -> int:
        """Iterations that were over."""
        return self.manifest.done

    @property
    def chain(self) -> list[int]:
        """`done` of the checkpoints that it is made of, itself last."""
        return [manifest.done for _, manifest in self._links]

    @property
    def is_long(self) -> bool:
        """Whether what comes after its full one will take more room than that: the next one should have all rows."""
        full, *changes = [
            sum(entry.bytes for entry in manifest.files if entry.rows is not None) for _, manifest in self._links
        ]
        return bool(changes) and sum(changes) + changes[-1] > full  # with the next one, which will be like the last

    @property
    def num_bytes(self) -> int:
        """Of all files that it is made of."""
        return sum(manifest.num_bytes for _, manifest in self._links)

    def verify(self, report: Report | None = None, *, chain: bool = True) -> None:
        """CheckpointError unless every file that it is made of is there, with the bytes that were written.

        Without `chain` only its own files are read, and not those that it builds on.
        """
        done = 0
        for directory, manifest in self._links if chain else self._links[-1:]:
            for entry in manifest.files:
                check_file(self._disk, directory, entry)
                done += entry.bytes
                if report is not None:
                    report(done)

    def blobs(self) -> list[str]:
        """Names of what was kept beside rows, such as `trainer-0`."""
        return [entry.name.removesuffix(BLOB_SUFFIX) for entry in self.manifest.files if entry.rows is None]

    def blob(self, name: str) -> bytes:
        """What was kept under this name."""
        entry = self.manifest.file(f"{name}{BLOB_SUFFIX}")
        if entry is None or entry.rows is not None:
            raise CheckpointError(f"{self.directory} has nothing of the name {name!r}: it has {self.blobs()}")
        return read_file(self._disk, self.directory, entry)

    def table(self, name: str) -> int:
        """The number of a table."""
        names = [table.name for table in self.manifest.tables]
        if name not in names:
            raise CheckpointError(f"{self.directory} has no table {name!r}: it has {names}")
        return names.index(name)

    def rows(self, name: str, shard: tuple[int, int] = ALL) -> Iterator[tuple[Int64s, Floats]]:
        """Ids and values of a table's rows, each once, as (ids, values) to be read only.

        `shard` is (server, servers): only that server's. Newest first; memory for the ids of all but the oldest.
        """
        number, seen = self.table(name), IdMap()
        for link in range(len(self._links) - 1, -1, -1):
            for _, ids, values in read_shard(self._disk, *self._links[link], shard, number):
                new = _unseen(seen, ids, remember=link > 0)
                if len(new):
                    yield (ids, values) if len(new) == len(ids) else (ids[new], values[new])

    def in_order(self, shard: tuple[int, int] = ALL) -> Iterator[tuple[int, Int64s, Floats]]:
        """Rows of all tables as (table, ids, values), oldest checkpoint first: a row's last value counts."""
        for directory, manifest in self._links:
            yield from read_shard(self._disk, directory, manifest, shard)

    def num_rows(self) -> list[int]:
        """Of each table; those that several checkpoints of the chain have are counted again."""
        counts = [0] * len(self.manifest.tables)
        for _, manifest in self._links:
            for part in (part for entry in manifest.files for part in entry.rows or ()):
                counts[part.table] += part.rows
        return counts

    def check_tables(self, expected: Sequence[TableEntry]) -> None:
        """CheckpointError that names every difference, unless it is of a model with these tables."""
        if differences := table_differences(self.manifest.tables, expected):
            raise CheckpointError(
                f"{self.directory} is of another model: {'; '.join(differences)}: use the model and row optimizer that "
                "it was made with, or another checkpoint"
            )

    def check_initial(self, expected: Sequence[TableEntry]) -> None:
        """CheckpointError that names every difference, unless a run with these tables can begin with its rows."""
        if differences := initial_differences(self.manifest.tables, expected):
            raise CheckpointError(
                f"a run can't begin with {self.directory}: {'; '.join(differences)}: give the model these tables, with "
                "at least as many rows, vectors of the same lengths and the same row optimizer; to begin with another "
                "row optimizer or without a table, use bagpipe checkpoint export --format parquet --no-state, and "
                "bagpipe checkpoint import"
            )


def open_checkpoint(disk: Disk, directory: Path, done: int) -> Checkpoint:
    """The checkpoint after so many iterations in a directory of checkpoints, with all that it builds on."""
    links: list[tuple[Path, Manifest]] = []
    checksums: list[str] = []
    checksum: str | None = None
    while True:
        path = directory / directory_name(done)
        manifest, found = read_manifest(disk, path)
        if manifest.done != done:
            raise CheckpointError(f"{path} is of {manifest.done} iterations: give it back its name")
        if checksum is not None and found != checksum:
            raise CheckpointError(
                f"{path} is not what {links[-1][0]} builds on (checksum {found}, not {checksum}): use another one"
            )
        links.append((path, manifest))
        checksums.append(found)
        if manifest.base is None:
            return Checkpoint(disk, links[::-1], checksums[0])
        if len(links) == _CHAIN_MAX:
            raise CheckpointError(f"{links[0][0]} builds on more than {_CHAIN_MAX} others: use another one")
        done, checksum = manifest.base.done, manifest.base.checksum


def read_manifest(disk: Disk, path: Path) -> tuple[Manifest, str]:
    """The manifest in a checkpoint's own directory, and its checksum."""
    file_path = path / MANIFEST
    with failing(CheckpointError, "read", path.parent):
        if path.name not in disk.directories(path.parent):
            raise CheckpointError(f"there is no checkpoint {path} (a symbolic link does not count): check the path")
    with failing(CheckpointError, "read", file_path), disk.open(file_path) as file:
        if file.num_bytes > MANIFEST_BYTES_MAX:
            raise CheckpointError(
                f"{file_path} has {file.num_bytes:,} B, at most {MANIFEST_BYTES_MAX:,} are read: use another checkpoint"
            )
        data = bytearray(file.num_bytes)
        count = file.read_into(data)
    return decode_manifest(file_path, bytes(data[:count]))


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """After `done` iterations, with the state of that checkpoint; `START`: from scratch.

    A run that begins may take over the rows, weights and optimizer states of another run's checkpoint: then `done` is 0
    all the same, and data and generators are its own.
    """

    done: int = 0
    checkpoint: Path | None = None
    """Its own directory, in the directory of checkpoints."""
    checksum: str = ""
    """Of its manifest: two roles mean the same point only if it is equal."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ResumePoint:
        """The point of a checkpoint that is open."""
        return cls(checkpoint.done, checkpoint.directory, checkpoint.checksum)

    @classmethod
    def initial(cls, checkpoint: Checkpoint) -> ResumePoint:
        """The beginning of a run that takes over the state of a checkpoint that is open."""
        return cls(0, checkpoint.directory, checkpoint.checksum)

    @property
    def is_initial(self) -> bool:
        """Whether a run begins here, with the state of another one."""
        return self.done == 0 and self.checkpoint is not None

    def open(self, disk: Disk | None = None) -> Checkpoint:
        """The checkpoint; CheckpointError if it is missing, damaged, or another by now."""
        assert self.checkpoint is not None, "a run that begins has no checkpoint"
        done, name = self.done, self.checkpoint.name
        if self.is_initial:
            if not name.isdecimal():
                raise CheckpointError(f"{name!r} is not the name of a checkpoint, which is its number of iterations")
            done = int(name)
        disk = disk or Disk()
        try:
            checkpoint = open_checkpoint(disk, self.checkpoint.parent, done)
        except CheckpointError as error:
            if self._is_visible(disk):
                raise
            raise CheckpointError(
                f"{socket.gethostname()} does not see {self.checkpoint} ({error}); on several machines, mount the same "
                "storage under that path on all of them, or copy the checkpoint to where all see it"
            ) from error
        if checkpoint.checksum != self.checksum:
            raise CheckpointError(
                f"{self.checkpoint} has checksum {checkpoint.checksum} and should have {self.checksum}: it was written "
                "anew meanwhile; resume from it again"
            )
        return checkpoint

    def _is_visible(self, disk: Disk) -> bool:
        assert self.checkpoint is not None
        try:
            return self.checkpoint.name in disk.directories(self.checkpoint.parent)
        except OSError:
            return False

    def __str__(self) -> str:
        if self.is_initial:
            return f"the beginning, with the state of {self.checkpoint}"
        return "the beginning" if self.checkpoint is None else f"the checkpoint after {self.done:,} iterations"


START = ResumePoint()


def load_rows(
    checkpoint: Checkpoint,
    store: Store,
    tables: Sequence[str],
    *,
    shard: tuple[int, int] = ALL,
    initial: bool = False,
    report: Report | None = None,
) -> int:
    """Write the rows of a shard (server, servers) into an empty store, whatever servers they were saved by; how many.

    `tables` names the store's tables. Of an `initial` checkpoint, with which another run begins, they may be in another
    order, be larger, and be more. After an error in the middle the store has a part of the rows: throw it away.
    """
    check_rows(checkpoint, [(name, source.width) for name, source in zip(tables, store.tables, strict=True)], initial)
    numbers = [list(tables).index(table.name) for table in checkpoint.manifest.tables]
    # Which server has a row depends on the number of its table: files of another order may have rows of any server.
    moved = numbers != list(range(len(numbers)))
    num_rows = 0
    for table, ids, values in checkpoint.in_order(ALL if moved else shard):
        mine = of_shard(numbers[table], ids, values, shard) if moved else (ids, values)
        store.write(numbers[table], *mine)
        num_rows += len(mine[0])
        if report is not None:
            report(num_rows)
    return num_rows


def check_rows(checkpoint: Checkpoint, tables: Sequence[tuple[str, int]], initial: bool) -> None:
    """CheckpointError unless tables of these names and floats a row can have the rows of this checkpoint."""
    saved = [(table.name, table.width) for table in checkpoint.manifest.tables]
    if saved != list(tables) and not (initial and set(saved) <= set(tables)):
        raise CheckpointError(
            f"{checkpoint.directory} is of another model: its tables and the floats of a row are {_shown(saved)}, "
            f"and {_shown(tables)} are asked for: use the model and row optimizer that it was made with"
        )


def initial_differences(saved: Sequence[TableEntry], expected: Sequence[TableEntry]) -> list[str]:
    """Why a run with tables `expected` can't begin with rows of the tables `saved`, for people.

    Tables may be new, and may have grown; what the floats of a row are must be the same.
    """
    wanted, found = {table.name: table for table in expected}, []
    for table in saved:
        name, here = table.name, wanted.get(table.name)
        if here is None:
            found.append(f"table {name!r} is only in the checkpoint, and the model has {', '.join(map(repr, wanted))}")
            continue
        has_state = any(each.width > sum(each.dims) for each in (table, here))
        for part in ("dims", "optimizer", "width") if has_state else ("dims",):
            mine, theirs = getattr(table, part), getattr(here, part)
            if mine != theirs:
                found.append(f"table {name!r} has {part} {mine} in the checkpoint and {theirs} in the model")
                break  # another width is what comes of these
        if here.rows is not None and (table.rows is None or table.rows > here.rows):
            held = "any id" if table.rows is None else f"{table.rows:,} rows"
            found.append(f"table {name!r} has {held} in the checkpoint and only {here.rows:,} rows in the model")
    return found


def table_differences(saved: Sequence[TableEntry], expected: Sequence[TableEntry]) -> list[str]:
    """What tables of a checkpoint differ in from those of a model, for people."""
    ours, theirs = ({table.name: table for table in tables} for tables in (saved, expected))
    found = [f"table {name!r} is only in the checkpoint" for name in ours if name not in theirs]
    found += [f"table {name!r} is only in the model" for name in theirs if name not in ours]
    for name in (name for name in ours if name in theirs):
        for field in ("rows", "dims", "width", "optimizer"):
            mine, wanted = getattr(ours[name], field), getattr(theirs[name], field)
            if mine != wanted:
                found.append(f"table {name!r} has {field} {mine} in the checkpoint and {wanted} in the model")
    if not found and [table.name for table in saved] != [table.name for table in expected]:
        found.append(f"its tables are in the order {list(ours)}, those of the model {list(theirs)}")
    return found


def _shown(tables: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {width}" for name, width in tables)


def _unseen(seen: IdMap, ids: Int64s, remember: bool) -> Int64s:
    """Where in `ids` those are that were not seen before."""
    positions = np.empty(len(ids), np.int64)
    seen.find(ids, positions)
    unseen = np.flatnonzero(positions < 0)
    if remember:
        seen.find_or_insert(ids, positions)
    return unseen
