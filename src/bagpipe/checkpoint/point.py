"""Where a run continues, in every process that asks: after so many iterations, with a complete checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bagpipe.checkpoint.disk import Disk
from bagpipe.checkpoint.reading import Checkpoint, open_checkpoint
from bagpipe.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """After `done` iterations, with the state of that checkpoint; `START`: from scratch."""

    done: int = 0
    checkpoint: Path | None = None
    """Its own directory, in the directory of checkpoints."""
    checksum: str = ""
    """Of its manifest: two roles mean the same point only if it is equal."""

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ResumePoint:
        """The point of a checkpoint that is open."""
        return cls(checkpoint.done, checkpoint.directory, checkpoint.checksum)

    def open(self, disk: Disk | None = None) -> Checkpoint:
        """The checkpoint; CheckpointError if it is missing, damaged, or another by now."""
        assert self.checkpoint is not None, "a run that begins has no checkpoint"
        checkpoint = open_checkpoint(disk or Disk(), self.checkpoint.parent, self.done)
        if checkpoint.checksum != self.checksum:
            raise CheckpointError(
                f"{self.checkpoint} has checksum {checkpoint.checksum} and should have {self.checksum}: it was written "
                "anew meanwhile; resume from it again"
            )
        return checkpoint

    def __str__(self) -> str:
        return "the beginning" if self.checkpoint is None else f"the checkpoint after {self.done:,} iterations"


START = ResumePoint()
