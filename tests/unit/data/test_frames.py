"""Frames of pandas, polars and pyarrow give the same batches, encode new frames alike, and refuse what can't be ids."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from bagpipe.data import Dataset, IndexedDataset, Shards, from_frame, write
from bagpipe.errors import ConfigError, DataError, ValueRangeError
from bagpipe.models import build_model
from bagpipe.state import of_store
from bagpipe.types import Batch, Ids, Table
from harness.examples import examples
from harness.flat import prepare
from harness.world import OPTIMIZERS, assert_identical, dense_sgd, initial

VALUES = {
    "clicked": [1, 0, 1, 1, 0, 1, 0],
    "age": [31.5, None, 4.0, 5.5, 60.0, 1.25, 2.0],
    "visits": [1, 2, 3, 4, 5, 6, 7],
    "user": [7, -(2**63), 2**63 - 1, 7, 0, 7, 2**53 + 1],
    "city": ["Oslo", "Rome", None, "Oslo", "", "Łódź", "Rome"],
    "tags": [["a", "b"], [], None, ["b", "c", "a"], ["z"], [], ["a"]],
    "seen": [[3, 4], [], [5], [3], [4, 4], [9], []],
    "bought": [3, 9, 9, 5, 6, 4, 3],
}
SCHEMA = pa.schema(
    [
        *(("clicked", pa.int8()), ("age", pa.float64()), ("visits", pa.int32()), ("user", pa.int64())),
        *(("city", pa.string()), ("tags", pa.list_(pa.string())), ("seen", pa.list_(pa.int32()))),
        ("bought", pa.int16()),
    ]
)
COLUMNS = {
    "label": "clicked",
    "numeric": ("age", "visits"),
    "categorical": ("user", "city", "tags"),
    "tables": {"item": ("seen", "bought")},
}


def arrow(values=VALUES):
    return pa.table(values, schema=SCHEMA)


def pandas(values=VALUES):
    return pd.DataFrame(values).astype({"clicked": "int8", "visits": "int32", "bought": "int16"})


def chunked(values=VALUES):
    table = arrow(values)
    return pa.concat_tables([table.slice(0, 2), table.slice(2, 0), table.slice(2, 4), table.slice(6)])


class Stream:
    """Nothing but Arrow's C stream."""

    def __init__(self, table):
        self._table = table

    def __arrow_c_stream__(self, requested_schema=None):
        return self._table.__arrow_c_stream__(requested_schema)


FRAMES = {
    "arrow": arrow,
    "chunks": chunked,
    "batch": lambda values=VALUES: arrow(values).combine_chunks().to_batches()[0],
    "pandas": pandas,
    "pandas categories": lambda values=VALUES: pandas(values).astype({"city": "category"}),
    "pandas arrow": lambda values=VALUES: arrow(values).to_pandas(types_mapper=pd.ArrowDtype),
    "polars": lambda values=VALUES: pl.from_arrow(arrow(values)),
    "polars chunks": lambda values=VALUES: pl.concat(
        [pl.from_arrow(arrow(values))[:3], pl.from_arrow(arrow(values))[3:]]
    ),
    "polars categories": lambda values=VALUES: pl.from_arrow(arrow(values)).with_columns(
        pl.col("city").cast(pl.Categorical)
    ),
    "stream": lambda values=VALUES: Stream(arrow(values)),
    "polars stream": lambda values=VALUES: Stream(pl.from_arrow(arrow(values))),
}


def flat(batch):
    sparse = {
        name: (ids.values.tolist(), None if ids.offsets is None else ids.offsets.tolist())
        for name, ids in batch.sparse.items()
    }
    return batch.number, batch.dense.tolist(), sparse, batch.labels.tolist()


def read(data, *arguments, **options):
    return [flat(batch) for batch in data.batches(*arguments, **options)]


@pytest.fixture(params=FRAMES)
def frame(request):
    return FRAMES[request.param]()


