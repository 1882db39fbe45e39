"""`bagpipe.export`: the trained model as plain PyTorch weights, for serving without Bagpipe.

The file is safetensors, written row block by row block, so that tables larger than memory can be exported too. It
appears under its name only when it is complete (I6).
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bagpipe.embedding import CachedLayer
from bagpipe.errors import ModelError, StoreError

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def export(model: nn.Module, path: str | Path) -> None:
    """Write the weights of a model, cached layers as plain `nn.EmbeddingBag` weights, to a safetensors file.

    Call it after training, or between iterations of the loop. Rows that were never touched have their initial value.
    """
    path = Path(path)
    layers = {name: part for name, part in model.named_modules() if isinstance(part, CachedLayer)}
    dense = dict(_dense(model))
    shapes: dict[str, tuple[str, list[int], int]] = {}
    for name, value in dense.items():
        shapes[name] = DTYPES[value.dtype], list(value.shape), value.numel() * value.element_size()
    for name, layer in layers.items():
        size = layer.num_embeddings * layer.embedding_dim * 4
        shapes[f"{name}.weight"] = "F32", [layer.num_embeddings, layer.embedding_dim], size
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("xb") as file:
            file.write(_header(shapes))
            for value in dense.values():
                file.write(_bytes(value))
            for layer in layers.values():
                for _, block in layer.blocks():
                    file.write(_bytes(block))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StoreError(f"can't write {path}: {error.strerror or error}: check the path and the free space") from error


def _dense(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What a state_dict holds besides the weights of cached layers."""
    persistent = (
        (f"{prefix}.{name}" if prefix else name, value)
        for prefix, part in model.named_modules()
        for name, value in [*part._parameters.items(), *part._buffers.items()]
        if value is not None and name not in part._non_persistent_buffers_set
    )
    for name, value in persistent:
        if value.dtype not in DTYPES:
            raise ModelError(f"{name} is {value.dtype}, which safetensors can't hold: convert it")
        yield name, value.detach()


def _header(shapes: dict[str, tuple[str, list[int], int]]) -> bytes:
    start = 0
    header: dict[str, Any] = {}
    for name, (dtype, shape, size) in shapes.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _bytes(value: Tensor) -> bytes:
    return value.cpu().contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else _bytes(value.reshape(1))
