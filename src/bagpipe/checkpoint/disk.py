"""What is done to files, one operation each, so that tests can record, cut off, reorder and fail every one of them.

What was written outlives a crash of the machine once the file was synced, and its name once its directory was.
Operations raise plain OSErrors; who uses them turns those into errors that name the remedy.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    from typing import Self

Bytes: TypeAlias = bytes | bytearray | memoryview

_WRITE_BYTES_MAX = 1 << 24
"""At once, so that Ctrl-C is heard between; Linux writes at most 2 GiB in one call."""
_START_WRITE = 2  # from <fcntl.h>
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


class Appending(Protocol):
    """An open file that grows at its end; for one thread at a time."""

    def write(self, data: Bytes) -> None:
        """Add all of it. After an error some of it may be there."""

    def truncate(self, num_bytes: int) -> None:
        """Cut off what comes after so many bytes; what is written next follows there."""

    def sync(self) -> None:
        """Return once all that was written outlives a crash. After an error nobody knows: give the file up."""

    def lock(self) -> bool:
        """Claim the file until it is closed, or this process ends; False if another has it open and claimed."""

    def close(self) -> None:
        """A second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Readable(Protocol):
    """An open file to read from any place; safe from several threads."""

    @property
    def num_bytes(self) -> int:
        """Its size when it was opened."""

    def read_into(self, buffer: bytearray | memoryview, start: int = 0) -> int:
        """Fill the buffer with what lies from `start` on; how many bytes there were, fewer only at the file's end."""

    def close(self) -> None:
        """A second call does nothing."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Disk(Protocol):
    """Files and directories by path. No operation follows a symbolic link in the last part of a path."""

    def create(self, path: Path) -> Appending:
        """A new, empty file; FileExistsError if there is anything of that name."""

    def append(self, path: Path) -> Appending:
        """A file to write on at its end; made if it is missing."""

    def open(self, path: Path) -> Readable:
        """A regular file to read; OSError for anything else."""

    def make_directory(self, path: Path) -> None:
        """A new directory; FileExistsError if there is anything of that name."""

    def files(self, path: Path) -> Sequence[str]:
        """Names of the regular files in a directory, sorted."""

    def directories(self, path: Path) -> Sequence[str]:
        """Names of the real directories in a directory, sorted."""

    def rename(self, source: Path, target: Path) -> None:
        """In one step; a file that has the new name is replaced, a directory that is not empty is an error."""

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""

    def sync_directory(self, path: Path) -> None:
        """Return once all names that were made, changed or removed in a directory are so after a crash too."""


class _Open:
    """A file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def close(self) -> None:
        """A second call does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class SystemAppending(_Open):
    """`Appending` by the operating system."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._num_bytes_waiting = 0

    def write(self, data: Bytes) -> None:
        """Add all of it."""
        rest = memoryview(data).cast("B")
        self._num_bytes_waiting += len(rest)
        while rest:
            rest = rest[os.write(self._fd, rest[:_WRITE_BYTES_MAX]) :]
        if self._num_bytes_waiting >= _WRITE_BYTES_MAX:
            self._num_bytes_waiting = 0
            start_writing(self._fd)

    def truncate(self, num_bytes: int) -> None:
        """Cut off what comes after so many bytes."""
        os.ftruncate(self._fd, num_bytes)

    def sync(self) -> None:
        """Return once all that was written outlives a crash."""
        os.fdatasync(self._fd)
        # What was synced is read next to check it, which should ask the disk and not this copy.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def lock(self) -> bool:
        """Claim the file until it is closed, or this process ends."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class SystemReadable(_Open):
    """`Readable` by the operating system."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self._num_bytes = os.fstat(fd).st_size

    @property
    def num_bytes(self) -> int:
        """Its size when it was opened."""
        return self._num_bytes

    def read_into(self, buffer: bytearray | memoryview, start: int = 0) -> int:
        """Fill the buffer with what lies from `start` on."""
        rest = memoryview(buffer).cast("B")
        done = 0
        while rest:
            count = os.preadv(self._fd, [rest[:_WRITE_BYTES_MAX]], start + done)
            if not count:
                break
            done += count
            rest = rest[count:]
        return done


class SystemDisk:
    """`Disk` by the operating system."""

    def create(self, path: Path) -> SystemAppending:
        """A new, empty file."""
        return SystemAppending(_open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND))

    def append(self, path: Path) -> SystemAppending:
        """A file to write on at its end."""
        return SystemAppending(_open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))

    def open(self, path: Path) -> SystemReadable:
        """A regular file to read."""
        fd = _open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would keep us waiting for its writer
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            return SystemReadable(fd)
        except BaseException:
            os.close(fd)
            raise

    def make_directory(self, path: Path) -> None:
        """A new directory."""
        path.mkdir()

    def files(self, path: Path) -> list[str]:
        """Names of the regular files in a directory, sorted."""
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))

    def directories(self, path: Path) -> list[str]:
        """Names of the real directories in a directory, sorted."""
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def rename(self, source: Path, target: Path) -> None:
        """In one step."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        """Return once all names in a directory are so after a crash too."""
        fd = _open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_directories(disk: Disk, path: Path) -> None:
    """Have a directory with all above it; the names of those that are made outlive a crash."""
    try:
        disk.directories(path)
    except FileNotFoundError:
        make_directories(disk, path.parent)
        with suppress(FileExistsError):
            disk.make_directory(path)
        disk.sync_directory(path.parent)


def start_writing(fd: int) -> None:
    """Let what was written to a file go to the disk from now on, so that a sync later has less to wait for."""
    if _sync_file_range is not None:
        _sync_file_range(
            fd, ctypes.c_int64(0), ctypes.c_int64(0), _START_WRITE
        )  # a hint: whether it fails is no matter


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
