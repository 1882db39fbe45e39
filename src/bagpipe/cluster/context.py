"""The launch that this process is a trainer of: where servers and other trainers are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagpipe.checkpoint.directory import Checkpoints
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.checkpointing import (
    LAUNCH,
    Checkpointing,
    Saving,
    find_point,
    plan_saving,
    recovery_period,
)
from bagpipe.cluster.attempt import Attempt
from bagpipe.cluster.interface import LOOPBACK
from bagpipe.config import Config
from bagpipe.errors import ConfigError
from bagpipe.resuming import find_initial_point
from bagpipe.several import open_loader, share_plans
from bagpipe.store.base import RowSource, Store
from bagpipe.trainer.collective import Groups
from bagpipe.trainer.joint_update import Peers
from bagpipe.trainer.ranks import refuse_ranks
from bagpipe.trainer.remote_plans import RemotePlans
from bagpipe.trainer.source import Opened, Source
from bagpipe.trainer.stages import Driver
from bagpipe.wire.keys import Security
from bagpipe.wire.plan_messages import DividedBy
from bagpipe.world import World

if TYPE_CHECKING:
    from bagpipe.build import Spec
    from bagpipe.server.client import RemoteStore
    from bagpipe.trainer.loop import TrainLoop
    from bagpipe.trainer.meeting import MeetingPoint


@dataclass(frozen=True)
class Launch(World):
    """Where rows live under `bagpipe launch`, and who trains together."""

    config: Config
    servers: Sequence[str]
    run: bytes = field(repr=False)
    security: Security = field(repr=False)
    """Of whoever connects to a server or an oracle."""
    trainer: int = 0
    """Which of the trainers this process is."""
    trainers: int = 1
    hosts: Sequence[str] = (LOOPBACK,)
    """The address of each trainer, without a port, on the interface that the user named."""
    meeting: MeetingPoint | str | None = None
    """Where trainers find each other: an address, and for the first one the point itself."""
    listener: Security = field(default=None, repr=False)
    """Of a trainer that listens itself, on a port of its own host."""
    recovers: bool = False
    """Whether the run goes on after a loss: trainers make marks, and servers can return to them."""
    generation: int = 0
    """Of membership: servers refuse earlier ones."""
    attempt: Attempt | None = field(default=None, compare=False)
    """Ends waits for servers and other trainers when the generation is over."""
    resume: ResumePoint = START
    """Where this attempt begins: the rows of the servers are those of that point."""
    checkpoints: Sequence[str] = ()
    """Where servers may keep checkpoints, in or below; empty: they say so themselves."""
    name: str = ""
    """Tells this launch from all others; the same in all of its generations."""
    meetings: Iterator[int] = field(default_factory=count, compare=False)
    """Numbers them: all trainers meet equally often."""

    @property
    def token(self) -> str:
        """Of the checkpoints that this generation writes: the same on all trainers, and nowhere else."""
        return hashlib.blake2b(self.run + self.generation.to_bytes(8, "little"), digest_size=4).hexdigest()

    def refuse_others(self) -> None:
        """Ranks of torch.distributed, that is; nothing of torchrun's, which a launch may have been started under."""
        if self.trainers == 1:
            refuse_ranks()

    def open_source(self, loader: Iterable[Any], accumulate: int) -> Source | None:
        """What reads the loader; of several trainers the first one reads it for all."""
        return super().open_source(loader, accumulate) if self.trainers == 1 else open_loader(self, loader, accumulate)

    def open_plans(self, spec: Spec, saving: Saving | None, driver: Driver) -> Opened:
        """Plans, which of several trainers the first one makes."""
        if self.trainers == 1:
            return super().open_plans(spec, saving, driver)
        return share_plans(self, spec, saving, driver)

    def open_rows(self, spec: Spec, saving: Saving | None) -> Store:
        """The rows on the servers; ConfigError if the script wants them elsewhere."""
        if callable(spec.store):
            return super().open_rows(spec, saving)
        if spec.store != "memory":
            raise ConfigError(
                f"store={str(spec.store)!r}: under bagpipe launch the servers hold the rows: leave store out, and give "
                "--set store=mapped to bagpipe launch where they should be in files"
            )
        return self.open_store(spec.layouts)

    def plan_saving(self, spec: Spec, checkpoint: Checkpointing | None) -> Saving:
        """How the loop of a script is saved: also where it has asked for nothing, so that it survives a loss."""
        directory, recovery = None, None
        if checkpoint is not None and checkpoint.directory is not None:
            directory = Path(checkpoint.directory)
            _check_place(directory, self.checkpoints)
        if self.recovers and self.checkpoints:
            recovery = recovery_period(self.config.recovery.every)
            directory = directory or Path(self.checkpoints[0])
        # Once a fault was recovered from it is not where the script has begun.
        point = (self._newest(directory) if self.generation else None) or self._asked_for(checkpoint)
        saving = plan_saving(
            spec, checkpoint, point, trainers=self.trainers, servers=len(self.servers), recovery=recovery,
            directory=directory, launch=self.name,
        )  # fmt: skip
        return replace(saving, restored=point == self.resume, generation=self.generation, token=self.token)

    def any_busy(self, loop: TrainLoop, busy: bool, what: str) -> bool:
        """All trainers meet to say so."""
        return any(loop.gather(busy, what))

    def _newest(self, directory: Path | None) -> ResumePoint | None:
        """The newest checkpoint of this launch; None: nothing of it was saved before."""
        found = [] if directory is None else Checkpoints(directory).list()
        # Not what lay there when it began.
        own = [ResumePoint.of(each) for each in found if each.manifest.config.get(LAUNCH) == self.name]
        points = [point for point in (self.resume, *own) if point != START]
        return max(points, key=lambda point: point.done, default=None)

    def _asked_for(self, checkpoint: Checkpointing | None) -> ResumePoint:
        """Where the script, or the launch, is to begin."""
        told = self.config.init_from
        if checkpoint is not None:
            point = find_point(checkpoint, told)
        else:
            point = START if told is None else find_initial_point(told)
        if point.is_initial:
            _check_readable(point, self)
        return point

    def open_groups(self) -> Groups:
        """Connect to all other trainers, who do the same; to be closed."""
        from bagpipe.trainer.process_group import open_groups

        if self.trainers > 1 and self.meeting is None:
            raise ConfigError(f"trainer {self.trainer} of {self.trainers} knows no address of the others: give one")
        opened = open_groups(
            self.trainer,
            self.trainers,
            self.meeting or "",
            interface=self.hosts[self.trainer],
            generation=next(self.meetings),
            given_up=lambda: None if self.attempt is None else self.attempt.over,
        )
        if self.attempt is not None:
            self.attempt.on_end(opened.abort)
        return opened

    def open_store(self, tables: Sequence[RowSource]) -> RemoteStore:
        """The rows of these tables, on the servers of the launch."""
        from bagpipe.server.client import RemoteStore
        from bagpipe.wire.client import Patience
        from bagpipe.wire.stream import SocketNetwork

        wire, network = self.config.wire, SocketNetwork(self.security)
        return RemoteStore(
            tables,
            self.servers,
            network,
            run=self.run,
            generation=self.generation,
            trainer=self.trainer,
            trainers=self.trainers,
            shared_memory=wire.shared_memory,
            patience=Patience(retry_s=min(5.0, wire.deadline_s / 4), deadline_s=wire.deadline_s),
            watch=(self.attempt or Attempt()).gone,
        )


