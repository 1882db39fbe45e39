"""What trainers ask of a server so that nothing is lost, beyond reads and writes: marks, kept state, checkpoints."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TypeAlias

from bagpipe import failpoints
from bagpipe.errors import StoreError, WireError
from bagpipe.server.blobs import Pieces
from bagpipe.server.limits import ServerLimits
from bagpipe.server.membership import Membership
from bagpipe.server.shard import Shard
from bagpipe.server.work import Work
from bagpipe.wire.messages import Body
from bagpipe.wire.recovery_messages import (
    AskBlob,
    AskKept,
    AskWork,
    Blob,
    Forget,
    Keep,
    Keeping,
    Kept,
    KeptBlob,
    Load,
    Mark,
    ReturnTo,
    Save,
    Settle,
    Worked,
    Working,
)

ORDERED = Mark | Forget | Settle | ReturnTo | Save | Load
MARKING = ORDERED | Keep | AskKept | AskBlob | AskWork
OrderedBody: TypeAlias = Mark | Forget | Settle | ReturnTo | Save | Load
MarkingBody: TypeAlias = Keep | AskKept | AskBlob | AskWork

_WORKS_KEPT = 16
_REPLACING = "rows are replaced"
_CONDENSING = "condensing the journal"
Answered: TypeAlias = tuple[Body, Sequence[memoryview]]


class Marking:
    """Marks of one server's rows, what is kept with them, and what is being saved or loaded."""

    def __init__(self, shard: Shard, limits: ServerLimits, members: Membership) -> None:
        self._shard, self._limits, self._members = shard, limits, members
        self._pieces = Pieces(limits.blob_bytes_max, limits.kept_bytes_max)
        self._works: OrderedDict[tuple[int, int], Work] = OrderedDict()
        self._lock = Lock()

    def apply(self, body: OrderedBody) -> list[Work]:
        """Do this, once and while nobody writes; what takes long is only prepared, and given back to be done."""
        if body.trainer:
            raise StoreError(f"trainer {body.trainer} asks for {type(body).__name__}: trainer 0 does that for all")
        if isinstance(body, Mark):
            self._shard.mark(body.done)
            failpoints.reach("server.mark.made")
        elif isinstance(body, Forget):
            self._shard.forget(body.before)
            return self._condense(body)
        elif isinstance(body, Settle):
            self._shard.settle(body.done)
        else:
            return [self._begin(body)]
        return []

    def answer(self, trainer: int, body: Body, buffers: Sequence[memoryview]) -> Answered:
        """What may be asked any number of times."""
        if isinstance(body, Keep):
            return self._keep(body, buffers), ()
        if isinstance(body, AskKept):
            kept = self._shard.kept(body.done)
            return Kept([KeptBlob(name, len(blob), zlib.crc32(blob)) for name, blob in kept.items()]), ()
        if isinstance(body, AskBlob):
            return self._blob(body)
        assert isinstance(body, AskWork), "the server knows what it takes"
        with self._lock:
            work = self._works.get((trainer, body.sequence))
        if work is None:
            raise StoreError(f"nothing was begun with number {body.sequence}, or it is forgotten: begin anew")
        if not work.is_over:
            return Working(work.progress), ()
        if work.failed is not None:
            return work.failed, ()
        return Worked(), (memoryview(work.result or b""),)

    def stop(self) -> None:
        """Nothing is under way any more when this returns; if it raises, something may be: call it again."""
        with self._lock:
            works = list(self._works.items())
        for key, work in works:
            work.stop()
            with self._lock:
                self._works.pop(key, None)
        self._pieces.clear()

    def _condense(self, body: Forget) -> list[Work]:
        """Nobody waits for it, and it gives way to whatever somebody asks for."""
        if self._busy() is not None or (condensing := self._shard.begin_condense(body.before)) is None:
            return []
        work = Work(_CONDENSING, lambda work: condensing.write(work.report), condensing.close)
        self._note(body, work)
        return [work]

    def _busy(self) -> Work | None:
        with self._lock:
            return next((work for work in self._works.values() if not work.is_over), None)

    def _note(self, body: OrderedBody, work: Work) -> None:
        with self._lock:
            self._works[body.trainer, body.sequence] = work
            while len(self._works) > _WORKS_KEPT:
                self._works.popitem(last=False)

    def _begin(self, body: ReturnTo | Save | Load) -> Work:
        busy = self._busy()
        if busy is not None and busy.what == _CONDENSING:
            busy.stop()
        elif busy is not None:
            raise StoreError(f"{busy.what} is under way: ask for one thing at a time")
        if isinstance(body, Save):
            work = self._save(body)
        elif isinstance(body, Load):
            place, names = self._shard.checked(body.directory), body.names
            self._shard.check_load(body.done, place, names)
            work = Work(
                f"loading checkpoint {body.done}",
                lambda work: self._alone(lambda: self._shard.load(body.done, place, names, work.report)),
            )
        else:
            self._shard.check_mark(body.done)
            work = Work(
                f"the return to mark {body.done}", lambda _: self._alone(lambda: self._shard.return_to(body.done))
            )
        self._note(body, work)
        return work

    def _save(self, body: Save) -> Work:
        """The mark is held from now on, also if it is forgotten meanwhile."""
        save = self._shard.begin_save(
            body.done,
            self._shard.checked(body.directory, below=True),
            body.names,
            since=body.since,
            compress=body.compress,
        )
        return Work(f"saving mark {body.done}", lambda work: save.write(work.report), save.close)

    def _alone(self, replace: Callable[[], None]) -> bytes:
        """Replace rows while nobody uses them; then iterations are trained anew that trainers had passed."""
        gate = self._members.gate
        try:
            gate.close(_REPLACING)
            replace()
            self._members.count_anew()
            self._pieces.clear()
        finally:
            gate.open(_REPLACING)
        return b""

    def _keep(self, body: Keep, buffers: Sequence[memoryview]) -> Keeping:
        if len(buffers) != 1:
            raise WireError(f"Keep has {len(buffers)} buffers: it needs 1")
        held = self._shard.kept_bytes
        if held + body.num_bytes > self._limits.kept_bytes_max:
            raise StoreError(
                f"{body.name} of mark {body.done} has {body.num_bytes:,} B, {held:,} are kept already and "
                f"{self._limits.kept_bytes_max:,} are allowed: forget earlier marks"
            )
        failpoints.reach("server.keep.received")
        return Keeping(self._pieces.take(body, buffers[0], lambda blob: self._shard.keep(body.done, body.name, blob)))

    def _blob(self, body: AskBlob) -> Answered:
        blob = self._shard.kept(body.done).get(body.name)
        if blob is None:
            raise StoreError(f"nothing is kept as {body.name} with mark {body.done}: ask what is")
        if body.count > self._limits.bytes_max:
            raise StoreError(f"{body.count:,} B at once: {self._limits.bytes_max:,} are allowed, ask for pieces")
        return Blob(), (memoryview(blob)[body.offset : body.offset + body.count],)
