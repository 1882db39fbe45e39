"""Rows of others as a checkpoint that a run can begin with: parquet, safetensors, TorchRec's names."""

from __future__ import annotations

import json
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import save_file

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.export import export_checkpoint
from bagpipe.checkpoint.importing import import_rows
from bagpipe.cli import main
from bagpipe.errors import CheckpointError
from bagpipe.optim import SGD, Adagrad, Adam
from bagpipe.training import train, train_configured, train_reference
from harness.daily import day_job, state_of, trained_reference, write_days

VECTORS = np.arange(12, dtype=np.float32).reshape(4, 3) / 7


def quiet(*_):
    """Reports nothing."""


def parquet(path, ids=(5, 0, 9, 2), vectors=VECTORS, kind=None, **more):
    """A file of a table with one vector a row."""
    kind = kind or pa.list_(pa.float32(), vectors.shape[1])
    columns = {"id": pa.array(ids), "vector": pa.array(list(vectors), kind)} | more
    pq.write_table(pa.table({name: column for name, column in columns.items() if column is not None}), path)
    return path


def rows_of(checkpoint, table):
    """All rows of a table by id."""
    return {int(row): value for ids, values in checkpoint.rows(table) for row, value in zip(ids, values, strict=True)}


def assert_rows(found, expected):
    assert {row: value.tobytes() for row, value in found.items()} == {
        row: np.asarray(value, np.float32).tobytes() for row, value in expected.items()
    }


def test_rows_come_back_with_the_first_state_of_their_optimizer(tmp_path):
    path = parquet(tmp_path / "ad.parquet")
    optimizer = Adagrad(0.1, initial_accumulator_value=0.5)
    checkpoint, _, left_out = import_rows([path], tmp_path / "new", optimizer=optimizer)
    checkpoint.verify()
    (table,) = checkpoint.manifest.tables
    assert (table.name, table.rows, table.dims, table.width, table.optimizer) == ("ad", 10, (3,), 6, "adagrad")
    assert (checkpoint.done, checkpoint.blobs(), left_out) == (0, [], [])
    expected = {row: [*vector, 0.5, 0.5, 0.5] for row, vector in zip((5, 0, 9, 2), VECTORS, strict=True)}
    assert_rows(rows_of(checkpoint, "ad"), expected)


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.large_list(pa.float32()), pa.list_(pa.float16(), 3)])
def test_lists_of_every_kind_are_read(tmp_path, kind):
    vectors = VECTORS.astype(np.float16) if kind.value_type == pa.float16() else VECTORS
    path = parquet(tmp_path / "ad.parquet", vectors=vectors, kind=kind)
    checkpoint = import_rows([path], tmp_path / "new", optimizer=SGD(0.1))[0]
    assert_rows(rows_of(checkpoint, "ad"), dict(zip((5, 0, 9, 2), vectors, strict=True)))


def test_a_state_in_the_file_is_kept_and_numbers_that_are_none_too(tmp_path):
    state = np.array([[1, 2, 3], [4, np.nan, 6], [7, 8, np.inf], [0, -0.0, 1]], np.float32)
    path = parquet(tmp_path / "x.parquet", state=pa.array(list(state), pa.list_(pa.float32(), 3)))
    checkpoint = import_rows([f"ad={path}"], tmp_path / "new", optimizer=Adagrad(0.1))[0]
    expected = {row: np.append(VECTORS[n], state[n]) for n, row in enumerate((5, 0, 9, 2))}
    assert_rows(rows_of(checkpoint, "ad"), expected)


def test_rows_with_numbers_that_are_none_are_counted_and_told(tmp_path, monkeypatch, capsys):
    vectors = VECTORS.copy()
    vectors[1, 2], vectors[3, 0], vectors[3, 1] = np.nan, np.inf, -np.inf
    parquet(tmp_path / "ad.parquet", vectors=vectors)
    parquet(tmp_path / "user.parquet")
    sources = [str(tmp_path / name) for name in ("ad.parquet", "user.parquet")]
    tables = import_rows(sources, tmp_path / "new", optimizer=SGD(0.1))[1]
    assert [table.rows_not_finite for table in tables] == [2, 0]
    monkeypatch.setattr(sys, "argv", ["bagpipe", "checkpoint", "import", *sources, str(tmp_path / "again")])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().err
    assert "table 'ad': 2 rows have NaN or infinite numbers" in said.replace("\n", " ")
    assert "table 'user'" not in said


