"""Reads the rows that plans fetch: READERS at once, each for one plan, handed on in the order of the plans.

Between a request and its answer a link has nothing to carry, and while rows take their slots neither: with a second
request under way it has. Rows that the store has are read while others of their plan are still to be written.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from bagpipe.cache import RowCache, TableRows
from bagpipe.failpoints import reach
from bagpipe.oracle.plan import Fetch, Plan
from bagpipe.store.base import Store
from bagpipe.trainer import staging
from bagpipe.trainer.observer import Observer
from bagpipe.trainer.points import Points
from bagpipe.trainer.stages import Stage, Wait
from bagpipe.trainer.staging import tables_of

Payload = TypeVar("Payload")
Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
Part = tuple[int, Ids, Slots, int]
"""Table, ids, slots and columns of rows to read."""
Rows = list[tuple[TableRows, Slots]]
"""Rows that were read, and the slots that they will take."""

READERS = 2


@dataclass(slots=True)
class Fetched(Generic[Payload]):
    """A plan whose rows were read, or the first block of them."""

    plan: Plan
    payload: Payload
    rows: Rows
    after: int
    """The last iteration that must be in the store before they are read."""
    others: list[list[Part]]
    """Further blocks, still to be read."""


class Fetching(Generic[Payload]):
    """Plans in, and out with the rows that they fetch."""

    def __init__(
        self,
        cache: RowCache,
        store: Store,
        points: Points,
        observer: Observer | None,
        dims: Sequence[int] | None,
        ahead: int = READERS,
    ) -> None:
        """The rows of up to `ahead` plans may be on their way."""
        self.fetch_s = 0.0
        """Spent on reading, by all readers."""
        self.planned: deque[tuple[Plan, Payload]] = deque()
        self.exhausted = False
        """No plan is added any more."""
        self._cache, self._store, self._points = cache, store, points
        self._observer, self._dims = observer, dims
        self._ahead = max(READERS, ahead)
        self._taken = self._handed_on = 0
        self._fetched: dict[int, Fetched[Payload]] = {}
        """By the number of their plan."""
        self._ended = [False] * READERS

    def stages(self) -> dict[str, Stage]:
        """The readers: plans are theirs in turn."""
        return {f"fetch-{reader}": self._fetch(reader) for reader in range(READERS)}

    def has_next(self) -> bool:
        """Whether the rows of the next plan were read, or there is none."""
        return self._handed_on in self._fetched or all(self._ended)

    def next(self) -> Fetched[Payload] | None:
        """The next plan, which counts as being on its way until `done`; None after the last one."""
        return self._fetched.get(self._handed_on)

    def done(self) -> None:
        """The rows of that plan are in their slots: those of another one may be on their way."""
        del self._fetched[self._handed_on]
        self._handed_on += 1

    def read(self, plan: Plan, parts: Sequence[Part], after: int) -> Rows:
        """Rows that the plan fetches, once the store has iteration `after`."""
        fetched: Rows = []
        for table, ids, slots, columns in parts:
            values = np.empty((len(ids), columns), np.float32)
            fetched.append((TableRows(table, ids, values), slots))
        begin = time.perf_counter()
        if fetched:
            self._store.read_many([rows for rows, _ in fetched], self._points.in_store(after))
        self.fetch_s += time.perf_counter() - begin
        if self._observer:
            for rows, _ in fetched:
                self._observer.fetched(plan, rows)
        return fetched

    def _fetch(self, reader: int) -> Stage:
        while True:
            yield Wait("a plan", lambda: self._is_turn_of(reader) or self._is_over())
            if self._is_over():
                break
            plan, payload = self.planned.popleft()
            number = self._taken
            self._taken += 1
            yield Wait("its turn", lambda: True)  # the next plan is another reader's, who may wait for it
            early, late = self._read_early(plan)
            after = int(plan.fetch.after.max(initial=-1))
            yield Wait(f"iteration {after} to be in the store", self._in_store(after))  # wait 3
            if self._points.closing:
                break
            first, *others = self._blocks(late)
            rows = early + self.read(plan, first, after)  # while the victims of the plan may still be in use
            reach("trainer.fetch.read")
            self._fetched[number] = Fetched(plan, payload, rows, after, others)
            del early, rows  # whoever inserts them lets go of them
            yield Wait("rows to take their slots", self._has_room_for(number + READERS))
        self._ended[reader] = True

    def _is_turn_of(self, reader: int) -> bool:
        return bool(self.planned) and self._taken % READERS == reader

    def _has_room_for(self, number: int) -> Callable[[], bool]:
        return lambda: number < self._handed_on + self._ahead or self._points.closing

    def _is_over(self) -> bool:
        return self._points.closing or (self.exhausted and not self.planned)

    def _in_store(self, after: int) -> Callable[[], bool]:
        named = self._points.in_store(after)
        return lambda: (self._points.acknowledged >= after and self._store.reached(named)) or self._points.closing

    def _read_early(self, plan: Plan) -> tuple[Rows, Fetch]:
        """Rows that the store has already, read while others of the plan are still to be written back; and these."""
        fetch, late = plan.fetch, plan.fetch.after > self._points.acknowledged
        if not late.any() or late.all() or len(fetch) > self._rows_at_once():
            return [], fetch
        early = fetch.only(~late)
        after = int(early.after.max())
        if not self._store.reached(self._points.in_store(after)):
            return [], fetch
        (parts,) = self._blocks(early)
        return self.read(plan, parts, after), fetch.only(late)

    def _blocks(self, fetch: Fetch) -> list[list[Part]]:
        """What a plan fetches, in blocks of bounded size; at least one."""
        found: list[list[Part]] = [[]]
        room = self._rows_at_once()
        for table, ids, slots, columns in self._parts(fetch):
            while len(ids):
                found[-1].append((table, ids[:room], slots[:room], columns))
                ids, slots, room = ids[room:], slots[room:], room - min(room, len(ids))
                if not room:
                    found.append([])
                    room = self._rows_at_once()
        return found if found[-1] else found[:-1] or found

    def _parts(self, fetch: Fetch) -> Iterator[Part]:
        """Table, ids, slots and columns to read: of a table's rows those that are whole, then those that are not."""
        for table, ids, slots in tables_of(fetch):
            width = self._cache.widths[self._cache.group[table]]
            if fetch.whole is None or self._dims is None or self._dims[table] == width:
                yield table, ids, slots, width
                continue
            whole = fetch.whole[fetch.bounds[table] : fetch.bounds[table + 1]]
            for chosen, columns in ((whole, width), (~whole, self._dims[table])):
                if chosen.any():
                    yield table, ids[chosen], slots[chosen], columns

    def _rows_at_once(self) -> int:
        """So many of a plan may be on their way."""
        return max(1, staging.STAGED_ROWS * self._ahead // READERS**2)
