"""Which run `bagpipe train --resume` goes on with, and with which configuration.

A run has its own configuration. What can't change the result may be changed when it goes on, what changes it only by
rounding is noted, and anything else is refused by name (I8).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.checkpointing import NAME as CHECKPOINTS
from bagpipe.config import Config, lay_over, parse_config
from bagpipe.errors import CheckpointError, ConfigError
from bagpipe.whole_file import whole_file

CONFIG_NAME = "config.json"
SUMMARY_NAME = "summary.json"
RUNS = Path("runs")

FREE = (
    "lookahead",
    "cache",
    "policy",
    "policy_options",
    "store",
    "store_memory",
    "servers",
    "sync",
    "check",
    "checkpoint",
    "recovery",
    "wire",
    "data.workers",
    "data.processes",
)
"""Settings, or sections of them, that can't change the result."""
ROUNDING = ("trainers", "assign", "threads")
"""Settings that change it by rounding: bits are then those of this number from there on."""


@dataclass(frozen=True)
class Resumed:
    """A run that goes on."""

    directory: Path
    config: Config
    point: ResumePoint
    """Where it goes on from; `START`: it was ended before its first checkpoint, and begins again."""
    notes: list[str]
    """What the user should know."""


def find_run(path: Path | None) -> Path:
    """The directory of a run that has not ended: the given one, or the newest in `runs`."""
    if path is not None:
        if not path.is_dir():
            raise ConfigError(f"--resume {path}: give the directory of a run; change its settings with --set")
        if not _is_run(path):
            raise ConfigError(f"{path} is not the directory of a run with checkpoints: it has no {CONFIG_NAME}")
        if (path / SUMMARY_NAME).exists():
            raise ConfigError(f"the run {path} has ended, {SUMMARY_NAME} has its results: there is nothing to resume")
        return path
    runs = [run for run in RUNS.iterdir() if _is_run(run)] if RUNS.is_dir() else []
    open_ones = [run for run in runs if not (run / SUMMARY_NAME).exists()]
    if not open_ones:
        none = "no run there was begun with --checkpoint-every N, or by bagpipe launch"
        found = f"all {len(runs)} runs there have ended" if runs else none
        raise ConfigError(f"there is nothing to resume in {RUNS}/: {found}; give the directory of a run")
    return max(open_ones, key=lambda run: (run / CONFIG_NAME).stat().st_mtime_ns)


def open_run(directory: Path, overrides: Iterable[str]) -> Resumed:
    """A run as it goes on, with settings that may be changed laid over its own."""
    own = _read(directory / CONFIG_NAME)
    before = parse_config(own)
    settings = before.model_dump(mode="json")
    for override in overrides:
        lay_over(settings, override)
    config = parse_config(settings)
    changed = differences(before.model_dump(mode="json"), config.model_dump(mode="json"))
    refused = [key for key in changed if not _is_in(key, FREE + ROUNDING)]
    if refused:
        key = refused[0]
        raise ConfigError(
            f"{key} is {changed[key][0]!r} in the run {directory}, and {changed[key][1]!r} is asked for: that would be "
            f"another run; these may change: {', '.join(FREE + ROUNDING)}"
        )
    if any(_is_stale(each) for each in (before, config)) and not (_is_stale(before) and _is_stale(config)):
        raise ConfigError("policy_options.mode 'stale' changes the result of a run: it can't be changed in the middle")
    notes = [
        f"{key} was {old} and is {new} from here on: the result is that of a run that changed it here, by rounding"
        for key, (old, new) in changed.items()
        if _is_in(key, ROUNDING)
    ]
    checkpoints = Checkpoints(directory / CHECKPOINTS)
    damaged: list[str] = []
    latest = checkpoints.latest(verify=True, problems=damaged)
    if latest is None and damaged:
        raise CheckpointError(f"no checkpoint in {checkpoints.directory} can be used: {damaged[0]}")
    if latest is None:
        notes.append(f"{directory} has no checkpoint yet: it begins again")
        return Resumed(directory, config, START, notes)
    notes += [
        f"going back to the checkpoint after {latest.done:,} iterations, as a newer one is damaged: {problem}"
        for problem in dict.fromkeys(damaged)  # several may build on the one that is
    ]
    return Resumed(directory, config, ResumePoint.of(latest), notes)


def differences(one: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """What two configurations differ in: both values, by dotted key."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in {**one, **other}:
        mine, theirs, name = one.get(key), other.get(key), f"{prefix}{key}"
        if isinstance(mine, Mapping) and isinstance(theirs, Mapping):
            found |= differences(mine, theirs, f"{name}.")
        elif mine != theirs:
            found[name] = (mine, theirs)
    return found


def note_config(directory: Path, config: Config) -> None:
    """Write down what a run is, so that it can be resumed, also after a crash of the machine."""
    text = json.dumps(config.model_dump(mode="json"), indent=2)
    with whole_file(directory / CONFIG_NAME) as file:
        file.write(f"{text}\n".encode())


@contextmanager
def holding(directory: Path) -> Iterator[None]:
    """Nobody else goes on with a run meanwhile; ConfigError if somebody does now."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"the run {directory} is still going, in another process: wait, or end it") from error
        except OSError as error:
            raise ConfigError(
                f"{directory} can't be locked ({error.strerror}), so that nothing would keep a second process from "
                "resuming the run: give a directory on a file system with locks (flock)"
            ) from error
        yield
    finally:
        os.close(descriptor)


def has_checkpoint(directory: Path, *, retained: bool = False) -> bool:
    """Whether a run has any, even if this version can't open them; or one that was asked for, and not for recovery."""
    checkpoints = Checkpoints(directory / CHECKPOINTS)
    if retained:
        return any(each.manifest.retained for each in checkpoints.list())
    return bool(checkpoints.numbers())


def _is_run(path: Path) -> bool:
    return (path / CONFIG_NAME).is_file()


def _is_in(key: str, sections: Iterable[str]) -> bool:
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def _is_stale(config: Config) -> bool:
    return config.policy == "windowed" and config.policy_options.mode == "stale"


def _read(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"can't read the configuration {path}: {error}: restore it, or begin anew") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} is not a configuration: restore it, or begin anew")
    return settings
