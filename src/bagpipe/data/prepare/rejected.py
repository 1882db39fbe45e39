"""Lines that can't be used: refused at once, counted and listed, or kept to be mended, as `--on-error` says (I8)."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Literal

from bagpipe.data.prepare.block import Problem
from bagpipe.errors import DataError, ShardError

OnError = Literal["stop", "skip", "quarantine"]

LIST = "skipped.jsonl"
"""One JSON object a line: file, line, column, reason."""


class Rejected:
    """The lines of a run that gave no sample, in files that only grow; what was committed stays."""

    def __init__(self, directory: Path, on_error: OnError, suffix: str, header: bytes = b"") -> None:
        self.on_error, self.count = on_error, 0
        self.list_path, self.lines_path = directory / LIST, directory / f"quarantine.{suffix}"
        self._header = header
        self._files: dict[Path, IO[bytes]] = {}

    def add(self, problems: Sequence[Problem]) -> None:
        """Refuse the first, or take note of all."""
        if problems and self.on_error == "stop":
            raise DataError(
                f"{say(problems[0])}; mend it, or go on without such lines by --on-error skip or quarantine"
            )
        for problem in problems:
            record = {"file": problem.file, "line": problem.line, "column": problem.column, "reason": problem.reason}
            self._write(self.list_path, json.dumps(record).encode() + b"\n")
            if self.on_error == "quarantine":
                if self.lines_path not in self._files and self._header:
                    self._write(self.lines_path, self._header + b"\n")
                self._write(self.lines_path, problem.text + b"\n")
        self.count += len(problems)

    def commit(self) -> dict[str, int]:
        """Bring the files to disk; how long they are."""
        sizes = {}
        for path, file in self._files.items():
            try:
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                raise _full(path, error) from error
            sizes[path.name] = file.tell()
        return sizes

    def restore(self, count: int, sizes: dict[str, int]) -> None:
        """Go on after what was committed."""
        self.count = count
        for path in (self.list_path, self.lines_path):
            if path.name not in sizes:
                path.unlink(missing_ok=True)
                continue
            if not path.exists() or path.stat().st_size < sizes[path.name]:
                raise ShardError(f"{path} is shorter than it was: remove the directory and prepare the data again")
            os.truncate(path, sizes[path.name])
            self._files[path] = path.open("ab")

    def close(self, *, keep: bool) -> None:
        """Close the files, or remove them."""
        for path, file in self._files.items():
            with suppress(OSError):  # what was not committed is not needed
                file.close()
            if not keep:
                path.unlink(missing_ok=True)

    def _write(self, path: Path, data: bytes) -> None:
        try:
            if path not in self._files:
                self._files[path] = path.open("ab")
            self._files[path].write(data)
        except OSError as error:
            raise _full(path, error) from error


def say(problem: Problem) -> str:
    """A problem in one line."""
    column = f", column {problem.column!r}" if problem.column is not None else ""
    return f"{problem.file}, line {problem.line:,}{column}: {problem.reason}"


def _full(path: Path, error: OSError) -> ShardError:
    return ShardError(f"{path} can't be written ({error.strerror}): free space or choose another directory")
