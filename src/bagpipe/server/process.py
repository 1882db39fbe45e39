"""An embedding server as a process: it serves until it is told to end, or until the process that started it is gone.

Started by us it gets its options on standard input, where no other user sees them, and announces itself by one line of
JSON on standard output.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Literal

import msgspec
import numpy as np

from bagpipe.allocator import keep_freed_memory
from bagpipe.errors import BagpipeError, ConfigError
from bagpipe.server.rows_state import Safety
from bagpipe.server.server import EmbeddingServer
from bagpipe.server.storage import Storage, in_files, in_memory
from bagpipe.signals import handled
from bagpipe.store.mapped import RESIDENT_BYTES_MAX, make_directory
from bagpipe.store.versioned import LAYER_BYTES
from bagpipe.visible import log_to_standard_error
from bagpipe.wire.connection import Buffers
from bagpipe.wire.keys import Security, check_security, parse_address
from bagpipe.wire.listener import Listener
from bagpipe.wire.messages import Body, Message, Open, Part, Read, Write
from bagpipe.wire.recovery_messages import Mark

TICK_S = 0.25
OPTIONS_BYTES_MAX = 1 << 16
_log = logging.getLogger(__name__)


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one server needs to know."""

    address: str = "127.0.0.1:0"
    server: int = 0
    servers: int = 1
    run: bytes | None = None
    """The one that it serves; None: that of its first client."""
    store: Literal["memory", "mapped"] = "memory"
    directory: str | None = None
    """For the files of a mapped store, beside others; None: that of temporary files."""
    memory_max: int | None = None
    """Bytes that rows and their ids may take."""
    resident_max: int | None = None
    """Bytes of the files of a mapped store that may be kept in memory."""
    parent: int | None = None
    """The process whose end is also ours."""
    generation: int = 0
    """Of membership: earlier ones are refused from the start. Above 0 it takes the place of a server that has died."""
    rollback: bool = False
    """Whether it keeps in memory what leads back to the last checkpoint; else rows are read from that."""
    history_max: int | None = None
    """Bytes of memory for that; None: a billion."""
    checkpoints: tuple[str, ...] = ()
    """Directories in and below which trainers may have it write and read checkpoints; no others."""

    def check(self) -> None:
        """Refuse what contradicts itself."""
        if not 0 <= self.server < self.servers:
            raise ConfigError(f"server {self.server} of {self.servers}: they are counted from 0")
        if self.directory is not None and self.store != "mapped":
            raise ConfigError(f"a directory ({self.directory}) goes with rows on disk: choose store = mapped")
        for path in self.checkpoints:
            if not Path(path).is_absolute():
                raise ConfigError(f"checkpoints in {path!r}: give the whole path, which is the same for all processes")
        parse_address(self.address)

    def safety(self) -> Safety:
        """How its rows are made safe."""
        return Safety(
            rollback=self.rollback,
            history_bytes_max=LAYER_BYTES if self.history_max is None else self.history_max,
            checkpoints=tuple(map(Path, self.checkpoints)),
        )

    def storage(self) -> Storage:
        """Where its rows are."""
        if self.store == "memory":
            return in_memory(self.memory_max)
        resident = RESIDENT_BYTES_MAX if self.resident_max is None else self.resident_max
        directory = None if self.directory is None else Path(self.directory)
        return in_files(directory, bytes_max=self.memory_max, resident_bytes_max=resident)

    def make_directory(self) -> None:
        """Look at the place of the files now, rather than when the first client comes."""
        if self.directory is not None:
            make_directory(Path(self.directory))


class Ready(msgspec.Struct, frozen=True):
    """What a server says when it can be reached."""

    address: str
    server: int
    servers: int
    pid: int


def serve(
    options: ServerOptions,
    security: Security,
    announce: Callable[[Ready], None],
    stop: threading.Event,
    watch: Callable[[EmbeddingServer], None] = lambda _: None,
) -> None:
    """Serve until `stop` is set or the parent is gone; `announce` is called once clients may come.

    `watch` is given the server itself, whose statistics may be asked for meanwhile.
    """
    options.check()
    check_security(parse_address(options.address), "server", security)
    options.make_directory()
    keep_freed_memory()
    warm_up(options.store)
    if stop.is_set():  # asked to end while kernels were compiled
        return
    server = EmbeddingServer(
        options.storage(),
        server=options.server,
        servers=options.servers,
        run=options.run,
        generation=options.generation,
        safety=options.safety(),
    )
    listener = Listener(options.address, server.handle, security)
    watch(server)
    try:
        _log.info("server %d of %d listens at %s", options.server, options.servers, listener.address)
        announce(Ready(listener.address, options.server, options.servers, os.getpid()))
        while not stop.wait(TICK_S):
            if options.parent is not None and os.getppid() != options.parent:
                _log.warning("server %d ends: the process that started it is gone", options.server)
                break
    finally:
        stats = server.stats()
        listener.close()
        server.close()
        _log.info("server %d ends with %d rows after %d requests", options.server, sum(stats.num_rows), stats.requests)


@contextmanager
def stopped_by_signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT ask for an orderly end."""

    def ask(number: int, _: FrameType | None) -> None:
        _log.info("%s: ending", signal.Signals(number).name)
        stop.set()

    with handled({signal.SIGTERM: ask, signal.SIGINT: ask}):
        yield


def warm_up(store: Literal["memory", "mapped"]) -> None:
    """Have the kernels loaded, or compiled on a machine's first run, before a client waits for them."""
    with tempfile.TemporaryDirectory(prefix="bagpipe-") as path:
        server = EmbeddingServer(in_memory() if store == "memory" else in_files(Path(path)))
        ids, rows = memoryview(np.arange(2).tobytes()), memoryview(np.ones(2, np.float32).tobytes())
        parts = [Part(0, 2)]
        itself = _Itself()
        for body, buffers in (
            (Open(0, 1, [1], "writes"), ()),
            (Write(0, 1, 0, parts), (ids, rows)),
            (Read(parts), (ids,)),
            (Mark(0, 2, 1, ""), ()),
            (Write(0, 3, 1, parts), (ids, rows)),
            (Read(parts), (ids,)),
        ):
            server.handle(itself, Message(bytes(16), 0, 0, body, buffers))
        server.close()


class _Itself:
    """A peer whose requests are made here and whose answers nobody needs."""

    name = "this process"
    state: object = None

    def admit(self, kind: str = "") -> None:
        """Nothing is counted."""

    def reply(self, body: Body, buffers: Buffers = ()) -> None:
        """Nothing is sent."""

    def still_waiting(self, why: str, progress: int = 0) -> None:
        """Nothing is waited for."""
        raise AssertionError(f"{why} ({progress})")

    def give_back(self) -> None:
        """Nothing is counted."""

    def take_descriptor(self) -> int | None:
        """There is none."""
        return None


def main() -> int:
    """A server that another process of ours has started."""
    log_to_standard_error()
    stop = threading.Event()

    def announce(ready: Ready) -> None:
        sys.stdout.write(msgspec.json.encode(ready).decode() + "\n")
        sys.stdout.flush()

    try:
        options = msgspec.json.decode(sys.stdin.buffer.readline(OPTIONS_BYTES_MAX), type=ServerOptions)
        with stopped_by_signals(stop):
            serve(options, None, announce, stop)
    except (BagpipeError, msgspec.MsgspecError) as error:
        _log.error("%s: %s", type(error).__name__, error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
