"""Checkpoints to what others read, and what others have written to rows: plain PyTorch weights, parquet, TorchRec.

Files are read and written some rows at a time, so tables larger than memory pass; one that is written is complete or
not there (I6), and one that is read is never unpickled.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from bagpipe.arrays import Floats
from bagpipe.checkpoint.manifest import InitialEntry, TableEntry
from bagpipe.checkpoint.reading import Checkpoint
from bagpipe.checkpoint.tensors import ITEM_BYTES, Kind, encode_header
from bagpipe.checkpoint.tree import octets, tensor_kind, unpack_tree
from bagpipe.errors import CheckpointError
from bagpipe.initial import Constant, Initial, Normal, Uniform
from bagpipe.os_errors import failing
from bagpipe.whole_file import whole_file

ROWS_PER_BLOCK = 65_536
FIRST_TRAINER = "trainer-0"
"""Under this name a checkpoint has the dense part of the model: `parameters` and `buffers`, by name."""


def export_weights(checkpoint: Checkpoint, path: str | Path) -> None:
    """Write a checkpoint's model as plain PyTorch weights, embedding layers included, to a safetensors file.

    Rows that were never trained have their first value. Buffers that the model would leave out of its state_dict are
    there too: load with strict=False if it has such. The file is the same as that of `bagpipe.export` otherwise.
    """
    path = Path(path)
    weights = {
        f"{layer}.weight" if layer else "weight": (table, part)
        for table in checkpoint.manifest.tables
        for part, layer in enumerate(_layers(checkpoint, table))
    }
    dense = sorted(_dense(checkpoint).items(), key=lambda item: -item[1].element_size())  # so that all are aligned
    kinds = {name: Kind("F32", (_rows(checkpoint, table), table.dims[part])) for name, (table, part) in weights.items()}
    header = encode_header({**kinds, **{name: tensor_kind(value) for name, value in dense}})
    with failing(CheckpointError, "writing", path), whole_file(path) as file:
        file.write(header)
        num_bytes = sum(kind.num_bytes for kind in kinds.values())
        if num_bytes:  # a full disk is an error here, and would be the end of the process below
            os.posix_fallocate(file.fileno(), len(header), num_bytes)
        start = len(header)
        for table in checkpoint.manifest.tables:
            start = _write_table(checkpoint, table, file.name, start)
        file.seek(start)
        for _, value in dense:
            file.write(octets(value).numpy().data)


def export_parquet(checkpoint: Checkpoint, directory: str | Path, *, state: bool = True) -> list[Path]:
    """Write the rows that were ever trained to one parquet file a table, in a directory that is new or empty.

    Columns: `id`, then each vector by the name of its layer, then with `state` what the optimizer keeps of a row.
    """
    directory = Path(directory)
    is_new = not directory.exists()
    with failing(CheckpointError, "making", directory):
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise CheckpointError(f"{directory} is not empty: give a new directory")
    files: list[Path] = []
    try:
        _write_tables(checkpoint, directory, state, files)
    except BaseException:
        for path in files:
            path.unlink(missing_ok=True)
        if is_new:
            directory.rmdir()
        raise
    return files


def _write_tables(checkpoint: Checkpoint, directory: Path, state: bool, files: list[Path]) -> None:
    for number, table in enumerate(checkpoint.manifest.tables):
        plain = re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}", table.name)
        path = directory / f"{table.name if plain else f'table-{number}'}.parquet"
        columns = _columns(table, state)
        schema = pa.schema([pa.field("id", pa.int64())] + [pa.field(name, kind) for name, kind, _ in columns])
        with (
            failing(CheckpointError, "writing", path),
            whole_file(path) as file,
            pq.ParquetWriter(file, schema) as writer,
        ):
            for ids, values in checkpoint.rows(table.name):
                arrays = [pa.array(ids), *(_array(values[:, where], kind) for _, kind, where in columns)]
                writer.write_batch(pa.record_batch(arrays, schema=schema))
        files.append(path)


def initial_of(entry: InitialEntry) -> Initial:
    """What computes the first values of a vector."""
    if entry.kind == "uniform":
        return Uniform(entry.seed, entry.table, entry.value, column=entry.column)
    if entry.kind == "normal":
        return Normal(entry.seed, entry.table, entry.value, column=entry.column)
    if entry.kind == "constant":
        return Constant(entry.value)
    raise CheckpointError(f"first values of the kind {entry.kind!r} are not known: use the Bagpipe that wrote them")


def _layers(checkpoint: Checkpoint, table: TableEntry) -> tuple[str, ...]:
    if len(table.layers) != len(table.dims):
        raise CheckpointError(
            f"{checkpoint.directory} does not say which layers table {table.name!r} belongs to: export it to parquet"
        )
    return table.layers


def _rows(checkpoint: Checkpoint, table: TableEntry) -> int:
    if table.rows is None:
        raise CheckpointError(
            f"table {table.name!r} of {checkpoint.directory} has a row for any 64-bit id, so it has no plain weight: "
            "export it to parquet"
        )
    return table.rows


def _dense(checkpoint: Checkpoint) -> dict[str, Tensor]:
    if FIRST_TRAINER not in checkpoint.blobs():
        return {}
    tree = unpack_tree(checkpoint.blob(FIRST_TRAINER))
    found: dict[str, Tensor] = {}
    for part in ("parameters", "buffers"):
        values = tree.get(part, {}) if isinstance(tree, dict) else None
        if not isinstance(values, dict) or not all(isinstance(value, Tensor) for value in values.values()):
            raise CheckpointError(f"{checkpoint.directory} has no {part} where they should be: use another checkpoint")
        found |= values
    return found


def _write_table(checkpoint: Checkpoint, table: TableEntry, file: str, start: int) -> int:
    """Fill in the weights of a table's layers, one after the other from `start` on; where they end."""
    rows, weights, columns = _rows(checkpoint, table), [], []
    for part, dim in enumerate(table.dims):
        weights.append(np.memmap(file, np.float32, "r+", start, (rows, dim)))
        columns.append(sum(table.dims[:part]))
        start += rows * dim * ITEM_BYTES["F32"]
    seen = None if table.initial is not None else np.zeros(rows, np.bool_)
    _fill(table, weights)
    for ids, values in checkpoint.rows(table.name):
        if seen is not None:
            seen[ids] = True
        for weight, column in zip(weights, columns, strict=True):
            weight[ids] = values[:, column : column + weight.shape[1]]
    if seen is not None and not seen.all():
        raise CheckpointError(
            f"{int(rows - seen.sum()):,} rows of table {table.name!r} were never trained, and {checkpoint.directory} "
            "can't tell what they begin with: go on from it with the model and call bagpipe.export, or export to "
            "parquet"
        )
    return start


