"""What is done to files, one operation each, so that tests can record, cut off, reorder and fail every one of them.

What was written outlives a crash of the machine once the file was synced, and its name once its directory was.
Operations raise plain OSErrors; who uses them turns those into errors that name the remedy.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

from bagpipe.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

Bytes: TypeAlias = bytes | bytearray | memoryview

_BYTES_MAX = 1 << 24
"""At once, so that Ctrl-C is heard between; Linux writes at most 2 GiB in one call."""
_START_WRITE = 2  # from <fcntl.h>
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)


class _Open:
    """A file that is closed at the end of a `with` block."""

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


class NewFile(_Open):
    """A file that grows at its end; for one thread at a time."""

    _num_bytes_waiting = 0

    def write(self, data: Bytes) -> None:
        """Add all of it. After an error some of it may be there."""
        rest = memoryview(data).cast("B")
        self._num_bytes_waiting += len(rest)
        while rest:
            rest = rest[os.write(self._fd, rest[:_BYTES_MAX]) :]
        if self._num_bytes_waiting >= _BYTES_MAX and _sync_file_range is not None:
            self._num_bytes_waiting = 0
            # Begin with what a sync would wait for later. A hint: whether it fails is no matter.
            _sync_file_range(self._fd, ctypes.c_int64(0), ctypes.c_int64(0), _START_WRITE)

    def sync(self) -> None:
        """Return once all that was written outlives a crash. After an error nobody knows: give the file up."""
        os.fdatasync(self._fd)
        # What was synced is read next to check it, which should ask the disk and not this copy.
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)


class OpenFile(_Open):
    """A file to read from any place; safe from several threads."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd)
        self.num_bytes = os.fstat(fd).st_size
        """Its size when it was opened."""

    def read_into(self, buffer: bytearray | memoryview, start: int = 0) -> int:
        """Fill the buffer with what lies from `start` on; how many bytes there were, fewer only at the file's end."""
        rest = memoryview(buffer).cast("B")
        done = 0
        while rest:
            count = os.preadv(self._fd, [rest[:_BYTES_MAX]], start + done)
            if not count:
                break
            done += count
            rest = rest[count:]
        return done


class Disk:
    """Files and directories by path. No operation follows a symbolic link in the last part of a path."""

    def create(self, path: Path) -> NewFile:
        """A new, empty file; FileExistsError if there is anything of that name."""
        return NewFile(_open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND))

    def open(self, path: Path) -> OpenFile:
        """A regular file to read; OSError for anything else."""
        fd = _open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would keep us waiting for its writer
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", str(path))
            return OpenFile(fd)
        except BaseException:
            os.close(fd)
            raise

    def make_directory(self, path: Path) -> None:
        """A new directory; FileExistsError if there is anything of that name."""
        path.mkdir(0o775)  # whatever the umask, no other user may write there

    def files(self, path: Path) -> list[str]:
        """Names of the regular files in a directory, sorted."""
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_file(follow_symlinks=False))

    def directories(self, path: Path) -> list[str]:
        """Names of the real directories in a directory, sorted."""
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))

    def rename(self, source: Path, target: Path) -> None:
        """In one step; a file that has the new name is replaced, a directory that is not empty is an error."""
        source.rename(target)

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""
        path.unlink()

    def remove_directory(self, path: Path) -> None:
        """Remove an empty directory."""
        path.rmdir()

    def sync_directory(self, path: Path) -> None:
        """Return once all names that were made, changed or removed in a directory are so after a crash too."""
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


def check_private(path: Path, what: str) -> None:
    """ConfigError if every user may write to a directory: what is found there then is anybody's."""
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IWOTH:
        raise ConfigError(
            f"{what} {path} has mode {mode:04o}, so that any user can put files there, which a run would go on from: "
            f"chmod o-w {path}, or give a directory in it"
        )


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o664)
