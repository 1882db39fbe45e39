"""Rows that others have trained as a checkpoint that a run can begin with: from parquet, safetensors and TorchRec.

Files are read some rows at a time, so tables larger than memory pass; of a table whose ids are listed, those are in
memory. What is wrong with a file is a CheckpointError that names it, the table and the remedy (I8), and nothing is left
behind then (I6). There is no state of a trainer in such a checkpoint: a run can begin with it, and not go on from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open

from bagpipe.arrays import Floats, Int64s
from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.export import TABLE_KEY
from bagpipe.checkpoint.manifest import RunFacts, TableEntry
from bagpipe.checkpoint.point import Checkpoint
from bagpipe.checkpoint.rows import Report, write_rows
from bagpipe.errors import CheckpointError
from bagpipe.kernels.idmap import IdMap
from bagpipe.optim import RowOptimizer
from bagpipe.whole_file import nothing_left

SUFFIXES = (".parquet", ".safetensors")
_WEIGHT = re.compile(r"(?:^|.*\.)(?:embedding_bags|embeddings)\.(.+)\.weight")
"""What TorchRec calls the weight of a table."""
_LISTED = ("ids", "vectors", "state")
_FLOATS = ("F32", "F16", "BF16")
_ROWS_MAX = 1 << 62
"""What a manifest can say."""

Block = tuple[Int64s, Floats, Floats | None]
"""Ids, all vectors of each row side by side, and its state where there is one."""


class RowFile(Protocol):
    """Rows of one table in one file."""

    what: str
    """For messages."""
    dims: tuple[int, ...]
    """Lengths of the vectors."""
    layers: tuple[str, ...]
    """What each vector is called there."""
    state_width: int
    """Floats of optimizer state a row; 0: there is none."""
    num_rows: int | None
    """Where ids are the numbers of rows: how many; None: ids are listed."""

    def blocks(self, rows_per_block: int) -> Iterator[Block]:
        """All rows, some at a time."""


@dataclass
class ImportedTable:
    """A table to be imported, and what was found in its files."""

    name: str
    files: list[RowFile]
    optimizer: RowOptimizer
    any_id: bool
    """Whether it takes any 64-bit id, below 0 too."""
    id_max: int = -1
    rows_done: int = 0
    rows_not_finite: int = 0
    """Rows with NaN or an infinite number, which are kept as they are."""
    seen: IdMap = field(default_factory=IdMap)

    def __post_init__(self) -> None:
        first = self.files[0]
        self.dims, self.layers, self.state_width = first.dims, first.layers, self.optimizer.state_width(first.dims)
        for file in self.files:
            if file.dims != self.dims:
                raise CheckpointError(
                    f"{file.what} has vectors of lengths {file.dims} and {first.what} of {self.dims}: the files of "
                    f"table {self.name!r} must have the same columns"
                )
            if file.state_width not in (0, self.state_width):
                raise CheckpointError(
                    f"{file.what} has {file.state_width} floats of state a row, and the optimizer "
                    f"{self.optimizer.name!r} keeps {self.state_width} for vectors of lengths {self.dims}: name "
                    f"the one that it is of with --optimizer {self.name}=NAME, or leave the state out of the file"
                )

    @property
    def width(self) -> int:
        """Floats of a row."""
        return sum(self.dims) + self.state_width

    def entry(self) -> TableEntry:
        """What the manifest says of it, once all rows were read."""
        rows = max([self.id_max + 1, 1, *(file.num_rows or 0 for file in self.files)])
        return TableEntry(
            name=self.name,
            rows=None if self.any_id or rows > _ROWS_MAX else rows,
            dims=self.dims,
            width=self.width,
            optimizer=self.optimizer.name,
            layers=self.layers,
            initial=None,
        )

    def rows(self, rows_per_block: int) -> Iterator[tuple[Int64s, Floats]]:
        """Ids and values as they are stored, vectors and then state."""
        first_state = self.optimizer.initial_state(self.dims)
        for file in self.files:
            for ids, vectors, state in file.blocks(rows_per_block):
                self._check(file, ids)
                values = np.empty((len(ids), self.width), np.float32)
                values[:, : vectors.shape[1]] = vectors
                values[:, vectors.shape[1] :] = first_state if state is None else state
                self.rows_done += len(ids)
                self.rows_not_finite += len(ids) - int(np.isfinite(values).all(1).sum())
                yield ids, values

    def _check(self, file: RowFile, ids: Int64s) -> None:
        if not len(ids):
            return
        if ids.min() < 0 and not self.any_id:
            raise CheckpointError(
                f"{file.what} has id {ids.min()}: ids are at least 0, unless the table takes any 64-bit id: then say "
                f"so with --any-id {self.name}"
            )
        self.id_max = max(self.id_max, int(ids.max()))
        if file.num_rows is not None and len(self.files) == 1:
            return  # numbers of rows differ
        before = len(self.seen)
        self.seen.find_or_insert(ids, np.empty(len(ids), np.int64))
        if len(self.seen) - before < len(ids):
            raise CheckpointError(
                f"{file.what} has an id that table {self.name!r} had before ({_repeated(ids, before, self.seen)}): "
                "give each row once"
            )


def import_rows(
    sources: Sequence[str | Path],
    directory: str | Path,
    *,
    optimizer: RowOptimizer,
    optimizers: Mapping[str, RowOptimizer] | None = None,
    renamed: Mapping[str, str] | None = None,
    any_ids: Sequence[str] = (),
    report: Report | None = None,
) -> tuple[Checkpoint, list[ImportedTable], list[str]]:
    """Write the rows of all tables that files have as a checkpoint of 0 iterations; also tensors that are no table.

    A source is a parquet file of a table, a safetensors file of any number, or a directory of such files; `NAME=PATH`
    gives the table of a file another name, or makes one of all parquet files in a directory; `renamed` has new names by
    those in the files. `optimizers` has the row optimizer of tables by name, where it is another one; rows without a
    state begin with its first one.
    """
    checkpoints = Checkpoints(directory)
    if checkpoints.numbers():
        raise CheckpointError(f"{checkpoints.directory} holds checkpoints already: give a new directory")
    found, left_out = _find(sources)
    found = _rename(found, renamed or {})
    named = {**(optimizers or {}), **dict.fromkeys(any_ids)}
    for name in named:
        if name not in found:
            raise CheckpointError(f"there is no table {name!r} in what is imported: there are {', '.join(found)}")
    tables = [
        ImportedTable(name, files, (optimizers or {}).get(name, optimizer), name in any_ids)
        for name, files in found.items()
    ]
    with nothing_left(checkpoints.directory), checkpoints.begin(0, full=True) as pending:
        names = [(table.name, table.width) for table in tables]
        pending.add(write_rows(checkpoints.disk, pending.directory, _Snapshot(tables), names, report=report))
        config = {"imported_from": [str(source) for source in sources]}
        facts = RunFacts(tables=tuple(table.entry() for table in tables), config=config)
        return pending.commit(facts), tables, left_out


@dataclass
class _Snapshot:
    tables: Sequence[ImportedTable]

    def iterate(self, table: int, rows_per_chunk: int) -> Iterator[tuple[Int64s, Floats]]:
        yield from self.tables[table].rows(rows_per_chunk)


def _find(sources: Sequence[str | Path]) -> tuple[dict[str, list[RowFile]], list[str]]:
    """The files of each table by its name, and what else safetensors files have."""
    tables: dict[str, list[RowFile]] = {}
    left_out: list[str] = []
    for source in sources:
        name, path = _named(source)
        if path.is_dir() and name is not None:
            files = [file for part in _within(path, SUFFIXES[:1]) for file in _parquet(part, name).values()]
            found = {name: files}
        else:
            found = {}
            for part in _within(path, SUFFIXES) if path.is_dir() else [path]:
                more = {table: [file] for table, file in _open(part, name, left_out).items()}
                _refuse_twice(found, more)
                found |= more
        _refuse_twice(tables, found)
        tables |= found
    if not tables:
        raise CheckpointError(f"there are no rows of a table in {', '.join(map(str, sources))}: give other files")
    return tables, left_out


def _rename(tables: Mapping[str, list[RowFile]], renamed: Mapping[str, str]) -> dict[str, list[RowFile]]:
    """The same under new names."""
    found: dict[str, list[RowFile]] = {}
    for name in renamed:
        if name not in tables:
            raise CheckpointError(f"there is no table {name!r} to be renamed: there are {', '.join(tables)}")
    for name, files in tables.items():
        new = {renamed.get(name, name): files}
        _refuse_twice(found, new)
        found |= new
    return found


def _named(source: str | Path) -> tuple[str | None, Path]:
    """`NAME=PATH` in its parts."""
    name, path = None, Path(source)
    if isinstance(source, str) and not path.exists():
        before, _, after = source.partition("=")
        if before and after:
            name, path = before, Path(after)
    if not path.exists():
        raise CheckpointError(f"there is no file {path}: check the path")
    return name, path


def _within(directory: Path, suffixes: Sequence[str]) -> list[Path]:
    files = sorted(path for path in directory.iterdir() if path.suffix in suffixes and path.is_file())
    if not files:
        raise CheckpointError(f"{directory} has no files that end with {' or '.join(suffixes)}: check the path")
    return files


def _open(path: Path, name: str | None, left_out: list[str]) -> Mapping[str, RowFile]:
    if path.suffix == ".parquet":
        return _parquet(path, name)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path} ends with {path.suffix!r}: give files that end with {' or '.join(SUFFIXES)}; of a file of "
            "torch.save, write its state_dict with safetensors.torch.save_file first"
        )
    tables, others = _safetensors(path)
    left_out += others
    if name is None:
        return tables
    if len(tables) != 1:
        raise CheckpointError(
            f"{path} has tables {', '.join(tables) or '(none)'}: {name}= is for a file of one table, "
            "rename others with --rename OLD=NEW"
        )
    return {name: next(iter(tables.values()))}


def _refuse_twice(tables: Mapping[str, Sequence[RowFile]], more: Mapping[str, Sequence[RowFile]]) -> None:
    for name in more.keys() & tables.keys():
        raise CheckpointError(
            f"table {name!r} is given twice, in {tables[name][0].what} and in {more[name][0].what}: give it once, or "
            f"another name with NAME=PATH; all parquet files in a directory are one table with {name}=DIRECTORY"
        )


# Parquet: `id`, a list of floats for each vector, `state`


class ParquetRows:
    """A parquet file of a table, as `bagpipe checkpoint export --format parquet` writes it."""

    num_rows: int | None = None

    def __init__(self, path: Path) -> None:
        self.path, self.what = path, str(path)
        with _reading(path):
            schema = pq.read_schema(path)
            if twice := [name for name in schema.names if schema.names.count(name) > 1]:
                raise CheckpointError(f"{path} has more than one column {twice[0]!r}: give each another name")
            if "id" not in schema.names:
                raise CheckpointError(
                    f"{path} has columns {', '.join(schema.names)} and no 'id': name the column of row numbers so"
                )
            if not pa.types.is_integer(schema.field("id").type):
                raise CheckpointError(f"{path}: column 'id' is {schema.field('id').type}: give whole numbers")
            lengths = {name: self._length(schema.field(name)) for name in schema.names if name != "id"}
        self.state_width = lengths.pop("state", 0)
        if not lengths:
            raise CheckpointError(f"{path} has no column beside 'id' and 'state': give one with the vector of each row")
        self.layers, self.dims = tuple(lengths), tuple(lengths.values())
        self.table = (schema.metadata or {}).get(TABLE_KEY, path.stem.encode()).decode(errors="replace")
        """As an export has noted it, whose names of files can't be those of all tables; else that of the file."""

    def _length(self, column: pa.Field) -> int:
        """Floats of a column in each row."""
        kind, name = column.type, column.name
        is_fixed = pa.types.is_fixed_size_list(kind)
        if not (is_fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)) or kind.value_type not in (
            pa.float32(),
            pa.float16(),
        ):
            raise CheckpointError(
                f"{self.path}: column {name!r} is {kind}: give lists of float32, and no other columns than 'id', the "
                "vectors and 'state'"
            )
        if is_fixed:
            length = int(kind.list_size)
        else:
            first = next(pq.ParquetFile(self.path).iter_batches(1, columns=[name]), None)
            length = len(first.column(0)[0] or ()) if first is not None and first.num_rows else 0
        if not length:
            raise CheckpointError(f"{self.path}: column {name!r} has no numbers: leave it out, or give rows")
        return length

    def blocks(self, rows_per_block: int) -> Iterator[Block]:
        """All rows, some at a time."""
        with _reading(self.path):
            for batch in pq.ParquetFile(self.path).iter_batches(rows_per_block):
                column = batch.column("id")
                if column.null_count:
                    raise CheckpointError(f"{self.path}: column 'id' has missing values: give each row its number")
                ids = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
                parts = [
                    self._values(batch.column(name), name, dim)
                    for name, dim in zip(self.layers, self.dims, strict=True)
                ]
                state = self._values(batch.column("state"), "state", self.state_width) if self.state_width else None
                yield ids, np.concatenate(parts, 1), state

    def _values(self, column: pa.Array, name: str, length: int) -> Floats:
        numbers = column.flatten()
        if column.null_count or numbers.null_count:
            raise CheckpointError(f"{self.path}: column {name!r} has missing values: give every number")
        if not pa.types.is_fixed_size_list(column.type):
            lengths = column.value_lengths().to_numpy(zero_copy_only=False)
            if len(lengths) and not (lengths == length).all():
                raise CheckpointError(
                    f"{self.path}: column {name!r} has vectors of {lengths[lengths != length][0]} and of {length} "
                    "numbers: give all the same length"
                )
        values: Floats = numbers.to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
        return values.reshape(-1, length)


