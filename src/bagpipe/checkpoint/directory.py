"""A directory of checkpoints: each is complete and verified, or invisible (I6).

    DIR/00000100/               a checkpoint after 100 iterations: manifest.json and the files that it names
    DIR/.tmp-00000200-3-TOKEN/  one that generation 3 of the run is writing: it gets its name once everything in it is
                                synced and was read
    DIR/.old-00000000-3-TOKEN/  one that is being removed: it loses its name first

Whatever crashes at whatever moment, the names without a dot are whole; the others are removed by the next `begin`.
Names of any other form are somebody else's, and are left alone.

A checkpoint has all rows, or those that have changed since the one before, on which it builds. Once what came after a
full one takes more room than that, the next one is full again: so a chain takes at most twice the rows, and three times
while the next full one is written.
"""

from __future__ import annotations

import builtins
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from xxhash import xxh64_hexdigest

from bagpipe.checkpoint.disk import Bytes, Disk, make_directories
from bagpipe.checkpoint.manifest import MANIFEST, BaseEntry, FileEntry, Manifest, RunFacts, encode_manifest
from bagpipe.checkpoint.point import (
    BLOB_SUFFIX,
    Checkpoint,
    ResumePoint,
    directory_name,
    open_checkpoint,
    read_manifest,
    table_differences,
)
from bagpipe.checkpoint.rows import write_file
from bagpipe.errors import CheckpointError, ConfigError
from bagpipe.failpoints import reach
from bagpipe.os_errors import failing

if TYPE_CHECKING:
    from typing import Self

_TMP, _OLD = ".tmp-", ".old-"
_LEFTOVER = re.compile(r"\.(tmp|old)-[0-9]{8,}-[0-9]+-[0-9a-f]{8}")
_PART = ".part"
"""Of a file of a trainer that is not whole yet."""
WAIT_S, LOOK_S = 600.0, 0.01
"""How long trainers may take to write their own files, and how often they are looked for."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """What a name in a directory of checkpoints stands for."""

    done: int
    checkpoint: Checkpoint | None
    problem: str | None
    """Why it can't be opened."""


