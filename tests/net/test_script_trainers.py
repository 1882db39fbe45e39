"""A user's script on several trainers ends with the bits of the reference, whatever its batches look like."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bagpipe import Ids, optim
from bagpipe.state import of_store
from harness.fake_kjt import KeyedJagged
from harness.flat import prepare
from harness.scripts import Trainers
from harness.seams import Assigner
from harness.world import (
    OPTIMIZERS,
    TABLES,
    assert_identical,
    dense_sgd,
    initial,
    make_batches,
    make_model,
    train_reference,
)

NAME = "wide_deep"
TABLE_FEATURES = [table.features for table in TABLES]


def make_models(trainers):
    """One for each; not by the trainers themselves, who share a random generator here."""
    return [make_model(NAME) for _ in range(trainers.trainers)]


def prepared(trainers, rank, model, batches, rows, **options):
    """Model, optimizer and loader of one trainer."""
    options = {"cache": 300, "features": TABLES, "initial": initial} | trainers.options(rank) | options
    return prepare(model, dense_sgd(model.parameters()), batches, rows, **options)


def train(trainers, batches, optimizer="adagrad", unpack=lambda batch: batch, **options):
    """The state that N trainers end with, and how many samples each one's batches had."""
    models = make_models(trainers)

    def script(rank):
        model, own, loader = prepared(trainers, rank, models[rank], batches, OPTIMIZERS[optimizer](), **options)
        sizes = []
        for given in loader:
            batch = unpack(given)
            loss = nn.functional.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
            own.zero_grad()
            loss.backward()
            own.step()
            sizes.append(len(batch.labels))
        return of_store(model, [layout.table.name for layout in loader.loop.layouts], trainers.store), sizes

    results = trainers.run(script)
    for state, _ in results[1:]:
        assert_identical(results[0][0], state)
    return results[0][0], [sizes for _, sizes in results]


def reference(batches, optimizer="adagrad", trainers=2, assign="contiguous"):
    return train_reference(
        batches, OPTIMIZERS[optimizer](), NAME, trainers, Assigner(assign, trainers, 0, TABLE_FEATURES)
    )[0]


@pytest.mark.parametrize("assign", ["contiguous", "round_robin", "aware"])
@pytest.mark.parametrize("design", ["owned", "partitioned", "replicated", "lrpp"])
def test_a_script_ends_with_the_bits_of_the_reference_in_every_design(design, assign):
    batches = make_batches(10, last=3)
    trainers = Trainers(2, f"sync.design={design}", f"assign={assign}")
    found, samples = train(trainers, batches)
    assert_identical(reference(batches, assign=assign), found)
    assert [sum(counts) for counts in zip(*samples, strict=True)] == [6] * 9 + [3]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_trainers_without_samples_take_part_all_the_same(optimizer):
    batches = make_batches(8, size=5, last=1)
    found, samples = train(Trainers(3), batches, optimizer)
    assert_identical(reference(batches, optimizer, trainers=3), found)
    assert [counts[-1] for counts in samples] == [0, 0, 1]


Named = namedtuple("Named", ["dense", "sparse", "labels"])


@dataclass(frozen=True)
class Own:
    dense: torch.Tensor
    sparse: dict
    labels: torch.Tensor
    note: str = "given to all"


def as_pairs(batch):
    sparse = {
        name: (ids.values, ids.offsets, ids.weights) if ids.offsets is not None else ids.values
        for name, ids in batch.sparse.items()
    }
    return {"dense": batch.dense, "labels": batch.labels, **sparse}


def of_pairs(given):
    sparse = {
        name: Ids(*part) if isinstance(part, tuple) else Ids(part)
        for name, part in given.items()
        if name not in ("dense", "labels")
    }
    return SimpleNamespace(dense=given["dense"], sparse=sparse, labels=given["labels"])


SHAPES = {
    "a dict": (
        lambda batch: {"dense": batch.dense, "sparse": dict(batch.sparse), "labels": batch.labels},
        lambda given: SimpleNamespace(**given),
    ),
    "pairs": (as_pairs, of_pairs),
    "a tuple": (
        lambda batch: (batch.dense, dict(batch.sparse), batch.labels, ["name"] * len(batch), torch.tensor(2.0)),
        lambda given: SimpleNamespace(dense=given[0], sparse=given[1], labels=given[2]),
    ),
    "a named tuple": (lambda batch: Named(batch.dense, dict(batch.sparse), batch.labels), lambda given: given),
    "a dataclass": (lambda batch: Own(batch.dense, dict(batch.sparse), batch.labels), lambda given: given),
    "an object": (
        lambda batch: SimpleNamespace(dense=batch.dense, sparse=dict(batch.sparse), labels=batch.labels),
        lambda given: given,
    ),
}


