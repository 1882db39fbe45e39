"""What a table is: a record of its own, since servers and data processors know tables and do without PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

from bagpipe.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Table:
    """An id space: the rows that one or more features look up."""

    name: str
    rows: int | None = None
    """Ids are in [0, rows); None: any 64-bit id, the table grows with what is touched."""
    features: tuple[str, ...] = ()
    """The features whose ids are rows of this table; empty: one feature of the table's own name."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a table has an empty name: give it one")
        if self.rows is not None and (isinstance(self.rows, bool) or not isinstance(self.rows, int) or self.rows < 1):
            raise ConfigError(
                f"table {self.name!r} has {self.rows!r} rows: give a whole number, 1 or more, or leave it out"
            )
        given: object = self.features
        if isinstance(given, str):
            raise ConfigError(f"table {self.name!r}: features is the text {given!r}: give a tuple of names")
        object.__setattr__(self, "features", tuple(self.features) or (self.name,))
        if len(set(self.features)) < len(self.features):
            raise ConfigError(f"table {self.name!r} names a feature twice: {self.features}")
