"""Values to ids, from blocks made here."""

import itertools

import numpy as np
import pyarrow as pa
import pytest

from bagpipe.data.prepare.block import Block, Category, Place
from bagpipe.data.prepare.cut import part_of
from bagpipe.data.prepare.encoder import Encoder, TableEncoder
from bagpipe.data.prepare.numbering import MISSING_ID, Numbering, hash_rows, parse_numberings
from bagpipe.data.prepare.texts import hash_texts
from bagpipe.data.prepare.vocabulary import Vocabulary
from bagpipe.errors import ConfigError, DataError
from definitions.numbering import define_hash_rows
from harness.prepared import contents


def category(values, offsets=None):
    integers = any(isinstance(value, int) for value in values)
    array = pa.array(values, pa.int64() if integers else pa.string())
    missing = np.array([value is None for value in values], bool)
    if integers:
        keys = np.array([value or 0 for value in values], np.int64).view(np.uint64)
        checks = np.zeros(len(values), np.uint32)
    else:
        keys, checks = hash_texts(array)
    return Category(array, keys, checks, missing, None if offsets is None else np.array(offsets, np.int64))


def block(**columns):
    """One category a column: a list of values, or of lists of values."""
    categories = {}
    for name, values in columns.items():
        if any(isinstance(value, list) for value in values):
            ends = np.cumsum([len(value) for value in values])
            categories[name] = category([each for value in values for each in value], [0, *ends])
        else:
            categories[name] = category(values)
    num = len(next(iter(columns.values())))
    return Block(np.zeros(num, np.float32), np.zeros((num, 0), np.float32), categories, Place(), Place())


def encoder(directory, numbering=None, columns=("a",), **options):
    directory.mkdir(exist_ok=True)
    return Encoder([TableEncoder("t", columns, numbering or Numbering())], directory, 1 << 30, 1, **options)


def ids(encoding, made, column="a"):
    return encoding.encode(made).columns[column].values.flatten().tolist()


def test_first_appearance_leaves_row_0_to_missing_and_row_1_to_rare_values(tmp_path):
    with encoder(tmp_path) as encoding:
        assert ids(encoding, block(a=["x", None, "y", "x"])) == [2, 0, 3, 2]
        assert ids(encoding, block(a=["z", "y", None])) == [4, 3, 0]
        entry = encoding.tables[0].finish(tmp_path / "t.parquet")
    assert encoding.tables[0].rows == 5
    assert entry.vocabulary is not None
    found = Vocabulary(tmp_path, entry.vocabulary).look_up(range(5))
    assert found == [(None, 2), (None, 0), ("x", 2), ("y", 2), ("z", 1)]


def test_an_empty_text_is_a_value_and_so_are_texts_of_any_characters(tmp_path):
    texts = ["", "\x00", "ü", "\n", "a" * 5000]
    with encoder(tmp_path) as encoding:
        assert ids(encoding, block(a=texts)) == [2, 3, 4, 5, 6]
        entry = encoding.tables[0].finish(tmp_path / "t.parquet").vocabulary
    assert [value for value, _ in Vocabulary(tmp_path, entry).look_up(range(2, 7))] == texts


def test_integers_are_told_apart_as_integers(tmp_path):
    values = [0, -1, 2**63 - 1, -(2**63), None, 0]
    with encoder(tmp_path) as encoding:
        assert ids(encoding, block(a=values)) == [2, 3, 4, 5, 0, 2]
        entry = encoding.tables[0].finish(tmp_path / "t.parquet")
    assert entry.values == "integer"
    assert [value for value, _ in Vocabulary(tmp_path, entry.vocabulary).look_up(range(2, 6))] == values[:4]


@pytest.mark.parametrize(
    ("numbering", "expected", "vocabulary"),
    [
        (
            Numbering("frequency"),
            [4, 3, 2, 3, 2, 0, 2, 5],
            [(None, 1), (None, 0), ("c", 3), ("b", 2), ("a", 1), ("d", 1)],
        ),
        (Numbering("frequency", min_count=2), [1, 3, 2, 3, 2, 0, 2, 1], [(None, 1), (None, 2), ("c", 3), ("b", 2)]),
        (Numbering("first", min_count=2), [1, 2, 3, 2, 3, 0, 3, 1], [(None, 1), (None, 2), ("b", 2), ("c", 3)]),
        (Numbering("first", min_count=9), [1, 1, 1, 1, 1, 0, 1, 1], [(None, 1), (None, 7)]),
    ],
)
def test_counted_values_are_numbered_in_a_second_pass(tmp_path, numbering, expected, vocabulary):
    made = block(a=["a", "b", "c", "b", "c", None, "c", "d"])
    with encoder(tmp_path, numbering) as encoding:
        encoding.count(part_of(made, 0, 3))
        encoding.count(part_of(made, 3, 8))
        table = encoding.tables[0]
        table.settle(tmp_path / "t.parquet", encoding.space)
        assert ids(encoding, made) == expected
        entry = table.finish(tmp_path / "t.parquet").vocabulary
    assert Vocabulary(tmp_path, entry).look_up(range(table.rows)) == vocabulary


def test_columns_of_one_table_share_its_rows_by_sample_whatever_the_blocks(tmp_path):
    made = block(a=["p", "q", "r", "p"], b=[["s", "q"], [], ["p", None, "t"], ["u"]])
    whole = {"a": [2, 4, 5, 2], "b": [3, 4, 2, 0, 6, 7]}
    for cuts in ([0, 4], [0, 1, 2, 3, 4], [0, 2, 4]):
        with encoder(tmp_path / str(cuts), columns=("a", "b")) as encoding:
            found = {"a": [], "b": []}
            for start, stop in itertools.pairwise(cuts):
                samples = encoding.encode(part_of(made, start, stop))
                assert np.diff(samples.columns["b"].offsets).tolist() == [2, 0, 3, 1][start:stop]
                for name in found:
                    found[name] += samples.columns[name].values.flatten().tolist()
            assert found == whole
            assert encoding.commit() == {"t": 6}
        assert contents(tmp_path / str(cuts)) == contents(tmp_path / "[0, 4]")


