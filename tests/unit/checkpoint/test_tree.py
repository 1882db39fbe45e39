"""A tree comes back bit for bit, or is refused by name."""

from __future__ import annotations

import json
import random
import struct
from collections import Counter, OrderedDict
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from bagpipe.checkpoint import tensors
from bagpipe.checkpoint.tensors import Kind, encode_header
from bagpipe.checkpoint.tree import unpack_tree
from bagpipe.errors import CheckpointError
from harness.checkpointed import pack_tree
from harness.examples import examples

NAN = struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0]


def same(one, other):
    """Equal in type and in bits."""
    if type(one) is not type(other) and not isinstance(one, torch.Tensor):
        return False
    if isinstance(one, torch.Tensor):
        return (
            type(other) is torch.Tensor
            and one.dtype == other.dtype
            and one.shape == other.shape
            and torch.equal(one.detach().reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
        )
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, dict):
        return len(one) == len(other) and all(
            same(a, c) and same(b, d) for (a, b), (c, d) in zip(one.items(), other.items(), strict=True)
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def restored(tree):
    return unpack_tree(pack_tree(tree))


@pytest.mark.parametrize(
    "tree",
    [
        None, True, 0, -(2**63), 2**63, -(2**200), 10**5000, 0.1, -0.0, NAN, float("-inf"), "", "ä\ud800\0", b"\0",
        [], (), {}, set(), {1, 2}, [[]], (None, (1,)), {"b": 1, "a": 2}, {0: 1, "0": 2, (1, "x"): 3, None: 4, 1.5: 5},
        OrderedDict(b=1, a=2), Counter({3: 2}), {"tree": {"list": 1}},
        torch.zeros(0, 3), torch.tensor(1.5), torch.arange(6.0).reshape(2, 3).T, torch.tensor([True, False]),
        torch.tensor([1.0, float("nan"), -0.0], dtype=torch.bfloat16), torch.tensor([1, 2], dtype=torch.uint16),
        torch.nn.Parameter(torch.ones(3)), torch.randn(3, 3, dtype=torch.float64), torch.tensor(7, dtype=torch.int8),
        np.arange(5, dtype=np.uint32), np.float32(0.1), np.int64(-3), np.zeros((2, 0)), np.array(3.5), np.array([True]),
    ],
    ids=lambda tree: type(tree).__name__,
)  # fmt: skip
def test_every_kind_of_value_comes_back_to_the_bit(tree):
    assert same(tree, restored(tree))
    assert same({"a": [tree, tree]}, restored({"a": [tree, tree]}))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
trees = st.recursive(
    scalars,
    lambda part: st.lists(part) | st.tuples(part, part) | st.dictionaries(st.text() | st.integers(), part),
    max_leaves=20,
)


@examples(150)
@given(trees)
def test_any_tree_comes_back(tree):
    assert same(tree, restored(tree))


def test_generators_and_optimizers_go_on_as_if_nothing_had_happened():
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    generator = np.random.default_rng(5)
    states = {
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "model": model.state_dict(),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": generator.bit_generator.state,
        "legacy": np.random.RandomState(3).get_state(),
    }
    found = restored(states)
    assert same({**states, "model": dict(states["model"])}, {**found, "model": dict(found["model"])})
    expected = generator.random(3).tolist(), random.random()
    generator.bit_generator.state = found["numpy"]
    random.setstate(found["python"])
    assert (generator.random(3).tolist(), random.random()) == expected
    optimizer.load_state_dict(found["optimizer"])
    scheduler.load_state_dict(found["scheduler"])
    scheduler.step()


def test_the_bytes_are_plain_safetensors_and_each_tensor_is_aligned():
    blob = pack_tree([torch.ones(3, dtype=torch.uint8), torch.ones(3), b"abc", torch.ones(3, dtype=torch.float64)])
    assert load(blob)["3"].tolist() == [1.0] * 3
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    assert length % 8 == 0
    sizes = {"U8": 1, "F32": 4, "F64": 8}
    assert all(
        entry["data_offsets"][0] % sizes[entry["dtype"]] == 0 for name, entry in header.items() if name[0] != "_"
    )


def test_tensors_are_named_by_their_place_in_the_tree():
    tree = {
        "parameters": {"top.0.weight": torch.ones(2), "top": {"0.weight": torch.zeros(1)}},
        "optimizer": [{0: torch.ones(3)}, b"x"],
        "__metadata__": torch.ones(4),
        "\ud800": torch.ones(5),
    }
    found = load(pack_tree(tree))
    assert {name: len(tensor) for name, tensor in found.items()} == {
        "parameters.top.0.weight": 2,
        "parameters.top.0.weight#1": 1,
        "optimizer.0.0": 3,
        "optimizer.1": 1,
        "__metadata__#4": 4,
        "?": 5,
    }
    assert same(tree, restored(tree))
    assert list(load(pack_tree(torch.ones(1)))) == ["tree"]


def test_more_plain_values_than_a_header_holds_are_refused_when_they_are_saved(monkeypatch):
    monkeypatch.setattr(tensors, "_HEADER_BYTES_MAX", 10_000)
    assert same([2**40] * 500, restored([2**40] * 500))
    with pytest.raises(CheckpointError, match="room for 10,000: keep numbers in tensors or arrays"):
        pack_tree([2**40] * 900)


class Strange:
    pass


def deep(depth):
    tree = []
    for _ in range(depth):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"a": [Strange()]}, r"the tree\['a'\]\[0\] is a .*Strange, which a checkpoint can't hold"),
        ({"f": lambda: 0}, r"the tree\['f'\] is a builtins.function"),
        ([1j], r"the tree\[0\] is a builtins.complex"),
        ([torch.zeros(2, dtype=torch.complex64)], "torch.complex64"),
        ([torch.zeros(2).to_sparse()], "torch.sparse_coo"),
        ([torch.empty(2, device="meta")], "on meta"),
        ([np.array(["a"])], "an array of <U1"),
        ([np.array([1], ">i4")], "an array of >i4"),
        ({frozenset(): 1}, r"the key frozenset\(\) of the tree"),
        (deep(200), "nested more than 100 deep"),
    ],
)
def test_what_can_not_be_kept_is_refused_by_name(tree, message):
    with pytest.raises(CheckpointError, match=message):
        pack_tree(tree)


