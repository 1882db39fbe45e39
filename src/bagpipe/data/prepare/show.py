"""`bagpipe data show`: samples of a data set with the values that their ids stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bagpipe.data.manifest import VOCABULARY, TableEntry
from bagpipe.data.prepare.keymap import MISSING, RARE
from bagpipe.data.prepare.numbering import MISSING_ID
from bagpipe.data.prepare.vocabulary import Vocabulary
from bagpipe.data.samples import Column
from bagpipe.data.shards import Shards
from bagpipe.errors import ConfigError


class Shown:
    """A data set, made readable."""

    def __init__(self, path: Path) -> None:
        self.shards = Shards(path)
        self._tables = {name: table for table in self.shards.manifest.tables for name in table.features}
        self._vocabularies: dict[str, Vocabulary] = {}

    def samples(self, first: int, count: int) -> list[dict[str, Any]]:
        """Some samples: label, numeric features, and for each categorical one its ids and what they stand for."""
        total = self.shards.num_samples
        if not 0 <= first < total:
            raise ConfigError(f"{self.shards.path} has no sample {first}: give 0 to {total - 1}")
        found = self.shards.gather(np.arange(first, min(first + count, total)))
        names = self.shards.manifest.numeric or tuple(f"numeric {i}" for i in range(self.shards.num_dense))
        return [
            {
                "sample": first + i,
                "label": int(found.labels[i]),
                "numeric": {name: float(value) for name, value in zip(names, found.dense[i], strict=True)},
                "categorical": {name: self._cell(name, column, i) for name, column in found.columns.items()},
            }
            for i in range(len(found))
        ]

    def row(self, feature: str, row: int) -> dict[str, Any]:
        """What an id of a feature stands for, and how often it occurred."""
        if feature not in self._tables:
            raise ConfigError(
                f"{self.shards.path} has no categorical feature {feature!r}: it has {', '.join(self._tables)}"
            )
        table = self._tables[feature]
        if table.rows is not None and not 0 <= row < table.rows:
            raise ConfigError(f"table {table.name!r} has no row {row}: give 0 to {table.rows - 1}")
        return {"feature": feature, "table": table.name} | self._meaning(table, row)

    def _cell(self, feature: str, column: Column, i: int) -> Any:
        table = self._tables[feature]
        if column.offsets is None:
            ids = column.values[i].tolist()
            return self._meaning(table, ids[0]) if len(ids) == 1 else [self._meaning(table, row) for row in ids]
        return [self._meaning(table, row) for row in column.values[column.offsets[i] : column.offsets[i + 1]].tolist()]

    def _meaning(self, table: TableEntry, row: int) -> dict[str, Any]:
        numbering = table.numbering
        if numbering is None:
            return {"id": row}
        if numbering.vocabulary is not None:
            if table.name not in self._vocabularies:
                directory = self.shards.path / VOCABULARY
                self._vocabularies[table.name] = Vocabulary(directory, numbering.vocabulary)
            value, count = self._vocabularies[table.name].look_up([row])[0]
            what = {MISSING: "missing", RARE: "rare or unseen"}.get(row, "value")
            return {"id": row, "value": value, "is": what, "count": count}
        missing = row == (MISSING_ID if numbering.kind == "ids" else MISSING)
        itself = row if numbering.kind == "ids" and numbering.values == "integer" and not missing else None
        what = "missing" if missing else "value" if itself is not None else "hash"
        return {"id": row, "value": itself, "is": what}
