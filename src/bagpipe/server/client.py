"""Rows on embedding servers: the store of a trainer that keeps none itself.

Ids are sorted by server and cut into pieces that one message holds; requests to all servers are under way at once. Rows
go to or come from where the caller has them, and rows that were never written are computed here, so that they never
travel and no result depends on the number of servers (I1). A write has returned only when every server concerned has
acknowledged it, and is applied once however often it had to be sent (I4). Every wait has an end and says what it was
for (I7).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np

from bagpipe import failpoints
from bagpipe.arrays import Floats, Int64s
from bagpipe.errors import (
    BagpipeError,
    CheckpointError,
    ConfigError,
    GenerationOverError,
    StoreError,
    WireError,
    again,
)
from bagpipe.server.shards import divide, pick, place
from bagpipe.store.base import (
    NO_ITERATION,
    ROWS_PER_CHUNK,
    RowSource,
    Store,
    StoreStats,
    TablePart,
    check_chunk,
    check_distinct,
    check_read,
    check_table,
    check_tables_differ,
    check_widths,
    check_write,
    fill_initial,
)
from bagpipe.wire.checks import check_rows, check_scanned, columns_of, totals
from bagpipe.wire.client import LOOK_S, Client, Patience, unexpected
from bagpipe.wire.connection import Buffers, Connection, Network
from bagpipe.wire.messages import (
    ALL_COLUMNS,
    AskStats,
    Body,
    Message,
    Open,
    Opened,
    Part,
    Read,
    Rows,
    Scan,
    Scanned,
    Stats,
    Write,
    Written,
)
from bagpipe.wire.recovery_messages import (
    AskMarks,
    Confirm,
    Confirmed,
    Load,
    Mark,
    Marks,
    Recover,
    Save,
    Saved,
    Worked,
)
from bagpipe.wire.shared import NUM_BYTES, OwnMemory, Regions, regions

if TYPE_CHECKING:
    from bagpipe.checkpoint.manifest import FileEntry
    from bagpipe.checkpoint.point import ResumePoint

Kind: TypeAlias = Literal["reads", "writes"]
_GRACE_S = 1.0
"""How long servers may still answer when one of them has said that we have no part in the run any more."""


# Connections


@dataclass
class Session:
    """What all connections of a client to its servers share."""

    network: Network
    addresses: Sequence[str]
    run: bytes
    generation: int
    trainer: int = 0
    trainers: int = 1
    widths: list[int] = field(default_factory=list)
    shared_memory: bool | Literal["auto"] = "auto"
    patience: Patience = field(default_factory=Patience)
    watch: Callable[[int], str | None] = lambda _: None
    """Why a server is known to be gone, if it is; may raise what is to end the wait for it."""
    passed: int = NO_ITERATION
    """Of this trainer, before the session began."""
    store: bytes = field(default_factory=lambda: os.urandom(8))
    births: dict[int, bytes] = field(default_factory=dict)
    sequences: dict[int, int] = field(default_factory=dict)
    """Of each server, the last number that was given to a write."""
    numbering: Lock = field(default_factory=Lock)
    """Held while one is given, or given back."""

    def name(self, server: int) -> str:
        """A server, for people."""
        return f"server {server} at {self.addresses[server]}"

    def client(self, server: int, hello: Callable[[Client, Connection], None] = lambda *_: None) -> Client:
        """Of one server; who asks for rows introduces himself first."""
        return Client(
            self.network, self.addresses[server], self.name(server), run=self.run, generation=self.generation,
            hello=hello, patience=self.patience, watch=lambda: self._gone(server), lost=StoreError,
            otherwise=StoreError,
        )  # fmt: skip

    def _gone(self, server: int) -> str | None:
        gone = self.watch(server)
        return None if gone is None else f"{gone}: its rows are lost, start again from a checkpoint"


class Link:
    """A connection to one server and the memory shared with it; used by one thread at a time.

    Each connection has memory of its own: what the server may still do for one that was given up, it does to memory
    that nobody reads.
    """

    def __init__(self, session: Session, server: int, kind: Kind) -> None:
        self.session, self.server, self.kind = session, server, kind
        self.client = session.client(server, self._introduce)
        self.memory: memoryview | None = None
        """Where ids and rows go, if not into buffers."""
        self.bytes_max = NUM_BYTES
        """Of ids and rows in one request."""
        self._own: OwnMemory | None = None

    def close(self) -> None:
        """A second call does nothing."""
        self._let_go()
        self.client.close()

    def _introduce(self, client: Client, connection: Connection) -> None:
        session, name = self.session, self.client.name
        self._let_go()
        if session.shared_memory is not False and connection.shares_host:
            self._own = self._make_memory()
        own = self._own
        hello = Open(
            session.trainer, session.trainers, session.widths, self.kind, own.num_bytes if own else 0, session.passed,
            session.store,
        )  # fmt: skip
        opened = client.ask_first(connection, hello, "a first sign of life", own.descriptor if own else None)
        if not isinstance(opened, Opened):
            raise unexpected(opened, "Opened")
        if (opened.server, opened.servers) != (self.server, len(session.addresses)):
            raise StoreError(
                f"{name} is server {opened.server} of {opened.servers}, not {self.server} of {len(session.addresses)}: "
                "give the addresses of all servers of the run, in order"
            )
        if session.births.setdefault(self.server, opened.birth) != opened.birth:
            raise StoreError(f"{name} was started again and its rows are lost: start again from a checkpoint")
        session.sequences.setdefault(self.server, opened.sequence)
        if session.shared_memory is True and not opened.shared:
            raise StoreError(
                f"{name} can't use our shared memory: run it on this host as the same user, or leave "
                'wire.shared_memory at "auto"'
            )
        self.memory = own.memory if own is not None and opened.shared else None
        self.bytes_max = min(NUM_BYTES, opened.bytes_max)

    def _let_go(self) -> None:
        self.memory = None
        if self._own is not None:
            self._own.close()
            self._own = None

    def _make_memory(self) -> OwnMemory | None:
        try:
            return OwnMemory()
        except OSError as error:
            if self.session.shared_memory is True:
                raise StoreError(
                    f"there is no shared memory here ({error}): leave it to wire.shared_memory = auto"
                ) from error
            return None


# Requests


class Request(ABC):
    """Something to ask a server."""

    what: str
    """For people."""

    @abstractmethod
    def compose(self, link: Link) -> tuple[Body, Buffers]:
        """The message; ids and rows in the buffers, or in the link's memory. Called each time that it is sent."""

    @abstractmethod
    def accept(self, link: Link, answer: Message) -> None:
        """Take the answer; raises WireError if it does not fit."""

    def refused(self, link: Link) -> None:  # noqa: B027 - most need not know
        """It has failed; `link.client.failed` if the server has said so."""


