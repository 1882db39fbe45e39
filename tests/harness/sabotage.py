"""Defects put in on purpose at the seams of the system, to see that tests and the run-time checker notice them.

Exactness is data: a wait is switched off by editing the plans, a lost, old or mixed-up row comes from a store that
misbehaves, a wrong gradient or vector from a group that does. Nothing of the loop itself is replaced: a `Sabotage` says
what goes between the parts when a loop is made (`harness.trainers` takes one).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np

from bagpipe import together, world
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sync_plan import Routes
from bagpipe.server.server import EmbeddingServer
from bagpipe.store import MemoryStore
from bagpipe.trainer.pipeline import Pipeline
from bagpipe.trainer.row_sync import FLAGS
from bagpipe.trainer.stages import Wait
from harness.collectives import strict_groups


@dataclass(frozen=True)
class Sabotage:
    """What goes between the parts of a training loop, each None: nothing."""

    plans: Callable[[int, Iterator[Any]], Iterator[Any]] | None = None
    """From a trainer's rank and its (plan, batches) to those that it gets."""
    store: Callable[[Any], Any] | None = None
    """Opens a store for layouts of rows."""
    group: Callable[[Any], Any] | None = None
    """From one end of a group of trainers to what the trainer gets of it."""

    @contextmanager
    def between_the_parts(self):
        """Loops that are made meanwhile have their plans and groups from here."""
        edit, local, shared = self.plans, world.LocalPlans, together.SharedPlans

        def all_ends(*arguments):
            ends = strict_groups(*arguments)
            return ends if self.group is None else [self.group(end) for end in ends]

        with (
            mock.patch.object(world, "LocalPlans", lambda *made, **more: _EditedPlans(local(*made, **more), edit, 0)),
            mock.patch.object(together, "SharedPlans", lambda *made: _EditedOfAll(shared(*made), edit)),
            mock.patch.object(together, "memory_groups", all_ends),
        ):
            yield


NOTHING = Sabotage()


class _EditedOfAll:
    """The plans of several trainers."""

    def __init__(self, shared, edit):
        self._shared, self._edit = shared, edit

    def of(self, rank):
        return _EditedPlans(self._shared.of(rank), self._edit, rank)

    def __getattr__(self, name):
        return getattr(self._shared, name)


class _EditedPlans:
    """A source of plans that others have edited."""

    def __init__(self, source, edit, rank):
        self._source, self._edit, self._rank = source, edit, rank

    def epoch(self, traffic):
        return self._edited(self._source.epoch(traffic))

    def _edited(self, stream):
        try:
            yield from stream if self._edit is None else self._edit(self._rank, stream)
        finally:
            stream.close()

    def __getattr__(self, name):
        return getattr(self._source, name)


# Plans


def each_plan(change) -> Sabotage:
    """An edit that looks at one plan at a time: from rank and plan to plan."""
    return Sabotage(plans=lambda rank, items: ((change(rank, plan), batches) for plan, batches in items))


def _of_fetch(plan, **arrays):
    return replace(plan, fetch=replace(plan.fetch, **arrays))


@each_plan
def fetches_do_not_wait(_, plan):
    """Wait 3, left out: a row is read though its write-back may be on its way."""
    return _of_fetch(plan, after=np.full_like(plan.fetch.after, -1))


@each_plan
def fetches_wait_for_one_less(_, plan):
    """Wait 3, off by one: as if an iteration were acknowledged before its rows are in the store."""
    return _of_fetch(plan, after=np.maximum(plan.fetch.after - 1, -1).astype(np.int32))


@each_plan
def insertions_do_not_wait(_, plan):
    """Wait 2, left out: a slot is taken whose tenant is still there."""
    return _of_fetch(plan, slot_after=np.full_like(plan.fetch.slot_after, -1))


@each_plan
def victims_do_not_wait(_, plan):
    """Wait 1, left out: victims are copied out before their last update."""
    return replace(plan, victims=replace(plan.victims, evict_after=min(plan.victims.evict_after, 0)))


@each_plan
def fetched_rows_are_mixed_up(_, plan):
    """Rows of one table take each other's slots."""
    return _of_fetch(plan, slots=_reversed_in_first_table(plan.fetch))


@each_plan
def other_slots_are_named(_, plan):
    """A batch uses each other's rows."""
    rows = plan.rows
    return replace(plan, rows=RowList(rows.ids, _reversed_in_first_table(rows), rows.bounds))