def _parquet(path: Path, name: str | None) -> dict[str, RowFile]:
    rows = ParquetRows(path)
    return {name or rows.table: rows}


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, SafetensorError, OSError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path} can't be read ({error}): give a whole {path.suffix[1:]} file") from error


# Safetensors: the weight of a table by TorchRec's name, or `NAME.ids`, `NAME.vectors` and `NAME.state`


class TensorRows:
    """The tensors of one table in a safetensors file; without ids the numbers of rows are ids."""

    dims: tuple[int, ...]
    layers: tuple[str, ...]

    def __init__(self, path: Path, table: str, layer: str, vectors: str, ids: str | None, state: str | None) -> None:
        self.path, self.what, self.layers = path, f"{path} (table {table!r})", (layer,)
        self._vectors, self._ids, self._state = vectors, ids, state
        with _reading(path), safe_open(path, "pt") as file:
            rows, dim = self._shape(file, vectors, _FLOATS)
            self.state_width = 0 if state is None else self._shape(file, state, _FLOATS, rows)[1]
            if ids is not None:
                found = file.get_slice(ids)
                if found.get_dtype() != "I64" or list(found.get_shape()) != [rows]:
                    raise CheckpointError(
                        f"{path}: {ids!r} is {found.get_dtype()} of shape {found.get_shape()}: give an int64 for each "
                        f"of the {rows} rows of {vectors!r}"
                    )
        self.dims, self._rows = (dim,), rows
        self.num_rows = None if ids is not None else rows

    def _shape(self, file: Any, name: str, kinds: Sequence[str], rows: int | None = None) -> tuple[int, int]:
        found = file.get_slice(name)
        shape = list(found.get_shape())
        if found.get_dtype() not in kinds or len(shape) != 2 or not shape[1] or rows not in (None, shape[0]):
            wanted = "rows and columns" if rows is None else f"{rows} rows"
            raise CheckpointError(
                f"{self.path}: {name!r} is {found.get_dtype()} of shape {shape}: give {wanted} of {', '.join(kinds)}"
            )
        return shape[0], shape[1]

    def blocks(self, rows_per_block: int) -> Iterator[Block]:
        """All rows, some at a time."""
        with _reading(self.path), safe_open(self.path, "pt") as file:
            vectors = file.get_slice(self._vectors)
            ids = None if self._ids is None else file.get_slice(self._ids)
            state = None if self._state is None else file.get_slice(self._state)
            for start in range(0, self._rows, rows_per_block):
                stop = min(start + rows_per_block, self._rows)
                keys = np.arange(start, stop) if ids is None else ids[start:stop].numpy()
                yield keys, _floats(vectors[start:stop]), None if state is None else _floats(state[start:stop])