Answer = TypeVar("Answer", bound=Body)


class Question(Request):
    """What is asked and answered without rows."""

    def __init__(self, what: str, body: Body, expected: type[Any]) -> None:
        self.what = what
        self._body, self._expected = body, expected
        self.answer: Any = None

    def compose(self, link: Link) -> tuple[Body, Buffers]:  # noqa: ARG002
        """As it was given."""
        return self._body, ()

    def accept(self, link: Link, answer: Message) -> None:  # noqa: ARG002
        """What is expected."""
        if not isinstance(answer.body, self._expected):
            raise unexpected(answer.body, self._expected.__name__)
        self.answer = answer.body


def ask(links: Sequence[Link], requests: Sequence[Iterable[Request]]) -> list[BagpipeError | None]:
    """Have requests to each server answered, one after the other, those to different servers at once; how each failed.

    Once a server has said that we have no part in the run, the others are not waited for much longer.
    """
    askings = [Asking(link, iter(of_server)) for link, of_server in zip(links, requests, strict=True)]
    network = links[0].session.network if links else None
    refused_at: float | None = None
    try:
        for asking in askings:
            asking.begin()
        while pending := [asking for asking in askings if not asking.done]:
            assert network is not None
            for place_, asking in enumerate(pending):
                asking.go_on(0.0 if place_ else LOOK_S)  # all are waited for, so it does not matter for which one first
            refusal = next((each.failure for each in askings if isinstance(each.failure, WireError)), None)
            if refusal is not None:
                refused_at = network.now() if refused_at is None else refused_at
                if network.now() - refused_at >= _GRACE_S:
                    for asking in pending:
                        asking.give_up(refusal)
    finally:
        for asking in askings:
            asking.abandon()
    return [asking.failure for asking in askings]


