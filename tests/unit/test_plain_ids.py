"""Batches of the loop hold plain ids: whatever a model does with them, a layer reads and updates the rows they name."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import bagpipe
from bagpipe.embedding import TableView
from bagpipe.errors import ModelError
from harness.fake_kjt import KeyedJagged
from harness.plain import (
    ROWS,
    assert_close,
    assert_same_bits,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    sgd,
    train_fast,
    train_plain,
)
from harness.started import adagrad, start, step

pytestmark = pytest.mark.usefixtures("nothing_left")


def padding_buffer(ids):
    """As models with a maximum length copy ids: into a buffer that is kept from batch to batch."""
    buffer = torch.zeros(64, 8, dtype=torch.int64)
    buffer[: len(ids), : ids.shape[1]] = ids
    return buffer[: len(ids), : ids.shape[1]]


def inference(ids):
    with torch.inference_mode():
        return ids.clone()


OWN_MEMORY = {
    "as they are": lambda ids: ids,
    "reshaped": lambda ids: ids.reshape(-1).view(ids.shape),
    "detached": lambda ids: ids.detach(),
    "to where they are": lambda ids: ids.to("cpu", torch.int64).long(),
    "in columns": lambda ids: ids.T.T,
    "expanded": lambda ids: ids.unsqueeze(0).expand(1, *ids.shape)[0],
    "through NumPy": lambda ids: torch.from_numpy(ids.numpy()),
    "through the old constructor": lambda ids: torch.LongTensor(ids.numpy()),
    "an alias": lambda ids: ids.data,
}
COPIES = {
    "cloned": lambda ids: ids.clone(),
    "joined": lambda ids: torch.cat([ids[:1], ids[1:]]),
    "column by column": lambda ids: torch.stack(list(ids.unbind(1)), 1),
    "a list": lambda ids: torch.tensor(ids.tolist()),
    "a padding buffer": padding_buffer,
    "an empty copy": lambda ids: torch.empty_like(ids).copy_(ids),
    "of 32 bits": lambda ids: ids.int(),
    "flipped twice": lambda ids: ids.flip(0).flip(0),
    "masked": lambda ids: torch.where(ids >= 0, ids, 0),
    "an inference tensor": inference,
    "deep copied": copy.deepcopy,
    "pickled": lambda ids: pickle.loads(pickle.dumps(ids)),
}


@pytest.fixture
def looked_up(monkeypatch):
    """Counts look-ups by id."""
    counts = {"by id": 0}
    find = TableView.find

    def counted(self, ids):
        counts["by id"] += 1
        return find(self, ids)

    monkeypatch.setattr(TableView, "find", counted)
    return counts


def train(change, batches=None, **options):
    net = make_net()
    forward = net.forward
    net.forward = lambda batch: forward(
        {**batch, "user": change(batch["user"]), "item": change(batch["item"])}
    )  # as a model that prepares its ids does
    net, optimizer, loader = start(batches, net, check=True, **options)
    for batch in loader:
        step(net, batch, optimizer)
    return net.state_dict()


@pytest.fixture(scope="module")
def expected():
    return train(lambda ids: ids)


@pytest.mark.parametrize("name", OWN_MEMORY)
def test_views_of_a_batch_are_known_without_a_search(name, expected, looked_up):
    assert_same_bits(expected, train(OWN_MEMORY[name]))
    assert looked_up["by id"] == 0


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_ids_name_the_same_rows(name, expected, looked_up):
    assert_same_bits(expected, train(COPIES[name]))
    assert looked_up["by id"] > 0


def test_the_bits_are_those_of_the_reference(expected):
    assert_same_bits(train_fast(make_net(), make_batches(), adagrad()), expected)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "write",
    [
        lambda ids, new: ids.copy_(new),
        lambda ids, new: ids.numpy().__setitem__(slice(None), new.numpy()),
        lambda ids, new: ids.data.__setitem__(slice(None), new),
        lambda ids, new: ids.reshape(-1).__setitem__(slice(None), new.reshape(-1)),
    ],
)
def test_ids_that_were_changed_in_place_are_looked_up_as_they_are_now(write, threads):
    """Also where torch does not count the change, and after the layer has been called with the ids as they were."""

    def reverse(ids):
        write(ids, ids.flip(0).clone())
        return ids

    assert_same_bits(train(lambda ids: ids.flip(0)), train(reverse, threads=threads))


def test_an_id_that_is_changed_to_one_that_is_not_here_is_refused():
    net, _, loader = start()
    for batch in loader:
        batch["user"].numpy()[0, 0] = 29
        with pytest.raises(ModelError, match="'user' is given id 29"):
            net(batch)
        break


class OneTable(nn.Module):
    """Looks all fields up in one table, each from where its rows begin, and users in a table of their own too."""

    def __init__(self):
        super().__init__()
        self.rows, self.bias = nn.Embedding(sum(ROWS.values()), 4), nn.Embedding(ROWS["user"], 1)

    def forward(self, batch):
        found = self.rows(torch.cat([batch["user"], batch["item"] + ROWS["user"]], 1))
        return found.sum((1, 2)) + self.bias(batch["user"]).sum((1, 2))


def one_table():
    torch.manual_seed(5)
    return OneTable()


def naming_all(batches):
    rows = [torch.cat([batch["user"], batch["item"] + ROWS["user"]], 1) for batch in batches]
    return [{**batch, "rows": found} for batch, found in zip(batches, rows, strict=True)]


def test_ids_that_a_model_makes_of_others_are_trained_where_the_batch_names_them_too():
    batches = naming_all(make_batches())
    found = train_fast(one_table(), batches, features={"rows": "rows", "user": "bias"}, cache=40)
    assert_close(train_plain(one_table(), batches), found)


def test_ids_that_a_model_makes_of_others_are_refused_where_no_batch_names_them():
    with pytest.raises(
        ModelError, match=r"'rows' is given id \d+.*in the batch too.*features=\{'rows': 'rows'\}.*keep="
    ):
        train_fast(one_table(), make_batches(), features={"item": "rows", "user": "bias"})


def test_a_feature_of_two_tables_is_in_the_batch_twice():
    batches = [{**batch, "again": batch["user"].clone()} for batch in naming_all(make_batches())]
    with pytest.raises(ModelError, match="Let the batch have 'user' twice, under two names"):
        train_fast(one_table(), batches, features={"user": ["rows", "bias"], "rows": "rows"})
    found = train_fast(one_table(), batches, features={"user": "rows", "rows": "rows", "again": "bias"}, cache=40)
    assert_close(train_plain(one_table(), batches), found)


def test_ids_keep_the_type_that_the_loader_gave_them(expected):
    narrow = [{**batch, "user": batch["user"].int(), "item": batch["item"].short()} for batch in make_batches()]
    seen = set()

    def note(ids):
        seen.add((type(ids), ids.dtype))
        return ids

    assert_same_bits(expected, train(note, narrow))
    assert seen == {(torch.Tensor, torch.int32), (torch.Tensor, torch.int16)}


def test_all_keys_of_a_keyed_jagged_tensor_are_known_without_a_search(looked_up):
    net = torch.nn.ModuleDict({"a": torch.nn.EmbeddingBag(20, 4, mode="sum")})
    net["b"] = torch.nn.EmbeddingBag(30, 4, mode="sum")
    random = np.random.default_rng(0)
    lengths = [torch.from_numpy(random.integers(0, 4, 10)) for _ in range(6)]
    batches = [
        KeyedJagged(["a", "b"], torch.from_numpy(random.integers(0, 20, int(of.sum()), dtype=np.int32)), lengths=of)
        for of in lengths
    ]
    net, optimizer, loader = bagpipe.prepare(net, sgd(net.parameters()), batches, cache=50)
    for batch, given in zip(loader, batches, strict=True):
        assert torch.equal(batch.values(), given.values())
        assert batch.values().dtype == torch.int32
        pooled = [net[key](batch[key].values(), batch[key].offsets()[:-1]) for key in "ab"]
        optimizer.zero_grad()
        torch.cat(pooled).sum().backward()
        optimizer.step()
    assert looked_up["by id"] == 0


def test_ids_are_integers():
    net, _, loader = start()
    for batch in loader:
        for wrong in (torch.float32, torch.bool, torch.complex64):
            with pytest.raises(ModelError, match=r"'user' is given ids of type torch\.\w+: give integers"):
                net.user(batch["user"].to(wrong))
