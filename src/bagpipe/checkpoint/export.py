"""A trained model, or a checkpoint of one, as files that need no Bagpipe: plain PyTorch weights, or rows in parquet.

Both are tables of rows, which come as blocks of ids and values, and what a row begins with that is not among them: so
tables larger than memory are exported too. A file appears under its name only when it is complete, and an earlier one
of that name stays until then (I6).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, count
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import numpy as np
from torch import Tensor, nn

from bagpipe.arrays import Floats, Int64s
from bagpipe.checkpoint.manifest import InitialEntry, TableEntry
from bagpipe.checkpoint.point import Checkpoint
from bagpipe.checkpoint.tensors import ITEM_BYTES, Kind, encode_header
from bagpipe.checkpoint.tree import is_plain, octets, tensor_kind, unpack_tree
from bagpipe.embedding import CachedLayer
from bagpipe.errors import CheckpointError, ConfigError, ModelError, StoreError
from bagpipe.initial import Constant, Initial, Joined, Normal, Uniform
from bagpipe.os_errors import Kind as ErrorKind
from bagpipe.os_errors import failing
from bagpipe.trainer.loop import TrainLoop
from bagpipe.trainer.state import FIRST
from bagpipe.whole_file import nothing_left, whole_file

Format: TypeAlias = Literal["safetensors", "parquet"]

ROWS_PER_BLOCK = 65_536
TABLE_KEY = b"bagpipe.table"
"""In the metadata of a parquet file: the name of its table."""


@dataclass(frozen=True, slots=True)
class ExportedTable:
    """Rows of a table to export: vectors, then what the optimizer keeps of a row."""

    name: str
    layers: Mapping[str, int]
    """The vector that is the weight of each layer; a layer may have several names."""
    dims: Sequence[int]
    width: int
    num_rows: int
    """Of the plain weights."""
    read: Callable[[], Iterable[tuple[Int64s, Floats]]]
    initialise: Callable[[Int64s, Floats], None] | None
    """Writes the first vectors of rows; None: not known."""

    def blocks(self) -> Iterator[tuple[Int64s, Floats]]:
        """The rows that were ever trained, each once, as (ids, values)."""
        yield from self.read()


def export(model: nn.Module, path: str | Path, *, format: Format = "safetensors", state: bool = True) -> None:  # noqa: A002
    """Write the weights of a model, cached layers as plain `nn.EmbeddingBag` weights, to a safetensors file.

    With `format="parquet"` write the rows that were ever trained to one file a table, in a directory that is new or
    empty: column `id`, each vector by the name of its layer, then with `state` what the optimizer keeps of a row.

    Call it after training, or between iterations of the loop. Rows that were never touched have their initial value.
    With several trainers all call it, and the first one writes; after training that one may call it alone.
    """
    if format not in ("safetensors", "parquet"):
        raise ConfigError(f"format is {format!r}: give 'safetensors' or 'parquet'")
    layers = {name: part for name, part in model.named_modules(remove_duplicate=False) if isinstance(part, CachedLayer)}
    dense = _dense_of_model(model, layers) if format == "safetensors" else {}
    readers = [part.lookups.reader for part in layers.values()]
    if any(isinstance(reader, TrainLoop) and reader.rank for reader in readers):
        readers[0].flush()  # the first trainer has to wait for the rows of all
        return
    _write(Path(path), format, _tables_of_model(layers), dense, state, StoreError)


def export_checkpoint(
    checkpoint: Checkpoint,
    path: str | Path,
    *,
    format: Format = "safetensors",  # noqa: A002
    state: bool = True,
) -> list[Path]:
    """Write the model of a checkpoint as `export` would have written it; the files.

    Buffers that the model would leave out of its state_dict are there too: load with strict=False if it has such.
    """
    plain = format == "safetensors"
    dense = _dense_of_checkpoint(checkpoint) if plain else {}
    tables = [_table_of_checkpoint(checkpoint, table, plain) for table in checkpoint.manifest.tables]
    return _write(Path(path), format, tables, dense, state, CheckpointError)


def _dense_of_model(model: nn.Module, layers: Mapping[str, CachedLayer]) -> dict[str, Tensor]:
    """All of a model's state_dict but the weights of cached layers; ModelError if the model has no plain weights."""
    try:
        for layer in layers.values():
            layer.placeholders = True
        weights = set(map(_weight, layers))
        values = {name: value for name, value in model.state_dict().items() if name not in weights}
    finally:
        for layer in layers.values():
            layer.placeholders = False
    for name, value in values.items():
        if not isinstance(value, Tensor) or not (value.is_meta or is_plain(value)):
            kind = f"{value.dtype}, {value.layout}" if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(f"{name} is {kind}, which an export can't hold: convert it, or leave it out of the model")
        if value.is_meta:
            raise ModelError(f"{name} is on the meta device and has no values: give it some before exporting")
    for name, layer in layers.items():
        table = layer.lookups.layouts[layer.table].table
        if table.rows is None:
            raise ModelError(
                f"{_weight(name)} has a row for any 64-bit id of table {table.name!r}, so it has no plain weight: "
                "export it with format='parquet', or give the table a size with features=[...]"
            )
    return values


