"""How often each row is used in all of the data: a pass over the ids that keeps one count a row, and no batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels.idmap import IdMap
from bagpipe.oracle.sample import TableSample

Int64s = NDArray[np.int64]


class RowScan:
    """Counts rows, table by table; 31 bytes for each that occurs. The order of the data makes no difference."""

    def __init__(self, features: Sequence[Sequence[str]]) -> None:
        """Table t has these features."""
        self._features = features
        self._maps = [IdMap() for _ in features]
        self._counts: list[Int64s] = [np.zeros(0, np.int64) for _ in features]

    def add(self, ids: Mapping[str, Int64s]) -> None:
        """Count the ids of some samples, by feature."""
        for t, own in enumerate(self._features):
            for name in own:
                positions = np.empty(len(ids[name]), np.int64)
                self._maps[t].find_or_insert(ids[name], positions)
                missing = len(self._maps[t]) - len(self._counts[t])
                if missing > 0:  # by at least a quarter, so that growing costs little for each row
                    more = np.zeros(max(missing, len(self._counts[t]) // 4), np.int64)
                    self._counts[t] = np.concatenate([self._counts[t], more])
                np.add.at(self._counts[t], positions, 1)

    def samples(self) -> list[TableSample]:
        """The rows of each table and their counts, as if all samples were one batch."""
        return [
            TableSample(rows.ids(), counts[: len(rows)], np.zeros(len(rows), np.int64))
            for rows, counts in zip(self._maps, self._counts, strict=True)
        ]
