"""An export is a complete file of plain weights, or nothing."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bagpipe
from bagpipe import Table
from bagpipe.errors import ModelError, StoreError
from harness import seams
from harness.flat import prepare
from harness.plain import (
    assert_close,
    assert_same_bits,
    loss_of,
    make_batches,
    make_net,
    nothing_left,  # noqa: F401
    sgd,
    train_fast,
)

pytestmark = pytest.mark.usefixtures("nothing_left")


def files(directory):
    return sorted(path.name for path in directory.iterdir())


class Everything(nn.Module):
    """A model with all that a state_dict may hold."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = make_net()
        self.norm = nn.BatchNorm1d(3)
        self.halved = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.tied = self.net.top[0]
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).T)
        self.register_buffer("nothing", torch.zeros(0, 4))

    def forward(self, batch):
        return self.net(batch) * self.scalar


def test_an_exported_file_loads_into_the_plain_model(tmp_path):
    model = Everything()
    found = train_fast(model, make_batches())
    bagpipe.export(model, tmp_path / "model.safetensors")
    plain = Everything()
    state = load_file(tmp_path / "model.safetensors")
    plain.load_state_dict(state, strict=True)
    assert sorted(state) == sorted(found)
    for name, value in plain.state_dict().items():
        assert torch.equal(value, found[name]), name
    with torch.no_grad():
        for batch in make_batches():
            torch.testing.assert_close(plain(batch), model(batch))
    assert files(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64], ids=str)
def test_unsigned_buffers_are_exported_and_loaded_back_equal(tmp_path, dtype):
    highest = np.iinfo(str(dtype).removeprefix("torch.")).max
    values = np.array([0, 1, highest // 2 + 1, highest - 1, highest], str(dtype).removeprefix("torch."))
    net = make_net()
    net.register_buffer("odd", torch.tensor([True, False, True]))
    net.register_buffer("many", torch.from_numpy(values))
    net.register_buffer("one", torch.from_numpy(values[-1:]).reshape(()))
    net.register_buffer("square", torch.from_numpy(np.resize(values, (4, 3))).T)
    train_fast(net, make_batches(2))
    bagpipe.export(net, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert found["many"].dtype == dtype
    for name, value in net.state_dict().items():
        assert np.array_equal(found[name].numpy(), value.numpy()), name


def test_an_export_in_the_middle_of_training_has_every_update_so_far(tmp_path):
    net = make_net()
    rows = bagpipe.optim.Adagrad(0.1)
    net, optimizer, loader = prepare(net, sgd(net.parameters()), make_batches(), rows, cache=60, check=True)
    for number, batch in enumerate(loader):
        optimizer.zero_grad()
        loss_of(net, batch).backward()
        optimizer.step()
        if number == 4:
            bagpipe.export(net, tmp_path / "model.safetensors")
    expected = train_fast(make_net(), make_batches()[:5], bagpipe.optim.Adagrad(0.1))
    found = load_file(tmp_path / "model.safetensors")
    assert_same_bits(expected, {name: found[name] for name in expected})
    whole = train_fast(make_net(), make_batches(), bagpipe.optim.Adagrad(0.1))
    assert_same_bits(whole, net.state_dict())


def test_an_existing_file_stays_until_the_new_one_is_complete(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    net = make_net()
    net, optimizer, loader = prepare(net, sgd(net.parameters()), make_batches(2), cache=60)

    def train():
        for batch in loader:
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()

    train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    bagpipe.export(net, path)
    train()
    blocks = getattr(*seams.EXPORTED_BLOCKS)
    failures = {OSError(28, "No space left on device"): StoreError, KeyboardInterrupt(): KeyboardInterrupt}
    for error, raised in failures.items():

        def failing(layer, error=error):
            yield from blocks(layer)
            raise error

        monkeypatch.setattr(*seams.EXPORTED_BLOCKS, failing)
        with pytest.raises(raised):
            bagpipe.export(net, path)
        assert files(tmp_path) == ["model.safetensors"]
        assert_close(before, {name: load_file(path)[name] for name in before})
    monkeypatch.setattr(*seams.EXPORTED_BLOCKS, blocks)
    bagpipe.export(net, path)
    assert_close(net.state_dict(), {name: load_file(path)[name] for name in before})
    assert files(tmp_path) == ["model.safetensors"]


def test_a_path_that_can_not_be_written_is_named(tmp_path):
    net = make_net()
    train_fast(net, make_batches(2))
    with pytest.raises(StoreError, match=r"can't write .*missing/model\.safetensors: No such file"):
        bagpipe.export(net, tmp_path / "missing" / "model.safetensors")


def test_the_file_of_someone_elses_export_is_left_alone(tmp_path):
    net = make_net()
    train_fast(net, make_batches(2))
    other = tmp_path / ".model.safetensors.partial"
    other.write_text("theirs")
    bagpipe.export(net, tmp_path / "model.safetensors")
    assert other.read_text() == "theirs"


def test_tables_are_written_block_by_block(tmp_path, monkeypatch):
    """A table of 51 MB is exported in blocks of 64 KB."""
    monkeypatch.setattr(*seams.EXPORTED_BLOCK_ROWS, 1024)
    model = nn.Sequential(nn.EmbeddingBag(800_000, 16, mode="sum", device="meta"))
    prepare(model, sgd(model.parameters()), [torch.tensor([[1], [2]])], seed=4)
    tracemalloc.start()
    bagpipe.export(model, tmp_path / "model.safetensors")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4_000_000
    weight = load_file(tmp_path / "model.safetensors")["0.weight"]
    expected = np.empty((800_000, 16), np.float32)
    bagpipe.initial.Normal(4, "0").fill(np.arange(800_000), expected)
    assert weight.shape == (800_000, 16)
    assert weight.numpy().tobytes() == expected.tobytes()


def test_what_has_no_plain_weight_is_refused_by_name(tmp_path):
    model = nn.ModuleDict({"word": nn.EmbeddingBag(2**58, 4, mode="sum", device="meta")})
    _, _, loader = bagpipe.prepare(
        model, sgd(model.parameters()), [{"word": torch.tensor([[2**60]])}], features=[Table("word", None)]
    )
    with pytest.raises(ModelError, match=r"word\.weight has a row for any 64-bit id"):
        bagpipe.export(model, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"'word' has .* GB of weights"):
        model.state_dict()
    loader.close()
    for name, value in (("complex", torch.ones(2, dtype=torch.complex64)), ("empty", torch.empty(2, device="meta"))):
        plain = nn.Linear(2, 2)
        plain.register_buffer(name, value)
        with pytest.raises(ModelError, match=name):
            bagpipe.export(plain, tmp_path / "model.safetensors")
    assert files(tmp_path) == []
