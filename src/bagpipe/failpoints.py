"""Named points where a test, or an environment variable, makes this process die, pause or fail.

`reach(name)` stands at each point, and is one comparison while nothing is armed. What has happened by then is said in
`NAMES`. That every point can be died at, in every role, with the same final bits is how promise I2 is shown.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from bagpipe.errors import ConfigError

VARIABLE = "BAGPIPE_FAILPOINTS"
"""Arms real processes: "server-0/server.write.applied=kill@3, oracle.plan.made=pause:10@2"."""
ONCE_VARIABLE = "BAGPIPE_FAILPOINTS_ONCE"
"""A directory, for all processes of a run: each fault happens once, and leaves a file named after it there."""

NAMES: dict[str, str] = {
    # the trainer's stages
    "trainer.plan.received": "an iteration's plan and samples have come; nothing was fetched for it",
    "trainer.fetch.read": "its rows were read from the store; none is in the cache",
    "trainer.fetch.inserted": "its rows are in the cache; training does not know of it",
    "trainer.evict.copied": "rows were copied out of the cache; the store does not have them",
    "trainer.evict.written": "the store has acknowledged the rows; the trainer has not noted it",
    # the training loop
    "trainer.batch.given": "the loop is about to be given its next batch",
    "trainer.step.begun": "gradients are there; no other trainer has seen them",
    "trainer.dense.exchanged": "dense gradients of all trainers are added up",
    "trainer.sync.critical": "critical gradients and vectors were exchanged",
    "trainer.sync.delayed": "delayed gradients and vectors were exchanged; the iteration is updated",
    "trainer.step.updated": "critical rows are updated in the cache",
    # marks
    "mark.flushed": "updated rows of the cache are with the store; trainers have not met",
    "mark.met": "all trainers have flushed and met; no mark is made",
    "mark.asked": "the store has made the mark; trainers have not met again",
    "mark.written": "this trainer's state is written beside the checkpoint; that is not complete",
    "mark.over": "trainers have met again and go on",
    "resume.loaded": "a trainer has taken over its state; it has not trained since",
    # what a client of servers does
    "remote.write.begun": "rows are about to be sent to servers",
    "remote.write.acknowledged": "every server has acknowledged the rows; the caller does not know",
    # a server
    "server.opened": "a trainer has introduced itself",
    "server.read.answered": "a read was answered",
    "server.read.parked": "a read waits for other trainers",
    "server.write.received": "a write has come whole; no row has changed",
    "server.write.applied": "its rows have changed; nobody was told",
    "server.write.answered": "its sender was told",
    "server.mark.made": "a mark is made; nobody was told",
    "server.save.begun": "files of a checkpoint are about to be written",
    "server.save.written": "files of a checkpoint are written; nobody was told",
    "server.return.begun": "the server was told to return to a mark; nothing is undone",
    "server.return.done": "rows are as they were at the mark; nobody was told",
    "server.loaded": "rows are those of a checkpoint; nobody was told",
    # rows that can be returned
    "layer.merged": "rows of one table of a layer are in the base; the layer is still there",
    "layer.dropped": "the rows written since a mark are gone; the new layer is not there yet",
    # checkpoints
    "checkpoint.begun": "a temporary directory is there; it is empty",
    "checkpoint.rows.written": "all row files are written and synced",
    "checkpoint.blobs.written": "the state of all trainers is written and synced",
    "checkpoint.manifest.written": "the manifest is written; the directory has its temporary name",
    "checkpoint.confirmed": "the generation is still the one that goes on; the directory has its temporary name",
    "checkpoint.renamed": "the directory has its name; that is not synced",
    "checkpoint.complete": "the checkpoint is complete; older ones are still there",
    "checkpoint.saved": "every server has let go of what came before; older checkpoints are still there",
    "checkpoint.pruned": "an older checkpoint has lost its name; its files are still there",
    # oracle and data processors
    "oracle.batch.read": "the oracle has its next batch; it is not planned",
    "oracle.plan.made": "a plan is made; no trainer can have it",
    "oracle.plan.sent": "a plan was sent to a trainer",
    "data.group.read": "a data processor has read a batch; it was not given",
    "data.batch.sent": "a batch was sent to the oracle",
    # any process that listens
    "wire.received": "a message has come; nobody has seen it",
    # recovery itself
    "recovery.begun": "a loss was noted; everything is as the fault left it",
    "recovery.ended": "survivors have abandoned the attempt",
    "recovery.restarted": "lost roles run again, empty",
    "recovery.chosen": "the point to return to is chosen; no server knows",
    "recovery.returned": "all servers have returned; no trainer runs",
}
"""Every point, and what has happened by then."""

Action = Literal["kill", "pause", "fail"]

_FAULT = re.compile(r"(?:([\w-]+)/)?([\w.]+)=(?:(kill|fail)|pause:(\d+(?:\.\d+)?))@([1-9]\d*)", re.ASCII)


class Killed(BaseException):
    """Stands in for the death of a role, where roles are objects of one process."""


class FaultInjected(OSError):
    """What fails at a point that was told to fail."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens when a point is reached for the `at`-th time."""

    name: str
    action: Action = "kill"
    at: int = 1
    role: str | None = None
    """Only where this role reaches it; None: any, counted for each by itself."""
    seconds: float = 0.0
    """Of a pause."""

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.at < 1:
            raise ConfigError(f"failpoint {self.name!r}: at is {self.at}: count from 1")

    def __str__(self) -> str:
        action = f"pause:{self.seconds:g}" if self.action == "pause" else self.action
        return f"{f'{self.role}/' if self.role else ''}{self.name}={action}@{self.at}"


