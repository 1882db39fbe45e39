"""Batches of every shape arrive as they were sent, from plain bytes; whatever else arrives is an error and no more."""

from __future__ import annotations

import enum
import math
import re
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
from bagpipe.data.tree_wire import Again, Numbers, Parts, Trees, pack_trees, types_in, unpack_trees
from bagpipe.errors import BatchError, WireError
from bagpipe.types import Ids
from bagpipe.wire.codec import pack, unpack
from harness.examples import examples
from harness.fake_kjt import KeyedJagged
from harness.shapes import BATCHES, A, fields


def sent(batch, types=None):
    """What arrives."""
    known = types_in(batch) if types is None else types
    trees = unpack(*pack(pack_trees([batch], (), known)), Trees)
    return unpack_trees(trees, known)[0]


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
    assert buffer.num_bytes < pack_trees([long], (), types).num_bytes


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
    """A description of these nodes, below a list of one batch."""
    return described([Parts("list", 1), *parts], tail)


def described(nodes, tail=b""):
    return Trees(*(np.frombuffer(part, np.uint8) for part in (msgspec.msgpack.encode(nodes), tail)))


PAIR, KEYED = "harness.shapes.Pair", "harness.fake_kjt.KeyedJagged"
VALUES, LENGTHS = Numbers("tensor", "int64", [2]), Numbers("tensor", "int64", [2])
LONG = np.ones(2, np.int64).tobytes()


@pytest.mark.parametrize(
    ("trees", "reason"),
    [
        (Trees(np.empty(0, np.uint8), np.empty(0, np.uint8)), "the description of batches is none"),
        (Trees(np.frombuffer(b"\xc1", np.uint8), np.empty(0, np.uint8)), "the description of batches is none"),
        (described(77), "Expected `array`"),
        (described([[77, 1]]), "Invalid value"),
        (described([]), "too few of them"),
        (described([1]), "a int came where a list of batches was due"),
        (described([Parts("tuple", 0)]), "a tuple came where a list"),
        (described([Parts("list", 2), 1]), "a container of 2 parts where 1 are left"),
        (described([Parts("list", 2**62)]), "where 0 are left"),
        (described([Parts("list", 0), 1]), "batches of 2 parts and 0 bytes: 1 and 0"),
        (described([Parts("list", 0)], b"more"), "batches of 1 parts and 4 bytes: 1 and 0"),
        (raw([Parts("dict", 1), 1]), "a dict of 1 parts without names"),
        (raw([Parts("list", ["a"]), 1]), "trainer 0 has a batch with a list"),
        (raw([Numbers("tensor", "float32", [2])], b"1234"), "a tensor of 8 bytes where 4 are left"),
        (raw([Numbers("tensor", "float32", [2**30, 2**30])]), "they are too many"),
        (raw([Numbers("tensor", "float32", [0, 2**30, 2**30])]), "they are too many"),
        (raw([Numbers("tensor", "float32", [2**31])]), "the description of batches is none"),
        (raw([Numbers("tensor", "float32", [1] * 17)]), "the description of batches is none"),
        (raw([Numbers("tensor", "object", [1])], b"12345678"), "a tensor of 'object', which is not known"),
        (raw([Numbers("tensor", "bool", [1])], b"\x02"), "a tensor of truth values has others"),
        (raw([Numbers("array", "|O8", [1])], b"12345678"), "an array of '|O8'"),
        (raw([Numbers("array", "<f3", [1])], b"123"), "an array of '<f3'"),
        (raw([Numbers("array", "<M8[zz]", [1])], b"12345678"), "an array of '<M8"),
        (raw([Numbers("array", "<U1", [1])], b"\xff\xff\xff\x7f"), "letters that do not exist"),
        (raw([Numbers("array", "|b1", [1])], b"\x07"), "an array of truth values has others"),
        (raw([Numbers("number", "<f4", [1])], b"1234"), "shape .1., which does not travel"),
        (raw([Numbers("some", "<f4", [1])], b"1234"), "the description of batches is none"),
        (raw([Numbers("left out", "int64", [2**30, 2**10])]), "they are too many"),
        (raw([Numbers("left out", "float32", [3])]), "no type of ids"),
        (raw([Numbers("left out", "object", [3])]), "not known"),
        (raw([Again(0)]), "object 0 of 0 is named again"),
        (raw([Parts("dict", ["a", "a"]), 1, 1]), "a name twice"),
        (raw([Parts("os.environ", ["a"]), 1]), "trainer 0 has a batch with a os.environ"),
        (raw([Parts("builtins.type", ["a"]), 1]), "trainer 0 has a batch with a builtins.type"),
        (raw([Parts(PAIR, ["sparse"]), 1]), "a harness.shapes.Pair of .'sparse'., which has"),
        (raw([Parts(PAIR, [0, 1]), 1, 1]), "a harness.shapes.Pair of .0, 1., which has"),
        (raw([Parts(PAIR, 2), 1, 1]), "of 2 parts without names"),
        (raw([Parts(KEYED, ["a"]), 1, 1, 1]), "has parts that are no tensors"),
        (raw([Parts(KEYED, ["a"]), LENGTHS, None, Numbers("tensor", "int64", [1])], LONG + LONG[:8]), "of others"),
        (raw([Parts(KEYED, ["a"]), Numbers("tensor", "float64", [2]), None, VALUES], LONG * 2), "of others"),
        (raw([Parts(KEYED, []), LENGTHS, None], LONG), "of others"),
        (raw([Parts(KEYED, ["a"]), Numbers("left out", "int64", [2**30]), None, VALUES], LONG), "of others"),
        (raw([Parts(KEYED, ["a"]), LENGTHS, Numbers("tensor", "int64", [1]), VALUES], LONG * 3), "with weights of"),
        (raw([Parts(KEYED, ["a"]), *[Numbers("left out", "int8", [3])] * 3]), "of others"),
        (raw([Parts("list", 1)] * 200 + [1]), "nested too deep"),
    ],
)  # fmt: skip
def test_bytes_that_are_no_batches_are_one_typed_error(trees, reason):
    types = types_in([BATCHES["a named tuple"][0], BATCHES["a keyed jagged tensor"][0]])
    with pytest.raises(WireError, match=re.escape(reason) if reason.startswith("an array of '|") else reason):
        unpack_trees(trees, types)


@examples(300)
@given(st.data())
def test_damaged_bytes_never_do_more_than_raise_a_typed_error(data):
    batch = [BATCHES[kind][0] for kind in ("a named tuple", "a keyed jagged tensor", "a batch", "an ordered dict")]
    types = types_in(batch)
    trees = pack_trees([batch], (), types)
    parts = [bytearray(trees.description.tobytes()), bytearray(trees.raw.tobytes())]
    for _ in range(data.draw(st.integers(1, 4))):
        damaged = parts[data.draw(st.sampled_from([0, 0, 0, 1]))]
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del parts[0][data.draw(st.integers(0, len(parts[0]))) :]
    with suppress(WireError, BatchError):
        unpack_trees(Trees(*(np.frombuffer(part, np.uint8) for part in parts)), types)
