"""Embedding servers started by hand, as processes of their own, and a wire-tap between a client and one of them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bagpipe.server.client import RemoteStore
from bagpipe.wire.keys import VARIABLE, Security
from bagpipe.wire.stream import SocketNetwork
from harness import raw_socket as raw_peer

WIDTH = 8


class Rows:
    """Rows that begin as their id."""

    width = WIDTH

    def initialise(self, ids: np.ndarray, out: np.ndarray) -> None:
        out[:] = (ids % 1000).astype(np.float32)[:, None]


TABLES = (Rows(),)


@dataclass(frozen=True)
class Server:
    """One that runs."""

    address: str
    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    def resident_bytes(self) -> int:
        """Memory of its process."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def servers(number: int, *arguments: str) -> Iterator[list[Server]]:
    """So many by hand, each with these arguments; those that still run are ended in order, and must do so."""
    command = [sys.executable, "-c", "from bagpipe.cli import main; main()", "server", "--json", "--of", str(number)]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    with ExitStack() as stack:
        started = []
        for shard in range(number):
            process = subprocess.Popen(
                [*command, "--shard", str(shard), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            started.append(process)
            stack.callback(_end, process)
        made = []
        for process in started:
            assert process.stdout is not None
            made.append(Server(json.loads(process.stdout.readline())["address"], process))
        yield made


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdout is not None
    process.stdout.close()
    if process.poll() is not None:
        return
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


@contextmanager
def store_over(
    addresses: Sequence[str], security: Security = None, local: bool = True, **options
) -> Iterator[RemoteStore]:
    """The store of a client of its own, which comes by TCP unless it may stay `local`."""
    with RemoteStore(TABLES, addresses, SocketNetwork(security, local=local), **options) as store:
        yield store


def values(seed: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, WIDTH), np.float32)


def read(store: RemoteStore, ids: np.ndarray) -> np.ndarray:
    out = np.empty((len(ids), WIDTH), np.float32)
    store.read(0, ids, out)
    return out


class Tap:
    """Passes a client's connections on to a server, and keeps what the client said on each, piece by piece."""

    def __init__(self, address: str) -> None:
        self._server = address
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self.recorded: list[list[bytes]] = []
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Tap:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (self._listening, *self._open):
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = raw_peer.connect(self._server)
                server.settimeout(None)
                said: list[bytes] = []
                self.recorded.append(said)
                self._open += [client, server]
                for source, target, record in ((client, server, said), (server, client, [])):
                    thread = threading.Thread(target=self._pass_on, args=(source, target, record))
                    self._threads.append(thread)
                    thread.start()

    @staticmethod
    def _pass_on(source: socket.socket, target: socket.socket, record: list[bytes]) -> None:
        with suppress(OSError):
            while part := source.recv(1 << 16):
                record.append(part)
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)
