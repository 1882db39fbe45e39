"""A server of `benchmarks.overlap`, in a process of its own. PyTorch is not needed for that, and takes long to load."""

from __future__ import annotations

import sys
import threading

import msgspec

from bagpipe.server.process import ServerOptions, serve, stopped_by_signals
from bagpipe.wire.keys import find_keys
from benchmarks.children import tell


class ServerJob(msgspec.Struct, frozen=True):
    """What the process is told."""

    options: ServerOptions
    with_keys: bool


def main() -> None:
    """Serve until a signal, or until the parent is gone."""
    job = msgspec.json.decode(sys.stdin.buffer.readline(), type=ServerJob)
    stop = threading.Event()
    with stopped_by_signals(stop):
        serve(job.options, find_keys("server") if job.with_keys else "none", tell, stop)


if __name__ == "__main__":
    main()
