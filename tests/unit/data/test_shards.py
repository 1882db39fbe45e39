import json
import os
import zlib

import numpy as np
import pytest
import torch

from bagpipe.data import Dials, Manifest, Shards, ShardWriter, generated, write
from bagpipe.data.manifest import MANIFEST
from bagpipe.data.shard_layout import CHUNK_BYTES, PRELUDE, encode, id_type
from bagpipe.errors import ConfigError, ShardError, ValueRangeError
from bagpipe.types import Batch, Ids, Table

SAMPLES, SHARD = 2500, 1000


@pytest.fixture
def path(tmp_path):
    write(generated("tiny", SAMPLES), tmp_path / "data", shard_samples=SHARD)
    return tmp_path / "data"


def read(path, **kwargs):
    return list(Shards(path).batches(500, **kwargs))


def edit(path, change, seal=True):
    """Change the manifest; with its checksum made right, as another writer would."""
    body = json.loads((path / MANIFEST).read_text())
    change(body)
    if seal:
        del body["checksum"]
        body["checksum"] = zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    (path / MANIFEST).write_text(json.dumps(body))


def forge(path, change, shard=1):
    """Write a shard again with other columns and right checksums, as a faulty writer would."""
    file = path / f"shard-{shard:05d}.bin"
    data = file.read_bytes()
    size = PRELUDE.unpack(data[: PRELUDE.size])[2]
    header = json.loads(data[PRELUDE.size : PRELUDE.size + size])
    columns = {}
    for column in header["columns"]:
        start = PRELUDE.size + size + column["start"]
        columns[column["name"]] = (
            np.frombuffer(data, np.uint8)[start : start + column["bytes"]].copy().view(column["type"])
        )
    change(columns)
    pieces, checksum = encode(header["samples"], columns)
    written = b"".join(pieces)
    file.write_bytes(written)

    def register(body):
        body["shards"][shard] |= {"bytes": len(written), "checksum": checksum}

    edit(path, register)


def column_bytes(path, name, shard=1):
    """Where a column lies in its file."""
    data = (path / f"shard-{shard:05d}.bin").read_bytes()
    size = PRELUDE.unpack(data[: PRELUDE.size])[2]
    header = json.loads(data[PRELUDE.size : PRELUDE.size + size])
    (column,) = [column for column in header["columns"] if column["name"] == name]
    return PRELUDE.size + size + column["start"], column["bytes"]