def _floats(values: torch.Tensor) -> Floats:
    found: Floats = values.to(torch.float32).numpy()
    return found


def _safetensors(path: Path) -> tuple[dict[str, RowFile], list[str]]:
    with _reading(path), safe_open(path, "pt") as file:
        names = set(file.keys())
    tables: dict[str, RowFile] = {}
    used: set[str] = set()
    for name in sorted(names):
        weight, (table, _, kind) = _WEIGHT.fullmatch(name), name.rpartition(".")
        if weight is not None:
            found, tensors = weight[1], {"vectors": name}
        elif table and kind == "ids" and f"{table}.vectors" in names:
            found, tensors = table, {each: f"{table}.{each}" for each in _LISTED if f"{table}.{each}" in names}
        else:
            continue
        if found in tables:
            raise CheckpointError(f"{path} has table {found!r} twice, {name!r} is one: leave one out")
        layer = name.removesuffix(".weight") if weight is not None else found
        tables[found] = TensorRows(path, found, layer, tensors["vectors"], tensors.get("ids"), tensors.get("state"))
        used |= {*tensors.values()}
    return tables, sorted(names - used)


def _repeated(ids: Int64s, before: int, seen: IdMap) -> int:
    """An id of these that is there twice, or was among the first `before` that were seen."""
    positions = np.empty(len(ids), np.int64)
    seen.find(ids, positions)
    earlier = ids[positions < before]
    if len(earlier):
        return int(earlier[0])
    values, counts = np.unique(ids, return_counts=True)
    return int(values[counts > 1][0])
