"""Batches of every shape are divided among trainers so that nothing is lost, doubled or torn from its sample."""

from __future__ import annotations

from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bagpipe.adapt import Adapter
from bagpipe.errors import BatchError
from bagpipe.oracle.assign import Assigner, Assignment, contiguous, round_robin
from bagpipe.split import Splitter
from bagpipe.types import Ids
from harness.fake_kjt import KeyedJagged
from harness.shapes import BAGS, BATCHES, LABELS, A, B, fields, tensors

ASSIGNMENTS = {
    "contiguous": contiguous(4, 2),
    "round robin": round_robin(4, 3),
    "all to the last": Assignment(None, (0, 0, 0, 4)),
    "mixed up": Assignment(np.array([3, 0, 2, 1]), (0, 1, 1, 4)),
}


def splitter(batch, names, **options):
    adapter = Adapter(batch)
    adapter.choose(names)
    adapter.require(names)
    return Splitter(adapter, names, **options), adapter


def per_sample(value, samples, bags=True):
    """What each sample has, as nested lists, found without the code under test; pairs are bags or two features."""
    if isinstance(value, KeyedJagged):
        parts = [value[key] for key in value.keys()]  # noqa: SIM118
        value = [(part.values(), part.offsets()[:-1], part.weights_or_none()) for part in parts]
    if isinstance(value, Ids):
        value = [value.values, *(part for part in (value.offsets, value.weights) if part is not None)]
    if isinstance(value, torch.Tensor | np.ndarray):
        assert len(value) == samples
        return [[each.tolist()] for each in value]
    if bags and isinstance(value, list | tuple) and len(value) in (2, 3) and is_index(value[1]):
        second = value[1].tolist()
        ends = [*second[1:], len(value[0])] if second[0] == 0 else np.cumsum(second).tolist()
        return [
            [part[start:end].tolist() for part in (value[0], *value[2:]) if part is not None]
            for start, end in zip([0, *ends][:-1], ends, strict=True)
        ]
    parts = value if isinstance(value, list | tuple) else fields(value)
    found = [per_sample(part, samples, bags) for part in parts]
    return [[each for part in found for each in part[sample]] for sample in range(samples)]


def is_index(value):
    return isinstance(value, torch.Tensor) and value.dim() == 1 and not value.is_floating_point()


@pytest.mark.parametrize("how", ASSIGNMENTS)
@pytest.mark.parametrize("kind", BATCHES)
def test_every_sample_goes_with_all_that_is_its_own_to_the_trainer_that_gets_it(kind, how):
    batch, names = BATCHES[kind]
    assignment = ASSIGNMENTS[how]
    divided, adapter = splitter(batch, names)
    bags = kind != "two features side by side"
    whole = per_sample(batch, 4, bags)
    divided.divide(batch, 0, Assigner("contiguous", 1))
    order = np.arange(4) if assignment.order is None else assignment.order
    parts = divided.split(batch, assignment)
    assert len(parts) == len(assignment.bounds) - 1
    for rank, (part, count) in enumerate(parts):
        chosen = order[assignment.bounds[rank] : assignment.bounds[rank + 1]].tolist()
        assert count == len(chosen)
        if type(batch) is not MappingProxyType:
            assert type(part) is type(batch)
        if count:
            assert per_sample(part, count, bags) == [whole[sample] for sample in chosen]
        assert list(adapter.extract(part, names, 0)) == names
        for tensor in tensors(part):
            assert tensor.is_contiguous()


@pytest.mark.parametrize("kind", BATCHES)
def test_parts_own_their_memory(kind):
    batch, names = BATCHES[kind]
    divided, _ = splitter(batch, names)
    divided.divide(batch, 0, Assigner("contiguous", 1))
    for how in ASSIGNMENTS.values():
        for part, _ in divided.split(batch, how):
            own = {tensor.untyped_storage().data_ptr() for tensor in tensors(part) if tensor.numel()}
            assert not own & {tensor.untyped_storage().data_ptr() for tensor in tensors(batch)}


