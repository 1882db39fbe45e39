import datetime
import decimal
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagpipe.data.prepare.block import BEGINNING, Place
from bagpipe.data.prepare.reading import open_sources, read_blocks
from bagpipe.data.prepare.schema import parse_schema
from bagpipe.data.prepare.sources import find_sources
from bagpipe.errors import DataError
from harness.blocks import problems_of, samples_of, values_of

SCHEMA = parse_schema({"format": "parquet", "label": "y", "categorical": ["c"]})


def written(directory, columns, name="data.parquet", **options):
    path = directory / name
    path.unlink(missing_ok=True)
    pq.write_table(pa.table(columns), path, **options)
    return find_sources([path])


def read(sources, schema=SCHEMA, start=BEGINNING, **options):
    return list(read_blocks(schema, sources, start, **options))


def category(directory, array, **settings):
    schema = parse_schema({"format": "parquet", "label": "y", "categorical": [{"column": "c", **settings}]})
    blocks = read(written(directory, {"y": pa.array([1] * len(array), pa.int8()), "c": array}), schema)
    return [value for block in blocks for value in values_of(block.categories["c"])], problems_of(blocks), blocks


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.binary()], ids=str
)
def test_texts_of_any_type_are_the_same_categories_as_in_a_text_file(tmp_path, kind):
    values, problems, blocks = category(tmp_path, pa.array(["a", None, "é", "", "a"]).cast(kind))
    assert values == ["a", None, "é", None, "a"]
    assert problems == []
    assert blocks[0].categories["c"].values.type == pa.string()
    path = tmp_path / "data.tsv"
    path.write_text("1\ta\n1\t\n1\té\n1\t\n1\ta\n")
    schema = parse_schema({"format": "tsv", "columns": ["y", "c"], "label": "y", "categorical": ["c"]})
    assert samples_of(read(find_sources([path]), schema)) == samples_of(blocks)


@pytest.mark.parametrize("kind", [pa.int8(), pa.uint16(), pa.int32(), pa.int64(), pa.float32(), pa.float64()], ids=str)
def test_whole_numbers_of_any_type_are_their_own_keys(tmp_path, kind):
    values, problems, blocks = category(tmp_path, pa.array([7, None, 0, 100], kind))
    assert values == [7, None, 0, 100]
    assert problems == []
    assert blocks[0].categories["c"].keys.tolist() == [7, 0, 0, 100]
    assert blocks[0].categories["c"].values.type == pa.int64()


def test_numbers_of_64_bits_without_a_sign_are_problems_where_they_would_become_negative(tmp_path):
    values, problems, _ = category(tmp_path, pa.array([2**63 - 1, 2**64 - 1, None, 2**63, 0], pa.uint64()))
    assert values == [2**63 - 1, None, 0]
    assert [(p.line, p.column, p.reason) for p in problems] == [
        (2, "c", "'18446744073709551615' is not a whole number of 64 bits"),
        (4, "c", "'9223372036854775808' is not a whole number of 64 bits"),
    ]


def test_a_list_with_a_number_that_would_become_negative_is_a_problem(tmp_path):
    values, problems, _ = category(tmp_path, pa.array([[1], [2, 2**64 - 1]], pa.list_(pa.uint64())))
    assert (values, [p.line for p in problems]) == ([[1]], [2])


def test_numbers_that_are_not_whole_are_problems(tmp_path):
    values, problems, _ = category(tmp_path, pa.array([1.0, 1.5, float("nan"), float("inf"), 1e19]))
    assert values == [1, None]
    assert [(p.line, p.column, p.reason) for p in problems] == [
        (2, "c", "'1.5' is not a whole number of 64 bits"),
        (4, "c", "'inf' is not a whole number of 64 bits"),
        (5, "c", "'1e+19' is not a whole number of 64 bits"),
    ]


def test_the_kind_of_categories_can_be_chosen(tmp_path):
    assert category(tmp_path, pa.array([7, None]), kind="text")[0] == ["7", None]
    values, problems, _ = category(tmp_path, pa.array(["7", None, "x"]), kind="integer")
    assert values == [7, None]
    assert [p.reason for p in problems] == ["'x' is not a whole number of 64 bits"]


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.string())], ids=str)
def test_lists_keep_their_values_and_missing_ones_are_empty(tmp_path, kind):
    lists = pa.array([["a", "b"], None, [], ["c", None], ["d"]], kind)
    assert category(tmp_path, lists)[0] == [["a", "b"], [], [], ["c", None], ["d"]]


