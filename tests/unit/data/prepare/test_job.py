"""Whole runs on small files."""

import gzip
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bagpipe.data import Shards
from bagpipe.data.prepare import job
from bagpipe.data.prepare.job import prepare
from bagpipe.data.prepare.options import Options
from bagpipe.data.prepare.show import Shown
from bagpipe.errors import ConfigError, DataError
from benchmarks.prepare import write_criteo
from harness.prepared import contents, run, write_raw


def all_samples(path):
    (batch,) = Shards(path).batches(10**6)
    return batch


def test_samples_come_out_as_they_went_in(tmp_path):
    paths = write_raw(tmp_path / "raw", 400, files=2)
    manifest = run(paths, tmp_path / "data").manifest
    assert (manifest.samples, len(manifest.shards), manifest.skipped) == (400, 3, 0)
    assert [table.name for table in manifest.tables] == ["user", "city", "item"]
    assert manifest.numeric == ("price", "age")
    raw = [line.split(",") for path in paths for line in path.read_text().splitlines()[1:]]
    for line, sample in zip(raw, Shown(tmp_path / "data").samples(0, 400), strict=True):
        cells = sample["categorical"]
        assert sample["label"] == int(line[0])
        assert sample["numeric"]["price"] == pytest.approx(np.log1p(float(line[1])), rel=1e-6)
        assert sample["numeric"]["age"] == float(line[2])
        assert cells["user"]["value"] == (int(line[3]) if line[3] else None)
        assert (cells["city"]["value"] or "") == line[4]
        assert "|".join(cell["value"] for cell in cells["seen"]) == line[5]
        assert cells["item"]["value"] == line[6]


def test_counts_are_those_of_the_data(tmp_path):
    paths = write_raw(tmp_path / "raw", 400)
    for kind in ("first", "frequency"):
        run(paths, tmp_path / kind, numbering=(kind,))
        cities = [line.split(",")[4] for line in paths[0].read_text().splitlines()[1:]]
        shown = Shown(tmp_path / kind)
        rows = shown.shards.tables[1].rows
        counted = {
            (row["value"] or ""): row["count"] for row in (shown.row("city", i) for i in range(rows)) if row["id"] != 1
        }
        assert counted == {city: cities.count(city) for city in {"", *cities}}
    found = [shown.row("city", i)["count"] for i in range(2, rows)]
    assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("options", [{}, {"numbering": ("frequency",)}])
def test_neither_threads_nor_blocks_nor_memory_change_a_byte(tmp_path, monkeypatch, options):
    paths = write_raw(tmp_path / "raw", 2000)
    run(paths, tmp_path / "one", threads=1, **options)
    monkeypatch.setattr(job, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(job, "memory_shares", lambda *_: (1 << 12, 1 << 20))  # all maps in files
    run(paths, tmp_path / "two", threads=3, **options)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_compressed_files_give_the_same_samples(tmp_path):
    (plain,) = write_raw(tmp_path / "raw", 300)
    packed = tmp_path / "raw" / "packed.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    run([plain], tmp_path / "plain")
    run([packed], tmp_path / "packed")
    ours, theirs = contents(tmp_path / "plain"), contents(tmp_path / "packed")
    for name in ("manifest.json", "prepared.json"):
        assert ours.pop(name) != theirs.pop(name)  # they name their files
    assert ours == theirs


def test_a_limit_takes_the_first_samples(tmp_path):
    paths = write_raw(tmp_path / "raw", 400, files=2)
    run(paths, tmp_path / "all")
    run(paths, tmp_path / "some", limit=230)
    ours, whole = all_samples(tmp_path / "some"), all_samples(tmp_path / "all").part(0, 230)
    assert len(ours) == 230
    assert (ours.dense == whole.dense).all()
    assert (ours.sparse["item"].values == whole.sparse["item"].values).all()


def test_days_are_files_and_parts_begin_at_them_or_at_shares(tmp_path):
    paths = write_raw(tmp_path / "raw", 900, files=3)
    manifest = run(paths, tmp_path / "data", validation="0.1", test="day_2.csv").manifest
    days = [(day.name, day.start, day.stop) for day in manifest.days]
    assert days == [("day_0.csv", 0, 300), ("day_1.csv", 300, 600), ("day_2.csv", 600, 900)]
    parts = [(part.name, part.start, part.stop) for part in manifest.parts]
    assert parts == [("train", 0, 510), ("validation", 510, 600), ("test", 600, 900)]
    assert Shards(tmp_path / "data").part_named("validation").num_samples == 90


def test_with_times_samples_are_in_their_order_and_days_are_dates(tmp_path):
    paths = write_raw(tmp_path / "raw", 900, files=2, timed=True)
    manifest = run(paths, tmp_path / "data", test="2014-05-16").manifest
    lines = [line.split(",") for path in paths for line in path.read_text().splitlines()[1:]]
    lines.sort(key=lambda line: int(line[7]))
    assert all_samples(tmp_path / "data").dense[:, 1].tolist() == [float(line[2]) for line in lines]
    names = [day.name for day in manifest.days]
    assert names == ["2014-05-13", "2014-05-14", "2014-05-15", "2014-05-16", "2014-05-17"]
    assert manifest.parts[-1].start == manifest.days[3].start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"test": "day_7.csv"}, "no day 'day_7.csv' to divide at: there are day_0.csv, day_1.csv"),
        ({"test": "1.5"}, "--test 1.5 is no share: give one between 0 and 1, or leave --test out"),
        ({"validation": "0"}, "--validation 0 is no share: give one between 0 and 1, or leave --validation out"),
        ({"test": "0.5", "validation": "0.5"}, "leave nothing to train on"),
        ({"test": "-0.1"}, "--test -0.1 is no share"),
        ({"test": "nan"}, "--test nan is no share"),
        ({"limit": 0}, "limit is 0"),
        ({"memory": "1MB"}, "memory is 1MB; the program takes .* give at least .*MB, or fewer --threads"),
        ({"memory": "much"}, "'much': give"),
    ],
)
def test_what_can_not_be_done_is_found_before_anything_is_read(tmp_path, options, message):
    paths = write_raw(tmp_path / "raw", 100, files=2)
    with pytest.raises(ConfigError, match=message):
        run(paths, tmp_path / "data", **options)
    assert not (tmp_path / "data").exists()


