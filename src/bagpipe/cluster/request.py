"""What is to be launched, as the command line asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.config import Config, Section
from bagpipe.errors import ConfigError
from bagpipe.policy_options import MEASURED
from bagpipe.resuming import CHECKPOINTS, Resumed

SCRIPT_SETTINGS = frozenset(
    {
        *("trainers", "servers", "assign", "sync", "wire", "recovery", "store", "store_memory", "threads", "seed"),
        "init_from",
    }
)
"""What a launch decides for a script; everything else the script says itself."""


@dataclass(frozen=True)
class Request:
    """What is to be launched."""

    config: Config
    servers: int = 1
    processors: int = 1
    address: str | None = None
    """Of a Ray cluster; None: one of our own on this machine."""
    interface: str | None = None
    """Where roles listen: its name, address or network. None: loopback on one machine, else as Ray's nodes."""
    run_dir: Path | None = None
    resumed: Resumed | None = None
    """The run that is gone on with, whose configuration this is."""
    script: Path | None = None
    """Run by the trainer in place of the configuration's model and data."""
    arguments: tuple[str, ...] = ()
    checkpoints: Path | None = None
    """Where a script may keep checkpoints, in or below; it may do so in the run's own directory of them anyway."""
    server_memory: int | None = None
    """Bytes: reserved, and the most that a server takes. None: no limit, and a little is reserved."""
    server_cores: float = 1.0
    trainer_cores: int | None = None
    """Of each trainer. None: as many as torch uses here; on this machine alone, trainers share them."""

    def __post_init__(self) -> None:
        for name, value in (("--servers", self.servers), ("--processors", self.processors)):
            if value < 1:
                raise ConfigError(f"{name} is {value}: give at least 1")
        if self.script is not None and not self.script.is_file():
            raise ConfigError(f"there is no script {self.script}: check the path")
        if self.script is not None and self.resumed is not None:
            raise ConfigError(
                f"--resume {self.resumed.directory} and the script {self.script}: a script goes on from its own "
                "checkpoints, with bagpipe.prepare(..., checkpoint=bagpipe.Checkpointing(..., resume='auto'))"
            )
        if self.checkpoints is not None:
            self._check_checkpoints(self.checkpoints)
        self._refuse_without_effect()

    def _check_checkpoints(self, directory: Path) -> None:
        if self.script is None:
            raise ConfigError(
                f"--checkpoints {directory} goes with a script: checkpoints of a configuration are in RUN/{CHECKPOINTS}"
            )
        if directory.exists() and not directory.is_dir():
            raise ConfigError(f"--checkpoints {directory} is a file: give a directory, which need not be there yet")
        if self.run_dir is None:
            return
        run, own = self.run_dir.resolve(), self.run_dir / CHECKPOINTS
        if directory.resolve().is_relative_to(run) and directory.resolve() != run / CHECKPOINTS:
            raise ConfigError(
                f"--checkpoints {directory} is in the directory of the run, {self.run_dir}, of which only logs and "
                f"{CHECKPOINTS} stay if it fails: give another, or leave it out and use {own}"
            )

    def _refuse_without_effect(self) -> None:
        """Settings that would be taken and do nothing."""
        config = self.config
        if self.script is not None:
            for name in sorted(config.model_fields_set - SCRIPT_SETTINGS):
                raise ConfigError(
                    f"{name} = {_shown(getattr(config, name))} has no effect on the script {self.script}, which trains "
                    "what it says itself: leave the setting out, and change the script, its bagpipe.prepare(...) "
                    "where that has such an argument"
                )
            if self.processors != 1:
                raise ConfigError(
                    f"--processors {self.processors} has no effect on the script {self.script}, which reads its own "
                    "loader: leave it out, and give bagpipe.data.Loader(..., processes=N) in the script"
                )
        if self.script is None and config.policy == "windowed" and config.policy_options.windows == MEASURED:
            raise ConfigError(
                "policy_options.windows = 'measured' is for an oracle in the process that trains, and launch starts "
                "one that may have to give the same plans again: measure with bagpipe train, and give the windows "
                "of its summary here"
            )
        if config.trainers == 1:
            return
        if config.check:
            raise ConfigError(
                f"check = true can't follow the rows of {config.trainers} trainers in processes of their own: use "
                f"bagpipe train --set trainers={config.trainers} --set check=true, which checks as many trainers in "
                "one process and trains the same bits with the same threads, or leave it out"
            )

    @property
    def trainers(self) -> int:
        """Who share each batch."""
        return self.config.trainers

    @property
    def start(self) -> ResumePoint:
        """Where the run begins."""
        return START if self.resumed is None else self.resumed.point

    @property
    def threads(self) -> int:
        """Of each trainer. Bits can depend on it: with one trainer it is the same as in one process."""
        here = torch.get_num_threads()
        share = here if self.address is not None else max(1, here // self.trainers)
        return self.config.threads or self.trainer_cores or share

    @property
    def keeps_spare(self) -> bool:
        """Whether a process is kept ready for who is lost: on a Ray of our own, where it may be any role."""
        recovery = self.config.recovery
        return recovery.spare and recovery.restarts_max > 0 and self.address is None


def _shown(value: object) -> str:
    """A setting, or those of a section that were given."""
    return repr(value.model_dump(exclude_unset=True) if isinstance(value, Section) else value)