@each_plan
def a_fetch_is_left_out(_, plan):
    """A row is used that never came."""
    return replace(plan, fetch=plan.fetch.only(np.arange(len(plan.fetch)) != 0)) if plan.iteration == 3 else plan


@each_plan
def an_eviction_is_left_out(_, plan):
    """A row stays in a slot that is given to another."""
    return replace(plan, evict=_without_first(plan.evict)) if plan.iteration >= 2 else plan


@each_plan
def victims_are_left_out(_, plan):
    """The same of rows that make room."""
    return replace(plan, victims=_emptied(plan.victims))


@each_plan
def a_row_is_written_by_nobody(rank, plan):
    """A trainer takes rows for another one's to write."""
    if rank != 1:
        return plan
    drop = plan.evict.joined(plan.sync.drop)
    return replace(plan, evict=_emptied(plan.evict), sync=replace(plan.sync, drop=drop))


@each_plan
def a_row_is_written_by_two(_, plan):
    """A trainer takes another one's rows for its own to write."""
    evict = plan.evict.joined(plan.sync.drop)
    return replace(plan, evict=evict, sync=replace(plan.sync, drop=_emptied(plan.sync.drop)))


@each_plan
def copies_are_not_given_up(_, plan):
    """A trainer keeps copies of rows that another one has written."""
    sync = plan.sync
    return replace(plan, sync=replace(sync, drop=_emptied(sync.drop), drop_victims=_emptied(sync.drop_victims)))


@each_plan
def delayed_vectors_are_not_sent(_, plan):
    """Trainers agree that nothing is to be sent beside the next iteration."""
    values = plan.sync.later_values
    parts = {name: _no_entries(getattr(values, name)) for name in ("send", "receive")}
    values = replace(values, **parts, ids=values.ids[:0])
    return replace(plan, sync=replace(plan.sync, later_values=values))


@each_plan
def one_owner_leaves_out_updates(rank, plan):
    """A trainer does not ask for gradients of rows that it owns, and the others send none."""

    def without(gradients):
        receive = _no_entries(gradients.receive) if rank == 1 else gradients.receive
        return replace(gradients, receive=receive, send=_without_list(gradients.send, 1))

    sync = plan.sync
    if plan.iteration < 2:
        return plan
    if rank == 1:
        sync = replace(sync, updated=_emptied(sync.updated), later_updated=_emptied(sync.later_updated))
    gradients, later = without(sync.gradients), without(sync.later_gradients)
    return replace(plan, sync=replace(sync, gradients=gradients, later_gradients=later))


@each_plan
def rows_are_updated_twice(_, plan):
    """The gradients of an iteration are added up and applied again beside the next one."""
    sync = plan.sync
    twice = replace(sync, later_gradients=sync.gradients, later_updated=sync.updated)
    return replace(plan, sync=twice) if plan.iteration == 3 else plan


@each_plan
def one_copy_is_not_updated(rank, plan):
    """One of all the trainers that have copies of rows leaves them as they are."""
    if rank != 2:
        return plan
    sync = plan.sync
    gradients = replace(sync.gradients, receive=_no_entries(sync.gradients.receive))
    return replace(plan, sync=replace(sync, gradients=gradients, updated=_emptied(sync.updated)))


def _rows_leave_an_iteration_early(_, items):
    """The stay of rows ends one iteration too soon: rows that the next batch needs are evicted."""
    done, last = False, None
    for plan, batches in items:
        if last is not None:
            before, its_batches = last
            stays = ~np.isin(plan.evict.slots, plan.fetch.slots)
            if not done and stays.any():
                before, done = replace(before, evict=before.evict.joined(_chosen(plan.evict, stays))), True
                plan = replace(plan, evict=_chosen(plan.evict, ~stays))
            yield before, its_batches
        last = plan, batches
    if last is not None:
        yield last


rows_leave_an_iteration_early = Sabotage(plans=_rows_leave_an_iteration_early)


def _plans_change_places(rank, items):
    """A trainer takes the plan that comes first: two of them are exchanged."""
    first = list(itertools.islice(items, 5))
    if rank == 1 and len(first) == 5:
        first[3:] = first[:2:-1]
    yield from first
    yield from items


plans_change_places = Sabotage(plans=_plans_change_places)


def _reversed_in_first_table(rows):
    slots, end = rows.slots.copy(), int(rows.bounds[1])
    slots[:end] = slots[:end][::-1]
    return slots


def _chosen(rows, chosen):
    bounds = np.concatenate([[0], np.cumsum(chosen)])[rows.bounds]
    return replace(rows, ids=rows.ids[chosen], slots=rows.slots[chosen], bounds=bounds)


