"""Batches of every shape arrive as they were sent, from plain bytes; whatever else arrives is an error and no more."""

from __future__ import annotations

import enum
import math
from collections import OrderedDict, defaultdict
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType, SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.adapt import Adapter
from bagpipe.data.tree_wire import pack_trees, types_in, unpack_trees
from bagpipe.errors import BatchError, WireError
from bagpipe.types import Ids
from bagpipe.wire import tree_messages as nodes
from harness.examples import examples
from harness.fake_kjt import KeyedJagged
from harness.shapes import BATCHES, A, fields


def sent(batch, types=None):
    """What arrives."""
    known = types_in(batch) if types is None else types
    return unpack_trees(pack_trees([batch], (), known), known)[0]


def same(left, right):
    """Equal in types, shapes and bits."""
    if isinstance(left, torch.Tensor):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and torch.equal(left.isnan(), right.isnan())
            and (torch.equal(left.nan_to_num(), right.nan_to_num()))
        )
    if isinstance(left, np.ndarray | np.generic):
        return type(left) is type(right) and left.dtype == right.dtype and left.tobytes() == right.tobytes()
    if isinstance(left, KeyedJagged):
        pairs = [(getattr(left, name)(), getattr(right, name)()) for name in ("values", "lengths", "weights_or_none")]
        return left.keys() == right.keys() and all(same(*pair) for pair in pairs)
    if isinstance(left, MappingProxyType):
        left = dict(left)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and math.isnan(left):
        return math.isnan(right)
    if isinstance(left, Ids):
        return all(same(getattr(left, name), getattr(right, name)) for name in ("values", "offsets", "weights"))
    if left is None or isinstance(left, int | float | str | bytes):
        return left == right
    return all(map(same, fields(left), fields(right)))


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_of_any_shape_arrives_as_it_was(kind):
    assert same(BATCHES[kind][0], sent(BATCHES[kind][0]))


@pytest.mark.parametrize("kind", BATCHES)
def test_ids_that_the_plan_has_travel_as_their_shape_only(kind):
    batch, names = BATCHES[kind]
    adapter = Adapter(batch)
    adapter.choose(names)
    adapter.require(names)
    found = adapter.extract(batch, names, 0)
    dropped = adapter.without(batch, list(found))
    types = types_in(batch)
    buffer = pack_trees([dropped], [adapter.paths[name] for name in names], types)
    arrived = unpack_trees(buffer, types)[0]
    assert {name: len(ids) for name, ids in adapter.extract(arrived, names, 0).items()} == {
        name: len(ids) for name, ids in found.items()
    }
    again = adapter.replace(arrived, {name: torch.from_numpy(ids.copy()) for name, ids in found.items()})
    expected = adapter.replace(batch, {name: torch.from_numpy(ids.copy()) for name, ids in found.items()})
    assert same(expected, again)
    long = adapter.replace(batch, {name: torch.from_numpy(ids.copy()) for name, ids in found.items()})
    assert buffer.nbytes < pack_trees([long], (), types).nbytes


PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
SHAPES = st.lists(st.integers(0, 3), max_size=3)
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
]
TENSORS = st.builds(
    lambda shape, dtype: torch.arange(math.prod(shape)).reshape(shape).to(dtype), SHAPES, st.sampled_from(DTYPES)
)
ARRAYS = st.builds(
    lambda shape, dtype: np.arange(math.prod(shape)).reshape(shape).astype(dtype),
    SHAPES,
    st.sampled_from(["<f4", ">i8", "<U5", "S3", "<M8[s]", "?", "<c16"]),
)
TREES = st.recursive(
    PLAIN | TENSORS | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(-9, 9), inner, max_size=4)
        | st.dictionaries(st.sampled_from("abc"), inner, min_size=1).map(lambda parts: SimpleNamespace(**parts))
    ),
    max_leaves=12,
)


@examples(150)
@given(TREES)
def test_any_nesting_of_what_travels_arrives_as_it_was(tree):
    assert same(tree, sent(tree))


