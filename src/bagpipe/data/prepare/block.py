"""What passes from reading to numbering: the samples of a stretch of a source, as columns that still have their values.

A block is small (tens of thousands of samples), so the memory of a run does not follow the size of its files (I5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where in the source a block begins or ends; a run that was stopped goes on from one."""

    file: int = 0
    """Index in the list of files, which is in order of time."""
    offset: int = 0
    """Bytes of the file before it (of what a compressed file holds), or row groups of a parquet file."""
    line: int = 0
    """Lines of the file before it, its header included; rows of a parquet file."""


BEGINNING = Place()


@dataclass(frozen=True, slots=True)
class Category:
    """The values of one categorical column: for each occurrence its text or number, and a 64-bit key of it."""

    values: pa.Array
    """Strings or 64-bit integers, one an occurrence; null where missing."""
    keys: NDArray[np.uint64]
    """The number itself, or a hash of the text that is the same on every machine; 0 where missing."""
    checks: NDArray[np.uint32]
    """A second hash, by which two texts with the same key are told apart; 0 for numbers and where missing."""
    missing: NDArray[np.bool_]
    offsets: NDArray[np.int64] | None = None
    """Of lists: sample i has the occurrences offsets[i] to offsets[i + 1]; None: one a sample.

    A missing list has no occurrence, as an empty one; a missing value in a list is an occurrence."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A line that can't be used."""

    file: str
    line: int
    """From 1."""
    column: str | None
    """None: the line as a whole."""
    reason: str
    """What is wrong and what the value is: `'abc' is not a number`."""
    text: bytes
    """The line as it stands in the file, for the file of those set aside."""


@dataclass(frozen=True, slots=True)
class Block:
    """A run of samples in the order of the source; it may have none, only problems."""

    labels: NDArray[np.float32]
    dense: NDArray[np.float32]
    """(samples, numeric columns), transformed, none missing."""
    categories: Mapping[str, Category]
    """By column, in the order of the schema."""
    start: Place
    end: Place
    times: NDArray[np.int64] | None = None
    """Of each sample, where the source says; seconds since 1970."""
    problems: tuple[Problem, ...] = field(default=())
    """Lines of this stretch that gave no sample, one each."""
    position: int = 0
    """Bytes on disk, of all files, that were read up to its end; about, to show progress."""
    lines: NDArray[np.int64] | None = None
    """Of each sample the line of its file, from 1; None once samples are sorted."""

    def __len__(self) -> int:
        return len(self.labels)
