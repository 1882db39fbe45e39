"""Settings and records that are too deep, too large, or hold numbers without end: a typed error that names the file."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
import zlib

import pytest
from xxhash import xxh64_hexdigest

from bagpipe.bounded import DEPTH_MAX, RECORD_BYTES_MAX, SETTINGS_BYTES_MAX
from bagpipe.checkpoint.disk import Disk
from bagpipe.checkpoint.manifest import decode_manifest
from bagpipe.checkpoint.point import read_manifest
from bagpipe.checkpoint.tensors import decode
from bagpipe.checkpoint.tree import unpack_tree
from bagpipe.config import load_config, parse_config
from bagpipe.data import Shards, generated, write
from bagpipe.data.manifest import load_manifest
from bagpipe.data.prepare.finished import PREPARED, check_finished
from bagpipe.data.prepare.progress import Working
from bagpipe.data.prepare.schema import load_schema
from bagpipe.data.shard_layout import PRELUDE
from bagpipe.errors import BagpipeError, CheckpointError, ConfigError, ShardError
from bagpipe.results import METRICS, MetricsLog
from bagpipe.resuming import open_run

MB = 1 << 20
GB = 1 << 30
DEEP = 100_000
DIGITS = "9" * 5000
"""More than Python turns into a number."""

TOML = {
    "lists in lists": "x = " + "[" * DEEP + "]" * DEEP,
    "lists in lists that never end": "x = " + "[" * DEEP,
    "tables in tables": "x = " + "{a = " * DEEP + "1" + "}" * DEEP,
    "a long dotted key": ".".join("a" * DEEP) + " = 1",
    "a long dotted table": "[" + ".".join("a" * DEEP) + "]",
    "a long dotted key in a table in a table": "x = {" + ".".join("a" * DEEP) + " = 1}",
    "many dotted keys": "\n".join(f"{'.'.join(f'a{n}' for _ in range(150))} = 1" for n in range(400)),
    "a deep value, as deep as is read": "trainers = " + "[" * 200 + "]" * 200,
    "a decimal without end": f"seed = {DIGITS}",
    "a hexadecimal without end": f"seed = 0x{'f' * 100_000}",
    "a number just over": f"seed = {2**64}",
    "a float without end": f"seed = 0.{DIGITS * 40}e{DIGITS}",
    "a text without end": f'model.name = "{"x" * 200_000}"',
    "a key without end": f"{'k' * 200_000} = 1",
    "keys by the thousand": "\n".join(f"k{n} = {n}" for n in range(20_000)),
    "a million keys": "\n".join(f"k{n} = {n}" for n in range(1_000_000)),
    "tables by the thousand": "\n".join(f"[t{n}]" for n in range(20_000)),
    "a zero byte in a path": 'data.path = "a\\u0000b"',
    "halves of characters": 'model.name = "\\ud800"',
}
MESSAGE_CHARACTERS_MAX = 20_000


@pytest.fixture
def small():
    """What is tried takes little memory."""
    tracemalloc.start()
    yield
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 300 * MB, f"{most:,} B"


def sparse(path, num_bytes=GB):
    with path.open("wb") as file:
        file.truncate(num_bytes)
    return path


def refused(kind, call, *names):
    with pytest.raises(BagpipeError) as caught:
        call()
    assert type(caught.value) is kind
    said = str(caught.value)
    assert len(said) < MESSAGE_CHARACTERS_MAX
    for name in names:
        assert str(name) in said
    return said


@pytest.mark.parametrize("name", TOML)
@pytest.mark.parametrize("load", [load_config, load_schema], ids=["configuration", "schema"])
def test_toml_that_is_too_much_is_refused(load, name, tmp_path, small):
    path = tmp_path / "given.toml"
    path.write_text(TOML[name])
    said = refused(ConfigError, lambda: load(path))
    if len(TOML[name]) > SETTINGS_BYTES_MAX:
        assert f"{path} has more than {SETTINGS_BYTES_MAX:,} B" in said


@pytest.mark.parametrize("load", [load_config, load_schema], ids=["configuration", "schema"])
def test_a_file_of_a_gigabyte_or_without_end_is_not_read(load, tmp_path, small):
    path = sparse(tmp_path / "given.toml")
    refused(ConfigError, lambda: load(path), path, f"{SETTINGS_BYTES_MAX:,} B")
    refused(ConfigError, lambda: load(type(path)("/dev/zero")), "/dev/zero", f"{SETTINGS_BYTES_MAX:,} B")


def test_a_configuration_may_come_from_a_pipe(tmp_path):
    ours, theirs = os.pipe()
    try:
        os.write(theirs, b"seed = 7\n")
        os.close(theirs)
        assert load_config(type(tmp_path)(f"/dev/fd/{ours}")).seed == 7
    finally:
        os.close(ours)


OVERRIDES = {
    "a deep list": "seed=" + "[" * DEEP,
    "a deep table": "seed=" + "{a=" * 50_000,
    "a deep key": ".".join("a" * 50_000) + "=1",
    "a deep key of a setting": "seed." + ".".join("a" * 50_000) + "=1",
    "a deep key in a value": "seed={" + ".".join("a" * 50_000) + "=1}",
    "a value as deep as is read": "seed=" + "[" * 200 + "]" * 200,
    "a decimal without end": f"seed={DIGITS}",
    "a hexadecimal without end": f"seed=0x{'f' * 100_000}",
    "a text without end": f"model.name={'x' * 100_000}",
    "a key without end": f"{'k' * 100_000}=1",
    "no value without end": "k" * 100_000,
    "a zero byte": 'data.path="a\\u0000b"',
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_an_override_that_is_too_much_is_refused(name, small):
    refused(ConfigError, lambda: load_config(None, [OVERRIDES[name]]))


@pytest.mark.parametrize("value", [2**64, -(2**64), 2**20_000, "a\0b", {"a": "a\0b"}], ids=range(5))
def test_values_of_a_program_have_bounds_too(value):
    refused(ConfigError, lambda: parse_config({"seed": value}), "seed")


def test_a_program_may_give_settings_as_deep_as_it_likes_and_hears_of_it():
    deep = {}
    for _ in range(DEEP):
        deep = {"a": deep}
    refused(ConfigError, lambda: parse_config({"seed": deep}), f"more than {DEPTH_MAX} deep")


# JSON

JSON = {
    "lists in lists": "[" * DEEP + "]" * DEEP,
    "lists that never end": "[" * DEEP,
    "objects in objects": '{"a":' * DEEP + "1" + "}" * DEEP,
    "a number without end": '{"seed": ' + DIGITS + "}",
    "a large number": '{"seed": ' + "9" * 4000 + "}",
    "a text without end": '{"seed": "' + "x" * 900_000 + '"}',
    "nested as deep as is read": '{"seed": ' + "[" * 500 + "]" * 500 + "}",
    "a zero byte": '{"data": {"path": "a\\u0000b"}}',
    "nothing": "",
    "no object": "[1, 2]",
}


@pytest.mark.parametrize("name", JSON)
def test_the_configuration_of_a_run_that_is_too_much_is_refused(name, tmp_path, small):
    (tmp_path / "config.json").write_text(JSON[name])
    refused(ConfigError, lambda: open_run(tmp_path, []))


def test_the_configuration_of_a_run_of_a_gigabyte_is_not_read(tmp_path, small):
    path = sparse(tmp_path / "config.json")
    refused(ConfigError, lambda: open_run(tmp_path, []), path, "more than")
    path.unlink()
    os.mkfifo(path)
    refused(ConfigError, lambda: open_run(tmp_path, []), path, "not a regular file")


@pytest.mark.parametrize("name", JSON)
def test_a_manifest_of_data_that_is_too_much_is_refused(name, tmp_path, small):
    (tmp_path / "manifest.json").write_text(JSON[name])
    refused(ShardError, lambda: load_manifest(tmp_path), tmp_path)


def test_a_manifest_of_data_of_a_gigabyte_is_not_read_and_a_pipe_not_waited_for(tmp_path, small):
    path = sparse(tmp_path / "manifest.json")
    refused(ShardError, lambda: load_manifest(tmp_path), path, f"{RECORD_BYTES_MAX:,} B")
    path.unlink()
    os.mkfifo(path)
    refused(ShardError, lambda: load_manifest(tmp_path), path, "not a regular file")


def test_a_manifest_that_names_many_shards_twice_is_refused_in_the_time_that_it_takes_to_read_it(tmp_path):
    write(generated("tiny", 100), tmp_path / "data")
    manifest = load_manifest(tmp_path / "data")
    (shard,) = manifest.shards
    others = tuple(shard.model_copy(update={"file": f"{number}"}) for number in range(50_000))
    twice = manifest.model_copy(update={"shards": others + (shard,) * 50_000})
    (tmp_path / "data" / "manifest.json").write_text(twice.sealed().text())
    refused(ShardError, lambda: Shards(tmp_path / "data"), f"names shard {shard.file!r} twice")


@pytest.mark.parametrize("name", JSON)
def test_records_of_preparing_that_are_too_much_are_refused(name, tmp_path, small):
    write(generated("tiny", 100), tmp_path / "data")
    manifest = load_manifest(tmp_path / "data")
    (tmp_path / "data" / PREPARED).write_text(JSON[name])
    refused(ShardError, lambda: check_finished(tmp_path / "data", manifest, {}, [], "stop"), tmp_path)
    working = Working(tmp_path)
    working.path.mkdir()
    (working.path / "progress.json").write_text(JSON[name])
    refused(ShardError, working.load, working.path)


def test_records_of_preparing_of_a_gigabyte_are_not_read(tmp_path, small):
    working = Working(tmp_path)
    working.path.mkdir()
    path = sparse(working.path / "progress.json")
    refused(ShardError, working.load, path, "more than")


def test_a_shard_whose_header_announces_too_much_is_refused(tmp_path, small):
    write(generated("tiny", 100), tmp_path / "data")
    manifest = load_manifest(tmp_path / "data")
    (shard,) = manifest.shards
    path = sparse(tmp_path / "data" / shard.file)
    with path.open("r+b") as file:
        magic_version = (b"BAGSHARD", manifest.version)
        file.write(PRELUDE.pack(*magic_version, GB - PRELUDE.size, 0))
    changed = manifest.model_copy(update={"shards": (shard.model_copy(update={"bytes": GB}),)})
    (tmp_path / "data" / "manifest.json").write_text(changed.sealed().text())
    refused(ShardError, lambda: Shards(tmp_path / "data").gather([0]), path, "announces a header")


@pytest.mark.parametrize("name", JSON)
def test_the_header_of_a_shard_that_is_too_much_is_refused(name, tmp_path, small):
    write(generated("tiny", 100), tmp_path / "data")
    manifest = load_manifest(tmp_path / "data")
    (shard,) = manifest.shards
    text = JSON[name].encode()
    data = PRELUDE.pack(b"BAGSHARD", manifest.version, len(text), zlib.crc32(text)) + text
    (tmp_path / "data" / shard.file).write_bytes(data)
    entry = shard.model_copy(update={"bytes": len(data), "checksum": zlib.crc32(text)})
    (tmp_path / "data" / "manifest.json").write_text(manifest.model_copy(update={"shards": (entry,)}).sealed().text())
    refused(ShardError, lambda: Shards(tmp_path / "data").gather([0]), shard.file)


def sealed(text):
    """A manifest of a checkpoint whose checksum is right."""
    head = text.encode().removesuffix(b"}") + b","
    return head + b'\n "checksum": "%s"\n}\n' % xxh64_hexdigest(head).encode()


@pytest.mark.parametrize("name", JSON)
@pytest.mark.parametrize("seal", [str.encode, sealed], ids=["unsealed", "sealed"])
def test_a_manifest_of_a_checkpoint_that_is_too_much_is_refused(name, seal, tmp_path, small):
    path = tmp_path / "manifest.json"
    refused(CheckpointError, lambda: decode_manifest(path, seal(JSON[name])), path)


def test_a_manifest_of_a_checkpoint_of_a_gigabyte_is_not_read(tmp_path, small):
    (tmp_path / "00000001").mkdir()
    path = sparse(tmp_path / "00000001" / "manifest.json")
    refused(CheckpointError, lambda: read_manifest(Disk(), path.parent), path, f"{RECORD_BYTES_MAX:,}")


def tensors(header):
    return struct.pack("<Q", len(header)) + header


@pytest.mark.parametrize("name", JSON)
def test_a_file_of_tensors_whose_header_is_too_much_is_refused(name, small):
    refused(CheckpointError, lambda: decode("a file", tensors(JSON[name].encode() or b" ")))


TREES = {
    "deep": "[" * DEEP,
    "lists in lists": '{"list":[' * 300 + "]}" * 300,
    "digits": '{"int":"' + "f" * 100_000 + 'g"}',
    "a number without end": DIGITS,
}


@pytest.mark.parametrize("name", TREES)
def test_a_tree_that_is_too_much_is_refused(name, small):
    header = json.dumps({"__metadata__": {"version": "2", "tree": TREES[name]}}).encode()
    refused(CheckpointError, lambda: unpack_tree(tensors(header)))


LINES = {
    "deep": b'{"iteration": 1, "a": ' + b"[" * DEEP + b"\n",
    "a number without end": b'{"iteration": %s}\n' % DIGITS.encode(),
    "no text": b"\xff\xfe\n",
    "cut": b'{"iteration": 2',
    "a line without end": b'{"iteration": 2, "a": "' + b"x" * (4 * MB),
}


@pytest.mark.parametrize("name", LINES)
def test_figures_of_a_run_that_are_none_are_left_out(name, tmp_path, small):
    good = b'{"iteration": 1}\n'
    path = tmp_path / METRICS
    path.write_bytes(good + LINES[name])
    MetricsLog(tmp_path, None, 5)
    assert path.read_bytes() == good


def test_figures_of_a_gigabyte_are_not_held_in_memory(tmp_path, small):
    good = b'{"iteration": 1}\n'
    path = sparse(tmp_path / METRICS)
    with path.open("r+b") as file:
        file.write(good)
    MetricsLog(tmp_path, None, 5)
    assert path.read_bytes() == good
