"""Several oracles, each for some of the tables (paper, section 3.5): their plans, side by side, are one.

Each has its part of the slots and decides about its rows alone, so plans differ from those of one oracle with all
slots, as those of a smaller cache do. The result of training does not: a plan can cost traffic but no bit (I1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int64s
from bagpipe.oracle.oracle import Ids, Oracle
from bagpipe.oracle.places import Places
from bagpipe.oracle.plan import Fetch, Plan, Sharing, Victims
from bagpipe.oracle.reader import CutIds
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies.windows import Times

Payload = TypeVar("Payload")


class Oracles:
    """What `Oracle` is, for tables of which each oracle has some, one after the other."""

    def __init__(self, oracles: Sequence[Oracle], groups: Sequence[Sequence[int]]) -> None:
        """groups[k]: of which groups of the whole cache those of oracle k are a part; its slots come next in each."""
        self._oracles = tuple(oracles)
        self.capacity = [0] * (1 + max(max(own) for own in groups))
        """The slots of each group."""
        self._first_slots: list[Int64s] = []
        """Of each oracle, table by table, where its slots begin."""
        tables: list[OracleTable] = []
        for oracle, own in zip(oracles, groups, strict=True):
            self._first_slots.append(np.array([self.capacity[own[table.group]] for table in oracle.tables]))
            tables += [replace(table, group=own[table.group]) for table in oracle.tables]
            for group, slots in zip(own, oracle.capacity, strict=True):
                self.capacity[group] += slots
        for oracle in oracles:
            oracle.several = True
        self.tables = tuple(tables)
        ends = np.cumsum([0] + [sum(len(table.features) for table in oracle.tables) for oracle in oracles])
        self._features = list(pairwise(ends.tolist()))
        """Of each oracle, which features its tables have."""
        self.places = Places.alike(self.capacity)
        """Slots are numbered alike on all trainers: whether there are enough places otherwise, no oracle sees alone."""
        self.to_count, self.trainers = oracles[0].to_count, oracles[0].trainers

    def count(self, ids: Sequence[NDArray[np.integer]]) -> None:
        """As `Oracle.count`."""
        for oracle, (begin, end) in zip(self._oracles, self._features, strict=True):
            oracle.count(ids[begin:end])

    def measure(self, times: Times) -> None:
        """As `Oracle.measure`; no policy of several oracles goes by it."""

    def plans(self, batches: Iterable[tuple[Ids, Payload]], *, more: bool = False) -> Iterator[tuple[Plan, Payload]]:
        """As `Oracle.plans`."""
        shared = _Shared(batches, len(self._oracles))
        streams = [
            oracle.plans(shared.features(number, begin, end), more=more)
            for number, (oracle, (begin, end)) in enumerate(zip(self._oracles, self._features, strict=True))
        ]
        for parts in zip(*streams, strict=True):
            yield self._joined([plan for plan, _ in parts]), parts[0][1]

    def close(self) -> None:
        """Let the threads of all go."""
        for oracle in self._oracles:
            oracle.close()

    def _joined(self, plans: Sequence[Plan]) -> Plan:
        fetches, victims = [plan.fetch for plan in plans], [plan.victims for plan in plans]
        sharing = [plan.sharing for plan in plans if plan.sharing is not None]
        return Plan(
            plans[0].iteration,
            RowList(*self._rows([plan.rows for plan in plans])),
            tuple(inverse for plan in plans for inverse in plan.inverse),
            Fetch(*self._rows(fetches), _end_to_end(fetches, "after"), _end_to_end(fetches, "slot_after")),
            RowList(*self._rows([plan.evict for plan in plans])),
            Victims(*self._rows(victims), max(own.evict_after for own in victims)),
            min(plan.lookahead for plan in plans),
            sum(plan.hits for plan in plans),
            None if not sharing else Sharing(*(_end_to_end(sharing, name) for name in Sharing.__slots__)),
        )

    def _rows(self, lists: Sequence[RowList]) -> tuple[Int64s, NDArray[np.int32], Int64s]:
        """Ids, slots in the whole cache, and bounds."""
        sizes = [np.diff(rows.bounds) for rows in lists]
        slots = [
            rows.slots + np.repeat(first, size).astype(np.int32)
            for rows, first, size in zip(lists, self._first_slots, sizes, strict=True)
        ]
        bounds = np.concatenate([[0], np.cumsum(np.concatenate(sizes))]).astype(np.int64)
        return _end_to_end(lists, "ids"), np.concatenate(slots), bounds


AnyOracle = Oracle | Oracles


class _Shared:
    """One reading of the data for several readers; one that is behind keeps what it has not taken in memory, which is
    at most what the longest of their windows holds. All of them meet the error at which the data ends."""

    def __init__(self, batches: Iterable[tuple[Ids, Any]], readers: int) -> None:
        self._batches = iter(batches)
        self._waiting: list[deque[tuple[Ids, Any]]] = [deque() for _ in range(readers)]
        self._error: Exception | None = None

    def features(self, reader: int, begin: int, end: int) -> Iterator[tuple[Ids, Any]]:
        """The batches, with some of their features."""
        waiting = self._waiting[reader]
        while waiting or self._read():
            ids, payload = waiting.popleft()
            if isinstance(ids, CutIds):
                yield CutIds(ids.ids[begin:end], ids.cuts[begin:end]), payload
            else:
                yield ids[begin:end], payload
        if self._error is not None:
            raise self._error

    def _read(self) -> bool:
        """One more batch for all readers; False if there is none."""
        try:
            batch = next(self._batches, None)
        except Exception as error:
            batch, self._error = None, error
        if batch is not None:
            for waiting in self._waiting:
                waiting.append(batch)
        return batch is not None


def _end_to_end(parts: Sequence[object], name: str) -> NDArray[Any]:
    return np.concatenate([getattr(part, name) for part in parts])
