"""Directories that every user can write to: refused with the remedy, or never made."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest

import bagpipe
from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.disk import Disk, make_directories
from bagpipe.cluster import keeper
from bagpipe.cluster.log import LogPlace
from bagpipe.cluster.shared_directory import Sight, prove
from bagpipe.config import parse_config
from bagpipe.errors import ConfigError, WireError
from bagpipe.job import claim
from bagpipe.resuming import find_initial_point, find_resume_point, note_config, open_run
from bagpipe.whole_file import whole_file
from bagpipe.wire.keys import load_keys, write_keys
from harness.checkpointed import World, save
from harness.plain import make_batches, make_net

OPEN = [0o777, 0o1777, 0o757, 0o702]
SHARED = [0o700, 0o755, 0o775, 0o2770]
"""With a group, perhaps: on purpose."""
CONFIG = parse_config({})


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def refused(call, path):
    with pytest.raises(ConfigError, match=rf"{path} has mode \d+, .*chmod o-w {path}, or give a directory in it"):
        call()


@pytest.mark.parametrize("bits", OPEN)
def test_a_run_does_not_begin_in_such_a_directory(bits, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(bits)
    refused(lambda: claim(run, CONFIG), run)
    assert claim(run / "of-mine", CONFIG) == run / "of-mine"


@pytest.mark.parametrize("bits", SHARED)
def test_a_run_may_begin_in_any_other(bits, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    run.chmod(bits)
    assert claim(run, CONFIG) == run


@pytest.mark.parametrize("within", [".", "checkpoints"])
@pytest.mark.parametrize("bits", OPEN)
def test_a_run_does_not_go_on_from_such_a_directory(bits, within, tmp_path):
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    note_config(run, CONFIG)
    assert open_run(run, []).directory == run
    (run / within).chmod(bits)
    refused(lambda: open_run(run, []), run / within)


@pytest.mark.parametrize("bits", OPEN)
def test_checkpoints_are_neither_written_to_nor_taken_from_such_a_directory(bits, tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    kept.chmod(bits)
    for resume in (None, True, "auto"):
        refused(lambda resume=resume: find_resume_point(resume, kept), kept)
    refused(lambda: find_initial_point(kept), kept)
    model = make_net()
    with pytest.raises(ConfigError, match=rf"chmod o-w {kept}"):
        bagpipe.prepare(
            model, bagpipe_sgd(model), make_batches(3), cache=40, checkpoint=bagpipe.Checkpointing(kept, every=1)
        )


def bagpipe_sgd(model):
    import torch

    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_whatever_the_umask_nothing_of_a_run_can_be_written_by_others(tmp_path, no_umask):
    run = claim(tmp_path / "run", CONFIG)
    note_config(run, CONFIG)
    LogPlace.make(run / "logs")
    world = World()
    world.train(3)
    save(Checkpoints(run / "checkpoints"), world, servers=1, full=True)
    with whole_file(run / "whole") as file:
        file.write(b"a")
    make_directories(Disk(), run / "deep" / "er")
    found = [run, *run.rglob("*")]
    assert len(found) > 8
    assert [str(path) for path in found if mode(path) & stat.S_IWOTH] == []


def test_the_token_of_a_shared_directory_is_for_its_owner_alone(tmp_path, no_umask):
    sight = Sight(tmp_path / "run" / "checkpoints")
    prove("server 0", sight.place, sight.token)
    assert mode(sight.place) == 0o700
    assert not mode(sight.place.parent) & stat.S_IWOTH
    assert [path.name for path in sight.place.iterdir() if mode(path) & stat.S_IWOTH] == []
    sight.check(["server 0"])
    sight.close()


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o660, 0o777])
def test_a_file_of_keys_that_others_can_read_or_write_is_refused(bits, tmp_path, no_umask):
    for path, role in zip(write_keys(tmp_path / "run"), ("server", "client"), strict=True):
        assert mode(path) == 0o600
        load_keys(path, role)
        path.chmod(bits)
        with pytest.raises(WireError, match=rf"mode {bits:04o}, others can use it: chmod 600 {path}"):
            load_keys(path, role)


FAKE_RAY = """
import json, os
def init(**options):
    os.makedirs(options["_temp_dir"], exist_ok=True)
    os.chmod(options["_temp_dir"], 0o777)  # as Ray does
    open(os.path.join(os.environ["TMPDIR"], "scratch"), "w").close()
    init.directory = options["_temp_dir"]
class _Context:
    gcs_address = "127.0.0.1:1"
def get_runtime_context():
    context = _Context()
    context.gcs_address = init.directory
    return context
"""


def test_the_files_of_ray_lie_where_nobody_else_can_enter(tmp_path, scratch):
    (tmp_path / "ray.py").write_text(FAKE_RAY)
    process = subprocess.Popen(
        [sys.executable, keeper.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "TMPDIR": str(scratch)},
    )
    try:
        process.stdin.write(b"{}\n")
        process.stdin.flush()
        said = json.loads(process.stdout.readline())
        (private,) = scratch.iterdir()
        assert said["address"].startswith(f"{private}/")
        assert mode(private) == 0o700
        assert list(scratch.rglob("scratch")) == [private / "tmp" / "scratch"]
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()
    assert list(scratch.iterdir()) == []


def test_the_names_of_rays_sockets_are_not_too_long():
    longest = "x" * keeper.LONGEST_TEMP_DIR + "/bagpipe-ray-12345678/r/session_2026-01-02_03-04-05_678901_4194304"
    assert len(f"{longest}/sockets/plasma_store") <= 107