def test_the_files_of_a_directory_are_tables_or_parts_of_one(tmp_path):
    parts = tmp_path / "parts"
    parts.mkdir()
    parquet(parts / "a.parquet")
    parquet(parts / "b.parquet", ids=(1, 3, 4, 6), vectors=-VECTORS)
    separate = import_rows([str(parts)], tmp_path / "separate", optimizer=SGD(0.1))[0]
    assert [table.name for table in separate.manifest.tables] == ["a", "b"]
    joined = import_rows([f"ad={parts}"], tmp_path / "joined", optimizer=SGD(0.1))[0]
    assert [table.name for table in joined.manifest.tables] == ["ad"]
    assert_rows(rows_of(joined, "ad"), rows_of(separate, "a") | rows_of(separate, "b"))


def test_every_table_of_an_export_comes_back_under_its_own_name(tmp_path):
    names = ["table-1", "x y", "a/b", "table-0", "plain"]
    for number in range(len(names)):
        parquet(tmp_path / f"{number}.parquet", vectors=VECTORS + number)
    sources = [f"{name}={tmp_path / f'{number}.parquet'}" for number, name in enumerate(names)]
    first = import_rows(sources, tmp_path / "first", optimizer=SGD(0.1))[0]
    files = export_checkpoint(first, tmp_path / "rows", format="parquet")
    assert len(set(files)) == len(names)
    assert {"table-0.parquet", "table-1.parquet", "plain.parquet"} < {path.name for path in files}
    again = import_rows([str(tmp_path / "rows")], tmp_path / "again", optimizer=SGD(0.1))[0]
    assert {table.name for table in again.manifest.tables} == set(names)
    for name in names:
        assert_rows(rows_of(again, name), rows_of(first, name))


def test_columns_of_one_name_are_refused(tmp_path):
    ids, vectors = pa.array([1, 2]), pa.array([[1.0], [2.0]], pa.list_(pa.float32(), 1))
    pq.write_table(pa.Table.from_arrays([ids, vectors, vectors], ["id", "v", "v"]), tmp_path / "t.parquet")
    with pytest.raises(CheckpointError, match="more than one column 'v'"):
        import_rows([tmp_path / "t.parquet"], tmp_path / "new", optimizer=SGD(0.1))
    assert not (tmp_path / "new").exists()


def test_weights_of_torchrec_are_tables_and_row_numbers_are_ids(tmp_path):
    prefix = "sparse_arch.embedding_bag_collection.embedding_bags"
    weights = {
        f"{prefix}.t_cat_0.weight": torch.from_numpy(VECTORS),
        "ec.embeddings.t_cat_1.weight": torch.from_numpy(VECTORS[:2]).to(torch.bfloat16),
        "over_arch.model.0.weight": torch.zeros(2, 2),
        "listed.ids": torch.tensor([7, 3]),
        "listed.vectors": torch.from_numpy(VECTORS[:2]),
    }
    save_file({name: value.contiguous() for name, value in weights.items()}, tmp_path / "model.safetensors")
    checkpoint, _, left_out = import_rows([tmp_path / "model.safetensors"], tmp_path / "new", optimizer=SGD(0.1))
    tables = {table.name: table for table in checkpoint.manifest.tables}
    assert {name: table.rows for name, table in tables.items()} == {"t_cat_0": 4, "t_cat_1": 2, "listed": 8}
    assert tables["t_cat_0"].layers == (f"{prefix}.t_cat_0",)
    assert left_out == ["over_arch.model.0.weight"]
    assert_rows(rows_of(checkpoint, "t_cat_0"), dict(enumerate(VECTORS)))
    assert_rows(
        rows_of(checkpoint, "t_cat_1"), dict(enumerate(weights["ec.embeddings.t_cat_1.weight"].float().numpy()))
    )
    assert_rows(rows_of(checkpoint, "listed"), {7: VECTORS[0], 3: VECTORS[1]})