class Checkpoints:
    """The checkpoints of a run, oldest first; one process writes, any may read."""

    def __init__(
        self,
        directory: str | Path,
        *,
        keep: int = 3,
        generation: int = 0,
        token: str = "",
        disk: Disk | None = None,
    ) -> None:
        """Keep the last `keep` that the user has asked for, and the last one for recovery, with all that they build on.

        All trainers of a generation write with the same `token`, 8 hexadecimal digits.
        """
        if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
            raise ConfigError(f"checkpoint.keep is {keep!r}: give a whole number, at least 1")
        self.directory = Path(directory).resolve()  # a user's own links are followed; those within are not
        self.keep = keep
        self.generation, self.token = generation, token or os.urandom(4).hex()
        self.disk: Disk = Disk() if disk is None else disk
        self._base: BaseEntry | None = None

    def continue_from(self, done: int | None) -> None:
        """Rows go on from this checkpoint, so the next one may have only what was written since; None: from none.

        A run that goes back to an earlier one has to say so: what came after is no base for it any more.
        """
        self._base = None
        if done is not None:
            try:
                self._base = _as_base(open_checkpoint(self.disk, self.directory, done))
            except CheckpointError as error:
                _log.warning("the next checkpoint has all rows, since %s can't be built on: %s", done, error)

    def begin(self, done: int, *, full: bool = False, retained: bool = True, token: str = "") -> PendingCheckpoint:
        """Start to write the checkpoint after `done` iterations: on top of the last one, or else with all rows.

        `retained`: the user has asked for it. `token` is that of the mark that it is made of.
        """
        path = self._make_pending(done)
        self._remove_leftovers(done)
        base = None if full else self._find_base(done)
        reach("checkpoint.begun")
        return PendingCheckpoint(self, path, done, base, retained, token)

    def write_state(self, done: int, name: str, *parts: Bytes) -> None:
        """Add the state of a trainer to a checkpoint that another one has begun, or is about to begin.

        Nothing happens if that one gives it up meanwhile: it says why, and its reason must not be hidden by ours.
        """
        path = self._make_pending(done)
        part, whole = path / f"{name}{_PART}", path / f"{name}{BLOB_SUFFIX}"
        try:
            write_file(self.disk, path, part.name, parts)
            with failing(CheckpointError, "name", whole):
                self.disk.rename(part, whole)
        except CheckpointError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise

    def _make_pending(self, done: int) -> Path:
        path = self._unused_name(_TMP, done, self.token)
        with failing(CheckpointError, "make", path):
            make_directories(self.disk, self.directory)
            with suppress(FileExistsError):  # another trainer came first
                self.disk.make_directory(path)
        return path

    def scan(self) -> Sequence[Found]:
        """Every name that stands for a checkpoint, by number of iterations, with what is wrong where it is not one."""
        found = []
        for done in self.numbers():
            try:
                found.append(Found(done, open_checkpoint(self.disk, self.directory, done), None))
            except CheckpointError as error:
                found.append(Found(done, None, str(error)))
        return found

    def list(self) -> Sequence[Checkpoint]:
        """All that can be opened, by number of iterations."""
        return [found.checkpoint for found in self.scan() if found.checkpoint is not None]

    def latest(self, *, verify: bool = False, problems: builtins.list[str] | None = None) -> Checkpoint | None:
        """The newest that can be opened, or verified; of newer ones that can't, a warning says why, or `problems`."""
        for done in reversed(self.numbers()):
            try:
                checkpoint = open_checkpoint(self.disk, self.directory, done)
                if verify:
                    checkpoint.verify()
                return checkpoint
            except CheckpointError as error:
                if problems is None:
                    _log.warning("passing over a checkpoint: %s", error)
                else:
                    problems.append(str(error))
        return None

    def open(self, done: int) -> Checkpoint:
        """The checkpoint after `done` iterations, with all that it builds on."""
        if done not in self.numbers():
            raise CheckpointError(
                f"{self.directory} has no checkpoint after {done} iterations: it has {self.numbers() or 'none'}"
            )
        return open_checkpoint(self.disk, self.directory, done)

    def prune(self, *, verify: bool = True) -> Sequence[int]:
        """Remove all but those to keep and what they build on, once the newest of them is verified; what is gone.

        Later ones that can't be opened go too.
        """
        checkpoints = self.list()
        if not checkpoints:
            return []
        if verify:
            checkpoints[-1].verify()
        wanted = [each for each in checkpoints if each.manifest.retained][-self.keep :]
        kept = {each.done: each for each in (*wanted, checkpoints[-1])}
        needed = {done for checkpoint in kept.values() for done in checkpoint.chain}
        readable = {each.done for each in checkpoints}
        # One that can't be opened, perhaps only now, goes when its time has come, and what it builds on with it.
        first = min(kept)
        return self._remove([n for n in self.numbers() if n not in needed and (n in readable or n < first)])

    def end(self, *, keep_last: bool) -> None:
        """The run is over: remove what was there for recovery, and the directory if that was all."""
        try:
            checkpoints = self.list()
            wanted = [each for each in checkpoints if each.manifest.retained]
            wanted += checkpoints[-1:] if keep_last else []
            needed = {done for each in wanted for done in each.chain}
            self._remove([done for done in self.numbers() if done not in needed])
            self._remove_leftovers(0)
        except CheckpointError as error:
            _log.warning("a checkpoint for recovery stays: %s", error)
        with suppress(OSError):  # it has others, or is not there
            self.disk.remove_directory(self.directory)

    def tidy(self) -> None:
        """The same after a new one is complete, whose files were read back; what can't be removed stays for now."""
        try:
            self.prune(verify=False)
        except CheckpointError as error:
            _log.warning("an old checkpoint stays for now: %s", error)

    def discard_after(self, done: int) -> Sequence[int]:
        """Remove all that came after this one, once it is verified: the run goes back to it for good; what is gone."""
        open_checkpoint(self.disk, self.directory, done).verify()
        self.continue_from(done)
        return self._remove([number for number in self.numbers() if number > done])

    def committed(self, done: int) -> Checkpoint:
        """A new one was read back and has its name: the next one may build on it."""
        reach("checkpoint.complete")
        checkpoint = open_checkpoint(self.disk, self.directory, done)
        self._base = _as_base(checkpoint)
        return checkpoint

    def _remove(self, doomed: Sequence[int]) -> Sequence[int]:
        removed = []
        for done in reversed(doomed):  # what builds on another goes first
            path, away = self.directory / directory_name(done), self._unused_name(_OLD, done)
            with failing(CheckpointError, "remove", path):
                if MANIFEST not in self.disk.files(path):
                    continue  # somebody else's, who has named it by a number
                self.disk.rename(path, away)
                self.disk.sync_directory(self.directory)  # else its files could be gone before its name
                reach("checkpoint.pruned")
                self._remove_files(away)
            removed.append(done)
        return sorted(removed)

    def _remove_files(self, path: Path) -> None:
        """Remove a directory that has no name of a checkpoint."""
        for name in self.disk.files(path):
            self.disk.unlink(path / name)
        self.disk.remove_directory(path)

    def _unused_name(self, prefix: str, done: int, token: str = "") -> Path:
        return self.directory / f"{prefix}{directory_name(done)}-{self.generation}-{token or os.urandom(4).hex()}"

    def numbers(self) -> Sequence[int]:
        """Every name that stands for a checkpoint, whether it can be opened or not."""
        with failing(CheckpointError, "read", self.directory):
            try:
                names = self.disk.directories(self.directory)
            except (FileNotFoundError, NotADirectoryError):
                return []
        numbers = [int(name) for name in names if name.isascii() and name.isdecimal() and len(name) < 20]
        return sorted(number for number in numbers if directory_name(number) in names)

    def _find_base(self, done: int) -> BaseEntry | None:
        if self._base is None or self._base.done >= done:
            return None
        try:
            base = open_checkpoint(self.disk, self.directory, self._base.done)
            found = _as_base(base)
        except CheckpointError as error:
            _log.warning("the next checkpoint has all rows, since the last one can't be built on: %s", error)
            return None
        if found != self._base:
            raise CheckpointError(f"{base.directory} is another run's by now: give each run a directory of its own")
        return None if base.is_long else found

    def _remove_leftovers(self, done: int) -> None:
        with failing(CheckpointError, "read", self.directory):
            names = [name for name in self.disk.directories(self.directory) if _LEFTOVER.fullmatch(name)]
        for name in names:
            if name.endswith(f"-{self.generation}-{self.token}") and int(name.split("-")[1]) >= done:
                continue  # of this checkpoint, or a trainer is ahead with its state for the next
            try:
                self._remove_files(self.directory / name)
            except OSError as error:
                _log.warning("%s, a leftover, can't be removed: %s", self.directory / name, error)


