"""What clients and embedding servers say to each other; plain records, rows and ids travel beside them as raw buffers.

A server knows rows as `width` float32 numbers by (table, id), and nothing of optimizers or initial values: it says
which rows were ever written, and who asked computes the others, which therefore never travel.

Ids and rows of a client with shared memory may lie there instead: then a request has no buffers, nor has its answer,
and what lies where follows from the parts (`bagpipe.wire.shared`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypeAlias

import msgspec

from bagpipe.errors import BagpipeError
from bagpipe.wire.plan_messages import PlanBody
from bagpipe.wire.records import NO_ITERATION as NO_ITERATION
from bagpipe.wire.records import Count, Iteration, Positive, Record
from bagpipe.wire.recovery_messages import RecoveryBody

MESSAGE_LETTERS_MAX = 32_768
"""Of an error that travels: each may take four bytes."""
ALL_COLUMNS = 0
"""Of a part."""


class Part(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Some rows of one table; their ids and values lie in the buffers, part after part."""

    table: Count
    count: Count
    columns: Count = ALL_COLUMNS
    """Of a read: how many columns of each row, the first ones. Rows are written whole."""


class Open(Record, frozen=True):
    """A client introduces itself: the first message of every connection. Asking again changes nothing."""

    trainer: Count
    trainers: Positive
    widths: list[Positive]
    """Of the rows of each table; all clients of a run must agree."""
    kind: Literal["reads", "writes"]
    """What it will ask for here. Each has memory of its own, so that no write waits behind a read that waits for it."""
    shared_bytes: Count = 0
    """Of the memory that came as a descriptor with this message; 0: none did."""
    passed: Iteration = NO_ITERATION
    """What this trainer has written before it came is of iterations up to this one."""
    store: bytes = b""
    """Differs for each store: two of one trainer that both write would give numbers twice."""


class Opened(Record, frozen=True):
    """Welcome."""

    server: Count
    servers: Positive
    shared: bool
    """Whether buffers may be left in the shared memory from now on."""
    sequence: Count
    """The last write of this trainer that was decided: applied, or refused for good."""
    birth: bytes
    """Differs each time the server is started: its rows and sequences are gone then."""
    bytes_max: Positive
    """Most bytes of ids and rows that one request may carry or ask for."""


class Read(Record, frozen=True):
    """Rows, once every trainer has passed iteration `after`. Buffer: ids, int64."""

    parts: list[Part]
    after: Iteration = NO_ITERATION


class Rows(Record, frozen=True):
    """The rows asked for that were ever written. Buffers: one byte an id (1: it is here), then those rows, float32."""

    count: Count


class Write(Record, frozen=True):
    """Rows of a trainer, applied once and in order of `sequence`. Buffers: ids, int64; rows, float32."""

    trainer: Count
    sequence: Count
    """1, 2, 3, ... for each trainer and server; one that was decided before is answered again, and not applied."""
    passed: Iteration
    """With this one the server has every write-back of the trainer up to this iteration."""
    parts: list[Part]


class Written(Record, frozen=True):
    """The write was applied, now or before."""

    sequence: Count


class Scan(Record, frozen=True):
    """Rows of a table in order of first write."""

    table: Count
    start: Count
    count: Count
    values: bool = True
    """False: only their ids."""


class Scanned(Record, frozen=True):
    """Buffers: ids, int64; rows, float32, if they were asked for. Fewer than asked for at the end."""

    count: Count


class AskStats(Record, frozen=True):
    """How are you?"""


class Stats(Record, frozen=True):
    """What a server holds and has done."""

    server: int
    num_rows: list[int]
    """Of each table."""
    bytes_in_memory: int
    bytes_on_disk: int
    rows_read: int
    rows_written: int
    requests: int
    refused: int
    parked: int
    """Reads that wait for a trainer now."""
    clients: int
    shared: int
    """Clients whose rows go through shared memory."""
    uptime_s: float


class NotYet(Record, frozen=True):
    """The request was heard, and its answer will come; said again every few seconds."""

    why: str
    """What is waited for, for people."""
    progress: Count = 0
    """Grows as long as something happens."""
    again: bool = False
    """There is no room to wait here: ask again after a while."""


ErrorFields: TypeAlias = Annotated[dict[Annotated[str, msgspec.Meta(max_length=32)], Count], msgspec.Meta(max_length=4)]


class Failed(Record, frozen=True):
    """The request was refused and changed nothing, or what it has begun has failed."""

    error: str
    """The name of one of Bagpipe's errors."""
    message: str
    decided: bool = False
    """A write was refused for good, and its number is used up; else the number is still to be used."""
    begun: bool = False
    """Rows may have changed: what was begun in order has failed."""
    fields: ErrorFields = msgspec.field(default_factory=dict)
    """Of the error: what the peer may decide by, as it does by the name."""

    @classmethod
    def of(cls, error: BagpipeError, *, decided: bool = False) -> Failed:
        """What goes to the peer of an error."""
        return cls(type(error).__name__, str(error)[:MESSAGE_LETTERS_MAX], decided, fields=error.fields)


Body: TypeAlias = (
    Open
    | Opened
    | Read
    | Rows
    | Write
    | Written
    | Scan
    | Scanned
    | AskStats
    | Stats
    | NotYet
    | Failed
    | PlanBody
    | RecoveryBody
)


class Message(msgspec.Struct, frozen=True):
    """A body with what surrounds it."""

    run: bytes
    """16 bytes: messages of another run are refused."""
    generation: int
    """Of the membership: messages of an older one are refused."""
    request: int
    """An answer has the number of its request."""
    body: Body
    buffers: Sequence[memoryview] = ()
