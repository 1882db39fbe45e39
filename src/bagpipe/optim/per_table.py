"""A row optimizer of its own for some of the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagpipe.errors import ConfigError
from bagpipe.optim.base import RowOptimizer, Stepped


class PerTable(Stepped):
    """One optimizer for most tables and others for those that are named; `step()` drives them all.

    A name is that of a table or of a layer that looks rows up in it.
    """

    def __init__(self, default: RowOptimizer, tables: Mapping[str, RowOptimizer]) -> None:
        super().__init__()
        self.default, self.tables = default, dict(tables)

    def for_table(self, table: str, layers: Sequence[str] = ()) -> RowOptimizer:
        """The optimizer of a table, found by its name or by that of one of its layers."""
        found = {name: self.tables[name] for name in (table, *layers) if name in self.tables}
        if len({id(optimizer) for optimizer in found.values()}) > 1:
            raise ConfigError(
                f"row optimizers are given for {', '.join(map(repr, found))}, which share the rows of table {table!r}: "
                "give one of them, or the same optimizer for all"
            )
        return next(iter(found.values()), self.default)

    def state_dict(self) -> dict[str, Any]:
        """The counters of the optimizers; the state of rows travels with the rows."""
        parts = {name: optimizer.state_dict() for name, optimizer in self.tables.items()}
        return {"name": "per_table", "default": self.default.state_dict(), "tables": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned."""
        saved = state.get("tables")
        if state.get("name") != "per_table" or not isinstance(saved, Mapping) or set(saved) != set(self.tables):
            raise ConfigError(
                f"the saved state is of row optimizer {state.get('name')!r} with tables {sorted(saved or ())}, this is "
                f"'per_table' with tables {sorted(self.tables)}: build the optimizer that was saved"
            )
        self.default.load_state_dict(state["default"])
        for name, optimizer in self.tables.items():
            optimizer.load_state_dict(saved[name])

    def describe(self) -> dict[str, Any]:
        """Names and hyperparameters as plain data, for run summaries."""
        parts = {name: optimizer.describe() for name, optimizer in self.tables.items()}
        return {"name": "per_table", "default": self.default.describe(), "tables": parts}

    def __repr__(self) -> str:
        return f"PerTable({self.default!r}, {self.tables!r})"