def test_a_part_without_samples_is_refused_and_another_can_be_asked_for(tmp_path):
    paths = write_raw(tmp_path / "raw", 400, files=2)
    with pytest.raises(ConfigError, match=r"--validation day_1\.csv is samples 200 to 200: choose another"):
        run(paths, tmp_path / "data", validation="day_1.csv", test="day_1.csv")
    assert run(paths, tmp_path / "data", validation="0.1", test="day_1.csv").samples_before == 400


def test_new_data_is_encoded_with_the_vocabulary_of_an_earlier_run(tmp_path):
    (old,) = write_raw(tmp_path / "old", 500, seed=1)
    (new,) = write_raw(tmp_path / "new", 500, seed=2)
    run([old], tmp_path / "first", numbering=("frequency", "user=hash:70"), min_count=("2",))
    made = run([new], tmp_path / "second", vocabulary=tmp_path / "first").manifest
    known = Shown(tmp_path / "first")
    assert [t.rows for t in made.tables] == [t.rows for t in known.shards.manifest.tables]
    value_of = {row: known.row("item", row)["value"] for row in range(known.shards.tables[2].rows)}
    lines = [line.split(",") for line in new.read_text().splitlines()[1:]]
    unseen = 0
    for line, sample in zip(lines, Shown(tmp_path / "second").samples(0, 500), strict=True):
        row = sample["categorical"]["item"]["id"]
        assert value_of[row] == (line[6] if line[6] in value_of.values() else None)
        unseen += row == 1
    assert unseen
    run([new], tmp_path / "third", vocabulary=tmp_path / "second")
    ours, theirs = contents(tmp_path / "second"), contents(tmp_path / "third")
    assert ours.pop("prepared.json") != theirs.pop("prepared.json")  # they name the vocabulary
    assert ours == theirs


def test_a_vocabulary_that_does_not_fit_is_refused(tmp_path):
    (raw,) = write_raw(tmp_path / "raw", 200)
    run([raw], tmp_path / "data")
    with pytest.raises(ConfigError, match="leave --numbering and --min-count out"):
        run([raw], tmp_path / "again", vocabulary=tmp_path / "data", numbering=("first",))
    write_criteo(tmp_path / "train.txt", 50)
    with pytest.raises(ConfigError, match="says nothing of table 'C1'"):
        prepare("criteo", [tmp_path / "train.txt"], tmp_path / "other", Options(vocabulary=tmp_path / "data"))


