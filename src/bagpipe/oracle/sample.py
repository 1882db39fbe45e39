"""What the batches in the window show of how often each row is used: for policies that learn before the first plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.tables import Rows
from bagpipe.oracle.window import Window

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class TableSample:
    """The rows of one table in some batches, batch by batch."""

    ids: Int64s
    counts: Int64s
    """How often the batch has each."""
    batches: Int64s
    """Which batch it is, from 0."""


def take_sample(window: Window, noted: Mapping[int, Rows], features: Sequence[Sequence[int]]) -> list[TableSample]:
    """The rows of each table in all batches of the window; table t has these features."""
    samples = []
    columns = [(window.first + number) & window.mask for number in range(len(window))]
    for t, own in enumerate(features):
        entries, counts = [], []
        for column, inverse in zip(columns, window.inverses, strict=True):
            here = window.entries[window.begins[t, column] : window.begins[t + 1, column]]
            occurrences = np.concatenate([inverse[feature] for feature in own])
            entries.append(here.astype(np.int64))
            counts.append(np.bincount(occurrences, minlength=len(here)))
        numbers = np.repeat(np.arange(len(entries)), [len(each) for each in entries])
        ids = noted[t].ids(t, np.concatenate(entries))
        samples.append(TableSample(ids, np.concatenate(counts), numbers))
    return samples
