"""Nested dicts, lists and tuples of tensors, arrays and plain values as the bytes of a safetensors file, and back.

What comes back is equal to the last bit, NaNs and the order of keys included. Nothing is ever unpickled: bytes from
anyone give a tree or a CheckpointError (I8).
"""

from __future__ import annotations

import json
import struct
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from bagpipe.checkpoint.tensors import ITEM_BYTES, Kind, Placed, decode, encode_header
from bagpipe.errors import CheckpointError

VERSION = "1"
_DEPTH_MAX = 100
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ARRAY_TYPES = {
    "f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8", "u8": "U64", "u4": "U32",
    "u2": "U16", "u1": "U8", "b1": "BOOL",
}  # fmt: skip
_TORCH_OF = {code: dtype for dtype, code in DTYPES.items()}
_NUMPY_OF = {code: np.dtype(f"<{kind}") for kind, code in _ARRAY_TYPES.items()}
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}


def pack_tree(tree: Any) -> bytes:
    """The bytes of a tree; CheckpointError names what in it can't be kept. Tensors of any device are copied."""
    packer = _Packer()
    structure = json.dumps(packer.describe(tree, "the tree", 0), separators=(",", ":"))
    # The widest numbers first, so that all are aligned; the structure knows them by name.
    order = sorted(packer.tensors.items(), key=lambda item: -ITEM_BYTES[item[1][0].dtype])
    header = encode_header({name: kind for name, (kind, _) in order}, {"version": VERSION, "tree": structure})
    return b"".join((header, *(data for _, (_, data) in order)))


def unpack_tree(blob: bytes | bytearray | memoryview) -> Any:
    """The tree in these bytes; its tensors are on the CPU, and its own."""
    tensors, metadata = decode("a tree", memoryview(blob).cast("B"))
    if metadata.get("version") != VERSION or "tree" not in metadata:
        raise CheckpointError(
            f"a tree of version {metadata.get('version')!r}, this Bagpipe reads {VERSION!r}: use the one that wrote it"
        )
    try:
        return _build(json.loads(metadata["tree"]), tensors, 0)
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError, struct.error) as error:
        raise CheckpointError(f"a tree whose structure is damaged ({error}): use another checkpoint") from error


def tensor_kind(tensor: torch.Tensor) -> Kind:
    """Type and shape of a tensor as a file tells them."""
    return Kind(DTYPES[tensor.dtype], tuple(tensor.shape))


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """A copy of its numbers, row by row."""
    data: bytes = octets(tensor).numpy().tobytes()
    return data


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers as octets, row by row; they may share its memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel() < 2:  # torch calls any strides contiguous then, but does not view them as octets
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


class _Packer:
    """Turns a tree into JSON, and puts numbers by the thousand aside."""

    def __init__(self) -> None:
        self.tensors: dict[str, tuple[Kind, bytes]] = {}

    def describe(self, value: Any, where: str, depth: int) -> Any:
        """A value as JSON; `where` names it in errors."""
        if depth > _DEPTH_MAX:
            raise CheckpointError(f"{where} is nested more than {_DEPTH_MAX} deep: flatten it")
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
        if kind is float:
            return {"float": struct.pack("<d", value).hex()}
        if kind.__name__ in _MAPPINGS and kind is _MAPPINGS[kind.__name__]:
            return {kind.__name__: [self._pair(key, part, where, depth) for key, part in value.items()]}
        if kind in (list, tuple, set, torch.Size):
            name = "tuple" if kind is torch.Size else kind.__name__
            parts = enumerate(value)
            return {name: [self.describe(part, f"{where}[{number}]", depth + 1) for number, part in parts]}
        return self._put(value, where)

    def _pair(self, key: Any, value: Any, where: str, depth: int) -> list[Any]:
        if not isinstance(key, str | int | float | tuple | bytes | None):
            raise _refusal(f"the key {key!r} of {where}", key)
        named = self.describe(key, f"the key {key!r} of {where}", depth + 1)
        return [named, self.describe(value, f"{where}[{key!r}]", depth + 1)]

    def _put(self, value: Any, where: str) -> dict[str, str]:
        """Bytes and numbers in arrays."""
        if type(value) is bytes or type(value) is bytearray:
            return self._add("bytes", Kind("U8", (len(value),)), bytes(value))
        if isinstance(value, torch.Tensor):
            if value.layout is not torch.strided or value.dtype not in DTYPES or value.is_meta:
                raise _refusal(where, f"a {value.layout} tensor of {value.dtype} on {value.device}")
            return self._add("tensor", tensor_kind(value), tensor_bytes(value))
        if isinstance(value, np.ndarray | np.generic):
            code = _ARRAY_TYPES.get(value.dtype.str[1:]) if value.dtype.str[0] in "<|" else None
            if code is None:
                raise _refusal(where, f"an array of {value.dtype}")
            name = "array" if isinstance(value, np.ndarray) else "scalar"
            return self._add(name, Kind(code, value.shape), np.ascontiguousarray(value).tobytes())
        raise _refusal(where, value)

    def _add(self, label: str, kind: Kind, data: bytes) -> dict[str, str]:
        name = str(len(self.tensors))
        self.tensors[name] = (kind, data)
        return {label: name}


def _refusal(where: str, value: object) -> CheckpointError:
    what = value if isinstance(value, str) else f"a {type(value).__module__}.{type(value).__qualname__}"
    return CheckpointError(
        f"{where} is {what}, which a checkpoint can't hold: keep numbers, texts, tensors and arrays in dicts and lists"
    )


def _build(node: Any, tensors: dict[str, Placed], depth: int) -> Any:
    if depth > _DEPTH_MAX:
        raise ValueError(f"it is nested more than {_DEPTH_MAX} deep")
    if node is None or isinstance(node, bool | str | int):
        return node
    if not isinstance(node, dict) or len(node) != 1:
        raise ValueError(f"{str(node)[:80]!r} is no node")
    ((label, value),) = node.items()
    if label in _MAPPINGS:
        pairs = [(_build(key, tensors, depth + 1), _build(part, tensors, depth + 1)) for key, part in value]
        return _MAPPINGS[label](_distinct(pairs))
    if label in _SEQUENCES:
        return _SEQUENCES[label]([_build(part, tensors, depth + 1) for part in value])
    if label == "int":
        return int(value, 16)
    if label == "float":
        return struct.unpack("<d", bytes.fromhex(value))[0]
    return _number(label, tensors[value])


def _distinct(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice")
    return found


def _number(label: str, placed: Placed) -> Any:
    (dtype, shape), data = placed
    if label == "bytes":
        return bytes(data)
    if label == "tensor":
        tensor = torch.empty(shape, dtype=_TORCH_OF[dtype])  # by torch: where memory begins can change later bits
        if tensor.numel():
            tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
        return tensor
    array = np.frombuffer(data, _NUMPY_OF[dtype]).reshape(shape).copy()
    if label == "array":
        return array
    if label == "scalar" and not shape:
        return array[()]
    raise ValueError(f"{label!r} is no kind of node")
