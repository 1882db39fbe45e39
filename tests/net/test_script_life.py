"""What a script on several trainers may do beside training, and how it ends when trainers do not do the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bagpipe
from bagpipe import optim
from bagpipe.errors import BatchError, CapacityError, ConfigError, ModelError, PipelineError
from bagpipe.state import of_store
from harness.flat import prepare
from harness.scripts import Trainers
from harness.world import TABLES, assert_identical, dense_sgd, initial, make_batches, make_model

NAME = "wide_deep"


class World:
    """Trainers, each with a model, an optimizer and one for rows."""

    def __init__(self, *settings, trainers=2, batches=None, rows=lambda rank: optim.Adagrad(0.1)):
        self.trainers = Trainers(trainers, *settings)
        self.batches = make_batches(8, last=3) if batches is None else batches
        self.models = [make_model(NAME) for _ in range(trainers)]
        self.rows = [rows(rank) for rank in range(trainers)]
        self.optimizers = {}

    def open(self, rank, batches=None, **options):
        """The loader of the script's `prepare`."""
        model = self.models[rank]
        _, self.optimizers[rank], loader = prepare(
            model, dense_sgd(list(model.parameters())), self.batches if batches is None else batches, self.rows[rank],
            **({"cache": 300, "features": TABLES, "initial": initial} | self.trainers.options(rank) | options),
        )  # fmt: skip
        return loader

    def backward(self, rank, batch):
        """Up to the gradients."""
        found = self.models[rank](batch.dense, batch.sparse)
        self.optimizers[rank].zero_grad()
        nn.functional.binary_cross_entropy_with_logits(found, batch.labels).backward()

    def step(self, rank, batch):
        """One iteration."""
        self.backward(rank, batch)
        self.optimizers[rank].step()

    def state(self):
        """What rows and dense parameters are in the end."""
        return of_store(self.models[0], [table.name for table in TABLES], self.trainers.store)

    def train(self, **options):
        """Train on all trainers; the state."""

        def script(rank):
            for batch in self.open(rank, **options):
                self.step(rank, batch)

        self.trainers.run(script)
        return self.state()


@pytest.mark.parametrize("between", [None, "close", "break"])
def test_a_further_epoch_goes_on_with_the_rows_of_the_one_before(between):
    world = World(batches=make_batches(4, last=3))

    def script(rank):
        loader = world.open(rank)
        for number, batch in enumerate(loader):
            world.step(rank, batch)
            if between == "break" and number == 3:
                break
        if between == "close":
            loader.close()
        for batch in loader:
            world.step(rank, batch)

    world.trainers.run(script)
    assert_identical(World(batches=world.batches * 2).train(), world.state())


def test_a_break_on_all_trainers_ends_cleanly_with_what_was_trained():
    world = World()

    def script(rank):
        with world.open(rank) as loader:
            for number, batch in enumerate(loader):
                world.step(rank, batch)
                if number == 3:
                    break

    world.trainers.run(script)
    assert_identical(World(batches=world.batches[:4]).train(), world.state())


@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("stepped", [True, False])
def test_a_break_on_one_trainer_is_an_error_on_both_before_any_deadline(leaver, stepped):
    world = World()

    def script(rank):
        with world.open(rank) as loader:
            for number, batch in enumerate(loader):
                if rank == leaver and number == 3 and not stepped:
                    break
                world.step(rank, batch)
                if rank == leaver and number == 3:
                    break

    errors = world.trainers.failures(script)
    # A wait that had run out would be a DeadlineError, which is none.
    assert all(isinstance(error, PipelineError) for error in errors), errors
    if stepped:
        assert f"trainer {leaver} left the training loop after iteration 3" in str(errors[leaver])
        assert "has left" in str(errors[1 - leaver]) or "out of step" in str(errors[1 - leaver])


@pytest.mark.parametrize("failing", [0, 1])
def test_where_one_trainers_script_raises_the_others_are_told_that_it_has_left(failing):
    world = World()

    def script(rank):
        with world.open(rank) as loader:
            for number, batch in enumerate(loader):
                if rank == failing and number == 2:
                    raise ValueError("no more")
                world.step(rank, batch)

    errors = world.trainers.failures(script)
    assert isinstance(errors[failing], ValueError)
    assert isinstance(errors[1 - failing], PipelineError)
    assert f"trainer {failing} has left" in str(errors[1 - failing])


