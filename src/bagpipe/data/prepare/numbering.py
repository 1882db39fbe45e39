"""How the values of a column become ids: the choices, and the arithmetic of those that need no vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import ConfigError
from bagpipe.kernels import kernel
from bagpipe.kernels.random import mix

Kind = Literal["first", "frequency", "hash", "ids"]
KINDS: tuple[str, ...] = get_args(Kind)

MISSING_ID = -(2**63)
"""Stands for a missing value in tables of 64-bit ids."""
SIZE_MAX = 2**62


@dataclass(frozen=True, slots=True)
class Numbering:
    """How the values of a table are numbered."""

    kind: Kind = "first"
    """first: in order of first appearance; frequency: the most frequent first; hash: a hash of the value, to a given
    size; ids: 64-bit ids, the number itself or a hash of the text."""
    size: int | None = None
    """Rows of a hashed table, that of missing values included."""
    min_count: int = 1
    """Values that occur less often share a row (first, frequency)."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"numbering {self.kind!r} is not known: choose one of {', '.join(KINDS)}")
        if (self.kind == "hash") != (self.size is not None):
            raise ConfigError(f"numbering {self.kind} with size {self.size}: give hash:SIZE, and a size to hash only")
        if self.size is not None and not 2 <= self.size <= SIZE_MAX:
            raise ConfigError(f"numbering hash:{self.size}: give 2 rows or more, the first is for missing values")
        if self.min_count < 1:
            raise ConfigError(f"min-count is {self.min_count}: give at least 1")
        if self.min_count > 1 and not self.has_vocabulary:
            raise ConfigError(f"min-count {self.min_count} goes with first and frequency, not with {self.kind}")

    @property
    def has_vocabulary(self) -> bool:
        """Whether ids are given out, not computed."""
        return self.kind in ("first", "frequency")

    @property
    def counts_first(self) -> bool:
        """Whether all values must be counted before the first can be numbered."""
        return self.kind == "frequency" or self.min_count > 1


def parse_numberings(
    tables: Sequence[str], kinds: Sequence[str] = (), min_counts: Sequence[str] = ()
) -> dict[str, Numbering]:
    """The numbering of each table, from texts such as `frequency`, `C3=hash:1000000` and, for counts, `10`, `C3=4`."""
    kind_of, count_of = _by_table(tables, kinds, "--numbering"), _by_table(tables, min_counts, "--min-count")
    numberings = {}
    for table in tables:
        kind, _, size = kind_of.get(table, "first").partition(":")
        if kind not in KINDS or (size and not size.isdecimal()):
            raise ConfigError(
                f"--numbering {kind_of[table]!r}: give first, frequency, hash:SIZE or ids, alone or as TABLE=..."
            )
        count = count_of.get(table, "1")
        if not count.isdecimal():
            raise ConfigError(f"--min-count {count!r}: give a whole number, alone or as TABLE=NUMBER")
        # Said of all tables, a minimum is meant for those that count; said of one that does not, it is a mistake.
        counts = kind in ("first", "frequency") or f"{table}={count}" in min_counts
        numberings[table] = Numbering(cast(Kind, kind), int(size) if size else None, int(count) if counts else 1)
    return numberings


def _by_table(tables: Sequence[str], texts: Sequence[str], option: str) -> dict[str, str]:
    """What is said of each table: by its name, else of all."""
    named: dict[str, str] = {}
    of_all: list[str] = []
    for text in texts:
        table, equals, value = text.rpartition("=")
        if equals and table not in tables:
            raise ConfigError(f"{option} {text}: there is no table {table!r}; there are {', '.join(tables)}")
        if equals:
            named[table] = value
        else:
            of_all.append(value)
    if len(of_all) > 1:
        raise ConfigError(f"{option} is given twice, {' and '.join(of_all)}: give one, or TABLE={of_all[-1]}")
    return dict.fromkeys(tables, of_all[0]) | named if of_all else named


def describe(numberings: Mapping[str, Numbering]) -> dict[str, str]:
    """Each numbering as a text, to see whether two runs have the same."""
    return {
        table: f"{numbering.kind}{f':{numbering.size}' if numbering.size else ''} min-count {numbering.min_count}"
        for table, numbering in numberings.items()
    }


@kernel
def hash_rows(keys: NDArray[np.uint64], missing: NDArray[np.bool_], size: int, ids: NDArray[np.int64]) -> None:
    """Rows 1 to size - 1 by key, 0 where missing; about 6 ns each. May never change: models are trained with it."""
    others = np.uint64(size - 1)
    for i in range(len(keys)):
        ids[i] = 0 if missing[i] else 1 + np.int64(mix(keys[i]) % others)