def test_every_kind_of_frame_gives_the_same_samples(frame):
    data = from_frame(frame, **COLUMNS)
    assert isinstance(data, Dataset)
    assert isinstance(data, IndexedDataset)
    assert (data.num_samples, data.num_dense) == (7, 2)
    assert data.tables == (
        *(Table("user", None), Table("city", 6), Table("tags", 6)),
        Table("item", None, ("seen", "bought")),
    )
    assert {name: texts.to_pylist() for name, texts in data.vocabulary.items()} == {
        "city": ["Oslo", "Rome", "", "Łódź"],
        "tags": ["a", "b", "c", "z"],
    }
    ((_, dense, sparse, labels),) = read(data, 10)
    assert labels == VALUES["clicked"]
    assert dense == [[31.5, 1], [0, 2], [4, 3], [5.5, 4], [60, 5], [1.25, 6], [2, 7]]
    assert list(sparse) == ["user", "city", "tags", "seen", "bought"]
    assert sparse["user"] == ([[value] for value in VALUES["user"]], None)
    assert sparse["city"] == ([[2], [3], [0], [2], [4], [5], [3]], None)
    assert sparse["tags"] == ([2, 3, 3, 4, 2, 5, 2], [0, 2, 2, 2, 5, 6, 6])
    assert sparse["seen"] == ([3, 4, 5, 3, 4, 4, 9], [0, 2, 2, 3, 4, 6, 7])
    assert sparse["bought"] == ([[value] for value in VALUES["bought"]], None)


def test_batches_come_in_any_order_from_any_place_and_in_parts(frame):
    data, other = from_frame(frame, **COLUMNS), from_frame(arrow(), **COLUMNS)
    whole = read(data, 3, epochs=2, seed=5)
    assert whole == read(other, 3, epochs=2, seed=5, workers=2)
    assert read(data, 3, epochs=2, seed=5, start=4) == whole[4:]
    assert sorted(label for _, _, _, labels in whole for label in labels) == sorted(2 * VALUES["clicked"])
    assert read(data.part(2, 6), 4)[0][2]["tags"] == ([3, 4, 2, 5], [0, 0, 3, 4])


def test_a_frame_can_be_written_as_shards(frame, tmp_path):
    data = from_frame(frame, **COLUMNS)
    write(data, tmp_path / "shards")
    assert read(Shards(tmp_path / "shards"), 3) == read(data, 3)


def test_a_new_frame_is_encoded_as_the_first_one(frame):
    first = from_frame(frame, **COLUMNS)
    values = {name: list(each) for name, each in VALUES.items()}
    values["city"] = ["Łódź", "Paris", None, "Rome", "Oslo", "", "oslo"]
    values["tags"] = [["new", "c"], None, [], ["b", None], ["z"], ["a"], []]
    for make in FRAMES.values():
        for vocabulary in (
            first.vocabulary,
            json.loads(json.dumps({n: v.to_pylist() for n, v in first.vocabulary.items()})),
        ):
            data = from_frame(make(values), **COLUMNS, vocabulary=vocabulary)
            ((_, _, sparse, _),) = read(data, 10)
            assert sparse["city"][0] == [[5], [1], [0], [3], [2], [4], [1]]
            assert sparse["tags"][0] == [1, 4, 3, 0, 5, 2]
            assert data.tables == first.tables
            assert {n: v.to_pylist() for n, v in data.vocabulary.items()} == {
                n: v.to_pylist() for n, v in first.vocabulary.items()
            }


def test_columns_that_share_a_table_share_its_vocabulary():
    values = {"y": [0, 1], "was": ["b", "a"], "now": ["c", "b"], "list": [["d", "c"], ["a"]]}
    data = from_frame(pl.DataFrame(values), label="y", categorical=("was",), tables={"page": ("was", "now", "list")})
    assert data.tables == (Table("page", 6, ("was", "now", "list")),)
    assert data.vocabulary["page"].to_pylist() == ["b", "a", "c", "d"]
    ((_, _, sparse, _),) = read(data, 2)
    assert {name: ids for name, (ids, _) in sparse.items()} == {
        "was": [[2], [3]],
        "now": [[4], [2]],
        "list": [5, 4, 3],
    }


