"""What nobody is told: keys, tokens and the number of a run, in errors, their causes, logs and representations."""

from __future__ import annotations

import json
import os
import subprocess
import traceback

import pytest

from bagpipe.checkpoint.manifest import decode_manifest
from bagpipe.checkpoint.tensors import decode
from bagpipe.cluster.context import Launch
from bagpipe.cluster.settings import Wiring
from bagpipe.config import load_config, parse_config
from bagpipe.data.manifest import load_manifest
from bagpipe.data.prepare.progress import Working
from bagpipe.data.prepare.schema import load_schema
from bagpipe.errors import BagpipeError, WireError
from bagpipe.resuming import open_run
from bagpipe.wire.keys import VARIABLE, find_keys, load_keys, new_keys, write_keys
from harness.process import BAGPIPE
from harness.server_process import servers, store_over

RUN = bytes(range(16))
SERVER, CLIENT = new_keys()
VERSION = f'"version":{json.loads(SERVER.text())["version"]}'


def secrets_of(*keys):
    """Every line of a secret that is long enough to tell something."""
    return [line for each in keys for line in each.secret.split("\n") if len(line) > 20 and "-----" not in line]


SECRETS = secrets_of(SERVER, CLIENT)


def assert_not_told(text, secrets=SECRETS):
    for secret in secrets:
        assert secret not in text
        assert json.dumps(secret)[1:-1] not in text


def test_there_are_secrets():
    assert SECRETS
    assert all(secret in json.loads(SERVER.text())["secret"] for secret in secrets_of(SERVER))


@pytest.mark.parametrize(
    "show", [repr, str, lambda each: f"{each}", lambda each: repr([each]), lambda each: repr({1: each})]
)
def test_what_holds_keys_or_the_number_of_a_run_does_not_show_them(show):
    wiring = Wiring(RUN, SERVER, CLIENT)
    launch = Launch(parse_config({}), ["tcp://127.0.0.1:1"], RUN, CLIENT, listener=SERVER)
    for each in (SERVER, CLIENT, wiring, launch):
        assert_not_told(show(each), [*SECRETS, repr(RUN), RUN.hex()])


READERS = {
    "configuration": ("given.toml", load_config),
    "schema": ("given.toml", load_schema),
    "configuration of a run": ("config.json", lambda path: open_run(path.parent, [])),
    "manifest of data": ("manifest.json", lambda path: load_manifest(path.parent)),
    "progress": ("working/progress.json", lambda path: Working(path.parents[1]).load()),
    "manifest of a checkpoint": ("manifest.json", lambda path: decode_manifest(path, path.read_bytes())),
    "tensors": ("rows.safetensors", lambda path: decode(str(path), path.read_bytes())),
    "keys of the other role": ("keys", lambda path: load_keys(path, "client")),
}
FORMS = {
    "as it is": lambda text: text,
    "cut": lambda text: text[:-20],
    "in a list": lambda text: f"[{text}]",
    "as TOML": lambda text: "\n".join(f"{key} = {json.dumps(value)}" for key, value in json.loads(text).items()),
    "as a value": lambda text: f"secret = {text}",
    "of another kind": lambda text: text.replace("bagpipe-keys", "bagpipe-shards").replace(
        '"version":1', '"version":2'
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reader", READERS)
def test_whoever_reads_a_file_of_keys_by_mistake_does_not_tell_it(reader, form, tmp_path):
    name, read = READERS[reader]
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(FORMS[form](SERVER.text()))
    path.chmod(0o600)
    with pytest.raises(BagpipeError) as caught:
        read(path)
    assert_not_told(str(caught.value))
    assert_not_told("".join(traceback.format_exception(caught.value)))


BROKEN = {
    "in quotes": lambda text: f"'{text}'",
    "with a mark before it": lambda text: f"\ufeff{text}",
    "with its name before it": lambda text: f"{VARIABLE}={text}",
    "without its first character": lambda text: text[1:],
    "the secret alone": lambda text: json.loads(text)["secret"],
    "cut": lambda text: text[:-20],
    "cut in the middle of the secret": lambda text: text[: text.index('"secret"') + 30],
    "with something behind": lambda text: text + "}",
    "of the other role": lambda text: text.replace('"server"', '"client"'),
    "of another version": lambda text: text.replace('"version":1', '"version":99').replace(
        '"version":2', '"version":99'
    ),
    "a secret that is none": lambda text: text.replace('"secret":"', '"secret":"x'),
}


@pytest.mark.parametrize("name", BROKEN)
def test_keys_in_the_environment_that_are_broken_are_not_told(name, monkeypatch):
    given = BROKEN[name](SERVER.text())
    monkeypatch.setenv(VARIABLE, given)
    with pytest.raises(WireError) as caught:
        find_keys("server")
    start = given.find('"secret":"') + len('"secret":"')
    assert_not_told("".join(traceback.format_exception(caught.value)), [*SECRETS, given[start : start + 15]])


@pytest.mark.parametrize("as_json", [True, False])
def test_a_command_that_fails_tells_nothing_of_its_environment(as_json, tmp_path):
    server_file, _ = write_keys(tmp_path / "run")
    text = server_file.read_text()
    secrets = [*secrets_of(load_keys(server_file, "server")), "0123456789abcdef" * 2]
    environment = os.environ | {VARIABLE: text[:-20], "RAY_AUTH_TOKEN": secrets[-1]}
    for words in (["server"], ["train", "--set", "data.path=/nowhere"], ["data", "show", "/nowhere"]):
        done = subprocess.run(
            [*BAGPIPE, *words, *(["--json"] if as_json else [])],
            capture_output=True, text=True, timeout=100, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 1
        assert_not_told(done.stdout + done.stderr, secrets)


def test_a_client_of_another_run_hears_of_it_and_not_which_it_is(tmp_path):
    run = os.urandom(16)
    with servers(1) as (server,):
        with store_over([server.address], run=run, shared_memory=False):
            pass
        with pytest.raises(BagpipeError, match="serves run") as caught, store_over([server.address], run=bytes(16)):
            pass
    told = "".join(traceback.format_exception(caught.value))
    assert_not_told(told, [run.hex(), repr(run)[2:-1], run.hex()[:16], run.hex()[-16:]])
