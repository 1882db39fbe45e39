"""A manifest is what was written, to the byte, or an error that names what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from xxhash import xxh64_hexdigest

from bagpipe.checkpoint.disk import Disk
from bagpipe.checkpoint.manifest import (
    BaseEntry,
    FileEntry,
    InitialEntry,
    Manifest,
    RowCount,
    RunFacts,
    ShardOf,
    TableEntry,
    config_sha256,
    decode_manifest,
    encode_manifest,
)
from bagpipe.checkpoint.rows import write_file
from bagpipe.errors import CheckpointError

PATH = Path("runs/1/manifest.json")
SUM = "0123456789abcdef"
TABLES = (
    TableEntry(
        name="user",
        rows=40,
        dims=(4, 1),
        width=10,
        optimizer="adagrad",
        layers=("emb.user", "linear.user"),
        weight_rows=50,
        initial=(InitialEntry(kind="uniform", value=0.1, table="user", seed=7), InitialEntry(kind="constant", value=0)),
    ),
    TableEntry(name="wörd", rows=None, dims=(4,), width=4, optimizer="sgd"),
)
FILES = (
    FileEntry(
        name="rows-0-0.safetensors", bytes=9, checksum=SUM, rows=(RowCount(0, 2), RowCount(1, 3)), shard=ShardOf(0, 2)
    ),
    FileEntry(name="rows-1-0.safetensors", bytes=5, checksum=SUM, rows=(), shard=ShardOf(1, 2)),
    FileEntry(name="trainer-0.safetensors", bytes=3, checksum=SUM),
)
FACTS = RunFacts(
    tables=TABLES, trainers=2, servers=2, config={"seed": 0, "lr": 0.1, "a": [1, None]}, data="f00",
    aliases={"again.weight": "emb.user.weight"},
)  # fmt: skip


def made(**changes):
    facts = {name: changes.pop(name) for name in list(changes) if name in RunFacts.__struct_fields__}
    options = {"done": 100, "base": BaseEntry(done=50, checksum=SUM), "files": FILES, **changes}
    return Manifest.make(msgspec.structs.replace(FACTS, **facts), **options)


def sealed(record):
    """The file of any JSON object."""
    head = json.dumps(record).encode().removesuffix(b"}") + b","
    return head + b'\n "checksum": "%s"\n}\n' % xxh64_hexdigest(head).encode()


def record(**changes):
    found = json.loads(encode_manifest(made())[0])
    found.pop("checksum")
    return {**found, **changes}


@pytest.mark.parametrize(("data", "sum_of"), [(b"", "ef46db3751d8e999"), (b"abc", "44bc2cf5ad770999")])
def test_checksums_of_files_are_xxh64(tmp_path, data, sum_of):
    assert write_file(Disk(), tmp_path, "blob", [data]) == FileEntry(name="blob", bytes=len(data), checksum=sum_of)


def test_a_manifest_comes_back_as_it_was_and_is_plain_json():
    manifest = made()
    data, checksum = encode_manifest(manifest)
    assert decode_manifest(PATH, data) == (manifest, checksum)
    found = json.loads(data)
    assert found["checksum"] == checksum
    assert found["config_sha256"] == config_sha256(FACTS.config)
    assert found["tables"][1]["name"] == "wörd"


def test_one_from_before_weights_had_sizes_and_second_names_is_read():
    earlier = record()
    del earlier["aliases"]
    for table in earlier["tables"]:
        del table["weight_rows"]
    manifest, _ = decode_manifest(PATH, sealed(earlier))
    assert (manifest.aliases, [table.weight_rows for table in manifest.tables]) == ({}, [None, None])


def test_every_flipped_bit_and_every_cut_is_refused():
    data, _ = encode_manifest(made())
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with pytest.raises(CheckpointError, match=r"runs/1/manifest\.json"):
                decode_manifest(PATH, bytes(damaged))
        with pytest.raises(CheckpointError, match="damaged"):
            decode_manifest(PATH, data[:place])
    with pytest.raises(CheckpointError, match="damaged"):
        decode_manifest(PATH, data + b"\n")


@pytest.mark.parametrize(
    "name",
    [
        "../x",
        "/etc/passwd",
        "a/b",
        "..",
        ".",
        "",
        ".hidden",
        "a\\b",
        "a\n",
        "a\0",
        "a" * 201,
        "manifest.json",
        "ä",
        "~",
    ],
)
def test_a_file_outside_the_directory_can_not_be_named(name):
    files = [{"name": name, "bytes": 1, "checksum": SUM}]
    with pytest.raises(CheckpointError, match="use another checkpoint"):
        decode_manifest(PATH, sealed(record(files=files)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, "has format 'bagpipe-checkpoint' version 1, this Bagpipe reads"),
        ({"format": "zip"}, "has format 'zip' version 2"),
        ({"done": -1}, "done"),
        ({"done": 2**63}, "done"),
        ({"done": "1"}, "done"),
        ({"done": 50}, "builds on 50, not an earlier one"),
        ({"more": 1}, "unknown field `more`"),
        ({"files": record()["files"] * 2}, "names file 'rows-0-0.safetensors' twice"),
        ({"tables": record()["tables"] * 2}, "names table 'user' twice"),
        ({"tables": [record()["tables"][0] | {"weight_rows": 39}]}, "has 40 rows and weights of 39"),
        ({"aliases": {"again.weight": 3}}, r"\$\.aliases\[\.\.\.\]"),
        ({"files": [{"name": "a", "bytes": 1, "checksum": "0"}]}, r"\$\.files\[0\]\.checksum"),
        ({"files": [{"name": "a", "bytes": 2**63, "checksum": SUM}]}, r"\$\.files\[0\]\.bytes"),
        ({"files": [{"name": "a", "bytes": 1, "checksum": SUM, "rows": [[2, 1]]}]}, r"tables \[2\], there are 2"),
        ({"files": [{"name": "a", "bytes": 1, "checksum": SUM, "rows": [[1, 1], [0, 1]]}]}, r"tables \[1, 0\]"),
        ({"files": [{"name": "a", "bytes": 1, "checksum": SUM, "shard": [2, 2]}]}, "server 2 of 2"),
        ({"tables": [{**record()["tables"][0], "width": 4}]}, "have 4 floats and vectors of"),
        ({"tables": [{**record()["tables"][0], "layers": ["a"]}]}, "table 'user' has 2 vectors"),
        ({"tables": [{**record()["tables"][0], "dims": []}]}, r"\$\.tables\[0\]\.dims"),
        ({"config_sha256": "x"}, "config_sha256"),
    ],
)
def test_what_a_manifest_can_not_say_is_refused_by_name(changes, message):
    with pytest.raises(CheckpointError, match=message):
        decode_manifest(PATH, sealed(record(**changes)))


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff" * 100, b"[" * 10_000, b"null", b"{" * 100])
def test_what_is_no_manifest_at_all_is_refused(data):
    with pytest.raises(CheckpointError, match="damaged or was edited"):
        decode_manifest(PATH, data)
    with pytest.raises(CheckpointError, match="is not a manifest"):
        decode_manifest(PATH, sealed([]) if data == b"[]" else sealed({"a": 1}))