def _tables_of_model(layers: Mapping[str, CachedLayer]) -> list[ExportedTable]:
    groups: dict[tuple[int, int], dict[str, CachedLayer]] = {}
    for name, layer in layers.items():
        groups.setdefault((id(layer.lookups), layer.table), {})[name] = layer
    tables = []
    for (_, number), group in groups.items():
        first = next(iter(group.values()))
        layout, parts = first.lookups.layouts[number], {name: layer.part for name, layer in group.items()}
        read = partial(first.lookups.reader.touched_rows, number)
        name, num_rows = layout.table.name, first.num_embeddings
        tables.append(ExportedTable(name, parts, layout.dims, layout.width, num_rows, read, layout.initialise))
    return tables


def _dense_of_checkpoint(checkpoint: Checkpoint) -> dict[str, Tensor]:
    if FIRST not in checkpoint.blobs():
        return {}
    tree = unpack_tree(checkpoint.blob(FIRST))
    found: dict[str, Tensor] = {}
    for part in ("parameters", "buffers"):
        values = tree.get(part, {}) if isinstance(tree, dict) else None
        if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
            raise CheckpointError(f"{checkpoint.directory} has no {part} where they should be: use another checkpoint")
        found |= values
    aliases = checkpoint.manifest.aliases
    return found | {name: found[first] for name, first in aliases.items() if first in found}


def _table_of_checkpoint(checkpoint: Checkpoint, table: TableEntry, plain: bool) -> ExportedTable:
    if plain and len(table.layers) != len(table.dims):
        raise CheckpointError(
            f"{checkpoint.directory} does not say which layers table {table.name!r} belongs to: export it to parquet"
        )
    if plain and table.rows is None:
        raise CheckpointError(
            f"table {table.name!r} of {checkpoint.directory} has a row for any 64-bit id, so it has no plain weight: "
            "export it to parquet"
        )
    known = table.initial if plain else None
    initialise = None if known is None else Joined([initial_of(entry) for entry in known], table.dims).fill
    layers = {layer: part for part, layer in enumerate(table.layers)}
    parts = {_weight(layer): part for layer, part in layers.items()}
    for name, first in checkpoint.manifest.aliases.items():
        if first in parts:
            layers[name.removesuffix("weight").removesuffix(".")] = parts[first]
    read, num_rows = partial(checkpoint.rows, table.name), table.weight_rows or table.rows or 0
    return ExportedTable(table.name, layers, table.dims, table.width, num_rows, read, initialise)


def initial_of(entry: InitialEntry) -> Initial:
    """What computes the first values of a vector."""
    if entry.kind == "uniform":
        return Uniform(entry.seed, entry.table, entry.value, column=entry.column)
    if entry.kind == "normal":
        return Normal(entry.seed, entry.table, entry.value, column=entry.column)
    if entry.kind == "constant":
        return Constant(entry.value)
    raise CheckpointError(f"first values of the kind {entry.kind!r} are not known: use the Bagpipe that wrote them")


def _write(
    path: Path,
    form: Format,
    tables: Sequence[ExportedTable],
    dense: Mapping[str, Tensor],
    state: bool,
    error: ErrorKind,
) -> list[Path]:
    if form == "parquet":
        return _write_parquet(path, tables, state, error)
    with failing(error, "write", path), whole_file(path) as file:
        _write_weights(file, tables, dense)
    return [path]


