"""Where trainers in processes of their own find each other, and how one that stops tells the others why.

Waits have deadlines and name who has not come (I7); trainers that do not fit together are refused (I8).
"""

from __future__ import annotations

import hmac
import re
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from select import POLLIN, poll
from threading import Lock
from typing import Any, NamedTuple

import msgspec
import torch.distributed

from bagpipe.cluster.interface import LOOPBACK, find_address
from bagpipe.errors import (
    BagpipeError,
    ConfigError,
    DeadlineError,
    GenerationOverError,
    PeerLostError,
    PipelineError,
    again,
)
from bagpipe.trainer.collective import name_trainers

c10d: Any = torch.distributed  # whose types leave out the names below
_REASON_BYTES_MAX = 2000
_WORD_BYTES_MAX = 1 << 16
_ASIDE_S = 2.0
"""What reaching the meeting point, or a trainer's listener, may take beside a failure."""
_WORD_S = 10.0
"""How long to wait for the word of a trainer that neither says why it stopped nor ends: where its connection broke on
the way, it waits for ours."""
_LOOK_S = 0.01
_HEAR_S = 0.2
"""How soon it is noticed that nobody wants to hear it any more."""
_TOKEN_BYTES = 16


class Reason(NamedTuple):
    """Why a trainer has stopped."""

    trainer: int
    """Which one stopped by itself: others pass its reason on."""
    text: str
    lost: int | None = None
    """It only lost the connection to this trainer, or waited for it in vain, and does not know why."""
    exchange: str = ""
    """In which it did so."""
    over: int | None = None
    """It was told that this generation is over."""