def _without_first(rows):
    return _chosen(rows, np.arange(len(rows)) != 0)


def _emptied(rows):
    return _chosen(rows, np.zeros(len(rows), np.bool_))


def _no_entries(lists):
    return Routes(lists.items[:0], np.zeros_like(lists.bounds))


def _without_list(lists, rank):
    """The lists of all trainers but one, whose own is empty."""
    parts, bounds, start = [], np.zeros_like(lists.bounds), 0
    for number, own in enumerate(lists.bounds):
        length = 0 if number == rank else int(own[-1] - own[0])
        parts.append(lists.items[own[0] : own[0] + length])
        bounds[number] = start + (0 if number == rank else own - own[0])
        start += length
    return Routes(np.concatenate(parts), bounds)


# Stores


class Faulty(MemoryStore):
    """A store with a defect in what it writes or what it answers; `writes` counts those that had rows."""

    writes = 0

    def write_many(self, parts, passed=-1):
        parts = [(table, ids, values.copy()) for table, ids, values in parts if len(ids)]
        if parts:
            self.writes += 1
            parts = self.to_write(parts)
        super().write_many(parts, passed)

    def read_many(self, parts, after=-1):
        super().read_many(parts, after)
        for part in parts:
            self.answered(*part)

    def to_write(self, parts):
        """What is written instead."""
        return parts

    def answered(self, table, ids, out):
        """Changes an answer."""

    def held(self, table, ids):
        """The rows as they are."""
        out = np.empty((len(ids), self.tables[table].width), np.float32)
        self.read(table, ids, out)
        return out


class LosesAWrite(Faulty):
    def to_write(self, parts):
        return [] if self.writes == 4 else parts


class WritesLate(Faulty):
    """Each write is there when the next one comes; the last one never."""

    waiting: Iterable[Any] = ()

    def to_write(self, parts):
        self.waiting, parts = parts, self.waiting
        return parts


class WritesOldValues(Faulty):
    """Those of the write before."""

    def __init__(self, layouts):
        super().__init__(layouts)
        self.given = {}

    def to_write(self, parts):
        for table, ids, values in parts:
            for row, value in zip(ids.tolist(), values, strict=True):
                self.given[table, row], value[:] = value.copy(), self.given.get((table, row), value)
        return parts


class WritesAgain(Faulty):
    """A copy of a write comes late, over what was written since."""

    def __init__(self, layouts):
        super().__init__(layouts)
        self.copies = []

    def to_write(self, parts):
        self.copies.append(parts)
        if len(self.copies) <= 3:
            return parts
        MemoryStore.write_many(self, parts)
        return self.copies.pop(0)


class SwapsRows(Faulty):
    """Two rows of a write change places."""

    def to_write(self, parts):
        return [(table, ids, np.concatenate([values[1::-1], values[2:]])) for table, ids, values in parts]


