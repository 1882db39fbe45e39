"""Batches of any shape as one buffer, and back: containers and plain values described, numbers raw, nothing pickled.

The buffer has the length of the description (4 bytes, little-endian), the description as MessagePack, then the bytes of
all tensors and arrays, end to end. The description lists what a batch holds, outermost first. Objects of a user's own
types, and KeyedJaggedTensors, travel as the name of their type and their parts, and are put together from an object of
that type that the receiver has itself: types never come from the wire. Whatever the bytes, what comes out is made of
types that were expected, and took no more memory than was received (I8).
"""

from __future__ import annotations

import copy
import math
import re
import struct
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from bagpipe.adapt import INTEGERS, Path, described, is_keyed, is_pair, nothing, parts_of, set_attributes
from bagpipe.errors import BatchError, WireError
from bagpipe.types import Ids
from bagpipe.wire.tree_messages import (
    Again,
    ArrayNode,
    Bytes,
    Entries,
    Fields,
    Items,
    Keyed,
    LeftOut,
    Node,
    Nodes,
    Plain,
    TensorNode,
)

DEPTH_MAX = 64
_ELEMENTS_MAX = 1 << 40
"""Of a tensor without elements, were each of its empty dimensions 1."""
_LENGTH = struct.Struct("<I")
_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
        torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64,
    )
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ARRAY = re.compile(r"[<>|][biufcSUMm][0-9]{1,6}(\[[0-9]{0,6}[A-Za-z]{1,2}\])?")

_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Nodes, strict=True)

Types = Mapping[str, Any]
"""An object of each type that may occur besides plain ones, by the name of the type."""


def types_in(example: Any) -> dict[str, Any]:
    """The types of a batch that can't be made from plain values, each with an object of it."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    waiting = [example]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or _is_plain(value):
            continue
        seen.add(id(value))
        if type(value) not in (dict, list, tuple) and not isinstance(value, Tensor | np.ndarray | np.generic):
            found.setdefault(_name(value), value)
        if not is_keyed(value):
            waiting += [part for _, part in parts_of(value)]
    return found


def pack_trees(batches: list[Any], left_out: Collection[Path], types: Types, number: int = 0) -> memoryview:
    """Batches as one buffer; the ids at the paths `left_out` (of each batch) are left out.

    BatchError if something can't travel; `number` is that of the first batch, for messages.
    """
    packer = _Packer(frozenset(left_out), types)
    packer.nodes.append(Items(len(batches), is_tuple=False))
    for position, batch in enumerate(batches):
        packer.number = number + position
        packer.add(batch, (), 0)
    description = _ENCODER.encode(packer.nodes)
    return memoryview(b"".join([_LENGTH.pack(len(description)), description, *packer.bytes]))


def unpack_trees(buffer: memoryview, types: Types) -> list[Any]:
    """The batches in a buffer; WireError if they can't be."""
    if buffer.nbytes < _LENGTH.size:
        raise WireError(f"batches in {buffer.nbytes} bytes: they have at least {_LENGTH.size}")
    (length,) = _LENGTH.unpack_from(buffer)
    if length > buffer.nbytes - _LENGTH.size:
        raise WireError(f"batches with a description of {length} bytes in {buffer.nbytes}")
    start = _LENGTH.size + length
    try:
        nodes = _DECODER.decode(buffer[_LENGTH.size : start])
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
        raise WireError(f"the description of batches is none: {error}") from error
    unpacker = _Unpacker(nodes, buffer[start:], types)
    batches = unpacker.take(0)
    unpacker.finish()
    if type(batches) is not list:
        raise WireError(f"a {type(batches).__name__} came where a list of batches was due")
    return batches


