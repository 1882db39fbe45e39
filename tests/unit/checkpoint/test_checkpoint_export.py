"""Checkpoints and models to plain weights and parquet."""

from __future__ import annotations

import errno
import os

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bagpipe
from bagpipe.checkpoint import rows as row_files
from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.export import export_checkpoint, initial_of
from bagpipe.checkpoint.manifest import InitialEntry, RunFacts, TableEntry
from bagpipe.checkpoint.tree import tree_parts
from bagpipe.checkpointing import Checkpointing
from bagpipe.errors import CheckpointError, ConfigError, ModelError, StoreError
from bagpipe.initial import Constant, Normal, Uniform
from bagpipe.layout import RowLayout
from bagpipe.table import Table
from harness.plain import ROWS, loss_of, make_batches, make_net, sgd

LAYOUT = RowLayout(Table("item", 50), (4, 1), bagpipe.optim.Adagrad(0.1), Uniform(3, "item", 0.5))
ENTRY = TableEntry(
    name="item",
    rows=50,
    dims=(4, 1),
    width=LAYOUT.width,
    optimizer="adagrad",
    layers=("net.deep", "wide"),
    initial=(
        InitialEntry(kind="uniform", value=0.5, table="item", seed=3),
        InitialEntry(kind="uniform", value=0.5, table="item", seed=3, column=4),
    ),
)
DENSE = {
    "parameters": {"top.weight": torch.randn(3, 5), "halved": torch.ones(3, dtype=torch.bfloat16)},
    "buffers": {"mask": torch.tensor([True, False, True]), "count": torch.tensor(7)},
}


class Model(nn.Module):
    """What the weights are of."""

    def __init__(self):
        super().__init__()
        self.net = nn.Module()
        self.net.deep = nn.EmbeddingBag(50, 4)
        self.wide = nn.EmbeddingBag(50, 1)
        self.top = nn.Linear(5, 3, bias=False)
        self.halved = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("count", torch.tensor(0))


class Rows:
    def __init__(self, ids, values):
        self.ids, self.values = ids, values

    def iterate(self, table, rows_per_chunk):
        for start in range(0, len(self.ids), rows_per_chunk):
            stop = start + rows_per_chunk
            yield self.ids[start:stop], self.values[start:stop]


def saved(directory, ids, entry=ENTRY, dense=DENSE, dones=(5, 6)):
    """A chain of checkpoints of these rows; the rows that must come back."""
    checkpoints, random = Checkpoints(directory), np.random.default_rng(0)
    expected = np.empty((50, entry.width), np.float32)
    LAYOUT.initialise(np.arange(50), expected)
    ids = np.asarray(ids, np.int64)
    for done in dones:
        values = random.random((len(ids), entry.width), np.float32)
        if entry.rows is not None:
            expected[ids] = values
        with checkpoints.begin(done) as pending:
            tables = [(entry.name, entry.width)]
            rows = Rows(ids, values)
            pending.add(row_files.write_rows(checkpoints.disk, pending.directory, rows, tables))
            if dense is not None:
                pending.write_blob("trainer-0", *tree_parts(dense))
            checkpoint = pending.commit(RunFacts(tables=(entry,)))
        ids = ids[::2]
    return checkpoint, expected


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def changed(**changes):
    fields = {name: getattr(ENTRY, name) for name in ENTRY.__struct_fields__}
    return TableEntry(**{**fields, **changes})


def test_exported_weights_load_into_the_plain_model(tmp_path):
    checkpoint, expected = saved(tmp_path / "c", [7, 0, 49, 20])
    export_checkpoint(checkpoint, tmp_path / "model.safetensors")
    model = Model()
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(model.net.deep.weight, torch.from_numpy(expected[:, :4]))
    assert torch.equal(model.wide.weight, torch.from_numpy(expected[:, 4:5]))
    assert torch.equal(model.top.weight, DENSE["parameters"]["top.weight"])
    assert model.mask.tolist() == [True, False, True]
    assert (model.count.item(), model.halved.tolist()) == (7, [1, 1, 1])
    assert names(tmp_path) == ["c", "model.safetensors"]