def test_numbers_of_numpy_and_mappings_of_other_kinds_stay_what_they_are():
    counts = defaultdict(list, {"x": [1]})
    batch = {"n": np.float32(2.5), "o": OrderedDict(b=1, a=2), "d": counts, "at": np.array(7, np.int16)}
    found = sent(batch)
    assert same(batch, found)
    assert found["d"]["new"] == []
    assert type(found["n"]) is np.float32


def test_tensors_without_elements_arrive_whatever_their_strides():
    odd = torch.empty_strided((0,), (0,))
    assert same({"a": torch.empty(0, 3), "b": odd}, sent({"a": torch.empty(0, 3), "b": odd}))


def test_what_arrives_is_writable_and_contiguous():
    found = sent({"t": torch.arange(12).reshape(3, 4).T, "a": np.arange(12).reshape(3, 4).T})
    found["t"].add_(1)
    found["a"] += 1
    assert found["t"].is_contiguous()
    assert found["t"][1, 0] == found["a"][1, 0] == 2


@dataclass
class Sample:
    x: torch.Tensor
    note: str = ""


def test_types_come_from_the_receiver_and_never_from_the_wire():
    batch = {"s": Sample(A, "hello"), "o": SimpleNamespace(a=1)}
    buffer = pack_trees([batch], (), types_in(batch))
    found = unpack_trees(buffer, types_in({"s": Sample(A[:0]), "o": SimpleNamespace(b=3)}))[0]
    assert type(found["s"]) is Sample
    assert found["s"].note == "hello"
    assert vars(found["o"]) == {"a": 1}
    with pytest.raises(WireError, match=r"a batch with a .*Sample.*loader has none"):
        unpack_trees(buffer, types_in({"o": SimpleNamespace()} | {"o": SimpleNamespace(b=3)}))


def test_an_object_that_refers_to_one_that_holds_it_does_so_again():
    batch = SimpleNamespace(a=A)
    batch.parent = SimpleNamespace(child=batch)
    found = sent(batch)
    assert found.parent.child is found


class Colour(enum.Enum):
    RED = 1


class Slots:
    __slots__ = ("x",)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (datetime(2020, 1, 1), "'x' is a datetime, so it can't be sent"),
        (Colour.RED, "'x' is a Colour"),
        (Slots(), "'x' is a Slots"),
        (len, "'x' is a builtin_function"),
        ({1, 2}, "'x' is a set"),
        ({("a", 1): 2}, r"'x' has the key \('a', 1\)"),
        (2**64, "'x' is 18446744073709551616, and numbers travel with 64 bits"),
        (np.array(["a", None]), "'x' is a NumPy array of object"),
        (torch.ones(2, device="meta"), "'x' is a tensor of float32"),
        (torch.ones(2).to_sparse(), "'x' is a tensor of float32"),
        ([[3, Colour.RED]], "'x.0.1' is a Colour"),
    ],
)
def test_what_can_not_travel_is_refused_by_its_place_and_with_a_remedy(value, message):
    batch = {"a": A, "x": value}
    with pytest.raises(BatchError, match=f"batch 5: {message}.*give tensors"):
        pack_trees([batch], (), types_in(batch), 5)


def test_a_type_that_the_first_batch_had_not_is_refused_by_the_sender():
    with pytest.raises(BatchError, match=r"'x' is a Sample, and no batch began with one"):
        pack_trees([{"x": Sample(A)}], (), types_in({"x": 1}))


def test_nesting_has_a_limit():
    deep = 1
    for _ in range(80):
        deep = [deep]
    with pytest.raises(BatchError, match="nested 64 times"):
        pack_trees([deep], (), {})


def raw(parts, tail=b""):
    body = msgspec.msgpack.encode(parts)
    return memoryview(len(body).to_bytes(4, "little") + body + tail)


