"""Where the replay of a journal may begin: with rows condensed beside it, with a checkpoint, or with no rows.

A file beside the journal says which checkpoint it is, so that a process that comes back needs nobody to tell it:

    checkpoints.json       for each: its mark, the directory of checkpoints, and the checksum of its manifest

One that is not there any more, is another by now, or lies where this process may not read, is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.disk import Disk
from bagpipe.checkpoint.reading import ALL, Checkpoint, directory_name, read_manifest
from bagpipe.errors import CheckpointError
from bagpipe.store.condensed import Condensed
from bagpipe.store.failures import failing
from bagpipe.store.journal import DRAFT, Journal
from bagpipe.store.journal_record import START

_NAME = "checkpoints.json"
_BYTES_MAX = 1 << 20


class Noted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint that the journal begins with."""

    done: int
    directory: str
    """Of this checkpoint and others."""
    checksum: str
    """Of its manifest."""


class Starts:
    """The rows that a journal goes on from."""

    def __init__(
        self, journal: Journal, condensed: Condensed, shard: tuple[int, int], disk: Disk, places: Sequence[Path] | None
    ) -> None:
        """Checkpoints that were noted are read in and below these `places` only; None: anywhere."""
        self._journal, self._condensed, self._shard, self._disk = journal, condensed, shard, disk
        self._places = None if places is None else [place.resolve() for place in places]
        self._path = journal.directory / _NAME
        self._read_before: dict[int, Noted] | None = None

    def note(self, done: int, directory: Path) -> None:
        """The journal will begin with this checkpoint; if it can't be read it is not noted."""
        starts = self._journal.starts
        noted = {each.done: each for each in self._noted().values() if each.done in starts and each.done != done}
        with suppress(CheckpointError):
            _, checksum = read_manifest(self._disk, directory / directory_name(done))
            noted[done] = Noted(done, str(directory.absolute()), checksum)
        self._write(noted)

    def forget(self, done: int) -> None:
        """The journal does not begin with what was noted of this mark."""
        self._write({each.done: each for each in self._noted().values() if each.done != done})

    def marks(self, checkpoints: Path | None) -> list[int]:
        """The marks that the journal can be replayed from; `checkpoints` is where else they may be."""
        starts = self._journal.starts
        if not any(start != START for start in starts):
            return starts
        there = {START, *self._condensed.marks()}
        there |= {start for start in starts if self._place(start) is not None}
        if checkpoints is not None:
            there |= {checkpoint.done for checkpoint in Checkpoints(checkpoints, disk=self._disk).list()}
        return [start for start in starts if start in there]

    def open(self, start: int, checkpoints: Path | None) -> tuple[Checkpoint, Sequence[str], tuple[int, int]]:
        """Rows of one of these marks: where they are, the names of the tables there, and which shard of them."""
        if start in self._condensed.marks():
            return self._condensed.open(start), self._condensed.names, ALL
        place = self._place(start) or checkpoints
        assert place is not None, "it is one of `marks`"
        checkpoint = Checkpoints(place, disk=self._disk).open(start)
        return checkpoint, [table.name for table in checkpoint.manifest.tables], self._shard

    def _place(self, start: int) -> Path | None:
        """The directory of the checkpoint that was noted, if it is there as it was."""
        noted = self._noted().get(start)
        if noted is None:
            return None
        place = Path(noted.directory)
        if self._places is not None and not any(place.resolve().is_relative_to(allowed) for allowed in self._places):
            return None
        try:
            _, checksum = read_manifest(self._disk, place / directory_name(start))
            Checkpoints(place, disk=self._disk).open(start)  # with what it builds on
        except CheckpointError:
            return None
        return place if checksum == noted.checksum else None

    def _noted(self) -> dict[int, Noted]:
        """All that is noted, by mark."""
        if self._read_before is None:
            self._read_before = self._read()
        return self._read_before

    def _read(self) -> dict[int, Noted]:
        with failing("reading", self._path):
            try:
                file = self._journal.disk.open(self._path)
            except FileNotFoundError:
                return {}
            with file:
                data = bytearray(min(file.num_bytes, _BYTES_MAX))
                del data[file.read_into(data) :]
        with suppress(msgspec.MsgspecError):  # damaged: as if nothing was noted
            return {noted.done: noted for noted in msgspec.json.decode(data, type=list[Noted])}
        return {}

    def _write(self, noted: dict[int, Noted]) -> None:
        if noted == self._noted():
            return
        draft = self._path.with_name(_NAME + DRAFT)
        with failing("writing", self._path):
            with suppress(FileNotFoundError):
                self._journal.disk.unlink(draft)
            with self._journal.disk.create(draft) as file:
                file.write(msgspec.json.encode(list(noted.values())))
                file.sync()
            self._journal.disk.rename(draft, self._path)
            self._journal.disk.sync_directory(self._path.parent)
        self._read_before = noted
