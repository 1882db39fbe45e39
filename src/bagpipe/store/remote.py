"""Rows on embedding servers: the store of a trainer that keeps none itself.

Requests to all servers are under way at once. A write has returned only when every server concerned has acknowledged
it, and is applied once however often it had to be sent (I4). Every wait has an end and says what it was for (I7).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Literal

import msgspec
import numpy as np

from bagpipe import failpoints
from bagpipe.arrays import Floats, Int64s
from bagpipe.errors import BagpipeError, CheckpointError, ConfigError, GenerationOverError, StoreError, again
from bagpipe.server.shared import NUM_BYTES, regions
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
)
from bagpipe.store.links import Failures, Link, Patience, Question, Request, Session, ask, ask_until_done, raise_first
from bagpipe.store.requests import Ordered, ReadCall, ScanRequest, WriteRequest, cut
from bagpipe.wire.channel import Network
from bagpipe.wire.messages import AskStats, Body, Read, Rows, Scan, Stats
from bagpipe.wire.recovery_messages import (
    AskWork,
    Confirm,
    Confirmed,
    Load,
    Mark,
    Save,
    Saved,
    Worked,
    Working,
)

if TYPE_CHECKING:
    from bagpipe.checkpoint.manifest import FileEntry
    from bagpipe.checkpoint.point import ResumePoint


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
            network,
            list(addresses),
            os.urandom(16) if run is None else run,
            generation,
            trainer,
            trainers,
            [source.width for source in tables],
            shared_memory,
            patience or Patience(),
            watch,
            passed,
        )
        self._on_close = on_close
        self._idle: list[list[Link]] = []
        self._pool = Lock()
        self._writing = Lock()
        """Held while anything is sent that servers decide in order."""
        self._refusal: BagpipeError | None = None
        self._halfway: BagpipeError | None = None
        """Rows were to be replaced, and are not all; until that is done they are refused too."""
        self._closed = False
        self._bytes_max = NUM_BYTES
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def tables(self) -> Sequence[RowSource]:
        """The tables, by number."""
        return self._sources

    @property
    def _is_alone(self) -> bool:
        """Whether there is one trainer, who knows what it has passed: servers need not be told, nor wait for it."""
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
        self._ask_all([call.requests(of_server) for of_server in pieces])
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
                self._ask_all(list(map(iter, requests)))
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
            idle, self._idle = self._idle, []
        for links in idle:
            for link in links:
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
        self._ask_all([iter([question]) for question in questions])
        return [question.answer for question in questions]

    # Marks: all servers do the same; `Marked` in `bagpipe.store.base` says what it means

    def mark(self, done: int, token: str = "") -> None:
        """Hold on to the rows as they are now, on all servers."""
        self._order(f"mark {done}", lambda trainer, sequence: Mark(trainer, sequence, done, token))

    def save(self, done: int, directory: Path, names: Sequence[str], *, since: int | None = None) -> list[FileEntry]:
        """Have all servers write the rows of a mark to files in a directory; return when they are there."""
        from bagpipe.checkpoint.manifest import FileEntry

        place = str(directory.absolute())
        what = f"files of mark {done} in {directory}"
        begun = self._order(what, lambda trainer, sequence: Save(trainer, sequence, done, place, list(names), since))
        written = []
        for result in self._finish(what, begun):
            try:
                written += msgspec.json.decode(result, type=list[FileEntry])
            except msgspec.MsgspecError as error:
                raise CheckpointError(f"a server told wrongly what files it wrote in {directory}: {error}") from error
        return written

    def saved(self, done: int, checkpoint: Path) -> None:
        """The checkpoint of a mark is complete; return when all servers know, and have let go of what came before."""
        what = f"nothing from before the checkpoint {checkpoint}"
        place = str(checkpoint.absolute())
        self._finish(what, self._order(what, lambda trainer, sequence: Saved(trainer, sequence, done, place)))

    def confirm(self) -> None:
        """WireError if another generation has begun, which the first server knows."""
        self._check_usable()
        question = Question("whether the run goes on with this trainer", Confirm(), Confirmed)
        self._ask_all([iter([question] if server == 0 else []) for server in range(self.num_servers)])

    def restore(self, point: ResumePoint, names: Sequence[str]) -> None:
        """Make all rows those of a checkpoint, which is then the only mark."""
        place = str(point.checkpoint)
        self._replace(
            f"{point}, {place},",
            lambda trainer, sequence: Load(trainer, sequence, point.done, place, point.checksum, list(names)),
        )

    def _order(self, what: str, make: Callable[[int, int], Body], replaces: bool = False) -> list[Ordered]:
        """Have all servers do something once, in order with what this trainer writes."""
        if not replaces or self._refusal is not None:
            self._check_usable()
        with self._writing:
            requests = [Ordered(what, make) for _ in self._session.addresses]
            try:
                self._ask_all([iter([request]) for request in requests])
            except BaseException as error:
                self._refuse_if_unknown(requests, what, error, replaces)
                raise
        return requests

    def _refuse_if_unknown(self, requests: Sequence[Ordered], what: str, error: BaseException, replaces: bool) -> None:
        """The next write would have the number of what nobody knows the outcome of."""
        if any(request.undecided or (replaces and request.written) for request in requests):
            why = f"servers were asked for {what}, and not all have answered ({error}): start again"
            self._refusal = _unusable(why, error)

    def _replace(self, what: str, make: Callable[[int, int], Body]) -> None:
        """Have all servers replace their rows."""
        begun = self._order(what, make, replaces=True)
        try:
            self._finish(what, begun)
        except BaseException as error:
            self._halfway = _unusable(f"{what} failed halfway ({error}): load a checkpoint", error)
            raise
        self._halfway = None

    def _finish(self, what: str, begun: Sequence[Ordered]) -> list[bytes]:
        """Wait until all servers are done with what takes long, or have failed; and while there is progress."""
        questions = [Question[Working | Worked](what, AskWork(each.sequence), Working, Worked) for each in begun]
        ask_until_done(self._session, questions, self._ask)
        return [question.result for question in questions]

    # Inside

    def _open(self) -> None:
        """Connect now, so that a wrong address or another run shows at once."""
        first = [Question("a first sign of life", Read([]), Rows) for _ in range(self.num_servers)]
        with self._links() as links:  # nothing is answered before the server knows the client
            raise_first(ask(self._session, links, [iter([each]) for each in first]))
            self._bytes_max = min([NUM_BYTES, *(link.opened.bytes_max for link in links if link.opened is not None)])

    def _ask_all(self, requests: Sequence[Iterator[Request]]) -> None:
        """Have requests to each server answered; the first failure is raised."""
        raise_first(self._ask(requests))

    def _ask(self, requests: Sequence[Iterator[Request]]) -> Failures:
        with self._links() as links:
            return ask(self._session, links, requests)

    @contextmanager
    def _links(self) -> Iterator[list[Link]]:
        """Links to all servers that no other thread uses meanwhile."""
        with self._pool:
            links = self._idle.pop() if self._idle else None
        if links is None:
            links = [Link(self._session, server) for server in range(self.num_servers)]
        try:
            yield links
        finally:
            with self._pool:
                if not self._closed:
                    self._idle.append(links)
                    links = []
            for link in links:
                link.close()

    def _refuse_if_torn(self, requests: Sequence[WriteRequest], error: BaseException) -> None:
        """A write that failed on some servers only has changed rows all the same."""
        if any(request.written or request.undecided for request in requests):
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
                self._ask_all([iter([request] if each == server else []) for each in range(self.num_servers)])
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