class PendingCheckpoint:
    """A checkpoint that is being written: leaving the `with` block without `commit` removes it."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        directory: Path,
        done: int,
        base: BaseEntry | None,
        retained: bool,
        token: str,
    ) -> None:
        self.directory, self.done = directory, done
        self._checkpoints, self._disk = checkpoints, checkpoints.disk
        self._base, self._retained, self._token = base, retained, token
        self._files: list[FileEntry] = []
        self._over = False

    @property
    def base(self) -> int | None:
        """The checkpoint that this one builds on: only rows written since are wanted; None: all."""
        return None if self._base is None else self._base.done

    def num_files(self) -> int:
        """How many files are there by now, those of a writer elsewhere included; OSError once it has its name."""
        return len(self._disk.files(self.directory))

    def add(self, entries: Iterable[FileEntry]) -> None:
        """Files that `write_rows` has written into the directory."""
        self._files += entries

    def write_blob(self, name: str, *parts: Bytes) -> None:
        """Keep bytes under a name, such as `trainer-0`; `Checkpoint.blob` gives them back."""
        self.add([write_file(self._disk, self.directory, f"{name}{BLOB_SUFFIX}", parts)])

    def take_states(self, names: Iterable[str], given_up: Callable[[], bool] = lambda: False) -> None:
        """Add what other trainers write with `write_state`, as soon as it is there; CheckpointError if it is not."""
        for name in names:
            path = self.directory / f"{name}{BLOB_SUFFIX}"
            until = time.monotonic() + WAIT_S
            with failing(CheckpointError, "read", path):
                while path.name not in self._disk.files(self.directory):
                    if given_up() or time.monotonic() > until:
                        raise CheckpointError(f"{name} has not written its state to {path} within {WAIT_S:g} s")
                    pause()
                with self._disk.open(path) as file:
                    data = bytearray(file.num_bytes)
                    file.read_into(data)
            self.add([FileEntry(name=path.name, bytes=len(data), checksum=xxh64_hexdigest(data))])

    def commit(self, facts: RunFacts, confirm: Callable[[], None] = lambda: None) -> Checkpoint:
        """Give it its name, now that all its files are written, synced and read back.

        `confirm` is called right before, and raises if it must not get one: another generation goes on by now. If it
        fails it is gone, and those before it are as they were.
        """
        assert not self._over, "a checkpoint is committed or abandoned once"
        name = self._checkpoints.directory / directory_name(self.done)
        try:
            reach("checkpoint.blobs.written")
            self._check_tables(facts)
            manifest = Manifest.make(
                facts, files=self._files, done=self.done, base=self._base, token=self._token,
                generation=self._checkpoints.generation, retained=self._retained,
            )  # fmt: skip
            self._write_manifest(manifest)
            reach("checkpoint.manifest.written")
            confirm()
            reach("checkpoint.confirmed")
            self._take_name(name)
        except BaseException:
            self.abandon()
            raise
        self._over = True
        return self._checkpoints.committed(self.done)

    def abandon(self) -> None:
        """Remove what was written so far; after a commit, or a second time, nothing happens."""
        if self._over:
            return
        self._over = True
        with suppress(OSError):  # what can't be removed now is removed by the next `begin`
            self._checkpoints._remove_files(self.directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abandon()

    def _check_tables(self, facts: RunFacts) -> None:
        """Rows of a base fill in for those that are not here, so they have to be of the same tables."""
        if self._base is None:
            return
        base = open_checkpoint(self._disk, self._checkpoints.directory, self._base.done)
        if different := table_differences(base.manifest.tables, facts.tables):
            raise CheckpointError(
                f"the checkpoint after {self.done} iterations can't build on {base.directory}, which is of another "
                f"model: {'; '.join(different)}: give the run a directory of its own"
            )

    def _write_manifest(self, manifest: Manifest) -> None:
        """Last in the directory; then all names are looked at once more, and synced: files were read back before."""
        data, checksum = encode_manifest(manifest)
        with failing(CheckpointError, "write", self.directory / MANIFEST):
            with self._disk.create(self.directory / MANIFEST) as file:
                file.write(data)
                file.sync()
            found, again = read_manifest(self._disk, self.directory)
        if (found, again) != (manifest, checksum):
            raise CheckpointError(f"{self.directory / MANIFEST} reads back as something else: check the disk")
        names = {MANIFEST, *(entry.name for entry in manifest.files)}
        with failing(CheckpointError, "read", self.directory):
            there = set(self._disk.files(self.directory))
            self._disk.sync_directory(self.directory)
        if there != names:
            raise CheckpointError(
                f"{self.directory} has files {sorted(there ^ names)[:5]} too many or too few: is another run writing "
                "checkpoints there? Give each run a directory of its own"
            )

    def _take_name(self, name: Path) -> None:
        """In the place of another of that name, if the run has come back from that one's future."""
        checkpoints, disk = self._checkpoints, self._disk
        self._refuse_later_generation(name)
        with failing(CheckpointError, "name", name), ExitStack() as undo:
            replaced = checkpoints._unused_name(_OLD, self.done) if self.done in checkpoints.numbers() else None
            if replaced is not None:
                disk.rename(name, replaced)
                undo.callback(disk.rename, replaced, name)
            disk.rename(self.directory, name)
            reach("checkpoint.renamed")
            # If the sync fails nobody knows whether it will be there after a crash, so nothing may build on it.
            undo.callback(disk.rename, name, self.directory)
            disk.sync_directory(checkpoints.directory)
            undo.pop_all()
        if replaced is not None:
            with suppress(OSError):
                checkpoints._remove_files(replaced)

    def _refuse_later_generation(self, name: Path) -> None:
        """One that was cut off from the others, and thought to be dead, may come back after they have gone on."""
        try:
            manifest, _ = read_manifest(self._disk, name)
        except CheckpointError:  # none is there, or it can't be read
            return
        if manifest.generation > self._checkpoints.generation:
            raise CheckpointError(
                f"{name} was written by generation {manifest.generation} of the run, and this is "
                f"{self._checkpoints.generation}: the run has gone on without this trainer"
            )


def complete_points(told: Iterable[Path], directory: Path, disk: Disk | None = None) -> list[ResumePoint]:
    """The points that a run can continue from: the checkpoints of these directories that are complete, those beside
    them, and those of a directory of checkpoints.

    What was told is opened by its name, as a listing of shared storage may lag behind; what can't be opened is none.
    """
    known = {path.resolve() for path in told if path.name.isdecimal()}
    found = {}
    for parent in {directory.resolve(), *(path.parent for path in known)}:
        checkpoints = Checkpoints(parent, disk=disk)
        for done in {*checkpoints.numbers(), *(int(path.name) for path in known if path.parent == parent)}:
            with suppress(CheckpointError):
                found[parent, done] = ResumePoint.of(open_checkpoint(checkpoints.disk, parent, done))
    return list(found.values())


def pause() -> None:
    """Before the next look at files of others."""
    time.sleep(LOOK_S)


def _as_base(checkpoint: Checkpoint) -> BaseEntry:
    return BaseEntry(done=checkpoint.done, checksum=checkpoint.checksum)
