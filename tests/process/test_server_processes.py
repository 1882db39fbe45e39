"""Embedding servers as real processes: they train exactly, end with whoever started them, and their loss is named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bagpipe.config import parse_config
from bagpipe.errors import ConfigError, StoreError
from bagpipe.server.client import RemoteStore
from bagpipe.server.local import LocalServers, open_store, start_servers
from bagpipe.server.process import ServerOptions, serve, stopped_by_signals
from bagpipe.wire.client import Patience
from bagpipe.wire.stream import SocketNetwork
from harness.world import OPTIMIZERS, assert_identical, make_batches, train_prepared, train_reference


class Rows:
    width = 8

    def initialise(self, ids: np.ndarray, out: np.ndarray) -> None:
        out[:] = (ids % 1000).astype(np.float32)[:, None]


TABLES = (Rows(),)


@pytest.fixture(scope="module")
def servers() -> Iterator[LocalServers]:
    made = start_servers(2)
    yield made
    made.close()


def values(seed: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, 8), np.float32)


def read(store: RemoteStore, ids: np.ndarray) -> np.ndarray:
    out = np.empty((len(ids), 8), np.float32)
    store.read(0, ids, out)
    return out


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_ended(pids: list[int], seconds: float = 60.0) -> list[int]:
    """Those that have not."""
    until = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize(("shared_memory", "store"), [(True, "memory"), (False, "memory"), ("auto", "mapped")])
def test_training_over_two_servers_is_bit_identical(shared_memory, store, tmp_path) -> None:
    batches = make_batches(10, last=3)
    expected, _ = train_reference(batches, OPTIMIZERS["adam"](), "wide_deep")
    settings = {"servers": 2, "store": store, "wire": {"shared_memory": shared_memory}}
    config = parse_config(settings | ({"store_memory": "8MB"} if store == "mapped" else {}))
    opened = []

    def open_remote(layouts) -> RemoteStore:
        opened.append(open_store(config, layouts, tmp_path))
        assert all(bool(stats.shared) == bool(shared_memory) for stats in opened[0].server_stats())
        return opened[0]

    found, _ = train_prepared(batches, OPTIMIZERS["adam"](), "wide_deep", cache=90, lookahead=3, store=open_remote)
    assert_identical(expected, found)
    assert "ends with" in (tmp_path / "server-1.log").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["server-0.log", "server-1.log"], "no rows are left"


@pytest.mark.parametrize("shared_memory", [False, True])
def test_rows_are_found_again_and_the_rest_is_computed(servers: LocalServers, shared_memory: bool) -> None:
    network = SocketNetwork()
    with RemoteStore(TABLES, servers.addresses, network, run=servers.run, shared_memory=shared_memory) as store:
        ids = np.arange(5000) * 7
        store.write(0, ids, values(1, 5000))
        assert np.array_equal(read(store, ids[::-1]), values(1, 5000)[::-1])
        assert np.array_equal(read(store, ids + 1)[:, 0], ((ids + 1) % 1000).astype(np.float32))
        assert [stats.shared > 0 for stats in store.server_stats()] == [shared_memory] * 2


def test_a_server_that_was_stopped_for_a_while_is_waited_for(servers: LocalServers) -> None:
    network = SocketNetwork()
    patience = Patience(retry_s=0.3, deadline_s=60)
    with RemoteStore(TABLES, servers.addresses, network, run=servers.run, patience=patience) as store:
        before = sum(stats.rows_written for stats in store.server_stats())
        os.kill(servers.pids[1], signal.SIGSTOP)
        back = threading.Timer(2.0, os.kill, (servers.pids[1], signal.SIGCONT))
        back.start()
        try:
            store.write(0, np.arange(100), values(3, 100))
        finally:
            back.join()
            os.kill(servers.pids[1], signal.SIGCONT)
        assert np.array_equal(read(store, np.arange(100)), values(3, 100))
        assert sum(stats.rows_written for stats in store.server_stats()) - before == 100


def test_a_server_that_is_killed_is_named_at_once(tmp_path: Path) -> None:
    config = parse_config({"servers": 2})
    with open_store(config, TABLES, tmp_path) as store:
        store.write(0, np.arange(100), values(0, 100))
        pid = int(store._session.watch.__self__.pids[1])  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(StoreError, match=rf"server 1 at .* \(process {pid}\) ended with exit code -9"):
            read(store, np.arange(100))


PARENT = """
import sys, time
import numpy as np
from pathlib import Path
from bagpipe.config import parse_config
from bagpipe.server.local import open_store

class Rows:
    width = 8
    def initialise(self, ids, out):
        out[:] = 0