def test_two_texts_with_one_hash_are_an_error_and_never_one_row(tmp_path):
    first = category(["one", "two"])
    clash = Category(first.values, np.full(2, 7, np.uint64), first.checks, first.missing)
    made = block(a=["one", "two"])
    made = Block(made.labels, made.dense, {"a": clash}, Place(), Place())
    message = r"values 'one' and 'two' of table 't' have the same 64-bit hash.*--numbering t=hash:SIZE"
    with encoder(tmp_path / "at once") as encoding, pytest.raises(DataError, match=message):
        encoding.encode(made)
    with encoder(tmp_path / "one by one") as encoding:
        encoding.encode(part_of(made, 0, 1))
        with pytest.raises(DataError, match=message):
            encoding.encode(part_of(made, 1, 2))


def test_hashed_values_depend_on_nothing_but_themselves_and_the_size(tmp_path):
    with encoder(tmp_path, Numbering("hash", 100)) as encoding:
        found = ids(encoding, block(a=["x", None, "y"]))
        assert ids(encoding, block(a=["y", "x"])) == [found[2], found[0]]
    assert found[1] == 0
    assert found == [80, 0, 2]  # for ever


def test_the_hash_kernel_is_its_twin():
    rng = np.random.default_rng(0)
    keys = np.append(rng.integers(0, 2**64, 1000, np.uint64), np.array([0, 2**64 - 1], np.uint64))
    missing = rng.random(len(keys)) < 0.2
    for size in (2, 3, 1000, 2**40):
        ours, twin = np.empty(len(keys), np.int64), np.empty(len(keys), np.int64)
        hash_rows(keys, missing, size, ours)
        define_hash_rows(keys, missing, size, twin)
        assert np.array_equal(ours, twin)
        assert ours[missing].max() == 0
        assert (ours[~missing] >= 1).all()
        assert ours.max() < size


def test_ids_are_the_numbers_themselves_or_the_keys_of_texts(tmp_path):
    with encoder(tmp_path / "numbers", Numbering("ids")) as encoding:
        assert ids(encoding, block(a=[5, -3, None, 2**62])) == [5, -3, MISSING_ID, 2**62]
        with pytest.raises(DataError, match=f"'t' has the value {MISSING_ID}, whose id .* stands for missing values"):
            encoding.encode(block(a=[MISSING_ID]))
    with encoder(tmp_path / "texts", Numbering("ids")) as encoding:
        keys = hash_texts(pa.array(["x", "y"]))[0].view(np.int64).tolist()
        assert ids(encoding, block(a=["x", None, "y"])) == [keys[0], MISSING_ID, keys[1]]


def test_a_column_may_not_change_from_text_to_numbers(tmp_path):
    with encoder(tmp_path) as encoding:
        encoding.encode(block(a=["x"]))
        with pytest.raises(DataError, match=r"column 'a' of table 't' has integer values.*`kind` in the schema"):
            encoding.encode(block(a=[1]))


@pytest.mark.parametrize("values", [["x", "y", None, "x"], [7, -7, None, 7]])
def test_an_earlier_vocabulary_numbers_new_data_alike_and_does_not_grow(tmp_path, values):
    with encoder(tmp_path / "old") as encoding:
        old = ids(encoding, block(a=values))
        entry = encoding.tables[0].finish(tmp_path / "t.parquet").vocabulary
    earlier = {"t": Vocabulary(tmp_path, entry)}
    unseen = "new" if isinstance(values[0], str) else 99
    with encoder(tmp_path / "new", earlier=earlier) as encoding:
        assert ids(encoding, block(a=[unseen, *reversed(values)])) == [1, *reversed(old)]
        again = encoding.tables[0].finish(tmp_path / "again.parquet").vocabulary
    assert encoding.tables[0].rows == 4
    found = Vocabulary(tmp_path, again).look_up(range(4))
    assert found == [(None, 1), (None, 1), (values[0], 2), (values[1], 1)]


def test_numberings_are_said_of_all_tables_or_of_one():
    found = parse_numberings(["a", "b", "c=d"], ["hash:50", "a=frequency", "c=d=ids"], ["4"])
    assert found == {"a": Numbering("frequency", min_count=4), "b": Numbering("hash", 50), "c=d": Numbering("ids")}
    assert parse_numberings(["a"]) == {"a": Numbering()}


@pytest.mark.parametrize(
    ("kinds", "counts", "message"),
    [
        (["best"], [], "'best': give first, frequency, hash:SIZE or ids"),
        (["hash"], [], "hash with size None: give hash:SIZE"),
        (["hash:x"], [], "'hash:x': give first"),
        (["hash:1"], [], "hash:1: give 2 rows or more"),
        (["first:7"], [], "first with size 7: give hash:SIZE, and a size to hash only"),
        (["z=ids"], [], "there is no table 'z'; there are a, b"),
        (["ids", "first"], [], "given twice, ids and first: give one, or TABLE=first"),
        ([], ["many"], "--min-count 'many': give a whole number"),
        ([], ["0"], "min-count is 0: give at least 1"),
        (["a=ids"], ["a=5"], "min-count 5 goes with first and frequency, not with ids"),
    ],
)
def test_numberings_that_make_no_sense_are_refused(kinds, counts, message):
    with pytest.raises(ConfigError, match=message):
        parse_numberings(["a", "b"], kinds, counts)
