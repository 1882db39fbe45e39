"""A loader that fills its buffers again is refused before a wrong number is trained; memory that stays the same is not.

Batches are read ahead, so what the loader writes into one that it has given would be trained in the place of the batch.
"""

from __future__ import annotations

import threading
from collections import UserDict, deque, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import bagpipe
from bagpipe.errors import BatchError
from harness.fake_kjt import KeyedJagged
from harness.plain import (
    assert_close,
    assert_same_bits,
    loss_fn,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    sgd,
    train_fast,
    train_plain,
)
from harness.scripts import Trainers
from harness.started import adagrad, start, step, train

pytestmark = pytest.mark.usefixtures("nothing_left")
Named = namedtuple("Named", ["user", "item", "dense", "label"])


@dataclass
class Record:
    user: torch.Tensor
    item: torch.Tensor
    dense: torch.Tensor
    label: torch.Tensor


def fresh(batch):
    """A batch in memory of its own."""
    return {name: value.clone() for name, value in batch.items()}


def refilled(batches, names, buffers=1, numpy=False):
    """The batches, of which some parts are always in the same memory, or in one of so many."""
    rings = [{name: batches[0][name].clone() for name in names} for _ in range(buffers)]
    for number, batch in enumerate(batches):
        ring = rings[number % buffers]
        for name, buffer in ring.items():
            if numpy:
                np.copyto(buffer.numpy(), batch[name].numpy())
            else:
                buffer.copy_(batch[name])
        yield fresh(batch) | ring


SHAPES = {
    "dict": (lambda b: b, lambda g: g),
    "named tuple": (lambda b: Named(**b), lambda g: g._asdict()),
    "dataclass": (lambda b: Record(**b), vars),
    "object": (lambda b: SimpleNamespace(**b), vars),
    "nested": (
        lambda b: ({"user": b["user"], "item": b["item"]}, [{"dense": b["dense"]}, (b["label"],)]),
        lambda g: g[0] | g[1][0] | {"label": g[1][1][0]},
    ),
    "pairs": (
        lambda b: b | {"item": (b["item"].flatten(), torch.arange(0, 18, 3))},
        lambda g: g | {"item": g["item"][0].reshape(6, 3)},
    ),
    "arrays": (
        lambda b: b | {"dense": b["dense"].numpy(), "label": b["label"].numpy()},
        lambda g: g | {"dense": torch.from_numpy(g["dense"]), "label": torch.from_numpy(g["label"])},
    ),
}


def run(loader, unpack=lambda given: given, **options):
    """The model, its row optimizer, and what trains them to the end or to an error."""
    rows = bagpipe.optim.SGD(0.1)
    net, optimizer, loader = start(loader, rows=rows, **{"check": True} | options)

    def trained():
        for given in loader:
            batch = unpack(given)
            loss_fn(net(batch), batch["label"]).backward()
            if loader.step_due:
                optimizer.step()
                optimizer.zero_grad()

    return net, rows, trained


# Refused


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_loader_that_fills_its_buffers_again_is_refused_before_they_are_trained(shape, numpy):
    pack, unpack = SHAPES[shape]
    loader = (pack(batch) for batch in refilled(make_batches(), ["dense", "label"], numpy=numpy))
    net, rows, trained = run(loader, unpack)
    with pytest.raises(BatchError, match=r"overwritten '.*(dense|1\.1\.0|1\.0).*' of batch 0.*batch 1.*clone\(\)"):
        trained()
    assert rows.updates == 0
    assert_same_bits(make_net().state_dict(), net.state_dict())


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"lookahead": 2}, {"policy": "lru"}])
def test_it_is_refused_with_other_settings_too(options):
    _, rows, trained = run(refilled(make_batches(), ["label"], numpy=True), **options)
    with pytest.raises(BatchError, match=r"'label' of batch \d.*clone\(\)"):
        trained()
    assert rows.updates == 0


def test_buffers_that_take_turns_are_refused_once_the_first_one_comes_again():
    _, rows, trained = run(refilled(make_batches(), ["label"], buffers=3), lookahead=5)
    with pytest.raises(BatchError, match="'label' of batch 0 while it read batch 3"):
        trained()
    assert rows.updates == 0


def test_a_buffer_that_is_filled_in_a_circle_is_refused_where_batches_overlap():
    buffer = np.zeros((20, 2), np.float32)

    def circular():
        for number, batch in enumerate(make_batches()):
            places = slice(number * 6 % 14, number * 6 % 14 + 6)
            buffer[places] = batch["dense"].numpy()
            yield batch | {"dense": torch.from_numpy(buffer[places])}

    _, rows, trained = run(circular(), lookahead=8)
    with pytest.raises(BatchError, match=r"'dense' of batch \d"):
        trained()
    assert rows.updates == 0