class _Packer:
    """Collects the nodes and the bytes of batches."""

    def __init__(self, left_out: frozenset[Path], types: Types) -> None:
        self.nodes: list[Node] = []
        self.bytes: list[Any] = []
        self.number = 0
        self._left_out, self._types = left_out, types
        self._objects: dict[int, int] = {}

    def add(self, value: Any, path: Path, depth: int) -> None:
        """Describe a value and all that is in it."""
        if depth > DEPTH_MAX:
            raise self._refusal(path, f"is nested {DEPTH_MAX} times")
        if isinstance(value, Tensor):
            self._add_tensor(value, path, path in self._left_out)
        elif isinstance(value, np.ndarray | np.generic):
            self._add_array(value, path)
        elif _is_plain(value):
            self._add_plain(value, path)
        elif is_keyed(value):
            self._add_keyed(value, path)
        elif type(value) in (list, tuple):
            self.nodes.append(Items(len(value), type(value) is tuple))
            left_out = path in self._left_out and is_pair(value)
            for position, part in enumerate(value):
                if left_out and position == 0:
                    self._add_tensor(part, path, left_out=True)
                else:
                    self.add(part, (*path, str(position)), depth + 1)
        elif isinstance(value, Mapping):
            self._add_entries(value, path, depth)
        else:
            self._add_object(value, path, depth)

    def _add_tensor(self, value: Tensor, path: Path, left_out: bool) -> None:
        if left_out:
            self.nodes.append(LeftOut(_NAMES[value.dtype], list(value.shape)))
            return
        if value.dtype not in _NAMES or value.layout != torch.strided or not value.is_cpu:
            raise self._refusal(path, f"is {described(value)}, and only plain tensors of numbers on the CPU travel")
        self.nodes.append(TensorNode(_NAMES[value.dtype], list(value.shape)))
        if value.numel():  # strides of one without elements can be anything
            self.bytes.append(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _add_array(self, value: Any, path: Path) -> None:
        array = np.asarray(value)
        if not _ARRAY.fullmatch(array.dtype.str):
            raise self._refusal(path, f"is {described(array)}, and only arrays of numbers, times and texts travel")
        self.nodes.append(ArrayNode(array.dtype.str, list(array.shape), isinstance(value, np.generic)))
        self.bytes.append(array.tobytes())

    def _add_plain(self, value: Any, path: Path) -> None:
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            raise self._refusal(path, f"is {value}, and numbers travel with 64 bits")
        self.nodes.append(Bytes(value) if isinstance(value, bytes) else Plain(value))

    def _add_entries(self, value: Mapping[Any, Any], path: Path, depth: int) -> None:
        for key in value:
            if type(key) not in (int, str):
                raise self._refusal(path, f"has the key {key!r}, and keys that travel are texts or numbers")
        self.nodes.append(Entries(list(value), None if type(value) is dict else self._type(value, path)))
        for key, part in value.items():
            self.add(part, (*path, str(key)), depth + 1)

    def _add_object(self, value: Any, path: Path, depth: int) -> None:
        if id(value) in self._objects:
            self.nodes.append(Again(self._objects[id(value)]))
            return
        parts = dict(parts_of(value))
        if not parts or (not isinstance(value, tuple) and copy.copy(value) is value):
            raise self._refusal(path, f"is {described(value)}")
        if not isinstance(value, tuple):
            self._objects[id(value)] = len(self._objects)
        self.nodes.append(Fields(self._type(value, path), list(parts)))
        for name, part in parts.items():
            if isinstance(value, Ids) and name == "values" and path in self._left_out:
                self._add_tensor(part, path, left_out=True)
            else:
                self.add(part, (*path, name), depth + 1)

    def _add_keyed(self, value: Any, path: Path) -> None:
        weights = getattr(value, "weights_or_none", lambda: None)()
        keys = list(value.keys())
        self.nodes.append(Keyed(self._type(value, path), keys, weights is not None))
        self._add_tensor(value.lengths(), path, left_out=False)
        if weights is not None:
            self._add_tensor(weights, path, left_out=False)
        for key in keys:
            self._add_tensor(value[key].values(), path, (*path, key) in self._left_out)

    def _type(self, value: Any, path: Path) -> str:
        name = _name(value)
        if name not in self._types or type(self._types[name]) is not type(value):
            raise self._refusal(path, f"is {described(value)}, and no batch began with one")
        return name

    def _refusal(self, path: Path, what: str) -> BatchError:
        return BatchError(
            f"batch {self.number}: {'.'.join(path) or 'it'!r} {what}, so it can't be sent to other trainers: give "
            "tensors, arrays, numbers, texts and None, in dicts, lists, tuples, dataclasses or objects whose types are "
            "in every batch"
        )


class _Unpacker:
    """Takes values from nodes, one by one."""

    def __init__(self, nodes: list[Node], raw: memoryview, types: Types) -> None:
        self._nodes, self._raw, self._types = nodes, raw, types
        self._next = self._used = 0
        self._objects: list[Any] = []

    def finish(self) -> None:
        """WireError if something is left."""
        if self._next != len(self._nodes) or self._used != self._raw.nbytes:
            raise WireError(
                f"batches of {len(self._nodes)} parts and {self._raw.nbytes} bytes: {self._next} and {self._used} are "
                "accounted for"
            )

    def take(self, depth: int) -> Any:
        """The next value with all that is in it."""
        if self._next >= len(self._nodes) or depth > DEPTH_MAX + 1:
            raise WireError(f"batches of {len(self._nodes)} parts have too few of them, or are nested too deep")
        node = self._nodes[self._next]
        self._next += 1
        match node:
            case TensorNode():
                return self._tensor(node)
            case ArrayNode():
                return self._array(node)
            case LeftOut():
                return self._left_out(node)
            case Plain() | Bytes():
                return node.value
            case Items():
                parts = self._parts(node.count, depth)
                return tuple(parts) if node.is_tuple else parts
            case Entries():
                return self._entries(node, depth)
            case Fields():
                return self._object(node, depth)
            case Keyed():
                return self._keyed(node)
            case Again():
                return self._again(node)

    def _parts(self, count: int, depth: int) -> list[Any]:
        if count > len(self._nodes) - self._next:
            raise WireError(f"a list of {count} where {len(self._nodes) - self._next} parts are left")
        return [self.take(depth + 1) for _ in range(count)]

    def _bytes(self, shape: list[int], item_bytes: int) -> memoryview:
        if math.prod(max(1, size) for size in shape) >= _ELEMENTS_MAX:
            raise WireError(f"a tensor of shape {shape}: it is too large")
        num_bytes = math.prod(shape) * item_bytes
        if num_bytes > self._raw.nbytes - self._used:
            raise WireError(f"a tensor of {num_bytes} bytes where {self._raw.nbytes - self._used} are left")
        self._used += num_bytes
        return self._raw[self._used - num_bytes : self._used]

    def _tensor(self, node: TensorNode) -> Tensor:
        dtype = _DTYPES.get(node.dtype)
        if dtype is None:
            raise WireError(f"a tensor of {node.dtype[:40]!r}, which is not known")
        raw = np.frombuffer(self._bytes(node.shape, dtype.itemsize), np.uint8)
        if dtype == torch.bool and len(raw) and raw.max() > 1:
            raise WireError("a tensor of truth values has others")
        # in memory of torch's own: the alignment of what enters a matrix product can change bits (I1)
        tensor = torch.empty(math.prod(node.shape), dtype=dtype)
        tensor.view(torch.uint8).numpy()[:] = raw
        return tensor.reshape(node.shape)

    def _array(self, node: ArrayNode) -> Any:
        if not _ARRAY.fullmatch(node.dtype):
            raise WireError(f"an array of {node.dtype[:40]!r}, which does not travel")
        try:
            dtype = np.dtype(node.dtype)
        except TypeError as error:
            raise WireError(f"an array of {node.dtype[:40]!r}: {error}") from error
        raw = np.frombuffer(self._bytes(node.shape, dtype.itemsize), np.uint8)
        if dtype.kind == "b" and len(raw) and raw.max() > 1:
            raise WireError("an array of truth values has others")
        if dtype.kind == "U" and len(raw) and raw.view(dtype.str[0] + "u4").max() > 0x10FFFF:
            raise WireError("an array of texts has letters that do not exist")
        array = np.empty(math.prod(node.shape), dtype)
        if array.nbytes:
            array.view(np.uint8)[:] = raw
        array = array.reshape(node.shape)
        if node.scalar and node.shape:
            raise WireError(f"one number of shape {node.shape}")
        return array[()] if node.scalar else array

    def _left_out(self, node: LeftOut) -> Tensor:
        if math.prod(max(1, size) for size in node.shape) >= 1 << 31:
            raise WireError(f"ids of shape {node.shape}: they are too many")
        dtype = _DTYPES.get(node.dtype)
        if dtype not in INTEGERS:
            raise WireError(f"ids of type {node.dtype[:40]!r}: they are integers")
        return nothing(math.prod(node.shape), dtype).reshape(node.shape)

    def _entries(self, node: Entries, depth: int) -> Any:
        parts = dict(zip(node.keys, self._parts(len(node.keys), depth), strict=True))
        if len(parts) != len(node.keys):
            raise WireError(f"a mapping with a key twice: {node.keys[:8]}")
        if node.kind is None:
            return parts
        example = self._example(node.kind)
        if not isinstance(example, MutableMapping):
            if isinstance(example, Mapping):
                return parts  # as where such a batch is rewritten
            raise WireError(f"a {node.kind}, which is no mapping here, with keys")
        other = copy.copy(example)
        other.clear()
        other.update(parts)
        return other

    def _object(self, node: Fields, depth: int) -> Any:
        example = self._example(node.kind)
        known = [name for name, _ in parts_of(example)]
        is_fixed = isinstance(example, tuple) or not hasattr(example, "__dict__")
        if isinstance(example, Mapping | list) or is_keyed(example) or (is_fixed and known != node.names):
            raise WireError(f"a {node.kind} of {node.names[:8]}, which has {known[:8]} here")
        if isinstance(example, tuple):
            return type(example)._make(self._parts(len(node.names), depth))  # type: ignore[attr-defined]
        made = copy.copy(example)
        self._objects.append(made)
        if not is_fixed:
            vars(made).clear()
        set_attributes(made, dict(zip(node.names, self._parts(len(node.names), depth), strict=True)))
        return made

    def _keyed(self, node: Keyed) -> Any:
        example = self._example(node.kind)
        if not is_keyed(example):
            raise WireError(f"a {node.kind}, which is no KeyedJaggedTensor here, with keys")
        lengths, *rest = (self._next_tensor() for _ in range(1 + node.weighted + len(node.keys)))
        weights = rest.pop(0) if node.weighted else None
        _check_keyed(node, lengths, rest, weights)
        values = torch.cat([part.reshape(-1) for part in rest])
        return type(example)(keys=list(node.keys), values=values, weights=weights, lengths=lengths)

    def _next_tensor(self) -> Tensor:
        value = self.take(DEPTH_MAX)
        if not isinstance(value, Tensor):
            raise WireError(f"a {type(value).__name__} came where a tensor was due")
        return value

    def _again(self, node: Again) -> Any:
        if node.number >= len(self._objects):
            raise WireError(f"object {node.number} of {len(self._objects)} is named again")
        return self._objects[node.number]

    def _example(self, name: str) -> Any:
        if name not in self._types:
            raise WireError(
                f"trainer 0 has a batch with a {name[:80]}, and the first batch of this trainer's own loader has none: "
                "let loaders give batches of the same types on all trainers"
            )
        return self._types[name]


def _check_keyed(node: Keyed, lengths: Tensor, values: list[Tensor], weights: Tensor | None) -> None:
    """WireError if lengths of bags are not those of the values of each key."""
    counts = [part.numel() for part in values]
    fits = lengths.dim() == 1 and not lengths.is_floating_point() and bool((lengths >= 0).all())
    if (
        not fits
        or not values
        or lengths.numel() % len(values)
        or lengths.reshape(len(values), -1).sum(1).tolist() != counts
    ):
        raise WireError(f"a {node.kind} whose keys have {counts[:8]} ids, and lengths of others")
    if weights is not None and weights.shape != (sum(counts),):
        raise WireError(f"a {node.kind} of {sum(counts)} ids with weights of shape {tuple(weights.shape)}")


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str, bytes)


def _name(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