@pytest.mark.parametrize(
    "buffer",
    [
        memoryview(b""),
        memoryview(b"\xff\xff\xff\x7f"),
        memoryview(b"\x01\x00\x00\x00\xc1"),
        raw([]),
        raw([nodes.Plain(1)]),
        raw([nodes.Items(2, False), nodes.Plain(1)]),
        raw([nodes.Items(2**62, False)]),
        raw([nodes.Items(0, False), nodes.Plain(1)]),
        raw([nodes.Items(0, False)], b"more"),
        raw([nodes.Items(1, False), nodes.TensorNode("float32", [2])], b"1234"),
        raw([nodes.Items(1, False), nodes.TensorNode("float32", [2**30, 2**30])]),
        raw([nodes.Items(1, False), nodes.TensorNode("float32", [0, 2**30, 2**30])]),
        raw([nodes.Items(1, False), nodes.TensorNode("object", [1])], b"12345678"),
        raw([nodes.Items(1, False), nodes.TensorNode("bool", [1])], b"\x02"),
        raw([nodes.Items(1, False), nodes.ArrayNode("|O8", [1], False)], b"12345678"),
        raw([nodes.Items(1, False), nodes.ArrayNode("<f3", [1], False)], b"123"),
        raw([nodes.Items(1, False), nodes.ArrayNode("<M8[zz]", [1], False)], b"12345678"),
        raw([nodes.Items(1, False), nodes.ArrayNode("<U1", [1], False)], b"\xff\xff\xff\x7f"),
        raw([nodes.Items(1, False), nodes.ArrayNode("|b1", [1], False)], b"\x07"),
        raw([nodes.Items(1, False), nodes.ArrayNode("<f4", [1], True)], b"1234"),
        raw([nodes.Items(1, False), nodes.LeftOut("int64", [2**30, 2**10])]),
        raw([nodes.Items(1, False), nodes.LeftOut("float32", [3])]),
        raw([nodes.Items(1, False), nodes.LeftOut("object", [3])]),
        raw([nodes.Items(1, False), nodes.Again(0)]),
        raw([nodes.Items(1, False), nodes.Entries(["a", "a"], None), nodes.Plain(1), nodes.Plain(1)]),
        raw([nodes.Items(1, False), nodes.Entries(["a"], "os.environ"), nodes.Plain(1)]),
        raw([nodes.Items(1, False), nodes.Fields("shapes.Pair", ["sparse"]), nodes.Plain(1)]),
        raw([nodes.Items(1, False), nodes.Fields("builtins.type", ["a"]), nodes.Plain(1)]),
        raw([nodes.Items(1, False), nodes.Entries(["a"], "shapes.Pair"), nodes.Plain(1)]),
        raw([nodes.Items(1, False), nodes.Fields("keyed.KeyedJagged", ["a"]), nodes.Plain(1)]),
        raw([nodes.Items(1, False), nodes.Keyed("shapes.Pair", ["a"], False), nodes.Plain(1), nodes.Plain(1)]),
        raw([nodes.Items(1, False), nodes.Keyed("keyed.KeyedJagged", ["a"], False), *[nodes.Plain(1)] * 2]),
        raw([nodes.Items(1, False), nodes.Keyed("keyed.KeyedJagged", ["a"], False), *[nodes.LeftOut("int8", [3])] * 2]),
        raw([nodes.Items(1, False)] * 200 + [nodes.Plain(1)]),
        raw([[77, 1]]),
    ],
)
def test_bytes_that_are_no_batches_are_one_typed_error(buffer):
    types = types_in([BATCHES["a named tuple"][0], BATCHES["a keyed jagged tensor"][0]])
    with pytest.raises(WireError):
        unpack_trees(buffer, types)


@examples(300)
@given(st.data())
def test_damaged_bytes_never_do_more_than_raise_a_typed_error(data):
    batch = [BATCHES[kind][0] for kind in ("a named tuple", "a keyed jagged tensor", "a batch", "an ordered dict")]
    types = types_in(batch)
    damaged = bytearray(pack_trees([batch], (), types))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = damaged[: data.draw(st.integers(0, len(damaged)))] if data.draw(st.booleans()) else damaged
    with suppress(WireError, BatchError):
        unpack_trees(memoryview(cut), types)
