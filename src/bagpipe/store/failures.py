"""Errors of the medium under a store, as typed errors that name the file and the remedy (promise I8)."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bagpipe.errors import StoreError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES = {
    **dict.fromkeys(_FULL, "free space or raise the limit, and try again"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    **dict.fromkeys(
        (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS),
        "check the path and its permissions",
    ),
}


def no_room(what: str, directory: Path, num_bytes: int, error: OSError) -> StoreError:
    """A file in a directory can't be made that large."""
    if error.errno not in _FULL:
        return medium_failure(directory, f"making room for {num_bytes:,} B in", error.errno or 0)
    try:
        free = f"{shutil.disk_usage(directory).free:,} B are free there"
    except OSError:
        free = "the directory is gone"
    return StoreError(
        error.errno,
        f"{what} in {directory} can't grow to {num_bytes:,} B ({error.strerror}; {free}), and no row was changed: "
        "free space, raise the limit, or put the store on a larger disk",
    )


def medium_failure(path: Path, doing: str, number: int) -> StoreError:
    """An operation on the file failed with this error number."""
    remedy = _REMEDIES.get(number, "check the disk, then start again from a checkpoint")
    return StoreError(number, f"{doing} {path} failed ({os.strerror(number)}): {remedy}")


@contextmanager
def failing(doing: str, path: Path) -> Iterator[None]:
    """Turn an error of the operating system into one that names the file."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        raise medium_failure(path, doing, error.errno or 0) from error
