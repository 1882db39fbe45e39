"""Marks and checkpoints of rows that are on servers: all of them do the same, and what is kept lies with server 0."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal

import msgspec

from bagpipe.errors import BagpipeError, CheckpointError, DeadlineError
from bagpipe.store.links import Request, Session
from bagpipe.store.recovery_requests import (
    KeptRequest,
    MarksRequest,
    Ordered,
    WorkRequest,
    blob_requests,
    keep_requests,
)
from bagpipe.store.requests import OrderedRequest
from bagpipe.wire.messages import Body
from bagpipe.wire.recovery_messages import Forget, Load, Mark, ReturnTo, Save, Settle

if TYPE_CHECKING:
    from bagpipe.checkpoint.manifest import FileEntry

_PAUSE_S, _PAUSE_S_MAX = 0.01, 0.25


class RemoteMarks(ABC):
    """What a store over servers can do so that nothing is lost; `Marked` in `bagpipe.store.base` says what it means."""

    _session: Session
    _writing: Lock
    """Held while anything is sent that servers decide in order."""
    _bytes_max: int
    _refusal: str | None
    _halfway: str | None = None
    """Rows were to be replaced, and are not all; until that is done they are refused too."""

    @abstractmethod
    def _ask(self, requests: Sequence[Iterator[Request]]) -> list[BagpipeError | None]:
        """Have requests to each server answered; how each has failed."""

    @abstractmethod
    def _check_usable(self) -> None: ...

    def mark(self, done: int) -> None:
        """Make the rows as they are now a point to return to, on all servers."""
        self._order(f"mark {done}", lambda trainer, sequence: Mark(trainer, sequence, done))

    def marks(self) -> list[int]:
        """The marks that all servers can return to, in ascending order."""
        self._check_usable()
        requests = [MarksRequest() for _ in self._session.addresses]
        raise_first(self._ask([iter([request]) for request in requests]))
        return sorted(set.intersection(*(set(request.marks.marks) for request in requests)))

    def forget(self, before: int) -> None:
        """Drop the marks below `before`, and what was kept with them."""
        self._order(f"no marks before {before}", lambda trainer, sequence: Forget(trainer, sequence, before))

    def settle(self, done: int) -> None:
        """The checkpoint of mark `done` is complete: what is logged of earlier writes is not needed any more."""
        self._order(f"a shorter journal from {done} on", lambda trainer, sequence: Settle(trainer, sequence, done))

    def return_to(self, done: int) -> None:
        """Make all rows what they were at a mark; later marks are gone."""
        self._replace(f"a return to mark {done}", lambda trainer, sequence: ReturnTo(trainer, sequence, done))

    def keep(self, done: int, name: str, blob: bytes) -> None:
        """Keep bytes with a mark, one that is there or the next to be made."""
        self._check_usable()
        self._ask_first(keep_requests(done, name, blob, self._bytes_max))

    def kept(self, done: int) -> dict[str, bytes]:
        """What was kept with a mark, by name."""
        self._check_usable()
        found = KeptRequest(done)
        self._ask_first(iter([found]))
        blobs: dict[str, bytearray] = {}
        self._ask_first(blob_requests(done, found.blobs, blobs, self._bytes_max))
        return {name: bytes(blob) for name, blob in blobs.items()}

    def save(
        self,
        done: int,
        directory: Path,
        names: Sequence[str],
        *,
        since: int | None = None,
        compress: Literal["zstd"] | None = None,
    ) -> list[FileEntry]:
        """Have all servers write the rows of a mark to files in a directory; return when they are there."""
        from bagpipe.checkpoint.manifest import FileEntry

        place = str(directory.absolute())
        what = f"files of mark {done} in {directory}"
        begun = self._order(
            what, lambda trainer, sequence: Save(trainer, sequence, done, place, list(names), since, compress)
        )
        written = []
        for result in self._finish(what, begun):
            try:
                written += msgspec.json.decode(result, type=list[FileEntry])
            except msgspec.MsgspecError as error:
                raise CheckpointError(f"a server told wrongly what files it wrote in {directory}: {error}") from error
        return written

    def load(self, done: int, directory: Path, names: Sequence[str]) -> None:
        """Replace all rows by those of checkpoint `done` of a directory of checkpoints; then that is the only mark."""
        place = str(directory.absolute())
        self._replace(
            f"checkpoint {done} of {directory}",
            lambda trainer, sequence: Load(trainer, sequence, done, place, list(names)),
        )

    def _ask_first(self, requests: Iterator[Request]) -> None:
        """Ask the server that keeps what goes with marks."""
        others: list[Iterator[Request]] = [iter([]) for _ in self._session.addresses[1:]]
        raise_first(self._ask([requests, *others]))

    def _order(self, what: str, make: Callable[[int, int], Body], replaces: bool = False) -> list[Ordered]:
        """Have all servers do something once, in order with what this trainer writes."""
        if not replaces or self._refusal is not None:
            self._check_usable()
        with self._writing:
            requests = [Ordered(what, make) for _ in self._session.addresses]
            try:
                raise_first(self._ask([iter([request]) for request in requests]))
            except BaseException as error:
                self._refuse_if_unknown(requests, what, error, replaces)
                raise
        return requests

    def _refuse_if_unknown(
        self, requests: Sequence[OrderedRequest], what: str, error: BaseException, replaces: bool
    ) -> None:
        """The next write would have the number of what nobody knows the outcome of."""
        if any(request.undecided or (replaces and request.written) for request in requests):
            self._refusal = f"servers were asked for {what}, and not all have answered ({error}): start again"

    def _replace(self, what: str, make: Callable[[int, int], Body]) -> None:
        """Have all servers replace their rows."""
        begun = self._order(what, make, replaces=True)
        try:
            self._finish(what, begun)
        except BaseException as error:
            self._halfway = f"{what} failed halfway ({error}): load a checkpoint"
            raise
        self._halfway = None

    def _finish(self, what: str, begun: Sequence[OrderedRequest]) -> list[bytes]:
        """Wait until all servers are done with what takes long, or have failed; and while there is progress."""
        network, deadline_s = self._session.network, self._session.patience.deadline_s
        requests = [WorkRequest(what, request.sequence) for request in begun]
        failures: list[BagpipeError | None] = [None] * len(requests)
        last, pause_s = network.now(), _PAUSE_S
        while waiting := [n for n, each in enumerate(requests) if each.result is None and failures[n] is None]:
            before = [(request.progress, request.result) for request in requests]
            found = self._ask([iter([each] if n in waiting else []) for n, each in enumerate(requests)])
            failures = [old or new for old, new in zip(failures, found, strict=True)]
            if before != [(request.progress, request.result) for request in requests]:
                last, pause_s = network.now(), _PAUSE_S
            elif network.now() - last >= deadline_s:
                names = ", ".join(map(self._session.name, waiting))
                raise DeadlineError(
                    f"no progress with {what} for {network.now() - last:.0f} s at {names}: see whether its disk answers"
                )
            network.wait([], pause_s)
            pause_s = min(pause_s * 1.5, _PAUSE_S_MAX)
        raise_first(failures)
        return [request.result or b"" for request in requests]


def raise_first(failures: Sequence[BagpipeError | None]) -> None:
    """Raise the failure of the first server that has failed, if any has."""
    for failure in failures:
        if failure is not None:
            raise failure
