"""What the driver and the roles of a run tell each other, in plain values that Ray carries: control, never data."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.errors import BagpipeError, GenerationOverError
from bagpipe.wire.keys import Security


@dataclass(frozen=True)
class Introduction:
    """Where a role runs."""

    version: str
    """Of Bagpipe."""
    host: str
    """The name of its machine."""
    machine: str
    """Differs where 127.0.0.1 is another place: between machines, and between network namespaces of one."""
    address: str
    """On the interface that was asked for, or that of its node in Ray."""
    pid: int


@dataclass(frozen=True)
class Report:
    """How a role is."""

    line: str
    """For people."""
    printed: bytes
    """What it printed since the last report, unless that is in the run directory already."""
    done: int = 0
    """Iterations of the run that are over, as a trainer counts them."""


@dataclass(frozen=True)
class Failure:
    """What a role raised; `kind` is the name of the error, and both it and `fields` are what is decided by."""

    kind: str
    message: str
    fields: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, error: BagpipeError) -> Failure:
        """As it is told. What came of it that the generation is over is such an error itself, whatever it is called."""
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, GenerationOverError):
            cause = cause.__cause__
        kind = error if cause is None else cause
        return cls(type(kind).__name__, str(error), kind.fields)


@dataclass(frozen=True)
class Wiring:
    """What all roles of a run share."""

    run: bytes = field(repr=False)
    listener: Security = field(repr=False)
    """Of whoever listens: servers, oracle, data processors."""
    client: Security = field(repr=False)
    """Of whoever connects to them."""

    def session(self, generation: int) -> bytes:
        """What oracle and data processors call the run: another name in each generation, so that none is mistaken."""
        return hashlib.blake2b(self.run + generation.to_bytes(8, "little"), digest_size=16).digest()


@dataclass(frozen=True)
class Team:
    """Which trainer this is, and where the others are."""

    trainer: int = 0
    hosts: tuple[str, ...] = ("127.0.0.1",)
    """The address of each trainer, without a port."""
    meeting: str | None = None
    """Where they find each other: an address at the first one; None where there is only that."""

    @property
    def trainers(self) -> int:
        """How many they are."""
        return len(self.hosts)


@dataclass(frozen=True)
class TrainerTask:
    """What one trainer does."""

    wiring: Wiring
    servers: tuple[str, ...]
    """Their addresses, in order."""
    oracle: str
    team: Team = Team()
    generation: int = 0
    """Of membership."""
    resume: ResumePoint = START
    """Where this attempt begins: the rows of the servers are those of that point."""
    checkpoints: str = ""
    """The directory of checkpoints, which is the same on all machines; empty: none are written."""


@dataclass(frozen=True)
class ScriptTask:
    """A script of the user's instead of a configuration."""

    wiring: Wiring
    servers: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    directory: str
    """Where the user was."""
    config: Mapping[str, Any]
    threads: int
    team: Team = Team()
    generation: int = 0
    resume: ResumePoint = START
    checkpoints: tuple[str, ...] = ()
    """Where servers may keep checkpoints, in or below; empty: they say so themselves."""
    name: str = ""
    """Of the launch."""
