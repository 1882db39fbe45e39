"""The tables as the oracle knows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bagpipe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OracleTable:
    """An id space: its features, in the order of a batch's ids, and the slot space that its rows live in."""

    name: str
    rows: int | None = None
    """Ids are in [0, rows); None: any 64-bit id."""
    features: tuple[str, ...] = ()
    """The features whose ids are rows of this table; empty: one feature of the table's own name."""
    group: int = 0
    """Tables of equal row width share the slot space of this number."""
    width: int | None = None
    """Floats in a row, for messages."""

    def __post_init__(self) -> None:
        if self.rows is not None and self.rows < 1:
            raise ConfigError(f"table {self.name!r} has {self.rows} rows: give at least 1, or leave the size out")
        if self.group < 0:
            raise ConfigError(f"table {self.name!r} is in group {self.group}: groups are numbered from 0")
        if not self.features:
            object.__setattr__(self, "features", (self.name,))


def described(tables: Sequence[OracleTable]) -> str:
    """The tables of a group, for messages."""
    names = ", ".join(repr(table.name) for table in tables[:3]) + (", ..." if len(tables) > 3 else "")
    width = tables[0].width
    return f"{'table' if len(tables) == 1 else 'tables'} {names}" + (f" (rows of {width} floats)" if width else "")
