"""Two network namespaces joined by a link of a given rate, so that trainer and servers are apart on one machine.

Needs root, `ip` and `tc`. They are removed when their use ends, however it ends; what a killed process left behind is
removed by the next one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bagpipe.errors import BagpipeError

DEVICE = "bagpipe0"
TRAINER, SERVERS = "trainer", "servers"
HOSTS = {TRAINER: "10.213.71.1", SERVERS: "10.213.71.2"}
_NAME = "bagpipe-bench"
_TIMEOUT_S = 20.0
_COUNTERS = Path("/sys/class/net") / DEVICE / "statistics"


class NamespaceError(BagpipeError):
    """Namespaces can't be made, or their link can't be limited."""


class Namespaces:
    """The namespaces of this process; made by `joined_namespaces`."""

    def command(self, side: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on one side; the process is the same, so its parent is the caller."""
        return ["ip", "netns", "exec", _namespace(side), *command]

    def limit(self, bits_per_second: int | None) -> None:
        """From now on each direction carries so much, with a queue of 50 ms; None: as much as it can."""
        for side in HOSTS:
            qdisc = ("tc", "-n", _namespace(side), "qdisc")
            if bits_per_second is None:
                _do(*qdisc, "delete", "dev", DEVICE, "root")
            else:
                rate = ("rate", f"{bits_per_second}bit", "burst", "64kb", "latency", "50ms")
                _do(*qdisc, "replace", "dev", DEVICE, "root", "tbf", *rate)


@contextmanager
def joined_namespaces() -> Iterator[Namespaces]:
    """Two namespaces with an unlimited link. Raises NamespaceError, which says why, where there can be none."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise NamespaceError(f"there is no `{program}` here: install iproute2")
    _remove_abandoned()
    with _ended_in_order():
        try:
            _make()
            yield Namespaces()
        finally:
            _remove(os.getpid())


def counted_bytes() -> tuple[int, int]:
    """Bytes that this process's side of the link has sent and received so far."""
    sent, received = (int((_COUNTERS / name).read_text(encoding="ascii")) for name in ("tx_bytes", "rx_bytes"))
    return sent, received


def _make() -> None:
    for side in HOSTS:
        _do("ip", "netns", "add", _namespace(side))
    ends = ("type", "veth", "peer", "name", DEVICE, "netns", _namespace(SERVERS))
    _do("ip", "-n", _namespace(TRAINER), "link", "add", DEVICE, *ends)
    for side, host in HOSTS.items():
        _do("ip", "-n", _namespace(side), "addr", "add", f"{host}/30", "dev", DEVICE)
        for device in ("lo", DEVICE):
            _do("ip", "-n", _namespace(side), "link", "set", device, "up")


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """SIGTERM ends this process as Ctrl-C does, so that what is to be removed is."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _namespace(side: str, process: int | None = None) -> str:
    return f"{_NAME}-{os.getpid() if process is None else process}-{side}"


def _do(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)  # noqa: S603
    except subprocess.TimeoutExpired as error:
        raise NamespaceError(f"`{' '.join(command)}` did not end within {_TIMEOUT_S:g} s") from error
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise NamespaceError(f"`{' '.join(command)}` failed: {said[-1] if said else done.returncode}")
    return done.stdout


def _existing() -> list[str]:
    return [line.split()[0] for line in _do("ip", "netns", "list").splitlines() if line.startswith(_NAME)]


def _remove(process: int) -> None:
    for name in _existing():
        if name in (_namespace(side, process) for side in HOSTS):
            _do("ip", "netns", "delete", name)


def _remove_abandoned() -> None:
    for name in _existing():
        process = name.removeprefix(f"{_NAME}-").partition("-")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            _remove(int(process))