class Bags(nn.Module):
    """Bags of two keys, weighted, called on a KeyedJaggedTensor."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.EmbeddingBag(9, 3, mode="sum"), nn.EmbeddingBag(9, 3, mode="sum")

    def forward(self, ids):
        bags = [(ids["a"], self.a), (ids["b"], self.b)]
        return sum(layer(part.values(), part.offsets()[:-1], part.weights_or_none()) for part, layer in bags).sum()


@pytest.mark.parametrize("part", ["lengths", "weights_or_none"])
def test_a_keyed_jagged_tensor_whose_lengths_or_weights_are_filled_again_is_refused(part):
    lengths, weights = torch.tensor([2, 1, 1, 2]), torch.ones(6)

    def loader():
        for number in range(6):
            own, factors = lengths.clone(), weights.clone()
            if part == "lengths":
                own = lengths.copy_(torch.tensor([1 + number % 2, 2 - number % 2, 1, 2]))
            else:
                factors = weights.fill_(number)
            yield {"ids": KeyedJagged(["a", "b"], torch.arange(number % 3, number % 3 + 6), factors, own)}

    net, rows = Bags(), bagpipe.optim.SGD(0.1)
    net, optimizer, batches = bagpipe.prepare(net, sgd(net.parameters()), loader(), rows=rows, cache=30)

    def trained():
        for batch in batches:
            net(batch["ids"]).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(BatchError, match=rf"'ids\.{part}' of batch 0"):
        trained()
    assert rows.updates == 0


def test_a_dict_that_is_filled_again_with_other_tensors_is_refused():
    targets = {}

    def loader():
        for batch in make_batches():
            targets["label"] = batch.pop("label")
            yield batch | {"targets": targets}

    _, rows, trained = run(loader(), lambda given: given | given["targets"])
    with pytest.raises(BatchError, match="'targets' of batch 0"):
        trained()
    assert rows.updates == 0


def test_a_batch_that_is_overwritten_while_it_is_trained_ends_the_loop():
    """Without lookahead the first batch is given before the second is read, and that may take until it is trained."""
    given, overwritten, stepped = threading.Event(), threading.Event(), threading.Event()

    def loader():
        first, second = make_batches(2)
        yield first
        assert given.wait(60)
        first["label"].copy_(second["label"])
        overwritten.set()
        assert stepped.wait(60)
        yield second | {"label": first["label"]}

    net, optimizer, batches = start(loader(), policy="nocache")

    def trained():
        for batch in batches:
            given.set()
            assert overwritten.wait(60)
            step(net, batch, optimizer)
            stepped.set()

    with pytest.raises(BatchError, match="'label' of batch 0"):
        trained()


def test_trainers_of_a_launch_refuse_what_all_of_them_are_given_and_is_filled_again():
    trainers, nets = Trainers(2), [make_net() for _ in range(2)]

    def script(rank):
        factor = torch.ones(1)
        loader = (batch | {"factor": factor.fill_(number)} for number, batch in enumerate(make_batches()))
        train(*start(loader, nets[rank], **trainers.options(rank)))

    errors = trainers.failures(script)
    assert isinstance(errors[0], BatchError)
    assert all("'factor' of batch 0" in str(error) for error in errors)


class Slotted:
    __slots__ = ("label",)


@dataclass
class Factor:
    factor: float = 0.0


def reused(kind):
    """Loaders that set something anew in an object which all batches share."""

    def loader():
        shared, factor, array = kind(), Factor(), np.empty(1, object)
        for number, batch in enumerate(make_batches()):
            factor.factor, array[0] = float(number), batch["label"]
            if kind is deque:
                shared.clear()
                shared.append(batch["label"])
            elif kind is UserDict:
                shared["label"] = batch["label"]
            elif kind not in (Factor, int):
                shared.label = batch["label"]
            yield batch | {"more": {Factor: factor, int: array}.get(kind, shared)}

    return loader()


@pytest.mark.parametrize("kind", [SimpleNamespace, Slotted, UserDict, deque, Factor, int])
def test_an_object_that_gets_other_values_is_refused(kind):
    _, rows, trained = run(reused(kind), lookahead=5)
    with pytest.raises(BatchError, match=r"'more.*' of batch 0.*objects"):
        trained()
    assert rows.updates == 0


VIEWS = {
    "bytes": lambda buffer: memoryview(buffer.numpy()).cast("B"),
    "coordinates": lambda buffer: torch.sparse_coo_tensor(torch.arange(6)[None], buffer, (6,), check_invariants=False),
    "compressed": lambda buffer: torch.sparse_csr_tensor(
        torch.tensor([0, 6]), torch.arange(6), buffer, (1, 6), check_invariants=False
    ),
    "jagged": lambda buffer: torch.nested.nested_tensor_from_jagged(buffer, torch.tensor([0, 2, 6])),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("view", VIEWS)
def test_what_lies_behind_sparse_and_other_views_is_watched_too(view):
    buffer = torch.zeros(6)

    def loader():
        for number, batch in enumerate(make_batches()):
            buffer.fill_(number)
            yield batch | {"view": VIEWS[view](buffer)}

    _, rows, trained = run(loader())
    with pytest.raises(BatchError, match=r"'view.*' of batch 0"):
        trained()
    assert rows.updates == 0


def test_a_batch_that_is_wiped_after_it_was_given_is_refused():
    """No later batch lies in its memory, as with a pool of buffers that takes one back as soon as it is asked again."""

    def loader():
        for batch in make_batches():
            yield batch
            batch["label"].zero_()

    _, rows, trained = run(loader(), lookahead=5)
    with pytest.raises(BatchError, match="'label' of batch 0 since it was read"):
        trained()
    assert rows.updates == 0


# Allowed


@pytest.mark.parametrize("accumulate", [1, 3])
def test_ids_may_be_filled_again_they_are_used_up_at_once(accumulate):
    expected = train_fast(make_net(), make_batches(9), adagrad())
    found = train_fast(make_net(), refilled(make_batches(9), ["user", "item"], numpy=True), adagrad())
    assert_same_bits(expected, found)
    nets = []
    for loader in (make_batches(9), refilled(make_batches(9), ["user", "item"], numpy=True)):
        net, _, trained = run(loader, accumulate=accumulate)
        trained()
        nets.append(net.state_dict())
    assert_same_bits(*nets)


@pytest.mark.parametrize("number", [1, 2])
def test_trainers_of_a_launch_take_batches_as_they_come_from_a_generator(number):
    def trained(make_loader):
        trainers, nets = Trainers(number), [make_net() for _ in range(number)]

        def script(rank):
            train(*start(make_loader(), nets[rank], **trainers.options(rank)))

        trainers.run(script)
        return nets[0].state_dict()

    assert_same_bits(trained(make_batches), trained(lambda: (batch for batch in make_batches())))


class Slices:
    """Slices of one tensor for each part, epoch after epoch, as fast loaders of tensors give them."""

    def __init__(self, columns, size=6):
        self.columns, self.size = columns, size

    def __iter__(self):
        for first in range(0, len(self.columns["label"]), self.size):
            yield {name: column[first : first + self.size] for name, column in self.columns.items()}


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("numpy", [False, True])
def test_slices_of_one_tensor_are_neither_refused_nor_copied_in_any_number_of_epochs(numpy, order):
    batches = make_batches()
    columns = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    matrix = np.array(torch.cat([columns["dense"], columns["label"][:, None]], 1).numpy(), order=order)
    both = (
        torch.from_numpy(matrix)
        if numpy
        else torch.empty_like(torch.from_numpy(matrix)).copy_(torch.from_numpy(matrix))
    )
    assert both.is_contiguous() == (order == "C")
    columns |= {"dense": both[:, :2], "label": both[:, 2]}
    places = []

    def trained(loader, see=lambda batch: None):
        net, optimizer, loader = start(loader, lookahead=20)
        for _ in range(3):
            for batch in loader:
                see(batch)
                step(net, batch, optimizer)
        return net.state_dict()

    found = trained(Slices(columns), lambda batch: places.append(batch["dense"].data_ptr()))
    assert_close(trained(batches), found)
    assert places == [columns["dense"][first:].data_ptr() for first in range(0, 48, 6)] * 3


def test_windows_that_slide_over_one_tensor_are_not_refused():
    values = torch.rand(20, 2)

    def sliding():
        for number, batch in enumerate(make_batches()):
            yield batch | {"dense": values[number : number + 6]}

    expected = train_plain(make_net(), list(sliding()))
    assert_close(expected, train_fast(make_net(), sliding()))


def test_what_all_batches_share_and_nobody_changes_is_not_refused():
    class Shared:
        def __init__(self):
            self.seen, self.cache = 0, {}

    mask, array, words, shared = torch.ones(6), np.arange(4), ["a", "b"], Shared()

    def loader():
        for batch in make_batches():
            shared.seen += 1
            shared.cache[shared.seen] = batch["label"]
            yield batch | {"mask": mask, "more": {"array": array, "words": words}, "loader": shared}

    expected = train_fast(make_net(), make_batches(), adagrad())
    assert_same_bits(expected, train_fast(make_net(), loader(), adagrad()))


def test_one_batch_given_again_and_again_is_not_refused():
    batch = make_batches(1)[0]
    expected = train_fast(make_net(), [batch] * 6, adagrad())
    assert_same_bits(expected, train_fast(make_net(), (batch for _ in range(6)), adagrad()))


def test_buffers_whose_batch_was_trained_long_ago_may_be_filled_again():
    batches = make_batches(200)
    expected = train_fast(make_net(), batches, adagrad())
    found = train_fast(make_net(), refilled(batches, ["dense", "label"], buffers=64), adagrad(), lookahead=2)
    assert_same_bits(expected, found)


def test_unusual_parts_of_batches_pass_as_they_are():
    def loader():
        for number, batch in enumerate(make_batches()):
            yield batch | {
                "number": number,
                "texts": ["a", "b"] * 3,
                "one": torch.tensor(number).expand(6),
                "complex": torch.randn(3, dtype=torch.complex64).conj(),
                "half": torch.ones(3, dtype=torch.bfloat16),
                "sparse": torch.eye(3).to_sparse(),
                "meta": torch.empty(3, device="meta"),
                "empty": torch.empty(0, 4),
                "backward": np.arange(6)[::-1],
                "times": np.array(["2024-01-01"], "datetime64[D]"),
                "objects": np.array([{}, None]),
                "large": torch.zeros(600_000) + number,
            }

    expected = train_fast(make_net(), make_batches(), adagrad())
    assert_same_bits(expected, train_fast(make_net(), loader(), adagrad()))


@pytest.mark.parametrize("places", [slice(None), slice(2000, 2001), slice(-1, None)])
def test_a_large_buffer_that_is_filled_again_is_refused_wherever_it_changes(places):
    buffer = np.zeros(600_001, np.float32)

    def loader():
        for number, batch in enumerate(make_batches()):
            buffer[places] = number
            yield batch | {"large": torch.from_numpy(buffer)}

    _, _, trained = run(loader())
    with pytest.raises(BatchError, match="'large' of batch 0"):
        trained()


@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize(
    "fill", [lambda whole, i: whole.fill(i), lambda whole, i: whole.__setitem__(slice(0, None, 16), i)]
)
def test_a_large_buffer_of_regular_content_is_refused(fill, numpy):
    """Equal blocks of equal numbers, in an even number of them."""
    buffer = np.zeros(1 << 19, np.float32)
    label = buffer if numpy else torch.from_numpy(buffer)

    def loader():
        for i in range(6):
            fill(buffer, i)
            yield {"ids": torch.tensor([[i, 7 * i]]), "label": label}

    assert_refused(loader())


@pytest.mark.parametrize("kind", ["objects", "storage"])
def test_arrays_of_objects_and_bare_storages_are_watched_too(kind):
    objects, floats = np.zeros(3, object), torch.zeros(3)

    def loader():
        for i in range(6):
            objects[1], floats[1] = float(i), i
            yield {"ids": torch.tensor([[i, i]]), "label": objects if kind == "objects" else floats.untyped_storage()}

    assert_refused(loader())


def test_records_with_objects_and_empty_arrays_pass():
    records = np.zeros(3, [("name", object), ("number", np.float32)])
    batches = ({"ids": torch.tensor([[i, i]]), "records": records, "none": np.empty((0, 2))} for i in range(6))
    trained = list(train_bags(batches))
    assert all(batch["records"] is records for batch in trained)
    assert len(trained) == 6


def train_bags(loader):
    """Each batch, once it was trained."""
    model = nn.Sequential(nn.EmbeddingBag(50, 2))
    optimizer = sgd(model.parameters())
    model, optimizer, batches = bagpipe.prepare(model, optimizer, loader, cache=400, features={"ids": "0"})
    for batch in batches:
        optimizer.zero_grad()
        model[0](batch["ids"]).sum().backward()
        optimizer.step()
        yield batch


def assert_refused(loader):
    with pytest.raises(BatchError, match="the loader has overwritten 'label' of batch"):
        list(train_bags(loader))


def test_a_large_buffer_whose_numbers_change_places_is_refused():
    buffer = np.zeros(600_000, np.float32)

    def loader():
        for number, batch in enumerate(make_batches()):
            buffer[:] = 0
            buffer[1024 * (1 + 3 * number)] = 1
            yield batch | {"large": torch.from_numpy(buffer)}

    _, _, trained = run(loader())
    with pytest.raises(BatchError, match="'large' of batch 0"):
        trained()
