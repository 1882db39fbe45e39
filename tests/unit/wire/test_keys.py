"""Keys: made in pairs, kept secret, checked before they are used; who may talk to whom is refused on both sides."""

from __future__ import annotations

import json
import logging
import os
import socket
import ssl
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from typer.testing import CliRunner

from bagpipe.cli import app
from bagpipe.errors import ConfigError, WireError
from bagpipe.wire import keys as module
from bagpipe.wire.client import Client, Patience
from bagpipe.wire.keys import (
    DAYS,
    VARIABLE,
    Keys,
    find_keys,
    key_paths,
    load_keys,
    new_keys,
    parse_address,
    tls_context,
    write_keys,
)
from bagpipe.wire.recovery_messages import Confirm
from bagpipe.wire.stream import SocketNetwork
from harness.wire import RUN, a_read, call, connected, doubling, listening, nothing_left_behind, until, values


def test_a_pair_of_files_is_made_for_each_other_and_for_the_owner_only(tmp_path):
    before = os.umask(0)
    try:
        server_path, client_path = write_keys(tmp_path / "run")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (server_path, client_path)] == [0o600, 0o600]
    server, client = load_keys(server_path, "server"), load_keys(client_path, "client")
    assert (server.peer, client.peer) == (client.certificate, server.certificate)
    assert secret_lines(server).isdisjoint(client_path.read_text().split("\\n"))


def secret_lines(keys):
    return {line for line in keys.secret.splitlines() if line and not line.startswith("-----")}


def test_keys_last_as_long_as_was_asked(tmp_path):
    for days in (1, 30, DAYS, 36500):
        server, _ = new_keys(days)
        assert server.expires == pytest.approx(time.time() + days * 86400, abs=60)
        until_ = ssl.cert_time_to_seconds(ssl._ssl._test_decode_cert(_pem(tmp_path, server))["notAfter"])
        assert until_ == pytest.approx(server.expires, abs=2)
    for days in (0, -1, 36501, 10**12):
        with pytest.raises(ConfigError, match="give 1 to 36500"):
            write_keys(tmp_path / "run", days)
    assert not list(tmp_path.glob("run*"))


def _pem(tmp_path, keys):
    path = tmp_path / "certificate.pem"
    path.write_text(keys.certificate)
    return str(path)


@pytest.mark.parametrize("which", [0, 1])
def test_files_are_never_written_over(tmp_path, which):
    paths = key_paths(tmp_path / "run")
    paths[which].write_text("precious")
    with pytest.raises(WireError, match="is there already"):
        write_keys(tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == [paths[which].name]
    assert paths[which].read_text() == "precious"


@pytest.mark.parametrize("name", ["", ".", "..", "/"])
def test_files_without_a_name_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="give a name for them too"):
        write_keys(Path(name))
    assert not list(tmp_path.iterdir())


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
        {"secret": "x" * 40}, {"secret": ""}, {"certificate": "~" * 40}, {"peer": "#" * 40}, {"peer": "\u00e9" * 40},
        {"peer": ""}, {"version": 1}, {"format": "other"}, {"role": "king"}, {"more": 1}, {"secret": 3},
        {"expires": -1}, {"expires": 1 << 62}, {"expires": "never"}, {"expires": 0},
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
    assert not any(line in str(caught.value) for line in secret.splitlines()[1:-1])


def test_a_secret_that_is_locked_is_refused_and_no_terminal_is_asked(tmp_path):
    """OpenSSL would ask for the password, and wait."""
    server, _ = new_keys()
    secret = serialization.load_pem_private_key(server.secret.encode(), None)
    locked = secret.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"pass")
    ).decode()
    with pytest.raises(WireError, match="does not belong to its certificate, or one of them is damaged"):
        tls_context(replace(server, secret=locked))


def test_the_secret_of_another_certificate_is_refused():
    server, client = new_keys()
    with pytest.raises(WireError, match="the secret key of the server does not belong to its certificate"):
        tls_context(replace(server, secret=client.secret))


@pytest.mark.parametrize("content", [b"", b"\x80\x04}", b"{}", b"\xff" * 30, b" " * 9000, b"[" * 8000])
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
    assert not any(line in str(caught.value) for line in secret_lines(from_file))


def test_where_there_is_no_memory_without_a_name_a_file_of_ours_alone_is_read(monkeypatch, tmp_path):
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    modes, real = [], ssl.SSLContext.load_cert_chain

    def watched(self, path, **more):
        modes.append(Path(path).stat().st_mode & 0o777)
        real(self, path, **more)

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", watched)
    tls_context(new_keys()[0])
    assert modes == [0o600]
    assert list(tmp_path.iterdir()) == []


def test_secrets_do_not_show():
    server, _ = new_keys()
    shown = f"{server} {server!r} {[server]} {replace(server, role='client')}"
    assert not any(line in shown for line in secret_lines(server))