def _fill(table: TableEntry, weights: Sequence[Floats]) -> None:
    """Write first values, where they are known."""
    rows = len(weights[0])
    for weight, entry in zip(weights, table.initial or (), strict=table.initial is not None):
        initial = initial_of(entry)
        for start in range(0, rows, ROWS_PER_BLOCK):
            ids = np.arange(start, min(start + ROWS_PER_BLOCK, rows), dtype=np.int64)
            block = np.empty((len(ids), weight.shape[1]), np.float32)
            initial.fill(ids, block)
            weight[start : start + len(ids)] = block


def _columns(table: TableEntry, state: bool) -> list[tuple[str, pa.DataType, slice]]:
    """Name, type and place in the row of each column beside the id."""
    names = table.layers or tuple(f"vector_{part}" for part in range(len(table.dims)))
    if len({*names, "id", "state"}) < len(names) + 2:
        names = tuple(f"vector_{part}" for part in range(len(table.dims)))
    found, start = [], 0
    for name, dim in zip(names, table.dims, strict=True):
        found.append((name, pa.list_(pa.float32(), dim), slice(start, start + dim)))
        start += dim
    if state and table.width > start:
        found.append(("state", pa.list_(pa.float32(), table.width - start), slice(start, table.width)))
    return found


def _array(values: Floats, kind: pa.DataType) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(values).reshape(-1)), type=kind)
