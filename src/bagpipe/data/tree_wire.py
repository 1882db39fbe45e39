"""Batches of any shape as bytes, and back: containers and plain values described, numbers raw, nothing pickled.

The description lists what a batch holds, outermost first: plain values stand for themselves, a container says how many
parts follow, the bytes of tensors and arrays lie end to end. Objects of a user's own types, and KeyedJaggedTensors,
travel as the name of their type and their parts, and are put together from an object of that type that the receiver has
itself: types never come from the wire. Whatever the bytes, what comes out is made of types that were expected, and took
no more memory than was received (I8).
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, Union

import msgspec
import numpy as np
import torch
from torch import Tensor

from bagpipe.adapt import INTEGERS, Path, described, is_keyed, is_pair, nothing, parts_of, set_attributes
from bagpipe.arrays import UInt8s
from bagpipe.errors import BatchError, WireError
from bagpipe.types import Ids
from bagpipe.wire.plan_messages import Name
from bagpipe.wire.records import Count, Value

DEPTH_MAX = 64
_ELEMENTS_MAX = 1 << 40
"""Of a tensor without elements, were each of its empty dimensions 1."""
_IDS_MAX = 1 << 31
_NAMES = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in (
        torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
        torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64,
    )
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ARRAY = re.compile(r"[<>|][biufcSUMm][0-9]{1,6}(\[[0-9]{0,6}[A-Za-z]{1,2}\])?")

Types = Mapping[str, Any]
"""An object of each type that may occur besides plain ones, by the name of the type."""


class Numbers(Value, frozen=True, tag=0):
    """A tensor, a NumPy array or one of its numbers, whose bytes follow those before.

    Of ids that the plan has only type and shape travel.
    """

    what: Literal["tensor", "array", "number", "left out"]
    dtype: Name
    shape: Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=_IDS_MAX)]], msgspec.Meta(max_length=16)]


class Parts(Value, frozen=True, tag=1):
    """A container; its parts follow. Those of a KeyedJaggedTensor are lengths, weights or None, and the values of each
    key."""

    kind: Name
    """"list", "tuple", "dict", or the name of a type that the receiver knows."""
    names: Annotated[list[int | str], msgspec.Meta(max_length=1 << 16)] | Count
    """Of the parts; how many there are, where they have none."""


class Again(Value, frozen=True, tag=2):
    """The object of this number, which holds this place."""

    number: Count


class Bytes(Value, frozen=True, tag=3):
    """Bytes that stand here; other plain values do so themselves."""

    value: bytes


Node: TypeAlias = Union[bool, int, float, str, Bytes, Numbers, Parts, Again, None]  # noqa: UP007
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Annotated[list[Node], msgspec.Meta(max_length=1 << 21)])


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """Batches as they travel."""

    description: UInt8s
    raw: UInt8s

    @property
    def num_bytes(self) -> int:
        """Of all."""
        return self.description.nbytes + self.raw.nbytes


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


def pack_trees(batches: list[Any], left_out: Collection[Path], types: Types, number: int = 0) -> Trees:
    """Batches but for the ids at the paths `left_out` (of each batch).

    BatchError if something can't travel; `number` is that of the first batch, for messages.
    """
    packer = _Packer(frozenset(left_out), types)
    packer.nodes.append(Parts("list", len(batches)))
    for position, batch in enumerate(batches):
        packer.number = number + position
        packer.add(batch, (), 0)
    raw = np.frombuffer(b"".join(packer.bytes), np.uint8)
    return Trees(np.frombuffer(_ENCODER.encode(packer.nodes), np.uint8), raw)


def unpack_trees(trees: Trees, types: Types) -> list[Any]:
    """The batches that came; WireError if they can't be."""
    try:
        nodes = _DECODER.decode(trees.description.reshape(-1).data)
    except (msgspec.MsgspecError, UnicodeDecodeError, OverflowError) as error:
        raise WireError(f"the description of batches is none: {error}") from error
    unpacker = _Unpacker(nodes, trees.raw.reshape(-1), types)
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
            self._add_tensor(value, path)
        elif isinstance(value, np.ndarray | np.generic):
            self._add_array(value, path)
        elif _is_plain(value):
            if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
                raise self._refusal(path, f"is {value}, and numbers travel with 64 bits")
            self.nodes.append(Bytes(value) if isinstance(value, bytes) else value)
        elif id(value) in self._objects:
            self.nodes.append(Again(self._objects[id(value)]))
        else:
            for part_path, part in self._take_apart(value, path):
                self.add(part, part_path, depth + 1)

    def _take_apart(self, value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
        """Describe a container; its parts, each with its path."""
        if type(value) in (list, tuple):
            self.nodes.append(Parts(type(value).__name__, len(value)))
        elif is_keyed(value):
            keys = list(value.keys())
            self.nodes.append(Parts(self._type(value, path), keys))
            yield (*path, "", "lengths"), value.lengths()
            yield (*path, "", "weights"), getattr(value, "weights_or_none", lambda: None)()
            yield from (((*path, key), value[key].values()) for key in keys)
            return
        elif isinstance(value, Mapping):
            for key in value:
                if type(key) not in (int, str):
                    raise self._refusal(path, f"has the key {key!r}, and keys that travel are texts or numbers")
            self.nodes.append(Parts("dict" if type(value) is dict else self._type(value, path), list(value)))
        else:
            names: list[int | str] = [name for name, _ in parts_of(value)]
            if not names or (not isinstance(value, tuple) and copy.copy(value) is value):
                raise self._refusal(path, f"is {described(value)}")
            self.nodes.append(Parts(self._type(value, path), names))
            if not isinstance(value, tuple):
                self._objects[id(value)] = len(self._objects)
        # The ids of a pair or of `Ids` are its first part, and their place in the batch is that of the whole.
        holds_ids = path in self._left_out and (isinstance(value, Ids) or is_pair(value))
        for position, (name, part) in enumerate(parts_of(value)):
            yield path if holds_ids and position == 0 else (*path, name), part

    def _add_tensor(self, value: Tensor, path: Path) -> None:
        left_out = path in self._left_out
        if value.dtype not in _NAMES or (not left_out and (value.layout != torch.strided or not value.is_cpu)):
            raise self._refusal(path, f"is {described(value)}, and only plain tensors of numbers on the CPU travel")
        self.nodes.append(Numbers("left out" if left_out else "tensor", _NAMES[value.dtype], list(value.shape)))
        if value.numel() and not left_out:  # strides of one without elements can be anything
            self.bytes.append(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def _add_array(self, value: Any, path: Path) -> None:
        array = np.asarray(value)
        if not _ARRAY.fullmatch(array.dtype.str):
            raise self._refusal(path, f"is {described(array)}, and only arrays of numbers, times and texts travel")
        what: Literal["array", "number"] = "number" if isinstance(value, np.generic) else "array"
        self.nodes.append(Numbers(what, array.dtype.str, list(array.shape)))
        self.bytes.append(array.tobytes())

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

    def __init__(self, nodes: list[Node], raw: UInt8s, types: Types) -> None:
        self._nodes, self._raw, self._types = nodes, raw, types
        self._next = self._used = 0
        self._objects: list[Any] = []

    def finish(self) -> None:
        """WireError if something is left."""
        if self._next != len(self._nodes) or self._used != len(self._raw):
            raise WireError(
                f"batches of {len(self._nodes)} parts and {len(self._raw)} bytes: {self._next} and {self._used} are "
                "accounted for"
            )

    def take(self, depth: int) -> Any:
        """The next value with all that is in it."""
        if self._next >= len(self._nodes) or depth > DEPTH_MAX + 1:
            raise WireError(f"batches of {len(self._nodes)} parts have too few of them, or are nested too deep")
        node = self._nodes[self._next]
        self._next += 1
        if isinstance(node, Parts):
            return self._container(node, depth)
        if isinstance(node, Numbers):
            return self._numbers(node)
        if not isinstance(node, Again):
            return node.value if isinstance(node, Bytes) else node
        if node.number >= len(self._objects):
            raise WireError(f"object {node.number} of {len(self._objects)} is named again")
        return self._objects[node.number]

    def _container(self, node: Parts, depth: int) -> Any:
        if isinstance(node.names, int):
            if node.kind not in ("list", "tuple"):
                raise WireError(f"a {node.kind[:80]} of {node.names} parts without names")
            parts = self._parts(node.names, depth)
            return parts if node.kind == "list" else tuple(parts)
        if len(set(node.names)) < len(node.names):
            raise WireError(f"a {node.kind[:80]} with a name twice: {node.names[:8]}")
        example = {} if node.kind == "dict" else self._example(node.kind)
        if is_keyed(example):
            return self._keyed(example, node.names, depth)
        if isinstance(example, Mapping):
            found = dict(zip(node.names, self._parts(len(node.names), depth), strict=True))
            if type(example) is dict or not isinstance(example, MutableMapping):  # as where a batch is rewritten
                return found
            other = copy.copy(example)
            other.clear()
            other.update(found)
            return other
        return self._object(example, node, depth)

    def _object(self, example: Any, node: Parts, depth: int) -> Any:
        assert isinstance(node.names, list)
        known = [name for name, _ in parts_of(example)]
        is_fixed = isinstance(example, tuple) or not hasattr(example, "__dict__")
        named = all(isinstance(name, str) for name in node.names)
        if isinstance(example, list) or not named or (is_fixed and known != node.names):
            raise WireError(f"a {node.kind} of {node.names[:8]}, which has {known[:8]} here")
        if isinstance(example, tuple):
            return type(example)._make(self._parts(len(node.names), depth))  # type: ignore[attr-defined]
        made = copy.copy(example)
        self._objects.append(made)
        if not is_fixed:
            vars(made).clear()
        parts = self._parts(len(node.names), depth)
        set_attributes(made, {str(name): part for name, part in zip(node.names, parts, strict=True)})
        return made

    def _keyed(self, example: Any, keys: list[int | str], depth: int) -> Any:
        lengths, weights, *values = self._parts(2 + len(keys), depth)
        if not all(isinstance(part, Tensor) for part in (lengths, *values, *([] if weights is None else [weights]))):
            raise WireError(f"a {_name(example)} has parts that are no tensors")
        _check_keyed(_name(example), lengths, values, weights)
        joined = torch.cat([part.reshape(-1) for part in values])
        return type(example)(keys=list(keys), values=joined, weights=weights, lengths=lengths)

    def _parts(self, count: int, depth: int) -> list[Any]:
        if count > len(self._nodes) - self._next:
            raise WireError(f"a container of {count} parts where {len(self._nodes) - self._next} are left")
        return [self.take(depth + 1) for _ in range(count)]

    def _numbers(self, node: Numbers) -> Any:
        if math.prod(max(1, size) for size in node.shape) >= (_IDS_MAX if node.what == "left out" else _ELEMENTS_MAX):
            raise WireError(f"numbers of shape {node.shape}: they are too many")
        if node.what in ("array", "number"):
            return self._array(node)
        dtype = _DTYPES.get(node.dtype)
        if dtype is None or (node.what == "left out" and dtype not in INTEGERS):
            raise WireError(f"a tensor of {node.dtype[:40]!r}, which is not known, or no type of ids")
        if node.what == "left out":
            return nothing(math.prod(node.shape), dtype).reshape(node.shape)
        raw = self._bytes(node.shape, dtype.itemsize)
        if dtype == torch.bool and len(raw) and raw.max() > 1:
            raise WireError("a tensor of truth values has others")
        # in memory of torch's own: the alignment of what enters a matrix product can change bits (I1)
        tensor = torch.empty(math.prod(node.shape), dtype=dtype)
        tensor.view(torch.uint8).numpy()[:] = raw
        return tensor.reshape(node.shape)

    def _array(self, node: Numbers) -> Any:
        if not _ARRAY.fullmatch(node.dtype) or (node.what == "number" and node.shape):
            raise WireError(f"an array of {node.dtype[:40]!r} and shape {node.shape}, which does not travel")
        try:
            dtype = np.dtype(node.dtype)
        except TypeError as error:
            raise WireError(f"an array of {node.dtype[:40]!r}: {error}") from error
        raw = self._bytes(node.shape, dtype.itemsize)
        if dtype.kind == "b" and len(raw) and raw.max() > 1:
            raise WireError("an array of truth values has others")
        array = np.empty(math.prod(node.shape), dtype)
        if array.nbytes:
            array.view(np.uint8)[:] = raw
            if dtype.kind == "U" and array.view(dtype.str[0] + "u4").max() > 0x10FFFF:
                raise WireError("an array of texts has letters that do not exist")
        array = array.reshape(node.shape)
        return array[()] if node.what == "number" else array

    def _bytes(self, shape: list[int], item_bytes: int) -> UInt8s:
        num_bytes = math.prod(shape) * item_bytes
        if num_bytes > len(self._raw) - self._used:
            raise WireError(f"a tensor of {num_bytes} bytes where {len(self._raw) - self._used} are left")
        self._used += num_bytes
        return self._raw[self._used - num_bytes : self._used]

    def _example(self, name: str) -> Any:
        if name not in self._types:
            raise WireError(
                f"trainer 0 has a batch with a {name[:80]}, and the first batch of this trainer's own loader has none: "
                "let loaders give batches of the same types on all trainers"
            )
        return self._types[name]


def _check_keyed(name: str, lengths: Tensor, values: list[Tensor], weights: Tensor | None) -> None:
    """WireError if lengths of bags are not those of the values of each key."""
    counts = [part.numel() for part in values]
    # one that takes no memory, as ids that were left out, is not contiguous
    fits = lengths.dim() == 1 and lengths.is_contiguous() and not lengths.is_floating_point()
    fits = fits and bool((lengths >= 0).all())
    if (
        not fits
        or not values
        or lengths.numel() % len(values)
        or lengths.reshape(len(values), -1).sum(1).tolist() != counts
    ):
        raise WireError(f"a {name} whose keys have {counts[:8]} ids, and lengths of others")
    if weights is not None and weights.shape != (sum(counts),):
        raise WireError(f"a {name} of {sum(counts)} ids with weights of shape {tuple(weights.shape)}")


def _is_plain(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str, bytes)


def _name(value: Any) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
