"""A trainer's part of a plan as bytes: what is sent comes back to the last bit, and nothing wrong gets through."""

from __future__ import annotations

import random
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest

from bagpipe.cache import group_by_width, num_bytes
from bagpipe.errors import BagpipeError, WireError
from bagpipe.oracle.assign import Assigner
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.design import DESIGNS
from bagpipe.oracle.partition import Partition
from bagpipe.oracle.plan_shape import PlanShape
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.sent_plan import pack_plan, unpack_plan
from bagpipe.oracle.sync_plan import Exchange, Routes, Sync
from bagpipe.trainer.divided import Divided
from bagpipe.wire.codec import pack, unpack
from bagpipe.wire.messages import Message
from bagpipe.wire.plan_messages import DividedBy, Planned, PlannedTable, PlansDescribed
from harness.wire import frames_of, message_of, travelled
from harness.world import TABLES, make_batches

RUN = bytes(range(16))
WIDTHS = (3, 5, 3)
FEATURES = [name for table in TABLES for name in table.features]


def divided(batches, design="owned", delayed=True, trainers=3, accumulate=1, cache=200, policy="lookahead"):
    """For each iteration each trainer's part and batches, as an oracle gives them; and what the parts fit."""
    assigner = Assigner("contiguous", trainers)
    source = Divided(batches, lambda batch: [(p, len(p)) for p in assigner(batch).parts(batch)], accumulate=accumulate)
    source.tables = TABLES
    oracle = make_oracle(
        TABLES, WIDTHS, cache, source.first_ids(), lookahead=5, policy=policy, trainers=trainers, uses_ahead=2,
        design=design,
    )  # fmt: skip
    costs, places = [0.2, 1.2, 0.2], oracle.places
    partition = Partition(
        trainers, oracle.tables, places.capacity, places.guests, design=design, delayed=delayed, move_costs=costs
    )
    iterations = []
    for division, parts in source.divided(oracle, partition):
        samples = list(zip(*(part.samples for part in parts), strict=True))
        iterations.append([(division.part(rank, *samples), part.group.batches) for rank, part in enumerate(parts)])
    divided_by = DividedBy(trainers, "contiguous", design, delayed, True)
    group, widths = group_by_width(WIDTHS)
    return iterations, [
        PlanShape(
            TABLES, tuple(group), places.capacity, accumulate, "", divided_by, rank, tuple(widths),
            num_bytes(places.capacity, widths),
        )
        for rank in range(trainers)
    ]  # fmt: skip


def sent(plan, batches, compress=False):
    """The message of a part, as frames and back."""
    record, buffers = pack_plan(plan, batches, FEATURES, compress=compress)
    return travelled(Message(RUN, 0, plan.iteration, record, buffers))


def flat(part):
    """All that a record holds, in a form that compares."""
    if isinstance(part, np.ndarray):
        return part.dtype.str, part.shape, part.tobytes()
    if is_dataclass(part):
        return [flat(getattr(part, field.name)) for field in fields(part)]
    return [flat(each) for each in part] if isinstance(part, tuple | list) else part


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("design", DESIGNS)
@pytest.mark.parametrize(("policy", "accumulate"), [("lookahead", 1), ("lru", 3)])
def test_parts_come_back_to_the_last_bit(design, delayed, policy, accumulate):
    iterations, shapes = divided(make_batches(14, last=2), design, delayed, 3, accumulate, 80, policy)
    exchanged = 0
    for parts in iterations:
        shapes = [shape.divided_anew(plan.capacity, "") for (plan, _), shape in zip(parts, shapes, strict=True)]
        for (plan, batches), shape in zip(parts, shapes, strict=True):
            message = sent(plan, batches, compress=shape.trainer == 1)
            found, _ = unpack_plan(message.body, message.buffers, shape, plan.iteration)
            assert flat(found) == flat(plan)
            assert found.sync.gradients.send.items.flags.writeable
            exchanged += len(found.sync.gradients.send) + len(found.sync.values.send)
    assert exchanged


