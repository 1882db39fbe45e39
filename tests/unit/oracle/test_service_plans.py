"""Plans and batches as bytes: what is sent comes back to the last bit, and nothing wrong gets through."""

from __future__ import annotations

import random
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from bagpipe.cache import group_by_width, num_bytes
from bagpipe.data.samples import Column, SentBatch
from bagpipe.errors import BagpipeError, BatchError, WireError
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.plan_shape import PlanShape, first_outside
from bagpipe.oracle.sent_plan import SentPlan, pack_plan, unpack_plan
from bagpipe.trainer.source import Source
from bagpipe.types import Batch, Ids
from bagpipe.wire.codec import pack, unpack
from bagpipe.wire.messages import Message
from bagpipe.wire.plan_messages import Planned, PlannedTable, PlansDescribed
from harness.wire import frames_of, message_of, travelled
from harness.world import TABLES, make_batches

RUN = bytes(range(16))
WIDTHS = (3, 5, 3)
FEATURES = [name for table in TABLES for name in table.features]


def planned(batches, policy="lookahead", accumulate=1, cache=200):
    """Plans with their batches, as an oracle gives them, and what they fit."""
    source = Source(batches, accumulate=accumulate)
    source.tables = TABLES
    oracle = make_oracle(TABLES, WIDTHS, cache, source.first_ids(), lookahead=5, policy=policy)
    shape = PlanShape(TABLES, tuple(group_by_width(WIDTHS)[0]), tuple(oracle.capacity), accumulate, "these")
    return list(source.planned(oracle)), shape


def sent(plan, group):
    """The message of a plan, as frames and back."""
    record, buffers = pack_plan(plan, group.batches, FEATURES, "these")
    return travelled(Message(RUN, 0, plan.iteration, record, buffers))


def flat_plan(plan):
    parts = (plan.rows, plan.fetch, plan.evict, plan.victims)
    values = [getattr(part, field.name) for part in parts for field in fields(part)]
    arrays = [(v.dtype, v.tobytes()) if isinstance(v, np.ndarray) else v for v in (*values, *plan.inverse)]
    return plan.iteration, plan.lookahead, plan.hits, arrays


def flat_batch(batch, ids=True):
    tensors = [batch.dense, batch.labels]
    for feature in batch.sparse.values():
        tensors += [part for part in (feature.offsets, feature.weights) if part is not None]
        tensors += [feature.values] if ids else []
    shapes = [tuple(feature.values.shape) for feature in batch.sparse.values()]
    return batch.number, list(batch.sparse), shapes, [(t.dtype, tuple(t.shape), t.numpy().tobytes()) for t in tensors]


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_plans_and_batches_come_back_to_the_last_bit(policy, accumulate):
    plans, shape = planned(make_batches(14, last=2), policy, accumulate, cache=60)
    victims = 0
    for plan, group in plans:
        message = sent(plan, group)
        found, batches = unpack_plan(message.body, message.buffers, shape, plan.iteration)
        assert flat_plan(found) == flat_plan(plan)
        assert [flat_batch(b, ids=False) for b in batches] == [flat_batch(b, ids=False) for b in group.batches]
        assert all(array.flags.writeable for array in (found.rows.ids, found.rows.slots, *found.inverse))
        victims += len(found.victims)
    assert (victims > 0) == (policy == "lru")


def test_the_ids_of_a_batch_do_not_travel_beside_the_plan():
    (plan, group), *_ = planned(make_batches(2, size=2000))[0]
    message = sent(plan, group)
    rows = sum(len(part) for part in (plan.rows, plan.fetch, plan.evict, plan.victims))
    num_ids = sum(len(inverse) for inverse in plan.inverse)
    floats = 4 * (2000 * 4 + len(plan.inverse[FEATURES.index("words")]))
    integers = sum(buffer.nbytes for buffer in message.buffers[1:]) - floats
    offsets = 2 * 2001
    assert num_ids <= integers - offsets < 2 * num_ids + 16 * rows, "places take the bytes that the number of rows has"
    came = unpack(message.buffers[0], message.buffers[1:], SentPlan)
    assert {column.values.size for column in came.batches[0].samples.columns.values()} == {0}


def test_a_plan_that_divides_the_cache_anew_says_so_and_stays_within_its_bytes():
    pairs, shape = planned(make_batches(4))
    shape = replace(shape, widths=(5, 3), bytes_max=num_bytes(shape.capacity, (5, 3)))
    wide, narrow = shape.capacity
    plan, group = pairs[1]
    for capacity in ((wide - 3, narrow + 5), (wide, narrow)):
        message = sent(replace(plan, capacity=capacity), group)
        found, _ = unpack_plan(message.body, message.buffers, shape, 1)
        assert found.capacity == capacity
        assert shape.divided_anew(found.capacity, "").capacity == capacity
    few = (int(plan.rows.slots.max()), 1)
    for capacity, message in (((wide + 1, narrow), "bytes in all"), ((wide,), "one number"), (few, "slots of table")):
        wrong = sent(replace(plan, capacity=capacity), group)
        with pytest.raises(WireError, match=message):
            unpack_plan(wrong.body, wrong.buffers, shape, 1)