def flip(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("preset", ["tiny", "movielens-like", "scratchpipe-low", "avazu-like"])
@pytest.mark.parametrize("seed", [None, 5])
def test_shards_give_what_was_written_bit_by_bit(tmp_path, preset, seed):
    source = generated(preset, 3000, seed=9)
    write(source, tmp_path / "data", shard_samples=700, workers=2)
    stored = Shards(tmp_path / "data")
    assert stored.tables == source.tables
    for ours, theirs in zip(stored.batches(450, seed=seed), source.batches(450, seed=seed), strict=True):
        assert torch.equal(ours.dense, theirs.dense)
        assert torch.equal(ours.labels, theirs.labels)
        for name, ids in theirs.sparse.items():
            assert torch.equal(ours.sparse[name].values, ids.values)
            assert (ids.offsets is None) or torch.equal(ours.sparse[name].offsets, ids.offsets)
            assert (ids.weights is None) == (ours.sparse[name].weights is None)
            assert (ids.weights is None) or torch.equal(ours.sparse[name].weights, ids.weights)


def test_ids_that_a_float_could_not_hold_survive(tmp_path):
    ids = torch.tensor([2**24 + 1, 2**32 - 1, 2**53 + 1, 2**63 - 1, -(2**63)]).reshape(-1, 1)
    batch = Batch(torch.zeros(5, 0), {"any": Ids(ids), "wide": Ids(ids[:2].repeat(3, 1)[:5])}, torch.zeros(5))
    with ShardWriter(tmp_path / "data", (Table("any"), Table("wide", 2**32)), 0) as writer:
        writer.add(batch)
        writer.finish()
    (found,) = read(tmp_path / "data")
    assert torch.equal(found.sparse["any"].values, batch.sparse["any"].values)
    assert torch.equal(found.sparse["wide"].values, batch.sparse["wide"].values)


@pytest.mark.parametrize(
    ("rows", "kind"),
    [(1, "<u1"), (256, "<u1"), (257, "<u2"), (65536, "<u2"), (65537, "<u4"), (2**32, "<u4"), (2**32 + 1, "<i8")],
)
def test_ids_are_stored_in_the_smallest_integer_that_fits(rows, kind):
    assert id_type(rows) == kind
    assert np.iinfo(kind).max >= rows - 1


def test_ids_of_a_table_without_a_size_are_stored_in_64_bits():
    assert id_type(None) == "<i8"


def test_the_manifest_says_what_is_there(path):
    manifest = Shards(path).manifest
    assert isinstance(manifest, Manifest)
    assert manifest.origin == "generated tiny samples=2500 seed=0"
    assert [shard.samples for shard in manifest.shards] == [1000, 1000, 500]
    assert [shard.bytes for shard in manifest.shards] == [(path / s.file).stat().st_size for s in manifest.shards]


def test_columns_are_aligned_for_mapping(path):
    for name in ("labels", "dense", "ids:user", "offsets:recent", "weights:recent"):
        assert column_bytes(path, name)[0] % 64 == 0


@pytest.mark.parametrize("column", ["labels", "dense", "ids:user", "offsets:recent", "ids:recent", "weights:recent"])
@pytest.mark.parametrize("seed", [None, 1])
def test_a_flipped_bit_in_any_column_is_found_and_named(path, column, seed):
    start, size = column_bytes(path, column)
    flip(path / "shard-00001.bin", start + size // 2)
    with pytest.raises(ShardError, match=rf"shard-00001\.bin is corrupt: column '{column}', samples 1000 to .*again"):
        read(path, seed=seed)


def test_a_flipped_bit_in_any_byte_of_the_header_is_found(path):
    file = path / "shard-00000.bin"
    whole = file.read_bytes()
    for place in [*range(PRELUDE.size), PRELUDE.size + 5, PRELUDE.size + 100]:
        flip(file, place)
        with pytest.raises(ShardError, match=r"shard-00000\.bin"):
            read(path)
        file.write_bytes(whole)
    read(path)


def test_only_what_is_read_is_checked(path):
    start, size = column_bytes(path, "ids:user", shard=2)
    flip(path / "shard-00002.bin", start + size // 2)
    first = Shards(path).part(0, 2000)
    assert len(list(first.batches(500))) == 4
    with pytest.raises(ShardError, match="samples 2000 to 2499"):
        read(path)


def test_a_chunk_is_checked_once(tmp_path, monkeypatch):
    write(generated("tiny", 100_000), tmp_path / "data")
    stored = Shards(tmp_path / "data")
    real, checked = zlib.crc32, []
    monkeypatch.setattr("bagpipe.data.shard_file.zlib.crc32", lambda data: checked.append(len(data)) or real(data))
    for _ in range(2):
        list(stored.batches(1000, seed=1))
    size = (tmp_path / "data" / "shard-00000.bin").stat().st_size
    assert size - 4096 < sum(checked) <= size
    assert max(checked) == CHUNK_BYTES


def test_a_truncated_shard_is_refused(path):
    file = path / "shard-00001.bin"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(ShardError, match=r"shard-00001\.bin has \d+ bytes, the manifest says \d+ .*truncated.*copy"):
        read(path)


def test_an_empty_shard_is_refused(path):
    os.truncate(path / "shard-00001.bin", 0)
    with pytest.raises(ShardError, match=r"shard-00001\.bin is empty"):
        read(path)


def test_a_missing_shard_is_refused(path):
    (path / "shard-00002.bin").unlink()
    with pytest.raises(ShardError, match=r"shard-00002\.bin can't be opened.*restore"):
        read(path)


def test_a_pipe_in_the_place_of_a_shard_is_refused_without_waiting(path):
    (path / "shard-00000.bin").unlink()
    os.mkfifo(path / "shard-00000.bin")
    with pytest.raises(ShardError, match="not a regular file"):
        read(path)


def test_a_file_that_is_no_shard_is_refused(path):
    file = path / "shard-00000.bin"
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(ShardError, match="it is not a shard"):
        read(path)


def test_a_shard_of_another_version_is_refused(path):
    file = path / "shard-00000.bin"
    data = bytearray(file.read_bytes())
    data[8] = 9
    file.write_bytes(data)
    with pytest.raises(ShardError, match="has version 9, this is version 2"):
        read(path)


def test_a_shard_of_other_data_is_refused(path, tmp_path):
    write(generated("tiny", SAMPLES, seed=1), tmp_path / "other", shard_samples=SHARD)
    size = (path / "shard-00000.bin").stat().st_size
    other = (tmp_path / "other" / "shard-00000.bin").read_bytes()
    (path / "shard-00000.bin").write_bytes(other[:size].ljust(size, b"\0"))
    with pytest.raises(ShardError, match="corrupt: its header has checksum"):
        read(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_numeric_feature_that_is_not_finite_is_refused(path, value):
    forge(path, lambda columns: columns["dense"].__setitem__(4 * 17 + 2, value))
    with pytest.raises(
        ValueRangeError, match=rf"shard-00001\.bin, sample 1017: 'dense' is {value}, must be finite; mend"
    ):
        read(path)


def test_a_weight_that_is_not_finite_is_refused(path):
    forge(path, lambda columns: columns["weights:recent"].__setitem__(columns["offsets:recent"][30], np.inf))
    with pytest.raises(ValueRangeError, match=r"sample 10[3-9]\d: 'weights:recent' is inf, must be finite"):
        read(path)


def test_an_id_out_of_range_is_refused(path):
    forge(path, lambda columns: columns["ids:user"].__setitem__(5, 1000))
    with pytest.raises(
        ValueRangeError, match=r"shard-00001\.bin, sample 1005: 'ids:user' is 1000, its table has 1000 rows"
    ):
        read(path)


def test_an_id_out_of_range_in_a_bag_names_the_sample_that_has_it(path):
    bags = {}

    def spoil(columns):
        offsets = columns["offsets:recent"]
        bags["sample"] = int(np.flatnonzero(np.diff(offsets) >= 2)[40])
        columns["ids:recent"][offsets[bags["sample"]] + 1] = 500

    forge(path, spoil)
    with pytest.raises(
        ValueRangeError, match=f"sample {1000 + bags['sample']}: 'ids:recent' is 500, its table has 500"
    ):
        read(path)


def test_a_label_other_than_0_and_1_is_refused(path):
    forge(path, lambda columns: columns["labels"].__setitem__(999, 2))
    with pytest.raises(ValueRangeError, match="sample 1999: 'labels' is 2, must be 0 or 1"):
        read(path)


@pytest.mark.parametrize(
    ("place", "value", "sample"), [(0, 1, 1000), (10, -5, 1009), (10, 10**9, 1010), (1000, 10**9, 1999)]
)
def test_offsets_that_lead_astray_are_refused(path, place, value, sample):
    forge(path, lambda columns: columns["offsets:recent"].__setitem__(place, value))
    with pytest.raises(ShardError, match=f"sample {sample}: its bag of 'recent'.*offsets must rise"):
        read(path, seed=1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda columns: columns.pop("ids:city"),
        lambda columns: columns.update(extra=np.zeros(5, dtype=np.uint8)),
        lambda columns: columns.update({"ids:user": columns["ids:user"].astype(np.uint32)}),
        lambda columns: columns.update({"ids:user": columns["ids:user"][:-1]}),
        lambda columns: columns.update({"weights:recent": columns["weights:recent"][:-1]}),
        lambda columns: columns.update({"offsets:recent": columns["offsets:recent"][:-1]}),
        lambda columns: columns.update({"dense": columns["dense"][:-4]}),
    ],
)
def test_a_shard_without_the_columns_that_the_manifest_announces_is_refused(path, spoil):
    forge(path, spoil)
    with pytest.raises(ShardError, match=r"shard-00001\.bin.*write the data again"):
        read(path)


@pytest.mark.parametrize(
    "name", ["../evil.bin", "/etc/passwd", "a/b", "..", ".", "", ".hidden", "a\\b", "a\0b", "x" * 300]
)
def test_a_manifest_can_name_no_file_outside_of_its_directory(path, name):
    edit(path, lambda body: body["shards"][0].update(file=name))
    with pytest.raises(ShardError, match=r"not a manifest: shards\.0\.file"):
        Shards(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda body: body.update(samples=2499),
        lambda body: body["shards"][0].update(samples=0),
        lambda body: body["shards"][0].update(samples="1000"),
        lambda body: body["shards"][1].update(file="shard-00000.bin"),
        lambda body: body["tables"][0].update(name="item"),
        lambda body: body["tables"][0].update(rows=0),
        lambda body: body["tables"][0].update(rows=10.5),
        lambda body: body["tables"][0].update(features=[]),
        lambda body: body["tables"][0].update(features=["other"]),
        lambda body: body["features"].pop(),
        lambda body: body.update(surprise=1),
        lambda body: body.pop("dense"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(path, change):
    edit(path, change)
    with pytest.raises(ShardError, match=r"manifest\.json.*write the data again"):
        Shards(path)


def test_an_edited_manifest_is_refused(path):
    edit(path, lambda body: body["tables"][0].update(rows=1001), seal=False)
    with pytest.raises(ShardError, match=r"manifest\.json has checksum .* damaged or edited"):
        Shards(path)


def test_a_manifest_of_another_version_is_refused(path):
    edit(path, lambda body: body.update(version=3, something_new=[]))
    with pytest.raises(ShardError, match=r"version 3, this is 'bagpipe-shards' version 2"):
        Shards(path)


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": 1, "version": 1}']
)
def test_a_manifest_that_is_none_is_refused(path, data):
    (path / MANIFEST).write_bytes(data)
    with pytest.raises(ShardError, match="is not a manifest"):
        Shards(path)


def test_a_directory_without_a_manifest_is_not_taken_for_data(path):
    (path / MANIFEST).unlink()
    with pytest.raises(ShardError, match="not a complete data set: write the data again"):
        Shards(path)


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ShardError, match=r"nowhere.*check the path"):
        Shards(tmp_path / "nowhere")


def test_the_origin_names_the_dials_that_were_turned(tmp_path):
    source = generated("tiny", 100, seed=3, zipf=1.5, burst=0.2)
    assert source.dials == Dials(zipf=1.5, burst=0.2)
    assert write(source, tmp_path / "data").origin == "generated tiny samples=100 seed=3 zipf=1.5 burst=0.2"


def test_a_named_part_is_a_data_set_of_its_own(path):
    ranges = [{"name": "train", "start": 0, "stop": 2000}, {"name": "test", "start": 2000, "stop": 2500}]
    edit(path, lambda body: body.update(parts=ranges))
    shards = Shards(path)
    assert shards.part_names == ("train", "test")
    assert shards.part_named("test").num_samples == 500
    with pytest.raises(ConfigError, match="no part 'validation': it has train, test; prepare it with --validation"):
        shards.part_named("validation")


def test_a_data_set_without_parts_says_so(path):
    with pytest.raises(ConfigError, match="no part 'train': it was not divided"):
        Shards(path).part_named("train")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": [{"name": "train", "start": 0, "stop": 2501}]}, "'train' is samples 0 to 2501 of 2500"),
        ({"days": [{"name": "day_0", "start": 9, "stop": 3}]}, "'day_0' is samples 9 to 3 of 2500"),
        ({"parts": [{"name": "a", "start": 0, "stop": 1}] * 2}, "names part 'a' twice"),
        ({"numeric": ["one"]}, "names 1 numeric features and has 4"),
        ({"numeric": ["one", "two", "two", "three"]}, "names numeric feature 'two' twice"),
    ],
)
def test_a_manifest_whose_parts_or_names_do_not_fit_is_refused(path, change, message):
    edit(path, lambda body: body.update(change))
    with pytest.raises(ShardError, match=f"{message}.*write the data again"):
        Shards(path)