@given(st.lists(st.integers(0, 3), max_size=9), st.integers(1, 4), st.randoms())
def test_bags_of_any_lengths_are_divided_in_any_order(lengths, trainers, random):
    samples, values = len(lengths), torch.arange(sum(lengths))
    offsets = torch.tensor(np.cumsum([0, *lengths])[:-1])
    batch = {"a": (values, offsets), "i": Ids(values, offsets, values.float()), "y": torch.arange(samples)}
    order = random.sample(range(samples), samples)
    bounds = sorted(random.choices(range(samples + 1), k=trainers - 1))
    assignment = Assignment(np.array(order, np.int64), (0, *bounds, samples))
    divided, _ = splitter(batch, ["a", "i"])
    divided.divide(batch, 0, Assigner("contiguous", 1))
    for part, count in divided.split(batch, assignment):
        starts = [*part["a"][1].tolist(), len(part["a"][0])]
        assert len(starts) == count + 1
        for place, sample in enumerate(part["y"].tolist()):
            expected = values[sum(lengths[:sample]) : sum(lengths[: sample + 1])]
            assert torch.equal(part["a"][0][starts[place] : starts[place + 1]], expected)
        assert torch.equal(part["i"].values, part["a"][0])
        assert torch.equal(part["i"].weights, part["a"][0].float())
        assert torch.equal(part["i"].offsets, part["a"][1])


def test_offsets_that_end_with_the_number_of_ids_do_so_in_every_part():
    batch = {"a": (BAGS[0], torch.tensor([0, 1, 4, 4, 6])), "y": LABELS}
    divided, _ = splitter(batch, ["a"], ending=["a"])
    parts = [part["a"] for part, _ in divided.divide(batch, 0, Assigner("contiguous", 2))]
    assert [part[1].tolist() for part in parts] == [[0, 1, 4], [0, 0, 2]]
    with pytest.raises(BatchError, match="neither offsets nor lengths"):
        divided.divide({"a": (BAGS[0], torch.tensor([0, 1, 4, 4, 5])), "y": LABELS}, 1, Assigner("contiguous", 2))


def test_what_has_no_samples_is_given_to_all():
    shared = {"temperature": torch.tensor(0.5), "scale": torch.ones(1, 7), "step": 3, "name": "train", "none": None}
    batch = {"a": A, **shared, "at": np.array(3)}
    divided, _ = splitter(batch, ["a"])
    for part, _ in divided.divide(batch, 0, Assigner("contiguous", 2)):
        assert {name: part[name] for name in shared} == shared
        assert part["at"] == 3


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_with_an_element_a_sample_are_divided_and_others_are_not(kind):
    batch = {
        "a": A,
        "names": kind(["p", "q", "r", "s"]),
        "sizes": kind([torch.ones(n) for n in (2, 1, 5, 4)]),
        "views": kind([torch.arange(4), torch.arange(4) + 10, torch.arange(4) + 20, torch.arange(4) + 30]),
        "classes": kind(["yes", "no"]),
    }
    divided, _ = splitter(batch, ["a"])
    first, second = (part for part, _ in divided.divide(batch, 0, Assigner("round_robin", 2)))
    assert first["names"] == kind(["p", "r"])
    assert second["names"] == kind(["q", "s"])
    assert [len(each) for each in second["sizes"]] == [1, 4]
    assert [each.tolist() for each in first["views"]] == [[0, 2], [10, 12], [20, 22], [30, 32]]
    assert first["classes"] is batch["classes"] or first["classes"] == kind(["yes", "no"])


def test_two_tensors_of_labels_are_no_bags():
    batch = {"a": BAGS, "targets": (torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 1, 1]))}
    divided, _ = splitter(batch, ["a"])
    parts = [part["targets"] for part, _ in divided.divide(batch, 0, Assigner("contiguous", 2))]
    assert [[each.tolist() for each in part] for part in parts] == [[[0, 0], [0, 0]], [[0, 0], [1, 1]]]


def test_arrays_are_divided_like_tensors():
    batch = {"a": A, "names": np.array(["p", "q", "r", "s"], object), "x": np.arange(8).reshape(4, 2)}
    divided, _ = splitter(batch, ["a"])
    parts = [part for part, _ in divided.divide(batch, 0, Assigner("round_robin", 2))]
    assert [part["names"].tolist() for part in parts] == [["p", "r"], ["q", "s"]]
    assert parts[1]["x"].tolist() == [[2, 3], [6, 7]]
    assert parts[1]["x"].flags["C_CONTIGUOUS"]