class Asking:
    """Requests to one server, one after the other, until all are answered or one fails."""

    def __init__(self, link: Link, requests: Iterator[Request]) -> None:
        self.link, self._requests = link, requests
        self.failure: BagpipeError | None = None
        self.done = False
        self._request: Request | None = None

    def begin(self) -> None:
        """Go on to the next request, if there is one."""
        request = self._request = next(self._requests, None)
        self.done = request is None
        if request is not None:
            self.link.client.send(lambda: request.compose(self.link), request.what)

    def go_on(self, timeout_s: float) -> None:
        """Take an answer that has come; if it fails, that is the end of it, but not of what others are asked."""
        if self.done:
            return
        request = self._request
        assert request is not None
        try:
            answer = self.link.client.poll(timeout_s)
            if answer is None:
                return
            request.accept(self.link, answer)
            self.begin()
        except BagpipeError as error:
            request.refused(self.link)
            self.failure, self.done = error, True

    def give_up(self, why: BagpipeError) -> None:
        """Wait no longer, because another server has refused us."""
        if not self.done:
            said = f"{self.link.client.name} was not waited for any longer: {why}"
            self.failure, self.done = again(why, said), True

    def abandon(self) -> None:
        """Nothing may be under way any more: an answer would be taken for that of the next request."""
        if self.link.client.is_under_way:
            self.link.client.forget()


def raise_first(failures: Sequence[BagpipeError | None]) -> None:
    """Raise the failure of the first server that has failed, if any has."""
    for failure in failures:
        if failure is not None:
            raise failure


# Reads and writes in pieces


@dataclass(frozen=True, slots=True)
class Share:
    """Some rows of one table that one server has: which of the caller's."""

    part: int
    """Of the call."""
    order: Int64s
    """Indices into the part."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message carries."""

    shares: tuple[Share, ...]
    parts: list[Part]
    layout: Regions
    last: bool
    """Of this server's in the call."""

    @property
    def num_rows(self) -> int:
        """Of all parts."""
        return sum(part.count for part in self.parts)

    def lay_ids(self, parts: Sequence[TablePart], memory: memoryview | None) -> Buffers:
        """Its ids in a buffer, or nothing once they are in the shared memory."""
        ids = np.empty(self.num_rows, np.int64)
        if memory is not None:
            ids = np.frombuffer(memory[self.layout.ids], np.int64)
        row = 0
        for share in self.shares:
            np.take(parts[share.part][1], share.order, out=ids[row : row + len(share.order)], mode="clip")
            row += len(share.order)
        return () if memory is not None else (ids.data,)


def cut(parts: Sequence[TablePart], widths: Sequence[int], num_servers: int, bytes_max: int) -> list[list[Piece]]:
    """For each server the pieces of a call that go to it; at least one, which may be empty. `widths` are by table."""
    shares: list[list[Share]] = [[] for _ in range(num_servers)]
    for number, (table, ids, _) in enumerate(parts):
        order, starts = divide(table, ids, num_servers)
        for server in range(num_servers):
            if starts[server] < starts[server + 1]:
                shares[server].append(Share(number, order[starts[server] : starts[server + 1]]))
    return [_pieces(parts, widths, of_server, bytes_max) for of_server in shares]