@dataclass
class RoleWorld(World):
    """The world of a trainer that trains a configuration, and was given its plans, its rows and its connections."""

    config: Config
    plans: RemotePlans
    store: Store
    groups: Groups | None = None
    """To the other trainers; None: there are none."""
    resume: ResumePoint = START
    """Where this attempt begins: the rows of the servers are those of that point."""
    checkpoints: Path | None = None
    """A directory that all servers and trainers see under this path."""
    recovers: bool = False
    """Whether there are checkpoints to recover from, too."""
    generation: int = 0
    token: str = ""
    """8 hexadecimal digits, the same on all trainers of a generation."""
    stages: Driver | None = None

    def __post_init__(self) -> None:
        if self.groups is not None:
            self.trainer, self.trainers = self.groups.critical.rank, self.groups.critical.size

    def driver(self) -> Driver:
        """The one that was given."""
        return self.stages or super().driver()

    def open_source(self, loader: Iterable[Any], accumulate: int) -> None:
        """Data processors read it."""

    def open_plans(self, spec: Spec, saving: Saving | None, driver: Driver) -> Opened:  # noqa: ARG002
        """Plans of the oracle, if they are for this model and these trainers."""
        sync = self.config.sync
        peers = None if self.groups is None else Peers(self.groups, sync.design, sync.delayed, sync.moving)
        division = None
        if peers is not None:
            division = DividedBy(peers.trainers, self.config.assign, sync.design, sync.delayed, sync.moving)
        self.plans.check(spec.layouts, division)
        return Opened(self.plans, self.plans.described.capacity, peers)

    def open_rows(self, spec: Spec, saving: Saving | None) -> Store:  # noqa: ARG002
        """The store that was given."""
        return self.store if saving is None else saving.with_marks(self.store)

    def plan_saving(self, spec: Spec, checkpoint: Checkpointing | None) -> Saving:
        """How the run is saved, for its user and to recover from."""
        point = self.resume
        if point == START and checkpoint is not None and checkpoint.init_from is not None:
            point = find_initial_point(checkpoint.init_from)
        saving = plan_saving(
            spec, checkpoint, point, trainers=self.trainers, servers=self.config.servers, directory=self.checkpoints,
            recovery=recovery_period(self.config.recovery.every) if self.recovers else None,
        )  # fmt: skip
        # Servers that begin have no rows, whatever the run begins with.
        return replace(
            saving, restored=not point.is_initial, generation=self.generation, token=self.token or saving.token
        )

    def any_busy(self, loop: TrainLoop, busy: bool, what: str) -> bool:
        """All trainers meet to say so."""
        return any(loop.gather(busy, what))


def _check_place(directory: Path, places: Sequence[str]) -> None:
    """ConfigError if the servers of a launch would refuse to write there, at the first checkpoint."""
    if places and not any(directory.resolve().is_relative_to(Path(place).resolve()) for place in places):
        raise ConfigError(
            f"checkpoint.directory is {directory}: servers of this launch use only what is in or below "
            f"{', '.join(places)}: start bagpipe launch with --checkpoints DIR"
        )


def _check_readable(point: ResumePoint, launch: Launch) -> None:
    """The same for what servers have to read."""
    assert point.checkpoint is not None
    told, places = launch.config.init_from, [Path(place) for place in launch.checkpoints]
    places += [] if told is None else [told.parent]
    if launch.checkpoints and not any(point.checkpoint.is_relative_to(place.resolve()) for place in places):
        raise ConfigError(
            f"init_from is {point.checkpoint}: servers of this launch read only what is in or below "
            f"{', '.join(map(str, places))}: start bagpipe launch with --init-from, and leave it out of the script"
        )
