"""Rows in a directory of one's own: a later process goes on with them, or is told why it can't."""

from __future__ import annotations

import shutil

import pytest
import torch

import bagpipe
from bagpipe.errors import ConfigError, ModelError, StoreError
from bagpipe.store.mapped import RESIDENT_BYTES_MAX
from harness.plain import (
    assert_same_bits,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    sgd,
    train_fast,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def adam():
    return bagpipe.optim.Adam(0.05)


def train(net, batches, rows, **options):
    """As a process of its own would: the store is closed at the end."""
    loop = bagpipe.accelerate(net, batches, rows, cache=60, **options)
    dense = sgd(net.parameters())
    with loop:
        for batch in loop:
            dense.zero_grad()
            loss_of(net, batch).backward()
            dense.step()
            rows.step()
    trained = {name: value.clone() for name, value in net.state_dict().items()}
    loop.store.close()
    return trained


def accelerate(directory, net=None, rows=None, **options):
    return bagpipe.accelerate(
        net or make_net(), make_batches(), rows or bagpipe.optim.SGD(0.1), cache=60, store=directory, **options
    )


@pytest.fixture
def directory(tmp_path):
    train(make_net(), make_batches(), bagpipe.optim.SGD(0.1), store=tmp_path / "rows")
    return tmp_path / "rows"


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_later_process_goes_on_with_the_rows_of_a_directory(tmp_path, device):
    batches = make_batches(12)
    expected = train_fast(make_net(device=device), batches, adam())
    first, rows = make_net(device=device), adam()
    train(first, batches[:5], rows, store=tmp_path / "rows")
    second, later = make_net(device=device), adam()
    second.top.load_state_dict(first.top.state_dict())
    later.load_state_dict(rows.state_dict())
    assert_same_bits(expected, train(second, batches[5:], later, store=tmp_path / "rows"))


def of_other_sizes():
    return {"net": make_net(dims=(4, 5))}


def of_another_optimizer():
    return {"rows": bagpipe.optim.Adagrad(0.1)}


def with_other_first_values():
    net = make_net()
    torch.nn.init.normal_(net.item.weight)
    return {"net": net}


def of_another_name():
    net = make_net()
    net.other, net.user = net.user, None
    return {"net": net, "features": {"user": "other", "item": "item"}}


@pytest.mark.parametrize("change", [of_other_sizes, of_another_optimizer, with_other_first_values, of_another_name])
def test_rows_of_another_model_are_refused_and_stay_as_they_are(directory, change):
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(StoreError, match="asked for: use the model, row optimizer and seed"):
        accelerate(directory, **change())
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    accelerate(directory).store.close()


def test_another_seed_of_layers_on_the_meta_device_is_refused(tmp_path):
    train(make_net(device="meta"), make_batches(), adam(), store=tmp_path / "rows", seed=1)
    with pytest.raises(StoreError, match="first values"):
        accelerate(tmp_path / "rows", make_net(device="meta"), adam(), seed=2)


def test_a_directory_that_was_not_closed_is_refused(tmp_path):
    net, rows = make_net(), bagpipe.optim.SGD(0.1)
    with accelerate(tmp_path / "rows", net, rows, policy="nocache", depth=1) as loop:
        for number, batch in enumerate(loop):
            loss_of(net, batch).backward()
            rows.step()
            loop.barrier()
            if number == 2:
                shutil.copytree(tmp_path / "rows", tmp_path / "copy")
    with pytest.raises(StoreError, match="copy was not closed"):
        accelerate(tmp_path / "copy")
    with pytest.raises(StoreError, match="in use by another store"):
        accelerate(tmp_path / "rows")
    loop.store.close()
    accelerate(tmp_path / "rows").store.close()


def test_what_is_no_store_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match="holds no store"):
        accelerate(tmp_path)
    with pytest.raises(StoreError, match=r"can't look into .*notes"):
        accelerate(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


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
