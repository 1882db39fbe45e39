"""Where a run continues, in every process that asks: after so many iterations, with a complete checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bagpipe.checkpoint.disk import Disk
from bagpipe.checkpoint.reading import Checkpoint, open_checkpoint
from bagpipe.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """After `done` iterations, with the state of that checkpoint; `START`: from scratch.

    A run that begins may take over the rows, weights and optimizer states of another run's checkpoint: then `done` is 0
    all the same, and data and generators are its own.
    """

    done: int = 0
    checkpoint: Path | None = None
    """Its own directory, in the directory of checkpoints."""
    checksum: str = ""
    """Of its manifest: two roles mean the same point only if it is equal."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ResumePoint:
        """The point of a checkpoint that is open."""
        return cls(checkpoint.done, checkpoint.directory, checkpoint.checksum)

    @classmethod
    def initial(cls, checkpoint: Checkpoint) -> ResumePoint:
        """The beginning of a run that takes over the state of a checkpoint that is open."""
        return cls(0, checkpoint.directory, checkpoint.checksum)

    @property
    def is_initial(self) -> bool:
        """Whether a run begins here, with the state of another one."""
        return self.done == 0 and self.checkpoint is not None

    def open(self, disk: Disk | None = None) -> Checkpoint:
        """The checkpoint; CheckpointError if it is missing, damaged, or another by now."""
        assert self.checkpoint is not None, "a run that begins has no checkpoint"
        done, name = self.done, self.checkpoint.name
        if self.is_initial:
            if not name.isdecimal():
                raise CheckpointError(f"{name!r} is not the name of a checkpoint, which is its number of iterations")
            done = int(name)
        checkpoint = open_checkpoint(disk or Disk(), self.checkpoint.parent, done)
        if checkpoint.checksum != self.checksum:
            raise CheckpointError(
                f"{self.checkpoint} has checksum {checkpoint.checksum} and should have {self.checksum}: it was written "
                "anew meanwhile; resume from it again"
            )
        return checkpoint

    def __str__(self) -> str:
        if self.is_initial:
            return f"the beginning, with the state of {self.checkpoint}"
        return "the beginning" if self.checkpoint is None else f"the checkpoint after {self.done:,} iterations"


START = ResumePoint()
