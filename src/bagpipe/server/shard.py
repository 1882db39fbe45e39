"""The rows of one server, from the moment that their widths are known, and every way to make them what they were (I2).

Where files may lie was said when the server was started: a path that a client names must be in or below one of those
directories, or it is refused (I8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import BoundedSemaphore, Lock

import msgspec

from bagpipe import failpoints
from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.disk import Disk, SystemDisk
from bagpipe.checkpoint.reading import Checkpoint
from bagpipe.checkpoint.shards import Compression, Report
from bagpipe.errors import CheckpointError, StoreError
from bagpipe.server.rows import RowAccess
from bagpipe.server.storage import Storage
from bagpipe.store.journal import Journal
from bagpipe.store.recorded import HISTORY_BYTES, JOURNAL_BYTES, Recorded
from bagpipe.store.versioned import RowReader


@dataclass(frozen=True, slots=True)
class Recording:
    """How the rows of a server are made safe."""

    journal: Path | None = None
    """A directory of its own for a log of all writes; None: what dies with the process is lost since the checkpoint."""
    history_bytes_max: int | None = HISTORY_BYTES
    """Of memory for old values of rows, so that they can be returned to marks; beyond it the oldest are given up."""
    checkpoints: tuple[Path, ...] = ()
    """In and below these directories checkpoints may be written and read; the first has those of this run."""
    disk: Disk = field(default_factory=SystemDisk)
    journal_bytes: int = JOURNAL_BYTES
    """Beyond it, and beyond twice those of all rows, the journal is condensed."""
    journal_wait_s: float = 0.0
    """How long to wait for a journal that another process has open: the one before may not be quite gone."""


@dataclass(frozen=True, slots=True)
class Saving:
    """Rows of a mark on their way to files. The mark's old values stay until it is written or closed."""

    recorded: Recorded
    done: int
    snapshot: RowReader
    directory: Path
    names: Sequence[str]
    since: int | None
    compress: Compression | None

    def write(self, report: Report) -> bytes:
        """The files that were written, as JSON."""
        failpoints.reach("server.save.begun")
        entries = self.recorded.save(
            self.done,
            self.directory,
            self.names,
            since=self.since,
            compress=self.compress,
            report=report,
            snapshot=self.snapshot,
        )
        failpoints.reach("server.save.written")
        return msgspec.json.encode(entries)

    def close(self) -> None:
        """It is not to be written after all."""
        self.snapshot.close()


@dataclass(frozen=True, slots=True)
class Condensing:
    """Rows of a mark on their way to the place of what was logged before it."""

    recorded: Recorded
    done: int
    snapshot: RowReader

    def write(self, report: Report) -> bytes:
        """When it returns they are there; the log is cut at the next forgetting of marks."""
        with self.snapshot:
            self.recorded.condense(self.done, self.snapshot, report)
        return b""

    def close(self) -> None:
        """It is not to be done after all."""
        self.snapshot.close()