@pytest.mark.parametrize("assign", ["contiguous", "aware"])
@pytest.mark.parametrize("shape", SHAPES)
def test_batches_of_any_shape_give_the_same_bits(shape, assign):
    pack, unpack = SHAPES[shape]
    batches = make_batches(6, last=3)
    found, _ = train(Trainers(2, f"assign={assign}"), [pack(batch) for batch in batches], unpack=unpack)
    assert_identical(reference(batches, assign=assign), found)


class Bags(nn.Module):
    """Two bags of ids, however they come."""

    def __init__(self, ending):
        super().__init__()
        self.a, self.b = (nn.EmbeddingBag(30, 3, mode="sum", include_last_offset=ending) for _ in range(2))
        self.top = nn.Linear(6, 1)

    def forward(self, ids):
        if isinstance(ids, KeyedJagged):
            ids = {key: (ids[key].values(), ids[key].offsets()[:-1]) for key in ids.keys()}  # noqa: SIM118
        return self.top(torch.cat([self.a(*ids["a"]), self.b(*ids["b"])], 1)).squeeze(1)


def bags(shape, count=6, samples=5):
    """Batches of the same bags in one of three shapes."""
    random = torch.Generator().manual_seed(3)
    for _ in range(count):
        lengths = torch.randint(0, 4, (2, samples), generator=random)
        values = [torch.randint(30, (int(part.sum()),), generator=random) for part in lengths]
        labels = torch.rand(samples, generator=random)
        edges = [torch.cat([torch.zeros(1, dtype=torch.int64), part.cumsum(0)]) for part in lengths]
        if shape == "keyed":
            ids = KeyedJagged(["a", "b"], torch.cat(values), None, lengths.reshape(-1))
        else:
            ends = [part if shape == "ending" else part[:-1] for part in edges]
            ids = {"a": (values[0], ends[0]), "b": (values[1], ends[1])}
        yield {"ids": ids, "labels": labels}


def test_bags_give_the_same_bits_as_pairs_with_and_without_their_end_and_keyed():
    found = []
    for shape in ("pairs", "ending", "keyed"):
        trainers = Trainers(2)
        torch.manual_seed(5)
        models = [Bags(shape == "ending") for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())

        def script(rank, shape=shape, trainers=trainers, models=models):
            given, rows = list(bags(shape)), optim.Adagrad(0.1)
            model, optimizer, loader = prepared(trainers, rank, models[rank], given, rows, features=None, initial=None)
            for batch in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(model(batch["ids"]), batch["labels"]).backward()
                optimizer.step()
            return model.state_dict()

        found += trainers.run(script)
    for state in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(state[name], value), name


def test_parts_are_of_the_loaders_own_types_on_every_trainer():
    seen = []

    def unpack(given):
        seen.append((type(given), given.note))
        return given

    batches = make_batches(3)
    train(Trainers(2), [Own(batch.dense, dict(batch.sparse), batch.labels) for batch in batches], unpack=unpack)
    assert seen == [(Own, "given to all")] * 6


def test_only_the_first_trainer_reads_its_loader_beyond_the_first_batch():
    read = [0, 0]
    batches = make_batches(7)
    trainers = Trainers(2)
    models = make_models(trainers)

    def script(rank):
        def given():
            for batch in batches:
                read[rank] += 1
                yield batch

        model, optimizer, loader = prepared(trainers, rank, models[rank], given(), optim.SGD(0.1))
        assert (loader.rank, loader.trainers) == (rank, 2)
        for batch in loader:
            model(batch.dense, batch.sparse).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    trainers.run(script)
    assert read == [7, 1]


def test_several_epochs_and_accumulated_batches_are_shared():
    batches = make_batches(5, last=4)
    trainers = Trainers(2)
    models = make_models(trainers)

    def script(rank):
        model, optimizer, loader = prepared(trainers, rank, models[rank], batches, optim.Adagrad(0.1), accumulate=2)
        steps = 0
        for _ in range(2):
            for batch in loader:
                nn.functional.binary_cross_entropy_with_logits(
                    model(batch.dense, batch.sparse), batch.labels
                ).backward()
                if loader.step_due:
                    optimizer.step()
                    optimizer.zero_grad()
                    steps += 1
        return steps, of_store(model, [layout.table.name for layout in loader.loop.layouts], trainers.store)

    (steps, state), (steps_too, state_too) = trainers.run(script)
    assert steps == steps_too == 6
    assert_identical(state, state_too)