store = open_store(parse_config({"servers": 2}), [Rows()], Path(sys.argv[1]))
store.write(0, np.arange(100), np.ones((100, 8), np.float32))
print(*store._session.watch.__self__.pids, flush=True)
time.sleep(600)
"""


def test_no_server_outlives_the_process_that_started_it_when_that_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pids = list(map(int, parent.stdout.readline().split()))
    assert len(pids) == 2
    assert all(map(is_running, pids))
    parent.kill()
    parent.wait(60)
    parent.stdout.close()
    assert wait_until_ended(pids) == []
    assert "the process that started it is gone" in (tmp_path / "server-0.log").read_text()


# Starting


def test_a_server_that_can_not_start_is_an_error_that_says_why(tmp_path: Path, servers: LocalServers) -> None:
    (tmp_path / "rows").touch()
    with pytest.raises(StoreError, match=r"server \d ended with exit code 1 before it was ready: .*rows is a file"):
        start_servers(2, store="mapped", directory=tmp_path / "rows", logs=tmp_path)
    taken = LocalServers(bytes(16))
    try:
        taken.start(ServerOptions(address=servers.addresses[0], parent=os.getpid()), tmp_path / "taken.log")
        with pytest.raises(StoreError, match=r"ended with exit code 1 before it was ready: .*is in use"):
            taken.wait_until_ready(60)
    finally:
        taken.close()


def test_a_server_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"server 0 \(process \d+\) was not ready within 0\.01 s"):
        start_servers(1, logs=tmp_path, deadline_s=0.01)


def test_no_servers_can_not_be_started() -> None:
    with pytest.raises(ConfigError, match="servers is 0"):
        start_servers(0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"server": 2, "servers": 2}, "server 2 of 2"),
        ({"directory": "/somewhere"}, "goes with rows on disk"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ServerOptions(**options).check()


# By hand


def by_hand(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "from bagpipe.cli import main; main()", "server", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_ask_for_an_orderly_end(number: signal.Signals) -> None:
    stop, before = threading.Event(), signal.getsignal(number)
    with stopped_by_signals(stop):
        signal.raise_signal(number)
        assert stop.is_set()
    assert signal.getsignal(number) is before


def test_one_by_hand_says_where_it_is_serves_and_ends_in_order(tmp_path: Path) -> None:
    process = by_hand("--json", "--store", "mapped", "--dir", str(tmp_path / "rows"), "--memory-max", "1GB")
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    assert (ready["server"], ready["servers"], ready["pid"]) == (0, 1, process.pid)
    network = SocketNetwork()
    with RemoteStore(TABLES, [ready["address"]], network) as store:
        store.write(0, np.arange(10), values(0, 10))
    process.send_signal(signal.SIGTERM)
    rest, log = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, b"")
    assert b"ends with 10 rows" in log
    assert not list((tmp_path / "rows").iterdir())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--address", "0.0.0.0:0"], "not on this machine and there are no keys"),
        (["--store", "tape"], "--store is 'tape'"),
        (["--security", "some"], "--security is 'some'"),
        (["--security", "none", "--keys", "file"], "contradict each other"),
        (["--memory-max", "lots"], "--memory-max is 'lots'"),
        (["--shard", "3", "--of", "2"], "server 3 of 2"),
        (["--keys", "/nowhere"], "/nowhere can't be opened"),
        (["--address", "nonsense"], "the address 'nonsense' is none"),
        (["--store", "mapped", "--dir", __file__], f"{__file__} is a file"),
        (["--store", "mapped", "--dir", f"{__file__}/rows"], "/rows: Not a directory: check the path"),
    ],
)
def test_by_hand_wrong_options_are_refused_by_name(arguments: list[str], named: str, capsys, monkeypatch) -> None:
    from typer.testing import CliRunner

    from bagpipe.cli import app

    monkeypatch.delenv("BAGPIPE_KEYS", raising=False)
    monkeypatch.setattr(
        "bagpipe.server.process.warm_up", lambda *_, **__: pytest.fail("compiled what is refused anyway")
    )
    result = CliRunner().invoke(app, ["server", *arguments])
    assert result.exit_code == 1
    assert named in str(result.exception)


def test_a_server_that_is_to_end_while_it_compiles_never_announces_itself(tmp_path: Path, monkeypatch) -> None:
    stop = threading.Event()
    monkeypatch.setattr("bagpipe.server.process.warm_up", lambda *_, **__: stop.set())
    options = ServerOptions(store="mapped", directory=str(tmp_path / "rows"))
    serve(options, None, lambda _: pytest.fail("announced"), stop)
    assert list((tmp_path / "rows").iterdir()) == []