class Plan(Protocol):
    """What is told of each point that is reached."""

    def reached(self, name: str) -> None:
        """May raise, sleep or never return."""


class Faults:
    """A list of faults, each of which happens once; counts what is reached."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        self.reaches: Counter[tuple[str, str]] = Counter()
        """How often each role has reached each point, as (role, name)."""
        self.happened: list[tuple[str, Fault]] = []
        """Faults that have happened, each with its role."""
        self._counting = threading.Lock()

    def reached(self, name: str) -> None:
        """Count, and let happen what is due."""
        check_name(name)
        role = acting()
        with self._counting:
            self.reaches[role, name] += 1
            count = self.reaches[role, name]
            due = [
                fault for fault in self.faults
                if fault.name == name and fault.at == count and fault.role in (None, role) and self.claim(fault)
            ]  # fmt: skip
            self.happened += [(role, fault) for fault in due]
        for fault in due:
            self.happen(role, fault)

    def claim(self, fault: Fault) -> bool:
        """Whether a fault that is due may happen here."""
        return all(fault is not earlier for _, earlier in self.happened)

    def happen(self, role: str, fault: Fault) -> None:
        """Do it; what a test's own roles are to die of may be another thing."""
        if fault.action == "pause":
            time.sleep(fault.seconds)
        elif fault.action == "fail":
            raise FaultInjected(errno.EIO, f"{fault} was told to fail in {role or 'this process'}")
        else:
            raise Killed(f"{role}: {fault}")


class OfProcess(Faults):
    """Faults of a real process: it is killed as by kill -9."""

    def __init__(self, *faults: Fault, once: Path | None = None) -> None:
        super().__init__(*faults)
        self._once = once

    def claim(self, fault: Fault) -> bool:
        """Once in this process, or in all that share the directory."""
        if not super().claim(fault):
            return False
        if self._once is None:
            return True
        try:
            (self._once / str(fault).replace("/", ":")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def happen(self, role: str, fault: Fault) -> None:
        """Do it."""
        if fault.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        super().happen(role, fault)


def reach(name: str) -> None:
    """This point is reached."""
    if _plan is not None:
        _plan.reached(name)


@contextmanager
def armed(plan: Plan) -> Iterator[Plan]:
    """Have `plan` told of every point that any thread of this process reaches within the block."""
    global _plan
    before, _plan = _plan, plan
    try:
        yield plan
    finally:
        _plan = before


def acting() -> str:
    """The role whose code runs here; empty: not said."""
    return _acting.get() or _process


@contextmanager
def acting_as(role: str) -> Iterator[None]:
    """What this thread does within the block, it does as this role."""
    token = _acting.set(role)
    try:
        yield
    finally:
        _acting.reset(token)


def name_process(role: str) -> None:
    """All threads of this process act as this role, where nothing else is said."""
    global _process
    _process = role


def parse(text: str) -> list[Fault]:
    """The faults of a text such as "server-0/server.write.applied=kill@3, oracle.plan.made=pause:10@2"."""
    faults = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _FAULT.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"failpoint {part!r} is not [ROLE/]NAME=ACTION@N with ACTION kill, fail or pause:SECONDS and N from 1"
            )
        role, name, word, seconds, at = match.groups()
        action: Action = "kill" if word == "kill" else "fail" if word == "fail" else "pause"
        faults.append(Fault(name, action, int(at), role, float(seconds or 0)))
    return faults


def check_name(name: str) -> None:
    """Refuse a point that there is none of."""
    if name not in NAMES:
        raise ConfigError(f"there is no failpoint {name!r}: bagpipe.failpoints.NAMES has them all")


def of_environment(environment: Sequence[str | None]) -> Plan | None:
    """What the two variables of the environment arm, if anything."""
    text, once = environment
    if not text:
        return None
    return OfProcess(*parse(text), once=Path(once) if once else None)


_acting: ContextVar[str] = ContextVar("acting", default="")
_process = ""
_plan: Plan | None = of_environment([os.environ.get(VARIABLE), os.environ.get(ONCE_VARIABLE)])
