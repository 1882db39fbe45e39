"""What the batches in the window show of how often each row is used: for policies that learn before the first plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.shard import Shard

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TableSample:
    """The rows of one table in some batches, batch by batch."""

    ids: Int64s
    counts: Int64s
    """How often the batch has each."""
    batches: Int64s
    """Which batch it is, from 0."""


def take_sample(
    shards: Sequence[Shard], inverses: Sequence[Sequence[Int32s]], first: int, features: Int64s
) -> list[TableSample]:
    """The rows of each table in all batches of the window, which begins with `first`; features[t] is the first of t."""
    samples: dict[int, TableSample] = {}
    for shard in shards:
        begins, rows = shard.rings.begins, shard.rings.rows
        for k, t in enumerate(shard.tables.tolist()):
            here, counts = [], []
            for iteration, inverse in enumerate(inverses, first):
                column = iteration & (begins.shape[1] - 1)
                here.append(rows[begins[k, column] : begins[k + 1, column]].astype(np.int64))
                occurrences = np.concatenate(inverse[features[t] : features[t + 1]])
                counts.append(np.bincount(occurrences, minlength=len(here[-1])))
            numbers = np.repeat(np.arange(len(here)), [len(each) for each in here])
            samples[t] = TableSample(shard.ids_of(t, np.concatenate(here)), np.concatenate(counts), numbers)
    return [samples[t] for t in sorted(samples)]
