"""The runtime checker (`check = true`): follows every row through cache and store and stops at the first wrong step.

It knows the version of a row (the last iteration that updated it) and a fingerprint of its bits in three places: as
training left it, in its slot, and in the store. A stale read, a lost or doubled write-back, a slot with two tenants, a
row that was evicted dirty and dropped, and any bit that changed on the way show as a difference (I3, I4).

Several trainers of one process have one ledger of all rows, and a checker each. That shows besides: a value that is
stale on any trainer, a gradient that updated no row or one twice, copies that differ, a row that two write back, a
vector that changed on its way to a peer. Trainers in processes of their own have no ledger in common, and are not
checked.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from bagpipe.cache import RowCache, TableRows
from bagpipe.errors import ConsistencyError
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.sync_plan import Routes

Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int32]
Key = tuple[int, int]
"""Table and id."""
Place = tuple[int, int]
"""Slot space and slot."""
NEVER = -1


class Value(NamedTuple):
    """A row as it was at some moment."""

    version: int
    """The last iteration that updated it."""
    vector: int
    """Fingerprint of its vector."""
    whole: int
    """Fingerprint of the vector and the optimizer state."""
    before: int = NEVER
    """The version that it was made from."""


@dataclass(slots=True)
class Copy:
    """What a slot of a trainer holds."""

    key: Key
    version: int
    vector: int
    whole: int | None
    """None: only the vector is there."""
    dirty: bool = False


@dataclass
class Ledger:
    """What the checkers of all trainers know together."""

    trainers: int
    owned: bool = False
    """Whether one trainer at a time updates a row."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    trained: dict[Key, Value] = field(default_factory=dict)
    """The newest value of each row that was updated, or read."""
    stored: dict[Key, Value] = field(default_factory=dict)
    stored_by: dict[Key, int] = field(default_factory=dict)
    """Which trainer wrote it."""
    due: dict[Key, int] = field(default_factory=dict)
    """The last iteration with a step that used each row."""
    leaving: dict[tuple[int, Key], Value] = field(default_factory=dict)
    """Rows on their way to the store."""
    given: dict[Key, bool] = field(default_factory=dict)
    """Rows on their way from one owner to another, and whether the store has something older."""
    sent: dict[tuple[str, int, int], list[Key]] = field(default_factory=dict)
    """What is on its way in an exchange of some name, from a trainer to another, in that order."""
    homes: list[dict[Key, Place]] = field(default_factory=list)
    """Where each trainer has last had each row that it updated."""
    copies: list[dict[Place, Copy]] = field(default_factory=list)
    finished: int = 0

    def __post_init__(self) -> None:
        self.copies = [{} for _ in range(self.trainers)]
        self.homes = [{} for _ in range(self.trainers)]