def blob_of(structure, version="2"):
    text = structure if isinstance(structure, str) else json.dumps(structure)
    return encode_header({"0": Kind("U8", (2,))}, {"version": version, "tree": text}) + b"ab"


@pytest.mark.parametrize(
    "structure",
    [
        {"tensor": "1"}, {"tensor": 0}, {"tensor": ["0"]}, {"nothing": "0"}, {"scalar": "0"}, {}, {"a": 1, "b": 2}, [1],
        {"dict": [[1]]}, {"dict": [["a", 1], ["a", 2]]}, {"dict": [[{"list": []}, 1]]}, {"list": 5}, {"list": None},
        {"int": "x"}, {"int": 3}, {"float": "00"}, {"float": 1.0}, 1.5, "x{", "[" * 100_000,
        '{"list":[' * 200 + "]}" * 200,
    ],
    ids=lambda structure: str(structure)[:30],
)  # fmt: skip
def test_a_structure_that_nobody_packed_is_refused(structure):
    with pytest.raises(CheckpointError, match="damaged"):
        unpack_tree(blob_of(structure))


@pytest.mark.parametrize("label", ["tensor", "array"])
def test_a_shape_without_numbers_that_memory_can_not_have_is_refused(label):
    header = encode_header({"0": Kind("F32", (0, 2**40, 2**40))}, {"version": "2", "tree": json.dumps({label: "0"})})
    with pytest.raises(CheckpointError, match="damaged"):
        unpack_tree(header)


def test_bytes_of_another_kind_or_version_are_refused():
    with pytest.raises(CheckpointError, match="version '1', this Bagpipe reads '2'"):
        unpack_tree(blob_of(None, "1"))
    blob = pack_tree({"a": torch.ones(2), "b": 1})
    for length in range(len(blob)):
        with pytest.raises(CheckpointError):
            unpack_tree(blob[:length])
    generator = random.Random(0)
    for place in range(len(blob)):  # any byte may be anything: a tree or an error, no other exception
        damaged = bytearray(blob)
        damaged[place] = generator.randrange(256)
        with suppress(CheckpointError):
            unpack_tree(bytes(damaged))


def entry(shape="[1]", offsets="[0,4]", dtype="F32"):
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'


@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "{}",
        "\xff",
        "[" * 50_000,
        '{"a":1}',
        '{"a":{"dtype":"F32","shape":[1]}}',
        '{"__metadata__":{"a":1}}',
        '{"__metadata__":[]}',
        f'{{"a":{entry(dtype="X")}}}',
        f'{{"a":{entry(shape="[-1]")}}}',
        f'{{"a":{entry(shape="[2]")}}}',
        f'{{"a":{entry(shape="[true]")}}}',
        f'{{"a":{entry(shape="[4611686018427387904,4]")}}}',
        f'{{"a":{entry(offsets="[4,8]")}}}',
        f'{{"a":{entry(offsets="[0,4,4]")}}}',
        f'{{"a":{entry("[2]", "[0,2]", "U8")},"b":{entry("[3]", "[1,4]", "U8")}}}',
        f'{{"a":{entry()},"b":{entry()}}}',
    ],
    ids=lambda header: header[:40],
)
def test_a_header_that_does_not_fit_its_data_is_refused(header):
    text = header.encode("latin-1")
    with pytest.raises(CheckpointError, match="is not a file of tensors"):
        unpack_tree(len(text).to_bytes(8, "little") + text + b"\0\0\0\0")


def test_tensors_of_one_number_or_none_come_back_whatever_their_strides():
    grid = torch.arange(12.0).reshape(3, 4)
    for tensor in (grid[:1, 0], grid[:0, 0], grid[1:2, 2:3], grid[:1, 0].to(torch.bfloat16)):
        assert torch.equal(unpack_tree(pack_tree({"a": tensor}))["a"], tensor)
