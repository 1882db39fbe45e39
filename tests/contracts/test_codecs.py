"""What every codec of the wire promises: a record comes back equal, and damaged bytes are a WireError or a record (I8).

Damage: each byte of every record, and a sample of those of plans and batches, is flipped or cut off, or more is added.
What is then read must be a record of the kind that says the same when it is packed again. A sample is read under a look
at memory (NumPy's and Python's; not torch's).
"""

from __future__ import annotations

import itertools
import random
import tracemalloc
from dataclasses import fields, is_dataclass
from typing import get_args

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bagpipe.cache import group_by_width
from bagpipe.data.samples import Column, Samples, SentBatch
from bagpipe.data.tree_wire import Trees, pack_trees, types_in, unpack_trees
from bagpipe.errors import WireError
from bagpipe.oracle.assign import Assigner
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.design import DESIGNS
from bagpipe.oracle.partition import Partition
from bagpipe.oracle.plan_shape import PlanShape
from bagpipe.oracle.sent_plan import pack_plan, unpack_plan
from bagpipe.trainer.divided import Divided
from bagpipe.types import Batch, Ids
from bagpipe.wire.codec import pack, unpack
from bagpipe.wire.frames import HEADER_BYTES, decode, encode, read_head
from bagpipe.wire.messages import Body, Message
from bagpipe.wire.plan_messages import DividedBy, GotBatch, Planned
from harness.world import TABLES, make_batches

RUN = bytes(range(16))
RECORDS = get_args(Body)
WIDTHS = (3, 5, 3)
FEATURES = [name for table in TABLES for name in table.features]
PLACES_MAX = 20
MEMORY_MAX = 8 << 20


def flat(part):
    """All that a value holds, in a form that compares bit for bit."""
    if isinstance(part, torch.Tensor):
        return str(part.dtype), tuple(part.shape), part.contiguous().numpy().tobytes()
    if isinstance(part, np.ndarray | np.generic):
        return part.dtype.str, part.shape, part.tobytes()
    if isinstance(part, Ids):
        return [flat(each) for each in (part.values, part.offsets, part.weights)]
    if is_dataclass(part):
        return [flat(getattr(part, field.name)) for field in fields(part)]
    if isinstance(part, dict):
        return [(key, flat(value)) for key, value in part.items()]
    if isinstance(part, float):
        return np.float64(part).tobytes()
    return [flat(each) for each in part] if isinstance(part, tuple | list) else part


def damaged(frames, places_max=10**6):
    """The frames with one of them flipped somewhere, cut or extended; of a long one so many places are drawn."""
    for number, frame in enumerate(frames):
        whole = bytes(frame)
        places = range(len(whole))
        if len(whole) > places_max:
            places = sorted(random.Random(0).sample(places, places_max))
        for place in places:
            for bits in (0x01, 0x80, 0xFF):
                changed = bytearray(whole)
                changed[place] ^= bits
                yield [*frames[:number], bytes(changed), *frames[number + 1 :]]
            yield [*frames[:number], whole[:place], *frames[number + 1 :]]
        for more in (b"\0", b"\0" * 8, b"\xff" * 4):
            yield [*frames[:number], whole + more, *frames[number + 1 :]]


def _stands_for_much(part):
    """Whether ids that were left out, which have a length and take no memory, are too many to be packed as numbers."""
    if isinstance(part, torch.Tensor):
        return part.numel() > 1_000_000
    if isinstance(part, dict):
        return any(map(_stands_for_much, part.values()))
    return isinstance(part, list) and any(map(_stands_for_much, part))


def assert_survives(frames, read, pack):
    """Whatever damage: a WireError, or something that is packed to bytes which are read as the same."""
    for number, each in enumerate(damaged(frames, PLACES_MAX)):
        try:
            found = read_bounded(read, each) if number % 16 == 0 else read(each)
        except WireError:
            continue
        if not _stands_for_much(found):
            packed = pack(found)
            assert pack(read(packed)) == packed


def read_bounded(read, frames):
    """The same under a look at memory, which is slow."""
    tracemalloc.start()
    try:
        return read(frames)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY_MAX


# Records: every body that a message may have


def strategy_of(kind):
    """Values of an annotated type of a record, extreme ones among them; built from what msgspec knows of it."""
    return _strategy(msgspec.inspect.type_info(kind))


