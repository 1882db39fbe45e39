"""What is said to embedding servers so that nothing is lost: marks, checkpoints, recovery.

`done` is the number of iterations of the run that are over; marks and checkpoints are named by it. What changes rows or
marks is numbered like writes are, so a late copy does nothing (I4). No record carries a path that a server would trust:
directories must lie where the server was told, at its start, that checkpoints are.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from bagpipe.wire.records import Count, Record

Directory: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
TableName: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Token: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{0,64}\Z")]


class Mark(Record, frozen=True):
    """Rows as they are now can be saved, and returned to. Answer: Written."""

    trainer: Count
    sequence: Count
    """Of the trainer's writes; so too of the other records that have it."""
    done: Count
    token: Token
    """Tells this mark from one of the same name in another attempt; its checkpoint repeats it."""


class Save(Record, frozen=True):
    """Begin to write row files of this mark into a directory that is there. Answer: Worked."""

    trainer: Count
    sequence: Count
    done: Count
    directory: Directory
    names: list[TableName]
    """Of the tables."""
    since: Count | None
    """Only rows that were written after this checkpoint; None: all."""


class Saved(Record, frozen=True):
    """The checkpoint of this mark is complete: what was kept to go further back can go. Answer: Worked."""

    trainer: Count
    sequence: Count
    done: Count
    checkpoint: Directory
    """Its own directory."""


class Load(Record, frozen=True):
    """Begin to make all rows this server's share of a checkpoint. Answer: Worked."""

    trainer: Count
    sequence: Count
    done: Count
    checkpoint: Directory
    """Its own directory."""
    checksum: Token
    names: list[TableName]
    """Of the tables."""


class Confirm(Record, frozen=True):
    """Is the generation of this message still the one that goes on? Answer: Confirmed, or a refusal."""


class Confirmed(Record, frozen=True):
    """It is."""


class Worked(Record, frozen=True):
    """Done. Buffer: what came of it, as JSON."""


class AskMarks(Record, frozen=True):
    """Which marks and checkpoints are there? Needs no Open."""


class Marks(Record, frozen=True):
    """These, in ascending order."""

    server: Count
    generation: Count
    """That is heard; messages of earlier ones are refused."""
    marks: list[Count]
    """That are in memory."""
    checkpoints: list[Directory]
    """That may be complete: the last one that it was told of, and those of its marks."""


class Recover(Record, frozen=True):
    """The generation of this message begins, with the rows of a checkpoint, or with none.

    Needs no Open. Everything of earlier generations is refused from now on. Answer: Marks.
    """

    done: Count
    checkpoint: Directory | None
    """Its own directory; None: as if nothing was ever written."""
    checksum: Token


RecoveryBody: TypeAlias = Mark | Save | Saved | Load | Confirm | Confirmed | Worked | AskMarks | Marks | Recover
