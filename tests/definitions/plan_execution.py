"""Executes plans on symbolic values, with stages in any order that the three waits allow.

A row's value is the tuple of iterations that updated it, so a stale read, a lost update and a doubled one all show. A
schedule is a function that picks one of the events that may happen now; waits can be switched off one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from bagpipe.oracle.plan import Plan
from bagpipe.oracle.row_list import RowList

Row = tuple[int, int]
Event = tuple[str, int, int]
"""Stage, iteration, position in the stage's list."""
Schedule = Callable[[list[Event]], Event]


class Corruption(Exception):
    """A row was trained with, or ended with, a value that is not the one of synchronous training."""


@dataclass(frozen=True)
class Waits:
    """Which waits the executor keeps."""

    updated: bool = True
    copied_out: bool = True
    acknowledged: bool = True
    watermark: bool = True
    """False: a plan's fetch waits for the write-back of its latest `after` only, not for those before it."""


def listed(rows: RowList, groups: Sequence[int]) -> list[tuple[Row, tuple[int, int]]]:
    """(table, id) and (group, slot) of each row."""
    return [
        ((t, int(row)), (groups[t], int(slot)))
        for t in range(len(groups))
        for row, slot in zip(*rows.of_table(t), strict=True)
    ]


@dataclass
class Execution:
    """One run of a list of plans."""

    plans: list[Plan]
    groups: Sequence[int]
    """The group of each table."""
    waits: Waits = field(default_factory=Waits)

    def __post_init__(self) -> None:
        self.rows = [listed(plan.rows, self.groups) for plan in self.plans]
        self.fetch = [listed(plan.fetch, self.groups) for plan in self.plans]
        self.out = {
            "evict": [listed(plan.evict, self.groups) for plan in self.plans],
            "victims": [listed(plan.victims, self.groups) for plan in self.plans],
        }
        self.store: dict[Row, tuple[int, ...]] = {}
        self.cache: dict[tuple[int, int], tuple[Row, tuple[int, ...]]] = {}
        self.expected: dict[Row, tuple[int, ...]] = {}
        self.read: dict[tuple[int, int], tuple[int, ...]] = {}
        self.in_flight: dict[Event, tuple[int, ...]] = {}
        self.done: set[Event] = set()
        self.num_done: Counter[tuple[str, int]] = Counter()
        self.num_acknowledged = 0
        """Iterations up to which all are acknowledged."""
        self.num_trained = self.num_updated = self.num_prefetched = 0

    def run(self, schedule: Schedule) -> None:
        """Until nothing is left; raises `Corruption`, or AssertionError if the waits never end."""
        todo = self._all_events()
        while todo:
            ready = [event for event in todo if self._may_happen(event)]
            assert ready, f"deadlock: {todo[:10]} wait for ever"
            event = schedule(ready)
            self._happen(event)
            todo.remove(event)
            self.done.add(event)
            self.num_done[event[:2]] += 1
            while self.num_acknowledged < len(self.plans) and self._acknowledged(self.num_acknowledged):
                self.num_acknowledged += 1
        for row, value in self.expected.items():
            if self.store.get(row, ()) != value:
                raise Corruption(f"row {row} ends as {self.store.get(row, ())}, not {value}")

    def _all_events(self) -> list[Event]:
        return [event for x in range(len(self.plans)) for event in self._events_of(x)]

    def _events_of(self, x: int) -> Iterator[Event]:
        yield from (("read", x, i) for i in range(len(self.fetch[x])))
        yield from (("insert", x, i) for i in range(len(self.fetch[x])))
        yield ("prefetched", x, 0)
        yield ("train", x, 0)
        yield from (("update", x, i) for i in range(len(self.rows[x])))
        yield ("updated", x, 0)
        for kind, lists in self.out.items():
            yield from ((f"copy {kind}", x, i) for i in range(len(lists[x])))
            yield from ((f"write {kind}", x, i) for i in range(len(lists[x])))

    def _all_done(self, stage: str, x: int, count: int) -> bool:
        return self.num_done[stage, x] == count

    def _acknowledged(self, x: int) -> bool:
        return x < self.num_updated and all(
            self._all_done(f"write {kind}", x, len(lists[x])) for kind, lists in self.out.items()
        )

    def _may_happen(self, event: Event) -> bool:
        stage, x, i = event
        plan = self.plans[x]
        match stage.split():
            case ["read"]:
                return self._may_read(plan, i)
            case ["insert"]:
                freed_by = int(plan.fetch.slot_after[i])
                return (
                    ("read", x, i) in self.done
                    and x == self.num_prefetched
                    and self._all_done("copy victims", x, len(plan.victims))
                    and (freed_by < 0 or not self.waits.copied_out or self._copied_out(freed_by))
                    and (not plan.capacity or all(self._copied_out(before) for before in range(x)))
                )
            case ["prefetched"]:
                return x == self.num_prefetched and self._all_done("insert", x, len(plan.fetch))
            case ["train"]:
                return x == self.num_trained < self.num_prefetched and not self._has_pending(x)
            case ["update"]:
                return x < self.num_trained
            case ["updated"]:
                return x == self.num_updated and self._all_done("update", x, len(plan.rows))
            case ["copy", "victims"]:
                return x == self.num_prefetched and self._is_updated(plan.victims.evict_after)
            case ["copy", _]:
                return self._is_updated(x) if self.waits.updated else x < self.num_prefetched
            case ["write", kind]:
                return (f"copy {kind}", x, i) in self.done
        raise AssertionError(stage)

    def _may_read(self, plan: Plan, i: int) -> bool:
        if not self.waits.acknowledged:
            return True
        if not self.waits.watermark:
            latest = int(plan.fetch.after.max())
            return latest < 0 or self._acknowledged(latest)
        return int(plan.fetch.after[i]) < self.num_acknowledged

    def _is_updated(self, x: int) -> bool:
        return x < self.num_updated or not self.waits.updated

    def _copied_out(self, x: int) -> bool:
        return self._all_done("copy evict", x, len(self.plans[x].evict))

    def _has_pending(self, x: int) -> bool:
        """Delayed updates of rows that this iteration needs."""
        mine = {row for row, _ in self.rows[x]}
        return any(
            row in mine and ("update", y, i) not in self.done
            for y in range(self.num_updated, x)
            for i, (row, _) in enumerate(self.rows[y])
        )

    def _happen(self, event: Event) -> None:
        stage, x, i = event
        match stage.split():
            case ["read"]:
                self.read[x, i] = self.store.get(self.fetch[x][i][0], ())
            case ["insert"]:
                row, slot = self.fetch[x][i]
                self.cache[slot] = (row, self.read[x, i])
            case ["prefetched"]:
                self.num_prefetched += 1
            case ["train"]:
                self._train(x)
            case ["update"]:
                row, slot = self.rows[x][i]
                self.cache[slot] = (self.cache[slot][0], (*self.cache[slot][1], x))
            case ["updated"]:
                self.num_updated += 1
            case ["copy", kind]:
                self.in_flight[kind, x, i] = self.cache.get(self.out[kind][x][i][1], (None, ()))[1]
            case ["write", kind]:
                self.store[self.out[kind][x][i][0]] = self.in_flight.pop((kind, x, i))

    def _train(self, x: int) -> None:
        for row, slot in self.rows[x]:
            if self.cache.get(slot) != (row, self.expected.get(row, ())):
                raise Corruption(f"iteration {x} finds {self.cache.get(slot)} for row {row}: {self.expected.get(row)}")
            self.expected[row] = (*self.expected.get(row, ()), x)
        self.num_trained += 1


def any_order(random: object) -> Schedule:
    """Each event that may happen is as likely as any other."""
    return lambda ready: random.choice(ready)  # type: ignore[attr-defined]


def preferring(*stages: str) -> Schedule:
    """The first of these stages that may happen, as early as it may; all others in the order of iterations."""

    def pick(ready: list[Event]) -> Event:
        for stage in stages:
            for event in ready:
                if event[0].startswith(stage):
                    return event
        return ready[0]

    return pick


def delaying(*stages: str) -> Schedule:
    """Everything else first, and of these stages the latest iteration first."""

    def pick(ready: list[Event]) -> Event:
        others = [event for event in ready if not event[0].startswith(stages)]
        return others[0] if others else ready[-1]

    return pick


ADVERSARIES: dict[str, Schedule] = {
    "reads as early as they may": preferring("read", "insert"),
    "write-backs as late as they may": delaying("write"),
    "write-backs late, younger before older": delaying("write", "copy"),
    "copies late, reads early": delaying("copy"),
    "updates late": delaying("update"),
    "copies as early as they may": preferring("copy", "write"),
    "reads late": delaying("read"),
}
