"""Network namespaces joined by links of a given rate, so that trainers and servers are apart on one machine.

Two sides have one link between them; of more sides each has a link to a bridge, as hosts have to a switch. Needs root,
`ip` and `tc`. They are removed when their use ends, however it ends; what a killed process left behind is removed by
the next one.
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
"""The end of a side's link, in its own namespace."""
TRAINER, SERVERS = "trainer", "servers"
_SWITCH = "switch"
"""The namespace of the bridge; no side is called so."""
_NAME = "bagpipe-bench"
_TIMEOUT_S = 20.0
_COUNTERS = Path("/sys/class/net") / DEVICE / "statistics"


class NamespaceError(BagpipeError):
    """Namespaces can't be made, or their link can't be limited."""


class Namespaces:
    """The namespaces of this process; made by `joined_namespaces`."""

    def __init__(self, sides: Sequence[str]) -> None:
        self._sides = list(sides)

    def host(self, side: str) -> str:
        """The address of a side."""
        return f"10.213.71.{1 + self._sides.index(side)}"

    def command(self, side: str, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on one side; the process is the same, so its parent is the caller."""
        return ["ip", "netns", "exec", _namespace(side), *command]

    def limit(self, bits_per_second: int | None) -> None:
        """From now on each direction of each link carries so much, with a queue of 50 ms; None: as much as it can."""
        for namespace, device in self._ends():
            qdisc = ("tc", "-n", namespace, "qdisc")
            if bits_per_second is None:
                _do(*qdisc, "delete", "dev", device, "root")
            else:
                rate = ("rate", f"{bits_per_second}bit", "burst", "64kb", "latency", "50ms")
                _do(*qdisc, "replace", "dev", device, "root", "tbf", *rate)

    def make(self) -> None:
        """Make all of it."""
        for side in self._sides:
            _do("ip", "netns", "add", _namespace(side))
        if self._has_switch:
            _do("ip", "netns", "add", _namespace(_SWITCH))
            _do("ip", "-n", _namespace(_SWITCH), "link", "add", _SWITCH, "type", "bridge")
            _do("ip", "-n", _namespace(_SWITCH), "link", "set", _SWITCH, "up")
            for number, side in enumerate(self._sides):
                _join((_namespace(side), DEVICE), (_namespace(_SWITCH), f"port{number}"))
                _do("ip", "-n", _namespace(_SWITCH), "link", "set", f"port{number}", "master", _SWITCH, "up")
        else:
            first, second = self._sides
            _join((_namespace(first), DEVICE), (_namespace(second), DEVICE))
        for side in self._sides:
            _do("ip", "-n", _namespace(side), "addr", "add", f"{self.host(side)}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                _do("ip", "-n", _namespace(side), "link", "set", device, "up")

    @property
    def _has_switch(self) -> bool:
        return len(self._sides) > 2

    def _ends(self) -> list[tuple[str, str]]:
        """Both ends of every link, as namespace and device: what an end sends is what can be limited there."""
        ends = [(_namespace(side), DEVICE) for side in self._sides]
        if self._has_switch:
            ends += [(_namespace(_SWITCH), f"port{number}") for number in range(len(self._sides))]
        return ends


@contextmanager
def joined_namespaces(sides: Sequence[str] = (TRAINER, SERVERS)) -> Iterator[Namespaces]:
    """Namespaces with unlimited links, two or more. Raises NamespaceError, which says why, where there can be none."""
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise NamespaceError(f"there is no `{program}` here: install iproute2")
    _remove_abandoned()
    namespaces = Namespaces(sides)
    with _ended_in_order():
        try:
            namespaces.make()
            yield namespaces
        finally:
            _remove(os.getpid())


def counted_bytes() -> tuple[int, int]:
    """Bytes that this process's side of the link has sent and received so far."""
    sent, received = (int((_COUNTERS / name).read_text(encoding="ascii")) for name in ("tx_bytes", "rx_bytes"))
    return sent, received


def _join(one: tuple[str, str], other: tuple[str, str]) -> None:
    """A link between two ends, each a namespace and the name of the device there."""
    ends = ("type", "veth", "peer", "name", other[1], "netns", other[0])
    _do("ip", "-n", one[0], "link", "add", one[1], *ends)


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


def _namespace(side: str) -> str:
    return f"{_NAME}-{os.getpid()}-{side}"


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
        if name.startswith(f"{_NAME}-{process}-"):
            _do("ip", "netns", "delete", name)


def _remove_abandoned() -> None:
    for name in _existing():
        process = name.removeprefix(f"{_NAME}-").partition("-")[0]
        if process.isdigit() and not Path(f"/proc/{process}").exists():
            _remove(int(process))