class MeetingPoint:
    """Where trainers find each other: listens on one interface of trainer 0's machine."""

    def __init__(self, interface: str = LOOPBACK, port: int = 0) -> None:
        host = find_address(interface)
        try:
            listening = _listen(host, port)
        except OSError as error:
            raise ConfigError(
                f"trainers can't meet at {join_address(host, port)}: {error}: give a free port"
            ) from error
        with listening as listener:
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
        given_up: Callable[[], BagpipeError | None] = lambda: None,
    ) -> None:
        """`given_up` says why the others need not be waited for any more, if so."""
        self.rank, self.size = rank, size
        self._lines: dict[int, _Line] = {}
        self._telling, self._told = Lock(), False
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

    def connect(self, host: str) -> None:
        """Return when this trainer has a line to each other one; it listens at `host` until then."""
        try:
            self._lines = self._connected(host)
        except (OSError, RuntimeError) as error:
            raise PipelineError(
                f"trainer {self.rank} can't connect to the others from {host}: {error}: can they reach each other on "
                "this interface?"
            ) from error

    def tell(self, reason: Reason | BaseException | str, exchange: str = "", peer: int | None = None) -> None:
        """Say why this trainer stops, with the peer whose fault it may be; the first reason counts.

        Who tells first and then ends its connections is never taken for one that was lost without a word.
        """
        if not isinstance(reason, Reason):
            text = describe(reason).encode()[:_REASON_BYTES_MAX].decode(errors="ignore")
            lost = reason.rank if isinstance(reason, PeerLostError) else peer
            over = reason.generation if isinstance(reason, GenerationOverError) else None
            reason = Reason(self.rank, text, lost, exchange, over)
        word = msgspec.json.encode(reason)
        with self._telling:
            told, self._told = self._told, True
            for line in () if told else self._lines.values():
                line.tell(word)

    def hear(self, peer: int, within_s: float = _WORD_S) -> Reason | None:
        """Why a trainer stops; None: it ended without a word, or gave none in time."""
        line = self._lines.get(peer)
        return None if line is None else line.hear(within_s, self._given_up)

    def close(self) -> None:
        """Let go of all connections. May be called twice."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            line.close()
        self.store = None

    def _connected(self, host: str) -> dict[int, _Line]:
        """To lower ranks by connecting, from higher ones by accepting: the system accepts before anybody asks it to."""
        until, lines, token = time.monotonic() + self._deadline_s, dict[int, _Line](), secrets.token_bytes(_TOKEN_BYTES)
        try:
            with _listen(host, 0) as listener:
                listener.settimeout(_LOOK_S)
                own = join_address(host, listener.getsockname()[1])
                self.store.set(f"line/{self.rank}", f"{own} {token.hex()}")
                for peer in range(self.rank):
                    self._wait([f"line/{peer}"])
                    address, theirs = self.store.get(f"line/{peer}").decode().split()
                    line = socket.create_connection(split_address(address), max(until - time.monotonic(), _LOOK_S))
                    lines[peer] = _Line(line)
                    line.sendall(bytes.fromhex(theirs) + self.rank.to_bytes(4, "little"))
                while len(lines) < self.size - 1:
                    self._check_time(until)
                    with suppress(TimeoutError):
                        _admit(listener.accept()[0], token, range(self.rank + 1, self.size), lines)
        except BaseException:
            for each in lines.values():
                each.close()
            raise
        return lines

    def _wait(self, keys: Sequence[str]) -> None:
        """Return when all are there; in short steps, so that it can be given up."""
        until = time.monotonic() + self._deadline_s
        while not self.store.check(list(keys)):
            self._check_time(until)
            time.sleep(_LOOK_S)

    def _check_time(self, until: float) -> None:
        if (error := self._given_up()) is not None:
            raise again(error, f"trainer {self.rank} does not wait for the others any more: {error}")
        if time.monotonic() > until:
            raise RuntimeError("they did not come")

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


class _Line:
    """A connection to another trainer: silent until one of the two stops, who says why and says no more.

    Its end without a word is that of the process, however busy or late all others are.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(_ASIDE_S)
        self._connection = connection
        self._hearing, self._received, self._ended = Lock(), bytearray(), False

    def tell(self, word: bytes) -> None:
        with suppress(OSError):  # it has gone, or nobody listens
            self._connection.sendall(word)
            self._connection.shutdown(socket.SHUT_WR)

    def hear(self, within_s: float, given_up: Callable[[], BagpipeError | None]) -> Reason | None:
        until = time.monotonic() + within_s
        with self._hearing:
            while not self._ended and given_up() is None and time.monotonic() < until:
                self._receive()
            try:
                return msgspec.json.decode(self._received, type=Reason) if self._ended else None
            except msgspec.MsgspecError:
                return None

    def close(self) -> None:
        with suppress(OSError):  # the other end has closed it
            self._connection.shutdown(socket.SHUT_RDWR)  # which also ends the wait of another thread
        with self._hearing:
            self._connection.close()
            self._ended = True

    def _receive(self) -> None:
        ready = poll()
        ready.register(self._connection, POLLIN)
        if ready.poll(1e3 * _HEAR_S):
            try:
                received = self._connection.recv(_WORD_BYTES_MAX)
            except OSError:  # a reset
                received = b""
            self._received += received
            self._ended = not received or len(self._received) > _WORD_BYTES_MAX


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=socket.SOMAXCONN)


def _admit(connection: socket.socket, token: bytes, ranks: Sequence[int], lines: dict[int, _Line]) -> None:
    """Take a line from another trainer; whoever else connects is cut."""
    connection.settimeout(_ASIDE_S)
    hello = b""
    with suppress(OSError):
        while len(hello) < _TOKEN_BYTES + 4 and (more := connection.recv(_TOKEN_BYTES + 4 - len(hello))):
            hello += more
    rank = int.from_bytes(hello[_TOKEN_BYTES:], "little")
    if hmac.compare_digest(hello[:_TOKEN_BYTES], token) and rank in ranks and rank not in lines:
        lines[rank] = _Line(connection)
    else:
        connection.close()


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
    """The first sentence of what torch says, without its source files; for people, nothing is decided by it."""
    text = re.sub(r"\[\S*\.(cc|cpp|h):\d+\]\s*", "", str(error)).strip()
    return re.split(r"\. This is|\n|\. Original", text)[0].rstrip(". ") or type(error).__name__
