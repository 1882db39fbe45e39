"""A run that begins with the checkpoint of another one, on other data and larger tables, has the bits of the plain
reference that was trained on both (I1)."""

from __future__ import annotations

import json
import sys

import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.point import ResumePoint
from bagpipe.cli import main
from bagpipe.errors import CheckpointError, ConfigError
from bagpipe.job import open_job
from bagpipe.resuming import note_config, open_run
from bagpipe.training import train, train_configured, train_reference, verify
from harness.daily import day_job, state_of, trained_reference, write_days


def quiet(*_):
    """Reports nothing."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("days")
    write_days(path)
    return path


@pytest.fixture(scope="module")
def first_day(data, tmp_path_factory):
    """The reference after the first day, and the run with its checkpoints."""
    run = tmp_path_factory.mktemp("first") / "run"
    job = day_job(data, run, 1, checkpoint={"every": 4})
    train(job, quiet)
    return trained_reference(day_job(data, run.parent / "plain", 1)), run


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="one trainer"),
        pytest.param({"trainers": 2}, id="two trainers"),
        pytest.param({"servers": 2}, id="servers"),
        pytest.param({"trainers": 2, "servers": 2, "store": "mapped"}, id="two trainers and servers with files"),
    ],
)
def test_the_second_day_has_the_bits_of_the_reference(data, first_day, tmp_path, settings):
    before, run = first_day
    job = day_job(data, tmp_path / "run", 2, init_from=str(run), checkpoint={"every": 5}, **settings)
    expected = state_of(trained_reference(job, before))
    found, _ = train_configured(job, quiet, hold=True)
    assert expected.differing(found) == []
    assert len(found.rows["user"][0]) > len(before.tables[0].written), "rows of the first day, and new ones"
    assert max(found.rows["user"][0]) >= 300


@pytest.mark.parametrize("lr", [0.3, {"name": "cosine", "lr": 0.3, "iterations": 40}], ids=["a rate", "a schedule"])
def test_rates_are_those_of_the_run_that_begins(data, first_day, tmp_path, lr):
    before, run = first_day
    rates = {"row_optimizer": {"name": "adam", "lr": lr}, "dense_optimizer": {"name": "adam", "lr": 0.2}}
    job = day_job(data, tmp_path / "run", 2, init_from=str(run), **rates)
    found, _ = train_configured(job, quiet, hold=True)
    assert state_of(trained_reference(job, before)).differing(found) == []


def test_verify_compares_with_the_reference_that_begins_there(data, first_day, tmp_path):
    before, run = first_day
    job = day_job(data, tmp_path / "run", 2, init_from=str(run))
    found = verify(job, quiet)
    assert found["identical"]
    assert found["parameters_sha256"] == state_of(trained_reference(job, before)).sha256()
    assert found["parameters_sha256"] != train_reference(day_job(data, tmp_path / "other", 2), quiet)[0].sha256()


def test_its_own_checkpoints_are_what_it_is_resumed_from(data, first_day, tmp_path):
    before, first = first_day
    settings = {"init_from": str(first), "checkpoint": {"every": 3, "keep": 9}}
    job = day_job(data, tmp_path / "run", 2, **settings)
    whole = train(job, quiet)
    assert whole["parameters_sha256"] == state_of(trained_reference(job, before)).sha256()
    newest = Checkpoints(first / "checkpoints").latest()
    assert whole["initialised_from"] == str(newest.directory)
    assert json.loads((job.run_dir / "summary.json").read_text())["initialised_from"] == str(newest.directory)

    checkpoints = Checkpoints(job.run_dir / "checkpoints")
    own = checkpoints.open(checkpoints.numbers()[0])
    assert own.manifest.base is None, "rows of the other run's checkpoint are in the first one of this run"
    assert {int(row) for ids, _ in own.rows("user") for row in ids} > set(before.tables[0].written)

    (job.run_dir / "summary.json").unlink()
    checkpoints.discard_after(own.done)
    resumed = open_run(job.run_dir, [])
    assert (resumed.point.done, str(resumed.config.init_from)) == (own.done, str(newest.directory))
    went_on = train(open_job(resumed.config, job.run_dir), quiet, resumed.point.checkpoint)
    assert went_on["parameters_sha256"] == whole["parameters_sha256"]
    assert went_on["resumed_from"] == own.done


def test_a_run_killed_before_its_first_checkpoint_begins_with_the_same_state_again(data, first_day, tmp_path):
    before, first = first_day
    job = day_job(data, tmp_path / "run", 2, init_from=str(first), checkpoint={"every": 100})
    expected = state_of(trained_reference(job, before)).sha256()

    def stop(done, _note):
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_configured(job, stop)
    note_config(job.run_dir, job.config)  # what `kill -9` would have left
    again = open_run(job.run_dir, [])
    assert again.point.checkpoint is None
    assert train(open_job(again.config, job.run_dir), quiet)["parameters_sha256"] == expected


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"model": {"name": "deepfm", "dim": 4}}, r"table 'user' has dims \(3, 1\) in the checkpoint and \(4, 1\)"),
        ({"row_optimizer": {"name": "adagrad"}}, "table 'user' has optimizer adam in the checkpoint and adagrad"),
        ({"dense_optimizer": {"name": "sgd"}}, "'dense' was of class Adam when it was kept, and is of class SGD"),
    ],
)
def test_another_model_or_optimizer_is_refused_by_name(data, first_day, tmp_path, settings, what):
    job = day_job(data, tmp_path / "run", 2, init_from=str(first_day[1]), **settings)
    with pytest.raises(CheckpointError, match=what):
        train_configured(job, quiet)


def test_tables_that_have_shrunk_are_refused_by_name(data, first_day, tmp_path):
    day_two = day_job(data, tmp_path / "two", 2, init_from=str(first_day[1]), checkpoint={"every": 5})
    train(day_two, quiet)
    with pytest.raises(
        CheckpointError,
        match=r"'user' has 420 rows in the checkpoint and only 300 rows in the model.*"
        r"'city' has 20 rows in the checkpoint and only 12",
    ):
        train_configured(day_job(data, tmp_path / "run", 1, init_from=str(tmp_path / "two")), quiet)


def test_the_commands_take_a_run_to_begin_with(data, first_day, tmp_path, monkeypatch, capsys):
    before, run = first_day
    (tmp_path / "day.toml").write_text(
        f'data.path = "{data / "2"}"\nseed = 2\nmodel = {{ name = "deepfm", dim = 3 }}\nbatch_size = 24\ncache = 800\n'
        'threads = 1\nrow_optimizer = { name = "adam", lr = 0.02 }\ndense_optimizer = { name = "adam", lr = 0.01 }\n'
    )
    expected = state_of(trained_reference(day_job(data, tmp_path / "plain", 2), before)).sha256()
    for command in (["train", "--run-dir", str(tmp_path / "run")], ["verify"]):
        words = [*command, str(tmp_path / "day.toml"), "--init-from", str(run), "--json"]
        monkeypatch.setattr(sys, "argv", ["bagpipe", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        said = json.loads(capsys.readouterr().out)
        assert not ended.value.code
        assert said["parameters_sha256"] == expected


def test_a_name_that_is_none_of_a_checkpoint_is_refused(tmp_path):
    for name in ("abc", "12x", "00000007"):
        with pytest.raises(CheckpointError, match=r"not the name of a checkpoint|there is no checkpoint"):
            ResumePoint(0, tmp_path / name, "0" * 16).open()


def test_nothing_to_begin_with_is_refused(data, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds no checkpoint to begin with: check the path"):
        day_job(data, tmp_path / "run", 2, init_from=str(tmp_path / "empty"))
    assert not (tmp_path / "run").exists()


def test_a_run_that_goes_on_keeps_what_it_began_with(data, first_day, tmp_path):
    job = day_job(data, tmp_path / "run", 2, init_from=str(first_day[1]), checkpoint={"every": 5})
    train(job, quiet)
    with pytest.raises(ConfigError, match=r"init_from is .* in the run"):
        open_run(job.run_dir, [f"init_from={tmp_path}"])
