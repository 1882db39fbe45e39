"""`bagpipe launch` refuses what would have no effect, by name and before anything is started."""

import pytest
from typer.testing import CliRunner

from bagpipe.cli import app
from bagpipe.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch):
    def started(*_):
        raise AssertionError("the launch has begun")

    monkeypatch.setattr("bagpipe.cluster.launch.launch", started)


def launch(*words):
    result = CliRunner().invoke(app, ["launch", *map(str, words)])
    assert result.exception is not None
    raise result.exception


def refused(*words):
    with pytest.raises(ConfigError) as error:
        launch(*words)
    return str(error.value)


def begins(*words):
    with pytest.raises(AssertionError, match="has begun"):
        launch(*words)
    return True


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def test_sums_in_any_order_are_refused():
    said = refused("--trainers", 2, "--set", "sync.deterministic=false")
    assert "sync.deterministic" in said
    assert "leave it out" in said


def test_check_is_refused_for_trainers_in_processes_of_their_own():
    said = refused("--trainers", 3, "--set", "check=true")
    assert "check" in said
    assert "bagpipe train --set trainers=3 --set check=true" in said
    assert begins("--set", "check=true"), "one trainer is checked"


def test_gpus_are_refused_since_trainers_use_none():
    assert "--trainer-gpus 1: trainers use no GPU yet" in refused("--trainer-gpus", 1)
    assert begins("--trainer-gpus", 0)


@pytest.mark.parametrize(
    ("setting", "named"),
    [("cache=1GB", "cache = '1GB'"), ("check=true", "check = True"), ("model.dim=8", "model = {'dim': 8}")],
)
def test_settings_that_a_script_says_itself_are_refused_with_it(script, setting, named):
    said = refused("--set", setting, script)
    assert named in said
    assert script.name in said
    assert "bagpipe.prepare" in said


def test_data_processors_are_refused_with_a_script(script):
    said = refused("--processors", 2, script)
    assert "--processors 2" in said
    assert "processes=N" in said


def test_settings_that_a_launch_decides_are_for_scripts_too(script):
    chosen = ("trainers=2", "sync.design=lrpp", "assign=aware", "recovery.every=5", "store=mapped", "threads=1")
    assert begins(*(word for each in chosen for word in ("--set", each)), script)