def test_a_bad_line_stops_the_run_and_is_named(tmp_path):
    paths = write_raw(tmp_path / "raw", 200, files=2, bad=(150,))
    message = (
        r"day_1\.csv, line 52, column 'age': 'old' is not a number.*; mend it, or .* --on-error skip or quarantine"
    )
    for numbering in ("first", "frequency"):
        with pytest.raises(DataError, match=message):
            run(paths, tmp_path / "data", numbering=(numbering,))


def test_skipped_lines_are_counted_and_listed(tmp_path):
    paths = write_raw(tmp_path / "raw", 400, files=2, bad=(3, 150, 399))
    done = run(paths, tmp_path / "data", on_error="skip")
    assert (done.manifest.samples, done.manifest.skipped) == (397, 3)
    (listed,) = done.rejected
    found = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [(entry["file"], entry["line"], entry["column"]) for entry in found] == [
        (str(paths[0]), 5, "age"),
        (str(paths[0]), 152, "age"),
        (str(paths[1]), 201, "age"),
    ]


def test_lines_in_quarantine_can_be_mended_and_prepared(tmp_path):
    paths = write_raw(tmp_path / "raw", 400, files=2, bad=(3, 150, 399))
    done = run(paths, tmp_path / "data", on_error="quarantine")
    lines = done.rejected[1]
    assert lines.name == "quarantine.csv"
    mended = tmp_path / "raw" / "mended.csv"
    mended.write_text(lines.read_text().replace(",old,", ",77,"))
    run([mended], tmp_path / "rest", vocabulary=tmp_path / "data")
    assert all_samples(tmp_path / "rest").dense[:, 1].tolist() == [77, 77, 77]


def test_files_without_a_single_sample_are_refused_and_nothing_is_left(tmp_path):
    paths = write_raw(tmp_path / "raw", 5, bad=range(5))
    with pytest.raises(DataError, match=r"day_0\.csv has no line that gives a sample \(5 were put aside\)"):
        run(paths, tmp_path / "data", on_error="skip")
    assert not (tmp_path / "data").exists()


def test_parquet_with_lists_is_prepared(tmp_path):
    table = pa.table({"y": [1, 0, 1], "x": [0.5, 1.5, None], "tags": [["a", "b"], [], ["b"]], "user": [7, 7, None]})
    pq.write_table(table, tmp_path / "part.parquet")
    schema = 'format = "parquet"\nlabel = "y"\nnumeric = ["x"]\ncategorical = ["tags", "user"]\n'
    (tmp_path / "schema.toml").write_text(schema)
    options = Options(schema=tmp_path / "schema.toml", memory="64GB")
    prepare("parquet", [tmp_path / "part.parquet"], tmp_path / "data", options)
    batch = all_samples(tmp_path / "data")
    assert batch.sparse["tags"].values.tolist() == [2, 3, 3]
    assert batch.sparse["tags"].lengths().tolist() == [2, 0, 1]
    assert batch.sparse["user"].values.flatten().tolist() == [2, 2, 0]
    with pytest.raises(ConfigError, match=r"schema\.toml is a schema of parquet files, not of csv"):
        prepare("csv", [tmp_path / "part.parquet"], tmp_path / "other", options)


@pytest.mark.parametrize("columns", ["", 'columns = ["y", "c"]\n'])
def test_a_parquet_file_is_not_taken_for_text(tmp_path, columns):
    pq.write_table(pa.table({"y": [1, 0], "c": ["a", "b"]}), tmp_path / "x.parquet")
    (tmp_path / "schema.toml").write_text(f'format = "csv"\n{columns}label = "y"\ncategorical = ["c"]\n')
    with pytest.raises(DataError, match=r"x\.parquet is a parquet file, not csv: say `prepare parquet`"):
        run([tmp_path / "x.parquet"], tmp_path / "data")


DATED = 'format = "csv"\nlabel = "y"\ncategorical = ["c"]\ntime = { column = "t", kind = "iso" }\n'


def write_dated(directory, *files):
    directory.mkdir()
    (directory / "schema.toml").write_text(DATED)
    for number, cells in enumerate(files):
        lines = [f"1,a,{cell}" if cell else "" for cell in cells]
        (directory / f"part_{number}.csv").write_text("\n".join(["y,c,t", *lines]) + "\n")
    return [directory / f"part_{number}.csv" for number in range(len(files))]


