"""`Checkpointing(init_from=...)`: a script that begins with the state of another run."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bagpipe
from bagpipe.checkpoint.importing import import_rows
from bagpipe.errors import CheckpointError, ConfigError
from bagpipe.resuming import find_resume_point
from bagpipe.state import of_store
from harness.flat import prepare
from harness.kept import unchanged


class Model(nn.Module):
    """One table, which may grow, and new ones beside it."""

    def __init__(self, rows, tables=("user",)):
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(rows, 2, device="meta") for name in tables})
        self.top = nn.Linear(2, 1)

    def forward(self, sparse):
        return self.top(sum(self.tables[name](sparse[name]) for name in self.tables)).squeeze(1)


def decay(done):
    """Every fourth iteration."""
    return 1.0 if done % 4 else 0.1


def day(rows, tables=("user",), number=1, batches=6):
    """Batches of a day."""
    made = torch.Generator().manual_seed(number)
    return [
        ({name: torch.randint(rows, (8,), generator=made) for name in tables}, torch.rand(8, generator=made).round())
        for _ in range(batches)
    ]


class Session:
    """One script: a model trained on a day."""

    def __init__(self, data, rows=20, tables=("user",), stop=None, lr=0.1, resume=None, **checkpoint):
        torch.manual_seed(5)
        self.model, self.rows = Model(rows, tables), bagpipe.optim.Adam(lr)
        kept = bagpipe.Checkpointing(resume=resume, **checkpoint) if checkpoint else None
        features = {name: [f"tables.{name}"] for name in tables}
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        _, self.optimizer, self.loader = prepare(
            self.model, optimizer, data, self.rows, cache=200, features=features, checkpoint=kept, check=True
        )
        self.loop = self.loader.loop
        # Of dense parameters alone: rows have the last group.
        self.scheduler = torch.optim.lr_scheduler.MultiplicativeLR(self.optimizer, [decay, unchanged])
        self.generator = torch.Generator().manual_seed(3)
        self.stop = stop

    def train(self, **registered):
        things = registered or {"scheduler": self.scheduler, "generator": self.generator}
        self.drawn = []
        self.loader.register_for_checkpointing(**things)
        self.began_at = self.loop.done
        for _ in range(self.loader.epoch, 1):
            for sparse, labels in self.loader:
                self.step(sparse, labels)
                self.drawn.append(torch.rand(1, generator=self.generator).item())
                if self.loop.done + 1 == self.stop:
                    break
        return self

    def step(self, sparse, labels):
        """One iteration."""
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(sparse), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()

    def state(self):
        names = [layout.table.name for layout in self.loop.layouts]
        return of_store(self.model, names, self.loop.store)


@pytest.fixture
def first(tmp_path):
    """A first day, whose checkpoint is in `first`."""
    session = Session(day(20), directory=tmp_path / "first", every=100).train()
    return session, tmp_path / "first"


def test_a_script_takes_over_all_but_generators_and_the_place_in_the_data(first, tmp_path):
    before, path = first
    second = Session(day(30, number=2), rows=30, lr=0.2, directory=tmp_path / "second", init_from=path).train()
    assert second.began_at == 0
    assert second.rows.updates == 12
    assert second.rows.lr == 0.2
    assert second.scheduler.last_epoch == 12
    assert second.optimizer.dense_state()["state"][0]["step"].item() == 12
    assert second.optimizer.param_groups[0]["lr"] == pytest.approx(0.05 * 0.1**3)
    assert second.drawn == before.drawn, "the generator begins anew"
    # The same by hand: day one and day two in one loop of the model that is as large from the beginning.
    whole = Session(day(20) + day(30, number=2), rows=30)
    for number, (sparse, labels) in enumerate(whole.loader):
        if number == 6:
            whole.optimizer.param_groups[-1]["lr"] = 0.2
        whole.step(sparse, labels)
    assert whole.state().differing(second.state()) == []


def test_new_tables_begin_and_others_keep_their_rows_whatever_their_order(first, tmp_path):
    before, path = first
    session = Session(day(20, ("ad", "user"), 2), tables=("ad", "user"), directory=None, init_from=path)
    names = [layout.table.name for layout in session.loop.layouts]
    user = names.index("tables.user") if "tables.user" in names else names.index("user")
    old = dict(zip(*map(list, before.state().rows[names[user]]), strict=True))
    for ids, values in session.loop.store.iterate(user):
        assert {int(row): value.tobytes() for row, value in zip(ids, values, strict=True)} == {
            int(row): value.tobytes() for row, value in old.items()
        }
    assert session.loop.store.num_rows(1 - user) == 0
    session.train()
    assert session.loop.store.num_rows(1 - user) > 0


def test_a_new_table_in_the_optimizer_of_all_leaves_the_others_their_states(tmp_path):
    def trained(tables, **checkpoint):
        torch.manual_seed(5)
        model = Model(20, tables)
        kept = bagpipe.Checkpointing(**checkpoint)
        optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
        features = {name: [f"tables.{name}"] for name in tables}
        _, _, loader = prepare(model, optimizer, day(20, tables), cache=200, features=features, checkpoint=kept)
        loader.register_for_checkpointing()
        before = [part["sum"].clone() for part in optimizer.dense_state()["state"].values()]
        for sparse, labels in loader:
            nn.functional.binary_cross_entropy_with_logits(model(sparse), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        return before, [part["sum"] for part in optimizer.dense_state()["state"].values()]

    _, left = trained(("user",), directory=tmp_path / "first")
    found, _ = trained(("ad", "user"), directory=None, init_from=tmp_path / "first")
    assert [part.shape for part in found] == [(1, 2), (1,)]
    assert all(map(torch.equal, left, found))


def test_its_own_checkpoints_go_before(first, tmp_path):
    _, path = first
    settings = {"directory": tmp_path / "second", "every": 2, "init_from": path}
    whole = Session(day(20, number=2), directory=tmp_path / "whole", init_from=path).train()
    stopped = Session(day(20, number=2), stop=6, resume="auto", **settings).train()
    assert stopped.began_at == 0
    went_on = Session(day(20, number=2), resume="auto", **settings).train()
    assert went_on.began_at == 4
    assert whole.state().differing(went_on.state()) == []


def test_what_was_registered_before_must_be_and_more_may_be(first, tmp_path):
    _, path = first
    more = Session(day(20), directory=None, init_from=path)
    extra = torch.optim.lr_scheduler.ExponentialLR(more.optimizer, 0.9)
    more.train(scheduler=more.scheduler, generator=more.generator, extra=extra)
    assert extra.last_epoch == 0
    less = Session(day(20), directory=None, init_from=path)
    with pytest.raises(CheckpointError, match="had attached 'dense', 'scheduler', and this one has 'dense', 'steps'"):
        less.train(steps=less.scheduler)


def test_without_a_directory_nothing_is_saved(first, tmp_path):
    _, path = first
    Session(day(20), directory=None, init_from=path).train()
    assert [each.name for each in tmp_path.iterdir()] == ["first"]
    with pytest.raises(ConfigError, match="give the path of a directory, init_from or resume"):
        bagpipe.Checkpointing(None)


def test_a_run_needs_a_directory_of_its_own(first):
    _, path = first
    with pytest.raises(ConfigError, match="holds checkpoints of a run already"):
        Session(day(20), directory=path, init_from=path)
    moved = path.parent / "new"
    moved.mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint to begin with"):
        Session(day(20), directory=path.parent / "other", init_from=moved)


def test_imported_rows_are_begun_with_and_not_gone_on_from(tmp_path):
    save_file({"e.embeddings.user.weight": torch.full((20, 2), 0.5)}, tmp_path / "rows.safetensors")
    optimizer = bagpipe.optim.Adam()
    import_rows([tmp_path / "rows.safetensors"], tmp_path / "other", optimizer=optimizer)
    with pytest.raises(CheckpointError, match=r"'user' is only in the checkpoint, and the model has 'tables.user'"):
        Session(day(20), directory=None, init_from=tmp_path / "other")
    renamed = {"user": "tables.user"}
    import_rows([tmp_path / "rows.safetensors"], tmp_path / "imported", optimizer=optimizer, renamed=renamed)
    for resume in (tmp_path / "imported", "auto"):
        with pytest.raises(
            CheckpointError, match="has imported rows, and no run to go on with: begin with them by init"
        ):
            Session(day(20), directory=tmp_path / "imported", resume=resume)
    session = Session(day(20), directory=tmp_path / "run", every=4, init_from=tmp_path / "imported").train()
    assert session.rows.updates == 6
    assert session.loop.store.num_rows(0) == 20


def test_a_table_that_the_model_lacks_is_refused_by_name_before_it_is_touched(first, tmp_path):
    _, path = first
    with pytest.raises(CheckpointError, match=r"user' is only in the checkpoint, and the model has 'tables.ad'"):
        Session(day(20, ("ad",)), tables=("ad",), directory=tmp_path / "second", init_from=path)
    assert not (tmp_path / "second").exists()


def test_where_all_checkpoints_are_damaged_the_advice_works(tmp_path):
    for done in (10, 20):
        (tmp_path / "c" / f"{done:08d}").mkdir(parents=True)
        (tmp_path / "c" / f"{done:08d}" / "manifest.json").write_text("{}")
    for resume in (True, "auto"):
        with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* can be used .*another directory"):
            find_resume_point(resume, tmp_path / "c")


def test_a_directory_has_a_name():
    with pytest.raises(ConfigError, match="give the path of a directory"):
        bagpipe.Checkpointing("")