def test_an_exported_checkpoint_equals_an_export_of_the_model(tmp_path):
    torch.manual_seed(2)
    model = make_net()
    model.user = nn.EmbeddingBag(30, 4, mode="sum", device="meta")
    model.item = nn.EmbeddingBag(20, 4, mode="sum", device="meta")
    latest = trained(tmp_path, model, bagpipe.optim.Adam(0.01), every=3)
    bagpipe.export(model, tmp_path / "expected.safetensors")
    assert latest.chain == [3, 4]
    export_checkpoint(latest, tmp_path / "found.safetensors")
    expected, found = load_file(tmp_path / "expected.safetensors"), load_file(tmp_path / "found.safetensors")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def trained(tmp_path, model, rows=None, every=100, batches=None, **options):
    """A model after some batches, and the checkpoint of its end."""
    checkpoint = Checkpointing(tmp_path / "c", every=every)
    model, optimizer, loader = bagpipe.prepare(
        model, sgd(model.parameters()), batches or make_batches(4), rows=rows or bagpipe.optim.Adagrad(0.1), cache=60,
        checkpoint=checkpoint, **options,
    )  # fmt: skip
    loader.register_for_checkpointing()
    for batch in loader:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return Checkpoints(tmp_path / "c").latest()


@pytest.mark.parametrize("state", [True, False])
def test_the_rows_of_a_model_are_those_of_its_checkpoint(tmp_path, state):
    model = make_net()
    checkpoint = trained(tmp_path, model)
    bagpipe.export(model, tmp_path / "model", format="parquet", state=state)
    files = export_checkpoint(checkpoint, tmp_path / "checkpoint", format="parquet", state=state)
    assert names(tmp_path / "model") == sorted(path.name for path in files) == ["item.parquet", "user.parquet"]
    for path in files:
        found, expected = (pq.read_table(tmp_path / "model" / path.name), pq.read_table(path))
        assert found.schema == expected.schema
        assert found.sort_by("id") == expected.sort_by("id")
    with pytest.raises(StoreError, match="is not empty"):
        bagpipe.export(model, tmp_path / "model", format="parquet")
    with pytest.raises(ConfigError, match="format is 'csv': give 'safetensors' or 'parquet'"):
        bagpipe.export(model, tmp_path / "other", format="csv")


def test_tables_of_any_id_are_exported_from_a_model_too(tmp_path):
    model = nn.ModuleDict({"word": nn.EmbeddingBag(2**58, 4, mode="sum", device="meta")})
    table, optimizer = bagpipe.Table("word", None), torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [{"word": torch.tensor([[2**60], [-5]])}]
    model, optimizer, loader = bagpipe.prepare(
        model, optimizer, batches, features=[table], options=bagpipe.Options(seed=3)
    )
    for batch in loader:
        model["word"](batch["word"]).sum().backward()
        optimizer.step()
    bagpipe.export(model, tmp_path / "rows", format="parquet")
    found = pq.read_table(tmp_path / "rows" / "word.parquet").sort_by("id")
    expected = np.empty((2, 4), np.float32)
    bagpipe.initial.Normal(3, "word").fill(np.array([-5, 2**60]), expected)
    assert found["id"].to_pylist() == [-5, 2**60]
    assert np.array_equal(np.array(found["word"].to_pylist(), np.float32), expected - np.float32(0.1))