def test_rows_are_read_some_at_a_time(tmp_path, monkeypatch):
    ids = np.random.default_rng(0).permutation(5000)
    vectors = np.random.default_rng(1).random((5000, 3), np.float32)
    path = tmp_path / "ad.parquet"
    table = pa.table({"id": ids, "vector": pa.array(list(vectors), pa.list_(pa.float32(), 3))})
    pq.write_table(table, path, row_group_size=700)
    monkeypatch.setattr("bagpipe.checkpoint.rows.CHUNK_BYTES", 5_000)
    monkeypatch.setattr("bagpipe.checkpoint.rows.FILE_BYTES", 20_000)
    checkpoint = import_rows([path], tmp_path / "new", optimizer=SGD(0.1))[0]
    assert len(checkpoint.manifest.files) > 3
    assert_rows(rows_of(checkpoint, "ad"), dict(zip(ids.tolist(), vectors, strict=True)))


def _not_parquet(path):
    (path / "ad.parquet").write_bytes(b"PAR1 nothing")


def _cut_off(path):
    save_file({"e.embeddings.ad.weight": torch.zeros(4, 4)}, path / "ad.safetensors")
    (path / "ad.safetensors").write_bytes((path / "ad.safetensors").read_bytes()[:-8])


def _lists(*lengths):
    return pa.array([[0.5] * length for length in lengths], pa.list_(pa.float32()))


