"""Errors of the operating system as errors of Bagpipe, which name the file and the remedy (promise I8)."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from bagpipe.errors import BagpipeError, CheckpointError, StoreError

Kind: TypeAlias = type[CheckpointError] | type[StoreError]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REMEDIES = {
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    **dict.fromkeys(
        (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EACCES, errno.EPERM, errno.EROFS),
        "check the path and its permissions",
    ),
}
_REMEDIES_OF: dict[Kind, dict[int, str]] = {
    CheckpointError: {
        **dict.fromkeys(_FULL, "free space, keep fewer checkpoints, or give a larger disk"),
        errno.ELOOP: "it is a symbolic link, which is not followed; put the file itself there",
    },
    StoreError: dict.fromkeys(_FULL, "free space or raise the limit, and try again"),
}
_REMEDY_OF: dict[Kind, str] = {
    CheckpointError: "check the disk",
    StoreError: "check the disk, then start again from a checkpoint",
}


def os_error(kind: Kind, do: str, path: Path, error: OSError) -> BagpipeError:
    """What an operation on a file failed with, as an error of this kind."""
    number = error.errno or 0
    remedy = (_REMEDIES | _REMEDIES_OF[kind]).get(number, _REMEDY_OF[kind])
    said = f"can't {do} {path}: {os.strerror(number) if number else error}: {remedy}"
    return StoreError(number, said) if kind is StoreError else kind(said)


@contextmanager
def failing(kind: Kind, do: str, path: Path) -> Iterator[None]:
    """Turn an error of the operating system into one of this kind; those of Bagpipe pass."""
    try:
        yield
    except BagpipeError:
        raise
    except OSError as error:
        raise os_error(kind, do, path, error) from error


def no_room(what: str, directory: Path, num_bytes: int, error: OSError) -> BagpipeError:
    """A file in a directory can't be made that large."""
    if error.errno not in _FULL:
        return os_error(StoreError, f"make room for {num_bytes:,} B in", directory, error)
    try:
        free = f"{shutil.disk_usage(directory).free:,} B are free there"
    except OSError:
        free = "the directory is gone"
    return StoreError(
        error.errno,
        f"{what} in {directory} can't grow to {num_bytes:,} B ({error.strerror}; {free}), and no row was changed: "
        "free space, raise the limit, or put the store on a larger disk",
    )
