"""The oracle once more, with dictionaries and lists: slow, short, and meant to be obviously right.

It emits the same plans as `Oracle` and is compared with it plan by plan in the tests; nothing else uses it.
It knows the policies that the paper and the baselines have. Of others what `belady`, `frequency` and `lfu` choose has
short twins in tests/unit/policies; `scratchpipe`, `windowed` and `static` are tested by examples and what they promise.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from bagpipe.oracle.plan import Fetch, Plan, Victims
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies import POLICIES
from bagpipe.policies.lookahead import AUTO_MAX, RAMP

Row = tuple[int, int]
"""Table and id."""
KNOWN = ("lookahead", "lru", "nocache", "ideal")
"""Policies that it has."""


@dataclass
class _Batch:
    rows: list[Row] = field(default_factory=list)
    """Unique, table by table, in order of first occurrence."""
    inverse: list[list[int]] = field(default_factory=list)
    stays: dict[Row, int] = field(default_factory=dict)
    """The iteration until which a row stays."""
    shortest_refused: int | None = None


class SimpleOracle:
    """The twin of `Oracle`."""

    def __init__(
        self,
        tables: Sequence[OracleTable],
        capacity: Sequence[int],
        lookahead: int | str = 200,
        policy: str = "lookahead",
        ahead: int = 2,
    ) -> None:
        self.tables, self.capacity, self.policy, self.ahead = tables, capacity, policy, ahead
        self.keeps = policy in ("lru", "ideal")
        self.auto = lookahead == "auto"
        self.idle: list[Row] = []
        """Rows in the cache that are not granted a stay, those that were used longest ago first."""
        self.granted: dict[Row, tuple[int, int]] = {}
        """Rows that were idle, and stay: since which iteration, and until which."""
        self.target_max = {"lookahead": AUTO_MAX if self.auto else int(lookahead), "nocache": 1}.get(policy, 2)
        self.target = min(self.target_max, RAMP)
        self.step, self.patience = RAMP, 0
        self.refused = False
        self.horizon = POLICIES[policy].horizon
        self.batches: list[_Batch] = []
        self.num_emitted = 0
        self.slot_of: dict[Row, int] = {}
        self.evicted_by: dict[Row, int] = {}
        self.last_use: dict[Row, tuple[int, int]] = {}
        self.free = [deque((slot, -1) for slot in range(size)) for size in capacity]

    def plans(self, batches: Iterable[Sequence[Sequence[int]]]) -> Iterator[Plan]:
        """A plan for each batch of ids, one list a feature."""
        source = iter(batches)
        ended = False
        while True:
            while not ended and len(self.batches) - self.num_emitted < self.target:
                ids = next(source, None)
                if ids is None:
                    ended = True
                else:
                    self.read(ids)
            if len(self.batches) == self.num_emitted:
                return
            yield self.emit(ended)

    def read(self, ids: Sequence[Sequence[int]]) -> None:
        """Find the unique rows, and grant stays to those that are in the window already."""
        batch, features = _Batch(), iter(ids)
        for t, table in enumerate(self.tables):
            unique: dict[int, int] = {}
            for _ in table.features:
                batch.inverse.append([unique.setdefault(int(value), len(unique)) for value in next(features)])
            batch.rows += [(t, value) for value in unique]
        self.batches.append(batch)
        if self.policy == "lookahead":
            self.grant_stays(len(self.batches) - 1)

    def grant_stays(self, b: int) -> None:
        """From the shortest stay to the longest: is there a slot in every iteration between?"""
        previous_uses = []
        for row in self.batches[b].rows:
            uses = [p for p in range(self.num_emitted, b) if row in self.batches[p].rows]
            if uses:
                previous_uses.append((b - uses[-1], row))
            elif row in self.idle:
                previous_uses.append((b - self.num_emitted + 1, row))
        for gap, row in sorted(previous_uses, key=lambda use: (use[0], use[1][0])):
            group, p = self.tables[row[0]].group, b - gap
            crossed = range(p + 1, b)
            if any(self.load(y, group) >= self.capacity[group] for y in crossed) or any(
                self.load(y, group) + self.on_their_way(y, group) >= self.capacity[group]
                for y in crossed
                if y < b - self.ahead
            ):
                if row not in self.idle or p >= self.num_emitted:
                    self.refused = True
                    self.batches[p].shortest_refused = self.batches[p].shortest_refused or gap
            elif p < self.num_emitted:
                self.idle.remove(row)
                self.granted[row] = p, b
            else:
                self.batches[p].stays[row] = b

    def load(self, y: int, group: int) -> int:
        """Rows of iteration y, and those that stay across it."""
        across = [row for p in range(y) for row, b in self.batches[p].stays.items() if b > y]
        across += [row for row, (p, b) in self.granted.items() if p < y < b]
        return sum(self.tables[t].group == group for t, _ in self.batches[y].rows + across)

    def on_their_way(self, y: int, group: int) -> int:
        """Rows fetched for the next iterations."""
        soon = range(y + 1, min(y + self.ahead, len(self.batches) - 1) + 1)
        arriving = [row for z in soon for row in self.batches[z].rows if not self.stays_until(row, z)]
        return sum(self.tables[t].group == group for t, _ in arriving)

    def stays_until(self, row: Row, z: int) -> bool:
        """Whether some earlier use keeps the row until iteration z."""
        granted = row in self.granted and self.granted[row][1] == z
        return granted or any(self.batches[p].stays.get(row) == z for p in range(z))

    def emit(self, ended: bool) -> Plan:
        """Fetch what is not there, let go what does not stay."""
        x, window = self.num_emitted, len(self.batches) - self.num_emitted
        last = ended and window == 1
        batch = self.batches[x]
        absent = [row for row in batch.rows if row not in self.slot_of]
        victims = self.make_room(x, absent)
        fetch, after, slot_after = [], [], []
        for t, value in absent:
            slot, freed_by = self.free[self.tables[t].group].popleft()
            self.slot_of[t, value] = slot
            fetch.append((t, value, slot))
            after.append(max(self.evicted_by.get((t, value), -1), x - 1 - self.horizon, -1))
            slot_after.append(freed_by)
        for index, row in enumerate(batch.rows):
            self.last_use[row] = (x, index)
        rows = [(t, value, self.slot_of[t, value]) for t, value in batch.rows]
        leaving = [row for row in batch.rows if not self.keeps and row not in batch.stays]
        if self.auto and self.policy == "lookahead":
            leaving = self.let_idle(x, leaving, ended)
        if self.keeps and last:
            leaving = sorted(self.slot_of, key=lambda row: (row[0], self.slot_of[row]))
        evict = self.evict(leaving, x, freed_by=x)
        lookahead = 1 if self.policy != "lookahead" else min(window, batch.shortest_refused or window)
        self.num_emitted += 1
        self.advance()
        arrays = Fetch(*_arrays(fetch, self.tables), np.array(after, np.int32), np.array(slot_after, np.int32))
        evict_after = max([self.last_use[t, value][0] for t, value, _ in victims], default=-1)
        return Plan(
            x,
            RowList(*_arrays(rows, self.tables)),
            tuple(np.array(feature, np.int32) for feature in batch.inverse),
            arrays,
            RowList(*_arrays(evict, self.tables)),
            Victims(*_arrays(victims, self.tables), evict_after),
            lookahead,
            len(rows) - len(fetch),
        )

    def make_room(self, x: int, absent: list[Row]) -> list[tuple[int, int, int]]:
        """Least recently used rows of other batches, as many as slots are lacking."""
        victims = []
        for group in range(len(self.capacity)):
            lacking = sum(self.tables[t].group == group for t, _ in absent) - len(self.free[group])
            others = [
                row for row in self.slot_of if self.tables[row[0]].group == group and row not in self.batches[x].rows
            ]
            victims += sorted(others, key=lambda row: self.last_use[row])[: max(0, lacking)]
        return sorted(self.evict(victims, x, freed_by=-1), key=lambda victim: victim[0])

    def let_idle(self, x: int, leaving: list[Row], ended: bool) -> list[Row]:
        """Rows of batch x that were not granted a stay are idle; those that leave, as there is no room for so many."""
        gone = leaving if ended else []
        left = len(self.batches) - 1 - x
        self.idle = [row for row in self.idle if row not in self.batches[x].rows] + (leaving if not ended else [])
        for group, capacity in enumerate(self.capacity):
            own = [row for row in self.idle if self.tables[row[0]].group == group]
            room = max(0, capacity - self.load(x + 1, group) - self.on_their_way(x + 1, group)) if left else 0
            evenly = -(-len(own) // (left + 1)) if ended else 0
            gone = gone + own[: max(0, len(own) - room, evenly)]
        self.idle = [row for row in self.idle if row not in gone]
        return sorted(gone, key=lambda row: row[0])

    def evict(self, rows: list[Row], x: int, freed_by: int) -> list[tuple[int, int, int]]:
        """Give up the slots of these rows."""
        evicted = []
        for t, value in rows:
            slot = self.slot_of.pop((t, value))
            self.free[self.tables[t].group].append((slot, freed_by))
            self.evicted_by[t, value] = x
            evicted.append((t, value, slot))
        return evicted

    def advance(self) -> None:
        """The window grows by a step, or shrinks if it is "auto" and not everything fits."""
        if self.auto and self.refused:
            self.step, self.patience, self.target = 1, RAMP, max(1, self.target - 1)
        elif self.patience > 0:
            self.patience -= 1
        else:
            self.target = min(self.target_max, self.target + self.step)
        self.refused = False


def _arrays(
    rows: list[tuple[int, int, int]], tables: Sequence[OracleTable]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    bounds = np.searchsorted([t for t, _, _ in rows], np.arange(len(tables) + 1))
    ids = np.array([value for _, value, _ in rows], np.int64)
    return ids, np.array([slot for _, _, slot in rows], np.int32), bounds.astype(np.int64)
