"""An embedding server without a network: messages in, answers out, from any number of threads.

It keeps rows as the trainers wrote them, decides every write once and in order (I4), and lets a read go on only when
all trainers have passed the iteration it must follow (I3). What a client asks wrongly is refused by name and changes
nothing (I8); clients, parked reads and the size of a request have limits (I5).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import BoundedSemaphore, Lock
from typing import TypeAlias

from bagpipe.errors import BagpipeError, StoreError, WireError
from bagpipe.server.clients import Client, Clients
from bagpipe.server.limits import ServerLimits
from bagpipe.server.rows import RowAccess
from bagpipe.server.storage import Storage, in_memory
from bagpipe.server.watermark import Parked, Watermark
from bagpipe.server.write_order import Outcome, WriteOrder
from bagpipe.wire.messages import (
    AskStats,
    Body,
    Failed,
    Message,
    Open,
    Opened,
    Read,
    Scan,
    Stats,
    Sync,
    Synced,
    Unopened,
    Waiting,
    Write,
    Written,
)

Reply: TypeAlias = Callable[[Message], None]
Answer: TypeAlias = Callable[[Body, Sequence[memoryview]], None]


class EmbeddingServer:
    """One shard of all rows, number `server` of `servers`."""

    def __init__(
        self,
        storage: Storage | None = None,
        *,
        server: int = 0,
        servers: int = 1,
        run: bytes | None = None,
        limits: ServerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a run it serves that of the first client."""
        self.server, self.servers = server, servers
        self.birth = os.urandom(8)
        self._storage, self._run = storage or in_memory(), run
        self._limits, self._clock = limits or ServerLimits(), clock
        self._generation = 0
        self._clients = Clients(self._limits.clients_max)
        self._opening = Lock()
        self._rows: RowAccess | None = None
        self._watermark = Watermark(1, self._limits.parked_max)
        self._orders: dict[int, WriteOrder] = {}
        self._trainers = 0
        self._counting = Lock()
        self._requests = self._refused = 0
        self._started = clock()
        self._closed = False

    def handle(self, peer: bytes, message: Message, reply: Reply) -> None:
        """Do what the message asks and answer it, now or when another message has come."""
        with self._counting:
            self._requests += 1

        def answer(body: Body, buffers: Sequence[memoryview] = ()) -> None:
            if isinstance(body, Failed):
                with self._counting:
                    self._refused += 1
            reply(Message(message.run, message.generation, message.request, body, buffers))

        self._guarded(answer, lambda: self._dispatch(peer, message, answer))

    def tick(self) -> None:
        """To be called now and then: sends reads away that have waited long, forgets memory of clients that left."""
        for read, waiting in self._watermark.expire(self._clock()):
            read.send_away(waiting)
        self._clients.release_abandoned()

    def stats(self) -> Stats:
        """What is held and was done."""
        rows = self._rows
        held = rows.store.stats() if rows is not None and not self._closed else None
        return Stats(
            server=self.server,
            num_rows=[] if rows is None or held is None else [rows.store.num_rows(t) for t in range(len(rows.widths))],
            bytes_in_memory=held.bytes_in_memory if held else 0,
            bytes_on_disk=held.bytes_on_disk if held else 0,
            rows_read=rows.rows_read if rows else 0,
            rows_written=rows.rows_written if rows else 0,
            requests=self._requests,
            refused=self._refused,
            parked=self._watermark.num_parked,
            clients=len(self._clients),
            shared=self._clients.num_shared,
            uptime_s=self._clock() - self._started,
        )

    def close(self) -> None:
        """Give back memory and files; who still waits is refused. A second call does nothing."""
        with self._opening:
            self._closed = True
            rows, self._clients = self._rows, Clients(self._limits.clients_max)
        for read in self._watermark.keep_for(self._trainers):
            read.send_away(Waiting([], []))
        if rows is not None:
            rows.store.close()

    def _guarded(self, answer: Answer, work: Callable[[], None]) -> None:
        """What goes wrong with a request is told to whoever asked, on whichever thread it happens."""
        try:
            work()
        except BagpipeError as error:
            answer(Failed(type(error).__name__, str(error)), ())
        except MemoryError:
            answer(Failed(StoreError.__name__, "there is no memory for this request: ask for fewer rows at once"), ())

    def _dispatch(self, peer: bytes, message: Message, answer: Answer) -> None:
        body = message.body
        self._check_run(message)
        if isinstance(body, AskStats):
            return answer(self.stats(), ())
        if isinstance(body, Open):
            return answer(self._open(peer, message, body), ())
        if not isinstance(body, Read | Write | Scan | Sync):
            raise WireError(f"{type(body).__name__} is an answer: a server takes requests only")
        client = self._clients.find(peer)
        if client is None or message.generation > self._generation:
            return answer(Unopened(), ())
        if client.memory is not None and not message.buffers and not client.is_new(message.request):
            return None  # its answer would be written over what the client keeps in its memory now
        assert self._rows is not None, "an open client has said how wide rows are"
        if isinstance(body, Read):
            return self._read(self._rows, client, message, body, answer)
        if isinstance(body, Write):
            return self._write(self._rows, client, message, body, answer)
        if isinstance(body, Scan):
            return answer(*self._rows.scan(body, None if message.buffers else client.memory))
        with self._writers_at_rest():
            self._rows.store.sync()
        return answer(Synced(), ())

    def _check_run(self, message: Message) -> None:
        if self._closed:
            raise StoreError(f"server {self.server} is closing: start another, from a checkpoint")
        if self._run is not None and message.run != self._run:
            raise WireError(
                f"a message of run {message.run.hex()[:8]}: server {self.server} serves run {self._run.hex()[:8]}; "
                "check the addresses, or start servers for this run"
            )
        if message.generation < self._generation:
            raise WireError(
                f"a message of generation {message.generation}: this is generation {self._generation}, "
                "in which its sender has no part"
            )

    def _open(self, peer: bytes, message: Message, body: Open) -> Opened:
        """Admit a client. The first one decides about run, widths and trainers; a new generation about trainers."""
        with self._opening:
            self._check_run(message)
            self._check_open(message, body)
            if self._rows is None:
                made = self._storage(body.widths)
                self._rows = RowAccess(made.store, body.widths, BoundedSemaphore(made.copiers), self._limits.bytes_max)
            self._run = message.run
            if message.generation > self._generation or not self._trainers:
                with self._writers_at_rest():
                    self._generation = message.generation
                self._clients.clear()
                self._admit_trainers(body.trainers)
            client = self._clients.add(peer, body)
        order = self._orders[body.trainer]
        with order.lock:  # a copy of a write that is asked again may just be applied
            sequence = order.last
        return Opened(
            server=self.server,
            servers=self.servers,
            shared=client.memory is not None,
            sequence=sequence,
            birth=self.birth,
            bytes_max=self._limits.bytes_max,
        )

    def _check_open(self, message: Message, body: Open) -> None:
        limits = self._limits
        if not 0 < len(body.widths) <= limits.tables_max or max(body.widths) > limits.width_max:
            raise StoreError(
                f"{len(body.widths)} tables with rows of at most {max(body.widths, default=0)} floats: a server takes "
                f"1 to {limits.tables_max} tables and {limits.width_max} floats"
            )
        if not body.trainer < body.trainers <= limits.trainers_max:
            raise StoreError(
                f"trainer {body.trainer} of {body.trainers}: they are counted from 0, and {limits.trainers_max} at most"
            )
        if self._rows is not None and body.widths != self._rows.widths:
            raise StoreError(
                f"trainer {body.trainer} has rows of {body.widths} floats by table, others have {self._rows.widths}: "
                "give all trainers the same model and row optimizer"
            )
        if message.generation == self._generation and self._trainers not in (0, body.trainers):
            raise StoreError(
                f"trainer {body.trainer} counts {body.trainers} trainers, others {self._trainers}: "
                "start all with the same number"
            )

    def _admit_trainers(self, trainers: int) -> None:
        """Trainers that stay go on from where they are."""
        for read in self._watermark.keep_for(trainers):
            read.send_away(Waiting([], []))
        for trainer in range(trainers):
            self._orders.setdefault(trainer, WriteOrder(trainer))
        self._trainers = trainers

    def _read(self, rows: RowAccess, client: Client, message: Message, body: Read, answer: Answer) -> None:
        memory = None if message.buffers else client.memory
        ids = rows.ids_of(body, message.buffers, memory)

        def go_on() -> None:
            self._guarded(answer, lambda: answer(*rows.read(body, ids, memory)))

        until = self._clock() + self._limits.park_s
        admitted = self._watermark.admit(Parked(body.after, until, go_on, lambda waiting: answer(waiting, ())))
        if isinstance(admitted, Waiting):
            answer(admitted, ())
        elif admitted:
            go_on()

    def _write(self, rows: RowAccess, client: Client, message: Message, body: Write, answer: Answer) -> None:
        if body.trainer != client.trainer:
            raise WireError(
                f"a write of trainer {body.trainer} from trainer {client.trainer}: each writes its own rows"
            )
        order = self._orders[client.trainer]

        def apply() -> Outcome:
            parts = rows.parts_of(body, message.buffers, None if message.buffers else client.memory)
            try:
                rows.write(parts)
            except (StoreError, MemoryError) as error:
                return Failed(StoreError.__name__, str(error) or "there is no memory for these rows", decided=True)
            return Written(body.sequence)

        with order.lock:
            if message.generation != self._generation:
                return answer(Unopened(), ())
            outcome, now = order.decide(body.sequence, apply)
        released = []
        if now and isinstance(outcome, Written):
            released = self._watermark.advance(client.trainer, body.passed)
        answer(outcome, ())
        for read in released:
            read.go_on()
        return None

    @contextmanager
    def _writers_at_rest(self) -> Iterator[None]:
        """No trainer writes meanwhile."""
        with ExitStack() as locked:
            for trainer in sorted(self._orders):
                locked.enter_context(self._orders[trainer].lock)
            yield