def test_integers_and_texts_of_all_types_are_taken():
    kinds = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
    columns = {str(kind): pa.array([1, 0, 5], kind) for kind in kinds} | {"bool": pa.array([True, False, True])}
    columns |= {"dictionary": pa.array([1, 0, 5]).dictionary_encode()}
    columns |= {"fixed": pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int32(), 2))}
    data = from_frame(pa.table({"y": [0, 1, 0], **columns}), label="y", categorical=tuple(columns))
    ((_, _, sparse, _),) = read(data, 3)
    assert sparse.pop("fixed") == ([1, 2, 3, 4, 5, 6], [0, 2, 4])
    assert sparse.pop("bool")[0] == [[1], [0], [1]]
    assert all(ids == [[1], [0], [5]] for ids, _ in sparse.values())
    texts = {str(kind): pa.array(["b", None, "a"], kind) for kind in (pa.string(), pa.large_string(), pa.string_view())}
    data = from_frame(pa.table({"y": [0, 1, 0], **texts}), label="y", categorical=tuple(texts))
    assert all(ids == [[2], [0], [3]] for ids, _ in read(data, 3)[0][2].values())


@examples(60)
@given(
    st.lists(st.one_of(st.none(), st.text(alphabet="abc\x00é", max_size=2)), max_size=30),
    st.lists(st.text(alphabet="abcd", max_size=2), max_size=6, unique=True),
    st.integers(0, 10),
)
def test_categories_of_any_order_are_numbered_by_first_appearance(values, extra, cut):
    categories = [*sorted({value for value in values if value is not None}, reverse=True), *extra]
    categories = list(dict.fromkeys(categories))
    codes = [None if value is None else categories.index(value) for value in values]
    column = pa.DictionaryArray.from_arrays(pa.array(codes, pa.int16()), pa.array(categories, pa.string()))
    table = pa.table({"y": np.zeros(len(values)), "c": column})
    table = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    data = from_frame(table, label="y", categorical=("c",))
    seen = list(dict.fromkeys(value for value in values if value is not None))
    assert data.vocabulary["c"].to_pylist() == seen
    expected = [0 if value is None else seen.index(value) + 2 for value in values]
    assert [row for _, _, sparse, _ in read(data, 8) for (row,) in sparse["c"][0]] == expected


def test_the_frames_memory_is_used_where_its_types_allow():
    ids = np.arange(1000)
    numbers = np.ones(1000)
    table = pa.table({"y": numbers, "a": ids, "n": numbers})
    before = pa.total_allocated_bytes()
    data = from_frame(table, label="y", numeric=("n",), categorical=("a",))
    assert pa.total_allocated_bytes() == before
    assert np.shares_memory(data._features["a"].ids, ids)
    assert np.shares_memory(data._dense[0], numbers)
    batch = next(data.batches(1000))
    assert not np.shares_memory(batch.sparse["a"].values.numpy(), ids)


def test_missing_ids_have_the_id_that_is_given():
    frame = pl.DataFrame({"y": [0, 1], "a": [None, 3], "b": [[1, None], None]}, schema_overrides={"a": pl.UInt64})
    data = from_frame(frame, label="y", categorical=("a", "b"), missing=-1)
    ((_, _, sparse, _),) = read(data, 2)
    assert sparse == {"a": ([[-1], [3]], None), "b": ([1, -1], [0, 2])}


def test_a_table_can_say_how_many_rows_it_has():
    frame = pd.DataFrame({"y": [0, 1], "a": [4, 2], "c": ["x", "y"]})
    tables = [Table("a", 5), Table("colour", 10, ("c",))]
    data = from_frame(frame, label="y", tables=tables)
    assert data.tables == tuple(tables)
    with pytest.raises(ConfigError, match="table 'colour' has 3 rows, its texts need 4"):
        from_frame(frame, label="y", tables=[Table("a", 5), Table("colour", 3, ("c",))])
    with pytest.raises(ValueRangeError, match=r"column 'a', row 0: id 4 is out of range for its table \(4 rows\)"):
        from_frame(frame, label="y", tables=[Table("a", 4)])


