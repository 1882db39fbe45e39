"""What the bodies of all messages are made of: records of plain values, checked as they are read."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

NO_ITERATION = -1
"""Before the first one: a read after it waits for nothing."""

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
Iteration: TypeAlias = Annotated[int, msgspec.Meta(ge=NO_ITERATION)]


class Record(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """A body of a message; its type is told by its first field."""


class Value(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of a body."""