class TearsRows(Faulty):
    """Vectors are written, and optimizer states stay as they were."""

    def to_write(self, parts):
        for table, ids, values in parts:
            width = values.shape[1]
            values[:, width // 2 :] = self.held(table, ids)[:, width // 2 :]
        return parts


class ChangesABit(Faulty):
    def to_write(self, parts):
        parts[0][2][0, :1].view(np.uint32)[:] ^= 1
        return parts


class AnswersEarly(Faulty):
    """A read gives what was there before the last write."""

    def __init__(self, layouts):
        super().__init__(layouts)
        self.before = {}

    def to_write(self, parts):
        for table, ids, _ in parts:
            self.before |= {(table, row): value for row, value in zip(ids.tolist(), self.held(table, ids), strict=True)}
        return parts

    def answered(self, table, ids, out):
        for row, value in zip(ids.tolist(), out, strict=True):
            value[:] = self.before.get((table, row), value)[: out.shape[1]]


class MixesAnswersUp(Faulty):
    """The rows of an answer are in another order, those that were written."""

    def __init__(self, layouts):
        super().__init__(layouts)
        self.seen = set()

    def to_write(self, parts):
        self.seen |= {(table, row) for table, ids, _ in parts for row in ids.tolist()}
        return parts

    def answered(self, table, ids, out):
        there = [place for place, row in enumerate(ids.tolist()) if (table, row) in self.seen]
        out[there] = out[there[::-1]].copy()


class LeavesStateBehind(Faulty):
    """A row comes back with the state that another one has left."""

    def answered(self, table, ids, out):
        width = self.tables[table].width
        if out.shape[1] == width:
            out[:, width // 2 :] = 0.7


STORES = (
    *(LosesAWrite, WritesLate, WritesOldValues, WritesAgain, SwapsRows, TearsRows, ChangesABit),
    *(AnswersEarly, MixesAnswersUp, LeavesStateBehind),
)


# Groups


class FaultyGroup:
    """One end of a group of trainers where something is wrong with what it receives."""

    def __init__(self, group, change, about):
        self.rank, self.size = group.rank, group.size
        self._group, self._change, self._about = group, change, about
        self._before = None

    def exchange(self, send, receive, what):
        pending = self._group.exchange(send, receive, what)
        receive = _without_flags(receive, what)
        if self._about not in what or not any(map(len, receive)):
            return pending
        return _Changed(pending, lambda: self._change(self, receive))

    def old(self, receive):
        """What came at the exchange before, if there was one; this one is kept."""
        before, self._before = self._before, [part.clone() for part in receive]
        return before

    def __getattr__(self, name):
        return getattr(self._group, name)


def _without_flags(receive, what):
    """What comes behind the flags in front of critical gradients: with wrong ones all would notice at once."""
    flags = what.startswith("gradients of iteration") and not what.endswith("before the step")
    return [part[FLAGS:] for part in receive] if flags else receive


class _Changed:
    """An exchange after which something is changed, once."""

    def __init__(self, pending, change):
        self._pending, self._change = pending, change

    def ready(self):
        return self._pending.ready()

    def wait(self):
        self._pending.wait()
        change, self._change = self._change, lambda: None
        change()


def received(about):
    """A group where something happens to what is received in exchanges whose name has this text."""

    def defect(change):
        return Sabotage(group=lambda end: FaultyGroup(end, change, about))

    return defect


def drops(about, rank=1):
    """What the trainer that sent most has sent does not count at one trainer."""

    @received(about)
    def change(group, receive):
        if group.rank == rank:
            max(receive, key=len).zero_()

    return change


def doubles(about, rank=1):
    """What the trainer that sent most has sent counts twice at one trainer."""

    @received(about)
    def change(group, receive):
        if group.rank == rank:
            max(receive, key=len).mul_(2)

    return change


def swaps(about):
    """What two trainers sent is taken for each other's at the third, as far as it is as long."""

    @received(about)
    def change(group, receive):
        first, second = (part for rank, part in enumerate(receive) if rank != group.rank)
        length = min(len(first), len(second))
        kept = first[:length].clone()
        first[:length] = second[:length]
        second[:length] = kept

    return change


def delivers_old(about, rank=1):
    """What came at an earlier exchange comes again, as far as it is as long."""

    @received(about)
    def change(group, receive):
        before = group.old(receive)
        if group.rank == rank and before is not None:
            for part, old in zip(receive, before, strict=True):
                part[: len(old)] = old[: len(part)]

    return change


def changes_a_bit(about, rank=1):
    """The lowest one of the first number from trainer 0."""

    @received(about)
    def change(group, receive):
        if group.rank == rank and len(receive[0]):
            receive[0].numpy()[:1].view(np.uint32)[:] ^= 1

    return change


def fails(about, error, rank=1):
    """An exchange ends with an error at one trainer."""

    @received(about)
    def change(group, receive):
        if group.rank == rank:
            raise error

    return change


def does_not_wait(about, rank=1):
    """An exchange counts as over before anything has come."""

    class Hasty(FaultyGroup):
        def exchange(self, send, receive, what):
            pending = self._group.exchange(send, receive, what)
            if self._about not in what or self.rank != rank:
                return pending
            numbers = _without_flags(receive, what)
            if numbers is receive:
                return _Over()
            return _Changed(pending, lambda: [part.fill_(np.nan) for part in numbers])

    return Sabotage(group=lambda end: Hasty(end, None, about))


class _Over:
    def ready(self):
        return True

    def wait(self):
        pass


def forget_victims_at_barriers(monkeypatch):
    """A barrier that writes what is in the cache, and forgets rows that are just leaving it."""

    def flush(pipeline):
        yield Wait("its turn", lambda: True)
        for block in pipeline._cache.take_dirty():
            yield from pipeline._write(block)

    monkeypatch.setattr(Pipeline, "_flush", flush)


def answer_reads_early(monkeypatch):
    """A server that answers a read when the iteration before the one that it must follow is passed."""
    exact = EmbeddingServer.reached.fget
    monkeypatch.setattr(EmbeddingServer, "reached", property(lambda server: exact(server) + 1))
