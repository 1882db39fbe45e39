"""Keys: made in pairs, kept secret, checked before they are used."""

from __future__ import annotations

import json
import os

import pytest
from typer.testing import CliRunner

from bagpipe.cli import app
from bagpipe.errors import WireError
from bagpipe.wire.keys import VARIABLE, Keys, find_keys, key_paths, load_keys, new_keys, write_keys


def test_a_pair_of_files_is_made_for_each_other_and_for_the_owner_only(tmp_path):
    before = os.umask(0)
    try:
        server_path, client_path = write_keys(tmp_path / "run")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (server_path, client_path)] == [0o600, 0o600]
    server, client = load_keys(server_path, "server"), load_keys(client_path, "client")
    assert (server.peer, client.peer) == (client.public, server.public)
    assert server.secret not in client_path.read_text()


@pytest.mark.parametrize("which", [0, 1])
def test_files_are_never_written_over(tmp_path, which):
    paths = key_paths(tmp_path / "run")
    paths[which].write_text("precious")
    with pytest.raises(WireError, match="is there already"):
        write_keys(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == [paths[which].name]
    assert paths[which].read_text() == "precious"


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(WireError, match="nowhere"):
        write_keys(tmp_path / "nowhere" / "run")


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602])
def test_a_file_that_others_can_use_is_refused(tmp_path, mode):
    path, _ = write_keys(tmp_path / "run")
    path.chmod(mode)
    with pytest.raises(WireError, match=f"mode {mode:04o}.*chmod 600"):
        load_keys(path, "server")


def test_the_keys_of_the_other_role_are_refused(tmp_path):
    _, client = write_keys(tmp_path / "run")
    with pytest.raises(WireError, match="the keys of a client: a server needs its own"):
        load_keys(client, "server")


@pytest.mark.parametrize(
    "change",
    [
        {"secret": "x" * 40}, {"secret": "short"}, {"public": "~" * 40}, {"peer": "#" * 40}, {"peer": "\u00e9" * 40},
        {"version": 2}, {"format": "other"}, {"role": "king"}, {"more": 1}, {"secret": 3},
    ],
)  # fmt: skip
def test_malformed_keys_are_refused_without_showing_them(tmp_path, change):
    path, _ = write_keys(tmp_path / "run")
    content = json.loads(path.read_text())
    secret = content["secret"]
    path.write_text(json.dumps(content | change))
    with pytest.raises(WireError) as caught:
        load_keys(path, "server")
    assert str(path) in str(caught.value)
    assert secret not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\x80\x04}", b"{}", b"\xff" * 30, b" " * 5000])
def test_a_file_that_holds_no_keys_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(WireError, match="key file"):
        load_keys(path, "server")


def test_what_is_no_file_is_refused_at_once(tmp_path):
    with pytest.raises(WireError, match="can't be opened"):
        load_keys(tmp_path / "none", "server")
    with pytest.raises(WireError, match="is not a file"):
        load_keys(tmp_path, "server")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(WireError, match="is not a file"):
        load_keys(tmp_path / "pipe", "server")


def test_keys_come_from_the_environment_by_path_or_as_they_are(tmp_path, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert find_keys("server") is None
    path, _ = write_keys(tmp_path / "run")
    monkeypatch.setenv(VARIABLE, str(path))
    from_file = find_keys("server")
    assert from_file == load_keys(path, "server")
    monkeypatch.setenv(VARIABLE, from_file.text())
    assert find_keys("server") == from_file
    monkeypatch.setenv(VARIABLE, from_file.text()[:-5])
    with pytest.raises(WireError, match=f"{VARIABLE} is no key file") as caught:
        find_keys("server")
    assert from_file.secret not in str(caught.value)


def test_secrets_do_not_show():
    server, _ = new_keys()
    assert server.secret not in f"{server} {server!r} {[server]}"
    with pytest.raises(WireError) as caught:
        Keys("server", server.peer, server.secret, server.peer)
    assert server.secret not in str(caught.value)


def test_the_command_writes_both_files_and_prints_no_key(tmp_path):
    result = CliRunner().invoke(app, ["keys", "new", str(tmp_path / "run"), "--json"])
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert sorted(said) == ["client", "server"]
    assert load_keys(tmp_path / "run.server", "server").secret not in result.stdout
    again = CliRunner().invoke(app, ["keys", "new", str(tmp_path / "run")])
    assert isinstance(again.exception, WireError)