def test_lists_without_entries_take_no_place_but_for_their_bounds():
    nothing = Routes(np.empty(0, np.int32), np.zeros((2, len(TABLES) + 1), np.int64))
    no_rows = RowList(np.empty(0, np.int64), np.empty(0, np.int32), np.zeros(len(TABLES) + 1, np.int64))
    none = Exchange(nothing, nothing)
    empty = Sync(0, ((1, 1),), none, none, no_rows, none, none, no_rows, none, no_rows, no_rows)
    body, buffers = pack(empty)
    of_bounds = (5 * 2 * 2 + 4) * (len(TABLES) + 1)
    assert sum(buffer.nbytes for buffer in buffers) == of_bounds
    assert flat(unpack(body, buffers, Sync)) == flat(empty)


def test_parts_take_less_than_half_of_what_their_numbers_take():
    iterations, _ = divided(make_batches(8, size=500), cache=4000)
    plan, _ = iterations[4][1]
    sync = plan.sync
    rows = [plan.rows, plan.fetch, plan.evict, sync.updated, sync.later_updated]
    exchanges = (sync.values, sync.later_values, sync.gradients, sync.later_gradients)
    lists = [part for each in exchanges for part in (each.send, each.receive)]
    numbers = 12 * sum(map(len, rows)) + 4 * sum(map(len, lists)) + 4 * sum(map(len, plan.inverse))
    assert sum(buffer.nbytes for buffer in pack(plan)[1]) < numbers / 2
    assert sum(buffer.nbytes for buffer in pack(plan, compress=True)[1]) < numbers / 3


def with_item(lists, position, value):
    items = lists.items.copy()
    items[position] = value
    return replace(lists, items=items)


def busy(iterations, rank=1):
    """A part of this trainer, not the first ones, in which all lists have entries that its design has at all."""
    for parts in iterations[3:]:
        plan, batches = parts[rank]
        sync = plan.sync
        lists = (sync.values.send, sync.values.receive, sync.gradients.receive, sync.later_gradients.receive)
        if all(map(len, lists)) and sync.updated.bounds[1]:
            return plan, batches
    raise AssertionError("no iteration has all")


def one_more(lists, rank=0):
    """A list with one more entry for a trainer, of the first table."""
    bounds = lists.bounds.copy()
    bounds.reshape(-1)[rank * bounds.shape[1] + 1 :] += 1
    return Routes(np.insert(lists.items, int(lists.bounds[rank, 1]), 0).astype(np.int32), bounds)


def edit(part, path, change):
    """A record in which one field, named by a path of fields, is changed."""
    name, _, rest = path.partition(".")
    inner = getattr(part, name)
    return replace(part, **{name: edit(inner, rest, change) if rest else change(inner)})


def slot(value):
    return lambda rows: RowList(rows.ids, np.full_like(rows.slots, value), rows.bounds)


WRONG = {
    "gradients.send": (lambda lists: with_item(lists, 0, 10**6), "gradients to send: 1000000 is there"),
    "later_gradients.send": (lambda lists: with_item(lists, -1, -1), "later gradients to send: -1 is there"),
    "gradients.receive": (lambda lists: with_item(lists, 0, 10**6), "gradients to add: 1000000 is there"),
    "values.send": (lambda lists: with_item(lists, 0, 10**6), "values to send: 1000000 is there"),
    "values.receive": (lambda lists: with_item(lists, 0, -1), "values to receive: -1 is there"),
    "values.slot_after": (lambda _: 99, "slot_after of vectors: 99 is there"),
    "updated": (slot(10**6), "rows of gradients, slots of table"),
    "drop": (lambda _: RowList(np.zeros(1, np.int64), np.full(1, -1, np.int32), np.array([0, 1, 1, 1])), "drop, slots"),
    "gradients.send.bounds": (lambda bounds: bounds[:-1], "gradients to send: bounds of shape"),
    "values.send.bounds": (lambda bounds: bounds[:, :-1], "values to send: bounds of shape"),
    "values.receive.bounds": (lambda bounds: np.where(bounds > 0, -bounds, bounds), "values to receive: .* bounds"),
    "later_values.send.bounds": (lambda bounds: bounds + (np.arange(3) == 1)[:, None], "bounds of shape .* do not cut"),
    "values.send.whole": (lambda _: np.ones(1, bool), "values to send: items of shape .* with flags of other rows"),
    "values.ids": (lambda ids: np.append(ids, 1), "values: .* rows to take have ids of shape"),
    "gradients.slot_after": (lambda _: 0, "gradients: gradients wait for no slot"),
    "gradients.ids": (lambda _: np.zeros(1, np.int64), "gradients: gradients wait for no slot, and change no owner"),
    "gradients.send.items": (lambda items: items.reshape(1, -1), "gradients to send: items of shape"),
    "rank": (lambda rank: rank + 1, "is for trainer 2 of 3, and came to trainer 1"),
    "samples": (lambda samples: ((*samples[0][:1], 9, *samples[0][2:]),), "says that trainer 1 has 9"),
}


