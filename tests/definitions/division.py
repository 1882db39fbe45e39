"""Trainers that execute their parts of plans with versions in place of values: what is stale or lost shows (I3, I4)."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.partition import Partition
from bagpipe.oracle.places import TURNS, Places
from bagpipe.oracle.reader import CutIds
from bagpipe.oracle.row_list import RowList

ROWS = {"gradients": "updated", "later_gradients": "later_updated"}
"""The rows that are updated with which."""


def cut(parts, num_features):
    """A batch from what each trainer has: for each of its samples one id a feature."""
    ids = [np.array([sample[f] for part in parts for sample in part], np.int64) for f in range(num_features)]
    bounds = np.cumsum([0, *map(len, parts)])
    return CutIds(ids, np.tile(bounds, (num_features, 1)))


def tight_places(slots, guests, trainers, spare=0):
    """Places for so many slots of each group: no more at home than all need together, and some to spare. Without
    guests as many as there are slots."""
    capacity = [
        -(-each // trainers) + spare + TURNS * most if most else each for each, most in zip(slots, guests, strict=True)
    ]
    return Places(tuple(slots), tuple(capacity), tuple(guests))


def divided(tables, capacity, batches, trainers, *, design="owned", delayed=True, costs=(), **options):
    """For each batch (a list of samples for each trainer) the whole plan, and the part of each trainer."""
    oracle = Oracle(tables, capacity, trainers=trainers, uses_ahead=2, **options)
    places = oracle.places
    partition = Partition(
        trainers, oracle.tables, places.capacity, places.guests, design=design, delayed=delayed, move_costs=costs
    )
    num_features = sum(len(table.features) for table in tables)
    source = ((cut(parts, num_features), tuple(map(len, parts))) for parts in batches)
    found = []
    for division, samples in partition.plans(oracle.plans(source)):
        found.append((division.plan, [division.part(rank, samples) for rank in range(trainers)]))
    oracle.close()
    return found


def listed(rows: RowList, tables):
    """(table, id), (group, slot) of each row."""
    result = []
    for t, table in enumerate(tables):
        ids, slots = rows.of_table(t)
        result += [((t, i), (table.group, s)) for i, s in zip(ids.tolist(), slots.tolist(), strict=True)]
    return result


class Trainers:
    """Each has slots; all have one store."""

    def __init__(self, tables, trainers, replicas=False):
        self.tables, self.trainers, self.replicas = tables, trainers, replicas
        self.slots = [{} for _ in range(trainers)]
        """(group, slot) -> [row, version]"""
        self.narrow = [set() for _ in range(trainers)]
        """Slots with vectors only: their optimizer state is somebody else's."""
        self.dirty = [set() for _ in range(trainers)]
        """Rows that the store has not got as they are here; of one that is owned only its owner's."""
        self.store = defaultdict(int)
        self.version = defaultdict(int)
        """What synchronous training would have."""
        self.unused = set()
        """Rows that were brought along and not used yet: there is nothing to write."""
        self.sent = self.moved = 0

    def run(self, found, batches):
        """Execute everything; the last background part after the last iteration."""
        for (plan, parts), batch in zip(found, batches, strict=True):
            self.fetch(plan, parts)
            self.train(parts, batch)
            users = self.users(parts)
            now = self.update(parts, "gradients", users)
            self.send(parts, "values")
            later = self.update(parts, "later_gradients", users)
            assert not now & later
            assert now | later == set(users), "each row of the batch is updated, in one of the two phases"
            self.send(parts, "later_values")
            self.evict(plan, parts)
        assert self.store == self.version

    def fetch(self, plan, parts):
        for rank, part in enumerate(parts):
            for row, place in listed(part.victims, self.tables):
                self.write(rank, row, place)
            assert part.victims.evict_after == plan.victims.evict_after
        assert sum(len(part.victims) for part in parts) == len(plan.victims), "one trainer writes a victim"
        self.unused |= {row for row, _ in listed(plan.fetch, self.tables)} - {
            row for row, _ in listed(plan.rows, self.tables)
        }
        read_whole = defaultdict(int)
        for rank, part in enumerate(parts):
            whole = np.ones(len(part.fetch), bool) if part.fetch.whole is None else part.fetch.whole
            for (row, place), with_state in zip(listed(part.fetch, self.tables), whole.tolist(), strict=True):
                assert self.store[row] == self.version[row], "a stale read from the store"
                self.take(rank, place, [row, self.store[row]])
                self.narrow[rank].discard(place)
                if not with_state:
                    self.narrow[rank].add(place)
                read_whole[row] += with_state
        if any(part.fetch.whole is not None for part in parts):
            assert set(read_whole.values()) <= {1}, "one trainer reads a row whole"
        self.send(parts, "fetched")

    def train(self, parts, batch):
        for rank, (part, samples) in enumerate(zip(parts, batch, strict=True)):
            assert part.sync.totals[rank] == len(samples)
            used, f = set(), 0
            for t, table in enumerate(self.tables):
                ids, slots = part.rows.of_table(t)
                for _ in table.features:
                    assert ids[part.inverse[f]].tolist() == [sample[f] for sample in samples]
                    used |= set(part.inverse[f].tolist())
                    f += 1
                assert len(set(ids.tolist())) == len(ids)
                assert used == set(range(len(ids))), "no row of a trainer is unused"
                used = set()
                for row, slot in zip(ids.tolist(), slots.tolist(), strict=True):
                    held = self.slots[rank].get((table.group, slot))
                    assert held == [(t, row), self.version[t, row]], f"trainer {rank} is stale"

    def users(self, parts):
        users = defaultdict(set)
        for rank, part in enumerate(parts):
            for row, _ in listed(part.rows, self.tables):
                users[row].add(rank)
        return users

    def update(self, parts, phase, users):
        """Every user's gradient reaches every updater once, in order of rank."""
        arrived = defaultdict(list)
        own = [listed(getattr(part.sync, ROWS[phase]), self.tables) for part in parts]
        for rank, part in enumerate(parts):
            starts, gradients = getattr(part.sync, ROWS[phase]).bounds, getattr(part.sync, phase)
            for sender in range(self.trainers):
                names = self.named(parts[sender].rows, getattr(parts[sender].sync, phase).send, rank)
                targets = [
                    own[rank][starts[t] + k][0] for t, items in gradients.receive.of(sender) for k in items.tolist()
                ]
                assert names == targets, "what is sent is not what is added"
                for row in names:
                    arrived[row, rank].append(sender)
                self.sent += len(names) * (sender != rank)
        updated = set()
        for rank, rows in enumerate(own):
            for row, place in rows:
                assert arrived.pop((row, rank)) == sorted(users[row])
                assert self.slots[rank][place] == [row, self.version[row]], "an update of a stale row"
                assert place not in self.narrow[rank], "an update of a row without its state"
                updated.add(row)
        assert not arrived, "a gradient was sent to somebody who does not use it"
        for rank, rows in enumerate(own):
            for row, place in rows:
                self.slots[rank][place] = [row, self.version[row] + 1]
                self.dirty[rank].add(row)
        for row in updated:
            self.version[row] += 1
        self.unused -= updated
        return updated

    def named(self, rows, lists, rank):
        """The rows whose indices are in a list."""
        return [(t, int(rows.of_table(t)[0][k])) for t, items in lists.of(rank) for k in items.tolist()]

    def take(self, rank, place, held):
        """A row takes a place, in which no other may be that this trainer still has to write."""
        row, version = self.slots[rank].get(place, held)
        owned = place not in self.narrow[rank] and row in self.dirty[rank] and version == self.version[row]
        assert row == held[0] or not owned, "a place is taken twice"
        self.slots[rank][place] = held

    def send(self, parts, what):
        arriving = []
        for sender, part in enumerate(parts):
            values = getattr(part.sync, what)
            for receiver in range(self.trainers):
                moves = self.move(sender, receiver, values, getattr(parts[receiver].sync, what))
                sent = [(t, s) for t, items in values.send.of(receiver) for s in items.tolist()]
                lists = getattr(parts[receiver].sync, what).receive
                to = [(t, s) for t, items in lists.of(sender) for s in items.tolist()]
                self.sent += len(sent)
                for (t, slot), (table, place) in zip(sent, to, strict=True):
                    row, version = self.slots[sender][self.tables[t].group, slot]
                    assert version == self.version[row], "a stale value is sent"
                    assert row[0] == t == table
                    arriving.append((receiver, (self.tables[t].group, place), [row, version], (t, place) in moves))
                assert moves <= set(to), "a row changes its owner without its vector"
        for receiver, place, held, moves in arriving:
            assert self.slots[receiver].get(place) != held, "a value is sent to somebody who has it"
            self.take(receiver, place, held)
            self.narrow[receiver].discard(place)  # of a tenant before this one
            if not moves:
                self.narrow[receiver].add(place)

    def move(self, sender, receiver, values, theirs):
        """Rows change their owner: the new one has what there is to write; their tables and places there."""
        given = [(t, s) for t, items in values.send.moved().of(receiver) for s in items.tolist()]
        take = theirs.receive.moved()
        taken = [(t, s) for t, items in take.of(sender) for s in items.tolist()]
        ids = theirs.ids[take.bounds[sender, 0] : take.bounds[sender, -1]].tolist()
        for (t, slot), (table, _), row in zip(given, taken, ids, strict=True):
            place = (self.tables[t].group, slot)
            assert t == table
            assert self.slots[sender][place][0] == (t, row)
            assert place not in self.narrow[sender], "who gives a row away has its state"
            if (t, row) not in self.unused:
                self.dirty[sender].remove((t, row))
                self.dirty[receiver].add((t, row))
            self.moved += 1
        return set(taken)

    def evict(self, plan, parts):
        assert sum(len(part.evict) for part in parts) == len(plan.evict), "one trainer writes a row"
        for rank, part in enumerate(parts):
            for row, place in listed(part.evict, self.tables):
                self.write(rank, row, place)

    def write(self, rank, row, place):
        assert self.slots[rank][place] == [row, self.version[row]], "a stale row is written"
        assert place not in self.narrow[rank], "a row is written without its state"
        assert (row in self.dirty[rank]) != (row in self.unused), "who writes a row has not updated it"
        self.unused.discard(row)
        for other, dirty in enumerate(self.dirty):
            assert other == rank or self.replicas or row not in dirty, "two have a row to write"
            dirty.discard(row)
        for slots in self.slots:  # or a row that comes back to its slot would seem to be there still
            for own in [own for own, held in slots.items() if held[0] == row]:
                del slots[own]
        self.store[row] = self.version[row]


