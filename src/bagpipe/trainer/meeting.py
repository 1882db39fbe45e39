"""Where trainers in processes of their own find each other, and leave word when they fail.

Waits have deadlines and name who has not come (I7); trainers that do not fit together are refused (I8).
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed

from bagpipe.cluster.interface import LOOPBACK, find_address
from bagpipe.errors import ConfigError, DeadlineError, PeerLostError, PipelineError
from bagpipe.trainer.collective import name_trainers

c10d: Any = torch.distributed  # whose types leave out the names below
_REASON_BYTES_MAX = 2000
_ASIDE_S = 2.0
"""What asking for a peer's reason may take, when its connection is gone already."""
_SETTLE_S = 0.1
"""A process that was killed closes its sockets one after the other."""
_LOOK_S = 0.01
_LINGER_S = 0.5
"""How long the meeting point stays open after a failure, so that others can ask for the reason."""


class Reason(NamedTuple):
    """Why a trainer has stopped."""

    text: str
    lost: int | None
    """It only lost the connection to this trainer, or waited for it in vain, and does not know why."""
    exchange: str
    """In which it did so."""


class MeetingPoint:
    """Where trainers find each other: listens on one interface of trainer 0's machine."""

    def __init__(self, interface: str = LOOPBACK, port: int = 0) -> None:
        host = find_address(interface)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((host, port))
            except OSError as error:
                raise ConfigError(
                    f"trainers can't meet at {join_address(host, port)}: {error}: give a free port"
                ) from error
            listener.listen(socket.SOMAXCONN)
            self.address = join_address(host, listener.getsockname()[1])
            # By itself the store would listen on all interfaces.
            self._store: Any = c10d.TCPStore(
                host,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

    def close(self) -> None:
        """Stop listening. May be called twice."""
        self._store = None


class Meeting:
    """What trainers tell each other before they are connected, and when they fail."""

    def __init__(
        self,
        address: str,
        rank: int,
        size: int,
        prefix: str,
        deadline_s: float,
        given_up: Callable[[], str] = lambda: "",
    ) -> None:
        """`given_up` says why the others need not be waited for any more, if so."""
        self.rank, self.size, self.failed = rank, size, False
        self._given_up = given_up
        self._deadline_s, self._address = deadline_s, address
        host, port = split_address(address)
        try:
            client = c10d.TCPStore(
                host, port, is_master=False, timeout=timedelta(seconds=deadline_s), wait_for_workers=False
            )
        except RuntimeError as error:
            raise DeadlineError(
                f"trainer {rank} did not reach trainer 0 at {address} within {deadline_s:g} s: {sentence(error)}: "
                "is it running, and may this machine connect to it?"
            ) from error
        self.store: Any = c10d.PrefixStore(prefix, client)

    def gather(self, point: str, value: str) -> None:
        """Return when all trainers have come to this point with the same value."""
        if self.store.add(f"{point}/times/{self.rank}", 1) > 1:
            raise ConfigError(f"two trainers have rank {self.rank} at {self._address}: give each a rank of its own")
        keys = [f"{point}/{rank}" for rank in range(self.size)]
        try:
            self.store.set(keys[self.rank], value)
            for awaited in (keys[:1], keys):  # trainer 0 first: who came with another number waits for nobody else
                self._wait(awaited)
                self._compare(awaited, value)
        except RuntimeError as error:
            missing = self._missing(keys)
            raise DeadlineError(
                f"trainer {self.rank} waited {self._deadline_s:g} s at {self._address} for {name_trainers(missing)} of "
                f"{self.size}: {'is it running?' if missing else sentence(error)}"
            ) from error

    def tell(self, reason: BaseException | str, exchange: str = "", peer: int | None = None) -> None:
        """Leave word of why this trainer stops, with the peer whose fault it may be; the first reason counts."""
        text = describe(reason).encode()[:_REASON_BYTES_MAX].decode(errors="ignore")
        lost = reason.rank if isinstance(reason, PeerLostError) else peer
        self.failed = True
        with suppress(RuntimeError):
            if self._reachable() and self.store.add(f"failed/times/{self.rank}", 1) == 1:
                self.store.set(f"failed/{self.rank}", json.dumps(Reason(text, lost, exchange)))

    def reasons(self) -> dict[int, Reason]:
        """Why other trainers stopped, those that could say it."""
        found: dict[int, Reason] = {}
        self.failed = True
        time.sleep(_SETTLE_S)
        with suppress(RuntimeError):
            for rank in range(self.size) if self._reachable() else ():
                if rank != self.rank and self.store.check([f"failed/{rank}"]):
                    found[rank] = Reason(*json.loads(self.store.get(f"failed/{rank}")))
        return found

    def waits_too(self, rank: int, exchange: str) -> bool:
        """Whether another trainer has failed at the same exchange; its deadline may be a little later."""
        until = time.monotonic() + _ASIDE_S
        while True:
            found = self.reasons().get(rank)
            if found is not None or time.monotonic() > until:
                return found is not None and found.exchange == exchange

    def close(self) -> None:
        """Let go of the connection. May be called twice."""
        if self.failed and self.rank == 0 and self.store is not None:
            time.sleep(_LINGER_S)
        self.store = None

    def _wait(self, keys: Sequence[str]) -> None:
        """Return when all are there; in short steps, so that it can be given up."""
        until = time.monotonic() + self._deadline_s
        while not self.store.check(list(keys)):
            if reason := self._given_up():
                raise PipelineError(f"trainer {self.rank} does not wait for the others any more: {reason}")
            if time.monotonic() > until:
                raise RuntimeError("they did not come")
            time.sleep(_LOOK_S)

    def _compare(self, keys: Sequence[str], value: str) -> None:
        for rank, key in enumerate(keys):
            said = self.store.get(key).decode()
            if said != value:
                raise ConfigError(f"trainer {rank} has {said}, trainer {self.rank} has {value}: give all the same")

    def _reachable(self) -> bool:
        """Whether the meeting point can be asked; torch would print a stack trace where it can't."""
        if self.store is None:
            return False
        try:
            socket.create_connection(split_address(self._address), _ASIDE_S).close()
        except OSError:
            return False
        self.store.set_timeout(timedelta(seconds=_ASIDE_S))
        return True

    def _missing(self, keys: Sequence[str]) -> list[int]:
        with suppress(RuntimeError):
            return [rank for rank, key in enumerate(keys) if self._reachable() and not self.store.check([key])]
        return []


def listening_at(address: str) -> MeetingPoint:
    """A meeting point at an address of this machine, whose host may be a name."""
    host, port = split_address(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0]
    except OSError as error:
        raise ConfigError(f"address {address!r} can't be resolved: {error}: give this machine's own address") from error
    return MeetingPoint(str(found), port)


def join_address(host: str, port: int) -> str:
    """As `split_address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of host:port or [host]:port."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"address {address!r} is not host:port, such as 10.0.0.1:29400")
    return host.removeprefix("[").removesuffix("]"), int(port)


def describe(reason: BaseException | str) -> str:
    """A reason as others are told it."""
    return reason if isinstance(reason, str) else f"{type(reason).__name__}: {reason}"


def sentence(error: BaseException) -> str:
    """The first sentence of what torch says, without its source files."""
    text = re.sub(r"\[\S*\.(cc|cpp|h):\d+\]\s*", "", str(error)).strip()
    return re.split(r"\. This is|\n|\. Original", text)[0].rstrip(". ") or type(error).__name__
