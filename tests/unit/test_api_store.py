"""Rows in files: where they lie, and how much memory they may take."""

from __future__ import annotations

import pytest

import bagpipe
from bagpipe.errors import ConfigError, ModelError, StoreError
from bagpipe.store import MemoryStore
from bagpipe.store.mapped import RESIDENT_BYTES_MAX
from harness.plain import (
    assert_same_bits,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    train_fast,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def accelerate(directory, net=None, rows=None, **options):
    return bagpipe.accelerate(
        net or make_net(), make_batches(), rows or bagpipe.optim.SGD(0.1), cache=60, store=directory, **options
    )


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
        accelerate(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(ConfigError, match="store='rows': give 'memory', 'mapped', or the path of a directory"):
        accelerate("rows")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "table-00000.rows").write_text("of an earlier version")
    with pytest.raises(StoreError, match=r"earlier version .*checkpoints only; remove .*or give another directory"):
        accelerate(tmp_path / "rows")
    assert (tmp_path / "rows" / "table-00000.rows").read_text() == "of an earlier version"


def test_the_directory_of_a_model_s_earlier_loop_may_be_named_again(tmp_path):
    net, rows = make_net(), bagpipe.optim.SGD(0.1)
    first = accelerate(tmp_path / "rows", net, rows)
    first.close()
    with pytest.raises(ConfigError, match="rows are in a store already"):
        accelerate(tmp_path / "others", net, rows)
    assert accelerate(tmp_path / "rows", net, rows).store is first.store


def test_a_call_that_fails_late_leaves_a_directory_that_can_be_used(tmp_path):
    rows = bagpipe.optim.SGD(0.1)
    with bagpipe.accelerate(make_net(), make_batches(), rows), pytest.raises(ModelError, match="already drives"):
        accelerate(tmp_path / "rows", rows=rows)
    accelerate(tmp_path / "rows").store.close()


@pytest.mark.parametrize("store", ["mapped", "directory"])
def test_memory_for_rows_on_disk_can_be_bounded(tmp_path, store):
    place = tmp_path / "rows" if store == "directory" else store
    assert accelerate(place, store_memory="7.5MB").store._residency.bytes_max == 7_500_000
    assert accelerate(tmp_path / "other").store._residency.bytes_max == RESIDENT_BYTES_MAX


@pytest.mark.parametrize(
    ("store", "value", "named"),
    [
        ("memory", "1GB", "goes with rows on disk"),
        ("mapped", "much", "'much'"),
        ("mapped", "1MB", "at least '5MB'"),
        ("mapped", 7_000_000, "7000000"),
    ],
)
def test_memory_that_can_not_be_kept_is_refused_with_its_value(store, value, named):
    with pytest.raises(ConfigError, match=rf"store_memory.*{named}"):
        accelerate(store, store_memory=value)


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


def test_iterations_of_a_later_loop_are_counted_on():
    """Or trainers would not wait for each other: what they read after was passed in the loop before."""
    net, told = make_net(), []
    for options in ({"store": Noted}, {}, {}):
        rows = bagpipe.optim.SGD(0.1)
        with bagpipe.accelerate(net, make_batches(4), rows, cache=60, policy="nocache", **options) as loop:
            for batch in loop:
                loss_of(net, batch).backward()
                rows.step()
        told.append([number for number in loop.store.passed if number >= 0])
        assert {-1, *range(len(told) * 4)} >= set(loop.store.after)
    assert told[-1] == list(range(12))
    assert max(loop.store.after) > 8, "rows that the last loop itself has written"
    assert -1 in loop.store.after, "what is of no iteration stays so"
