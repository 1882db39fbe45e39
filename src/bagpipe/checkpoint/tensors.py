"""Files of tensors: read and checked by the safetensors library, written piece by piece, without PyTorch.

The library writes only what is all in memory, so the header of a file is made here:

    8 bytes   length of the header, little-endian
    header    JSON: name -> dtype, shape, data_offsets [start, stop) counted from its end; padded with spaces
    data      the tensors one after the other, without gaps

A file may have been written by anyone: nothing in it is used before the library has checked its header (I8).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from safetensors import SafetensorError, deserialize

from bagpipe.bounded import short
from bagpipe.errors import CheckpointError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2,
    "U8": 1, "BOOL": 1,
}  # fmt: skip
_ALIGNMENT = 8
_HEADER_BYTES_MAX = 100_000_000
"""What the library reads."""
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
    """A tensor of a file."""

    kind: Kind
    data: bytearray


def encode_header(tensors: Mapping[str, Kind], metadata: Mapping[str, str] | None = None) -> bytes:
    """Everything before the data; tensors lie in the order given."""
    header: dict[str, Any] = {} if not metadata else {_METADATA: dict(metadata)}
    start = 0
    for name, kind in tensors.items():
        stop = start + kind.num_bytes
        header[name] = {"dtype": kind.dtype, "shape": list(kind.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    if len(text) > _HEADER_BYTES_MAX - _ALIGNMENT:
        raise CheckpointError(
            f"names and plain values take {len(text):,} B, a file of tensors has room for {_HEADER_BYTES_MAX:,}: keep "
            "numbers in tensors or arrays, and fewer of these"
        )
    text += b" " * (-len(text) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def decode(what: str, data: bytes) -> tuple[dict[str, Placed], dict[str, str]]:
    """Copies of the tensors in a file, by name, and its metadata; `what` names it in errors."""
    try:
        parts = deserialize(data)  # type: ignore[no-untyped-call]
        found = {name: Placed(Kind(part["dtype"], tuple(part["shape"])), part["data"]) for name, part in parts}
        header = data[8 : 8 + int.from_bytes(data[:8], "little")]
        # The library checks the metadata too, but gives them only of files that it opens itself.
        metadata = json.loads(header).get(_METADATA) or {}
    except (SafetensorError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{what} is not a file of tensors ({short(str(error))}): use another checkpoint"
        ) from error
    return found, metadata


def check_kinds(what: str, found: Mapping[str, Placed], expected: Mapping[str, Kind]) -> None:
    """CheckpointError unless a file has exactly these tensors."""
    kinds = {name: placed.kind for name, placed in found.items()}
    if kinds != expected:
        raise CheckpointError(
            f"{what} holds {_shown(kinds)}, and its manifest says {_shown(expected)}: use another checkpoint"
        )


def _shown(kinds: Mapping[str, Kind]) -> str:
    return ", ".join(f"{name} {kind.dtype} {list(kind.shape)}" for name, kind in list(kinds.items())[:8]) or "nothing"