def test_an_object_that_is_referred_to_from_within_is_divided_once():
    batch = SimpleNamespace(a=A)
    batch.parent = SimpleNamespace(child=batch, b=B)
    divided, _ = splitter(batch, ["a", "b"])
    part = divided.divide(batch, 0, Assigner("contiguous", 2))[1][0]
    assert part.parent.child is part
    assert part.parent.b.tolist() == [[9, 10], [11, 12]]
    assert batch.parent.child is batch


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"a": A, "x": torch.ones(3)}, r"4 samples, and 'x' is a tensor of float32 and shape \(3,\): which trainer"),
        ({"a": A, "x": np.ones((2, 4))}, r"4 samples, and 'x' is a NumPy array of float64 and shape \(2, 4\)"),
        ({"a": A, "b": torch.tensor([1, 2])}, "ids differ in their number of samples: 'a' has 4, 'b' has 2"),
        ({"a": torch.tensor(3)}, "ids of feature 'a' are one number"),
        ({"a": A, "more": {"i": Ids(B[:2])}}, r"'more.i' is bagpipe.Ids of 2 samples"),
        ({"a": A, "x": torch.ones(4, 2).to_sparse()}, "'x' is a tensor .*sparse or nested"),
        ({"a": A, "x": torch.ones(4, device="meta")}, "'x' is a tensor .*another device than the CPU"),
        ({"a": (A, torch.tensor([2, 9]))}, "'a' is a pair of tensors, but the second has neither offsets nor lengths"),
    ],
)
def test_what_contradicts_the_number_of_samples_is_refused_with_its_place_and_a_remedy(batch, message):
    divided, _ = splitter(batch, [name for name in ("a", "b") if name in batch])
    with pytest.raises(BatchError, match=message):
        divided.divide(batch, 0, Assigner("contiguous", 2))


def test_what_a_place_is_stays_for_all_batches():
    first = {"a": A, "x": LABELS, "names": [*"pqrs"], "classes": [*"yn"], "w": torch.ones(1, 3)}
    divided, _ = splitter(first, ["a"])
    divided.divide(first, 0, Assigner("contiguous", 2))
    two = {"a": A[:2], "x": LABELS[:2], "names": [*"tu"], "classes": [*"yn"], "w": torch.ones(1, 3)}
    part = divided.divide(two, 1, Assigner("contiguous", 2))[0][0]
    assert part["names"] == ["t"]
    assert part["classes"] == ["y", "n"], "two elements and two samples by chance"
    for name, value in (("x", LABELS), ("names", [*"pqrs"])):
        with pytest.raises(BatchError, match=f"batch 2 has 2 samples, and '{name}' is"):
            divided.divide(two | {name: value}, 2, Assigner("contiguous", 2))
    one = {"a": A[:1], "x": LABELS[:1], "names": ["v"], "classes": [*"yn"], "w": torch.ones(1, 3)}
    assert [part["w"].shape for part, _ in divided.divide(one, 3, Assigner("contiguous", 2))] == [(1, 3), (1, 3)]


def test_a_feature_that_is_missing_is_named_as_everywhere():
    divided, _ = splitter({"a": A, "b": B}, ["a", "b"])
    with pytest.raises(BatchError, match="batch 7 has no ids of feature 'b'"):
        divided.divide({"a": A}, 7, Assigner("contiguous", 2))


@pytest.mark.parametrize("kind", BATCHES)
def test_samples_are_placed_by_their_rows_as_in_a_batch_of_ours(kind):
    batch, names = BATCHES[kind]
    divided, adapter = splitter(batch, names)
    tables = [[name] for name in names]
    parts = divided.divide(batch, 0, Assigner("aware", 2, tables=tables))
    assert sum(count for _, count in parts) == 4
    found = [adapter.extract(part, names, 0)[names[0]] for part, _ in parts]
    whole = adapter.extract(batch, names, 0)[names[0]]
    assert sorted(np.concatenate(found).tolist()) == sorted(whole.tolist())