def test_a_frame_without_rows_has_no_batches():
    for frame in (arrow().slice(0, 0), arrow().schema.empty_table(), pl.from_arrow(arrow())[:0]):
        data = from_frame(frame, **COLUMNS)
        assert data.num_samples == 0
        assert read(data, 4) == []


def refuse(frame, error, message, **options):
    with pytest.raises(error, match=message):
        from_frame(frame, **({"label": "y", "categorical": ("a",)} | options))


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table])
@pytest.mark.parametrize(
    ("columns", "error", "message"),
    [
        ({"a": [1.0, 2.0]}, DataError, r"column 'a' is double, and floats lose ids above 2\*\*24"),
        ({"a": [[1.5], []]}, DataError, "column 'a' is .*list.*double.*floats lose ids"),
        ({"a": [b"x", b"y"]}, DataError, "column 'a' is (large_)?binary, which can't be ids"),
        ({"y": [1.0, None]}, ValueRangeError, "column 'y', row 1: the label is missing"),
        ({"y": [1.0, float("inf")]}, ValueRangeError, "column 'y', row 1 is inf"),
        ({"n": [1.0, 1e39]}, ValueRangeError, r"column 'n', row 1 is 1e\+39: give numbers that float32 can hold"),
        ({"n": ["1", "2"]}, DataError, "column 'n' is (large_)?string, not numbers"),
        ({"y": ["0", "1"]}, DataError, "column 'y' is (large_)?string, not numbers"),
        ({"b": [1, 2]}, ConfigError, "there is|the frame has no column 'a'; its columns are"),
    ],
)
def test_columns_that_can_not_be_used_are_named(make, columns, error, message):
    columns = {"y": [0, 1], "n": [0.5, 1.5]} | ({} if "b" in columns else {"a": [1, 2]}) | columns
    refuse(make(columns), error, message, numeric=("n",))


@pytest.mark.parametrize("make", [pl.DataFrame, pa.table])
def test_what_only_arrow_can_hold_is_refused_too(make):
    refuse(make({"y": [0, 1], "a": [1, None]}), ValueRangeError, "column 'a', row 1: the id is missing: give missing=")
    bags = {"y": [0, 1, 1], "a": [[1], [], [2, None]]}
    refuse(make(bags), ValueRangeError, "column 'a', row 2: the id is missing")
    refuse(make({"y": [0, 1], "a": [None, None]}), DataError, "column 'a' is null, all of its values are missing")
    refuse(make({"y": [0.0, float("nan")], "a": [1, 2]}), ValueRangeError, "column 'y', row 1 is nan")
    large = {
        "y": [0, 1],
        "a": pa.array([1, 2**63], pa.uint64()) if make is pa.table else pl.Series([1, 2**63], dtype=pl.UInt64),
    }
    refuse(make(large), ValueRangeError, "column 'a', row 1: id 9223372036854775808 is above")


def test_a_missing_number_of_pandas_makes_ids_floats_and_is_refused_with_the_remedy():
    frame = pd.DataFrame({"y": [0, 1], "a": [1, None]})
    refuse(frame, DataError, r"in pandas .astype\('Int64'\)")
    data = from_frame(frame.astype({"a": "Int64"}), label="y", categorical=("a",), missing=9)
    assert read(data, 2)[0][2]["a"][0] == [[1], [9]]


