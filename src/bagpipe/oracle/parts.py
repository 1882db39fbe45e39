"""The oracle's work, cut by tables: each pass runs over parts that share nothing, on as many threads as there are.

Which thread takes which part changes no plan: whatever depends on several tables is decided between passes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bagpipe.oracle.tables import DirectRows, MappedRows, OracleTable, Rows, is_direct

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Tables that one thread works on, and where their rows are noted."""

    rows: Rows
    tables: Int64s


def make_parts(tables: Sequence[OracleTable], threads: int, rows_max: int, bytes_max: int) -> list[Part]:
    """Each mapped table alone; the others spread evenly over two parts a thread, or one if there is one thread."""
    direct = is_direct(tables, rows_max, bytes_max)
    members = [t for t in range(len(tables)) if direct[t]]
    mapped = [t for t in range(len(tables)) if not direct[t]]
    rows = DirectRows(tables, members)
    piles: list[list[int]] = [[] for _ in range(1 if threads == 1 else 2 * threads)]
    costs = [0.0] * len(piles)
    for t in sorted(members, key=lambda t: -_cost(tables[t])):
        lightest = costs.index(min(costs))
        piles[lightest].append(t)
        costs[lightest] += _cost(tables[t])
    parts = [Part(MappedRows(len(tables)), np.array([t])) for t in mapped]
    return parts + [Part(rows, np.array(sorted(pile))) for pile in piles if pile]


def _cost(table: OracleTable) -> float:
    """Reading a feature costs more the less of its table fits the processor's caches."""
    return len(table.features) * (1 + float(np.log2(table.rows or 1)) / 4)


class Workers:
    """The calling thread and `threads` - 1 others."""

    def __init__(self, threads: int) -> None:
        self._helpers = ThreadPoolExecutor(threads - 1, "bagpipe-oracle") if threads > 1 else None
        self._num_helpers = threads - 1

    def run(self, work: Callable[[Part], None], parts: Sequence[Part]) -> None:
        """Call `work` on every part; each thread takes the next one as soon as it is free."""
        if self._helpers is None:
            for part in parts:
                work(part)
            return
        turn = itertools.count()

        def take_turns() -> None:
            while (number := next(turn)) < len(parts):
                work(parts[number])

        others = [self._helpers.submit(take_turns) for _ in range(min(self._num_helpers, len(parts) - 1))]
        try:
            take_turns()
        finally:
            for other in others:
                other.result()

    def close(self) -> None:
        """Let the threads go."""
        if self._helpers is not None:
            self._helpers.shutdown()