@pytest.mark.parametrize("path", WRONG)
def test_a_part_that_can_not_be_is_refused(path):
    change, reason = WRONG[path]
    iterations, shapes = divided(make_batches(16, size=12))
    plan, batches = busy(iterations)
    message = sent(replace(plan, sync=edit(plan.sync, path, change)), batches)
    with pytest.raises(WireError, match=f"the plan of iteration {plan.iteration}.*{reason}"):
        unpack_plan(message.body, message.buffers, shapes[1], plan.iteration)


def test_flags_of_other_rows_than_are_fetched_are_refused():
    iterations, shapes = divided(make_batches(5))
    plan, batches = iterations[3][1]
    for whole, count in ((np.append(plan.fetch.whole, True), len(plan.fetch) + 1), (None, "no")):
        message = sent(replace(plan, fetch=replace(plan.fetch, whole=whole)), batches)
        with pytest.raises(WireError, match=f"rows to fetch whole: {count} flags for {len(plan.fetch)} rows"):
            unpack_plan(message.body, message.buffers, shapes[1], plan.iteration)


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (((1, 2, 3), (1, 2, 3)), r"the samples of \[3, 3\] trainers in its batches: 1 batches for 3"),
        (((1, 2),), r"the samples of \[2\] trainers"),
        ((), r"the samples of \[\] trainers"),
        (((-1, 2, 3),), r"has \[-1, 2, 3\] samples"),
        (((2**31, 2, 3),), r"has \[2147483648, 2, 3\] samples"),
    ],
)
def test_samples_of_another_number_of_trainers_or_batches_are_refused(samples, reason):
    iterations, shapes = divided(make_batches(5))
    plan, batches = iterations[4][1]
    message = sent(replace(plan, sync=replace(plan.sync, samples=samples)), batches)
    with pytest.raises(WireError, match=reason):
        unpack_plan(message.body, message.buffers, shapes[1], 4)


def test_what_a_trainer_sends_to_itself_must_be_what_it_receives_from_itself():
    iterations, shapes = divided(make_batches(16, size=12))
    plan, batches = busy(iterations)
    for path in ("gradients.send", "gradients.receive", "values.send"):
        wrong = replace(plan, sync=edit(plan.sync, path, lambda lists: one_more(lists, 1)))
        message = sent(wrong, batches)
        with pytest.raises(WireError, match="trainer 1 sends itself another number than it receives"):
            unpack_plan(message.body, message.buffers, shapes[1], plan.iteration)


@pytest.mark.parametrize(
    ("design", "delayed", "claimed", "reason"),
    [
        ("replicated", True, ("owned", True, True), "has gradients of a row for several trainers"),
        ("owned", True, ("replicated", True, True), "has vectors"),
        ("partitioned", True, ("owned", True, True), "has fetched vectors"),
        ("owned", True, ("owned", False, True), "has later gradients"),
        ("replicated", True, ("replicated", False, True), "has later gradients"),
        ("owned", True, ("owned", True, False), "has rows that change their owner"),
    ],
)
def test_what_trainers_of_a_design_never_exchange_is_refused(design, delayed, claimed, reason):
    iterations, shapes = divided(make_batches(12), design, delayed)
    message = sent(*iterations[4][1])
    shape = replace(shapes[1], division=DividedBy(3, "contiguous", *claimed))
    with pytest.raises(WireError, match=f"{reason}, which sync.design = '{claimed[0]}' with"):
        unpack_plan(message.body, message.buffers, shape, 4)


