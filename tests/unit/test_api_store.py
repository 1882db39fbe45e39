"""Rows in files: where they lie, and how much memory they may take."""

from __future__ import annotations

import pytest

import bagpipe
from bagpipe.errors import ConfigError, StoreError
from bagpipe.store import MemoryStore
from bagpipe.store.mapped import RESIDENT_BYTES_MAX
from harness.plain import (
    assert_same_bits,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    train_fast,
)
from harness.started import start, train

pytestmark = pytest.mark.usefixtures("nothing_left")


def store_of(place, **options):
    """The store of a model that was prepared."""
    return start(store=place, **options)[2].loop.store


@pytest.mark.parametrize("device", [None, "meta"])
def test_rows_in_a_directory_train_to_the_same_bits_and_leave_nothing_there(tmp_path, device):
    (tmp_path / "notes.txt").write_text("mine")
    expected = train_fast(make_net(device=device), make_batches(), bagpipe.optim.Adam(0.05))
    for _ in range(2):  # a second process begins anew
        net = make_net(device=device)
        assert_same_bits(expected, train_fast(net, make_batches(), bagpipe.optim.Adam(0.05), store=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_what_can_not_hold_files_is_refused_and_stays_as_it_is(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"notes.txt is a file: give a directory"):
        store_of(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match=r"store='rows': give .* the path of a directory for the files, .*'\./rows'"):
        store_of("rows")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "table-00000.rows").write_text("of an earlier version")
    with pytest.raises(StoreError, match=r"earlier version .*checkpoints only; remove .*or give another directory"):
        store_of(tmp_path / "rows")
    assert (tmp_path / "rows" / "table-00000.rows").read_text() == "of an earlier version"


def test_a_call_that_fails_late_leaves_a_directory_that_can_be_used(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    with monkeypatch.context() as failing:
        failing.setattr("bagpipe.build.TrainLoop", fail)
        with pytest.raises(MemoryError):
            store_of(tmp_path / "rows")
    store_of(tmp_path / "rows").close()


@pytest.mark.parametrize("name", ["rows", "memory", "mapped"])
def test_the_directory_of_files_may_have_any_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).mkdir()
    (tmp_path / name / "table-00000.rows").write_text("of an earlier version")
    with pytest.raises(StoreError, match="earlier version"):
        store_of(bagpipe.Files(name))


@pytest.mark.parametrize("store", ["mapped", "directory"])
def test_memory_for_rows_on_disk_can_be_bounded(tmp_path, store):
    place = tmp_path / "rows" if store == "directory" else store
    assert store_of(place, store_memory="7.5MB")._residency.bytes_max == 7_500_000
    assert store_of(tmp_path / "other")._residency.bytes_max == RESIDENT_BYTES_MAX


@pytest.mark.parametrize(("value", "named"), [("much", "'much'"), ("1MB", "at least '5MB'"), (7_000_000, "7000000")])
def test_memory_that_can_not_be_kept_is_refused_with_its_value(value, named):
    with pytest.raises(ConfigError, match=rf"memory of bagpipe\.Files is .*{named}"):
        bagpipe.Files(memory=value)


class Noted(MemoryStore):
    """Remembers which iterations it was told of."""

    def __init__(self, tables):
        super().__init__(tables)
        self.after, self.passed = [], []

    def read_many(self, parts, after=-1):
        self.after.append(after)
        super().read_many(parts, after)

    def write_many(self, parts, passed=-1):
        self.passed.append(passed)
        super().write_many(parts, passed)


@pytest.mark.parametrize("closed", [False, True])
def test_iterations_of_a_later_epoch_are_counted_on(closed):
    """Or trainers would not wait for each other: what they read after was passed in the epoch before."""
    net, optimizer, loader = start(make_batches(4), policy="nocache", store=Noted)
    store, told = loader.loop.store, []
    for _ in range(3):
        train(net, optimizer, loader)
        if closed:
            loader.close()
        told.append([number for number in store.passed if number >= 0])
        assert {-1, *range(len(told) * 4)} >= set(store.after)
    assert told[-1] == list(range(12))
    assert max(store.after) > 8, "rows that the last epoch itself has written"
    assert -1 in store.after, "what is of no iteration stays so"
