import pytest

from bagpipe.data import generated, write
from bagpipe.data.prepare.numbering import MISSING_ID
from bagpipe.data.prepare.show import Shown
from bagpipe.errors import ConfigError, ShardError
from harness.prepared import run, write_raw


@pytest.fixture
def prepared(tmp_path):
    (raw,) = write_raw(tmp_path / "raw", 300)
    run([raw], tmp_path / "data", numbering=("user=ids", "item=hash:40", "city=frequency"), min_count=("city=3",))
    return raw, tmp_path / "data"


def test_each_way_of_numbering_is_shown_as_what_it_is(prepared):
    raw, path = prepared
    lines = [line.split(",") for line in raw.read_text().splitlines()[1:]]
    kinds = set()
    for line, sample in zip(lines, Shown(path).samples(0, 300), strict=True):
        user, city, item = (sample["categorical"][name] for name in ("user", "city", "item"))
        expected = {"id": int(line[3]), "value": int(line[3]), "is": "value"} if line[3] else None
        assert user == (expected or {"id": MISSING_ID, "value": None, "is": "missing"})
        assert item["is"] == "hash"
        assert 1 <= item["id"] < 40
        assert len(sample["categorical"]["seen"]) == len(line[5].split("|")) if line[5] else True
        kinds.add(city["is"])
        if city["is"] == "value":
            assert city["value"] == line[4]
    assert kinds == {"value", "missing", "rare or unseen"}


def test_the_last_samples_are_shown_even_if_more_are_asked_for(prepared):
    assert [sample["sample"] for sample in Shown(prepared[1]).samples(298, 10)] == [298, 299]


def test_what_is_not_there_is_refused(prepared):
    shown = Shown(prepared[1])
    with pytest.raises(ConfigError, match="has no sample 300: give 0 to 299"):
        shown.samples(300, 1)
    with pytest.raises(ConfigError, match="no categorical feature 'colour': it has user, city, seen, item"):
        shown.row("colour", 1)
    with pytest.raises(ConfigError, match="table 'item' has no row 40: give 0 to 39"):
        shown.row("seen", 40)


def test_a_missing_vocabulary_is_named(prepared):
    (prepared[1] / "vocabulary" / "city.parquet").unlink()
    with pytest.raises(ShardError, match=r"city\.parquet can't be read"):
        Shown(prepared[1]).row("city", 2)


def test_generated_data_has_ids_only(tmp_path):
    write(generated("tiny", 10), tmp_path / "data")
    sample = Shown(tmp_path / "data").samples(3, 1)[0]
    assert set(sample["numeric"]) == {f"numeric {i}" for i in range(4)}
    assert all(set(cell) == {"id"} for cell in sample["categorical"]["recent"])
