"""What is said to embedding servers so that nothing is lost: marks, what is kept with them, checkpoints, recovery.

`done` is the number of iterations of the run that are over; marks and checkpoints are named by it. What changes rows or
marks is numbered like writes are, so a late copy does nothing (I4). No record carries a path that a server would trust:
directories must lie where the server was told, at its start, that checkpoints are.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from bagpipe.wire.records import Count, Positive, Record, Value

BlobName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*\Z", max_length=64)]
Directory: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
Crc32: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
TableName: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class Mark(Record, frozen=True):
    """Rows as they are now can be returned to from now on. Answer: Written."""

    trainer: Count
    sequence: Count
    """Of the trainer's writes; so too of the other records that have it."""
    done: Count


class Forget(Record, frozen=True):
    """Nobody returns to marks before this one any more. Answer: Written."""

    trainer: Count
    sequence: Count
    before: Count


class Settle(Record, frozen=True):
    """The checkpoint of this mark is complete: what is logged of earlier writes is not needed. Answer: Written."""

    trainer: Count
    sequence: Count
    done: Count


class ReturnTo(Record, frozen=True):
    """Begin to make rows what they were at this mark; later marks are gone. Answer: Written; then AskWork."""

    trainer: Count
    sequence: Count
    done: Count


class AskMarks(Record, frozen=True):
    """Which marks can be returned to? Needs no Open."""


class Marks(Record, frozen=True):
    """These, in ascending order."""

    server: Count
    generation: Count
    """That is heard; messages of earlier ones are refused."""
    marks: list[Count]


class Keep(Record, frozen=True):
    """A piece of bytes that go with a mark, which may come later. Buffer: the piece. Answer: Keeping."""

    done: Count
    name: BlobName
    num_bytes: Count
    """Of the whole."""
    crc32: Crc32
    """Of the whole: what has the same name and another sum is another one, and takes its place once it is whole."""
    offset: Count


class Keeping(Record, frozen=True):
    """So many bytes of it are here; go on from there."""

    received: Count


class KeptBlob(Value, frozen=True):
    """Bytes that are kept."""

    name: BlobName
    num_bytes: Count
    crc32: Crc32


class AskKept(Record, frozen=True):
    """What is kept with this mark? Answer: Kept."""

    done: Count


class Kept(Record, frozen=True):
    """This."""

    blobs: list[KeptBlob]


class AskBlob(Record, frozen=True):
    """A piece of what is kept with a mark. Answer: Blob."""

    done: Count
    name: BlobName
    offset: Count
    count: Count


class Blob(Record, frozen=True):
    """Buffer: as much of the piece as there is."""


class Save(Record, frozen=True):
    """Begin to write row files of this mark into a directory that is there. Answer: Written; then AskWork."""

    trainer: Count
    sequence: Count
    done: Count
    directory: Directory
    names: list[TableName]
    """Of the tables."""
    since: Count | None
    """Only rows that were written after this mark; None: all."""
    compress: Literal["zstd"] | None


class Load(Record, frozen=True):
    """Begin to replace all rows by this server's share of a checkpoint. Answer: Written; then AskWork."""

    trainer: Count
    sequence: Count
    done: Count
    directory: Directory
    """Of all checkpoints."""
    names: list[TableName]
    """Of the tables."""


class AskWork(Record, frozen=True):
    """How far is the work that was begun with this number? Answer: Working, Worked, or why it failed."""

    sequence: Positive


class Working(Record, frozen=True):
    """Not done yet; ask again."""

    progress: Count
    """Grows as long as something happens."""


class Worked(Record, frozen=True):
    """Done. Buffer: what came of it, as JSON."""


class Recover(Record, frozen=True):
    """The generation of this message begins, with the rows of a mark, of a checkpoint, or with none.

    Needs no Open. Everything of earlier generations is refused from now on. Answer: Working, so ask again; or Marks.
    """

    done: Count | None
    """None: as if nothing was ever written."""
    directory: Directory | None
    """Of all checkpoints: that of `done` is loaded where its mark can't be returned to. None: there are none."""


RecoveryBody: TypeAlias = (
    Mark | Forget | Settle | ReturnTo | AskMarks | Marks | Keep | Keeping | AskKept | Kept | AskBlob | Blob | Save
    | Load | AskWork | Working | Worked | Recover
)  # fmt: skip
