"""Which run is resumed, with which settings, and what is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bagpipe import resuming
from bagpipe.checkpoint.disk import Disk
from bagpipe.checkpoint.point import START
from bagpipe.config import Config, parse_config
from bagpipe.errors import CheckpointError, ConfigError
from bagpipe.job import claim


def make_run(path, settings=None, ended=False, age=0):
    path.mkdir(parents=True)
    resuming.note_config(path, parse_config(settings or {}))
    if ended:
        (path / "summary.json").write_text("{}")
    when = 2_000_000_000 - age
    os.utime(path / "config.json", (when, when))
    return path


@pytest.fixture
def synced(monkeypatch):
    """Directories that were synced, each with the names that were in it then."""
    found = []

    def note(_, path):
        assert path.is_dir()
        assert not path.is_symlink(), "the system refuses these"
        found.append((path, sorted(each.name for each in path.iterdir())))

    monkeypatch.setattr(Disk, "sync_directory", note)
    return found


def test_what_a_run_is_outlives_a_crash_of_the_machine(tmp_path, synced):
    make_run(tmp_path / "run")
    assert synced == [(tmp_path / "run", ["config.json"])]
    (tmp_path / "link").symlink_to(tmp_path / "run")
    resuming.note_config(tmp_path / "link", parse_config({}))
    assert synced[1:] == synced[:1]


def test_the_name_of_a_run_outlives_a_crash_of_the_machine(tmp_path, monkeypatch, synced):
    monkeypatch.chdir(tmp_path)
    first = claim(None, Config())
    assert synced == [(tmp_path, ["runs"]), (tmp_path / "runs", [first.name])]
    second = claim(None, Config())
    assert second != first
    assert synced[2:] == [(tmp_path / "runs", sorted([first.name, second.name]))]
    synced.clear()
    assert claim(Path("a/b"), Config()) == Path("a/b")
    assert synced == [(tmp_path, ["a", "runs"]), (tmp_path / "a", ["b"])]


def test_runs_may_lie_on_another_disk(tmp_path, monkeypatch, synced):
    (tmp_path / "large").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("runs").symlink_to(tmp_path / "large")
    made = claim(None, Config())
    assert made.parent == Path("runs")
    assert synced == [(tmp_path / "large", [made.name])]
    assert claim(Path("runs/mine"), Config()).is_dir()


def test_a_run_directory_that_can_not_be_made_or_is_not_empty_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").touch()
    for path in (None, Path("runs"), Path("runs/mine")):
        with pytest.raises(ConfigError, match=r"can't make the run directory runs.*Not a directory: choose another"):
            claim(path, Config())
    with pytest.raises(ConfigError, match="is not empty: choose another"):
        claim(tmp_path, Config())


def test_the_newest_run_that_has_not_ended_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run there was begun with --checkpoint-every N"):
        resuming.find_run(None)
    runs = tmp_path / "runs"
    make_run(runs / "c-newest-but-ended", ended=True)
    (runs / "b-no-run").mkdir()
    with pytest.raises(ConfigError, match="all 1 runs there have ended"):
        resuming.find_run(None)
    make_run(runs / "z-old", age=1000)
    make_run(runs / "a-young", age=10)
    assert resuming.find_run(None).name == "a-young"
    assert resuming.find_run(runs / "z-old").name == "z-old"


def test_a_path_that_is_no_run_or_has_ended_is_refused(tmp_path):
    ended = make_run(tmp_path / "ended", ended=True)
    (tmp_path / "config.toml").touch()
    for path, words in (
        (ended, "has ended"),
        (tmp_path / "config.toml", "give the directory of a run"),
        (tmp_path / "nothing", "give the directory of a run"),
        (tmp_path, r"no config\.json"),
    ):
        with pytest.raises(ConfigError, match=words):
            resuming.find_run(path)


@pytest.mark.parametrize(
    "override",
    [
        "lookahead=3",
        "cache=70",
        "policy=lru",
        "store=mapped",
        "servers=2",
        "sync.design=lrpp",
        "check=true",
        "checkpoint.every=5",
        "recovery.every=5",
        "wire.security=none",
        "data.workers=2",
        "data.processes=1",
    ],
)
def test_what_cannot_change_the_result_may_change(tmp_path, override):
    resumed = resuming.open_run(make_run(tmp_path / "run", {"seed": 3}), [override])
    assert resumed.notes == [f"{tmp_path / 'run'} has no checkpoint yet: it begins again"]
    assert resumed.config.seed == 3
    assert resumed.config != parse_config({"seed": 3})


@pytest.mark.parametrize("override", ["trainers=2", "assign=round_robin", "threads=1"])
def test_what_changes_it_by_rounding_is_noted(tmp_path, override):
    notes = resuming.open_run(make_run(tmp_path / "run"), [override]).notes
    assert notes[0].startswith(f"{override.split('=')[0]} was ")
    assert "by rounding" in notes[0]


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "batch_size=64",
        "model.name=deepfm",
        "model.dim=8",
        "row_optimizer.lr=0.1",
        "row_optimizer.name=sgd",
        "dense_optimizer.lr=1.0",
        "data.samples=5",
        "data.shuffle=true",
        "iterations=7",
        "epochs=2",
    ],
)
def test_everything_else_is_refused_by_name_with_both_values(tmp_path, override):
    key, value = override.split("=")
    with pytest.raises(ConfigError, match=rf"(?i){key} is .* in the run .*, and .*{value}.* is asked for"):
        resuming.open_run(make_run(tmp_path / "run"), [override])


def test_every_setting_is_decided_on():
    fields = set(Config.model_fields)
    named = {key.split(".")[0] for key in resuming.FREE + resuming.ROUNDING}
    assert named < fields, "a setting that may change is not there any more"
    fixed = {"model", "row_optimizer", "dense_optimizer", "batch_size", "iterations", "epochs", "seed", "init_from"}
    assert fields - named == fixed, "decide whether a new setting may change when a run is resumed"


def test_reading_old_rows_on_purpose_cannot_begin_or_end_in_the_middle(tmp_path):
    stale = {"policy": "windowed", "policy_options": {"mode": "stale"}}
    for settings, override in (({"policy": "windowed"}, "policy_options.mode=stale"), (stale, "policy=lookahead")):
        run = make_run(tmp_path / override, settings)
        with pytest.raises(ConfigError, match="can't be changed in the middle"):
            resuming.open_run(run, [override])


def test_a_damaged_configuration_is_refused(tmp_path):
    run = make_run(tmp_path / "run")
    for text in ("{", "[]", json.dumps({"sead": 1})):
        (run / "config.json").write_text(text)
        with pytest.raises(ConfigError):
            resuming.open_run(run, [])


def test_a_run_is_gone_on_with_once_at_a_time(tmp_path):
    run = make_run(tmp_path / "run")
    with resuming.holding(run):
        with pytest.raises(ConfigError, match="still going"), resuming.holding(run):
            pytest.fail("it was held twice")
        resuming.note_config(run, parse_config({"seed": 5}))
    with resuming.holding(run):
        assert resuming.open_run(run, []).config.seed == 5


def test_checkpoints_that_cannot_be_opened_are_not_taken_for_none(tmp_path):
    run = make_run(tmp_path / "run")
    assert not resuming.has_checkpoint(run)
    assert resuming.open_run(run, []).point == START
    (run / "checkpoints" / "00000010").mkdir(parents=True)
    (run / "checkpoints" / "00000010" / "manifest.json").write_text('{"version": 2}')
    assert resuming.has_checkpoint(run)
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .*checkpoints can be used .*00000010"):
        resuming.open_run(run, [])