@pytest.mark.parametrize("shard_samples", [1, 3, 100])
@pytest.mark.parametrize("numbering", ["first", "frequency"])
def test_samples_whose_days_are_out_of_order_are_named_with_the_remedy(tmp_path, numbering, shard_samples):
    days = ["2014-10-21 05:00:00", "when", "", "2014-10-22 00:00:00"], ["2014-10-22 01:00:00", "2014-10-21 23:00:00"]
    paths = write_dated(tmp_path / "raw", *days)
    options = {"numbering": (numbering,), "shard_samples": shard_samples, "on_error": "skip"}
    message = r"part_1\.csv, line 3: its date is 2014-10-21, but 2014-10-22 came before it.* put `sort = true` into"
    with pytest.raises(DataError, match=message):
        run(paths, tmp_path / "data", **options)
    (tmp_path / "raw" / "schema.toml").write_text(f"sort = true\n{DATED}")
    made = run(paths, tmp_path / "sorted", **options).manifest
    assert [(day.name, day.start, day.stop) for day in made.days] == [("2014-10-21", 0, 2), ("2014-10-22", 2, 4)]


def test_the_line_out_of_order_is_right_after_blank_and_bad_lines(tmp_path):
    cells = ["2014-10-22 05:00:00", "", "when", "2014-10-22 04:00:00", "", "2014-10-20 00:00:00"]
    paths = write_dated(tmp_path / "raw", cells)
    with pytest.raises(DataError, match=r"part_0\.csv, line 7: its date is 2014-10-20, but 2014-10-22"):
        run(paths, tmp_path / "data", on_error="skip", shard_samples=2)


def test_times_of_no_calendar_are_problems(tmp_path):
    paths = write_dated(tmp_path / "raw", ["1400000000", "1400000000000"])
    (tmp_path / "raw" / "schema.toml").write_text(DATED.replace("iso", "unix"))
    with pytest.raises(DataError, match=r"line 3, column 't': '1400000000000' is not a time of the kind unix"):
        run(paths, tmp_path / "data")


def test_table_names_may_have_any_character(tmp_path):
    (raw,) = write_raw(tmp_path / "raw", 50)
    schema = tmp_path / "raw" / "schema.toml"
    schema.write_text(schema.read_text().replace('table = "item"', 'table = "../i/t e=m"'))
    manifest = run([raw], tmp_path / "data", numbering=("../i/t e=m=frequency",)).manifest
    assert manifest.tables[2].name == "../i/t e=m"
    assert (tmp_path / "data" / "vocabulary" / manifest.tables[2].numbering.vocabulary.file).exists()
    assert Shown(tmp_path / "data").row("seen", 2)["value"].startswith("i")


def write_unique(path, num_lines):
    """Lines of Criteo's format in which no value ever repeats, but by chance."""
    words = np.random.default_rng(0).integers(0, 2**32, (num_lines, 26, 1)) >> np.arange(28, -4, -4)
    cells = np.full((num_lines, 26, 9), ord("\t"), np.uint8)
    cells[:, :, 1:] = np.frombuffer(b"0123456789abcdef", np.uint8)[words & 15]
    lines = np.full((num_lines, 14 + 26 * 9 + 1), ord("\t"), np.uint8)
    lines[:, 0], lines[:, -1] = ord("1"), ord("\n")
    lines[:, 14:-1] = cells.reshape(num_lines, -1)
    path.write_bytes(lines.tobytes())


@pytest.mark.long
def test_memory_stays_under_its_bound_when_vocabularies_do_not_fit(tmp_path):
    """220,000 lines have 5.7 million values, which take more than is left beside the program and its blocks."""
    write_unique(tmp_path / "train.txt", 220_000)
    peaks = {}
    for memory in ("2GB", "760MB"):
        destination = tmp_path / memory
        command = ["data", "prepare", "criteo", str(tmp_path / "train.txt"), str(destination), "--memory", memory]
        command += ["--shard-samples", "20000", "--numbering", "frequency", "--json"]
        ended = subprocess.run(
            [sys.executable, "-m", "benchmarks.prepare", *command],
            capture_output=True,
            text=True,
            timeout=250,
            check=True,
        )
        said, peaks[memory] = (json.loads(line) for line in ended.stdout.splitlines())
        assert said["samples"] == 220_000
    assert peaks["760MB"] < 760e6
    assert peaks["760MB"] < peaks["2GB"] - 10e6  # so the bound did bind
    assert contents(tmp_path / "2GB") == contents(tmp_path / "760MB")