def check_waits(found, tables, capacity):
    """Whatever takes a place of a trainer waits until nobody there needs what is in it; see `Waits`."""
    for rank in range(len(found[0][1])):
        waits = Waits(tables, capacity)
        for _, parts in found:
            waits.follow(parts[rank])


class Waits:
    """The places of one trainer, and what happened to them last.

    Rows are inserted at any time before their iteration: the last one that had to do with the place must be over, by
    the wait of the plan's victims or by their own, and what it evicts copied out. Vectors are received after the
    forward and backward passes of the iteration that they are a part of, so only rows that are still to be copied out
    may be in their way. Nothing may wait for an iteration that waits for it.
    """

    def __init__(self, tables, capacity):
        self.tables, self.capacity = tables, capacity
        self.busy, self.evicted, self.left = {}, {}, {}
        """Place -> the last iteration that had to do with it; that evicted its tenant; that had it as a victim."""

    def follow(self, part):
        x = part.iteration
        self.capacity = part.capacity or self.capacity
        for _, place in listed(part.victims, self.tables):
            assert self.busy[place] <= part.victims.evict_after, "a victim leaves before it was updated"
            self.left[place] = x
        for (_, place), last in zip(listed(part.fetch, self.tables), part.fetch.slot_after.tolist(), strict=True):
            over = max(last, part.victims.evict_after)
            assert place in self.left or self.busy.get(place, -1) <= over, f"a fetch of plan {x} overwrites a row"
            self.take(place, last, x, f"a fetch of plan {x}")
        self.receive(part, "fetched")
        for rows in (part.rows, part.sync.updated, part.sync.later_updated, part.evict):
            self.busy |= {place: x for _, place in listed(rows, self.tables)}
        self.receive(part, "values")
        self.receive(part, "later_values")
        self.evicted |= {place: x for _, place in listed(part.evict, self.tables)}

    def receive(self, part, what):
        values = getattr(part.sync, what)
        self.busy |= dict.fromkeys(routed(values.send, self.tables), part.iteration)
        for place in routed(values.receive, self.tables):
            self.take(place, values.slot_after, part.iteration, f"{what} of iteration {part.iteration}")

    def take(self, place, waits_for, plan, what):
        assert 0 <= place[1] < self.capacity[place[0]]
        assert waits_for < plan, f"{what} waits for an iteration that waits for it"
        if place in self.left:
            assert self.left.pop(place) <= plan, f"{what} takes the place of a row that is there still"
        else:
            assert self.evicted.get(place, -1) <= waits_for, f"{what} overwrites a row that is not copied out"
        self.busy[place] = plan


def routed(routes, tables):
    """(group, place) of all items."""
    return [
        (tables[t].group, place)
        for rank in range(len(routes.bounds))
        for t, items in routes.of(rank)
        for place in items.tolist()
    ]