BAD = {
    r"columns key, vector and no 'id'": lambda path: pq.write_table(
        pa.table({"key": [1], "vector": _lists(3)}), path / "ad.parquet"
    ),
    r"column 'id' is string": lambda path: parquet(path / "ad.parquet", ids=list("abcd")),
    r"'id' has missing values": lambda path: parquet(path / "ad.parquet", ids=(1, None, 2, 3)),
    r"had before \(9\): give each row once": lambda path: parquet(path / "ad.parquet", ids=(9, 0, 9, 2)),
    r"has id -3: ids are at least 0.*--any-id ad": lambda path: parquet(path / "ad.parquet", ids=(5, -3, 9, 2)),
    r"column 'vector' has vectors of 2 and of 3": lambda path: parquet(path / "ad.parquet", vector=_lists(3, 3, 2, 3)),
    r"column 'vector' has missing values": lambda path: parquet(
        path / "ad.parquet", vector=pa.array([[1.0], None, [2.0], [3.0]], pa.list_(pa.float32()))
    ),
    r"column 'vector' is list<.*double>": lambda path: parquet(path / "ad.parquet", kind=pa.list_(pa.float64())),
    r"column 'name' is string": lambda path: parquet(path / "ad.parquet", name=pa.array(list("abcd"))),
    r"no column beside 'id'": lambda path: parquet(path / "ad.parquet", vector=None),
    r"has 2 floats of state a row, and the optimizer 'sgd' keeps 0": lambda path: parquet(
        path / "ad.parquet", state=_lists(2, 2, 2, 2)
    ),
    r"ad.parquet can't be read": _not_parquet,
    r"ad.safetensors can't be read": _cut_off,
    r"'ad.ids' is I64 of shape \[3\]": lambda path: save_file(
        {"ad.ids": torch.arange(3), "ad.vectors": torch.zeros(4, 2)}, path / "ad.safetensors"
    ),
    r"weight' is I64 of shape": lambda path: save_file(
        {"embeddings.ad.weight": torch.zeros(4, 2, dtype=torch.int64)}, path / "ad.safetensors"
    ),
    r"no rows of a table": lambda path: save_file({"top.weight": torch.zeros(4, 2)}, path / "ad.safetensors"),
    r"has table 'ad' twice": lambda path: save_file(
        {"a.embeddings.ad.weight": torch.zeros(4, 2), "b.embeddings.ad.weight": torch.zeros(4, 2)},
        path / "ad.safetensors",
    ),
    r"table 'ad' is given twice": lambda path: (
        parquet(path / "ad.parquet"),
        save_file({"e.embeddings.ad.weight": torch.zeros(4, 2)}, path / "ad.safetensors"),
    ),
    r"has no files that end with .parquet or .safetensors": lambda path: (path / "ad.csv").write_text("id\n"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_with_a_file_is_said_and_nothing_is_left(tmp_path, what):
    source = tmp_path / "source"
    source.mkdir()
    BAD[what](source)
    with pytest.raises(CheckpointError, match=what):
        import_rows([str(source)], tmp_path / "a" / "new", optimizer=SGD(0.1))
    assert not (tmp_path / "a").exists()


def test_other_sources_are_refused(tmp_path):
    path = parquet(tmp_path / "ad.parquet")
    (tmp_path / "weights.pt").write_bytes(b"")
    for sources, what in (
        ([tmp_path / "weights.pt"], "ends with '.pt': give files that end with .parquet or .safetensors"),
        ([tmp_path / "gone.parquet"], "there is no file"),
        ([path, f"ad={path}"], "table 'ad' is given twice"),
    ):
        with pytest.raises(CheckpointError, match=what):
            import_rows(sources, tmp_path / "new", optimizer=SGD(0.1))
    with pytest.raises(CheckpointError, match="there is no table 'user' to be renamed: there are ad"):
        import_rows([path], tmp_path / "new", optimizer=SGD(0.1), renamed={"user": "u"})
    with pytest.raises(CheckpointError, match="there is no table 'user' in what is imported: there are ad"):
        import_rows([path], tmp_path / "new", optimizer=SGD(0.1), any_ids=["user"])
    assert not (tmp_path / "new").exists()


def test_a_directory_with_checkpoints_is_left_as_it_is(tmp_path):
    path = parquet(tmp_path / "ad.parquet")
    import_rows([path], tmp_path / "new", optimizer=SGD(0.1))
    before = Checkpoints(tmp_path / "new").open(0).checksum
    with pytest.raises(CheckpointError, match="holds checkpoints already: give a new directory"):
        import_rows([f"other={path}"], tmp_path / "new", optimizer=SGD(0.1))
    assert Checkpoints(tmp_path / "new").open(0).checksum == before


@pytest.fixture(scope="module")
def first_day(tmp_path_factory):
    path = tmp_path_factory.mktemp("days")
    write_days(path, samples=120)
    train(day_job(path, path / "run", 1, checkpoint={"every": 100}), quiet)
    return path


@pytest.mark.parametrize("servers", [0, 2])
def test_an_export_comes_back_and_is_trained_on(first_day, tmp_path, servers):
    saved = Checkpoints(first_day / "run" / "checkpoints").latest()
    exported = export_checkpoint(saved, tmp_path / "rows", format="parquet")
    tables = [table.name for table in saved.manifest.tables]
    assert [path.stem for path in sorted(exported)] != tables, "the order of files is another"
    made = import_rows([str(tmp_path / "rows")], tmp_path / "new", optimizer=Adam(), any_ids=["device"])[0]
    for name in tables:
        assert_rows(rows_of(made, name), rows_of(saved, name))

    job = day_job(first_day, tmp_path / "run", 2, init_from=str(tmp_path / "new"), servers=servers)
    found, _ = train_configured(job, quiet, hold=True)
    before = trained_reference(day_job(first_day, tmp_path / "plain", 1))
    fresh = trained_reference(job, _only_rows(before, job))
    assert state_of(fresh).differing(found) == [], "rows are those of the first day, and all else begins"
    assert train_reference(job, quiet)[0].differing(found) == []


def _only_rows(before, job):
    """A reference that has the rows of another one, and has trained nothing."""
    model, binding, layouts = job.model()
    fresh = type(before)(model, binding, layouts, lambda dense: torch.optim.Adam(dense, lr=0.01))
    for rows, earlier in zip(fresh.tables, before.tables, strict=True):
        rows.written = dict(earlier.written)
    return fresh


def test_the_command_names_optimizers_and_what_it_left_out(tmp_path, monkeypatch, capsys):
    parquet(tmp_path / "ad.parquet")
    tensors = {"e.embeddings.user.weight": torch.zeros(4, 2), "top.weight": torch.ones(2, 2)}
    save_file(tensors, tmp_path / "user.safetensors")
    words = [
        "bagpipe", "checkpoint", "import", str(tmp_path / "ad.parquet"), str(tmp_path / "user.safetensors"),
        str(tmp_path / "new"), "--optimizer", "adagrad", "--optimizer", "user=adam",
        "--initial-accumulator-value", "0.25", "--json",
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert not ended.value.code
    said = json.loads(out)
    assert said["left_out"] == ["top.weight"]
    assert [(row["table"], row["rows"], row["optimizer"]) for row in said["tables"]] == [
        ("ad", 4, "adagrad"),
        ("user", 4, "adam"),
    ]
    made = Checkpoints(tmp_path / "new").open(0)
    assert rows_of(made, "ad")[5][3:].tolist() == [0.25] * 3
    assert rows_of(made, "user")[0].tolist() == [0.0] * 6
