"""How often rows are used, from a sample of the data: each row's rank from hot to cold among those that share a cache.

The frequency-aware cache sorts rows by frequency and evicts the largest index. Here a row keeps its place in the store
and the rank stands beside its id, so that index and weights can't part.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.kernels.idmap import IdMap
from bagpipe.oracle.sample import TableSample
from bagpipe.oracle.slots import Group

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

UNKNOWN = 2**31 - 1
"""The rank of rows that the sample does not have."""


class Popularity:
    """Ranks of rows, 0 for the hottest of each group; of equals the first in order of tables and ids is hotter."""

    def __init__(self, groups: Sequence[Group], sample: Sequence[TableSample]) -> None:
        self._maps = [IdMap() for _ in sample]
        self._ranks: list[Int32s] = [np.empty(0, np.int32) for _ in sample]
        self._hottest: list[tuple[Int64s, Int64s]] = []
        for group in groups:
            uses = []
            for t in group.tables.tolist():
                ids, inverse = np.unique(sample[t].ids, return_inverse=True)
                self._maps[t].find_or_insert(ids, np.empty(len(ids), np.int64))
                uses.append(np.bincount(inverse, sample[t].counts, len(ids)))
            order = np.argsort(-np.concatenate(uses), kind="stable")
            ranks = np.empty(len(order), np.int32)
            ranks[order] = np.arange(len(order), dtype=np.int32)
            cuts = np.cumsum([len(each) for each in uses])[:-1]
            for t, own in zip(group.tables.tolist(), np.split(ranks, cuts), strict=True):
                self._ranks[t] = own
            ids = np.concatenate([self._maps[t].ids() for t in group.tables.tolist()])
            tables = np.repeat(group.tables, [len(each) for each in uses])
            self._hottest.append((tables[order], ids[order]))

    def hottest(self, group: int, count: int) -> tuple[Int64s, Int64s]:
        """Table and id of the hottest rows of a group; the position is the rank."""
        tables, ids = self._hottest[group]
        return tables[:count], ids[:count]

    def ranks(self, tables: Int64s, ids: Int64s) -> Int32s:
        """The rank of each row, given table by table."""
        ranks = np.full(len(ids), UNKNOWN, np.int32)
        positions = np.empty(len(ids), np.int64)
        for t in np.unique(tables).tolist():
            here = slice(*np.searchsorted(tables, [t, t + 1]).tolist())
            self._maps[t].find(ids[here], positions[here])
            known = positions[here] >= 0
            ranks[here][known] = self._ranks[t][positions[here][known]]
        return ranks
