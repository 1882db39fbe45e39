"""Embedding servers of one run as processes on this machine, on loopback, and the store over them.

They end with whoever started them: when the store is closed, when the process ends, and when it is killed.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Semaphore
from typing import IO, Literal

import msgspec

from bagpipe.config import Config, store_memory_bytes
from bagpipe.errors import ConfigError, StoreError
from bagpipe.server.client import RemoteStore
from bagpipe.server.process import Ready, ServerOptions
from bagpipe.store.base import RowSource
from bagpipe.wire.client import Patience
from bagpipe.wire.stream import SocketNetwork

READY_S = 120.0
END_S = 30.0
"""What an orderly end may take."""
_LINE_BYTES_MAX = 4096


class LocalServers:
    """Servers that are running; `close` ends them."""

    def __init__(self, run: bytes) -> None:
        self.run = run
        self.addresses: list[str] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[Path | None] = []

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [process.pid for process in self._processes]

    def start(self, options: ServerOptions, log: Path | None) -> None:
        """One more process."""
        # Of a session of its own: Ctrl-C is for the trainer, which writes its rows back before it ends the servers.
        with ExitStack() as stack:
            errors: IO[bytes] | None = None if log is None else stack.enter_context(log.open("ab"))
            process = subprocess.Popen(
                [sys.executable, "-m", "bagpipe.server.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
        self._processes.append(process)
        self._logs.append(log)
        assert process.stdin is not None
        try:
            process.stdin.write(msgspec.json.encode(options) + b"\n")
            process.stdin.close()
        except BrokenPipeError as error:
            raise StoreError(self._ended(len(self._processes) - 1)) from error

    def wait_until_ready(self, deadline_s: float) -> None:
        """Return when all can be reached, with their addresses."""
        until = time.monotonic() + deadline_s
        for number, process in enumerate(self._processes):
            assert process.stdout is not None
            line = b""
            while not line.endswith(b"\n"):
                readable, _, _ = select.select([process.stdout], [], [], max(until - time.monotonic(), 0))
                if not readable:
                    name = f"server {number} (process {process.pid})"
                    raise StoreError(f"{name} was not ready within {deadline_s:g} s{self._last(number)}")
                part = os.read(process.stdout.fileno(), _LINE_BYTES_MAX)
                if not part:
                    raise StoreError(self._ended(number))
                line += part
            self.addresses.append(msgspec.json.decode(line, type=Ready).address)
            process.stdout.close()

    def gone(self, server: int) -> str | None:
        """Why a server is gone, if it is."""
        code = self._processes[server].poll()
        return None if code is None else f"(process {self._processes[server].pid}) ended with exit code {code}"

    def close(self) -> None:
        """Have all end in order, or end them; a second call does nothing."""
        for process in self._processes:
            process.terminate()
        until = time.monotonic() + END_S
        for process in self._processes:
            try:
                process.wait(max(until - time.monotonic(), 0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()

    def _ended(self, number: int) -> str:
        code = self._processes[number].wait()
        return f"server {number} ended with exit code {code} before it was ready{self._last(number)}"

    def _last(self, number: int) -> str:
        """The last line of its log."""
        log = self._logs[number]
        lines = [] if log is None else log.read_text(encoding="utf-8", errors="replace").splitlines()
        return f": {lines[-1]} (see {log})" if lines else ": its log says why"


def start_servers(
    num_servers: int,
    *,
    store: Literal["memory", "mapped"] = "memory",
    directory: Path | None = None,
    logs: Path | None = None,
    memory_max: int | None = None,
    resident_max: int | None = None,
    checkpoints: Sequence[Path] = (),
    deadline_s: float = READY_S,
) -> LocalServers:
    """Start so many servers on this machine and wait until they can be reached.

    `directory` is where rows that are `mapped` have their files; `logs` has a file of each one's log. Checkpoints are
    written and read in and below `checkpoints` only.
    """
    if num_servers < 1:
        raise ConfigError(f"servers is {num_servers}: give at least 1")
    servers = LocalServers(run=os.urandom(16))
    try:
        for number in range(num_servers):
            options = ServerOptions(
                server=number,
                servers=num_servers,
                run=servers.run,
                store=store,
                directory=None if directory is None else str(directory.resolve()),
                memory_max=memory_max,
                resident_max=resident_max,
                parent=os.getpid(),
                checkpoints=tuple(str(path.resolve()) for path in checkpoints),
            )
            servers.start(options, None if logs is None else logs / f"server-{number}.log")
        servers.wait_until_ready(deadline_s)
    except BaseException:
        servers.close()
        raise
    return servers


def open_store(config: Config, tables: Sequence[RowSource], run_dir: Path) -> RemoteStore:
    """The store of a run with servers: starts them, and ends them when it is closed."""
    return open_stores(config, tables, run_dir, 1)[0]


def open_stores(config: Config, tables: Sequence[RowSource], run_dir: Path, trainers: int) -> list[RemoteStore]:
    """The same for each of several trainers of this process; servers end when the last of them is closed.

    Checkpoints may lie in the run's directory and below, and where it begins from.
    """
    servers = start_servers(
        config.servers,
        store="memory" if config.store == "memory" else "mapped",
        directory=config.rows_directory(run_dir),
        logs=run_dir,
        resident_max=None if config.store_memory is None else store_memory_bytes(config.store_memory, config.store),
        checkpoints=[run_dir, *([] if config.init_from is None else [config.init_from.resolve().parent])],
    )
    network, stores, in_use = SocketNetwork(), list[RemoteStore](), Semaphore(trainers - 1)

    def end() -> None:
        if in_use.acquire(blocking=False):
            return  # others use them still
        servers.close()

    try:
        for trainer in range(trainers):
            store = RemoteStore(
                tables,
                servers.addresses,
                network,
                run=servers.run,
                trainer=trainer,
                trainers=trainers,
                shared_memory=config.wire.shared_memory,
                patience=Patience(retry_s=min(5.0, config.wire.deadline_s / 4), deadline_s=config.wire.deadline_s),
                watch=servers.gone,
                on_close=end,
            )
            stores.append(store)
    except BaseException:
        for store in stores:
            store.close()
        servers.close()
        raise
    return stores
