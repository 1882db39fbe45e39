"""Nested dicts, lists and tuples of tensors, arrays and plain values as the bytes of a safetensors file, and back.

Tensors are named by their place in the tree, such as `parameters.top.0.weight`, so the library shows what a file has.
What comes back is equal to the last bit, NaNs and the order of keys included. Nothing is ever unpickled: bytes from
anyone give a tree or a CheckpointError (I8).
"""

from __future__ import annotations

import json
import struct
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagpipe.checkpoint.disk import Bytes
from bagpipe.checkpoint.tensors import ITEM_BYTES, Kind, Placed, decode, encode_header
from bagpipe.errors import CheckpointError

VERSION = "2"
_DEPTH_MAX = 100
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32",
    torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_TORCH_OF = {code: dtype for dtype, code in DTYPES.items()}
_NUMPY_OF = {
    code: np.dtype(f"<{'b' if code == 'BOOL' else code[0].lower()}{size}")
    for code, size in ITEM_BYTES.items() if code != "BF16"
}  # fmt: skip
_ARRAY_CODES = {dtype: code for code, dtype in _NUMPY_OF.items()}
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}


def tree_parts(tree: Any) -> list[Bytes]:
    """The bytes of a tree, one part after the other; CheckpointError names what in it can't be kept.

    Numbers on the CPU are not copied: the tree must stay as it is until the parts were written.
    """
    tensors: dict[str, tuple[Kind, Bytes]] = {}
    structure = json.dumps(_describe(tree, (), tensors), separators=(",", ":"))
    # The widest numbers first, so that all are aligned; the structure knows them by name.
    order = sorted(tensors.items(), key=lambda item: -ITEM_BYTES[item[1][0].dtype])
    header = encode_header({name: kind for name, (kind, _) in order}, {"version": VERSION, "tree": structure})
    return [header, *(data for _, (_, data) in order if len(data))]


def _describe(value: Any, path: tuple[Any, ...], tensors: dict[str, tuple[Kind, Bytes]]) -> Any:
    """A value as JSON, with what has numbers by the thousand put aside; `path` has the keys that lead to it."""
    if len(path) > _DEPTH_MAX:
        raise CheckpointError(f"{_shown(path)} is nested more than {_DEPTH_MAX} deep: flatten it")
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**63 else {"int": hex(value)}
    if kind is float:
        return {"float": struct.pack("<d", value).hex()}
    if kind in _MAPPINGS.values():
        for key in value:
            if not isinstance(key, str | int | float | tuple | bytes | None):
                raise _refusal(f"the key {key!r} of {_shown(path)}", key)
        pairs = [[_describe(part, (*path, pair[0]), tensors) for part in pair] for pair in value.items()]
        return {kind.__name__: pairs}
    if kind in (list, tuple, set, torch.Size):
        parts = [_describe(part, (*path, number), tensors) for number, part in enumerate(value)]
        return {"tuple" if kind is torch.Size else kind.__name__: parts}
    label, placed = _numbers(value, path)
    # Names are UTF-8 and differ, which keys need not: "a.b" is a key, and the place of "b" in "a".
    name = ".".join(map(str, path)).encode(errors="replace").decode() or "tree"
    if name in tensors or name == "__metadata__":
        name = f"{name}#{len(tensors)}"
        while name in tensors:
            name += "#"
    tensors[name] = placed
    return {label: name}


def _numbers(value: Any, path: tuple[Any, ...]) -> tuple[str, tuple[Kind, Bytes]]:
    """Bytes and numbers in arrays: what they are, and how a file has them."""
    if type(value) is bytes or type(value) is bytearray:
        return "bytes", (Kind("U8", (len(value),)), value)
    if isinstance(value, Tensor):
        if not is_plain(value):
            raise _refusal(_shown(path), f"a {value.layout} tensor of {value.dtype} on {value.device}")
        return "tensor", (tensor_kind(value), octets(value).numpy().data)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype not in _ARRAY_CODES:
            raise _refusal(_shown(path), f"an array of {value.dtype}")
        label = "array" if isinstance(value, np.ndarray) else "scalar"
        data = np.ascontiguousarray(value).reshape(-1).view(np.uint8).data
        return label, (Kind(_ARRAY_CODES[value.dtype], value.shape), data)
    raise _refusal(_shown(path), value)


def _shown(path: tuple[Any, ...]) -> str:
    return "the tree" + "".join(f"[{key!r}]" for key in path)


def _refusal(where: str, value: object) -> CheckpointError:
    what = value if isinstance(value, str) else f"a {type(value).__module__}.{type(value).__qualname__}"
    return CheckpointError(
        f"{where} is {what}, which a checkpoint can't hold: keep numbers, texts, tensors and arrays in dicts and lists"
    )


def is_plain(tensor: Tensor) -> bool:
    """Whether a file can hold it."""
    return tensor.layout is torch.strided and tensor.dtype in DTYPES and not tensor.is_meta


def tensor_kind(tensor: Tensor) -> Kind:
    """Type and shape of a tensor as a file tells them."""
    return Kind(DTYPES[tensor.dtype], tuple(tensor.shape))


def octets(tensor: Tensor) -> Tensor:
    """Its numbers as octets, row by row; they may share its memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if flat.numel() < 2:  # torch calls any strides contiguous then, but does not view them as octets
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def unpack_tree(blob: bytes) -> Any:
    """The tree in these bytes; its tensors are on the CPU, and its own."""
    tensors, metadata = decode("a tree", blob)
    if metadata.get("version") != VERSION or "tree" not in metadata:
        raise CheckpointError(
            f"a tree of version {metadata.get('version')!r}, this Bagpipe reads {VERSION!r}: use the one that wrote it"
        )
    try:
        return _build(json.loads(metadata["tree"]), tensors, 0)
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError, struct.error) as error:
        raise CheckpointError(f"a tree whose structure is damaged ({error}): use another checkpoint") from error


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
        if len(dict(pairs)) < len(pairs):
            raise ValueError("a key comes twice")
        return _MAPPINGS[label](dict(pairs))
    if label in _SEQUENCES:
        return _SEQUENCES[label]([_build(part, tensors, depth + 1) for part in value])
    if label == "int":
        return int(value, 16)
    if label == "float":
        return struct.unpack("<d", bytes.fromhex(value))[0]
    return _number(label, *tensors.pop(value))  # each is of one place, and what was copied out of it need not stay


def _number(label: str, kind: Kind, data: bytearray) -> Any:
    if label == "bytes":
        return bytes(data)
    if label == "tensor":
        # Allocated by torch: where memory begins can change later bits.
        tensor = torch.empty(kind.shape, dtype=_TORCH_OF[kind.dtype])
        if tensor.numel():
            tensor.reshape(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
        return tensor
    if label == "array" or (label == "scalar" and not kind.shape):
        array = np.frombuffer(data, _NUMPY_OF[kind.dtype]).reshape(kind.shape).copy()
        return array if label == "array" else array[()]
    raise ValueError(f"{label!r} is no kind of node")
