"""Small files of settings and records, which anyone may have written: read with a bound on bytes, depth and numbers, so
that none takes the memory or the time of a run (I8). Errors are of the kind that the reader raises, and name the file.
"""

from __future__ import annotations

import os
import reprlib
import stat
import tomllib
from pathlib import Path
from typing import Any

from bagpipe.errors import BagpipeError, ConfigError

SETTINGS_BYTES_MAX = 1 << 18
"""Of a file of settings: a hundred times what the longest of ours has."""
RECORD_BYTES_MAX = 1 << 26
"""Of a manifest: a quarter of a million files."""
DEPTH_MAX = 32
_DOTS_MAX = 200
"""In a line of TOML: the time that a dotted key takes grows with the square of its length."""
_INTEGERS = range(-(2**63), 2**63)
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 200
_SHOWN.maxlevel = 3


def read_bounded(path: Path, kind: type[BagpipeError], num_bytes_max: int, *, pipes: bool = False) -> bytes:
    """All of a file, or an error of `kind` if it is longer; OSError if it can't be read.

    Anything but a regular file is refused too, unless the user may well give a pipe.
    """
    # Non-blocking, so that a pipe in the place of a file can't hang the reader.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (0 if pipes else os.O_NONBLOCK))
    with os.fdopen(descriptor, "rb") as file:
        if not (pipes or stat.S_ISREG(os.fstat(descriptor).st_mode)):
            raise kind(f"{path} is not a regular file: put the file itself there")
        data = file.read(num_bytes_max + 1)
    if len(data) > num_bytes_max:
        raise kind(f"{path} has more than {num_bytes_max:,} B, the most that such a file may have: give another")
    return data


def read_toml(path: Path, kind: str) -> dict[str, Any]:
    """The settings in a TOML file; `kind` is what messages call it."""
    try:
        text = read_bounded(path, ConfigError, SETTINGS_BYTES_MAX, pipes=True).decode()
    except OSError as error:
        raise ConfigError(f"can't read the {kind} {path}: {error.strerror}: check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the {kind} {path} is not TOML: {error}") from error
    return parse_toml(text, f"the {kind} {path}")


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The settings in a text of TOML; `where` begins messages."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.count(".") > _DOTS_MAX:
            raise ConfigError(f"{where} has more than {_DOTS_MAX} dots in line {number}: break the line, or use tables")
    try:
        settings = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{where} is nested more than {DEPTH_MAX} deep: flatten it") from None
    except ValueError as error:  # also of numbers of thousands of digits
        raise ConfigError(f"{where} is not TOML: {error}") from error
    check_settings(settings, where, ConfigError)
    return settings


def check_settings(settings: Any, where: str, kind: type[BagpipeError]) -> None:
    """An error of `kind` if values are nested too deep, are integers of over 64 bits, or texts with zero bytes."""
    left = [(settings, "", 0)]
    while left:
        value, name, depth = left.pop()
        if depth > DEPTH_MAX:
            raise kind(f"{where} is nested more than {DEPTH_MAX} deep, at {short(name)}: flatten it")
        if isinstance(value, dict):
            left += [(part, f"{name}.{key}" if name else str(key), depth + 1) for key, part in value.items()]
        elif isinstance(value, list | tuple):
            left += [(part, name, depth + 1) for part in value]
        elif isinstance(value, str) and "\0" in value:
            raise kind(f"{where}: {short(name)} has a zero byte, which no name of a file may have: take it out")
        elif isinstance(value, int) and value not in _INTEGERS:  # its digits may have no end
            raise kind(f"{where}: {short(name)} has a number of {value.bit_length()} bits: give one of at most 64")


def shown(value: object) -> str:
    """A value for a message, cut short."""
    return _SHOWN.repr(value)


def short(text: str, most: int = 100) -> str:
    """A text for a message, cut short."""
    return text if len(text) <= most else f"{text[:most]}..."


def first_lines(lines: list[str], most: int = 20) -> str:
    """What is wrong, a line each, as far as anyone will read it."""
    more = len(lines) - most
    return "\n".join(
        [short(line, 900) for line in lines[:most]] + ([f"and {more:,} more like these"] if more > 0 else [])
    )
