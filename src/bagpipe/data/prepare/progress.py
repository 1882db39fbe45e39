"""How far a run has come: one small file, replaced after each shard, from which the same command goes on (I2).

It holds the place in the raw files, what was written so far, and what the run was asked for; a run that asks for
something else, or finds other files, is refused.
"""

from __future__ import annotations

import fcntl
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import IO, Literal, Protocol

from pydantic import Field, ValidationError

from bagpipe.bounded import RECORD_BYTES_MAX, read_bounded
from bagpipe.data.manifest import (
    MANIFEST,
    VOCABULARY,
    Count,
    FeatureEntry,
    RangeEntry,
    Record,
    ShardEntry,
    VocabularyEntry,
)
from bagpipe.data.prepare.block import Place
from bagpipe.data.prepare.sources import Source
from bagpipe.data.writer import write_file
from bagpipe.errors import ConfigError, DataError, ShardError

WORKING = "working"
_PROGRESS, _LOCK = "progress.json", "lock"
_VERSION = 1
_SHARD = re.compile(r"shard-[0-9]{5,}\.bin(\.tmp)?")


class SourceEntry(Record):
    """A raw file, as it was when the run began."""

    path: str
    size: Count
    mtime_ns: int


class Progress(Record):
    """A moment of a run at which everything before it is on disk."""

    version: int = _VERSION
    settings: dict[str, str]
    """What must be the same when the run goes on."""
    sources: tuple[SourceEntry, ...]
    ended: bool = False
    """All samples are written; only vocabularies and the manifest are missing."""
    file: Count = 0
    offset: Count = 0
    line: Count = 0
    samples_after: Count = 0
    """Samples after that place that are done already."""
    problems_after: Count = 0
    """The same of lines that can't be used."""
    counted: Count = 0
    """Samples counted so far, in a first pass."""
    counts: Count = 0
    """Number of the files of counts that belong to this moment; 0: none."""
    words: dict[str, Count] = Field(default_factory=dict)
    """Values of each table so far."""
    values: dict[str, Literal["text", "integer"]] = Field(default_factory=dict)
    settled: dict[str, VocabularyEntry] = Field(default_factory=dict)
    days: tuple[RangeEntry, ...] = ()
    features: tuple[FeatureEntry, ...] = ()
    shards: tuple[ShardEntry, ...] = ()
    skipped: Count = 0
    on_error: str = "stop"
    rejected: dict[str, Count] = Field(default_factory=dict)
    """Bytes of the files of lines that can't be used."""

    @property
    def place(self) -> Place:
        """Where the run goes on."""
        return Place(self.file, self.offset, self.line)


def identities(sources: Sequence[Source]) -> tuple[SourceEntry, ...]:
    """What is remembered of the raw files."""
    return tuple(SourceEntry(path=str(s.path.resolve()), size=s.size, mtime_ns=s.mtime_ns) for s in sources)


class Working:
    """The directory, within that of the shards, of what a run needs until it is done; one process at a time has it."""

    def __init__(self, destination: Path) -> None:
        self.destination, self.path = destination, destination / WORKING
        self._lock: IO[bytes] | None = None

    @property
    def exists(self) -> bool:
        """Whether a run has begun here and has not ended."""
        if (self.path / _LOCK).exists():
            return True
        # Stopped right before the lock was made or after it was removed; beside other files it may be anyone's.
        alone = self.path.is_dir() and {p.name for p in self.destination.iterdir()} <= {WORKING, f"{MANIFEST}.tmp"}
        return alone and not any(self.path.iterdir())

    def open(self) -> None:
        """Make it, or take over that of a run that was stopped."""
        try:
            self.path.mkdir(exist_ok=True)
            self._lock = (self.path / _LOCK).open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise ShardError(f"{self.destination} is being prepared by another process: wait for it") from error
        except OSError as error:
            raise ShardError(
                f"{self.path} can't be written ({error.strerror}): free space or choose another directory"
            ) from error

    def close(self) -> None:
        """Let another process have it."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def load(self) -> Progress | None:
        """The moment from which to go on; None: nothing is finished yet."""
        path = self.path / _PROGRESS
        try:
            return Progress.model_validate_json(read_bounded(path, ShardError, RECORD_BYTES_MAX))
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise ShardError(
                f"{path} is not the progress of a run of this version: remove {self.destination} and prepare again"
            ) from error

    def save(self, progress: Progress) -> None:
        """From now on a stopped run goes on from here."""
        write_file(self.path / _PROGRESS, [progress.model_dump_json(indent=1).encode()], "wb")
        for path in self.path.glob("counts-*"):
            if not path.name.startswith(f"counts-{progress.counts}-"):
                path.unlink()

    def counts_path(self, number: int, table: int) -> Path:
        """The file of the counts of a table."""
        return self.path / f"counts-{number}-{table:05d}.bin"

    def tidy(self, progress: Progress | None) -> None:
        """Remove what came after that moment."""
        kept = {shard.file for shard in progress.shards} if progress is not None else set()
        settled = {entry.file for entry in progress.settled.values()} if progress is not None else set()
        for path in self.destination.iterdir():
            if _SHARD.fullmatch(path.name) and path.name not in kept:
                path.unlink()
        for path in (self.destination / VOCABULARY).glob("*"):
            if path.name not in settled:
                path.unlink()
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != _LOCK and progress is None:
                path.unlink()

    def remove(self, *, with_vocabularies: bool = False) -> None:
        """The run is over; stopped in the midst of this, it can be done again.

        The lock goes last: as long as it is there, the same command takes over.
        """
        try:
            if with_vocabularies:
                shutil.rmtree(self.destination / VOCABULARY, ignore_errors=True)
                (self.destination / f"{MANIFEST}.tmp").unlink(missing_ok=True)
            with suppress(OSError):
                for path in sorted(self.path.iterdir(), key=lambda path: (path.name == _LOCK, path.name == _PROGRESS)):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                self.path.rmdir()
        finally:
            self.close()


def has_progress(destination: Path) -> bool:
    """Whether the same command would go on from somewhere."""
    return (destination / WORKING / _PROGRESS).exists() and not (destination / MANIFEST).exists()


class Asked(Protocol):
    """What an earlier run was asked for."""

    @property
    def settings(self) -> dict[str, str]:
        """What must be the same."""
        ...

    @property
    def sources(self) -> tuple[SourceEntry, ...]:
        """The raw files."""
        ...


def check_same(
    what: str, earlier: Asked, settings: Mapping[str, str], sources: Sequence[SourceEntry], remedy: str
) -> None:
    """See that a run asks for what an earlier one did; `what` begins the message: `data was begun`."""
    for name in sorted(settings.keys() | earlier.settings.keys()):
        before, now = earlier.settings.get(name), settings.get(name)
        if before != now:
            raise ConfigError(f"{what} with {name} {_short(before)}, now it is {_short(now)}: {remedy}")
    names, given = [source.path for source in earlier.sources], [source.path for source in sources]
    if names != given:
        other = next(then or now or "" for then, now in zip_longest(names, given) if then != now)
        counts = f"{len(names)} files, now there are {len(given)}"
        raise ConfigError(f"{what} with {counts}, the first that differs is {other}: {remedy}")
    for then, new in zip(earlier.sources, sources, strict=True):
        if then != new:
            changed = f"{then.size:,} bytes, now {new.size:,}" if then.size != new.size else "another time of change"
            raise DataError(f"{what} with another {then.path} (it had {changed}): {remedy}")


def _short(text: str | None) -> str:
    return "nothing" if text is None else text if len(text) <= 100 else f"{text[:97]}..."
