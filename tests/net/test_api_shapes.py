"""What people already have: every kind of batch, layer and optimizer gives what plain PyTorch gives."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import bagpipe
from bagpipe import Ids
from harness.fake_kjt import KeyedJagged
from harness.plain import (
    ROWS,
    assert_close,
    loss_fn,
    make_batches,
    make_net,
    train_fast,
    train_plain,
)


def random_bags(random, rows, samples, longest=3):
    lengths = random.integers(0, longest + 1, samples)
    values = torch.from_numpy(random.integers(0, rows, int(lengths.sum())))
    return values, torch.from_numpy(np.cumsum(lengths) - lengths), torch.from_numpy(lengths)


class One(nn.Module):
    """One layer, called as the function says; the loss depends on every output."""

    def __init__(self, layer, call):
        super().__init__()
        self.feature, self.call = layer, call
        self.top = nn.Linear(layer.embedding_dim, 1)

    def forward(self, batch):
        return self.top(self.call(self.feature, batch))


def squared(model, batch):
    return model(batch).square().sum()


def compare(make_model, batches, loss=squared, dense=torch.optim.SGD, **options):
    def sgd(parameters):
        return dense(parameters, lr=0.05)

    expected = train_plain(make_model(), batches, (sgd,), loss)
    found = train_fast(make_model(), batches, bagpipe.optim.SGD(0.05), sgd, loss, **options)
    assert_close(expected, found)
    before = make_model().state_dict()
    assert any(not torch.equal(before[name], found[name]) for name in found), "nothing was trained"


def one(make_layer, call):
    def make():
        torch.manual_seed(1)
        return One(make_layer(), call)

    return make


Named = namedtuple("Named", ["ids", "extra"])


@dataclass(frozen=True)
class Record:
    ids: torch.Tensor
    extra: torch.Tensor


WRAPPERS = {
    "dict": (lambda ids: {"feature": ids, "x": torch.ones(1)}, lambda batch: batch["feature"]),
    "ordered dict": (lambda ids: OrderedDict(feature=ids), lambda batch: batch["feature"]),
    "tuple": (lambda ids: (ids, torch.ones(1)), lambda batch: batch[0]),
    "list": (lambda ids: [torch.ones(1), ids], lambda batch: batch[1]),
    "named tuple": (lambda ids: Named(ids, torch.ones(1)), lambda batch: batch.ids),
    "dataclass": (lambda ids: Record(ids, torch.ones(1)), lambda batch: batch.ids),
    "nested": (lambda ids: {"a": (torch.ones(1), {7: ids})}, lambda batch: batch["a"][1][7]),
    "bare tensor": (lambda ids: ids, lambda batch: batch),
    "int32": (lambda ids: {"feature": ids.int()}, lambda batch: batch["feature"]),
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_ids_are_found_in_any_batch(kind):
    random = np.random.default_rng(0)
    wrap, unwrap = WRAPPERS[kind]
    batches = [wrap(torch.from_numpy(random.integers(0, 20, (5, 2)))) for _ in range(5)]
    compare(one(lambda: nn.EmbeddingBag(20, 3, mode="sum"), lambda layer, batch: layer(unwrap(batch))), batches)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("container", [tuple, list, "ids"])
def test_values_and_offsets(mode, container):
    random = np.random.default_rng(1)
    bags = [random_bags(random, 20, 6)[:2] for _ in range(6)]
    batches = [{"feature": Ids(*pair) if container == "ids" else container(pair)} for pair in bags]

    def call(layer, batch):
        leaf = batch["feature"]
        return layer(leaf.values, leaf.offsets) if isinstance(leaf, Ids) else layer(*leaf)

    compare(one(lambda: nn.EmbeddingBag(20, 3, mode=mode), call), batches)


def test_weighted_bags():
    random = np.random.default_rng(2)
    bags = [random_bags(random, 20, 6)[:2] for _ in range(6)]
    batches = [{"feature": (*pair, torch.rand(len(pair[0]))), "x": torch.ones(1)} for pair in bags]
    call = one(lambda: nn.EmbeddingBag(20, 3, mode="sum"), lambda layer, batch: layer(*batch["feature"]))
    compare(call, batches)


def test_weighted_bags_of_equal_length():
    random = np.random.default_rng(2)
    batches = [
        {"feature": torch.from_numpy(random.integers(0, 20, (4, 3))), "weights": torch.rand(4, 3)} for _ in range(6)
    ]
    layer = one(
        lambda: nn.EmbeddingBag(20, 3, mode="sum"),
        lambda layer, batch: layer(batch["feature"], None, batch["weights"]),
    )
    compare(layer, batches)


def test_a_keyed_jagged_tensor_is_known_by_its_methods():
    random = np.random.default_rng(3)
    batches = []
    for _ in range(6):
        parts = [random_bags(random, 20, 4), random_bags(random, 30, 4)]
        batches.append(
            KeyedJagged(["item", "user"], torch.cat([p[0] for p in parts]), lengths=torch.cat([p[2] for p in parts]))
        )

    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.user = nn.EmbeddingBag(30, 3, mode="sum", include_last_offset=True)
            self.item = nn.EmbeddingBag(20, 3, mode="mean", include_last_offset=True)
            self.top = nn.Linear(6, 1)

        def forward(self, batch):
            vectors = [self.user(batch["user"].values(), batch["user"].offsets())]
            vectors += [self.item(batch["item"].values(), batch["item"].offsets())]
            return self.top(torch.cat(vectors, 1))

    def make():
        torch.manual_seed(0)
        return Towers()

    compare(make, batches)


def test_include_last_offset():
    random = np.random.default_rng(4)
    batches = []
    for _ in range(5):
        values, starts, _ = random_bags(random, 20, 4)
        batches.append({"feature": values, "starts": torch.cat([starts, torch.tensor([len(values)])])})
    layer = one(
        lambda: nn.EmbeddingBag(20, 3, mode="mean", include_last_offset=True),
        lambda layer, batch: layer(batch["feature"], batch["starts"]),
    )
    compare(layer, batches, features={"feature": "feature"})


@pytest.mark.parametrize("shape", [(), (5,), (3, 2), (2, 3, 2), (0,), (4, 0)])
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_an_embedding_takes_ids_of_any_shape(shape, padding):
    random = np.random.default_rng(5)
    batches = [{"feature": torch.from_numpy(np.asarray(random.integers(0, 4, shape)))} for _ in range(4)]
    make = one(lambda: nn.Embedding(4, 3, padding_idx=padding), lambda layer, batch: layer(batch["feature"]))
    if 0 in shape:
        found = train_fast(make(), batches, loss=squared)
        assert_close(make().state_dict(), found)
    else:
        compare(make, batches)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_leave_the_padding_row_out(mode):
    random = np.random.default_rng(6)
    batches = [{"feature": torch.from_numpy(random.integers(0, 4, (5, 3)))} for _ in range(5)]
    compare(
        one(lambda: nn.EmbeddingBag(4, 3, mode=mode, padding_idx=1), lambda layer, batch: layer(batch["feature"])),
        batches,
    )


def test_masks_are_computed_from_ids_and_not_from_what_stands_for_them():
    """The usual way to average a padded history."""
    random = np.random.default_rng(7)
    batches = [{"feature": torch.from_numpy(random.integers(0, 6, (5, 4)))} for _ in range(6)]

    def call(layer, batch):
        ids = batch["feature"]
        mask = (ids != 0).float().unsqueeze(-1)
        return (layer(ids) * mask).sum(1) / mask.sum(1).clamp(min=1)

    compare(one(lambda: nn.Embedding(6, 3, padding_idx=0), call), batches)


def test_ids_that_the_model_computes_are_looked_up_if_their_rows_are_here():
    batches = [{"feature": torch.tensor([[1], [2], [0]])} for _ in range(3)]

    def call(layer, batch):
        return layer(batch["feature"].clamp(max=1).int())

    compare(one(lambda: nn.EmbeddingBag(6, 3, mode="sum"), call), batches)


@pytest.mark.parametrize("dims", [(4, 4), (3, 16), (17, 1)])
@pytest.mark.parametrize("cache", [60, "5KB", "1GB"])
def test_tables_of_different_width_share_a_cache(dims, cache):
    def make():
        return make_net(dims=dims)

    expected = train_plain(make(), make_batches())
    assert_close(expected, train_fast(make(), make_batches(), cache=cache))


class Shared(nn.Module):
    """Two features on one table, and a second layer fed by the same two, as in a factorization machine."""

    def __init__(self, device=None):
        super().__init__()
        self.factors = nn.ModuleDict({"item": nn.EmbeddingBag(ROWS["item"], 5, mode="sum", device=device)})
        self.linear = nn.ModuleDict({"item": nn.EmbeddingBag(ROWS["item"], 1, mode="sum", device=device)})
        self.top = nn.Linear(10, 1)

    def forward(self, batch):
        ids = [batch["shown"], batch["clicked"]]
        deep = self.top(torch.cat([self.factors["item"](each) for each in ids], 1))
        return (deep + sum(self.linear["item"](each) for each in ids)).squeeze(1)


def shared_batches():
    return [{"shown": b["item"], "clicked": b["item"][:, :1] // 2, "label": b["label"]} for b in make_batches(seed=3)]


SHARED = {name: ["factors.item", "linear.item"] for name in ("shown", "clicked")}


def test_features_that_share_a_table_and_layers_that_share_rows():
    def make():
        torch.manual_seed(2)
        return Shared()

    expected = train_plain(make(), shared_batches())
    assert_close(expected, train_fast(make(), shared_batches(), features=SHARED))


def test_layers_on_the_meta_device_begin_with_given_values_and_take_no_memory():
    def initial(table):
        return bagpipe.initial.Uniform(3, table.name, 0.1)

    torch.manual_seed(2)
    lazy = Shared(device="meta")
    torch.manual_seed(2)
    plain = Shared(device="meta")
    plain.factors["item"] = nn.EmbeddingBag(ROWS["item"], 5, mode="sum")
    plain.linear["item"] = nn.EmbeddingBag(ROWS["item"], 1, mode="sum")
    values = np.empty((ROWS["item"], 6), np.float32)
    bagpipe.initial.Uniform(3, "factors.item", 0.1).fill(np.arange(ROWS["item"]), values)
    with torch.no_grad():
        plain.factors["item"].weight.copy_(torch.from_numpy(values[:, :5]))
        plain.linear["item"].weight.copy_(torch.from_numpy(values[:, 5:]))
    plain.top.load_state_dict(lazy.top.state_dict())
    expected = train_plain(plain, shared_batches())
    assert_close(expected, train_fast(lazy, shared_batches(), features=SHARED, initial=initial))


def test_a_frozen_table_stays_as_it_is_and_the_rest_is_trained():
    def make():
        net = make_net()
        net.user.weight.requires_grad_(False)
        return net

    expected = train_plain(make(), make_batches())
    found = train_fast(make(), make_batches())
    assert_close(expected, found)
    assert torch.equal(found["user.weight"], make().state_dict()["user.weight"])


def test_a_model_with_all_tables_frozen_trains_its_dense_part():
    def make():
        net = make_net()
        net.user.weight.requires_grad_(False)
        net.item.weight.requires_grad_(False)
        return net

    assert_close(train_plain(make(), make_batches()), train_fast(make(), make_batches()))


def test_a_kept_layer_stays_a_plain_layer_also_if_it_looks_up_the_same_feature():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.large = nn.EmbeddingBag(20, 4, mode="sum")
            self.small = nn.Embedding(20, 1)

        def forward(self, batch):
            return self.large(batch["item"]).sum(1) + self.small(batch["item"]).sum((1, 2))

    def make():
        torch.manual_seed(0)
        return Both()

    expected = train_plain(make(), make_batches())
    found = train_fast(make(), make_batches(), keep=["small"], features={"item": "large"})
    assert_close(expected, found)


def test_one_layer_under_two_names_stays_one_layer():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.user = nn.EmbeddingBag(30, 4, mode="sum")
            self.item = self.user
            self.bias = nn.Parameter(torch.zeros(1))

        def forward(self, batch):
            return (self.user(batch["user"]) * self.item(batch["item"])).sum(1) + self.bias

    expected = train_plain(Twice(), make_batches())
    for features in (None, {"user": "user", "item": "item"}, {"user": "item", "item": "user"}):
        assert_close(expected, train_fast(Twice(), make_batches(), features=features))


def test_defaults_of_torch_change_nothing():
    net, plain = make_net(), make_net()
    expected = train_plain(plain, make_batches())
    torch.set_default_dtype(torch.float64)
    try:
        found = train_fast(net, make_batches())
    finally:
        torch.set_default_dtype(torch.float32)
    assert_close(expected, found)


def all_rows(batches):
    """Every batch touches every row, so that optimizers that move untouched rows can be compared."""
    return [
        batch
        | {
            "user": torch.cat([torch.arange(30).reshape(6, 5), batch["user"]], 1),
            "item": torch.cat([torch.arange(18).reshape(6, 3), torch.full((6, 1), 18), torch.full((6, 1), 19)], 1),
        }
        for batch in batches
    ]


OPTIMIZERS = {
    "sgd": (lambda: bagpipe.optim.SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1), True, False),
    "sgd, dense gradients": (lambda: bagpipe.optim.SGD(0.1), lambda p: torch.optim.SGD(p, lr=0.1), False, False),
    "adagrad": (lambda: bagpipe.optim.Adagrad(0.1), lambda p: torch.optim.Adagrad(p, lr=0.1), False, False),
    "sparse adam": (lambda: bagpipe.optim.Adam(0.01), lambda p: torch.optim.SparseAdam(p, lr=0.01), True, False),
    "momentum": (
        lambda: bagpipe.optim.Momentum(0.1, 0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        False,
        True,
    ),
    "nesterov": (
        lambda: bagpipe.optim.Momentum(0.1, 0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        False,
        True,
    ),
    "adamw": (lambda: bagpipe.optim.AdamW(0.01), lambda p: torch.optim.AdamW(p, lr=0.01), False, True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_equals_that_of_torch_where_both_can(name):
    rows, plain, sparse, everything = OPTIMIZERS[name]
    batches = all_rows(make_batches()) if everything else make_batches()

    def dense(parameters):
        return torch.optim.Adam(parameters, lr=0.01)

    expected = train_plain(make_net(sparse=sparse), batches, (plain, dense))
    found = train_fast(make_net(), batches, rows(), dense)
    assert_close(expected, found, rtol=1e-4, atol=1e-5)


def test_an_optimizer_of_its_own_for_a_table_and_a_learning_rate_that_moves():
    net = make_net()
    optimizers = torch.optim.SGD([net.user.weight], lr=1.0), torch.optim.Adagrad([net.item.weight], lr=0.1)
    dense = torch.optim.SGD(net.top.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda step: 0.1 / (step + 1))
    for batch in make_batches():
        for optimizer in (*optimizers, dense):
            optimizer.zero_grad()
        loss_fn(net(batch), batch["label"]).backward()
        for optimizer in (*optimizers, dense):
            optimizer.step()
        schedule.step()
    rows = bagpipe.optim.PerTable(
        bagpipe.optim.Adagrad(0.1), {"user": bagpipe.optim.SGD(lambda step: 0.1 / (step + 1))}
    )
    assert_close(net.state_dict(), train_fast(make_net(), make_batches(), rows), rtol=1e-4, atol=1e-5)


class Towers(nn.Module):
    """Two layers for two features that lie side by side in a tuple."""

    def __init__(self, kind=nn.Embedding, names=("user", "item")):
        super().__init__()
        torch.manual_seed(2)
        self.names = names
        for name in names:
            self.add_module(name, kind(20, 3))
        self.top = nn.Linear(3, 1)

    def forward(self, batch):
        vectors = [getattr(self, name)(ids.reshape(-1, 1)) for name, ids in zip(self.names, batch[0], strict=True)]
        return self.top(vectors[0].reshape(-1, 3) * vectors[1].reshape(-1, 3))


@pytest.mark.parametrize("names", [("0", "1"), ("0.0", "0.1")])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_two_features_in_a_tuple_are_two_whatever_their_first_values_are(kind, names):
    random = np.random.default_rng(4)
    batches = [(tuple(torch.from_numpy(random.integers(0, 20, (2, 5)))), torch.ones(5)) for _ in range(4)]
    batches[0] = ((batches[0][0][0], torch.tensor([0, 1, 2, 4, 5])), torch.ones(5))  # might be offsets
    compare(lambda: Towers(kind), batches, features=dict(zip(names, ("user", "item"), strict=True)))


def test_a_model_without_bags_has_none_in_its_batches_either():
    batches = [((torch.tensor([3, 1]), torch.tensor([0, 1])), torch.ones(2))]
    net = Towers(names=("t0", "t1"))
    tables = [bagpipe.Table("t0", 20, ("0",)), bagpipe.Table("t1", 20, ("1",))]
    net, optimizer, loader = bagpipe.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), batches, features=tables)
    for batch in loader:
        net(batch).sum().backward()
        optimizer.step()
        with torch.no_grad():
            assert net(batches[0]).shape == (2, 1)
    assert [loader.loop.store.num_rows(table) for table in (0, 1)] == [2, 2]