def _strategy(info):
    types = msgspec.inspect
    match info:
        case types.IntType():
            low = info.ge if info.ge is not None else -(2**63)
            high = info.lt - 1 if info.lt is not None else info.le if info.le is not None else 2**63 - 1
            return st.sampled_from([low, high]) | st.integers(low, high)
        case types.FloatType():
            return st.floats()
        case types.BoolType():
            return st.booleans()
        case types.NoneType():
            return st.none()
        case types.StrType():
            if info.pattern is not None:
                return st.from_regex(info.pattern)
            characters = st.characters(exclude_categories=["Cs"])
            return st.text(characters, min_size=info.min_length or 0, max_size=min(info.max_length or 30, 30))
        case types.BytesType():
            return st.binary(min_size=info.min_length or 0, max_size=min(info.max_length or 30, 30))
        case types.LiteralType():
            return st.sampled_from(list(info.values))
        case types.ListType():
            least = info.min_length or 0
            most = min(info.max_length or least + 4, least + 4)
            return st.lists(_strategy(info.item_type), min_size=least, max_size=most)
        case types.DictType():
            return st.dictionaries(_strategy(info.key_type), _strategy(info.value_type), max_size=info.max_length or 4)
        case types.UnionType():
            return st.one_of([_strategy(each) for each in info.types])
        case types.StructType():
            return st.builds(info.cls, **{field.name: _strategy(field.type) for field in info.fields})
    raise AssertionError(f"records have a {info}: give it values here")


def framed(message):
    return [bytes(frame) for frame in encode(message)]


def decoded(frames):
    """What a peer reads that is sent a header with its body, and buffers, of whose true lengths it is told."""
    if len(frames[0]) < HEADER_BYTES:
        raise WireError("the header is cut off")
    head = read_head(frames[0][:HEADER_BYTES])
    body, buffers = frames[0][HEADER_BYTES:], [memoryview(frame) for frame in frames[1:]]
    if len(head.buffer_bytes) != len(buffers):
        raise WireError("another number of buffers")
    return decode(head, body, buffers)


def messages(kind):
    numbers = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
    buffers = st.lists(st.binary(max_size=20).map(memoryview), max_size=3)
    return st.builds(Message, st.just(RUN), *numbers, strategy_of(kind), buffers)