def test_a_loader_that_fails_is_raised_on_all_after_what_came_before():
    trained = []
    world = World()

    def batches(rank):
        yield from world.batches[:5]
        raise OSError("the disk is gone")

    def script(rank):
        with world.open(rank, batches(rank)) as loader:
            for batch in loader:
                world.step(rank, batch)
                trained.append(rank)

    first, second = world.trainers.failures(script)
    assert isinstance(first, OSError)
    assert isinstance(second, PipelineError)
    assert "OSError: the disk is gone" in str(second)
    assert sorted(trained) == [0] * 5 + [1] * 5


def test_a_batch_that_can_not_be_divided_is_named_on_all():
    world = World()
    wrong = {"dense": torch.ones(3, 3), "labels": torch.ones(6), **world.batches[3].sparse}
    given = [{"dense": batch.dense, "labels": batch.labels, **batch.sparse} for batch in world.batches[:3]] + [wrong]

    def script(rank):
        with world.open(rank, given) as loader:
            for batch in loader:
                sparse = {name: part for name, part in batch.items() if name not in ("dense", "labels")}
                world.step(rank, SimpleNamespace(dense=batch["dense"], labels=batch["labels"], sparse=sparse))

    errors = world.trainers.failures(script)
    assert isinstance(errors[0], BatchError)
    for error in errors:
        assert "batch 3 has 6 samples, and 'dense' is a tensor of float32 and shape (3, 3)" in str(error)


def test_a_batch_that_can_not_be_sent_is_refused_before_training():
    world = World()
    given = [{"dense": batch.dense, "labels": batch.labels, "odd": {1, 2}, **batch.sparse} for batch in world.batches]
    errors = world.trainers.failures(lambda rank: world.open(rank, given), lambda _: None)
    assert isinstance(errors[0], BatchError)
    assert "'odd' is a set, so it can't be sent to other trainers" in str(errors[0])


def test_a_part_that_is_too_large_to_be_sent_is_refused_before_training():
    world = World()
    large = torch.zeros(1).expand(6, 6_000_000)
    given = [{"dense": batch.dense, "labels": batch.labels, "x": large, **batch.sparse} for batch in world.batches[:1]]
    errors = world.trainers.failures(lambda rank: world.open(rank, given))
    assert isinstance(errors[0], BatchError)
    assert "one trainer's part takes 72 MB besides its ids, and 67 MB can be sent" in str(errors[0])
    assert "72 MB" in str(errors[1])


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"rows": lambda rank: optim.Adagrad(0.1 + rank)}, r"rows differs between trainers.*lr 0\.1.*lr 1\.1"),
        ({"rows": lambda rank: optim.SGD(0.1) if rank else optim.Adagrad(0.1)}, "rows differs.*adagrad.*sgd"),
        ({"options": {"cache": 299}}, "cache differs between trainers: 300 on trainer 0, 299 on trainer 1"),
        ({"options": {"lookahead": 3}}, "lookahead differs between trainers: auto on trainer 0, 3 on trainer 1"),
        ({"options": {"initial": lambda table: bagpipe.initial.Normal(5, table.name)}}, "rows differs.*first values"),
    ],
)
def test_what_trainers_want_differently_is_refused_by_name(other, named):
    world = World(**({"rows": other["rows"]} if "rows" in other else {}))
    options = other.get("options", {})
    errors = world.trainers.failures(lambda rank: world.open(rank), lambda rank: world.open(rank, **options))
    for error in errors:
        assert isinstance(error, ConfigError), error
        assert "trainer" in str(error)
    with pytest.raises(ConfigError, match=named):
        raise errors[0]


def test_dense_parameters_that_differ_are_refused_by_name():
    world = World()
    with torch.no_grad():
        next(world.models[1].parameters()).add_(1)

    def script(rank):
        with world.open(rank) as loader:
            for batch in loader:
                world.step(rank, batch)

    errors = world.trainers.failures(script)
    found = [str(error) for error in errors if isinstance(error, ModelError)]
    assert any("begins with other values on trainer 1" in text for text in found)


