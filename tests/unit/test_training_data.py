"""What `bagpipe train` reads: the parts that a data set names, or its first samples, by threads or processes."""

from __future__ import annotations

import zlib

import pytest

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.disk import Disk
from bagpipe.config import load_config
from bagpipe.data import Shards, generated, write
from bagpipe.data.manifest import MANIFEST, RangeEntry
from bagpipe.errors import ConfigError, DataError
from bagpipe.job import prepare
from bagpipe.training import train
from harness import prepared


@pytest.fixture
def divided(tmp_path):
    """Makes shards of 1,000 samples with these parts."""

    def make(**parts):
        path = tmp_path / "data"
        manifest = write(generated("tiny", 1000), path)
        entries = tuple(RangeEntry(name=name, start=start, stop=stop) for name, (start, stop) in parts.items())
        (path / MANIFEST).write_text(manifest.model_copy(update={"parts": entries}).sealed().text())
        return path

    return make


def job(path, run_dir, *settings):
    return prepare(load_config(None, [f"data.path={path}", "batch_size=100", *settings]), run_dir)


def samples(dataset):
    """The first and last numeric feature."""
    dense = [batch.dense for batch in dataset.batches(64)]
    return dataset.num_samples, float(dense[0][0, 0]), float(dense[-1][-1, 0])


def test_a_data_set_with_parts_is_trained_and_evaluated_on_them(divided, tmp_path):
    path = divided(train=(0, 600), validation=(600, 850), test=(850, 1000))
    found = job(path, tmp_path / "run", "data.held_out=0.5")
    assert samples(found.train) == samples(Shards(path).part(0, 600))
    assert samples(found.held_out) == samples(Shards(path).part(600, 850))
    assert found.iterations == 6


@pytest.mark.parametrize("validation", [{}, {"validation": (800, 800)}])
def test_without_validation_some_of_train_is_held_out_and_test_stays_unseen(divided, tmp_path, validation):
    path = divided(train=(0, 800), **validation, test=(800, 1000))
    found = job(path, tmp_path / "run")
    assert samples(found.train) == samples(Shards(path).part(0, 720))
    assert samples(found.held_out) == samples(Shards(path).part(720, 800))


def test_without_parts_the_last_samples_are_held_out(divided, tmp_path):
    path = divided()
    found = job(path, tmp_path / "run", "data.held_out=0.2")
    assert samples(found.train) == samples(Shards(path).part(0, 800))
    assert samples(found.held_out) == samples(Shards(path).part(800, 1000))


def test_too_few_samples_are_refused(divided, tmp_path):
    with pytest.raises(DataError, match="has 5 samples, too few to hold out 10%"):
        job(divided(train=(0, 5)), tmp_path / "run")


def test_the_number_of_processes_is_checked():
    assert load_config(None, []).data.processes == 0
    with pytest.raises(ConfigError, match=r"data\.processes.*-1"):
        load_config(None, ["data.processes=-1"])


def test_checkpoints_name_the_vocabularies_of_prepared_data(tmp_path):
    prepared.run(prepared.write_raw(tmp_path / "raw"), tmp_path / "data")
    settings = [
        f"data.path={tmp_path / 'data'}",
        "model.name=wide_deep",
        "model.dim=4",
        "batch_size=64",
        "iterations=4",
    ]
    config = load_config(None, [*settings, "checkpoint.every=2"])
    train(prepare(config, tmp_path / "run"), lambda *_: None)
    manifest = Checkpoints(tmp_path / "run" / "checkpoints").latest().manifest
    files = sorted((tmp_path / "data" / "vocabulary").iterdir())
    assert files
    assert sorted(entry.path for entry in manifest.vocabulary) == list(map(str, files))
    assert {int(entry.checksum) for entry in manifest.vocabulary} == {zlib.crc32(file.read_bytes()) for file in files}


@pytest.mark.parametrize("call", ["make_directory", "sync_directory"])
def test_ctrl_c_while_the_run_directory_is_made_leaves_nothing(tmp_path, monkeypatch, call):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Disk, call, interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(load_config(None, ["data.preset=tiny"]))
    assert list(tmp_path.iterdir()) == []