def test_lists_of_numbers_of_a_fixed_length_and_of_dictionaries_are_read(tmp_path):
    assert category(tmp_path, pa.array([[1, 2], [3, None]], pa.list_(pa.int32())))[0] == [[1, 2], [3, None]]
    assert category(tmp_path, pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2)))[0] == [[1, 2], [3, 4]]
    values, problems, _ = category(tmp_path, pa.array([[1.0], [1.5, 2.0], [3.0]]))
    assert values == [[1], [3]]
    assert [(p.line, p.reason) for p in problems] == [(2, "'[1.5, 2.0]' is not a whole number of 64 bits")]


def test_texts_that_are_not_utf8_are_problems(tmp_path):
    values, problems, _ = category(tmp_path, pa.array([b"a", b"\xff", b"b"], pa.binary()))
    assert values == ["a", "b"]
    assert [(p.line, p.column, p.reason) for p in problems] == [(2, "c", "'\\xff' is not UTF-8")]
    assert json.loads(problems[0].text) == {"y": 1, "c": "\\xff"}
    halves = category(tmp_path, pa.array([b"\xc3", b"\xa9", b"b"], pa.binary()))
    assert halves[0] == ["b"]
    assert [p.line for p in halves[1]] == [1, 2]


@pytest.mark.parametrize(
    "array",
    [
        pa.array([3, None, -1], pa.int16()),
        pa.array([3.0, float("nan"), -1.0]),
        pa.array(["3", "", "-1"]),
        pa.array([decimal.Decimal("3.0"), None, decimal.Decimal("-1.0")]),
        pa.array([3, None, -1]).dictionary_encode(),
    ],
    ids=lambda array: str(array.type),
)
def test_numbers_of_any_type_are_transformed_and_missing_ones_are_zero(tmp_path, array):
    schema = parse_schema({"format": "parquet", "label": "y", "numeric": ["n"], "categorical": ["c"]})
    columns = {"n": array, "y": pa.array([True, False, True]), "c": pa.array(["a", "b", "c"])}
    [block] = read(written(tmp_path, columns), schema)
    assert block.dense[:, 0].tolist() == [np.float32(np.log(4)), 0, 0]
    assert block.labels.tolist() == [1, 0, 1]


def test_bad_labels_and_numbers_are_named_by_row_and_column(tmp_path):
    schema = parse_schema({"format": "parquet", "label": "y", "numeric": ["n"], "categorical": ["c"]})
    columns = {"n": ["1", "x", "2", "inf"], "y": [0, 1, 2, None], "c": ["a", "b", "c", "d"]}
    sources = written(tmp_path, columns, row_group_size=2)
    for block_bytes in (1, 1 << 20):
        blocks = read(sources, schema, block_bytes=block_bytes)
        assert [sample[2] for sample in samples_of(blocks)] == [["a"]]
        assert [(p.file, p.line, p.column, p.reason) for p in problems_of(blocks)] == [
            (str(sources[0].path), 2, "n", "'x' is not a number"),
            (str(sources[0].path), 3, "y", "'2' is not 0 or 1"),
            (str(sources[0].path), 4, "n", "'inf' is not a number"),
        ]
        assert json.loads(problems_of(blocks)[0].text) == {"y": 1, "n": "x", "c": "b"}


@pytest.mark.parametrize(
    ("array", "kind"),
    [
        (pa.array([datetime.datetime(2014, 10, 21), None]), "iso"),
        (pa.array([datetime.datetime(2014, 10, 21), None], pa.timestamp("ns", "Europe/Paris")), "unix"),
        (pa.array([datetime.date(2014, 10, 21), None]), "unix"),
        (pa.array([1413849600, None]), "unix"),
        (pa.array([1413849600999, None]), "unix_ms"),
        (pa.array([14102100, None]), "yymmddhh"),
        (pa.array(["2014-10-21T00:00:00Z", None]), "iso"),
        (pa.array(["1413849600", ""]), "unix"),
    ],
    ids=lambda value: value if isinstance(value, str) else str(value.type),
)
def test_times_of_any_type_are_seconds_since_1970(tmp_path, array, kind):
    time = {"column": "t", "kind": kind}
    schema = parse_schema({"format": "parquet", "label": "y", "categorical": ["c"], "time": time})
    [block] = read(written(tmp_path, {"y": [1, 1], "c": ["a", "b"], "t": array}), schema)
    assert block.times.tolist() == [1413849600]
    assert [(p.line, p.column, p.reason) for p in block.problems] == [(2, "t", "the time is missing")]