def _write_weights(file: BinaryIO, tables: Sequence[ExportedTable], dense: Mapping[str, Tensor]) -> None:
    kinds = {
        _weight(layer): Kind("F32", (table.num_rows, table.dims[part]))
        for table in tables
        for layer, part in table.layers.items()
    } | {name: tensor_kind(value) for name, value in dense.items()}
    # The widest numbers first, so that all are aligned.
    kinds = dict(sorted(kinds.items(), key=lambda item: -ITEM_BYTES[item[1].dtype]))
    header = encode_header(kinds)
    *starts, end = accumulate((kind.num_bytes for kind in kinds.values()), initial=len(header))
    places = dict(zip(kinds, starts, strict=True))
    file.write(header)
    if end > len(header):  # a full disk is an error here, and would be the end of the process where rows are written
        os.posix_fallocate(file.fileno(), len(header), end - len(header))
    for table in tables:
        weights = []
        for layer, part in table.layers.items():
            name, column = _weight(layer), sum(table.dims[:part])
            weights.append((np.memmap(file.name, np.float32, "r+", places[name], kinds[name].shape), column))
        _write_rows(table, weights)
    for name, value in dense.items():
        file.seek(places[name])
        file.write(octets(value).numpy().data)


def _write_rows(table: ExportedTable, weights: Sequence[tuple[Floats, int]]) -> None:
    """First values, then the rows, into each weight from its column of them."""
    if table.initialise is not None:
        for start in range(0, table.num_rows, ROWS_PER_BLOCK):
            ids = np.arange(start, min(start + ROWS_PER_BLOCK, table.num_rows), dtype=np.int64)
            block = np.empty((len(ids), sum(table.dims)), np.float32)
            table.initialise(ids, block)
            for weight, column in weights:
                weight[start : start + len(ids)] = block[:, column : column + weight.shape[1]]
    num_rows = 0
    for ids, values in table.blocks():
        num_rows += len(ids)
        for weight, column in weights:
            weight[ids] = values[:, column : column + weight.shape[1]]
    if table.initialise is None and num_rows < table.num_rows:
        raise CheckpointError(
            f"{table.num_rows - num_rows:,} rows of table {table.name!r} were never trained, and the checkpoint can't "
            "tell what they begin with: go on from it with the model and call bagpipe.export, or export to parquet"
        )


def _weight(layer: str) -> str:
    return f"{layer}.weight" if layer else "weight"


def _write_parquet(directory: Path, tables: Sequence[ExportedTable], state: bool, error: ErrorKind) -> list[Path]:
    """One file a table; nothing if one of them fails."""
    names, files = _file_names([table.name for table in tables]), list[Path]()
    with nothing_left(directory), ExitStack() as undo:
        with failing(error, "make", directory):
            directory.mkdir(parents=True, exist_ok=True)
            if any(directory.iterdir()):
                raise error(f"{directory} is not empty: give a new directory")
        for name, table in zip(names, tables, strict=True):
            path = directory / f"{name}.parquet"
            with failing(error, "write", path), whole_file(path) as file:
                _write_table(file, table, _columns(table, state))
            files.append(path)
            undo.callback(path.unlink, missing_ok=True)
        undo.pop_all()
    return files


def _file_names(tables: Sequence[str]) -> list[str]:
    """What the files of tables are called: as the tables, where that can be the name of a file, else by number."""
    plain = {name for name in tables if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", name)}
    numbered = (name for name in map("table-{}".format, count()) if name not in plain)
    found: list[str] = []
    for name in tables:
        found.append(name if name in plain and name not in found else next(numbered))
    return found


def _columns(table: ExportedTable, state: bool) -> dict[str, slice]:
    """Name and place in the row of each column beside the id."""
    names: dict[int, str] = {}
    for layer, part in table.layers.items():
        names.setdefault(part, layer)
    if set(names) != set(range(len(table.dims))) or {"", "id", "state"} & set(names.values()):
        names = {part: f"vector_{part}" for part in range(len(table.dims))}
    ends = list(accumulate(table.dims))
    found = {names[part]: slice(end - table.dims[part], end) for part, end in enumerate(ends)}
    return found | ({"state": slice(ends[-1], table.width)} if state and table.width > ends[-1] else {})


def _write_table(file: BinaryIO, table: ExportedTable, columns: Mapping[str, slice]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {name: pa.list_(pa.float32(), part.stop - part.start) for name, part in columns.items()}
    schema = pa.schema({"id": pa.int64(), **kinds}, {TABLE_KEY: table.name.encode()})
    with pq.ParquetWriter(file, schema) as writer:
        for ids, values in table.blocks():
            flat = {name: pa.array(np.ascontiguousarray(values[:, part]).reshape(-1)) for name, part in columns.items()}
            lists = [pa.FixedSizeListArray.from_arrays(flat[name], type=kind) for name, kind in kinds.items()]
            writer.write_batch(pa.record_batch([pa.array(ids), *lists], schema=schema))
