"""The runtime checker (`check = true`): follows every row through cache and store and stops at the first wrong step.

It knows the version of a row (the last iteration that updated it) and a fingerprint of its bits in three places: as
training left it, in its slot, and in the store. A stale read, a lost or doubled write-back, a slot with two tenants, a
row that was evicted dirty and dropped, and any bit that changed on the way show as a difference (I3, I4).
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from bagpipe.cache import RowCache, TableRows
from bagpipe.errors import ConsistencyError
from bagpipe.oracle.plan import Plan

Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
Key = tuple[int, int]
"""Table and id."""
Place = tuple[int, int]
"""Slot space and slot."""


class State(NamedTuple):
    """A row as it was at some moment."""

    version: int
    fingerprint: int


UNTOUCHED = State(-1, 0)


@dataclass(slots=True)
class Held:
    """What a slot holds."""

    key: Key
    state: State
    dirty: bool = False


class Checker:
    """An observer of the pipeline that trusts nothing."""

    def __init__(self, names: Sequence[str], cache: RowCache) -> None:
        self._names, self._cache = names, cache
        self._lock = threading.Lock()
        self._iteration = -1
        self._trained: dict[Key, State] = {}
        self._stored: dict[Key, State] = {}
        self._fetched: dict[Key, State] = {}
        self._slots: dict[Place, Held] = {}
        self._places: dict[Key, Place] = {}
        self._leaving: dict[Key, State] = {}
        self.checked_rows = 0

    def fetched(self, plan: Plan, rows: TableRows) -> None:
        """Rows were read from the store: they must be as they were written last, and not be on their way there."""
        with self._lock:
            for row, value in zip(rows.ids.tolist(), rows.values, strict=True):
                key = (rows.table, row)
                stored, trained = self._stored.get(key, UNTOUCHED), self._trained.get(key, UNTOUCHED)
                if key in self._leaving:
                    version = self._leaving[key].version
                    self._fail(plan, key, f"is read while its write-back of iteration {version} is in flight")
                if stored.version != trained.version:
                    self._fail(plan, key, f"is stale in the store: {_named(stored)}, trained {_named(trained)}")
                found = State(stored.version, fingerprint(value))
                if stored is not UNTOUCHED and found != stored:
                    self._fail(plan, key, "was read with other bits than were written")
                self._fetched[key] = found

    def inserted(self, plan: Plan, table: int, ids: Ids, slots: Slots) -> None:
        """Rows take slots: each must be empty, and no row may have two."""
        group = self._cache.group[table]
        with self._lock:
            for row, slot in zip(ids.tolist(), slots.tolist(), strict=True):
                key, place = (table, row), (group, slot)
                if place in self._slots:
                    other = self._name(self._slots[place].key)
                    self._fail(plan, key, f"is put into slot {slot}, where {other} still lives")
                if key in self._places:
                    self._fail(plan, key, f"is put into slot {slot} while it is in {self._places[key][1]}")
                if key not in self._fetched:
                    self._fail(plan, key, f"is put into slot {slot} without having been fetched")
                self._slots[place] = Held(key, self._fetched.pop(key))
                self._places[key] = place

    def training(self, plan: Plan) -> None:
        """A batch is about to be trained: its rows must be in their slots, as the last update left them."""
        with self._lock:
            for key, place, fingerprint in self._rows(plan):
                held = self._slots.get(place)
                if held is None or held.key != key:
                    there = "nothing" if held is None else self._name(held.key)
                    self._fail(plan, key, f"should be in slot {place[1]}, where {there} is")
                trained = self._trained.get(key, UNTOUCHED)
                if held.state.version != trained.version:
                    self._fail(plan, key, f"is stale in the cache: {_named(held.state)}, trained {_named(trained)}")
                if held.state.fingerprint != fingerprint:
                    self._fail(plan, key, f"has changed in slot {place[1]} since {_named(held.state)}")
                self.checked_rows += 1
            self._iteration = plan.iteration

    def updated(self, plan: Plan, tables: Sequence[int]) -> None:
        """The rows of these tables have been updated."""
        with self._lock:
            for key, place, fingerprint in self._rows(plan):
                if key[0] in tables:
                    self._trained[key] = State(plan.iteration, fingerprint)
                    self._slots[place] = Held(key, self._trained[key], dirty=True)

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
                del self._places[key]
                if held.dirty and row not in leaving:
                    self._fail(None, key, f"is evicted and its update of iteration {held.state.version} dropped")
                if row in leaving:
                    self._leaving[key] = held.state

    def copied(self, rows: TableRows) -> None:
        """Updated rows will be written and stay in their slots: they are on their way, and clean from now on."""
        with self._lock:
            for row in rows.ids.tolist():
                held = self._slots[self._places[rows.table, row]]
                self._leaving[held.key] = held.state
                held.dirty = False

    def flushed(self) -> None:
        """A barrier has copied all that there is to write: `finished` will see."""

    def dropped(self, table: int, ids: Ids, slots: Slots) -> None:
        """Never called: there is no other trainer who would write the rows."""

    def written(self, rows: TableRows) -> None:
        """The store has rows: each once for each update, as it left training."""
        with self._lock:
            for row, value in zip(rows.ids.tolist(), rows.values, strict=True):
                key = (rows.table, row)
                due = self._leaving.pop(key, self._trained.get(key, UNTOUCHED))
                if due.version <= self._stored.get(key, UNTOUCHED).version:
                    self._fail(None, key, f"is written twice with its update of iteration {due.version}")
                if due.fingerprint != fingerprint(value):
                    self._fail(None, key, f"is written with other bits than its update of iteration {due.version} gave")
                self._stored[key] = due

    def finished(self) -> None:
        """Training is over: the store must have every update."""
        with self._lock:
            for key, trained in self._trained.items():
                stored = self._stored.get(key, UNTOUCHED)
                if stored != trained:
                    self._fail(None, key, f"was updated at iteration {trained.version}; the store has {_named(stored)}")

    def _rows(self, plan: Plan) -> Iterator[tuple[Key, Place, int]]:
        """The rows of a batch, where they should be, and what is there."""
        for table in range(len(self._names)):
            ids, slots = plan.rows.of_table(table)
            group = self._cache.group[table]
            values = self._cache.read(group, slots)
            for row, slot, value in zip(ids.tolist(), slots.tolist(), values, strict=True):
                yield (table, row), (group, slot), fingerprint(value)

    def _name(self, key: Key) -> str:
        return f"row {key[1]} of table {self._names[key[0]]!r}"

    def _fail(self, plan: Plan | None, key: Key, what: str) -> NoReturn:
        when = f"after iteration {self._iteration}" if plan is None else f"iteration {plan.iteration}"
        raise ConsistencyError(f"{when}: {self._name(key)} {what}; this is a defect of bagpipe, please report it")


def _named(state: State) -> str:
    return "its initial value" if state.version < 0 else f"version {state.version}"


def fingerprint(value: npt.NDArray[np.float32]) -> int:
    """One number for all bits."""
    return zlib.crc32(value.tobytes())
