"""The launch that this process is a trainer of: where servers and other trainers are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.checkpointing import Checkpointing, Saving, plan_script
from bagpipe.cluster.attempt import Attempt
from bagpipe.cluster.interface import LOOPBACK
from bagpipe.config import Config
from bagpipe.errors import ConfigError
from bagpipe.layout import RowLayout
from bagpipe.several import open_loader, share_plans
from bagpipe.store.base import RowSource, Store
from bagpipe.trainer.collective import Groups
from bagpipe.trainer.ranks import refuse_ranks
from bagpipe.trainer.source import Opened, Source
from bagpipe.wire.keys import Security
from bagpipe.world import OpenStore, World

if TYPE_CHECKING:
    from bagpipe.script import Script
    from bagpipe.store.remote import RemoteStore
    from bagpipe.trainer.meeting import MeetingPoint


@dataclass(frozen=True)
class Launch(World):
    """Where rows live under `bagpipe launch`, and who trains together."""

    config: Config
    servers: Sequence[str]
    run: bytes
    security: Security
    """Of whoever connects to a server or an oracle."""
    trainer: int = 0
    """Which of the trainers this process is."""
    trainers: int = 1
    hosts: Sequence[str] = (LOOPBACK,)
    """The address of each trainer, without a port, on the interface that the user named."""
    meeting: MeetingPoint | str | None = None
    """Where trainers find each other: an address, and for the first one the point itself."""
    listener: Security = None
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

    def open_source(self, loader: Iterable[Any], accumulate: int) -> Source:
        """What reads the loader; of several trainers the first one reads it for all."""
        return super().open_source(loader, accumulate) if self.trainers == 1 else open_loader(self, loader, accumulate)

    def open_plans(self, script: Script) -> Opened:
        """Plans, which of several trainers the first one makes."""
        return super().open_plans(script) if self.trainers == 1 else share_plans(self, script)

    def open_rows(self, place: str | Path | OpenStore, layouts: Sequence[RowLayout], resident_bytes_max: int) -> Store:
        """The rows on the servers; ConfigError if the script wants them elsewhere."""
        if callable(place):
            return super().open_rows(place, layouts, resident_bytes_max)
        if place != "memory":
            raise ConfigError(
                f"store={str(place)!r}: under bagpipe launch the servers hold the rows: leave store out, and give "
                "--set store=mapped to bagpipe launch where they should be in files"
            )
        return self.open_store(layouts)

    def plan_saving(self, script: Script, checkpoint: Checkpointing | None) -> Saving:
        """How the loop of a script is saved: also where it has asked for nothing, so that it survives a loss."""
        return plan_script(self, script, checkpoint)

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
            given_up=lambda: "" if self.attempt is None else self.attempt.reason,
        )
        if self.attempt is not None:
            self.attempt.on_end(opened.abort)
        return opened

    def open_store(self, tables: Sequence[RowSource]) -> RemoteStore:
        """The rows of these tables, on the servers of the launch."""
        from bagpipe.store.links import Patience
        from bagpipe.store.remote import RemoteStore
        from bagpipe.wire.sockets import SocketNetwork

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
            on_close=network.close,
        )