class Checker:
    """What one trainer does, as its pipeline and its exchanges tell; trusts nothing."""

    def __init__(
        self, names: Sequence[str], dims: Sequence[int], cache: RowCache, ledger: Ledger | None = None, rank: int = 0
    ) -> None:
        """`dims` are the lengths of the tables' vectors; without a ledger there is one trainer."""
        self._names, self._dims, self._cache = names, dims, cache
        self._ledger, self._rank = ledger or Ledger(1), rank
        self._alone = self._ledger.trainers == 1
        self._copies = self._ledger.copies[rank]
        self._here: dict[Key, Place] = {}
        """Of the only trainer: where each row is."""
        self._fetched: dict[Key, Copy] = {}
        self._iteration = NEVER
        self._in_use: dict[Place, Key] = {}
        """The rows that the forward and backward passes of an iteration read, while it is in training."""
        self.checked_rows = 0

    def fetched(self, plan: Plan, rows: TableRows) -> None:
        """Rows were read from the store, whole or their vectors: as they were written last, and not on their way."""
        ledger = self._ledger
        with ledger.lock:
            for row, value in zip(rows.ids.tolist(), rows.values, strict=True):
                key = (rows.table, row)
                for other in range(ledger.trainers):
                    if (other, key) in ledger.leaving:
                        version = ledger.leaving[other, key].version
                        whose = "its" if self._alone else f"trainer {other}'s"
                        what = f"is read while {whose} write-back of iteration {version} is in flight"
                        self._fail(plan, key, what)
                vector, whole = fingerprint(value[: self._dims[rows.table]]), None
                if len(value) == self._width(rows.table):
                    whole = fingerprint(value)
                stored = ledger.stored.get(key)
                newest = ledger.trained.get(key)
                if newest is None or newest.version == NEVER:
                    newest = self._first_value(plan, key, vector, whole)
                elif stored is None or stored.version != newest.version:
                    self._fail(plan, key, f"is stale in the store: {_named(stored)}, trained {_named(newest)}")
                elif vector != stored.vector or whole not in (None, stored.whole):
                    self._fail(plan, key, "was read with other bits than were written")
                self._fetched[key] = Copy(key, newest.version, vector, whole)

    def _first_value(self, plan: Plan, key: Key, vector: int, whole: int | None) -> Value:
        """All trainers must be given the same; who reads the whole row says what its state is."""
        first = self._ledger.trained.get(key, Value(NEVER, vector, 0))
        if first.vector != vector or (whole is not None and first.whole not in (0, whole)):
            self._fail(plan, key, "was read with another first value than by another trainer")
        self._ledger.trained[key] = first._replace(whole=whole or first.whole)
        return self._ledger.trained[key]

    def inserted(self, plan: Plan, table: int, ids: Ids, slots: Slots) -> None:
        """Rows take slots, in which no update may wait to be written."""
        with self._ledger.lock:
            for row, place in zip(ids.tolist(), self._places(table, slots), strict=True):
                key = (table, row)
                if key in self._here:
                    self._fail(plan, key, f"is put into slot {place[1]} while it is in {self._here[key][1]}")
                if key not in self._fetched:
                    self._fail(plan, key, f"is put into slot {place[1]} without having been fetched")
                self._settle(plan, place, self._fetched.pop(key))
                if self._alone:
                    self._here[key] = place

    def sent(self, send: Routes, what: str) -> None:
        """Vectors are about to go to peers in an exchange: this trainer has them, and they are the newest."""
        ledger = self._ledger
        with ledger.lock:
            for receiver in range(ledger.trainers):
                keys = ledger.sent[what, self._rank, receiver] = []
                for table, slots in send.of(receiver):
                    for place in self._places(table, slots):
                        copy = self._copies.get(place)
                        if copy is None or copy.key[0] != table:
                            self._fail(None, (table, -1), f"goes from slot {place[1]}, where it is not")
                        newest = ledger.trained[copy.key]
                        if copy.version != newest.version:
                            was = f"version {copy.version}, trained version {newest.version}"
                            self._fail(None, copy.key, f"goes stale to trainer {receiver}: {was}")
                        keys.append(copy.key)

    def received(self, receive: Routes, sender: int, what: str) -> None:
        """Vectors of a peer have come: what it has sent, the newest, with the bits that its owner gave them."""
        ledger = self._ledger
        with ledger.lock:
            keys = iter(ledger.sent.pop((what, sender, self._rank), ()))
            for table, slots in receive.of(sender):
                for place in self._places(table, slots):
                    key = next(keys, None)
                    if key is None or key[0] != table:
                        self._fail(None, (table, -1), f"is expected from trainer {sender}, who has not sent it")
                    newest = ledger.trained[key]
                    vector = self._fingerprints(place, key)[0]
                    if vector != newest.vector:
                        self._fail(None, key, f"came from trainer {sender} with other bits than it has there")
                    self._settle(None, place, Copy(key, newest.version, vector, None))
            if (left := next(keys, None)) is not None:
                self._fail(None, left, f"was sent by trainer {sender} and is not expected")

    def gave(self, moved: Routes) -> None:
        """Rows go to other owners: this trainer had them, and does not write them any more."""
        ledger = self._ledger
        with ledger.lock:
            for table, slots in _all_of(moved):
                for place in self._places(table, slots):
                    copy = self._copies.get(place)
                    if copy is None or copy.whole is None:
                        self._fail(None, (table, -1), f"is given away from slot {place[1]}, where it is not owned")
                    if copy.key in ledger.given:
                        self._fail(None, copy.key, "is given away twice")
                    ledger.given[copy.key] = copy.dirty
                    copy.dirty = False

    def took(self, moved: Routes, ids: Ids) -> None:
        """Rows have come with their state, as their owner left them, and are this trainer's to write."""
        ledger, rows = self._ledger, iter(ids.tolist())
        with ledger.lock:
            for table, slots in _all_of(moved):
                for place in self._places(table, slots):
                    key, copy, newest = (table, next(rows)), self._copies[place], ledger.trained
                    if copy.key != key or key not in ledger.given:
                        self._fail(None, key, f"is taken in slot {place[1]} without having been given away")
                    dirty, whole = ledger.given.pop(key), self._fingerprints(place, key)[1]
                    if bool(self._cache.dirty[place[0]][place[1]]) != dirty:
                        self._fail(None, key, f"is {'not ' if dirty else ''}to be written after it changed its owner")
                    if newest[key].whole not in (0, whole):
                        self._fail(None, key, "came to its new owner with another state than it had")
                    copy.whole, copy.dirty = whole, dirty
                    ledger.homes[self._rank][key] = place

    def training(self, plan: Plan) -> None:
        """A batch is about to be trained: its rows are in their slots, as the last update, wherever, left them."""
        with self._ledger.lock:
            for key, place in self._rows(plan):
                copy, newest = self._copies.get(place), self._ledger.trained.get(key)
                if copy is None or copy.key != key or newest is None:
                    there = "nothing" if copy is None else self._name(copy.key)
                    self._fail(plan, key, f"should be in slot {place[1]}, where {there} is")
                if self._ledger.due.get(key, NEVER) > newest.version:
                    self._fail(plan, key, f"was not updated at iteration {self._ledger.due[key]}")
                if copy.version != newest.version:
                    was = f"{_named(copy)}, trained {_named(newest)}"
                    self._fail(plan, key, f"is stale in the cache: {was}")
                self._check_bits(plan, place, copy)
                if copy.vector != newest.vector:
                    self._fail(plan, key, "differs from other trainers' copies")
                self.checked_rows += 1
            self._iteration = plan.iteration
            self._in_use = {} if self._alone else {place: key for key, place in self._rows(plan)}

    def left(self) -> None:
        """The iteration is over: nobody reads its rows any more."""
        with self._ledger.lock:
            self._in_use = {}

    def updated(self, plan: Plan, tables: Sequence[int]) -> None:
        """All trainers make a step: every row of the batch is due for one update, by whoever has it, which of the only
        trainer is made now."""
        with self._ledger.lock:
            for key, _ in self._rows(plan):
                if key[0] in tables:
                    self._ledger.due[key] = max(plan.iteration, self._ledger.due.get(key, NEVER))
        for table in tables if self._alone else ():
            self.applied(plan.iteration, table, *plan.rows.of_table(table))

    def applied(self, iteration: int, table: int, ids: Ids, slots: Slots) -> None:
        """This trainer has updated rows: the newest value of each, once, and as others did who have copies."""
        trained = self._ledger.trained
        with self._ledger.lock:
            for row, place in zip(ids.tolist(), self._places(table, slots), strict=True):
                key, copy = (table, row), self._copies.get(place)
                if copy is None:
                    continue  # it leaves with this iteration and another trainer writes it: nobody reads this copy
                if copy.key != key:
                    self._fail(None, key, f"is updated in slot {place[1]}, where {self._name(copy.key)} is")
                newest = trained[key]
                others_first = newest.version == iteration and not self._alone
                if copy.version == iteration and not self._alone:  # who may step more than once for a batch
                    self._fail(None, key, f"is updated twice at iteration {iteration}")
                if copy.version != (newest.before if others_first else newest.version):
                    self._fail(None, key, f"is updated at iteration {iteration} from stale version {copy.version}")
                vector, whole = self._fingerprints(place, key)
                if others_first and (vector, whole) != (newest.vector, newest.whole):
                    self._fail(None, key, f"differs from other trainers' copies after iteration {iteration}")
                trained[key] = Value(iteration, vector, whole, copy.version)
                self._copies[place] = Copy(key, iteration, vector, whole, dirty=True)
                self._ledger.homes[self._rank][key] = place

    def dropped(self, table: int, ids: Ids, slots: Slots) -> None:
        """Copies of rows that another trainer writes back are given up."""
        with self._ledger.lock:
            for row, place in zip(ids.tolist(), self._places(table, slots), strict=True):
                copy = self._copies.get(place)
                if copy is not None and copy.key == (table, row):
                    del self._copies[place]

    def copied_out(self, table: int, ids: Ids, slots: Slots, rows: TableRows) -> None:
        """Rows leave their slots: those with an update must be among the ones that will be written."""
        leaving = set(rows.ids.tolist())
        with self._ledger.lock:
            for row, place in zip(ids.tolist(), self._places(table, slots), strict=True):
                key, copy = (table, row), self._copies.pop(place, None)
                if copy is None or copy.key != key:
                    self._fail(None, key, f"leaves slot {place[1]} without having been there")
                self._here.pop(key, None)
                if copy.dirty and row not in leaving:
                    self._fail(None, key, f"is evicted and its update of iteration {copy.version} dropped")
                self._check_alone(key)
                if row in leaving:
                    self._leaves(copy)

    def copied(self, rows: TableRows) -> None:
        """Updated rows will be written and stay in their slots: clean from now on."""
        with self._ledger.lock:
            places = {copy.key: place for place, copy in self._copies.items() if copy.dirty}  # others may be old ones
            for row in rows.ids.tolist():
                key = (rows.table, row)
                if key not in places:
                    self._fail(None, key, "is written by a barrier without being here")
                copy = self._copies[places[key]]
                self._leaves(copy)
                copy.dirty = False

    def flushed(self) -> None:
        """A barrier has copied what this trainer writes. What else counts as written, another trainer must have."""
        ledger = self._ledger
        with ledger.lock:
            for place, copy in self._copies.items():
                if not copy.dirty or self._cache.dirty[place[0]][place[1]]:
                    continue
                copy.dirty = False
                known = [ledger.leaving.get((other, copy.key)) for other in range(ledger.trainers)]
                known.append(ledger.stored.get(copy.key))
                written = any(value is not None and value.version == copy.version for value in known)
                writer = ledger.copies[place[1] % ledger.trainers].get(place)  # may have to make the update still
                if not written and (writer is None or writer is copy or writer.key != copy.key):
                    self._fail(None, copy.key, f"is not written by a barrier: nobody else has version {copy.version}")

    def written(self, rows: TableRows) -> None:
        """The store has rows: each update once, as it left training."""
        ledger = self._ledger
        with ledger.lock:
            for row, values in zip(rows.ids.tolist(), rows.values, strict=True):
                key = (rows.table, row)
                due, stored = ledger.leaving.pop((self._rank, key), None), ledger.stored.get(key)
                if due is None and stored is None:
                    self._fail(None, key, "is written without having left the cache")
                if due is None or (stored is not None and due.version <= stored.version):
                    assert stored is not None
                    was = f"the store has iteration {stored.version} of trainer {ledger.stored_by[key]}"
                    self._fail(None, key, f"is written twice: {was}")
                if due.whole != fingerprint(values):
                    self._fail(None, key, f"is written with other bits than its update of iteration {due.version} gave")
                ledger.stored[key], ledger.stored_by[key] = due, self._rank

    def finished(self) -> None:
        """This trainer is through. When all are, the store must have every update."""
        ledger = self._ledger
        with ledger.lock:
            ledger.finished += 1
            if ledger.finished < ledger.trainers:
                return
            for key in ledger.given:
                self._fail(None, key, "was given away and nobody took it")
            for key, version in ledger.due.items():
                trained, stored = ledger.trained[key], ledger.stored.get(key)
                if trained.version != version:
                    self._fail(None, key, f"was not updated at iteration {version}: it has version {trained.version}")
                if stored != trained:
                    self._fail(None, key, f"was updated at iteration {version}; the store has {_named(stored)}")

    def _settle(self, plan: Plan | None, place: Place, copy: Copy) -> None:
        """A row takes a slot. What is not this trainer's to write may be there still: who writes it lets it go."""
        there, read = self._copies.get(place), self._in_use.get(place, copy.key)
        if read != copy.key:
            what = f"is put into slot {place[1]}, where iteration {self._iteration} reads {self._name(read)}"
            self._fail(plan, copy.key, what)
        if there is not None and (there.dirty or self._alone):
            why = "waits to be written" if there.dirty else "still lives"
            self._fail(plan, copy.key, f"is put into slot {place[1]}, where {self._name(there.key)} {why}")
        self._copies[place] = copy

    def _check_alone(self, key: Key) -> None:
        """Of a row that has one owner nobody else may have an update to write."""
        for other, homes in enumerate(self._ledger.homes if self._ledger.owned else ()):
            theirs = self._ledger.copies[other].get(homes[key]) if key in homes else None
            if other != self._rank and theirs is not None and theirs.key == key and theirs.dirty:
                self._fail(None, key, f"leaves while trainer {other} has an update of it to write too")

    def _leaves(self, copy: Copy) -> None:
        newest = self._ledger.trained[copy.key]
        if copy.version != newest.version:
            was = f"version {copy.version}, trained version {newest.version}"
            self._fail(None, copy.key, f"leaves stale for the store: {was}")
        self._ledger.leaving[self._rank, copy.key] = newest

    def _check_bits(self, plan: Plan, place: Place, copy: Copy) -> None:
        vector, whole = self._fingerprints(place, copy.key)
        if vector != copy.vector or copy.whole not in (None, whole):
            self._fail(plan, copy.key, f"has changed in slot {place[1]} since {_named(copy)}")

    def _fingerprints(self, place: Place, key: Key) -> tuple[int, int]:
        """Of what is in a slot now: the vector, and all of it."""
        row = self._cache.data[place[0]][place[1]].cpu().numpy()
        return fingerprint(row[: self._dims[key[0]]]), fingerprint(row)

    def _rows(self, plan: Plan) -> list[tuple[Key, Place]]:
        """The rows of a batch, and where they should be."""
        found: list[tuple[Key, Place]] = []
        for table in range(len(self._names)):
            ids, slots = plan.rows.of_table(table)
            keys = [(table, row) for row in ids.tolist()]
            found += zip(keys, self._places(table, slots), strict=True)
        return found

    def _places(self, table: int, slots: Slots) -> list[Place]:
        return [(self._cache.group[table], slot) for slot in slots.tolist()]

    def _width(self, table: int) -> int:
        return self._cache.widths[self._cache.group[table]]

    def _name(self, key: Key) -> str:
        return f"row {key[1]} of table {self._names[key[0]]!r}"

    def _fail(self, plan: Plan | None, key: Key, what: str) -> NoReturn:
        when = f"after iteration {self._iteration}" if plan is None else f"iteration {plan.iteration}"
        who = "" if self._alone else f"trainer {self._rank}, "
        raise ConsistencyError(f"{who}{when}: {self._name(key)} {what}; this is a defect of bagpipe, please report it")


def _named(value: Value | Copy | None) -> str:
    return "its initial value" if value is None or value.version == NEVER else f"version {value.version}"


def fingerprint(value: npt.NDArray[np.float32]) -> int:
    """One number for all bits."""
    return zlib.crc32(value.tobytes())


def _all_of(lists: Routes) -> Iterator[tuple[int, Slots]]:
    """The parts of all trainers' lists: table, slots."""
    for rank in range(len(lists.bounds)):
        yield from lists.of(rank)
