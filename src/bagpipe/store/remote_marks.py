"""Marks and checkpoints of rows that are on servers: all of them do the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

import msgspec

from bagpipe.errors import BagpipeError, CheckpointError, DeadlineError
from bagpipe.store.links import Request, Session
from bagpipe.store.recovery_requests import Ordered, WorkRequest
from bagpipe.store.requests import ConfirmRequest, OrderedRequest
from bagpipe.wire.messages import Body
from bagpipe.wire.recovery_messages import Load, Mark, Save, Saved

if TYPE_CHECKING:
    from bagpipe.checkpoint.manifest import FileEntry
    from bagpipe.checkpoint.point import ResumePoint

_PAUSE_S, _PAUSE_S_MAX = 0.01, 0.25


class RemoteMarks(ABC):
    """What a store over servers can do so that nothing is lost; `Marked` in `bagpipe.store.base` says what it means."""

    _session: Session
    _writing: Lock
    """Held while anything is sent that servers decide in order."""
    _refusal: str | None
    _halfway: str | None = None
    """Rows were to be replaced, and are not all; until that is done they are refused too."""

    @abstractmethod
    def _ask(self, requests: Sequence[Iterator[Request]]) -> list[BagpipeError | None]:
        """Have requests to each server answered; how each has failed."""

    @abstractmethod
    def _check_usable(self) -> None: ...

    def mark(self, done: int, token: str = "") -> None:
        """Hold on to the rows as they are now, on all servers."""
        self._order(f"mark {done}", lambda trainer, sequence: Mark(trainer, sequence, done, token))

    def save(self, done: int, directory: Path, names: Sequence[str], *, since: int | None = None) -> list[FileEntry]:
        """Have all servers write the rows of a mark to files in a directory; return when they are there."""
        from bagpipe.checkpoint.manifest import FileEntry

        place = str(directory.absolute())
        what = f"files of mark {done} in {directory}"
        begun = self._order(what, lambda trainer, sequence: Save(trainer, sequence, done, place, list(names), since))
        written = []
        for result in self._finish(what, begun):
            try:
                written += msgspec.json.decode(result, type=list[FileEntry])
            except msgspec.MsgspecError as error:
                raise CheckpointError(f"a server told wrongly what files it wrote in {directory}: {error}") from error
        return written

    def saved(self, done: int, checkpoint: Path) -> None:
        """The checkpoint of a mark is complete; return when all servers know, and have let go of what came before."""
        what = f"nothing from before the checkpoint {checkpoint}"
        place = str(checkpoint.absolute())
        self._finish(what, self._order(what, lambda trainer, sequence: Saved(trainer, sequence, done, place)))

    def confirm(self) -> None:
        """WireError if another generation has begun, which the first server knows."""
        self._check_usable()
        others: list[Iterator[Request]] = [iter([]) for _ in self._session.addresses[1:]]
        raise_first(self._ask([iter([ConfirmRequest()]), *others]))

    def restore(self, point: ResumePoint, names: Sequence[str]) -> None:
        """Make all rows those of a checkpoint, which is then the only mark."""
        place = str(point.checkpoint)
        self._replace(
            f"{point}, {place},",
            lambda trainer, sequence: Load(trainer, sequence, point.done, place, point.checksum, list(names)),
        )

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
