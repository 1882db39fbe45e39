"""The safetensors format, as far as checkpoints use it: what lies where in a file, written and read without PyTorch.

    8 bytes   length of the header, little-endian
    header    JSON: name -> dtype, shape, data_offsets [start, stop) counted from its end; padded with spaces
    data      the tensors one after the other, without gaps

A header may have been written by anyone: what it says is checked before it is used (I8).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from bagpipe.errors import CheckpointError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1,
}  # fmt: skip
ALIGNMENT = 8
_HEADER_BYTES_MAX = 100_000_000
"""What the safetensors library reads."""
_METADATA = "__metadata__"


class Kind(NamedTuple):
    """Type and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


class Placed(NamedTuple):
    """A tensor in a file."""

    kind: Kind
    data: memoryview


def encode_header(tensors: Mapping[str, Kind], metadata: Mapping[str, str] | None = None) -> bytes:
    """Everything before the data; tensors lie in the order given."""
    header: dict[str, Any] = {} if not metadata else {_METADATA: dict(metadata)}
    start = 0
    for name, kind in tensors.items():
        stop = start + kind.num_bytes
        header[name] = {"dtype": kind.dtype, "shape": list(kind.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def decode(what: str, data: memoryview) -> tuple[dict[str, Placed], dict[str, str]]:
    """The tensors of a file, in the order in which they lie there, and its metadata; `what` names it in errors."""
    try:
        header, body = _split(data)
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata are not texts")
        places = sorted((_place(name, entry) for name, entry in header.items()), key=lambda place: place[2:])
        end = 0
        for name, kind, start, stop in places:
            if start != end or stop - start != kind.num_bytes:
                raise ValueError(f"tensor {name!r} has bytes {start} to {stop}, which do not fit {kind} or the others")
            end = stop
        if end != len(body):
            raise ValueError(f"its tensors take {end} bytes, and {len(body)} are there")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{what} is not a file of tensors ({error}): use another checkpoint") from error
    return {name: Placed(kind, body[start:stop]) for name, kind, start, stop in places}, metadata


def check_kinds(what: str, found: Mapping[str, Placed], expected: Sequence[tuple[str, Kind]]) -> None:
    """CheckpointError unless a file has exactly these tensors."""
    kinds = {name: placed.kind for name, placed in found.items()}
    if kinds != dict(expected):
        raise CheckpointError(
            f"{what} holds {_shown(kinds)}, and its manifest says {_shown(dict(expected))}: use another checkpoint"
        )


def _shown(kinds: Mapping[str, Kind]) -> str:
    return ", ".join(f"{name} {kind.dtype} {list(kind.shape)}" for name, kind in list(kinds.items())[:8]) or "nothing"


def _split(data: memoryview) -> tuple[dict[str, Any], memoryview]:
    if len(data) < 8:
        raise ValueError(f"it has {len(data)} bytes")
    (size,) = struct.unpack("<Q", data[:8])
    if size > min(_HEADER_BYTES_MAX, len(data) - 8):
        raise ValueError(f"its header should have {size} bytes")
    header = json.loads(bytes(data[8 : 8 + size]), object_pairs_hook=_distinct)
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")
    return header, data[8 + size :]


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header names something twice")
    return found


def _place(name: str, entry: Any) -> tuple[str, Kind, int, int]:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {name!r} is described by {str(entry)[:80]!r}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"tensor {name!r} has type {str(dtype)[:80]!r}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or len(shape) > 64:
        raise ValueError(f"tensor {name!r} has shape {str(shape)[:80]} at {str(offsets)[:80]}")
    return name, Kind(dtype, tuple(shape)), offsets[0], offsets[1]


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**62 for value in values)