def test_features_that_no_table_has_keep_their_ids():
    batches = make_batches(3)
    source = Source(batches)
    source.tables = TABLES[:2]
    oracle = make_oracle(TABLES[:2], WIDTHS[:2], 200, source.first_ids(), lookahead=5, policy="lookahead")
    shape = PlanShape(TABLES[:2], (1, 0), tuple(oracle.capacity))
    for plan, group in source.planned(oracle):
        record, buffers = pack_plan(plan, group.batches, source.features)
        _, (found,) = unpack_plan(record, buffers, shape, plan.iteration)
        assert torch.equal(found.sparse["words"].values, batches[plan.iteration].sparse["words"].values)
        assert not found.sparse["user"].values.any()


def there_and_back(batch):
    return unpack(*pack(SentBatch.of(batch)), SentBatch).batch()


@pytest.mark.parametrize("number", range(12))
def test_batches_come_back_to_the_last_bit(number):
    batch = make_batches(12)[number]
    assert flat_batch(there_and_back(batch)) == flat_batch(batch)


@pytest.mark.parametrize(
    ("ids", "num_bytes"),
    [
        ([-(2**31), 2**31 - 1], 4),
        ([2**31], 1),
        ([-(2**31), 2**31], 5),
        ([-(2**63), 2**63 - 1], 8),
        ([-1, 254], 1),
        ([], 0),
    ],
)
def test_ids_at_the_borders_of_types_come_back_in_as_few_bytes_as_hold_them(ids, num_bytes):
    values = torch.tensor(ids, dtype=torch.int64).reshape(1, -1)
    batch = Batch(torch.zeros(1, 0), {"user": Ids(values)}, torch.zeros(1))
    assert torch.equal(there_and_back(batch).sparse["user"].values, values)
    assert sum(buffer.nbytes for buffer in pack(SentBatch.of(batch))[1]) == 4 + num_bytes * len(ids)


def test_a_batch_without_samples_travels():
    batch = make_batches(1)[0].part(0, 0)
    assert flat_batch(there_and_back(batch)) == flat_batch(batch)


def test_numbers_that_are_no_float32_are_refused_when_sent():
    batch = make_batches(1)[0]
    words = batch.sparse["words"]
    with pytest.raises(BatchError, match=r"batch 0: the weights of feature 'words' is torch.float64"):
        SentBatch.of(
            Batch(batch.dense, {"words": Ids(words.values, words.offsets, words.weights.double())}, batch.labels)
        )
    with pytest.raises(BatchError, match=r"batch 0: labels is torch.int64"):
        SentBatch.of(Batch(batch.dense, {}, batch.labels.long()))


def edited(plan, group, what):
    """The same message, after a change of what is packed: of the plan, or of the first batch's samples."""
    batch = SentBatch.of(group.batches[0], FEATURES)
    if "plan" in what:
        plan = replace(plan, **what["plan"](plan))
    if "samples" in what:
        batch = replace(batch, samples=replace(batch.samples, **what["samples"](batch.samples)))
    body, buffers = pack(SentPlan(plan, (batch,)[: what.get("batches", 1)]))
    return Planned(what.get("iteration", plan.iteration), what.get("fingerprint", "these")), [
        memoryview(body),
        *buffers,
    ]


def with_value(rows, name, position, value):
    values = getattr(rows, name).copy()
    values[position] = value
    return replace(rows, **{name: values})


def without_rows(rows):
    """The same without those of the first table."""
    first = rows.bounds[1]
    return replace(rows, ids=rows.ids[first:], slots=rows.slots[first:], bounds=np.maximum(rows.bounds - first, 0))


def with_bound(rows, position, value):
    bounds = rows.bounds.copy()
    bounds[position] = value
    return replace(rows, bounds=bounds)


