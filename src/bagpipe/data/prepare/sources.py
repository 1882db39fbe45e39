"""The raw files: found, put in order of days, opened whatever their compression, and held to be the same until the end.

A file that is missing, damaged, packed or changed while it is read ends in a DataError that names it (I8).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa

from bagpipe.errors import DataError

_COMPRESSIONS = ((b"\x1f\x8b", "gzip"), (b"\x28\xb5\x2f\xfd", "zstd"), (b"BZh", "bz2"), (b"\x04\x22\x4d\x18", "lz4"))
_PACKED = ((b"PK\x03\x04", "a zip archive"), (b"\xfd7zXZ\x00", "compressed by xz"), (b"7z\xbc\xaf", "a 7z archive"))
_TAR_MARK, _TAR_MARK_AT = b"ustar", 257
_SUFFIXES = (".gz", ".gzip", ".zst", ".bz2", ".lz4")
_SKIPPED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """A raw file, as it was when the run began."""

    path: Path
    size: int
    """Bytes on disk."""
    mtime_ns: int
    inode: int
    compression: str | None = None
    """By its first bytes, not its name."""

    def check(self) -> None:
        """See that the file is still the one that the run began with."""
        try:
            now = self.path.stat()
        except OSError as error:
            raise DataError(f"{self.path} went away while it was read ({error.strerror}): start again") from error
        if (now.st_size, now.st_mtime_ns, now.st_ino) != (self.size, self.mtime_ns, self.inode):
            raise DataError(
                f"{self.path} changed while it was read (it had {self.size:,} bytes and now has {now.st_size:,}): "
                "start again when it is complete"
            )

    def open(self) -> Stream:
        """Its contents, uncompressed."""
        return Stream(self)


class Stream:
    """The contents of a source from some byte on."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.offset = 0
        """Bytes of the contents before what is read next."""
        try:
            self._file: Any = pa.OSFile(str(source.path), "rb")
            packed = source.compression is not None
            self._contents: Any = pa.CompressedInputStream(self._file, source.compression) if packed else self._file
        except OSError as error:
            raise DataError(_unreadable(source.path, error)) from error

    def read(self, num_bytes: int) -> bytes:
        """As many bytes, or fewer at the end of the file."""
        parts = []
        while num_bytes:
            try:
                part: bytes = self._contents.read(num_bytes)
            except OSError as error:
                raise DataError(self._damaged(error)) from error
            if not part:
                break
            parts.append(part)
            num_bytes -= len(part)
            self.offset += len(part)
        return b"".join(parts) if len(parts) != 1 else parts[0]

    def skip_to(self, offset: int) -> None:
        """Go on to a later byte; what is compressed must be uncompressed up to there."""
        if self._source.compression is None:
            self.offset = min(offset, self._source.size)
            self._contents.seek(self.offset)
        while self.offset < offset and self.read(min(offset - self.offset, _SKIPPED_AT_ONCE)):
            pass
        if self.offset < offset:
            raise DataError(f"{self._source.path} has fewer bytes than the {offset:,} that were read of it: start anew")

    @property
    def position(self) -> int:
        """About how many bytes of the file on disk are read."""
        return int(self._file.tell())

    def _damaged(self, error: OSError) -> str:
        path, size = self._source.path, self._source.size
        if self._source.compression is None:
            return f"{path} can't be read on from byte {self.position:,} ({error}): check the disk"
        return (
            f"{path} is damaged or cut short near byte {self.position:,} of {size:,}, after {self.offset:,} bytes "
            f"uncompressed ({self._source.compression}: {error}): fetch it again"
        )

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contents.close()
        self._file.close()


def find_sources(paths: Sequence[Path], patterns: Sequence[str] = ("*",)) -> tuple[Source, ...]:
    """The files that the paths name, of directories those that match a pattern, in order of the numbers in their names.

    day_2 comes before day_10. Hidden files and those that begin with `_` are not data.
    """
    files: list[Path] = []
    for path in paths:
        files += _of_directory(path, patterns) if path.is_dir() else [path]
    if not files:
        raise DataError("no file is named: give a file or a directory")
    files.sort(key=_natural)
    _check_names(files)
    return tuple(_source(path) for path in files)


def _of_directory(directory: Path, patterns: Sequence[str]) -> list[Path]:
    try:
        there = [path for path in directory.iterdir() if path.name[0] not in "._" and path.is_file()]
    except OSError as error:
        raise DataError(_unreadable(directory, error)) from error
    found = [path for path in there if any(fnmatchcase(path.name, pattern) for pattern in patterns)]
    if not found:
        names = sorted(path.name for path in there)
        shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
        raise DataError(
            f"{directory} has no file named {' or '.join(patterns)} ({f'it has {shown}' if names else 'it has none'}): "
            "name the files themselves"
        )
    return found


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Order of names in which numbers count as numbers; a name comes before longer ones that begin with it."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts if part]


def _check_names(files: Sequence[Path]) -> None:
    contents: dict[str, Path] = {}
    days: dict[tuple[Path, str], dict[int, Path]] = {}
    for path in files:
        stem = path.name.removesuffix(path.suffix) if path.suffix in _SUFFIXES else path.name
        twin = contents.setdefault(str(path.resolve().parent / stem), path)
        if twin is not path:
            raise DataError(f"{twin} and {path} would give the same samples twice: name the files that are meant")
        day = re.fullmatch(r"(.*day[_-]?)([0-9]+)(\D*)", stem, re.IGNORECASE)
        if day is not None:
            days.setdefault((path.parent, day[1]), {})[int(day[2])] = path
    for (_, name), numbers in days.items():
        for number in range(min(numbers), max(numbers)):
            if number not in numbers:
                after = numbers[max(other for other in numbers if other < number)]
                raise DataError(
                    f"{name}{number} is missing: after {after} comes {numbers[min(n for n in numbers if n > number)]}; "
                    f"fetch it, or name days without a gap"
                )


def _source(path: Path) -> Source:
    try:
        with path.open("rb") as file:
            known = os.fstat(file.fileno())
            start = file.read(_TAR_MARK_AT + len(_TAR_MARK))
    except OSError as error:
        raise DataError(_unreadable(path, error)) from error
    for mark, what in _PACKED:
        if start.startswith(mark):
            raise DataError(f"{path} is {what}: unpack it first")
    compression = next((name for mark, name in _COMPRESSIONS if start.startswith(mark)), None)
    source = Source(path, known.st_size, known.st_mtime_ns, known.st_ino, compression)
    if compression is not None:
        with source.open() as stream:
            start = stream.read(_TAR_MARK_AT + len(_TAR_MARK))
    if not start:
        raise DataError(f"{path} is empty: fetch it again, or leave it out")
    if start[_TAR_MARK_AT:] == _TAR_MARK:
        raise DataError(f"{path} is a tar archive: unpack it first")
    return source


def _unreadable(path: Path, error: OSError) -> str:
    return f"can't read {path} ({error.strerror or error}): check the path and its permissions"
