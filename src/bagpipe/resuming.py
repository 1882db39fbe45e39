"""Where a run continues: from which checkpoint, and with `--resume` which run, with which configuration.

A checkpoint of another model, row optimizer, seed or data is refused by naming the difference, before anything has
changed (I8). A run has its own configuration: what can't change the result may be changed when it is resumed, what
changes it only by rounding is noted, and anything else is refused by name.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from bagpipe.bounded import SETTINGS_BYTES_MAX, read_bounded
from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.disk import check_private
from bagpipe.checkpoint.manifest import MANIFEST, RunFacts
from bagpipe.checkpoint.point import START, Checkpoint, ResumePoint
from bagpipe.config import Config, lay_over, parse_config
from bagpipe.errors import CheckpointError, ConfigError
from bagpipe.layers import Binding
from bagpipe.trainer.checkpointer import check_resumed
from bagpipe.whole_file import whole_file

Resume = bool | Literal["auto"] | str | Path | None
CHECKPOINTS = "checkpoints"
"""The directory of checkpoints in a run's directory."""
CONFIG_NAME = "config.json"
SUMMARY_NAME = "summary.json"
RUNS = Path("runs")
_log = logging.getLogger(__name__)

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


def find_resume_point(resume: Resume, directory: str | Path | None) -> ResumePoint:
    """The point that `resume` means: True or "auto" the last one of the directory, a path that one.

    A path is that of a checkpoint, of a directory of them, or of a run. Of several the newest that verifies is taken.
    """
    if directory is not None:
        _check_private(Path(directory))
    if resume is None or resume is False:
        _refuse_held(directory, "go on from it with resume=True")
        return START
    if resume is True or resume == "auto":
        if directory is None:
            raise ConfigError(f"resume={resume!r} goes on from checkpoint.directory: give checkpoint, or a path")
        point, damaged = _newest(Path(directory))
        if point == START and resume is True:
            raise CheckpointError(f"{directory} holds no checkpoint to go on from: begin anew without resume")
        for problem in damaged:
            _log.warning("passing over a checkpoint: %s", problem)
        return point
    if not isinstance(resume, str | Path):
        raise ConfigError(f"resume is {resume!r}: give True, False, 'auto', or a path")
    point = _resumable(_at(Path(resume)))
    assert point.checkpoint is not None
    if directory is not None and point.checkpoint.parent != Path(directory).resolve():
        _refuse_held(directory, f"resume names another, {point.checkpoint}: go on from its own with resume=True")
    return point


def find_initial_point(init_from: str | Path, directory: str | Path | None = None) -> ResumePoint:
    """The beginning of a run that takes over the state at a path, whose own checkpoints go to `directory`."""
    checkpoint = _at(Path(init_from), "begin with")
    if directory is not None and checkpoint.directory.parent == Path(directory).resolve():
        raise ConfigError(
            f"init_from is {init_from}, among the run's own checkpoints in {directory}: give the run that begins a "
            "directory of its own, or go on with the other one by resume"
        )
    return ResumePoint.initial(checkpoint)


def _newest(directory: Path) -> tuple[ResumePoint, list[str]]:
    """The newest point in a directory of checkpoints that verifies, and what is wrong with newer ones; `START`: none.

    CheckpointError if there are some and none can be used.
    """
    damaged: list[str] = []
    latest = Checkpoints(directory).latest(verify=True, problems=damaged)
    if latest is None and damaged:
        raise CheckpointError(
            f"none of the checkpoints in {directory} can be used ({damaged[0]}): put copies in their place, or "
            "begin again in another directory"
        )
    problems = list(dict.fromkeys(damaged))  # several may build on the one that is
    return START if latest is None else _resumable(latest), problems


def _resumable(checkpoint: Checkpoint) -> ResumePoint:
    if checkpoint.done == 0:
        raise CheckpointError(
            f"{checkpoint.directory} has imported rows, and no run to go on with: begin with them by init_from"
        )
    return ResumePoint.of(checkpoint)


def _at(path: Path, purpose: str = "go on from") -> Checkpoint:
    if (path / MANIFEST).is_file():
        if not path.resolve().name.isdecimal():
            raise CheckpointError(f"{path} is not the name of a checkpoint, which is its number of iterations")
        return Checkpoints(path.resolve().parent).open(int(path.resolve().name))
    within = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    _check_private(within)
    latest = Checkpoints(within).latest(verify=True)
    if latest is None:
        raise CheckpointError(f"{path} holds no checkpoint to {purpose}: check the path")
    return latest


def _check_private(directory: Path) -> None:
    """Runs begin in and go on from directories that nobody else can put a checkpoint into."""
    if directory.is_dir():
        check_private(directory, "the directory of checkpoints")


def _refuse_held(directory: str | Path | None, remedy: str) -> None:
    """ConfigError if there are checkpoints: they would be written over, or taken for those of the run that begins."""
    found = [] if directory is None else Checkpoints(directory).numbers()
    if found:
        raise ConfigError(
            f"{directory} holds checkpoints of a run already, the last after {found[-1]} iterations: {remedy}, or give "
            "another directory"
        )


def check_point(point: ResumePoint, facts: RunFacts, model: nn.Module, binding: Binding) -> None:
    """CheckpointError that names the difference if a run can't begin or continue there."""
    if point == START:
        return
    if point.is_initial:
        point.open().check_initial(facts.tables)
    else:
        check_same_run(point.open(), facts)
    check_resumed(point, model, [layer.module for layer in binding.layers])


def check_same_run(checkpoint: Checkpoint, facts: RunFacts) -> None:
    """CheckpointError that names the difference if this is the checkpoint of another model, seed or data."""
    checkpoint.check_tables(facts.tables)
    there, here = checkpoint.manifest.config, facts.config
    if there.get("accumulate") != here["accumulate"]:
        raise _other(checkpoint, "accumulate", there.get("accumulate"), here["accumulate"])
    for key, what in (
        ("row_optimizers", "the row optimizer"),
        ("first_rows", "what rows begin with, by the seed,"),
    ):
        saved = there.get(key, {})
        for table, value in here[key].items():
            if saved.get(table) != value:
                raise _other(checkpoint, f"{what} of table {table!r}", saved.get(table), value)
    data = (checkpoint.manifest.data, facts.data), (there.get("first_batch"), here["first_batch"])
    for saved, wanted in data:
        if saved and wanted and saved != wanted:
            raise _other(checkpoint, "a checksum of the data or its order", saved, wanted)


def _other(checkpoint: Checkpoint, what: str, there: object, here: object) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.directory} is of another run: {what} is {there!r} there and {here!r} here: use what it was made "
        "with, or another checkpoint"
    )


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
    check_private(directory, "the run directory")
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
    _check_private(directory / CHECKPOINTS)
    point, damaged = _newest(directory / CHECKPOINTS)
    if point == START:
        notes.append(f"{directory} has no checkpoint yet: it begins again")
    notes += [
        f"going back to the checkpoint after {point.done:,} iterations, as a newer one is damaged: {problem}"
        for problem in damaged
    ]
    return Resumed(directory, config, point, notes)


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
        settings = json.loads(read_bounded(path, ConfigError, 4 * SETTINGS_BYTES_MAX))
    except ConfigError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"can't read the configuration {path}: {error}: restore it, or begin anew") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} is not a configuration: restore it, or begin anew")
    return settings
