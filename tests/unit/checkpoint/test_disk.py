"""The operating system's files, one operation each."""

from __future__ import annotations

import os

import pytest

from bagpipe.checkpoint.disk import Disk

disk = Disk()


def content(path):
    with disk.open(path) as file:
        buffer = bytearray(file.num_bytes)
        assert file.read_into(buffer) == file.num_bytes
    return bytes(buffer)


def test_a_file_grows_at_its_end(tmp_path):
    with disk.create(tmp_path / "a") as file:
        file.write(b"abc")
        file.write(memoryview(bytearray(b"defg")))
        file.sync()
        file.close()
    assert content(tmp_path / "a") == b"abcdefg"
    with disk.open(tmp_path / "a") as file:
        buffer = bytearray(10)
        assert file.read_into(buffer, 3) == 4
        assert file.read_into(buffer, 9) == 0
    assert buffer == b"defg\0\0\0\0\0\0"


def test_only_new_files_are_created_and_only_regular_ones_read(tmp_path):
    (tmp_path / "there").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("there", "link", "directory", "pipe"):
        with pytest.raises(FileExistsError):
            disk.create(tmp_path / name)
    for name in ("link", "directory", "pipe", "missing"):
        with pytest.raises(OSError, match=name):
            disk.open(tmp_path / name)
    assert disk.files(tmp_path) == ["there"]
    assert disk.directories(tmp_path) == ["directory"]


def test_large_files_are_written_and_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("bagpipe.checkpoint.disk._BYTES_MAX", 10)
    with disk.create(tmp_path / "a") as file:
        file.write(bytes(range(95)))
    assert content(tmp_path / "a") == bytes(range(95))


def test_names_are_made_moved_and_removed(tmp_path):
    disk.make_directory(tmp_path / "a")
    with pytest.raises(FileExistsError):
        disk.make_directory(tmp_path / "a")
    disk.create(tmp_path / "a" / "file").close()
    disk.sync_directory(tmp_path / "a")
    disk.rename(tmp_path / "a", tmp_path / "b")
    with pytest.raises(OSError, match="not empty"):
        disk.remove_directory(tmp_path / "b")
    disk.unlink(tmp_path / "b" / "file")
    disk.remove_directory(tmp_path / "b")
    disk.sync_directory(tmp_path)
    assert not list(tmp_path.iterdir())