def _pieces(parts: Sequence[TablePart], widths: Sequence[int], shares: Sequence[Share], bytes_max: int) -> list[Piece]:
    groups: list[list[Share]] = [[]]
    margin = regions(0, 0).num_bytes + 3 * 64
    free = bytes_max - margin
    for share in shares:
        row_bytes = parts[share.part][2].shape[1] * 4 + 9
        start = 0
        while start < len(share.order):
            count = min(free // row_bytes, len(share.order) - start)
            if count == 0 and groups[-1]:
                groups.append([])
                free = bytes_max - margin
                continue
            count = max(count, 1)  # a row that is too long for any message: the server will say so
            groups[-1].append(Share(share.part, share.order[start : start + count]))
            free -= count * row_bytes
            start += count
    return [_piece(parts, widths, group, last=group is groups[-1]) for group in groups]


def _piece(parts: Sequence[TablePart], widths: Sequence[int], shares: Sequence[Share], last: bool) -> Piece:
    named = []
    for share in shares:
        table, _, values = parts[share.part]
        columns = values.shape[1]
        named.append(Part(table, len(share.order), columns if columns < widths[table] else ALL_COLUMNS))
    return Piece(tuple(shares), named, regions(*totals("a request", named, widths)), last)


class ReadCall:
    """A read of several tables: where rows go, and which were never written."""

    def __init__(self, sources: Sequence[RowSource], parts: Sequence[TablePart], after: int) -> None:
        self.widths = [source.width for source in sources]
        self.parts, self.after = parts, after
        self._sources = sources
        self._missing = [np.empty(len(ids), np.int64) for _, ids, _ in parts]
        self._num_missing = [0] * len(parts)

    def take(self, piece: Piece, flags: np.ndarray, values: Floats) -> None:
        """Put the rows of an answer where they belong."""
        row = number = 0
        for share in piece.shares:
            out, mine = self.parts[share.part][2], flags[row : row + len(share.order)]
            size = int(np.count_nonzero(mine)) * out.shape[1]
            self._num_missing[share.part] = place(
                values[number : number + size], mine, share.order, out,
                self._missing[share.part], self._num_missing[share.part],
            )  # fmt: skip
            row, number = row + len(share.order), number + size

    def finish(self) -> None:
        """Compute the rows that were never written."""
        for (table, ids, out), missing, num_missing in zip(self.parts, self._missing, self._num_missing, strict=True):
            fill_initial(self._sources[table], ids, missing[:num_missing], out)


class ReadRequest(Request):
    """The part of a read that one message asks for."""

    def __init__(self, call: ReadCall, piece: Piece) -> None:
        self._call, self._piece = call, piece
        after = f" after iteration {call.after}" if call.after >= 0 else ""
        self.what = f"{piece.num_rows:,} rows{after}"

    def compose(self, link: Link) -> tuple[Body, Buffers]:
        """Ids in a buffer, or in shared memory."""
        return Read(self._piece.parts, self._call.after), self._piece.lay_ids(self._call.parts, link.memory)

    def accept(self, link: Link, answer: Message) -> None:
        """Rows in buffers, or in shared memory."""
        if not isinstance(answer.body, Rows):
            raise unexpected(answer.body, "Rows")
        buffers = answer.buffers if link.memory is None else self._within(link.memory)
        flags, values = check_rows(answer.body, buffers, self._piece.parts, self._call.widths)
        self._call.take(self._piece, flags.copy(), values)

    def _within(self, memory: memoryview) -> Buffers:
        flags = memory[self._piece.layout.flags]
        there, row, num_floats = np.frombuffer(flags, np.uint8), 0, 0
        for part in self._piece.parts:
            num_floats += int(np.count_nonzero(there[row : row + part.count])) * columns_of(part, self._call.widths)
            row += part.count
        return flags, memory[self._piece.layout.rows][: num_floats * 4]


class Ordered(Request):
    """What a server decides once and in order; its number is the same however often it is sent."""

    def __init__(self, what: str, make: Callable[[int, int], Body], expected: type[Any] = Written) -> None:
        """`make(trainer, sequence)` makes the record."""
        self.what, self._make, self._expected = what, make, expected
        self._sequence: int | None = None
        self.is_written = self.is_decided = self.is_begun = False
        self.result = b""
        """What has come with the answer."""

    @property
    def may_have_changed(self) -> bool:
        """Whether it was done, in part or whole, or nobody knows."""
        return self.is_written or self.is_begun or self.is_undecided

    @property
    def is_undecided(self) -> bool:
        """Whether it was sent, and nobody knows what has become of it."""
        return self._sequence is not None and not self.is_decided

    def number(self, link: Link) -> int:
        """Its number, which is the next one when it is first asked for."""
        if self._sequence is None:
            with link.session.numbering:
                link.session.sequences[link.server] += 1
                self._sequence = link.session.sequences[link.server]
        return self._sequence

    def compose(self, link: Link) -> tuple[Body, Buffers]:
        """A few numbers and names."""
        return self._make(link.session.trainer, self.number(link)), ()

    def accept(self, link: Link, answer: Message) -> None:  # noqa: ARG002
        """Acknowledged."""
        body, buffers = answer.body, answer.buffers
        fits = len(buffers) == 1 if self._expected is Worked else not buffers
        if (
            not isinstance(body, self._expected)
            or not fits
            or getattr(body, "sequence", self._sequence) != self._sequence
        ):
            raise unexpected(body, f"{self._expected.__name__} {self._sequence}")
        self.is_written = self.is_decided = True
        self.result = b"".join(buffers)

    def refused(self, link: Link) -> None:
        """Not applied, and never will be; or not decided, and its number is the next one's.

        Unless later ones have been given meanwhile: they would wait for it.
        """
        failed = link.client.failed
        if failed is None:
            return
        with link.session.numbering:
            is_last = link.session.sequences[link.server] == self._sequence
            if is_last and not failed.decided:
                link.session.sequences[link.server] -= 1
        self.is_decided, self.is_begun = failed.decided or is_last, failed.begun


class WriteRequest(Ordered):
    """The part of a write that one message carries."""

    def __init__(self, parts: Sequence[TablePart], piece: Piece, passed: int) -> None:
        super().__init__(
            f"a write of {piece.num_rows:,} rows",
            lambda trainer, sequence: Write(trainer, sequence, passed, piece.parts),
        )
        self._parts, self._piece = parts, piece

    def compose(self, link: Link) -> tuple[Body, Buffers]:
        """Ids and rows in buffers, or in shared memory."""
        body, _ = super().compose(link)
        ids = self._piece.lay_ids(self._parts, link.memory)
        layout = self._piece.layout
        if link.memory is None:
            values = np.empty((layout.rows.stop - layout.rows.start) // 4, np.float32)
        else:
            values = np.frombuffer(link.memory[layout.rows], np.float32)
        number = 0
        for share in self._piece.shares:
            rows = self._parts[share.part][2]
            pick(rows, share.order, values[number : number + len(share.order) * rows.shape[1]])
            number += len(share.order) * rows.shape[1]
        return body, (*ids, values.data) if link.memory is None else ()


class ScanRequest(Request):
    """Rows of one table in order of first write."""

    def __init__(self, scan: Scan, width: int) -> None:
        self._scan, self._width = scan, width
        self.ids = np.empty(0, np.int64)
        self.values = np.empty((0, width), np.float32)
        self.what = f"rows {scan.start:,} to {scan.start + scan.count:,} of table {scan.table}"

    def compose(self, link: Link) -> tuple[Body, Buffers]:  # noqa: ARG002
        """A few numbers."""
        return self._scan, ()

    def accept(self, link: Link, answer: Message) -> None:
        """A copy, since the memory is used again."""
        body, buffers = answer.body, answer.buffers
        if not isinstance(body, Scanned):
            raise unexpected(body, "Scanned")
        if link.memory is not None:
            layout = regions(self._scan.count, self._scan.count * self._width)
            ids, rows = link.memory[layout.ids][: body.count * 8], link.memory[layout.rows]
            buffers = (ids, rows[: body.count * self._width * 4]) if self._scan.values else (ids,)
        found, values = check_scanned(body, buffers, self._scan, self._width)
        self.ids, self.values = found.copy(), values.copy()


# The store


class RemoteStore(Store):
    """The rows of all `addresses`, which are the servers of one run, in order.

    One thread may write while others read, as long as no row is in two calls. Rows can be marked.
    """

    def __init__(
        self,
        tables: Sequence[RowSource],
        addresses: Sequence[str],
        network: Network,
        *,
        run: bytes | None = None,
        generation: int = 0,
        trainer: int = 0,
        trainers: int = 1,
        passed: int = NO_ITERATION,
        shared_memory: bool | Literal["auto"] = "auto",
        patience: Patience | None = None,
        watch: Callable[[int], str | None] = lambda _: None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Connects to all servers. `watch` tells why a server is known to be gone; `on_close` is called last.

        Who goes on after `done` iterations, and counts on from there, has `passed` those up to `done - 1`.
        """
        if not addresses:
            raise ConfigError("a remote store without servers: give at least one address")
        self._sources = check_widths(tables)
        self._session = Session(
            network, list(addresses), os.urandom(16) if run is None else run, generation, trainer, trainers,
            [source.width for source in tables], shared_memory, patience or Patience(), watch, passed,
        )  # fmt: skip
        self._on_close = on_close
        self._idle: dict[Kind, list[list[Link]]] = {"reads": [], "writes": []}
        self._pool = Lock()
        self._writing = Lock()
        """Held while numbers are given to what servers decide in order, and while rows are written."""
        self._refusal: BagpipeError | None = None
        self._halfway: BagpipeError | None = None
        """Rows were to be replaced, and are not all; until that is done they are refused too."""
        self._closed = False
        self._bytes_max = NUM_BYTES
        try:
            self._open()
        except BaseException:
            self._on_close = lambda: None
            self.close()
            raise

    @property
    def tables(self) -> Sequence[RowSource]:
        """The tables, by number."""
        return self._sources

    @property
    def _is_alone(self) -> bool:
        """Whether this is the only trainer: nobody else's writes are waited for."""
        return self._session.trainers == 1

    @property
    def num_servers(self) -> int:
        """Over which rows are spread."""
        return len(self._session.addresses)

    def read(self, table: int, ids: Int64s, out: Floats) -> None:
        """Fill `out` with the row of each id, or its first columns: as last written, else its initial value."""
        self.read_many([(table, ids, out)])

    def read_many(self, parts: Sequence[TablePart], after: int = NO_ITERATION) -> None:
        """Fill the values of several tables' rows, once every trainer has passed iteration `after`.

        Who is the only trainer knows what it has passed, and does not wait.
        """
        self._check_usable()
        for table, ids, out in parts:
            check_read(self._sources, table, ids, out)
        parts = [(table, np.ascontiguousarray(ids), out) for table, ids, out in parts]
        call = ReadCall(self._sources, parts, NO_ITERATION if self._is_alone else after)
        pieces = cut(parts, call.widths, self.num_servers, self._bytes_max)
        self._ask_all([(ReadRequest(call, piece) for piece in of_server if piece.num_rows) for of_server in pieces])
        call.finish()

    def write(self, table: int, ids: Int64s, values: Floats) -> None:
        """Set the rows of these ids, all different, to `values`."""
        self.write_many([(table, ids, values)])

    def write_many(self, parts: Sequence[TablePart], passed: int = NO_ITERATION) -> None:
        """Set rows of several tables, each named once; all servers then know that this trainer has passed `passed`.

        Unless it is the only one: nobody waits for that.
        """
        self._check_usable()
        check_tables_differ(parts)
        for table, ids, values in parts:
            check_write(self._sources, table, ids, values)
            check_distinct(table, ids)
        parts = [(table, np.ascontiguousarray(ids), np.ascontiguousarray(values)) for table, ids, values in parts]
        with self._writing:
            requests = [
                [
                    WriteRequest(parts, piece, passed if piece.last else NO_ITERATION)
                    for piece in pieces
                    if piece.num_rows or (passed != NO_ITERATION and not self._is_alone)
                ]
                for pieces in cut(parts, self._session.widths, self.num_servers, self._bytes_max)
            ]
            failpoints.reach("remote.write.begun")
            try:
                self._ask_all(requests, "writes")
            except BaseException as error:
                self._refuse_if_torn([request for of_server in requests for request in of_server], error)
                raise
            failpoints.reach("remote.write.acknowledged")

    def num_rows(self, table: int) -> int:
        """The number of rows ever written."""
        self._check_usable()
        check_table(self._sources, table)
        return sum(stats.num_rows[table] for stats in self.server_stats())

    def ids(self, table: int) -> Int64s:
        """The ids of the rows ever written, server by server, in order of first write."""
        self._check_usable()
        check_table(self._sources, table)
        found = bytearray()  # grows in place: the ids of billions of rows are not held twice
        for ids, _ in self._chunks(table, self._rows_at_once(table), values=False):
            found += ids.data
        return np.frombuffer(found, np.int64)

    def iterate(self, table: int, rows_per_chunk: int = ROWS_PER_CHUNK) -> Iterator[tuple[Int64s, Floats]]:
        """The rows ever written as (ids, values), in the order of `ids`, so many at a time."""
        self._check_usable()
        check_table(self._sources, table)
        check_chunk(table, rows_per_chunk)
        return self._chunks(table, rows_per_chunk)

    def close(self) -> None:
        """Give back connections and shared memory; a second call does nothing."""
        with self._pool:
            if self._closed:
                return
            self._closed = True
            self._refusal = StoreError("the store is closed: open another")
            idle = [link for of_kind in self._idle.values() for links in of_kind for link in links]
            self._idle = {"reads": [], "writes": []}
        for link in idle:
            link.close()
        self._on_close()

    def stats(self) -> StoreStats:
        """What is held on all servers, and what it takes."""
        self._check_usable()
        found = self.server_stats()
        return StoreStats(
            num_rows=sum(sum(stats.num_rows) for stats in found),
            bytes_in_memory=sum(stats.bytes_in_memory for stats in found),
            bytes_on_disk=sum(stats.bytes_on_disk for stats in found),
        )

    def server_stats(self) -> list[Stats]:
        """What each server holds and has done."""
        self._check_usable()
        questions = [Question("its figures", AskStats(), Stats) for _ in range(self.num_servers)]
        self._ask_all([[question] for question in questions])
        return [question.answer for question in questions]

    # Marks: all servers do the same; `Marked` in `bagpipe.store.base` says what it means

    def mark(self, done: int, token: str = "") -> None:
        """Hold on to the rows as they are now, on all servers."""
        self._order(f"mark {done}", lambda trainer, sequence: Mark(trainer, sequence, done, token))

    def save(self, done: int, directory: Path, names: Sequence[str], *, since: int | None = None) -> list[FileEntry]:
        """Have all servers write the rows of a mark to files in a directory; return when they are there."""
        from bagpipe.checkpoint.manifest import FileEntry

        place_ = str(directory.absolute())
        what = f"files of mark {done} in {directory}"
        written = []
        for result in self._order(
            what, lambda trainer, sequence: Save(trainer, sequence, done, place_, list(names), since), Worked
        ):
            try:
                written += msgspec.json.decode(result, type=list[FileEntry])
            except msgspec.MsgspecError as error:
                raise CheckpointError(f"a server told wrongly what files it wrote in {directory}: {error}") from error
        return written

    def saved(self, done: int, checkpoint: Path) -> None:
        """The checkpoint of a mark is complete; return when all servers know, and have let go of what came before."""
        place_ = str(checkpoint.absolute())
        self._order(
            f"nothing from before the checkpoint {checkpoint}",
            lambda trainer, sequence: Saved(trainer, sequence, done, place_), Worked,
        )  # fmt: skip

    def confirm(self) -> None:
        """WireError if another generation has begun, which the first server knows."""
        self._check_usable()
        question = Question("whether the run goes on with this trainer", Confirm(), Confirmed)
        self._ask_all([[question] if server == 0 else [] for server in range(self.num_servers)])

    def restore(self, point: ResumePoint, names: Sequence[str]) -> None:
        """Make all rows those of a checkpoint, which is then the only mark."""
        place_ = str(point.checkpoint)
        self._order(
            f"{point}, {place_},",
            lambda trainer, sequence: Load(trainer, sequence, point.done, place_, point.checksum, list(names)),
            Worked, replaces=True,
        )  # fmt: skip
        self._halfway = None

    def _order(
        self, what: str, make: Callable[[int, int], Body], expected: type[Any] = Written, replaces: bool = False
    ) -> list[bytes]:
        """Have all servers do something once, in order with what this trainer writes; what comes with the answers.

        Its place in that order is that of this call; rows may be written while it is being done.
        """
        if not replaces or self._refusal is not None:
            self._check_usable()
        requests = [Ordered(what, make, expected) for _ in self._session.addresses]
        with self._links("writes") as links:
            try:
                with self._writing:
                    for request, link in zip(requests, links, strict=True):
                        request.number(link)
                raise_first(ask(links, [[request] for request in requests]))
            except BaseException as error:
                self._refuse_if_unknown(requests, what, error)
                if replaces and any(request.may_have_changed for request in requests):
                    self._halfway = _unusable(f"{what} failed halfway ({error}): load a checkpoint", error)
                raise
        return [request.result for request in requests]

    def _refuse_if_unknown(self, requests: Sequence[Ordered], what: str, error: BaseException) -> None:
        """The next write would have the number of what nobody knows the outcome of."""
        if any(request.is_undecided for request in requests):
            why = f"servers were asked for {what}, and not all have answered ({error}): start again"
            self._refusal = _unusable(why, error)

    # Inside

    def _open(self) -> None:
        """Connect now, so that a wrong address or another run shows at once."""
        first = [Question("a first sign of life", Read([]), Rows) for _ in range(self.num_servers)]
        with self._links("writes") as links, self._links("reads") as others:  # nothing is answered before it is open
            for each in (links, others):
                raise_first(ask(each, [[question] for question in first]))
            self._bytes_max = min(link.bytes_max for link in links)

    def _ask_all(self, requests: Sequence[Iterable[Request]], kind: Kind = "reads") -> None:
        """Have requests to each server answered; the first failure is raised."""
        with self._links(kind) as links:
            raise_first(ask(links, requests))

    @contextmanager
    def _links(self, kind: Kind) -> Iterator[list[Link]]:
        """Links to all servers that no other thread uses meanwhile."""
        with self._pool:
            links = self._idle[kind].pop() if self._idle[kind] else None
        if links is None:
            links = [Link(self._session, server, kind) for server in range(self.num_servers)]
        try:
            yield links
        finally:
            with self._pool:
                if not self._closed:
                    self._idle[kind].append(links)
                    links = []
            for link in links:
                link.close()

    def _refuse_if_torn(self, requests: Sequence[WriteRequest], error: BaseException) -> None:
        """A write that failed on some servers only has changed rows all the same."""
        if any(request.may_have_changed for request in requests):
            why = f"a write to the servers failed halfway ({error}): start again from a checkpoint"
            self._refusal = _unusable(why, error)

    def _chunks(self, table: int, rows_per_chunk: int, values: bool = True) -> Iterator[tuple[Int64s, Floats]]:
        at_once = self._rows_at_once(table)
        held: list[ScanRequest] = []
        for server in range(self.num_servers):
            start, more = 0, True
            while more:
                self._check_usable()
                room = rows_per_chunk - sum(len(part.ids) for part in held)
                scan = Scan(table, start, min(room, at_once), values)
                request = ScanRequest(scan, self._sources[table].width)
                self._ask_all([[request] if each == server else [] for each in range(self.num_servers)])
                held.append(request)
                start, more = start + len(request.ids), len(request.ids) == scan.count
                if len(request.ids) == room:
                    yield _joined(held)
                    held = []
        if any(len(part.ids) for part in held):
            yield _joined(held)

    def _rows_at_once(self, table: int) -> int:
        """As many rows as one answer holds."""
        margin = regions(0, 0).num_bytes + 3 * 64
        return max((self._bytes_max - margin) // (self._sources[table].width * 4 + 9), 1)

    def _check_usable(self) -> None:
        refusal = self._refusal or self._halfway
        if refusal is not None:
            raise again(refusal, str(refusal))


def _unusable(why: str, error: BaseException) -> BagpipeError:
    """What everything is refused with after an error; that the generation is over stays what it is."""
    return again(error, why) if isinstance(error, GenerationOverError) else StoreError(why)


def _joined(parts: Sequence[ScanRequest]) -> tuple[Int64s, Floats]:
    return np.concatenate([part.ids for part in parts]), np.concatenate([part.values for part in parts])


# What whoever looks after a run asks for; no trainer is needed for it, nor what trainers know of tables


def marks_of_servers(
    network: Network, addresses: Sequence[str], *, run: bytes, generation: int, patience: Patience | None = None
) -> list[Marks]:
    """The marks and checkpoints that each server knows of."""
    return _ask_servers(
        Session(network, addresses, run, generation, patience=patience or Patience()), "its marks", AskMarks()
    )


def recover_servers(
    network: Network,
    addresses: Sequence[str],
    *,
    run: bytes,
    generation: int,
    point: ResumePoint,
    patience: Patience | None = None,
) -> None:
    """Begin a generation on all servers with the rows of that point.

    Returns when all are ready for trainers of that generation.
    """
    checkpoint = None if point.checkpoint is None else str(point.checkpoint.absolute())
    session = Session(network, addresses, run, generation, patience=patience or Patience())
    _ask_servers(session, f"its rows as they were at {point}", Recover(point.done, checkpoint, point.checksum))


def _ask_servers(session: Session, what: str, body: Body) -> list[Marks]:
    """Have all servers asked at once."""
    found = []
    with ExitStack() as stack:
        clients = [session.client(server) for server in range(len(session.addresses))]
        for client in clients:
            stack.callback(client.close)
            client.send(lambda: (body, ()), what)
        for client in clients:
            answer = client.receive().body
            if not isinstance(answer, Marks):
                raise unexpected(answer, "Marks")
            found.append(answer)
    return found