def test_from_every_row_the_rest_comes_whatever_the_size_of_blocks_and_threads(tmp_path):
    columns = {"y": [n % 2 for n in range(25)], "c": [f"v{n}" for n in range(25)]}
    sources = written(tmp_path, columns, "a.parquet", row_group_size=7) + written(tmp_path, columns, "b.parquet")
    whole = samples_of(read(sources))
    assert len(whole) == 50
    places = 0
    for options in ({"block_bytes": 1}, {"block_bytes": 50, "threads": 3}, {"block_bytes": 100, "threads": 1}):
        blocks = read(sources, **options)
        assert samples_of(blocks) == whole
        done = 0
        for block in blocks:
            assert samples_of(read(sources, start=block.start)) == whole[done:]
            done += len(block)
            assert samples_of(read(sources, start=block.end)) == whole[done:]
            places += 1
    assert places > 50
    assert read(sources)[0].start == BEGINNING
    assert read(sources)[-1].end == Place(1, 1, 25)
    assert read(sources)[-1].position == sum(source.size for source in sources)


def opened(directory, *files, **settings):
    schema = directory / "schema.toml"
    schema.write_text("\n".join(f"{name} = {value}" for name, value in {"format": '"parquet"', **settings}.items()))
    return open_sources("parquet", list(files), schema)


def test_files_are_checked_against_the_schema_before_they_are_read(tmp_path):
    written(tmp_path, {"y": [1], "c": ["a"], "x": [1]}, "a.parquet")
    written(tmp_path, {"y": [1], "c": [5], "x": [1]}, "b.parquet")
    settings = {"label": '"y"', "categorical": '["c"]', "ignore": '["*"]'}
    schema, sources = opened(tmp_path, tmp_path / "a.parquet", **settings)
    assert len(samples_of(read(sources, schema))) == 1
    with pytest.raises(DataError, match=r"b\.parquet: column 'c' is integer, in .*a\.parquet it is text"):
        opened(tmp_path, tmp_path, **settings)
    with pytest.raises(DataError, match=r"a\.parquet has no column 'd', which the schema names; it has: y, c, x"):
        opened(tmp_path, tmp_path, **{**settings, "categorical": '["d"]'})
    both = '[{column = "c", table = "t"}, {column = "x", table = "t"}]'
    with pytest.raises(DataError, match="columns c, x share table 't', but some are text"):
        opened(tmp_path, tmp_path / "a.parquet", **{**settings, "categorical": both})


@pytest.mark.parametrize(
    ("role", "array", "message"),
    [
        ("numeric", pa.array([[1]]), "column 'v' is list.*, which can't be read as a number"),
        ("time", pa.array([{"a": 1}]), "column 'v' is struct.*, which can't be read as a time"),
        (
            "categorical",
            pa.array([decimal.Decimal("1.5")]),
            "column 'v' is decimal.*, which can't be read as a category",
        ),
    ],
)
def test_types_that_can_not_be_read_are_named(tmp_path, role, array, message):
    written(tmp_path, {"y": [1], "c": ["a"], "v": array})
    settings = {"label": '"y"', "categorical": '["c"]'}
    settings[role] = '"v"' if role == "time" else '["c", "v"]' if role == "categorical" else '["v"]'
    with pytest.raises(DataError, match=message):
        opened(tmp_path, tmp_path, **settings)


def test_what_is_not_parquet_or_damaged_is_named(tmp_path):
    path = tmp_path / "x.parquet"
    path.write_text("y,c\n1,a\n")
    with pytest.raises(DataError, match=r"x\.parquet is not a parquet file, or damaged"):
        opened(tmp_path, path, label='"y"', categorical='["c"]')
    rng = np.random.default_rng(0)
    columns = {"y": pa.array([1] * 5000), "c": pa.array(rng.integers(0, 2**62, 5000))}
    written(tmp_path, columns, "x.parquet", compression="gzip", use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[2000:22000] = bytes(20000)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"x\.parquet can't be read on from row 1, in row group 0: it is damaged"):
        read(find_sources([path]))


def test_a_file_that_changes_while_it_is_read_ends_the_reading(tmp_path):
    sources = written(tmp_path, {"y": [1] * 1000, "c": ["a"] * 1000})
    blocks = read_blocks(SCHEMA, sources, block_bytes=64)
    next(blocks)
    with sources[0].path.open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataError, match="changed while it was read"):
        list(blocks)
