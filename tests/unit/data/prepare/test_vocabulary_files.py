import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from bagpipe.data.prepare import vocabulary as module
from bagpipe.data.prepare.vocabulary import Vocabulary, file_names, write_vocabulary
from bagpipe.data.prepare.words import Words, gather_texts
from bagpipe.errors import ConfigError, ShardError
from definitions.words import define_gather_texts


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "GROUP_ROWS", 4)
    values = [None, None, *(f"v{i}" for i in range(2, 11))]

    def part(start, stop):
        return pa.array(values[start:stop], pa.large_string()), np.arange(start, stop) * 10

    return tmp_path, write_vocabulary(tmp_path / "vocabulary" / "a.parquet", False, 11, part)


def test_any_row_is_found_whatever_its_group(written):
    path, entry = written
    vocabulary = Vocabulary(path / "vocabulary", entry)
    assert len(vocabulary) == 11
    assert vocabulary.look_up([10, 0, 4, 4, 3]) == [("v10", 100), (None, 0), ("v4", 40), ("v4", 40), ("v3", 30)]
    with pytest.raises(ConfigError, match=r"row 11 is not in .*a\.parquet, which has 11 rows"):
        vocabulary.look_up([11])


def test_other_tools_read_it(written):
    path = written[0] / "vocabulary" / "a.parquet"
    assert pd.read_parquet(path).loc[5].tolist() == ["v5", 50]
    assert pl.read_parquet(path).row(5) == ("v5", 50)


def test_a_damaged_file_is_refused(written):
    path, entry = written
    file = path / "vocabulary" / "a.parquet"
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    with pytest.raises(ShardError, match=r"a\.parquet has .* checksum .*, the manifest says"):
        Vocabulary(path / "vocabulary", entry)
    file.unlink()
    with pytest.raises(ShardError, match=r"a\.parquet can't be read.*restore it"):
        Vocabulary(path / "vocabulary", entry)


def test_file_names_are_safe_and_no_two_alike():
    tables = ["user", "../up", "a b", "a_b", "User", "a.b", ".", "x" * 300, "ü", "a_b.2"]
    names = list(file_names(tables).values())
    assert names[0] == "user.parquet"
    assert len({name.lower() for name in names}) == len(tables)
    for name in names:
        assert len(name) < 120
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
        assert not name.startswith(".")


def append(words, texts):
    array = pa.array(texts)
    words.append(np.arange(len(texts), dtype=np.uint64), np.ones(len(texts), np.uint32), array)


def test_values_are_found_by_position_in_any_order(tmp_path):
    words = Words(tmp_path, 0)
    append(words, ["one", "", "three"])
    append(words, pa.array(["zero", "four", "fünf"])[1:].to_pylist())
    for order in ([0, 1, 2, 3, 4], [4, 2, 0], [1], [3, 3], []):
        found = words.values(np.array(order, np.uint32), False).to_pylist()
        assert found == [["one", "", "three", "four", "fünf"][i] for i in order]
    words.close()


def test_what_was_not_committed_is_cut_off(tmp_path):
    words = Words(tmp_path, 0)
    append(words, ["one", "two"])
    assert words.commit() == 2
    append(words, ["three"])
    words.close()
    words = Words(tmp_path, 0)
    words.cut(2)
    append(words, ["four"])
    assert words.values(np.arange(3, dtype=np.uint32), False).to_pylist() == ["one", "two", "four"]
    assert words.records(0, 3)["end"].tolist() == [3, 6, 10]
    with pytest.raises(ShardError, match="has 3 values instead of 4"):
        words.cut(4)
    words.close()


def test_gathering_texts_is_its_twin():
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, 1000).astype(np.uint8)
    begins = rng.integers(0, 900, 50)
    ends = begins + rng.integers(0, 100, 50)
    ours, twin = np.empty((ends - begins).sum(), np.uint8), np.empty((ends - begins).sum(), np.uint8)
    gather_texts(data, begins, ends, ours)
    define_gather_texts(data, begins, ends, twin)
    assert np.array_equal(ours, twin)