WRONG = {
    "another iteration": ({"iteration": 9}, "iteration 9 came where 4 was due"),
    "another one inside": ({"plan": lambda plan: {"iteration": 9}, "iteration": 4}, "iteration 9 came where 4 was due"),
    "other settings": ({"fingerprint": "those"}, "is for settings those"),
    "no batch": ({"batches": 0}, "has 0 batches: 1 to 1"),
    "fewer rows": ({"plan": lambda plan: {"rows": with_bound(plan.rows, -1, 3)}}, "rows: .* entries, and bounds"),
    "more rows to evict": (
        {"plan": lambda plan: {"evict": with_bound(plan.evict, -1, 10**6)}}, "evict: .* entries, and bounds",
    ),
    "bounds that fall": (
        {"plan": lambda plan: {"rows": with_bound(plan.rows, 1, -(2**63))}}, "rows: .* entries, and bounds",
    ),
    "bounds of other tables": (
        {"plan": lambda plan: {"rows": replace(plan.rows, bounds=plan.rows.bounds[:-1])}}, "rows: .* entries",
    ),
    "fewer slots than ids": (
        {"plan": lambda plan: {"rows": replace(plan.rows, slots=plan.rows.slots[1:])}}, "rows: ids of shape",
    ),
    "fewer waits": (
        {"plan": lambda plan: {"fetch": replace(plan.fetch, after=plan.fetch.after[1:])}}, "fetch|after: shape",
    ),
    "flags of rows to fetch": (
        {"plan": lambda plan: {"fetch": replace(plan.fetch, whole=np.ones(len(plan.fetch), bool))}},
        "rows to fetch whole: .* where there must be none",
    ),
    "no window": ({"plan": lambda plan: {"lookahead": 0}}, "has lookahead 0"),
    "fewer hits than none": ({"plan": lambda plan: {"hits": -1}}, "-1 hits"),
    "what no trainer is told": ({"plan": lambda plan: {"guests": (1,)}}, "what no trainer is told"),
    "a late victim": (
        {"plan": lambda plan: {"victims": replace(plan.victims, evict_after=4)}}, "has evict_after 4",
    ),
    "a slot beyond the cache": (
        {"plan": lambda plan: {"rows": with_value(plan.rows, "slots", -1, 10**6)}},
        "slots of table 'word': 1000000 is there",
    ),
    "a negative slot": (
        {"plan": lambda plan: {"fetch": with_value(plan.fetch, "slots", 0, -1)}},
        "fetch, slots of table .*: -1 is there",
    ),
    "a row beyond its table": (
        {"plan": lambda plan: {"rows": with_value(plan.rows, "ids", 0, 40)}},
        "ids of table 'user': 40 is there, 0 to 39 are allowed",
    ),
    "a fetch that waits for itself": (
        {"plan": lambda plan: {"fetch": with_value(plan.fetch, "after", 0, 4)}},
        "after: 4 is there, -1 to 3 are allowed",
    ),
    "a slot that waits for itself": (
        {"plan": lambda plan: {"fetch": with_value(plan.fetch, "slot_after", 0, 4)}},
        "slot_after: 4 is there",
    ),
    "a place beyond the rows": (
        {"plan": lambda plan: {"inverse": (plan.inverse[0] + np.int32(len(plan.rows)), *plan.inverse[1:])}},
        "places of feature 'user'",
    ),
    "places in a table of which no row is used": (
        {"plan": lambda plan: {"rows": without_rows(plan.rows)}}, "places of feature 'user': 0 is there, 0 to -1",
    ),
    "places in two dimensions": (
        {"plan": lambda plan: {"inverse": (plan.inverse[0].reshape(1, -1), *plan.inverse[1:])}},
        "places of feature 'user'",
    ),
    "too few places": ({"plan": lambda plan: {"inverse": plan.inverse[:-1]}}, "places of ids: .* by feature"),
    "too many places": (
        {"plan": lambda plan: {"inverse": (*plan.inverse, plan.inverse[0])}}, "places of ids: .* by feature",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("what", "reason"), WRONG.values(), ids=WRONG)
def test_a_plan_that_can_not_be_is_refused(what, reason):
    plans, shape = planned(make_batches(12))
    with pytest.raises(WireError, match=reason):
        unpack_plan(*edited(*plans[4], what), shape, 4)


def user(**changes):
    """Another column of feature 'user', which has one id a sample and is left out."""
    return lambda samples: {"columns": {**samples.columns, "user": replace(samples.columns["user"], **changes)}}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda samples: {"columns": {f"{n}s": column for n, column in samples.columns.items()}},
            "without feature 'user'",
        ),
        (user(values=np.zeros((0, 2), np.int64)), "places of ids: .* where batches have"),
        (user(values=np.zeros((6, 1), np.int64)), "feature 'user': ids of shape .6, 1., where none are due"),
        (user(values=np.zeros(0, np.int64)), "feature 'user': ids of shape .0,. of 6 samples"),
        (user(values=np.zeros((0, 2**30), np.int64)), "feature 'user': ids of shape"),
        (user(weights=np.zeros((5, 1), np.float32)), "feature 'user': weights of shape .5, 1. for ids of shape .6, 1."),
        (user(offsets=np.arange(7)), "feature 'user': ids of shape .0, 1. of 6 samples"),
        (user(offsets=np.arange(8), values=np.zeros(0, np.int64)), "feature 'user': offsets of 6 samples"),
        (user(offsets=np.array([0, 1, 2, 9, 4, 5, 6]), values=np.zeros(0, np.int64)), "feature 'user': offsets of 6"),
        (user(offsets=np.arange(1, 8), values=np.zeros(0, np.int64)), "feature 'user': offsets of 6"),
        (lambda samples: {"labels": samples.labels[1:]}, "has dense of shape .6, .* and labels of shape .5,"),
        (lambda samples: {"dense": samples.dense[0]}, "has dense of shape"),
    ],
)
def test_a_batch_that_does_not_fit_its_numbers_is_refused(change, reason):
    plans, shape = planned(make_batches(12))
    with pytest.raises(WireError, match=reason):
        unpack_plan(*edited(*plans[4], {"samples": change}), shape, 4)