class Shared(nn.Module):
    """Layers with two names, rows and buffers of odd sizes."""

    def __init__(self):
        super().__init__()
        self.user = self.again = nn.EmbeddingBag(31, 3, mode="sum", device="meta")
        self.item = nn.EmbeddingBag(20, 1, mode="sum", device="meta")
        self.top = self.head = nn.Linear(6, 1)
        for number, dtype in enumerate((torch.uint16, torch.uint32, torch.uint64, torch.float64, torch.bool)):
            self.register_buffer(f"b{number}", torch.arange(3).to(dtype))

    def forward(self, batch):
        vectors = [self.again(batch["user"]), self.item(batch["item"]), batch["dense"]]
        return self.top(torch.cat(vectors, 1)).squeeze(1)


def test_layers_with_two_names_and_unsigned_buffers_are_exported(tmp_path):
    model = Shared()
    checkpoint = trained(tmp_path, model)
    bagpipe.export(model, tmp_path / "model.safetensors")
    export_checkpoint(checkpoint, tmp_path / "checkpoint.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert sorted(found) == sorted(model.state_dict())
    for name, value in model.state_dict().items():
        assert found[name].dtype == value.dtype
        assert found[name].numpy().tobytes() == value.numpy().tobytes()
    same = load_file(tmp_path / "checkpoint.safetensors")
    assert found.keys() == same.keys()
    assert all(found[name].numpy().tobytes() == value.numpy().tobytes() for name, value in same.items())


def test_a_table_with_fewer_rows_than_its_layer_is_exported_as_large_as_the_layer(tmp_path):
    model = make_net()
    model.user = nn.EmbeddingBag(ROWS["user"], 4, mode="sum", device="meta")
    model.item = nn.EmbeddingBag(ROWS["item"], 4, mode="sum", device="meta")
    table = Table("user", ROWS["user"] - 7, ("user",))
    batches = make_batches(4, rows=ROWS | {"user": table.rows})
    checkpoint = trained(tmp_path, model, batches=batches, features=[table])
    assert [entry.rows for entry in checkpoint.manifest.tables if entry.name == "user"] == [table.rows]
    bagpipe.export(model, tmp_path / "model.safetensors")
    export_checkpoint(checkpoint, tmp_path / "checkpoint.safetensors")
    found, same = (load_file(tmp_path / f"{name}.safetensors") for name in ("model", "checkpoint"))
    assert found["user.weight"].shape == (ROWS["user"], 4)
    assert found.keys() == same.keys()
    assert all(torch.equal(found[name], same[name]) for name in found)


def test_a_sparse_buffer_is_refused_by_name(tmp_path):
    plain = nn.Linear(2, 2)
    plain.register_buffer("odd", torch.eye(2).to_sparse())
    with pytest.raises(ModelError, match=r"odd is torch.float32, torch.sparse_coo, which an export can't hold"):
        bagpipe.export(plain, tmp_path / "model.safetensors")
    assert names(tmp_path) == []


def test_rows_without_known_first_values_can_be_exported_if_all_were_trained(tmp_path):
    checkpoint, expected = saved(tmp_path / "all", range(50), changed(initial=None), dense=None)
    export_checkpoint(checkpoint, tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert sorted(found) == ["net.deep.weight", "wide.weight"]
    assert np.array_equal(found["wide.weight"].numpy(), expected[:, 4:5])
    checkpoint, _ = saved(tmp_path / "some", range(49), changed(initial=None))
    with pytest.raises(CheckpointError, match=r"1 rows of table 'item' were never trained, and .* can't tell"):
        export_checkpoint(checkpoint, tmp_path / "other.safetensors")
    assert names(tmp_path) == ["all", "model.safetensors", "some"]


@pytest.mark.parametrize(
    ("entry", "dense", "message"),
    [
        (changed(rows=None), DENSE, "has a row for any 64-bit id"),
        (changed(layers=()), DENSE, "does not say which layers table 'item' belongs to"),
        (ENTRY, [1], "has no parameters where they should be"),
        (ENTRY, {"parameters": {"a": 1}}, "has no parameters where"),
        (changed(initial=(ENTRY.initial[0], InitialEntry(kind="new", value=1))), DENSE, "of the kind 'new'"),
    ],
)
def test_what_has_no_plain_weights_is_refused(tmp_path, entry, dense, message):
    checkpoint, _ = saved(tmp_path / "c", [1], entry, dense)
    with pytest.raises(CheckpointError, match=message):
        export_checkpoint(checkpoint, tmp_path / "m.safetensors")
    assert names(tmp_path) == ["c"]


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    checkpoint, _ = saved(tmp_path / "c", [1])

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CheckpointError, match=r"can't write .*m.safetensors: No space left"):
        export_checkpoint(checkpoint, tmp_path / "m.safetensors")
    assert names(tmp_path) == ["c"]


def test_first_values_are_those_of_the_layout():
    ids = np.arange(20)
    for entry, initial in (
        (InitialEntry(kind="uniform", value=0.3, table="a", seed=-2, column=3), Uniform(-2, "a", 0.3, column=3)),
        (InitialEntry(kind="normal", value=0.3, table="a", seed=2**63), Normal(2**63, "a", 0.3)),
        (InitialEntry(kind="constant", value=0.25), Constant(0.25)),
    ):
        found, expected = np.empty((2, 20, 3), np.float32)
        initial_of(entry).fill(ids, found)
        initial.fill(ids, expected)
        assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("state", [True, False])
def test_parquet_has_the_rows_that_were_trained(tmp_path, state, monkeypatch):
    monkeypatch.setattr(row_files, "FILE_BYTES", 600)
    monkeypatch.setattr(row_files, "CHUNK_BYTES", 200)
    checkpoint, expected = saved(tmp_path / "c", range(1, 40, 2))
    (path,) = export_checkpoint(checkpoint, tmp_path / "out", format="parquet", state=state)
    assert path == tmp_path / "out" / "item.parquet"
    found = pq.read_table(path)
    assert found.column_names == ["id", "net.deep", "wide"] + ["state"] * state
    ids = found["id"].to_numpy()
    assert sorted(ids.tolist()) == list(range(1, 40, 2))
    assert np.array_equal(np.array(found["net.deep"].to_pylist(), np.float32), expected[ids, :4])
    assert np.array_equal(np.array(found["wide"].to_pylist(), np.float32), expected[ids, 4:5])
    if state:
        assert np.array_equal(np.array(found["state"].to_pylist(), np.float32), expected[ids, 5:])
    assert pq.ParquetFile(path).num_row_groups > 1
    with pytest.raises(CheckpointError, match="is not empty"):
        export_checkpoint(checkpoint, tmp_path / "out", format="parquet")


def test_an_export_of_a_damaged_checkpoint_leaves_nothing(tmp_path):
    checkpoint, _ = saved(tmp_path / "c", range(9))
    for path in checkpoint.directory.glob("rows*"):
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError):
        export_checkpoint(checkpoint, tmp_path / "out", format="parquet")
    assert not (tmp_path / "out").exists()


def test_parquet_takes_any_name_and_any_id(tmp_path):
    entry = changed(name="../wörd/é", rows=None, layers=("id", "state"))
    checkpoint, _ = saved(tmp_path / "c", [-(2**63), 2**63 - 1], entry)
    (path,) = export_checkpoint(checkpoint, tmp_path / "a" / "b", format="parquet")
    assert path == tmp_path / "a" / "b" / "table-0.parquet"
    found = pq.read_table(path)
    assert sorted(found["id"].to_pylist()) == [-(2**63), 2**63 - 1]
    assert found.column_names == ["id", "vector_0", "vector_1", "state"]


def test_a_failed_export_leaves_no_directory_that_it_has_made(tmp_path, monkeypatch):
    checkpoint, _ = saved(tmp_path / "c", [1, 2])
    monkeypatch.setattr("bagpipe.checkpoint.export._write_table", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(CheckpointError, match="No space left"):
        export_checkpoint(checkpoint, tmp_path / "a" / "b" / "rows", format="parquet")
    assert not (tmp_path / "a").exists()
