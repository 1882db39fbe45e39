"""A run that goes on from any of its checkpoints ends with the bits of one that was never ended (I2, I6)."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import bagpipe
from bagpipe import Checkpointing
from bagpipe.data import Loader, generated
from bagpipe.errors import CheckpointError, ConfigError, ModelError, StoreError
from harness.kept import BATCH, DATA, EPOCHS, STORED, Noisy, Run, assert_same_end, every, undisturbed
from harness.plain import nothing_left  # noqa: F401
from harness.seams import SAVE, Checkpoints, MemoryStore

pytestmark = pytest.mark.usefixtures("nothing_left")


def shuffling():
    """A torch DataLoader over ready batches, in another order each epoch, fixed by a generator of its own."""
    generator = torch.Generator().manual_seed(11)
    return DataLoader(STORED[:3], batch_size=None, shuffle=True, generator=generator)


KINDS = {
    "sgd": {"rows": "sgd"},
    "adagrad": {"rows": "adagrad"},
    "adam": {"rows": "adam"},
    "accumulate": {"accumulate": 2},
    "epochs of a loader": {"make_loader": lambda: Loader(DATA, BATCH, seed=1), "epochs": EPOCHS},
    "loader on threads": {
        "make_loader": lambda: Loader(DATA, BATCH, epochs=EPOCHS, seed=1, workers=2),
        "accumulate": 2,
    },
    "list": {"make_loader": lambda: STORED},
    "epochs of a list": {"make_loader": lambda: STORED[:3], "epochs": EPOCHS, "accumulate": 2},
    "generator": {"make_loader": lambda: iter(STORED)},
    "DataLoader": {"make_loader": lambda: DataLoader(STORED, batch_size=None)},
    "shuffling DataLoader": {"make_loader": shuffling, "epochs": EPOCHS},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_resumed_at_any_iteration_ends_with_the_same_bits(tmp_path, kind):
    options = KINDS[kind]
    expected = undisturbed(**options)
    assert_same_end(expected, undisturbed(checkpoint=every(tmp_path), **options))  # being kept changes nothing
    found = Checkpoints(tmp_path).list()
    epochs = options.get("epochs", 1)
    iterations = epochs * -(-9 // epochs // options.get("accumulate", 1))
    assert [each.done for each in found] == list(range(1, iterations + 1))
    assert {1, 2} <= {len(each.chain) for each in found}  # all rows, or those that changed
    for each in found:
        resumed = Run(resume=each.directory, **options)
        assert resumed.loop.done == each.done
        assert_same_end(expected, resumed.train().end())


OTHERS = {
    "lookahead": {"lookahead": 2},
    "cache": {"cache": 200},
    "policy": {"policy": "lru", "cache": 250},
    "no cache": {"policy": "nocache"},
    "store": {"store": "mapped"},
    "checker": {"check": True},
}


@pytest.mark.parametrize("other", OTHERS)
def test_lookahead_cache_policy_and_store_may_change(tmp_path, other):
    expected = undisturbed()
    Run(checkpoint=every(tmp_path)).train(5).end()
    found = Run(resume=tmp_path, checkpoint=every(tmp_path, 2), **OTHERS[other]).train().end()
    assert_same_end(expected, found)


@pytest.mark.parametrize("kind", ["adam", "epochs of a loader", "list", "shuffling DataLoader"])
def test_a_run_ended_after_every_iteration_ends_with_the_same_bits(tmp_path, kind):
    options = KINDS[kind]
    expected = undisturbed(**options)
    for number in range(1, 10):
        run = Run(checkpoint=every(tmp_path), resume="auto", **options)
        assert run.loop.done == number - 1
        # the next batch is asked for, so that the iteration before it is over and kept
        found = run.train(2 if number < 9 else None).end()
        assert Checkpoints(tmp_path).latest().done == number
    assert_same_end(expected, found)
    again = Run(checkpoint=every(tmp_path), resume=True, **options)
    assert again.loop.done == 9
    assert_same_end(expected, again.train().end())  # nothing is left to do


def test_of_rows_in_files_the_checkpoint_is_what_a_run_goes_on_with(tmp_path):
    expected = undisturbed()
    options = {"store": tmp_path / "rows", "checkpoint": every(tmp_path / "kept", 3)}
    Run(**options).train(8).end()
    assert not list((tmp_path / "rows").iterdir())
    assert_same_end(expected, Run(resume=True, **options).train().end())


def test_a_path_may_be_that_of_a_checkpoint_of_a_directory_or_of_a_run(tmp_path):
    expected = undisturbed()
    Run(checkpoint=every(tmp_path / "checkpoints", 4)).train().end()
    for path, done in (("checkpoints/00000004", 4), ("checkpoints", 9), (".", 9)):
        run = Run(resume=str(tmp_path / path))
        assert run.loop.done == done
        assert_same_end(expected, run.train().end())


def test_going_back_to_an_earlier_checkpoint_writes_the_later_ones_anew(tmp_path):
    expected = undisturbed()
    Run(checkpoint=every(tmp_path, 2)).train().end()
    back = Run(checkpoint=every(tmp_path, 3), resume=tmp_path / "00000004")
    assert_same_end(expected, back.train().end())
    assert [each.done for each in Checkpoints(tmp_path).list()] == [2, 4, 6, 9]
    for each in Checkpoints(tmp_path).list():
        assert_same_end(expected, Run(resume=each.directory).train().end())


def test_a_run_that_goes_back_never_goes_on_from_the_future_that_it_has_left(tmp_path):
    Run(checkpoint=every(tmp_path, 2)).train().end()
    back = Run(checkpoint=every(tmp_path, 4), resume=tmp_path / "00000004", lr=0.5)
    back.train(2).end()  # ends before its first checkpoint
    assert Checkpoints(tmp_path).numbers() == [2, 4]
    expected = Run(resume=tmp_path / "00000004", lr=0.5).train().end()
    assert_same_end(expected, Run(checkpoint=every(tmp_path, 4), resume=True, lr=0.5).train().end())


def test_where_the_checkpoint_to_go_back_to_is_damaged_the_later_ones_stay(tmp_path):
    Run(checkpoint=every(tmp_path, 4)).train().end()
    rows = next((tmp_path / "00000004").glob("rows-*"))
    rows.write_bytes(rows.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"00000004"):
        Run(checkpoint=every(tmp_path, 4), resume=tmp_path / "00000004")
    assert Checkpoints(tmp_path).numbers() == [4, 8, 9]


def test_a_run_that_goes_on_from_elsewhere_wants_a_directory_without_checkpoints(tmp_path):
    for name in ("one", "other"):
        Run(checkpoint=every(tmp_path / name, 4)).train().end()
    for path in ("one", "one/00000004"):
        with pytest.raises(ConfigError, match=r"other holds checkpoints .* after 9 iterations: resume names another"):
            Run(checkpoint=every(tmp_path / "other", 4), resume=tmp_path / path)
    assert Checkpoints(tmp_path / "other").numbers() == [4, 8, 9]


@pytest.mark.parametrize("below", ["", "below"])
def test_checkpoints_may_lie_behind_a_link_of_the_users(tmp_path, below):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    expected = Run().train().end()
    Run(checkpoint=every(tmp_path / "link" / below, 4)).train(5).end()
    assert Checkpoints(tmp_path / "disk" / below).numbers() == [4]
    assert_same_end(expected, Run(checkpoint=every(tmp_path / "link" / below, 4), resume=True).train().end())


def test_which_checkpoint_is_meant_must_be_clear(tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint to go on from: begin anew"):
        Run(checkpoint=every(tmp_path), resume=True)
    with pytest.raises(CheckpointError, match=r"holds no checkpoint to go on from: check the path"):
        Run(resume=tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"goes on from checkpoint\.directory"):
        Run(resume=True)
    Run(checkpoint=every(tmp_path)).train(3).end()
    with pytest.raises(ConfigError, match=r"already, the last after 2 iterations: go on from it with resume=True"):
        Run(checkpoint=every(tmp_path))
    with pytest.raises(ConfigError, match=r"checkpoint\.every is 0"):
        Checkpointing(tmp_path, every=0)
    with pytest.raises(ConfigError, match="resume is 5"):
        Run(checkpoint=every(tmp_path), resume=5)
    manifest = tmp_path / "00000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"version"', '"revision"'))
    with pytest.raises(ConfigError, match=r"holds checkpoints of a run already, the last after 2 iterations"):
        Run(checkpoint=every(tmp_path))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"directory": __file__}, "give the path of a directory"),
        ({"directory": 3}, "give the path of a directory"),
        ({"about": 5}, "give a dict of names"),
        ({"about": {1: 2}}, "give a dict of names"),
        ({"about": {"a": {1, 2}}}, "can't be noted as JSON"),
        ({"about": {"a": float("nan")}}, "can't be noted as JSON"),
    ],
    ids=str,
)
def test_what_could_not_be_written_is_refused_at_once(tmp_path, wrong, words):
    with pytest.raises(ConfigError, match=words):
        Checkpointing(**({"directory": tmp_path} | wrong))


def test_a_parameter_without_a_shape_cannot_be_kept(tmp_path):
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.items = nn.EmbeddingBag(10, 2, mode="sum")
            self.top = nn.LazyLinear(1)

        def forward(self, batch):
            return self.top(self.items(batch["items"]))

    model, batches = Lazy(), [{"items": torch.tensor([[1], [2]])}]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, loader = bagpipe.prepare(model, optimizer, batches, cache=10, checkpoint=Checkpointing(tmp_path))
    loader.register_for_checkpointing()
    with pytest.raises(CheckpointError, match=r"'top\.weight' has no shape yet"):
        next(iter(loader))
    loader.close()
    with pytest.raises(ConfigError, match=r"checkpoint\.keep is 0"):
        Checkpointing(tmp_path, keep=0)


class Wider(Noisy):
    """Another dense part."""

    def __init__(self, seed):
        super().__init__(seed)
        self.more = nn.Linear(2, 2)


class WithBuffer(Noisy):
    """Another buffer."""

    def __init__(self, seed):
        super().__init__(seed)
        self.register_buffer("count", torch.zeros(1))


class Longer(Noisy):
    """Longer vectors."""

    def __init__(self, seed):
        super().__init__(seed)
        from bagpipe.models import build_model

        self.inner = build_model("wide_deep", DATA.tables, 4, 5, torch.device("meta"), seed=seed)


WRONG = {
    "parameter": ({"model": Wider}, r"parameter 'more\.bias' was not kept, like 1 more"),
    "buffer": ({"model": WithBuffer}, r"buffer 'count' was not kept"),
    "dims": ({"model": Longer}, r"another model: table 'user' has dims \(4,\) in the checkpoint and \(5,\) in"),
    "row optimizer": ({"rows": "sgd"}, r"another model: table 'user' has width 12 in the checkpoint and 4 in the"),
    "seed": ({"seed": 4}, r"what rows begin with, by the seed, of table"),
    "data": (
        {"make_loader": lambda: Loader(generated("tiny", 70, 5), BATCH, epochs=EPOCHS, seed=1)},
        r"a checksum of the data or its order is",
    ),
    "order": ({"make_loader": lambda: Loader(DATA, BATCH, epochs=EPOCHS, seed=2)}, r"a checksum of the data or its"),
    "accumulate": ({"accumulate": 3}, r"accumulate is 1 there and 3 here"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_checkpoint_of_something_else_is_refused_and_nothing_changes(tmp_path, wrong):
    Run(checkpoint=every(tmp_path)).train(4).end()
    options, words = WRONG[wrong]
    made = []

    def model(seed):
        made.append(options.get("model", Noisy)(seed))
        made.append({name: value.clone() for name, value in made[0].named_parameters() if not value.is_meta})
        made.append([type(part) for part in made[0].modules()])
        return made[0]

    with pytest.raises((CheckpointError, ConfigError), match=words):
        Run(resume=tmp_path, **options | {"model": model})
    assert [type(part) for part in made[0].modules()] == made[2]  # no layer was swapped
    for name, value in made[1].items():
        assert torch.equal(dict(made[0].named_parameters())[name], value)
    assert_same_end(undisturbed(), Run(resume=tmp_path).train().end())


def test_what_is_registered_must_be_what_was_kept(tmp_path):
    Run(checkpoint=every(tmp_path)).train(4).end()

    def resumed(**options):
        return Run(register=False, resume=tmp_path, **options)

    run = resumed()
    with pytest.raises(CheckpointError, match=r"had attached 'dense', 'own', 'scheduler', and this one has nothing"):
        run.train()
    run.end()
    run = resumed()
    with pytest.raises(CheckpointError, match=r"had attached 'dense', 'own', 'scheduler', and not 'steps'"):
        run.loader.register_for_checkpointing(steps=run.scheduler)
    run.end()
    run = resumed(dense=torch.optim.SGD)
    with pytest.raises(CheckpointError, match="'dense' was of class Adam when it was kept, and is of class SGD"):
        run.loader.register_for_checkpointing()
    run.end()
    run = resumed(parameters=lambda model: list(model.parameters())[1:])
    with pytest.raises(CheckpointError, match=r"'dense' can't take over the state that was kept: .*group"):
        run.loader.register_for_checkpointing()
    run.end()


def test_what_cannot_be_registered_is_refused(tmp_path):
    for options in ({}, {"checkpoint": every(tmp_path / "kept")}):
        run = Run(register=False, **options)
        with pytest.raises(ModelError, match="'count' is a int: register what has state_dict"):
            run.loader.register_for_checkpointing(count=3)
        run.loader.register_for_checkpointing(scheduler=run.scheduler)
        run.train(2).end()
    resumed = Run(register=False, resume=tmp_path / "kept")
    resumed.loader.register_for_checkpointing(scheduler=resumed.scheduler)  # the optimizer was saved, all the same
    resumed.train().end()

    class Odd:
        def state_dict(self):
            return {"made": object()}

        def load_state_dict(self, state):
            pass

    run = Run(register=False, checkpoint=every(tmp_path / "odd"))
    run.loader.register_for_checkpointing(run.scheduler, odd=Odd())
    with pytest.raises(ModelError, match="registered as 'odd' already"):
        run.loader.register_for_checkpointing(odd=Odd())
    with pytest.raises(CheckpointError, match="object"):
        run.train()
    run.end()
    assert not Checkpoints(tmp_path / "odd").list()


def test_checkpoints_without_a_word_on_other_states_are_refused_at_the_first_batch(tmp_path):
    run = Run(register=False, checkpoint=every(tmp_path))
    with pytest.raises(CheckpointError, match=r"call loader\.register_for_checkpointing\(scheduler, \.\.\.\)"):
        run.train()
    run.end()
    run = Run(register=False, checkpoint=every(tmp_path))
    run.loader.register_for_checkpointing(run.scheduler)
    batches = iter(run.loader)
    next(batches)
    with pytest.raises(CheckpointError, match="register for checkpointing before the first batch"):
        run.loader.register_for_checkpointing(own=run.model.own)
    run.end()


def test_a_store_that_cannot_be_kept_is_refused(tmp_path):
    class Plain:
        def __init__(self, store):
            self._store = store

        def __getattr__(self, name):
            if name == "restore":
                raise AttributeError(name)
            return getattr(self._store, name)

    with pytest.raises(ConfigError, match="Plain does not support checkpoints"):
        Run(checkpoint=every(tmp_path), store=lambda layouts: Plain(MemoryStore(layouts)))


def failing_after(monkeypatch, number, error):
    """Let the n-th writing of row files fail."""
    calls, save = [], getattr(*SAVE)

    def saving(self, *args, **options):
        calls.append(args[0])
        if len(calls) == number:
            raise error
        return save(self, *args, **options)

    monkeypatch.setattr(*SAVE, saving)
    return calls


def test_a_full_disk_is_told_in_the_loop_and_the_run_can_go_on_from_before(tmp_path, monkeypatch):
    expected = undisturbed()
    failing_after(monkeypatch, 3, OSError(28, "No space left on device"))
    run = Run(checkpoint=every(tmp_path))
    with pytest.raises(
        CheckpointError, match=r"checkpoint of iteration 3 can't be written: OSError.*No space left.*the one before"
    ):
        run.train()
    assert run.loop.closed
    trained = run.loop.done
    assert trained in (3, 4)  # the next iteration may have been trained meanwhile
    rows = run.end()[0].rows
    assert sorted(each.name for each in tmp_path.iterdir()) == ["00000001", "00000002"]
    plain = Run().train(trained)
    names = [layout.table.name for layout in plain.loop.layouts]
    assert rows.keys() == set(names)
    expected_rows = plain.end()[0].rows
    for name in names:  # the rows in memory are what was trained
        order, other = rows[name][0].argsort(), expected_rows[name][0].argsort()
        assert rows[name][1][order].tobytes() == expected_rows[name][1][other].tobytes()
    assert_same_end(expected, Run(checkpoint=every(tmp_path), resume=True).train().end())


def test_a_failure_of_the_last_checkpoint_is_raised_too(tmp_path, monkeypatch):
    failing_after(monkeypatch, 1, StoreError("the rows are gone"))
    run = Run(checkpoint=every(tmp_path, 100))
    with pytest.raises(CheckpointError, match=r"checkpoint of iteration 9 .*the rows are gone"):
        run.train()
    run.end()
    assert Checkpoints(tmp_path).list() == []


def test_two_checkpoints_are_never_written_at_once(tmp_path, monkeypatch):
    save, at_once, most = getattr(*SAVE), [], []

    def saving(self, *args, **options):
        at_once.append(threading.current_thread().name)
        most.append(list(at_once))
        threading.Event().wait(0.02)
        try:
            return save(self, *args, **options)
        finally:
            at_once.pop()

    monkeypatch.setattr(*SAVE, saving)
    Run(checkpoint=every(tmp_path)).train().end()
    assert most == [["bagpipe-checkpoint"]] * 9


@pytest.mark.parametrize("how", ["break", "exception"])
def test_leaving_the_loop_waits_for_the_checkpoint_under_way(tmp_path, how):
    run = Run(checkpoint=every(tmp_path, 2))
    if how == "break":
        run.train(3)
    else:
        with pytest.raises(ValueError, match="mine"):
            run.train(3, ValueError("mine"))
    assert [each.done for each in Checkpoints(tmp_path).list()] == [2]
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bagpipe-checkpoint")]
    run.end()


def test_the_users_own_error_is_not_hidden_by_that_of_a_checkpoint(tmp_path, monkeypatch):
    failing_after(monkeypatch, 1, OSError("mine is not shown"))
    run = Run(checkpoint=every(tmp_path, 2))

    def loop():
        with run.loader:
            for number, _ in enumerate(run.loader):
                if number == 2:
                    raise ValueError("the user's")

    with pytest.raises(ValueError, match="the user's"):
        loop()
    run.end()


def test_old_checkpoints_go_and_what_the_last_ones_build_on_stays(tmp_path):
    expected = undisturbed()
    Run(checkpoint=Checkpointing(tmp_path, every=1, keep=2)).train().end()
    left = Checkpoints(tmp_path).list()
    assert sorted({done for each in left[-2:] for done in each.chain}) == [each.done for each in left]
    assert [each.done for each in left][-2:] == [8, 9]
    assert len(left) < 9
    assert_same_end(expected, Run(resume=tmp_path / "00000008").train().end())


def test_what_a_run_is_and_what_it_notes_is_in_its_checkpoints(tmp_path):
    options = replace(every(tmp_path, 5), about={"name": "first try"}, data="these")
    Run(checkpoint=options).train().end()
    manifest = Checkpoints(tmp_path).latest().manifest
    assert (manifest.done, manifest.trainers, manifest.servers, manifest.data) == (9, 1, 0, "these")
    assert manifest.config["name"] == "first try"
    assert manifest.tables[0].layers[0].startswith("inner.")
    assert manifest.tables[0].initial[0].seed == 10
    with pytest.raises(CheckpointError, match="the data or its order is 'these' there and 'others' here"):
        Run(resume=tmp_path, checkpoint=replace(every(tmp_path), data="others"))


def test_an_iteration_without_a_step_and_evaluation_do_not_matter(tmp_path):
    def train(run):
        for number, batch in enumerate(run.loader, start=run.loop.done):
            if number not in (2, 5):
                run.model(batch.dense, batch.sparse).sum().backward()
                run.optimizer.step()
                run.optimizer.zero_grad()
            if number == 4:
                run.model.eval()
                with torch.no_grad():
                    run.model(STORED[0].dense, STORED[0].sparse)
                run.model.train()
        return run.end()

    expected = train(Run())
    assert_same_end(expected, train(Run(checkpoint=every(tmp_path))))
    for done in (3, 5, 6):
        assert_same_end(expected, train(Run(resume=Path(tmp_path) / f"{done:08d}")))