def same_message(left, right):
    return flat(left.body) == flat(right.body) and (left.run, left.generation, left.request) == (
        right.run, right.generation, right.request,
    ) and list(map(bytes, left.buffers)) == list(map(bytes, right.buffers))  # fmt: skip


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_record_comes_back(kind):
    @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(messages(kind))
    def comes_back(message):
        assert same_message(decoded(framed(message)), message)

    comes_back()


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
def test_every_damaged_record_is_refused_or_another_one(kind):
    @settings(max_examples=1, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(messages(kind))
    def survives(message):
        for frames in damaged(framed(message)):
            try:
                found = decoded(frames)
            except WireError:
                continue
            assert same_message(decoded(framed(found)), found)

    survives()


# Batches, samples, plans and trees: a record, and a body and numbers in buffers


def sent(record, buffers):
    return framed(Message(RUN, 0, 0, record, buffers))


def odd_batch(size, seed=0):
    """Ids of 32 and 64 bits, bags that are empty, weights, numbers that are none."""
    drawn = np.random.default_rng(seed)
    lengths = drawn.integers(0, 3, size)
    starts = torch.from_numpy(np.cumsum(lengths) - lengths)
    count = int(lengths.sum())
    extreme = drawn.choice(np.array([-(2**63), -1, 0, 2**31, 2**63 - 1]), (size, 2))
    dense = torch.from_numpy(drawn.standard_normal((size, 2)).astype(np.float32))
    dense[:1] = torch.tensor([-0.0, float("nan")])
    sparse = {
        "narrow": Ids(torch.from_numpy(drawn.integers(-9, 9, (size, 1)))),
        "wide": Ids(torch.from_numpy(extreme)),
        "none": Ids(torch.empty((size, 0), dtype=torch.int64)),
        "bags": Ids(torch.arange(count), starts, torch.from_numpy(drawn.random(count, np.float32))),
    }
    return Batch(dense, sparse, torch.from_numpy(drawn.random(size, np.float32)), number=seed)


class BatchCodec:
    """A batch with all its ids."""

    values = tuple(odd_batch(size, seed) for size, seed in ((0, 0), (1, 1), (5, 2**40)))

    def __init__(self, compress=False):
        self.compress = compress

    def pack(self, batch):
        body, buffers = pack(SentBatch.of(batch), compress=self.compress)
        return sent(GotBatch(batch.number), [memoryview(body), *buffers])

    def read(self, frames):
        message = decoded(frames)
        if not isinstance(message.body, GotBatch) or not message.buffers:
            raise WireError("another record")
        return unpack(message.buffers[0], message.buffers[1:], SentBatch).batch()


def planned(trainers=1, design="owned", count=5, policy="lookahead", cache=90):
    """The plans of an oracle, or one trainer's parts of them, with their batches; and what they fit."""
    assigner = Assigner("contiguous", trainers)
    source = Divided(make_batches(count, size=4), lambda batch: [(p, len(p)) for p in assigner(batch).parts(batch)])
    source.tables = TABLES
    ahead = {"trainers": trainers, "uses_ahead": 2} if trainers > 1 else {}
    oracle = make_oracle(TABLES, WIDTHS, cache, source.first_ids(), lookahead=3, policy=policy, design=design, **ahead)
    group, capacity = tuple(group_by_width(WIDTHS)[0]), oracle.places.capacity
    if trainers == 1:
        pairs = [(plan, of_plan.batches) for plan, of_plan in source.planned(oracle)]
        return pairs, PlanShape(TABLES, group, capacity)
    costs = [0.2, 1.2, 0.2] if design == "owned" else []
    partition = Partition(
        trainers, oracle.tables, oracle.places.capacity, oracle.places.guests, design=design, move_costs=costs
    )
    pairs = []
    for division, parts in source.divided(oracle, partition):
        samples = list(zip(*(part.samples for part in parts), strict=True))
        pairs.append((division.part(1, *samples), parts[1].group.batches))
    return pairs, PlanShape(TABLES, group, capacity, 1, "", DividedBy(trainers, "contiguous", design, True, True), 1)


class PlanCodec:
    """Plans with their batches, whole or one trainer's part."""

    def __init__(self, trainers=1, design="owned", compress=False, **options):
        self.compress = compress
        pairs, self.shape = planned(trainers, design, **options)
        self.values = [pairs[0], pairs[3]]

    def pack(self, value):
        plan, batches = value
        return sent(*pack_plan(plan, batches, FEATURES, compress=self.compress))

    def read(self, frames):
        message = decoded(frames)
        if not isinstance(message.body, Planned):
            raise WireError("another record")
        return unpack_plan(message.body, message.buffers, self.shape, message.body.iteration)


TREE = {
    "ids": torch.arange(6).reshape(3, 2),
    "pair": (torch.arange(3), torch.tensor([0, 1])),
    "plain": ["ü", -(2**63), 2**64 - 1, float("inf"), None, b"\0\xff", True, [], {}],
    "arrays": [np.array([[1.5, -0.0]], np.float32), np.int64(2**63 - 1), np.array(["2020"], "M8[s]"), np.array(["bc"])],
    "empty": torch.empty(0, 4),
}
"""A batch with a part of each kind."""


class TreeCodec:
    """Batches of any shape."""

    values = ([], [{}], [TREE], [TREE, {"ids": torch.zeros(1, dtype=torch.int8)}])

    def pack(self, batches):
        body, buffers = pack(pack_trees(batches, (), types_in(TREE)))
        return [body, *map(bytes, buffers)]

    def read(self, frames):
        return unpack_trees(unpack(frames[0], list(map(memoryview, frames[1:])), Trees), types_in(TREE))


CODECS = {
    "batch": BatchCodec,
    "batch, compressed": lambda: BatchCodec(compress=True),
    "plan": PlanCodec,
    "plan, compressed": lambda: PlanCodec(compress=True),
    "plan with victims": lambda: PlanCodec(policy="lru", cache=40),
    "part, compressed": lambda: PlanCodec(3, compress=True),
    **{f"part, {design}": lambda design=design: PlanCodec(3, design) for design in DESIGNS},
    "tree": TreeCodec,
}


@pytest.mark.parametrize("name", CODECS)
def test_what_is_packed_comes_back_to_the_last_bit(name):
    codec = CODECS[name]()
    for value in codec.values:
        found = codec.read(codec.pack(value))
        if isinstance(codec, PlanCodec):  # ids are in the plan, and their places hold nothing
            assert flat(found[0]) == flat(value[0])
            assert len(found[1]) == len(value[1])
            for mine, theirs in zip(value[1], found[1], strict=True):
                assert flat([mine.dense, mine.labels]) == flat([theirs.dense, theirs.labels])
        else:
            assert flat(found) == flat(value)
        assert codec.pack(found) == codec.pack(value)


@pytest.mark.parametrize("name", CODECS)
def test_damage_is_a_typed_error_or_another_value_and_takes_no_memory(name):
    codec = CODECS[name]()
    assert_survives(codec.pack(codec.values[-1]), codec.read, codec.pack)


@pytest.mark.parametrize(("start", "stop"), list(itertools.combinations_with_replacement((0, 1, 4), 2)))
def test_samples_are_packed_as_their_batch_is(start, stop):
    """A data processor packs without PyTorch, and the way back is the batch's."""
    drawn = np.random.default_rng(0)
    bags = np.array([0, 2, 2, 3, 7])
    columns = {
        "narrow": Column(drawn.integers(-9, 9, (4, 2))),
        "wide": Column(np.array([[-(2**63)], [0], [2**31], [2**63 - 1]])),
        "bags": Column(np.arange(7), bags, drawn.random(7, np.float32)),
    }
    samples = Samples(drawn.random((4, 3), np.float32), columns, drawn.random(4, np.float32))
    batch = samples.batch(start, stop, 5)
    body, buffers = pack(SentBatch(5, samples.part(start, stop)))
    expected, others = pack(SentBatch.of(batch))
    assert body == expected
    assert list(map(bytes, buffers)) == list(map(bytes, others))
