"""The rows of one server, from the moment that their widths are known: marks, checkpoints, and the way back (I2).

Where files may lie was said when the server was started: a path that a client names must be in or below one of those
directories, or it is refused (I8).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TypeAlias

import msgspec

from bagpipe import failpoints
from bagpipe.checkpoint.disk import Disk
from bagpipe.checkpoint.point import START, ResumePoint, check_rows, directory_name
from bagpipe.checkpoint.rows import Report
from bagpipe.errors import StoreError
from bagpipe.server.rows import RowAccess
from bagpipe.server.storage import Storage
from bagpipe.server.work import Work
from bagpipe.store.versioned import LAYER_BYTES, VersionedStore
from bagpipe.wire.recovery_messages import Load, Mark, Save, Saved

ORDERED = Mark | Save | Saved | Load
OrderedBody: TypeAlias = Mark | Save | Saved | Load
Alone: TypeAlias = Callable[[str], AbstractContextManager[None]]
"""Lets nobody use rows meanwhile, and tells them why."""

_WORKS_KEPT = 16
_REPLACING = "they become those of a checkpoint"


@dataclass(frozen=True, slots=True)
class Safety:
    """How the rows of a server are made safe."""

    rollback: bool = True
    """Whether rows are kept in memory as they were at the last checkpoint, so that going back needs no files."""
    history_bytes_max: int | None = LAYER_BYTES
    """Of memory for that; beyond it rows are read from the checkpoint after all."""
    checkpoints: tuple[Path, ...] = ()
    """In and below these directories checkpoints may be written and read."""
    disk: Disk = field(default_factory=Disk)


class ServerRows:
    """The rows of server `number` of `of`. Calls that change marks come one at a time, while nobody writes."""

    def __init__(
        self, storage: Storage, safety: Safety, number_of: tuple[int, int], bytes_max: int, alone: Alone
    ) -> None:
        self.rows: RowAccess | None = None
        self._storage, self._safety, self._number_of, self._bytes_max = storage, safety, number_of, bytes_max
        self._alone = alone
        self._versions: VersionedStore | None = None
        self._saved: Path | None = None
        """The last checkpoint that is known to be complete."""
        self._directory: Path | None = None
        """Of all checkpoints, as far as one was asked for."""
        self._refusal: str | None = None
        self._making = Lock()
        self._works: OrderedDict[tuple[int, int], Work] = OrderedDict()
        self._lock = Lock()

    @property
    def widths(self) -> list[int] | None:
        """Floats of a row by table, once they are known."""
        return None if self.rows is None else self.rows.widths

    def prepare(self, widths: Sequence[int]) -> None:
        """Have room for rows of these widths; StoreError before a recovery is over, and after it has failed."""
        if self._refusal is not None:
            raise StoreError(self._refusal)
        with self._making:
            if self.rows is None:
                self._make(widths)

    def close(self) -> None:
        """Give back memory and files; a second call does nothing."""
        self._refusal = f"server {self._number_of[0]} is closed: start another"
        if self._versions is not None:
            self._versions.close()

    def checked(self, directory: str) -> Path:
        """A path below a directory of checkpoints that a client names; StoreError unless it is where they may be."""
        if "\0" not in directory and Path(directory).is_absolute():
            path = Path(directory).resolve()
            for allowed in (each.resolve() for each in self._safety.checkpoints):
                if path.is_relative_to(allowed) and path != allowed:
                    return path
        allowed_ones = ", ".join(map(str, self._safety.checkpoints)) or "none"
        raise StoreError(
            f"checkpoints in {directory!r}: server {self._number_of[0]} was told at its start to use only what is in "
            f"or below {allowed_ones}: start bagpipe launch, or bagpipe server, with --checkpoints DIR"
        )

    # What trainers ask for

    def apply(self, body: OrderedBody) -> list[Work]:
        """Do this, once and while nobody writes; what takes long is only prepared, and given back to be done."""
        versions = self._opened()
        if isinstance(body, Mark):
            versions.mark(body.done, body.token)
            failpoints.reach("server.mark.made")
            return []
        if (busy := self._busy()) is not None:
            raise StoreError(f"{busy.what} is under way: ask for one thing at a time")
        if isinstance(body, Saved):
            checkpoint = self.checked(body.checkpoint)
            work = Work(f"letting go of what came before {body.done}", lambda _: self._let_go(body.done, checkpoint))
        else:
            work = self._save(body) if isinstance(body, Save) else self._load(body)
        with self._lock:
            self._works[body.trainer, body.sequence] = work
            while len(self._works) > _WORKS_KEPT:  # all but this one are over
                self._works.popitem(last=False)
        return [work]

    def work(self, trainer: int, sequence: int) -> Work | None:
        """What was begun with this number and takes long, if anything was; the last few are known."""
        with self._lock:
            return self._works.get((trainer, sequence))

    def stop(self) -> None:
        """Nothing is under way any more when this returns; if it raises, something may be: call it again."""
        with self._lock:
            works = list(self._works.items())
        for key, work in works:
            work.stop()
            with self._lock:
                self._works.pop(key, None)

    def _busy(self) -> Work | None:
        with self._lock:
            return next((work for work in self._works.values() if not work.is_over), None)

    def _save(self, body: Save) -> Work:
        """The rows of the mark are held from now on, whatever is written meanwhile."""
        versions, directory = self._opened(), self.checked(body.directory)
        self._check_names(body.names)
        self._directory = directory.parent
        reader = versions.begin_save(body.done, directory, body.since)

        def write(work: Work) -> bytes:
            failpoints.reach("server.save.begun")
            entries = reader.write(directory, body.names, work.report)
            failpoints.reach("server.save.written")
            return msgspec.json.encode(entries)

        return Work(f"saving mark {body.done}", write, reader.close)

    def _let_go(self, done: int, checkpoint: Path) -> bytes:
        self._saved = checkpoint  # also if the merge fails
        self._opened().saved(done)
        return b""

    def _load(self, body: Load) -> Work:
        point = ResumePoint(body.done, self.checked(body.checkpoint), body.checksum)
        self._check_names(body.names)
        tables = list(zip(body.names, self.widths or (), strict=True))
        check_rows(point.open(self._safety.disk), tables, point.is_initial)
        return Work(f"loading {point}", lambda work: self._replace(point, body.names, work.report))

    def _replace(self, point: ResumePoint, names: Sequence[str], report: Report) -> bytes:
        with self._alone(_REPLACING):
            self._restore(point, names, report)
        return b""

    # What whoever looks after the run asks for

    def marks(self) -> list[int]:
        """The marks whose rows are in memory."""
        return [] if self._versions is None else self._versions.marks()

    def checkpoints(self) -> list[Path]:
        """Directories of checkpoints that may be complete: the last one it was told of, and those of its marks."""
        directory = self._directory
        found = [] if directory is None else [directory / directory_name(done) for done in self.marks()]
        return found if self._saved is None or self._saved in found else [self._saved, *found]

    def recover(self, point: ResumePoint, report: Report) -> None:
        """Make rows those of a point; if it fails nothing goes on before it has succeeded."""
        number = self._number_of[0]
        self._refusal = f"server {number} is being recovered: wait until that is over"
        try:
            if point == START:
                self._clear()
            else:
                tables = point.open(self._safety.disk).manifest.tables
                if self.rows is None:
                    self._make([table.width for table in tables])
                self._restore(point, [table.name for table in tables], report)
        except BaseException as error:
            self._refusal = f"server {number} could not be recovered ({error}): recover it again, from another point"
            raise
        self._refusal = None

    def _clear(self) -> None:
        self._saved = None
        if self._versions is not None:
            with self._versions.replacing(None):
                pass

    def _restore(self, point: ResumePoint, names: Sequence[str], report: Report) -> None:
        assert point.checkpoint is not None
        self._opened().restore(point, names, report)
        if point.is_initial:
            self._saved = None  # a recovery must not take another run's checkpoint for one of this run
        else:
            self._saved, self._directory = point.checkpoint, point.checkpoint.parent
        failpoints.reach("server.loaded")

    def _make(self, widths: Sequence[int]) -> None:
        safety = self._safety
        self._versions = VersionedStore(
            self._storage(widths), rollback=safety.rollback, layer_bytes_max=safety.history_bytes_max,
            shard=self._number_of, disk=safety.disk,
        )  # fmt: skip
        self.rows = RowAccess(self._versions, widths, self._bytes_max)

    def _opened(self) -> VersionedStore:
        assert self._versions is not None, "an open client has said how wide rows are"
        return self._versions

    def _check_names(self, names: Sequence[str]) -> None:
        if len(names) != len(self.widths or ()):
            raise StoreError(f"{len(names)} names for {len(self.widths or ())} tables: give the name of each, in order")