def test_an_error_of_the_first_trainer_before_training_reaches_the_others():
    world = World()
    errors = world.trainers.failures(lambda rank: world.open(rank, cache=1))
    assert isinstance(errors[0], CapacityError)
    assert "CapacityError: a cache of 1 rows is too small" in str(errors[1])


def test_evaluation_on_all_trainers_sees_every_update_and_changes_nothing():
    world, seen = World(), {}

    def script(rank):
        with world.open(rank) as loader:
            for number, batch in enumerate(loader):
                world.step(rank, batch)
                if number in (2, 5):
                    loader.flush()
                    with torch.no_grad():
                        for other in world.batches[:2]:
                            seen.setdefault(rank, []).append(world.models[rank](other.dense, other.sparse))

    world.trainers.run(script)
    assert len(seen[0]) == 4
    assert all(map(torch.equal, seen[0], seen[1]))
    assert_identical(World().train(), world.state())


def test_one_trainer_may_evaluate_alone_after_a_flush_of_all():
    world, seen = World(), []

    def script(rank):
        with world.open(rank) as loader:
            for batch in loader:
                world.step(rank, batch)
                loader.flush()
                if loader.rank == 0:
                    with torch.no_grad():
                        seen.append(world.models[0](world.batches[0].dense, world.batches[0].sparse))

    world.trainers.run(script)
    assert len(seen) == 8
    assert_identical(World().train(), world.state())


def test_clipping_scales_all_gradients_by_one_factor_on_all_trainers():
    world, norms = World(rows=lambda _: optim.SGD(0.5)), {0: [], 1: []}

    def script(rank):
        with world.open(rank) as loader:
            for batch in loader:
                world.backward(rank, batch)
                norm = bagpipe.clip_grad_norm_(world.models[rank].parameters(), loader, 0.01)
                norms[rank].append(norm.item())
                world.optimizers[rank].step()

    world.trainers.run(script)
    assert norms[0] == norms[1]
    assert min(norms[0]) > 0.01
    assert world.state().differing(World(rows=lambda _: optim.SGD(0.5)).train())


@pytest.mark.parametrize("within", [True, False])
def test_export_on_all_trainers_writes_one_file_with_every_update(tmp_path, within):
    tables = [bagpipe.Table("user", 40), bagpipe.Table("ad", 25)]
    random = torch.Generator().manual_seed(1)
    batches = [
        {"user": torch.randint(40, (6, 2), generator=random), "ad": torch.randint(25, (6, 1), generator=random)}
        for _ in range(5)
    ]

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.user, self.ad = nn.EmbeddingBag(40, 3, mode="sum"), nn.EmbeddingBag(25, 3, mode="sum")
            self.top = nn.Linear(6, 1)

        def forward(self, batch):
            return self.top(torch.cat([self.user(batch["user"]), self.ad(batch["ad"])], 1))

    torch.manual_seed(0)
    models = [Net(), Net()]
    models[1].load_state_dict(models[0].state_dict())
    trainers = Trainers(2)
    paths = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]

    def script(rank):
        model = models[rank]
        _, optimizer, loader = prepare(
            model, dense_sgd(model.parameters()), batches, cache=300, features=tables, **trainers.options(rank)
        )
        for number, batch in enumerate(loader):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if within and number == 4:
                bagpipe.export(model, paths[rank])
        if not within:
            bagpipe.export(model, paths[rank])
        return model.state_dict()

    expected = trainers.run(script)[0]
    found = load_file(paths[0])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert not paths[1].exists()


def test_the_checker_is_refused_where_it_can_not_follow():
    world = World()
    errors = world.trainers.failures(lambda rank: world.open(rank, check=True))
    assert all(isinstance(error, ConfigError) and "check=True" in str(error) for error in errors)


@pytest.mark.parametrize(("policy", "warnings"), [("lookahead", 0), ("lru", 1)])
def test_lrpp_that_saves_nothing_is_said_once(caplog, policy, warnings):
    World("sync.design=lrpp").train(policy=policy)
    said = [record.getMessage() for record in caplog.records]
    assert sum("'lrpp'" in each and "policy=lookahead" in each for each in said) == warnings
