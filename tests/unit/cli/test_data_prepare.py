"""`bagpipe data prepare` and `bagpipe data show`."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from bagpipe.cli import main
from bagpipe.data.manifest import load_manifest
from bagpipe.data.prepare import job, progress
from benchmarks.prepare import write_criteo
from harness.prepared import contents, write_raw

RAW = Path(__file__).parents[2] / "raw"
DOWNLOADED = {"criteo": (RAW / "criteo.txt", 26), "avazu": (RAW / "avazu.csv", 21)}


@pytest.fixture
def bagpipe(monkeypatch, capsys, tmp_path):
    """The command, run in this process."""

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["bagpipe", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return SimpleNamespace(returncode=ended.value.code or 0, stdout=out, stderr=" ".join(err.split()))

    return run


@pytest.mark.parametrize("kind", DOWNLOADED)
def test_files_as_downloaded_are_prepared_and_train_exactly(bagpipe, tmp_path, kind):
    path, tables = DOWNLOADED[kind]
    made = json.loads(bagpipe("data", "prepare", kind, path, tmp_path / "data", "--json").stdout)
    assert (made["samples"], made["shards"], made["tables"], made["skipped"]) == (200, 1, tables, 0)
    run = ("--set", f"data.path={tmp_path / 'data'}", "--set", "iterations=3", "--set", "batch_size=32")
    small = ("--set", "model.name=wide_deep", "--set", "model.dim=8", "--json")
    assert json.loads(bagpipe("train", *run, *small).stdout)["samples"] == 96
    assert json.loads(bagpipe("verify", *run, *small).stdout)["identical"] is True


def test_a_summary_and_its_json_say_the_same(bagpipe, tmp_path):
    paths = write_raw(tmp_path / "raw", 500, files=2, bad=(7,))
    options = ("--schema", tmp_path / "raw" / "schema.toml", "--on-error", "quarantine", "--test", "day_1.csv")
    options += ("--numbering", "frequency", "--min-count", "city=2", "--memory", "64GB", "--shard-samples", "200")
    ended = bagpipe("data", "prepare", "csv", *paths, tmp_path / "data", *options, "--json")
    assert ended.returncode == 0, ended.stderr
    made = json.loads(ended.stdout)
    assert (made["samples"], made["shards"], made["tables"], made["skipped"]) == (499, 3, 3, 1)
    assert made["parts"] == {"train": 249, "test": 250}
    assert [Path(name).name for name in made["skipped_files"]] == ["skipped.jsonl", "quarantine.csv"]
    ended = bagpipe("data", "prepare", "csv", *paths, tmp_path / "again", *options)
    assert "train 249, test 250" in ended.stdout
    assert contents(tmp_path / "data") == contents(tmp_path / "again")


def test_files_of_one_name_in_different_directories_are_days_of_their_own(bagpipe, tmp_path):
    """Also where one of them follows the other, and where a name is only that of a compressed file."""
    for number, place in enumerate(("eu/click", "us/click")):
        (tmp_path / place).mkdir(parents=True)
        write_raw(tmp_path / place, 300 + number, files=2, seed=number)
        (tmp_path / place / "schema.toml").rename(tmp_path / "schema.toml")
    first = tmp_path / "us" / "click" / "day_0.csv"
    first.with_name("day_0.csv.gz").write_bytes(gzip.compress(first.read_bytes()))
    first.unlink()
    paths = [tmp_path / "us" / "click", tmp_path / "eu" / "click"]
    options = ("--schema", tmp_path / "schema.toml", "--memory", "64GB", "--json", "--test", "us/click/day_0.csv")
    ended = bagpipe("data", "prepare", "csv", *paths, tmp_path / "data", *options)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["parts"] == {"train": 300, "test": 301}
    days = [
        ("eu/click/day_0.csv", 0, 150), ("eu/click/day_1.csv", 150, 300),
        ("us/click/day_0.csv", 300, 450), ("us/click/day_1.csv", 450, 601),
    ]  # fmt: skip
    assert [(day.name, day.start, day.stop) for day in load_manifest(tmp_path / "data").days] == days
    pair = [path / "day_1.csv" for path in reversed(paths)]
    ended = bagpipe("data", "prepare", "csv", *pair, tmp_path / "pair", *options[:-1], "0.1")
    assert json.loads(ended.stdout)["days"] == 2
    ended = bagpipe("data", "prepare", "csv", *pair, tmp_path / "other", *options[:-1], "day_1.csv")
    assert ended.returncode == 1
    assert "no day 'day_1.csv'" in json.loads(ended.stdout)["message"]
    assert "eu/click/day_1.csv, us/click/day_1.csv" in json.loads(ended.stdout)["message"]


def test_errors_are_one_line_and_say_how_to_go_on(bagpipe, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "BLOCK_BYTES", 3000)
    paths = write_raw(tmp_path / "raw", 500, bad=(300,))
    command = ("data", "prepare", "csv", paths[0], tmp_path / "data", "--schema", tmp_path / "raw" / "schema.toml")
    command += ("--memory", "64GB", "--shard-samples", "100")
    ended = bagpipe(*command)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"What is finished stays in {tmp_path / 'data'}: the same command goes on from")
    assert "day_0.csv, line 302, column 'age': 'old' is not a number" in ended.stderr
    said = json.loads(bagpipe(*command, "--json").stdout)
    assert said["error"] == "DataError"
    assert json.loads(bagpipe(*command, "--on-error", "skip", "--json").stdout)["samples"] == 499


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("csv",), "need a schema"),
        (("criteo", "--numbering", "C1=best"), "'best': give first, frequency, hash:SIZE or ids"),
        (("criteo", "--numbering", "C99=ids"), "there is no table 'C99'"),
        (("criteo", "--memory", "10MB"), "memory is 10MB; the program takes"),
    ],
)
def test_wrong_options_are_explained(bagpipe, tmp_path, arguments, message):
    write_criteo(tmp_path / "train.txt", 20)
    ended = bagpipe("data", "prepare", arguments[0], tmp_path / "train.txt", tmp_path / "data", *arguments[1:])
    assert ended.returncode == 1
    assert message in ended.stderr
    assert not (tmp_path / "data").exists()


def test_show_prints_values_and_as_json(bagpipe, tmp_path):
    write_criteo(tmp_path / "train.txt", 50)
    cells = (tmp_path / "train.txt").read_text().splitlines()[1].split("\t")
    bagpipe("data", "prepare", "criteo", tmp_path / "train.txt", tmp_path / "data", "--memory", "64GB")
    shown = bagpipe("data", "show", tmp_path / "data", "--sample", 1, "--count", 2)
    assert cells[14] in shown.stdout
    assert "sample 2: label" in shown.stdout
    (sample,) = json.loads(bagpipe("data", "show", tmp_path / "data", "--sample", 1, "--json").stdout)["samples"]
    assert [cell["value"] for cell in sample["categorical"].values()] == cells[14:]
    row = sample["categorical"]["C3"]["id"]
    said = json.loads(bagpipe("data", "show", tmp_path / "data", "--feature", "C3", "--id", row, "--json").stdout)
    assert (said["value"], said["table"]) == (cells[16], "C3")
    assert "go together" in bagpipe("data", "show", tmp_path / "data", "--feature", "C3").stderr


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_interrupted_command_says_how_to_go_on_and_goes_on(bagpipe, tmp_path, number):
    write_criteo(tmp_path / "train.txt", 80_000)
    command = ["data", "prepare", "criteo", tmp_path / "train.txt", tmp_path / "data", "--shard-samples", "4000"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from bagpipe.cli import main; main()", *map(str, command)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    while not progress.has_progress(tmp_path / "data") and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(number)
    said = " ".join(process.communicate(timeout=100)[1].split())
    assert process.returncode in (130, 143, -number)
    assert f"What is finished stays in {tmp_path / 'data'}: the same command goes on from there" in said
    assert bagpipe(*command, "--memory", "64GB").returncode == 0
    whole = [*command[:4], tmp_path / "whole", *command[5:]]
    assert bagpipe(*whole, "--memory", "64GB").returncode == 0
    assert contents(tmp_path / "data") == contents(tmp_path / "whole")