def test_wrong_arguments_are_refused_by_name():
    frame = pd.DataFrame({"y": [0, 1], "a": [1, 2], "c": ["x", "y"]})
    refuse(frame, ConfigError, "categorical is the text 'a': give a tuple", categorical="a")
    refuse(frame, ConfigError, "numeric is the text 'a'", numeric="a")
    refuse(frame, ConfigError, "no column is categorical", categorical=())
    refuse(frame, ConfigError, "column 'y' is the label and a feature too", numeric=("y",))
    refuse(frame, ConfigError, "column 'y' is the label and a feature too", categorical=("y",))
    refuse(frame, ConfigError, "the frame has no column 'z'", categorical=("z",))
    refuse(frame, ConfigError, "table 't' has columns of integers and of texts", tables={"t": ("a", "c")})
    refuse(frame, ConfigError, "column 'a' is in tables 't' and 'u'", tables={"t": ("a",), "u": ("a",)})
    refuse(frame, ConfigError, "two tables 'a'", tables={"a": ("c",)})
    refuse(frame, ConfigError, "missing is 9223372036854775808: give a 64-bit id", missing=2**63)
    refuse(
        frame, ConfigError, r"the vocabulary has tables \['b'\], the frame has texts in \[\]", vocabulary={"b": ["x"]}
    )
    texts = {"categorical": ("c",)}
    refuse(
        frame, ConfigError, r"the vocabulary has tables \[\], the frame has texts in \['c'\]", vocabulary={}, **texts
    )
    refuse(frame, ConfigError, "'c' has a text twice", vocabulary={"c": ["x", "x"]}, **texts)
    refuse(frame, ConfigError, "'c' is not a list of texts", vocabulary={"c": [1, 2]}, **texts)


def test_what_is_no_frame_is_refused():
    refuse(pl.LazyFrame({"y": [0], "a": [1]}), ConfigError, r"call its collect\(\) first")
    refuse({"y": [0], "a": [1]}, ConfigError, "the frame is a builtins.dict: give a pandas, polars or pyarrow frame")
    refuse(pd.DataFrame([[0, 1, 2]], columns=["y", "a", "a"]), ConfigError, "has 2 columns 'a'")
    refuse(
        pd.DataFrame({"y": [0, 1], "a": [1, "x"]}),
        DataError,
        "the frame can't be read: .*column a with type object: give",
    )


TABLES = (Table("user", 50), Table("item", 30, ("seen", "bought")))


def train(batches):
    model = build_model("dlrm", TABLES, 2, 4, torch.device("meta"), seed=3)
    options = {"features": TABLES, "initial": initial, "cache": 200, "check": True}
    dense = dense_sgd(list(model.parameters()))
    model, dense, loader = prepare(model, dense, batches, OPTIMIZERS["adagrad"](), **options)
    for batch in loader:
        logits = model(batch.dense, batch.sparse)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        dense.zero_grad()
        loss.backward()
        dense.step()
    loader.close()
    loop = loader.loop
    state = of_store(model, [layout.table.name for layout in loop.layouts], loop.store)
    loop.store.close()
    return state


@pytest.mark.parametrize("make", [pd.DataFrame, pl.DataFrame, pa.table])
def test_training_from_a_frame_has_the_bits_of_training_from_a_loader(make):
    random = np.random.default_rng(0)
    lengths = random.integers(0, 4, 200)
    seen = [random.integers(0, 30, length).tolist() for length in lengths]
    columns = {
        "y": random.integers(0, 2, 200),
        "n": random.random(200),
        "m": random.random(200),
        "user": random.integers(0, 50, 200),
        "bought": random.integers(0, 30, 200),
    }

    def batch(number, part):
        starts = np.cumsum([0, *map(len, seen[part])])[:-1]
        sparse = {
            "user": Ids(torch.tensor(columns["user"][part]).reshape(-1, 1)),
            "seen": Ids(torch.tensor([item for bag in seen[part] for item in bag]), torch.tensor(starts)),
            "bought": Ids(torch.tensor(columns["bought"][part]).reshape(-1, 1)),
        }
        dense = torch.tensor(np.stack([columns["n"][part], columns["m"][part]], 1), dtype=torch.float32)
        return Batch(dense, sparse, torch.tensor(columns["y"][part], dtype=torch.float32), number=number)

    loader = [batch(number, slice(at, at + 32)) for number, at in enumerate(range(0, 200, 32))]
    data = from_frame(make(columns | {"seen": seen}), label="y", numeric=("n", "m"), tables=TABLES)
    assert_identical(train(loader), train(data.batches(32)))


def test_the_example_learns_from_its_frame():
    example = Path(__file__).parents[3] / "examples" / "from_dataframe.py"
    result = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    said = re.fullmatch(r"AUC (0\.\d+) on 10,000 samples not seen\n", result.stdout)
    assert float(said[1]) > 0.8
    assert len(example.read_text().splitlines()) <= 62