def test_the_command_writes_both_files_and_prints_no_key(tmp_path):
    result = CliRunner().invoke(app, ["keys", "new", str(tmp_path / "run"), "--days", "7", "--json"])
    assert result.exit_code == 0
    said = json.loads(result.stdout)
    assert {"client", "server"} <= set(said)
    server = load_keys(tmp_path / "run.server", "server")
    assert server.expires == pytest.approx(time.time() + 7 * 86400, abs=60)
    assert not any(line in result.stdout for line in secret_lines(server))
    again = CliRunner().invoke(app, ["keys", "new", str(tmp_path / "run")])
    assert isinstance(again.exception, WireError)


# Who is refused is told, on both sides

SERVER, CLIENT = new_keys()
OTHER_SERVER, OTHER_CLIENT = new_keys()


def lasting(days, monkeypatch):
    """Keys that have expired, or are not good yet."""

    class Clock(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(zone) + timedelta(days=days)

    monkeypatch.setattr(module, "datetime", Clock)
    pair = new_keys(1)
    monkeypatch.undo()
    return pair


def refused(server, client, caplog):
    """What the client's error and the server's log say."""
    asked = []

    def note(peer, message):
        asked.append(message)
        return doubling(peer, message)

    caplog.clear()
    with nothing_left_behind(), caplog.at_level(logging.INFO), listening(note, server) as listener:
        asking = Client(
            SocketNetwork(client, local=False), listener.address, "server 0", run=RUN,
            patience=Patience(deadline_s=20.0, work_s=20.0),
        )  # fmt: skip
        with pytest.raises(WireError) as caught:
            asking.call(Confirm(), what="a thing")
        asking.close()
        until(lambda: listener.refused > 0)
        assert asked == []
        log = "\n".join(record.getMessage() for record in caplog.records)
        for keys in (server, client):
            if isinstance(keys, Keys):
                assert not any(line in log + str(caught.value) for line in secret_lines(keys))
        if isinstance(server, Keys) and server is SERVER:  # others are served
            with connected(listener.address, CLIENT) as connection:
                assert values(call(connection, a_read(1))) == [2]
        return str(caught.value), log


def test_a_client_with_the_key_of_another_run_is_refused(caplog):
    told, logged = refused(SERVER, replace(OTHER_CLIENT, peer=SERVER.certificate), caplog)
    assert "does not admit our key: use the client's file made together with the server's" in told
    assert "has another key than the one that we expect" in logged


def test_a_server_with_the_key_of_another_run_is_refused(caplog):
    told, logged = refused(replace(OTHER_SERVER, peer=CLIENT.certificate), CLIENT, caplog)
    assert "has another key than the one that we expect" in told
    assert "does not admit our key" in logged


def test_a_client_can_not_play_the_server(caplog):
    stolen = replace(CLIENT, role="server", peer=CLIENT.certificate)
    told, logged = refused(stolen, CLIENT, caplog)
    assert "has another key than the one that we expect" in told
    assert "does not admit our key" in logged


@pytest.mark.parametrize("times", range(5))
def test_a_client_without_keys_is_refused_by_a_server_that_has_some(caplog, times):
    told, logged = refused(SERVER, None, caplog)
    assert "does not speak TLS and this side does: give keys on both sides or on neither" in told
    assert "does not speak TLS and this side does: give keys on both sides or on neither" in logged


@pytest.mark.parametrize("times", range(5))
def test_a_client_with_keys_is_refused_by_a_server_that_has_none(caplog, times):
    told, logged = refused(None, CLIENT, caplog)
    assert "does not speak TLS as we do" in told
    assert "give keys on both sides or on neither" in told
    assert "the peer speaks TLS and this side does not: give keys on both sides or on neither" in logged


@pytest.mark.parametrize(("days", "word"), [(-3, "has expired"), (3, "is not valid yet")])
def test_certificates_that_are_not_good_now_are_refused(caplog, monkeypatch, days, word):
    old_server, old_client = lasting(days, monkeypatch)
    told, logged = refused(
        replace(old_server, peer=CLIENT.certificate), replace(CLIENT, peer=old_server.certificate), caplog
    )
    assert word in told
    assert "our certificate has expired" in logged or "does not admit our key" in logged
    told, logged = refused(
        replace(SERVER, peer=old_client.certificate), replace(old_client, peer=SERVER.certificate), caplog
    )
    assert "our certificate has expired" in told or "does not admit our key" in told
    assert word in logged


def test_a_file_with_expired_keys_is_refused_with_the_day(tmp_path, monkeypatch):
    server, _ = lasting(-3, monkeypatch)
    path = tmp_path / "old"
    path.write_text(server.text())
    path.chmod(0o600)
    day = datetime.fromtimestamp(server.expires, UTC).date()
    with pytest.raises(WireError, match=f"{path} have expired on {day}: make new ones with `bagpipe keys new`"):
        load_keys(path, "server")


def test_older_tls_is_refused(caplog):
    """1.3 alone hides who shows which certificate."""
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    with listening(doubling, SERVER) as listener:
        plain = socket.create_connection(parse_address(listener.address), timeout=10)
        with pytest.raises(ssl.SSLError):
            old.wrap_socket(plain)
        plain.close()
        until(lambda: "does not speak TLS as we do" in caplog.text)