def test_ids_that_no_plan_has_must_be_there():
    sent = SentBatch.of(make_batches(1)[0], FEATURES)
    with pytest.raises(WireError, match=r"feature 'user': ids of shape .0, 1., where .6, 1. are due"):
        sent.batch()
    with pytest.raises(WireError, match="batch -1 has"):
        replace(sent, number=-1).batch(FEATURES)
    wrong = replace(sent.samples, columns={"user": Column(np.zeros((5, 1), np.int64))})
    with pytest.raises(WireError, match=r"feature 'user': ids of shape .5, 1."):
        replace(sent, samples=wrong).batch()


@pytest.mark.parametrize("seed", range(30))
def test_numbers_outside_are_found(seed):
    random = np.random.default_rng(seed)
    counts = random.integers(0, 12, 4)
    bounds, ends = np.cumsum([0, *counts]), random.integers(0, 2**40, 4)
    numbers = (random.random(bounds[-1]) * np.repeat(ends, counts)).astype(np.int64)
    if seed % 3 and len(numbers):
        numbers[random.integers(len(numbers))] = random.choice([-1, 2**41])
    wrong = [i for i, number in enumerate(numbers.tolist()) if not 0 <= number < np.repeat(ends, counts)[i]]
    assert first_outside(numbers, bounds, ends) == min(wrong, default=-1)


def test_a_description_that_contradicts_itself_is_refused():
    tables = [PlannedTable("user", 40, ["user"], 3), PlannedTable("ad", None, ["user"], 3)]
    with pytest.raises(WireError, match="a feature in two tables"):
        PlanShape.of(PlansDescribed(tables, [4], "auto", "lookahead", 1, ""))
    with pytest.raises(WireError, match="1 widths for 2 slot spaces"):
        PlanShape.of(PlansDescribed(tables[:1], [4, 4], "auto", "lookahead", 1, ""))


def within_bounds(plan, batches, shape):
    """Whether nothing in a plan names memory that is not there."""
    for rows in (plan.rows, plan.fetch, plan.evict, plan.victims):
        assert len(rows.ids) == len(rows.slots) == rows.bounds[-1]
        assert (np.diff(rows.bounds) >= 0).all()
        for table in range(len(shape.tables)):
            slots = rows.of_table(table)[1]
            assert ((slots >= 0) & (slots < shape.capacity[shape.group[table]])).all()
    for inverse, (name, table) in zip(plan.inverse, shape.features, strict=True):
        assert ((inverse >= 0) & (inverse < np.diff(plan.rows.bounds)[table])).all()
        assert len(inverse) == sum(batch.sparse[name].values.numel() for batch in batches)


@pytest.mark.parametrize("times", [1200, pytest.param(12_000, marks=pytest.mark.long)])
def test_whatever_happens_to_the_bytes_of_a_plan_there_is_a_typed_error_or_a_plan_within_bounds(times):
    plans, shape = planned(make_batches(6))
    messages = [frames_of(sent(plan, group)) for plan, group in plans]
    rng = random.Random(5)
    refused = kept = 0
    for _ in range(times):
        iteration = rng.randrange(len(messages))
        frames = list(messages[iteration])
        for _ in range(rng.randrange(1, 4)):
            which = rng.randrange(1, len(frames))
            data = bytearray(frames[which])
            if data and rng.random() < 0.8:
                data[rng.randrange(len(data))] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
            elif data:
                del data[rng.randrange(len(data)) :]
            frames[which] = bytes(data)
        try:
            message = message_of(frames)
            if isinstance(message.body, Planned):
                within_bounds(*unpack_plan(message.body, message.buffers, shape, iteration), shape)
                kept += 1
        except BagpipeError:
            refused += 1
    assert refused > times // 6  # most of the others differ in a float or an id
    assert kept > times // 60
