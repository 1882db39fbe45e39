"""A log on disk of all writes since a checkpoint, so that a server that dies comes back as it was at its last mark.

    start.writes           writes from a store without rows up to the first mark
    000000000100.writes    writes from mark 100 to the next one
    000000000100.kept-NAME bytes that are kept with mark 100
    lock                   claimed by the process that writes

A file ends with the mark that it leads to, on the disk before `mark` returns, and is never changed again. So what was
written after the last mark is the last file, and going back to a mark removes files, the newest first. A file that does
not lead to the next one is left over, as are all before it. A write that can't be logged is refused (I8); a disk that
fails may have lost what was not marked, so then only going back to a mark helps.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from bagpipe.checkpoint.disk import Appending, Disk, Readable, SystemDisk, make_directories
from bagpipe.errors import StoreError
from bagpipe.failpoints import reach
from bagpipe.store.base import TablePart
from bagpipe.store.failures import failing
from bagpipe.store.journal_record import (
    BEGIN,
    BLOB,
    MARK,
    START,
    Body,
    begin_body,
    begin_of,
    closing_mark,
    damaged,
    mark_body,
    mark_of,
    parts_of,
    records,
    write_body,
)

_LOCK = "lock"
_PAUSE_S = 0.05
DRAFT = ".draft"
"""What is being written has this behind its name; what a crash leaves of it is removed."""
_WRITES = re.compile(r"(start|\d{12,19})\.writes\Z")
_KEPT = re.compile(r"(\d{12,19})\.kept-([A-Za-z0-9_-][A-Za-z0-9._-]{0,63})\Z")


class Journal:
    """The log of one store, in a directory of its own. Writes may come from several threads, the rest from one."""

    def __init__(self, directory: str | Path, disk: Disk | None = None, *, wait_s: float = 0.0) -> None:
        """Open a journal or begin one; StoreError if another process has it open, or this one, and for so long.

        One that holds something takes no writes until it was returned to a mark, or begun anew.
        """
        self.directory = Path(directory)
        self.widths: list[int] | None = None
        """Floats of a row by table; None where nothing was written yet."""
        self.disk: Disk = SystemDisk() if disk is None else disk
        self._lock = Lock()
        self._file: Appending | None = None
        self._num_bytes = self._num_records = 0
        self._bases: list[int] = []
        """Of the files, each of which leads to the next."""
        self._closing: int | None = None
        """The mark that ends the last of them."""
        self._refusal: str | None = None
        self._closed = False
        with failing("making", self.directory):
            make_directories(self.disk, self.directory)
        with failing("locking", self.directory / _LOCK):
            self._claim = self.disk.append(self.directory / _LOCK)
            if not self._lock_within(wait_s):
                self._claim.close()
                raise StoreError(f"{self.directory} is in use: end the process that has it open, or wait until it ends")
        try:
            self._find_files()
        except BaseException:
            self._claim.close()
            raise

    @property
    def starts(self) -> list[int]:
        """Where a replay may begin: from rows of the checkpoint of these marks, or from none if it is `START`."""
        with self._lock:
            return list(self._bases)

    def marks(self) -> list[int]:
        """The marks that are in the log, in ascending order; the first may be where it begins."""
        with self._lock:
            return self._marks()

    def num_bytes(self) -> int:
        """Of all writes that are logged."""
        return self._bytes_of(_WRITES)

    def begin(self, widths: Sequence[int]) -> None:
        """Log tables of these widths; StoreError if others were logged."""
        if self.widths is not None and self.widths != list(widths):
            raise StoreError(
                f"{self.directory} has writes of rows of {self.widths} floats by table, and {list(widths)} are asked "
                "for: use the model and row optimizer that it was written with, or another directory"
            )
        self.widths = list(widths)

    def append(self, parts: Sequence[TablePart]) -> None:
        """Log a write, or refuse it and change nothing; it is sure to be on the disk after the next mark."""
        body = write_body(parts)
        reach("journal.append.begun")
        with self._lock:
            self._add(self._current(), body)
        reach("journal.append.written")

    def mark(self, done: int) -> None:
        """End a file with this mark; when it returns, everything up to here outlives this process and machine."""
        body = mark_body(done)
        with self._lock:
            self._check_usable()
            last = self._marks()[-1] if self._marks() else START
            if done == last and (self._file is None or self._num_records == 1):
                return  # nothing was written since
            if done <= last:
                raise StoreError(f"{self.directory}: mark {done} does not come after mark {last}")
            file = self._current()
            self._add(file, body)
            reach("journal.mark.written")
            path = self._path(self._bases[-1])
            self._refusal = f"{path} could not be written to the disk: return to a mark, or load a checkpoint"
            with failing("writing out", path):
                file.sync()
                self.disk.sync_directory(self.directory)
            reach("journal.mark.synced")
            self._refusal = None
            self._closing, self._file = done, None
            with suppress(OSError):
                file.close()

    def rollback(self, done: int) -> None:
        """Go back to a mark: what came after is gone, and writes are taken again. If it fails, call it again."""
        with self._lock:
            self._check_open()
            if done not in self._marks():
                raise StoreError(f"{self.directory} has no mark {done}: it has {self._marks()}")
            self._refusal = f"{self.directory} is half returned to mark {done}: return to it again"
            self._close_file()
            is_first = all(base >= done for base in self._bases)
            self._remove(_WRITES, lambda base: base > done or (base == done and not is_first))
            self._bases, self._closing = [base for base in self._bases if base < done], done
            if is_first:  # nothing else says which checkpoint it goes on from
                self._begin_file(done, replace=True)
            self._remove(_KEPT, lambda mark: mark > done)
            reach("journal.rolled_back")
            self._refusal = None

    def drop(self, before: int) -> None:
        """There is a checkpoint of this mark: remove the files of earlier writes. Nothing happens if it has no such."""
        with self._lock:
            self._check_usable()
            if before not in self._marks():
                return
            if before == self._closing:
                self._begin_file(before, replace=True)
            self._bases = [base for base in self._bases if base >= before]
        reach("journal.rotated")
        self._remove(_WRITES, lambda base: base < before)  # which takes long where files are large

    def restart(self, base: int | None) -> None:
        """Forget everything; go on from the checkpoint of this mark, or from no rows. If it fails, call it again."""
        with self._lock:
            self._check_open()
            self._refusal = f"{self.directory} is half cleared: load a checkpoint again"
            self._close_file()
            self._remove(_WRITES, lambda _: True)
            self._remove(_KEPT, lambda _: True)
            self._bases, self._closing = [], None
            if base is not None:
                self._begin_file(base, replace=True)
            self._refusal = None

    def replay(self, start: int, done: int) -> Iterator[list[TablePart] | int]:
        """Every write from one of `starts` to a mark, in order, and each mark as a number; StoreError for damage."""
        with self._lock:
            bases = [base for base in self._bases if start <= base < done]
            if start not in self._bases or done not in self._marks():
                raise StoreError(f"{self.directory} leads from {self._bases} to {self._marks()}: not {start} to {done}")
        for base, end in zip(bases, [*bases[1:], done], strict=True):
            yield from self._replay_file(base, end)

    # What is kept with marks

    def keep(self, done: int, name: str, blob: bytes) -> None:
        """Keep bytes with a mark; they are on the disk when it returns."""
        file_name = f"{done:012d}.kept-{name}"
        if not _KEPT.match(file_name):
            raise StoreError(
                f"{name!r} can't be the name of something kept: give letters, digits, dots, dashes and underscores"
            )
        self._check_open()
        path, draft = self.directory / file_name, self.directory / f"{file_name}{DRAFT}"
        with failing("writing", path):
            with suppress(FileNotFoundError):
                self.disk.unlink(draft)
            with self.disk.create(draft) as file:
                for piece in [*begin_body(done, []).record(done, 0), *Body(BLOB, [blob]).record(done, 1)]:
                    file.write(piece)
                file.sync()
            self.disk.rename(draft, path)
            self.disk.sync_directory(self.directory)

    def kept(self, done: int) -> dict[str, bytes]:
        """What is kept with a mark; what is damaged is not there."""
        found: dict[str, bytes] = {}
        for mark, path in self._listed(_KEPT):
            if mark == done:
                with failing("reading", path), self.disk.open(path) as file, suppress(StoreError):
                    bodies = [bytes(body) for kind, body in records(file, path, done) if kind == BLOB]
                    if len(bodies) == 1:
                        found[path.name.partition(".kept-")[2]] = bodies[0]
        return found

    def kept_bytes(self) -> int:
        """Of all that is kept with marks."""
        return self._bytes_of(_KEPT)

    def forget_kept(self, which: Callable[[int], bool]) -> None:
        """Remove what is kept with marks for which this is true."""
        self._check_open()
        self._remove(_KEPT, which)

    def close(self) -> None:
        """Let another open it; a second call does nothing."""
        with self._lock:
            self._refusal = f"the journal in {self.directory} is closed: open it again"
            self._close_file()
            self._claim.close()
            self._closed = True

    def _lock_within(self, wait_s: float) -> bool:
        """Whether the journal is ours; a process that was killed lets go of its files when it is quite gone."""
        until = time.monotonic() + wait_s
        while not (mine := self._claim.lock()) and time.monotonic() < until:
            time.sleep(_PAUSE_S)
        return mine

    # The lock is held in most of what follows

    def _marks(self) -> list[int]:
        ends = [] if self._closing is None or self._closing in self._bases else [self._closing]
        return [base for base in self._bases if base != START] + ends

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError(str(self._refusal))

    def _check_usable(self) -> None:
        if self._refusal is not None:
            raise StoreError(self._refusal)

    def _find_files(self) -> None:
        """The longest row of files, up to the newest, each of which leads to the next."""
        with failing("reading", self.directory):
            for name in self.disk.files(self.directory):
                if name.endswith(DRAFT):
                    self.disk.unlink(self.directory / name)
        following: int | None = None
        for base, path in reversed(self._listed(_WRITES)):
            with failing("reading", path), self.disk.open(path) as file:
                closing = closing_mark(file, base)
                if following is None:
                    self._closing = closing if _is_whole(file, path, base) else None
                elif closing != following:
                    break
                with suppress(StoreError):  # a process died as it began the file; damage is found when it is replayed
                    if self.widths is None:
                        self.widths = next((begin_of(path, body)[1] for _, body in records(file, path, base)), None)
            self._bases.insert(0, base)
            following = base
        if self._bases:
            self._refusal = (
                f"{self.directory} holds writes of an earlier process: return to a mark, or load a checkpoint"
            )

    def _current(self) -> Appending:
        """The file that writes go to, made if there is none."""
        self._check_usable()
        if self._file is None:
            self._begin_file(START if self._closing is None else self._closing)
        assert self._file is not None
        return self._file

    def _begin_file(self, base: int, *, replace: bool = False) -> None:
        """A new file of writes from this mark on; with `replace` on the disk at once, in place of one there may be."""
        assert self.widths is not None, "`begin` comes first"
        path = self._path(base)
        draft = path.with_name(path.name + DRAFT) if replace else path
        pieces = begin_body(base, self.widths).record(base, 0)
        with failing("writing", path):
            with suppress(FileNotFoundError):
                self.disk.unlink(draft)  # what an attempt that failed has left
            file = self.disk.create(draft)
            try:
                for piece in pieces:
                    file.write(piece)
                if replace:
                    file.sync()
                    self.disk.rename(draft, path)
                    self.disk.sync_directory(self.directory)
            except BaseException:
                file.close()
                raise
        self._file, self._closing = file, None
        self._num_bytes, self._num_records = sum(map(len, pieces)), 1
        self._bases.append(base)

    def _add(self, file: Appending, body: Body) -> None:
        path = self._path(self._bases[-1])
        pieces = body.record(self._bases[-1], self._num_records)
        try:
            with failing("writing", path):
                for piece in pieces:
                    file.write(piece)
        except BaseException:
            self._refusal = f"{path} has a write that was refused: return to a mark, or load a checkpoint"
            with suppress(OSError):
                file.truncate(self._num_bytes)
                self._refusal = None
            raise
        self._num_bytes += sum(map(len, pieces))
        self._num_records += 1

    def _replay_file(self, base: int, end: int) -> Iterator[list[TablePart] | int]:
        path = self._path(base)
        with failing("reading", path), self.disk.open(path) as file:
            mark: int | None = None
            for kind, body in records(file, path, base):
                if kind == BEGIN and begin_of(path, body) != (base, self.widths):
                    raise damaged(path, 0)
                if mark is not None or kind == BLOB:
                    raise damaged(path, file.num_bytes)
                if kind == MARK:
                    mark = mark_of(path, body)
                elif kind != BEGIN:
                    assert self.widths is not None
                    yield parts_of(path, body, self.widths)
            if mark != end:
                raise damaged(path, file.num_bytes)
        yield end

    def _path(self, base: int) -> Path:
        return self.directory / ("start.writes" if base == START else f"{base:012d}.writes")

    def _listed(self, pattern: re.Pattern[str]) -> list[tuple[int, Path]]:
        """The files of a kind with the mark in their name, in ascending order."""
        with failing("reading", self.directory):
            names = self.disk.files(self.directory)
        matches = [match for name in names if (match := pattern.match(name))]
        return sorted((START if m[1] == "start" else int(m[1]), self.directory / m.string) for m in matches)

    def _bytes_of(self, pattern: re.Pattern[str]) -> int:
        total = 0
        for _, path in self._listed(pattern):
            with failing("reading", path), suppress(FileNotFoundError), self.disk.open(path) as file:
                total += file.num_bytes  # unless it was removed meanwhile
        return total

    def _remove(self, pattern: re.Pattern[str], which: Callable[[int], bool]) -> None:
        """The newest first, so that a crash in the middle leaves what leads to some mark."""
        doomed = [path for mark, path in self._listed(pattern) if which(mark)]
        for path in reversed(doomed):
            with failing("removing", path):
                self.disk.unlink(path)
                if pattern is _WRITES or path == doomed[0]:
                    self.disk.sync_directory(self.directory)

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


def _is_whole(file: Readable, path: Path, base: int) -> bool:
    """Whether the newest file is as it was written: a crash may have lost any part of it until its mark was made."""
    try:
        return all(True for _ in records(file, path, base))
    except StoreError:
        return False
