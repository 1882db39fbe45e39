"""The runtime checker (`check = true`): follows every row through cache and store and stops at the first wrong step.

It knows the version of a row (the last iteration that updated it) in three places: as training left it, in its slot, and
in the store, with a fingerprint of its bits. A stale read, a lost or doubled write-back, a slot with two tenants, and a
row that was evicted dirty and dropped all show as a difference, and are named with iteration and row (I3, I4).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bagpipe.cache import RowCache, TableRows
from bagpipe.errors import ConsistencyError
from bagpipe.oracle.plan import Plan

Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
Key = tuple[int, int]
UNTOUCHED = -1


@dataclass(slots=True)
class Held:
    """What a slot holds."""

    key: Key
    version: int
    dirty: bool = False


class Checker:
    """An observer of the pipeline that trusts nothing."""

    def __init__(self, names: Sequence[str], cache: RowCache) -> None:
        self._names, self._cache = names, cache
        self._lock = threading.Lock()
        self._trained: dict[Key, int] = {}
        self._stored: dict[Key, tuple[int, int]] = {}
        self._slots: dict[tuple[int, int], Held] = {}
        self._places: dict[Key, tuple[int, int]] = {}
        self._leaving: dict[Key, int] = {}
        self.checked_rows = 0

    def fetched(self, plan: Plan, rows: TableRows) -> None:
        """Rows were read from the store: they must be as they were written last, and not be on their way there."""
        with self._lock:
            for row, value in zip(rows.ids.tolist(), rows.values, strict=True):
                key = (rows.table, row)
                version, print_ = self._stored.get(key, (UNTOUCHED, 0))
                if key in self._leaving:
                    self._fail(
                        plan, key, f"is read while its write-back of iteration {self._leaving[key]} is in flight"
                    )
                if version != self._trained.get(key, UNTOUCHED):
                    self._fail(plan, key, f"is stale in the store: version {version}, trained {self._trained.get(key)}")
                if version != UNTOUCHED and print_ != _fingerprint(value):
                    self._fail(plan, key, "was read with other bits than were written")

    def inserted(self, plan: Plan, table: int, ids: Ids, slots: Slots) -> None:
        """Rows take slots: each must be empty, and no row may have two."""
        group = self._cache.group[table]
        with self._lock:
            for row, slot in zip(ids.tolist(), slots.tolist(), strict=True):
                old = self._slots.get((group, slot))
                if old is not None:
                    self._fail(plan, (table, row), f"is put into slot {slot}, where {self._name(old.key)} still lives")
                if (table, row) in self._places:
                    self._fail(
                        plan, (table, row), f"is put into slot {slot} while it is in {self._places[table, row][1]}"
                    )
                version = self._stored.get((table, row), (UNTOUCHED, 0))[0]
                self._slots[group, slot] = Held((table, row), version)
                self._places[table, row] = (group, slot)

    def training(self, plan: Plan) -> None:
        """A batch is about to be trained: its rows must be in their slots, as the last update left them."""
        with self._lock:
            for key, place in self._rows(plan):
                held = self._slots.get(place)
                if held is None or held.key != key:
                    there = "nothing" if held is None else self._name(held.key)
                    self._fail(plan, key, f"should be in slot {place[1]}, where {there} is")
                assert held is not None
                if held.version != self._trained.get(key, UNTOUCHED):
                    self._fail(plan, key, f"is stale in the cache: version {held.version}")
                self.checked_rows += 1

    def updated(self, plan: Plan, tables: Sequence[int]) -> None:
        """The rows of these tables have been updated."""
        with self._lock:
            for key, place in self._rows(plan):
                if key[0] in tables:
                    self._trained[key] = plan.iteration
                    self._slots[place].version = plan.iteration
                    self._slots[place].dirty = True

    def copied_out(self, table: int, ids: Ids, slots: Slots, rows: TableRows) -> None:
        """Rows leave their slots: those with an update must be among the ones that will be written."""
        group = self._cache.group[table]
        leaving = set(rows.ids.tolist())
        with self._lock:
            for row, slot in zip(ids.tolist(), slots.tolist(), strict=True):
                key = (table, row)
                held = self._slots.pop((group, slot), None)
                if held is None or held.key != key:
                    self._fail(None, key, f"leaves slot {slot} without having been there")
                assert held is not None
                del self._places[key]
                if held.dirty and row not in leaving:
                    self._fail(None, key, f"is evicted and its update of iteration {held.version} dropped")
                if row in leaving:
                    self._leaving[key] = held.version

    def written(self, rows: TableRows) -> None:
        """The store has rows: each once for each update, never an older one."""
        with self._lock:
            for row, value in zip(rows.ids.tolist(), rows.values, strict=True):
                key = (rows.table, row)
                version = self._leaving.pop(key, self._trained.get(key, UNTOUCHED))
                if version <= self._stored.get(key, (UNTOUCHED, 0))[0]:
                    self._fail(None, key, f"is written twice with its update of iteration {version}")
                self._stored[key] = (version, _fingerprint(value))
                if key in self._places:
                    self._slots[self._places[key]].dirty = False

    def finished(self) -> None:
        """Training is over: the store must have every update."""
        with self._lock:
            for key, version in self._trained.items():
                stored = self._stored.get(key, (UNTOUCHED, 0))[0]
                if stored != version:
                    self._fail(None, key, f"was updated at iteration {version} and the store has version {stored}")

    def _rows(self, plan: Plan) -> list[tuple[Key, tuple[int, int]]]:
        bounds = plan.rows.bounds
        tables = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds)).tolist()
        return [
            ((table, row), (self._cache.group[table], slot))
            for table, row, slot in zip(tables, plan.rows.ids.tolist(), plan.rows.slots.tolist(), strict=True)
        ]

    def _name(self, key: Key) -> str:
        return f"row {key[1]} of table {self._names[key[0]]!r}"

    def _fail(self, plan: Plan | None, key: Key, what: str) -> None:
        when = "" if plan is None else f"iteration {plan.iteration}: "
        raise ConsistencyError(f"{when}{self._name(key)} {what}; this is a defect of bagpipe, please report it")


def _fingerprint(value: npt.NDArray[np.float32]) -> int:
    return zlib.crc32(value.tobytes())
