import bz2
import gzip
import os

import pyarrow as pa
import pytest

from bagpipe.data.prepare.sources import find_sources
from bagpipe.errors import DataError

TEXT = b"".join(b"line %d\tof the file\n" % n for n in range(5000))


def names(paths, *patterns):
    return [source.path.name for source in find_sources(paths, patterns or ("*",))]


def write(directory, *files):
    for name in files:
        (directory / name).write_bytes(b"x\n")


def test_days_are_in_order_of_their_numbers(tmp_path):
    write(tmp_path, *(f"day_{n}" for n in range(12)))
    assert names([tmp_path]) == [f"day_{n}" for n in range(12)]
    assert names([tmp_path / "day_10", tmp_path / "day_9"]) == ["day_9", "day_10"]


def test_a_missing_day_is_named(tmp_path):
    write(tmp_path, "day_0.gz", "day_1.gz", "day_3.gz")
    with pytest.raises(DataError, match=r"day_2 is missing: after .*day_1\.gz comes .*day_3\.gz"):
        find_sources([tmp_path])
    assert names([tmp_path / "day_0.gz", tmp_path / "day_1.gz"]) == ["day_0.gz", "day_1.gz"]


def test_of_a_directory_only_what_is_meant_is_read(tmp_path):
    write(tmp_path, "train.txt", "test.txt", "readme.txt", ".hidden", "_SUCCESS")
    assert names([tmp_path], "train*", "day_*") == ["train.txt"]
    assert names([tmp_path]) == ["readme.txt", "test.txt", "train.txt"]
    with pytest.raises(DataError, match=r"has no file named day_\* \(it has readme.txt, test.txt, train.txt\)"):
        find_sources([tmp_path], ("day_*",))


def test_the_same_contents_twice_are_refused(tmp_path):
    write(tmp_path, "train.txt", "train.txt.gz")
    with pytest.raises(DataError, match="the same samples twice"):
        find_sources([tmp_path])
    with pytest.raises(DataError, match="the same samples twice"):
        find_sources([tmp_path / "train.txt", tmp_path / "train.txt"])


def test_what_is_not_there_empty_or_nothing_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"can't read .*none\.txt \(No such file"):
        find_sources([tmp_path / "none.txt"])
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"empty\.txt is empty"):
        find_sources([tmp_path / "empty.txt"])
    with pytest.raises(DataError, match="no file is named"):
        find_sources([])


@pytest.mark.parametrize(
    ("start", "what"),
    [(b"PK\x03\x04rest", "zip archive"), (b"\xfd7zXZ\x00", "xz"), (b"\0" * 257 + b"ustar\0", "tar archive")],
)
def test_archives_are_to_be_unpacked_first(tmp_path, start, what):
    path = tmp_path / "data"
    path.write_bytes(start)
    with pytest.raises(DataError, match=f"{what}: unpack it first"):
        find_sources([path])


def test_a_packed_tar_is_found_too(tmp_path):
    path = tmp_path / "dac.tar.gz"
    path.write_bytes(gzip.compress(b"\0" * 257 + b"ustar\0" + TEXT))
    with pytest.raises(DataError, match="tar archive: unpack it first"):
        find_sources([path])


def compressed(kind):
    if kind == "gzip":
        return gzip.compress(TEXT)
    if kind == "two gzips":
        return gzip.compress(TEXT[:1000]) + gzip.compress(TEXT[1000:])
    if kind == "bz2":
        return bz2.compress(TEXT)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, kind) as stream:
        stream.write(TEXT)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("kind", ["gzip", "two gzips", "bz2", "zstd", "lz4"])
def test_compression_is_known_by_the_contents_not_the_name(tmp_path, kind):
    path = tmp_path / "data.txt"
    path.write_bytes(compressed(kind))
    [source] = find_sources([path])
    with source.open() as stream:
        assert stream.read(len(TEXT) + 1) == TEXT
        assert stream.offset == len(TEXT)
        assert stream.position == source.size


@pytest.mark.parametrize("kind", ["plain", "gzip"])
def test_reading_can_begin_anywhere(tmp_path, kind):
    path = tmp_path / "data"
    path.write_bytes(TEXT if kind == "plain" else compressed(kind))
    [source] = find_sources([path])
    for offset in (0, 1, 12345, len(TEXT) - 1, len(TEXT)):
        with source.open() as stream:
            stream.skip_to(offset)
            assert stream.read(100) == TEXT[offset : offset + 100]
    with source.open() as stream, pytest.raises(DataError, match="has fewer bytes"):
        stream.skip_to(len(TEXT) + 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-4],
        lambda data: data[: len(data) // 2] + b"\x55\xaa\x55\xaa" + data[len(data) // 2 + 4 :],
        lambda data: data[:-8] + bytes([data[-8] ^ 1]) + data[-7:],
        lambda data: data + b"junk",
    ],
    ids=["half", "without its end", "bytes changed", "checksum changed", "junk after it"],
)
def test_a_damaged_gzip_is_named_with_the_place(tmp_path, damage):
    path = tmp_path / "day_0.gz"
    path.write_bytes(damage(compressed("gzip")))
    with pytest.raises(DataError, match=r"day_0\.gz is damaged or cut short near byte .* of .*, after .* bytes"):
        read_all(path)


def read_all(path):
    [source] = find_sources([path])
    with source.open() as stream:
        stream.skip_to(len(TEXT) + 1)


def test_a_file_that_changes_is_noticed(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(TEXT)
    [source] = find_sources([path])
    source.check()
    with path.open("ab") as file:
        file.write(b"more\n")
    with pytest.raises(DataError, match=r"data changed while it was read \(it had .* bytes and now has"):
        source.check()
    path.write_bytes(TEXT)
    os.utime(path, ns=(0, source.mtime_ns + 1))
    with pytest.raises(DataError, match="changed while it was read"):
        source.check()
    other = tmp_path / "other"
    other.write_bytes(TEXT)
    os.utime(other, ns=(0, source.mtime_ns))
    other.replace(path)
    with pytest.raises(DataError, match="changed while it was read"):
        source.check()
    path.unlink()
    with pytest.raises(DataError, match="went away while it was read"):
        source.check()
