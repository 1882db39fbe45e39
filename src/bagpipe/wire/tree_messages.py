"""What a batch of any shape is made of, as records: one for each of its parts, outermost first.

The parts of a container follow it, in order; the numbers of tensors lie elsewhere (`bagpipe.data.tree_wire`).
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, Union

import msgspec

from bagpipe.wire.plan_messages import Name, Size
from bagpipe.wire.records import Count, Value

DIMENSIONS_MAX = 16
NODES_MAX = 1 << 21

Shape: TypeAlias = Annotated[list[Size], msgspec.Meta(max_length=DIMENSIONS_MAX)]
Names: TypeAlias = Annotated[list[Name], msgspec.Meta(max_length=1 << 16)]


class TensorNode(Value, frozen=True, tag=0):
    """A tensor on the CPU; its bytes follow those before."""

    dtype: Name
    shape: Shape


class ArrayNode(Value, frozen=True, tag=1):
    """A NumPy array, or one of its numbers."""

    dtype: Name
    shape: Shape
    scalar: bool


class LeftOut(Value, frozen=True, tag=2):
    """Ids, which the plan has: only their type and shape travel."""

    dtype: Name
    shape: Shape


class Plain(Value, frozen=True, tag=3):
    """A value that stands here."""

    value: bool | int | float | str | None


class Bytes(Value, frozen=True, tag=9):
    """Bytes that stand here."""

    value: bytes


class Items(Value, frozen=True, tag=4):
    """A list or a tuple; so many parts follow."""

    count: Count
    is_tuple: bool


class Entries(Value, frozen=True, tag=5):
    """A mapping; a part for each key follows. A dict has no type."""

    keys: Annotated[list[int | str], msgspec.Meta(max_length=1 << 16)]
    kind: Name | None


class Fields(Value, frozen=True, tag=6):
    """An object of a known type; a part for each name follows."""

    kind: Name
    names: Names


class Keyed(Value, frozen=True, tag=7):
    """A KeyedJaggedTensor; lengths, weights if there are any, and the values of each key that are not left out."""

    kind: Name
    keys: Names
    weighted: bool


class Again(Value, frozen=True, tag=8):
    """The object of this number, which holds this place."""

    number: Count


Node: TypeAlias = Union[TensorNode, ArrayNode, LeftOut, Plain, Bytes, Items, Entries, Fields, Keyed, Again]  # noqa: UP007
Nodes: TypeAlias = Annotated[list[Node], msgspec.Meta(max_length=NODES_MAX)]
