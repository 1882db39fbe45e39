from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch

from bagpipe.adapt import Adapter, values_of
from bagpipe.errors import BatchError
from bagpipe.types import Batch, Ids

Pair = namedtuple("Pair", ["sparse", "labels"])


@dataclass(frozen=True)
class Custom:
    ids: dict
    dense: torch.Tensor


class Keyed:
    """The methods of a KeyedJaggedTensor that are used, and no more."""

    def __init__(self, keys, values, lengths, weights=None):
        self._keys, self._values, self._lengths, self._weights = keys, values, lengths, weights

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def lengths(self):
        return self._lengths

    def offsets(self):
        return torch.cumsum(self._lengths, 0)

    def weights_or_none(self):
        return self._weights

    def __getitem__(self, key):
        samples = len(self._lengths) // len(self._keys)
        at = self._keys.index(key)
        start = int(self._lengths[: at * samples].sum())
        lengths = self._lengths[at * samples : (at + 1) * samples]
        return SimpleNamespace(values=lambda: self._values[start : start + int(lengths.sum())])


def ids(*numbers):
    return torch.tensor(numbers)


BATCHES = {
    "a dict of tensors": ({"a": ids(3, 1), "b": ids(4, 5).reshape(2, 1), "x": torch.ones(2)}, ["a", "b"]),
    "a tuple with a dict": ((torch.ones(2), {"a": ids(3, 1), "b": ids(4, 5)}, torch.ones(2)), ["a", "b"]),
    "positions in a tuple": ((ids(3, 1), ids(4, 5), torch.ones(2)), ["0", "1"]),
    "values and offsets": ({"a": (ids(3, 1, 2), ids(0, 2)), "b": (ids(4), ids(0, 0), torch.ones(1))}, ["a", "b"]),
    "a named tuple": (Pair({"a": ids(3), "b": ids(4)}, torch.ones(1)), ["a", "b"]),
    "a dataclass": (Custom({"a": ids(3), "b": ids(4)}, torch.ones(1)), ["a", "b"]),
    "an object": (SimpleNamespace(a=ids(3), b=ids(4)), ["a", "b"]),
    "a batch": (
        Batch(torch.ones(1, 2), {"a": Ids(ids(3).reshape(1, 1)), "b": Ids(ids(4, 4), ids(0))}, torch.ones(1)),
        ["a", "b"],
    ),
    "a keyed jagged tensor": (Keyed(["a", "b"], ids(3, 1, 4), torch.tensor([1, 1, 0, 1])), ["a", "b"]),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_ids_are_found_and_replaced_wherever_they_are(kind):
    batch, names = BATCHES[kind]
    adapter = Adapter(batch)
    assert list(adapter.paths) == names
    found = adapter.extract(batch, tuple(names), 0)
    new = {name: torch.from_numpy(values) + 100 for name, values in found.items()}
    changed = adapter.replace(batch, new)
    assert type(changed) is type(batch)
    again = adapter.extract(changed, tuple(names), 0)
    before = adapter.extract(batch, tuple(names), 0)
    for name in names:
        assert (again[name] == found[name] + 100).all()
        assert (before[name] == found[name]).all(), "the loader's batch itself must not change"


def test_shapes_and_companions_stay_as_they_were():
    batch = {"a": Ids(ids(1, 2).reshape(1, 2), None, torch.ones(1, 2)), "label": torch.ones(1)}
    adapter = Adapter(batch)
    changed = adapter.replace(batch, {"a": ids(7, 8)})
    assert changed["a"].values.shape == (1, 2)
    assert changed["a"].weights is batch["a"].weights
    assert changed["label"] is batch["label"]


def test_keys_that_occur_twice_are_named_by_their_path():
    adapter = Adapter({"left": {"a": ids(1)}, "right": {"a": ids(2), "b": ids(3)}})
    assert list(adapter.paths) == ["left.a", "right.a", "b"]


def test_integers_of_any_width_become_64_bits_without_passing_through_floats():
    large = 2**62 + 1
    adapter = Adapter({"a": ids(large), "b": torch.tensor([7], dtype=torch.int32)})
    found = adapter.extract({"a": ids(large), "b": torch.tensor([7], dtype=torch.int32)}, ("a", "b"), 0)
    assert found["a"].tolist() == [large]
    assert found["b"].dtype == "int64"


def test_a_batch_without_an_announced_feature_is_refused_with_its_number():
    adapter = Adapter({"a": ids(1), "b": ids(2)})
    with pytest.raises(BatchError, match=r"batch 17 has no ids of feature 'b'.*it has 'a'"):
        adapter.extract({"a": ids(1)}, ("a", "b"), 17)
    with pytest.raises(BatchError, match="batch 18 has no ids of feature 'b'"):
        adapter.extract({"a": ids(1), "b": torch.ones(1)}, ("a", "b"), 18)
    with pytest.raises(BatchError, match=r"no ids of feature 'c'; they have 'a', 'b'"):
        adapter.require(["a", "c"])


def test_the_kind_of_mapping_stays():
    ordered = OrderedDict(b=ids(1), a=ids(2))
    changed = Adapter(ordered).replace(ordered, {"a": ids(9)})
    assert type(changed) is OrderedDict
    assert [(name, part.tolist()) for name, part in changed.items()] == [("b", [1]), ("a", [9])]
    assert ordered["a"].tolist() == [2]
    frozen = MappingProxyType({3: ids(1)})
    assert Adapter(frozen).replace(frozen, {"3": ids(9)})[3].tolist() == [9]


SORTED = (ids(4, 5), ids(0, 1))
UNSORTED = (ids(4, 5), ids(3, 0))


@pytest.mark.parametrize("pair", [SORTED, UNSORTED, [ids(4, 5), ids(0, 1)], (ids(4, 5), ids(0, 1), torch.ones(2))])
@pytest.mark.parametrize(
    ("names", "bags", "found"),
    [
        ((), True, ["words", "user"]),
        ((), False, ["0", "1", "user"]),
        (("words", "user"), False, ["words", "user"]),
        (("words.0", "user"), True, ["words.0", "1", "user"]),
        (("0", "1", "user"), True, ["0", "1", "user"]),
        (("user",), True, ["words", "user"]),
    ],
)
def test_what_a_pair_of_tensors_is_depends_on_names_and_layers_and_not_on_values(pair, names, bags, found):
    adapter = Adapter({"words": pair, "user": ids(7)})
    adapter.choose(names, bags=bags)
    assert list(adapter.paths) == found


def test_pairs_by_position_are_two_features_if_their_names_say_so():
    adapter = Adapter((SORTED, torch.ones(2)))
    adapter.choose(["0", "1"])
    assert adapter.paths == {"0": ("0", "0"), "1": ("0", "1")}
    adapter.choose(["0"])
    assert adapter.paths == {"0": ("0",)}
    adapter.choose(["0.0", "0.1"])
    assert adapter.paths == {"0.0": ("0", "0"), "0.1": ("0", "1")}
    adapter.require(["0", "1"])
    assert adapter.extract((UNSORTED, torch.ones(2)), ["0", "1"], 0)["1"].tolist() == [3, 0]


def test_of_two_pairs_each_is_what_its_names_say():
    adapter = Adapter({"left": SORTED, "right": SORTED})
    adapter.choose(["left", "right.1"])
    assert list(adapter.paths) == ["left", "0", "right.1"]


def test_a_pair_taken_for_bags_without_being_named_must_have_offsets_in_every_batch():
    adapter = Adapter({"words": SORTED})
    assert adapter.extract({"words": (ids(9), ids(0, 0, 1))}, ["words"], 3)["words"].tolist() == [9]
    for offsets in (ids(1), ids(0, 2), ids(0, 1, 0)):
        with pytest.raises(BatchError, match=r"batch 4: 'words' is a pair.*offsets of bags.*features=\{'words\.0'"):
            adapter.extract({"words": (ids(9), offsets)}, ["words"], 4)
    adapter.choose(["words"])
    lengths = {"words": (ids(9, 9, 8), ids(2, 1))}
    assert adapter.extract(lengths, ["words"], 4)["words"].tolist() == [9, 9, 8], "whoever names it knows what it is"


def test_a_batch_without_ids_says_what_it_has_and_what_is_accepted():
    adapter = Adapter({"x": torch.ones(2, 3), "at": np.array([1, 2]), "name": ["a"], "none": None})
    with pytest.raises(BatchError) as caught:
        adapter.require_any()
    for named in ("a dict", "'x' is a tensor of float32 and shape (2, 3)", "'at' is a NumPy array of int64", "a str"):
        assert named in str(caught.value)
    assert "integer tensors, bagpipe.Ids, (values, offsets) pairs or KeyedJaggedTensors" in str(caught.value)
    with pytest.raises(BatchError, match=r"first batch, a float in which 'it' is a float: ids are integer tensors"):
        Adapter(3.5).require_any()
    Adapter(ids(1)).require_any()


def test_ids_of_another_type_are_named_with_their_type():
    with pytest.raises(BatchError, match=r"feature 'b' is a tensor of float64 and shape \(1,\): ids are integer"):
        Adapter({"a": ids(1), "b": torch.ones(1, dtype=torch.float64)}).require(["a", "b"])
    adapter = Adapter({"a": ids(1)})
    with pytest.raises(BatchError, match=r"batch 2 has no ids of feature 'a'.*and there is a tensor of float32"):
        adapter.extract({"a": torch.ones(3)}, ["a"], 2)


def test_objects_that_refer_to_each_other_are_walked_once():
    batch = SimpleNamespace(a=ids(3))
    batch.parent = SimpleNamespace(child=batch, b=ids(4))
    assert list(Adapter(batch).paths) == ["a", "b"]


def test_a_bare_tensor_is_a_batch():
    adapter = Adapter(ids(3, 4))
    assert list(adapter.paths) == [""]
    assert adapter.replace(ids(3, 4), {"": ids(8, 9)}).tolist() == [8, 9]


def test_values_of_knows_every_kind_of_leaf():
    assert values_of(ids(1)).tolist() == [1]
    assert values_of((ids(1), ids(0))).tolist() == [1]
    assert values_of(Ids(ids(1), ids(0))).tolist() == [1]
