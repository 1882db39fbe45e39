"""A file that appears under its name only when it is complete; an earlier one of that name stays until then (I6)."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from bagpipe.checkpoint.disk import Disk


@contextmanager
def nothing_left(directory: Path) -> Iterator[None]:
    """If the block fails, a directory that it has made goes too, with those above it, as far as they are empty."""
    new = [each for each in (directory, *directory.parents) if not each.exists()]
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for each in new:
                each.rmdir()
        raise


def _not_for_others(path: str, flags: int) -> int:
    return os.open(path, flags, 0o664)  # whatever the umask, no other user may write there


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A new file, open to read and write, that takes its name when the block ends, and vanishes if the block fails."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "x+b", opener=_not_for_others) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    Disk().sync_directory(path.parent.resolve())
