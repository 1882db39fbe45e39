"""`bagpipe.export`: the trained model as plain PyTorch weights, for serving without Bagpipe.

The file is safetensors, written row block by row block, so that tables larger than memory can be exported too. It
appears under its name only when it is complete, and an earlier file of that name stays until then (I6).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bagpipe.checkpoint.tensors import encode_header
from bagpipe.checkpoint.tree import DTYPES, octets, tensor_kind
from bagpipe.embedding import CachedLayer
from bagpipe.errors import ModelError, StoreError
from bagpipe.trainer.batches import Batches
from bagpipe.whole_file import whole_file


def export(model: nn.Module, path: str | Path) -> None:
    """Write the weights of a model, cached layers as plain `nn.EmbeddingBag` weights, to a safetensors file.

    Call it after training, or between iterations of the loop. Rows that were never touched have their initial value.
    With several trainers all call it, and the first one writes; after training that one may call it alone.
    """
    path = Path(path)
    layers = {f"{name}.weight" if name else "weight": part for name, part in _cached(model)}
    values = _state(model, layers)
    for name, value in values.items():
        if not isinstance(value, Tensor) or value.dtype not in DTYPES:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(f"{name} is {kind}, which an export can't hold: convert it, or leave it out of the model")
        if value.is_meta and name not in layers:
            raise ModelError(f"{name} is on the meta device and has no values: give it some before exporting")
    for name, layer in layers.items():
        table = layer.lookups.layouts[layer.table].table
        if table.rows is None:
            raise ModelError(
                f"{name} has a row for any 64-bit id of table {table.name!r}, so it has no plain weight: give the "
                "table a size with tables=[...], or keep its rows with store='a/directory'"
            )
    if others := [part.lookups.reader for part in layers.values() if _rank(part)]:
        others[0].barrier()  # the first trainer has to wait for the rows of all
        return
    try:
        _write(path, values, layers)
    except OSError as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"can't write {path}: {error.strerror or error}: check the path and the free space") from error


def _cached(model: nn.Module) -> Iterator[tuple[str, CachedLayer]]:
    return ((name, part) for name, part in model.named_modules() if isinstance(part, CachedLayer))


def _rank(layer: CachedLayer) -> int:
    """Of the trainer that the layer belongs to."""
    reader = layer.lookups.reader
    return reader.rank if isinstance(reader, Batches) else 0


def _state(model: nn.Module, layers: Mapping[str, CachedLayer]) -> dict[str, Any]:
    """The model's state_dict, with tensors on the meta device for the weights of cached layers."""
    try:
        for layer in layers.values():
            layer.placeholders = True
        return dict(model.state_dict())
    finally:
        for layer in layers.values():
            layer.placeholders = False


def _write(path: Path, values: Mapping[str, Tensor], layers: Mapping[str, CachedLayer]) -> None:
    with whole_file(path) as file:
        file.write(encode_header({name: tensor_kind(value) for name, value in values.items()}))
        for key, value in values.items():
            for block in layers[key].blocks() if key in layers else [value]:
                file.write(_bytes(block))


def _bytes(value: Tensor) -> memoryview:
    return octets(value).numpy().data
