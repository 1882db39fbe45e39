"""Joining a cluster: what can't be joined is said at once; exit codes of signals survive Ray."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import cast

import pytest

from bagpipe.cluster import session
from bagpipe.cluster.crew import ScriptCrew
from bagpipe.cluster.launch import _way_on
from bagpipe.cluster.request import Request
from bagpipe.cluster.session import exit_codes_kept, join
from bagpipe.cluster.settings import Wiring
from bagpipe.cluster.watch import Watch
from bagpipe.config import parse_config
from bagpipe.errors import ClusterError, ConfigError


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    def refused(*_):
        raise AssertionError("Ray must not be asked")

    monkeypatch.setattr(session, "import_ray", lambda: None)
    monkeypatch.setattr(session, "_connect", refused)


def test_an_address_where_nothing_listens_is_refused_before_ray_is_asked():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and not listening
        with pytest.raises(ClusterError, match=r"nothing answers at 127.0.0.1:\d+ .*ray start --head"):
            join(f"127.0.0.1:{taken.getsockname()[1]}")


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "10.0.0.1", "", "head:port"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match=r"--address is .*HOST:PORT"):
        join(address)


def killed_within_ray():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit:
        raise SystemExit(1) from None


def test_the_exit_code_of_sigterm_survives_calls_that_make_another_of_it():
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(SystemExit) as ended, exit_codes_kept():
            killed_within_ray()
        assert ended.value.code == 143
        with pytest.raises(SystemExit) as ended, exit_codes_kept():
            sys.exit(7)
        assert ended.value.code == 7
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


def interrupted_within_ray():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        raise SystemExit(1) from None


def test_ctrl_c_survives_calls_that_make_an_exit_of_it():
    with pytest.raises(KeyboardInterrupt), exit_codes_kept():
        interrupted_within_ray()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("wrong", [{"servers": 0}, {"processors": 0}])
def test_a_launch_has_at_least_one_of_each_role(wrong):
    with pytest.raises(ConfigError, match="give at least 1"):
        Request(parse_config({}), **wrong)


def test_a_script_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no script .*train.py"):
        Request(parse_config({}), script=tmp_path / "train.py")


def test_checkpoints_elsewhere_are_for_scripts_and_not_where_a_run_that_fails_removes_them(tmp_path):
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.touch()
    for place in (tmp_path / "kept", run / "checkpoints", tmp_path):
        Request(parse_config({}), script=script, run_dir=run, checkpoints=place)
    for place in (run, run / "kept", tmp_path / "kept" / ".." / "run" / "logs"):
        with pytest.raises(ConfigError, match=r"is in the directory of the run, .* use .*run/checkpoints"):
            Request(parse_config({}), script=script, run_dir=run, checkpoints=place)
    with pytest.raises(ConfigError, match=r"train.py is a file"):
        Request(parse_config({}), script=script, checkpoints=script)
    with pytest.raises(ConfigError, match=r"kept goes with a script"):
        Request(parse_config({}), checkpoints=tmp_path / "kept")


def test_the_servers_of_a_script_may_use_its_checkpoints_beside_those_of_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.touch()
    for place, more in ((None, ()), (Path("kept"), (str(tmp_path / "kept"),))):
        request = Request(parse_config({}), script=script, checkpoints=place)
        crew = ScriptCrew(request, ModuleType("ray"), cast(Watch, None), tmp_path / "run")
        crew.wiring = Wiring(bytes(16), None, None)
        monkeypatch.setattr(crew, "host", lambda _: "127.0.0.1:0")
        options = crew._server_options(0)
        options.check()
        assert options.checkpoints == (str(tmp_path / "run" / "checkpoints"), *more)


def test_a_script_that_failed_is_told_another_way_on_than_a_configuration(tmp_path):
    script = tmp_path / "train.py"
    script.touch()
    assert _way_on(Request(parse_config({})), Path("run")) == "--resume run"
    assert _way_on(Request(parse_config({}), script=script), Path("run")) == f"--checkpoints run/checkpoints {script}"


def test_the_trainer_has_the_threads_that_are_configured():
    assert Request(parse_config({"threads": 3}), trainer_cores=2).threads == 3
    assert Request(parse_config({}), trainer_cores=2).threads == 2