def test_whole_plans_and_parts_are_not_taken_for_each_other():
    iterations, shapes = divided(make_batches(5))
    plan, batches = iterations[2][0]
    message = sent(plan, batches)
    with pytest.raises(WireError, match="is divided, and was described as the opposite"):
        unpack_plan(message.body, message.buffers, replace(shapes[0], division=None), 2)
    whole = sent(replace(plan, sync=None), batches)
    with pytest.raises(WireError, match="is whole"):
        unpack_plan(whole.body, whole.buffers, shapes[0], 2)


def test_a_description_for_too_many_trainers_is_refused():
    table = PlannedTable("user", 40, ["user"], 3)
    for trainers in (1, 65, 10**12):
        body = PlansDescribed(
            [table], [4], "auto", "lookahead", 1, "", DividedBy(trainers, "aware", "owned", True, True)
        )
        with pytest.raises(WireError, match="PlansDescribed"):
            travelled(Message(RUN, 0, 0, body))


def within_bounds(plan, shape):
    """Whether nothing in a part names memory that is not there."""
    sync, used = plan.sync, np.diff(plan.rows.bounds)
    assert (plan.fetch.whole is None) == (shape.division.design != "owned")
    assert plan.fetch.whole is None or plan.fetch.whole.shape == plan.fetch.ids.shape
    slots = np.array(shape.slots)
    phases = (sync.gradients, sync.updated), (sync.later_gradients, sync.later_updated)
    vectors = (sync.fetched, sync.values, sync.later_values)
    checked = [(routes, slots) for each in vectors for routes in (each.send, each.receive)]
    for gradients, rows in phases:
        checked += [(gradients.send, used), (gradients.receive, np.diff(rows.bounds))]
    for lists, ends in checked:
        assert len(lists.items) == lists.bounds[-1, -1]
        for rank in range(len(lists.bounds)):
            for table, items in lists.of(rank):
                assert items.min() >= 0
                assert items.max() < ends[table]
    for rows in (sync.updated, sync.later_updated, sync.drop, sync.drop_victims):
        assert len(rows.ids) == len(rows.slots) == rows.bounds[-1]
        for table, end in enumerate(slots):
            places = rows.of_table(table)[1]
            assert ((places >= 0) & (places < end)).all()
    assert all(values.slot_after < plan.iteration for values in (sync.fetched, sync.values, sync.later_values))
    assert all(len(values.ids) == len(values.receive.moved()) for values in vectors)
    assert sync.samples == plan.sync.samples


@pytest.mark.parametrize("times", [800, pytest.param(8000, marks=pytest.mark.long)])
@pytest.mark.parametrize("design", ["owned", "lrpp"])
def test_whatever_happens_to_the_bytes_of_a_part_there_is_a_typed_error_or_a_part_within_bounds(design, times):
    iterations, shapes = divided(make_batches(6), design)
    messages = [(rank, part[0].iteration, sent(*part)) for parts in iterations for rank, part in enumerate(parts)]
    encoded = [(rank, number, frames_of(message)) for rank, number, message in messages]
    rng = random.Random(7)
    refused = kept = 0
    for _ in range(times):
        rank, number, frames = rng.choice(encoded)
        frames = list(frames)
        for _ in range(rng.randrange(1, 4)):
            which = rng.choice([1, 2, 2, 3])  # the record, the body, numbers
            data = bytearray(frames[which])
            if data and rng.random() < 0.8:
                data[rng.randrange(len(data))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
            elif data:
                del data[rng.randrange(len(data)) :]
            frames[which] = bytes(data)
        try:
            message = message_of(frames)
            if isinstance(message.body, Planned):
                within_bounds(unpack_plan(message.body, message.buffers, shapes[rank], number)[0], shapes[rank])
                kept += 1
        except BagpipeError:
            refused += 1
    assert refused > times // 4
    assert kept > times // 200
