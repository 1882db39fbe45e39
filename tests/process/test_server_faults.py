"""What befalls real server processes while they serve: paused, killed in the middle of a request, out of disk, reached
with keys only. Training over them stays exact, or what is wrong is named and no row has changed.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from bagpipe.errors import StoreError
from bagpipe.server.client import RemoteStore
from bagpipe.server.local import start_servers
from bagpipe.wire.client import Patience
from bagpipe.wire.keys import load_keys, write_keys
from bagpipe.wire.messages import Message, Open, Opened
from bagpipe.wire.stream import SocketNetwork
from harness.server_process import TABLES, WIDTH, read, servers, store_over, values
from harness.wire import call
from harness.world import OPTIMIZERS, assert_identical, make_batches, train_prepared, train_reference

RUN = bytes(range(16))


def wait_until_stopped(pid):
    """SIGSTOP reaches the threads of a process one by one."""
    until = time.monotonic() + 10
    while any(
        task.read_text().rpartition(")")[2].split()[0] != "T" for task in Path("/proc").glob(f"{pid}/task/*/stat")
    ):
        assert time.monotonic() < until, "the process does not stop"
        time.sleep(0.001)


def opening(addresses, security=None, **options):
    """What `prepare` opens its store with."""

    def open_store(layouts):
        network = SocketNetwork(security)
        return RemoteStore(layouts, addresses, network, **options)

    return open_store


def test_training_over_servers_with_keys_is_bit_identical(tmp_path):
    server_file, client_file = write_keys(tmp_path / "run")
    batches = make_batches(10, last=3)
    expected, losses = train_reference(batches, OPTIMIZERS["adagrad"](), "wide_deep")
    with servers(2, "--keys", str(server_file)) as started:
        store = opening([one.address for one in started], load_keys(client_file, "client"), shared_memory=False)
        found, found_losses = train_prepared(
            batches, OPTIMIZERS["adagrad"](), "wide_deep", cache=90, lookahead=3, store=store
        )
    assert_identical(expected, found)
    assert losses == found_losses


@pytest.mark.parametrize(("shared_memory", "pause_s"), [(True, 3.0), (False, 1.0)])
def test_training_goes_on_exactly_after_a_server_was_paused(shared_memory, pause_s):
    """Asked again meanwhile, over new connections and memory: what the server then does with the old ones is lost."""
    batches = make_batches(14)
    expected, _ = train_reference(batches, OPTIMIZERS["adam"](), "wide_deep")
    with servers(2) as started:
        pid = started[1].pid
        going_on = threading.Timer(pause_s, os.kill, (pid, signal.SIGCONT))

        def pausing():
            for number, batch in enumerate(batches):
                if number == 7:
                    os.kill(pid, signal.SIGSTOP)
                    going_on.start()
                yield batch

        patience = Patience(retry_s=0.5, deadline_s=60)
        store = opening([one.address for one in started], shared_memory=shared_memory, patience=patience)
        found, _ = train_prepared(pausing(), OPTIMIZERS["adam"](), "wide_deep", cache=60, lookahead=2, store=store)
        assert not going_on.is_alive(), "training can't end while rows are missing"
    assert_identical(expected, found)


@pytest.mark.parametrize("asking", ["reads", "writes"])
def test_a_server_that_is_killed_in_the_middle_of_a_request_is_named_and_the_other_goes_on(asking):
    started = start_servers(2)
    ids = np.arange(200)
    try:
        network = SocketNetwork()
        with RemoteStore(TABLES, started.addresses, network, run=started.run, watch=started.gone) as store:
            store.write(0, ids, values(0, 200))
            pid = started.pids[1]
            os.kill(pid, signal.SIGSTOP)  # so that the request is under way, and stays so
            wait_until_stopped(pid)
            ending = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
            ending.start()
            with pytest.raises(StoreError, match=rf"server 1 at .* \(process {pid}\) ended with exit code -9"):
                read(store, ids) if asking == "reads" else store.write(0, ids, values(1, 200))
            ending.join()
        network = SocketNetwork()
        connection = network.connect(started.addresses[0], 10.0)
        assert isinstance(call(connection, Message(started.run, 0, 1, Open(0, 1, [WIDTH], "reads"))).body, Opened)
        connection.close()
    finally:
        started.close()


def test_a_server_that_was_started_again_is_noticed_before_a_row_is_read(tmp_path):
    """Its address is the same, its rows are gone: initial values in place of trained ones would be a wrong result."""
    with servers(1) as (first,):
        address = first.address.removeprefix("tcp://")
        with store_over([first.address], run=RUN, patience=Patience(retry_s=0.3, deadline_s=20)) as store:
            store.write(0, np.arange(10), values(0, 10))
            first.kill()
            with (
                servers(1, "--address", address),
                pytest.raises(StoreError, match="was started again and its rows are lost"),
            ):
                read(store, np.arange(10))


@pytest.fixture(params=["a full disk", "a limit on files"])
def small_disk(request, tmp_path):
    """Where 3 MB of rows fit, and how to make that true for a process."""
    if request.param == "a limit on files":
        yield tmp_path, lambda pid: resource.prlimit(pid, resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
        return
    if shutil.which("mount") is None:
        pytest.skip("there is no mount command")
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(path)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"can't mount a small disk: {made.stderr.decode().strip()}")
    yield path, lambda _: None
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_under_a_server_is_told_and_no_row_changes(small_disk):
    path, confine = small_disk
    ids, beyond = np.arange(5000), np.arange(4000, 250_000)
    with servers(1, "--store", "mapped", "--dir", str(path / "rows")) as (server,):
        confine(server.pid)
        with store_over([server.address], run=RUN) as store, store_over([server.address], run=RUN) as another:
            store.write(0, ids, values(0, len(ids)))
            with pytest.raises(StoreError, match=r"the file of table 0 in .* can't grow"):
                store.write(0, beyond, values(1, len(beyond)))
            for each in (store, another):
                assert np.array_equal(read(each, ids), values(0, len(ids)))
                assert np.array_equal(
                    read(each, beyond[5000:5010])[:, 0], (beyond[5000:5010] % 1000).astype(np.float32)
                )
            store.write(0, ids, values(2, len(ids)))  # what fits, fits
            assert np.array_equal(read(another, ids), values(2, len(ids)))
            assert server.process.poll() is None
