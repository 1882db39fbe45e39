"""Errors of the disk under a checkpoint, as typed errors that name the file and the remedy (promise I8)."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bagpipe.errors import CheckpointError

_REMEDIES = {
    **dict.fromkeys(
        (errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "free space, keep fewer checkpoints, or give a larger disk"
    ),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise the limit of open files (ulimit -n)"),
    errno.ELOOP: "it is a symbolic link, which is not followed; put the file itself there",
}
_CHECK_PATH = "check the path and its permissions"
_PATH = (errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def failing(doing: str, path: Path) -> Iterator[None]:
    """Turn an error of the operating system into one that names the file and the remedy."""
    try:
        yield
    except OSError as error:
        number = error.errno or 0
        remedy = _REMEDIES.get(number, _CHECK_PATH if number in _PATH else "check the disk")
        said = os.strerror(number) if number else str(error)
        raise CheckpointError(f"{doing} {path} failed ({said}): {remedy}") from error
