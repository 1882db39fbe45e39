"""A connection to Ray: one of our own, started on this machine and ended with the run, or a cluster that is joined.

Our own listens on loopback only, asks for a token that nobody else has, sends no statistics anywhere, keeps its files
in a directory of its own, and is ended by its keeper whatever happens to this process. A cluster is left as it was.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from bagpipe.cluster.extra import import_ray
from bagpipe.errors import ClusterError, ConfigError, DeadlineError
from bagpipe.signals import handled
from bagpipe.wire.keys import parse_address

KEEPER = Path(__file__).with_name("keeper.py")
START_S = 90.0
END_S = 20.0
REACH_S = 5.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class OwnRay:
    """Starts at once; `connect` waits until it runs."""

    def __init__(self, *, cores: float, gpus: float = 0.0) -> None:
        os.environ.update(_environment())
        self._asked = {"num_cpus": cores} | ({"num_gpus": gpus} if gpus else {})
        self._keeper = subprocess.Popen(  # noqa: S603 - a file of this package, with this interpreter
            [sys.executable, str(KEEPER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for us: what it means to the others we decide
        )
        self._write(json.dumps(self._asked).encode() + b"\n")

    def connect(self) -> ModuleType:
        """Ray, connected."""
        ray = import_ray()  # while it starts
        said = self._answer()
        if "error" in said:
            raise ClusterError(f"Ray can't be started on this machine: {_first_line(said['error'])}")
        _connect(ray, said["address"])
        return ray

    def close(self) -> None:
        """End every process of it; a second call does nothing."""
        if self._keeper.stdin is None or self._keeper.stdin.closed:
            return
        disconnect()
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()
        try:
            self._keeper.wait(END_S)
        except subprocess.TimeoutExpired:
            raise DeadlineError(
                f"process {self._keeper.pid}, which ends the processes of Ray, is not done after {END_S:g} s: end it, "
                "and what runs below it"
            ) from None
        finally:
            assert self._keeper.stdout is not None
            self._keeper.stdout.close()

    def _write(self, line: bytes) -> None:
        assert self._keeper.stdin is not None
        with suppress(BrokenPipeError):  # it says why, or that it is gone
            self._keeper.stdin.write(line)
            self._keeper.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        out = self._keeper.stdout
        assert out is not None
        with selectors.DefaultSelector() as ready:
            ready.register(out, selectors.EVENT_READ)
            if not ready.select(START_S):
                raise DeadlineError(f"Ray did not start within {START_S:g} s: see whether this machine is overloaded")
        line = out.readline()
        if not line:
            raise ClusterError(f"the process that starts Ray ended with {self._keeper.wait(END_S)}: try again")
        said: dict[str, Any] = json.loads(line)
        return said


def join(address: str) -> ModuleType:
    """Ray, connected to a cluster of which this machine is a node."""
    ray = import_ray()
    if address != "auto":
        _check_reachable(address)
    _connect(ray, address)
    return ray


def disconnect() -> None:
    """Leave the Ray that this process is connected to, if it is."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        ray.shutdown()


@contextmanager
def exit_codes_kept() -> Iterator[None]:
    """What a handler of SIGTERM or Ctrl-C raises leaves this block as it is: calls of Ray make SystemExit(1) of it."""
    # Not the errors themselves: with their frames they would keep this block, and its handlers, alive.
    raised: list[tuple[type[BaseException], tuple[Any, ...]]] = []
    found = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in found.items() if callable(handler)}

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            before[signal.Signals(number)](number, frame)
        except BaseException as error:
            raised.append((type(error), error.args))
            raise

    with handled(dict.fromkeys(before, handle)):
        try:
            yield
        except SystemExit:
            if raised:
                kind, arguments = raised[0]
                raise kind(*arguments) from None
            raise


def _connect(ray: ModuleType, address: str) -> None:
    # Ray takes SIGTERM for itself, and ends with another code.
    with handled({number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not None}):
        try:
            ray.init(address=address, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
        except Exception as error:
            raise ClusterError(
                f"the Ray cluster at {address} can't be joined: {_first_line(error)}: see that `ray status` works on "
                "this machine, which must be one of its nodes, and that RAY_AUTH_MODE and the token are those of the "
                "cluster"
            ) from error


def _check_reachable(address: str) -> None:
    """Ray itself would try for a minute."""
    try:
        host, port = parse_address(address)
    except ConfigError:
        raise ConfigError(f"--address is {address!r}: give HOST:PORT of the cluster's head node, or auto") from None
    try:
        socket.create_connection((host, port), REACH_S).close()
    except OSError as error:
        raise ClusterError(
            f"nothing answers at {address} ({error.strerror or error}): give the address that `ray start --head` "
            "printed, HOST:PORT"
        ) from error


def _environment() -> dict[str, str]:
    """For ourselves and everything that the keeper starts; before Ray is imported, which reads it then."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": _token(),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what makes Ray listen on loopback only, also on Linux
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


@functools.cache
def _token() -> str:
    """One for this process: Ray remembers the first it sees."""
    return secrets.token_hex(32)


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0]