class Shard:
    """The rows of server `number` of `of`. Calls that change marks come one at a time, while nobody writes."""

    def __init__(self, storage: Storage, recording: Recording, number_of: tuple[int, int], bytes_max: int) -> None:
        """Where there is a journal of an earlier process, nothing goes on before `recover`."""
        self.rows: RowAccess | None = None
        self._storage, self._recording, self._number_of, self._bytes_max = storage, recording, number_of, bytes_max
        self._recorded: Recorded | None = None
        self._journal = (
            None
            if recording.journal is None
            else Journal(recording.journal, recording.disk, wait_s=recording.journal_wait_s)
        )
        self._refusal: str | None = None
        self._making = Lock()
        self._changing = Lock()
        self._changes = 0
        self._read: tuple[int, int, dict[str, bytes]] | None = None
        """What is kept with one mark, and after how many changes, while somebody asks for it piece by piece."""
        if self._journal is not None and self._journal.starts:
            self._refusal = f"server {number_of[0]} has come back and waits to be told where to go on: recover the run"
            if self._journal.widths is not None:  # else it ends before the first write, and there is nothing in it
                self._make(self._journal.widths)

    @property
    def widths(self) -> list[int] | None:
        """Floats of a row by table, once they are known."""
        return None if self.rows is None else self.rows.widths

    @property
    def kept_bytes(self) -> int:
        """Of all that is kept with marks."""
        return 0 if self._recorded is None else self._recorded.kept_bytes()

    def prepare(self, widths: Sequence[int]) -> None:
        """Have room for rows of these widths; StoreError before a recovery is over, and after it has failed."""
        if self._refusal is not None:
            raise StoreError(self._refusal)
        with self._making:
            if self.rows is None:
                self._make(widths)

    def checked(self, directory: str, *, below: bool = False) -> Path:
        """A directory that a client names; StoreError unless it is where checkpoints may be, or `below`."""
        if "\0" not in directory and Path(directory).is_absolute():
            path = Path(directory).resolve()
            for allowed in (each.resolve() for each in self._recording.checkpoints):
                if path.is_relative_to(allowed) and not (below and path == allowed):
                    return path
        allowed_ones = ", ".join(map(str, self._recording.checkpoints)) or "none"
        raise StoreError(
            f"checkpoints in {directory!r}: server {self._number_of[0]} was told at its start to use only what is in "
            f"or below {allowed_ones}: start bagpipe launch, or bagpipe server, with --checkpoints DIR"
        )

    # Marks

    def mark(self, done: int) -> None:
        """Make the rows as they are now a point to return to."""
        self._opened().mark(done)
        self._kept_changed()

    def marks(self, checkpoints: Path | None = None) -> list[int]:
        """The marks that rows can be returned to; the directory of checkpoints is needed after a new start."""
        recorded = self._recorded
        if recorded is None:
            return []
        if checkpoints is not None:
            recorded.checkpoints = checkpoints
        return recorded.marks()

    def check_mark(self, done: int) -> None:
        """StoreError unless rows can be returned to this mark."""
        if done not in self.marks():
            raise StoreError(f"there is no mark {done}: there are {self.marks()}; return to one of these")

    def forget(self, before: int) -> None:
        """Drop the marks below."""
        self._opened().forget(before)
        self._kept_changed()

    def begin_condense(self, done: int) -> Condensing | None:
        """Hold on to a mark, to have its rows take the place of a long journal; None: it is not long."""
        recorded = self._opened()
        if not recorded.is_long() or not recorded.has_snapshot(done):
            return None
        return Condensing(recorded, done, recorded.snapshot(done))

    def settle(self, done: int) -> None:
        """The checkpoint of this mark is complete."""
        self._opened().settle(done)

    def return_to(self, done: int) -> None:
        """Make all rows what they were at a mark."""
        self._opened().return_to(done)
        self._kept_changed()

    def keep(self, done: int, name: str, blob: bytes) -> None:
        """Keep bytes with a mark, one that is there or the next."""
        self._opened().keep(done, name, blob)
        self._kept_changed()

    def kept(self, done: int) -> dict[str, bytes]:
        """What is kept with a mark."""
        read, changes = self._read, self._changes
        if read is not None and read[:2] == (done, changes):
            return read[2]
        found = {} if self._recorded is None else self._recorded.kept(done)
        self._read = done, changes, found
        return found

    # Checkpoints

    def begin_save(
        self,
        done: int,
        directory: Path,
        names: Sequence[str],
        *,
        since: int | None = None,
        compress: Compression | None = None,
    ) -> Saving:
        """Hold on to a mark, to have its rows written to files in this directory."""
        recorded = self._opened()
        self._check_names(names)
        recorded.checkpoints = directory.parent
        snapshot = recorded.snapshot(done, directory.parent, since=since)
        return Saving(recorded, done, snapshot, directory, names, since, compress)

    def check_load(self, done: int, directory: Path, names: Sequence[str]) -> None:
        """CheckpointError unless there is this checkpoint, of tables with these names and our widths."""
        self._check_names(names)
        checkpoint = Checkpoints(directory, disk=self._recording.disk).open(done)
        saved = [(table.name, table.width) for table in checkpoint.manifest.tables]
        wanted = list(zip(names, self.widths or (), strict=True))
        if saved != wanted:
            raise CheckpointError(
                f"{checkpoint.directory} is of another model: it has tables with rows of {dict(saved)} floats, and "
                f"{dict(wanted)} are asked for: use the model and row optimizer that it was made with"
            )

    def load(self, done: int, directory: Path, names: Sequence[str], report: Report) -> None:
        """Replace all rows by this server's share of a checkpoint."""
        recorded = self._opened()
        recorded.load(done, directory, names, report=report)
        failpoints.reach("server.loaded")
        self._kept_changed()

    def recover(self, done: int | None, checkpoints: Path | None, report: Report) -> None:
        """Make rows what they were at a mark, by itself or else by its checkpoint; as if none was written if None.

        If it fails nothing goes on before it has succeeded.
        """
        number = self._number_of[0]
        self._refusal = f"server {number} is being recovered: wait until that is over"
        try:
            if done is None:
                self._clear()
            elif done in self.marks(checkpoints):
                assert self._recorded is not None
                self._recorded.return_to(done)
                if checkpoints is not None:  # which may have what nobody has kept here in time
                    found = Checkpoints(checkpoints, disk=self._recording.disk).list()
                    self._keep_all([checkpoint for checkpoint in found if checkpoint.done == done])
            elif checkpoints is not None:
                self._load_all(done, checkpoints, report)
            else:
                raise StoreError(
                    f"server {number} has no mark {done}, but {self.marks()}: return all servers to one of these, or "
                    "give the directory of checkpoints"
                )
        except BaseException as error:
            self._refusal = f"server {number} could not be recovered ({error}): recover it again, from another point"
            raise
        self._refusal = None
        self._kept_changed()

    def close(self) -> None:
        """Give back memory and files; a second call does nothing."""
        self._refusal = f"server {self._number_of[0]} is closed: start another"
        if self._recorded is not None:
            self._recorded.close()
        elif self._journal is not None:
            self._journal.close()

    def _load_all(self, done: int, checkpoints: Path, report: Report) -> None:
        """Rows of a checkpoint with its own tables; and what was kept, for the server that is asked for it."""
        checkpoint = Checkpoints(checkpoints, disk=self._recording.disk).open(done)
        tables = checkpoint.manifest.tables
        if self.rows is None:
            self._make([table.width for table in tables])
        assert self._recorded is not None
        self._recorded.load(done, checkpoints, [table.name for table in tables], report=report)
        failpoints.reach("server.loaded")
        self._keep_all([checkpoint])

    def _keep_all(self, checkpoints: Sequence[Checkpoint]) -> None:
        """What the checkpoints of this mark hold besides rows, where others ask for it: at the first server."""
        for checkpoint in checkpoints if self._number_of[0] == 0 else ():
            for name in checkpoint.blobs():
                self._opened().keep(checkpoint.done, name, checkpoint.blob(name))

    def _clear(self) -> None:
        if self._recorded is not None:
            self._recorded.clear()
        elif self._journal is not None:
            self._journal.restart(None)

    def _make(self, widths: Sequence[int]) -> None:
        made, recording = self._storage(widths), self._recording
        try:
            recorded = Recorded(
                made.store,
                self._journal,
                recording.history_bytes_max,
                checkpoints=recording.checkpoints[0] if recording.checkpoints else None,
                places=recording.checkpoints,
                shard=self._number_of,
                disk=recording.disk,
                journal_bytes=recording.journal_bytes,
            )
        except BaseException:
            made.store.close()
            raise
        self._recorded = recorded
        self.rows = RowAccess(recorded, widths, BoundedSemaphore(made.copiers), self._bytes_max)

    def _opened(self) -> Recorded:
        assert self._recorded is not None, "an open client has said how wide rows are"
        return self._recorded

    def _check_names(self, names: Sequence[str]) -> None:
        if len(names) != len(self.widths or ()):
            raise StoreError(f"{len(names)} names for {len(self.widths or ())} tables: give the name of each, in order")

    def _kept_changed(self) -> None:
        with self._changing:
            self._changes += 1
            self._read = None
