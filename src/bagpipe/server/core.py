"""An embedding server without a network: messages in, answers out, from any number of threads.

It keeps rows as the trainers wrote them, decides every write once and in order (I4), and lets a read go on only when
all trainers have passed the iteration it must follow (I3). What a client asks wrongly is refused by name and changes
nothing (I8); clients, parked reads and the size of a request have limits (I5). `recover` begins a new generation from
an earlier point (I2).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TypeAlias

from bagpipe import failpoints
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.errors import BagpipeError, StoreError, WireError
from bagpipe.server.clients import Client
from bagpipe.server.limits import ServerLimits
from bagpipe.server.membership import RECOVERY, Membership, Outcome
from bagpipe.server.rows import RowAccess
from bagpipe.server.rows_state import ORDERED, OrderedBody, Safety, ServerRows
from bagpipe.server.storage import Storage, in_memory
from bagpipe.server.work import Background, Work, in_a_thread
from bagpipe.store.watermark import Behind, Parked
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
    Unopened,
    Waiting,
    Write,
    Written,
)
from bagpipe.wire.recovery_messages import AskMarks, AskWork, Confirm, Confirmed, Marks, Recover, Working

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
        generation: int = 0,
        limits: ServerLimits | None = None,
        safety: Safety | None = None,
        clock: Callable[[], float] = time.monotonic,
        background: Background = in_a_thread,
    ) -> None:
        """Without a run it serves that of the first client. What takes long is done in the `background`."""
        self.server, self.servers = server, servers
        self.birth = os.urandom(8)
        self._run = run
        self._limits, self._clock, self._background = limits or ServerLimits(), clock, background
        self._members = Membership(generation, self._limits)
        self._opening, self._recovering = Lock(), Lock()
        self._held = ServerRows(
            storage or in_memory(), safety or Safety(), (server, servers), self._limits.bytes_max, self._members
        )
        self._recovery: tuple[tuple[int, ResumePoint], Work] | None = None
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
        self._members.watermark.expire(self._clock())
        self._members.clients.release_abandoned()

    def stats(self) -> Stats:
        """What is held and was done, at any moment: also while rows are replaced, as far as that has come."""
        rows = self._held.rows
        held, num_rows = None, []
        for store in () if rows is None or self._closed else (rows.store, rows.store.base):
            with suppress(StoreError):  # rows are being replaced, or it was closed meanwhile, or its disk has failed
                num_rows = [store.num_rows(table) for table in range(len(store.tables))]
                held = store.stats()
                break
        return Stats(
            server=self.server,
            num_rows=num_rows,
            bytes_in_memory=held.bytes_in_memory if held else 0,
            bytes_on_disk=held.bytes_on_disk if held else 0,
            rows_read=rows.rows_read if rows else 0,
            rows_written=rows.rows_written if rows else 0,
            requests=self._requests,
            refused=self._refused,
            parked=self._members.watermark.num_parked,
            clients=len(self._members.clients),
            shared=self._members.clients.num_shared,
            uptime_s=self._clock() - self._started,
        )

    @property
    def reached(self) -> int:
        """The iteration that all trainers have passed."""
        return self._members.watermark.reached

    def close(self) -> None:
        """Give back memory and files; who still waits is refused. A second call does nothing."""
        with self._opening:
            self._closed = True
        self._members.clients.clear()
        self._members.watermark.begin_anew()
        self._held.stop()
        self._held.close()

    # Recovery

    def checkpoints(self) -> list[Path]:
        """Directories of checkpoints that may be complete, as far as this server knows."""
        return self._held.checkpoints()

    def abandon(self, generation: int) -> None:
        """This generation begins: earlier ones are refused from now on, it itself waits until `recover` has returned.

        Returns when nothing of an earlier generation is being worked on any more.
        """
        with self._recovering:
            self._members.begin_anew(generation)
            self._held.stop()

    def recover(self, generation: int, point: ResumePoint = START) -> None:
        """Begin a generation with the rows of that point.

        If it fails nobody is served until it is called again, of this generation or a later one.
        """
        with self._recovering:
            self._recover(Work("recovery", lambda _: b""), generation, point)

    def _recover(self, work: Work, generation: int, point: ResumePoint) -> None:
        members = self._members
        if generation == members.generation and members.trainers:
            raise StoreError(
                f"generation {generation} is at work on server {self.server}: begin another, with a higher number"
            )
        members.begin_anew(generation)
        self._held.stop()
        failpoints.reach("server.return.begun")
        try:
            self._held.recover(point, work.report)
            failpoints.reach("server.return.done")
        finally:  # if it has failed, whoever comes is told so
            members.gate.open(RECOVERY)

    def _begin_recovery(self, message: Message, body: Recover, answer: Answer) -> None:
        """By message: begun with the first copy, and every other one asks how far it is."""
        target = message.generation, START
        if body.checkpoint is not None:
            point = ResumePoint(body.done, self._held.checked(body.checkpoint), body.checksum)
            target = message.generation, point
        with self._opening:
            if self._recovery is None or self._recovery[0] != target:
                if self._recovery is not None and not self._recovery[1].is_over:
                    raise StoreError(f"server {self.server} is being recovered: ask again when that is over")
                self._recovery = target, Work("recovery", lambda work: self._recover_alone(work, *target))
                work, begins = self._recovery[1], True
            else:
                work, begins = self._recovery[1], False
        if begins:
            self._background(work.run)
        if not work.is_over:
            return answer(Working(work.progress), ())
        return answer(work.failed or self._marks(), ())

    def _recover_alone(self, work: Work, generation: int, point: ResumePoint) -> bytes:
        with self._recovering:
            self._recover(work, generation, point)
        return b""

    def _marks(self) -> Marks:
        checkpoints = list(map(str, self.checkpoints()))
        return Marks(self.server, self._members.generation, self._held.marks(), checkpoints)

    # Requests

    def _guarded(self, answer: Answer, work: Callable[[], None]) -> None:
        """What goes wrong with a request is told to whoever asked, on whichever thread it happens."""
        try:
            work()
        except BagpipeError as error:
            answer(Failed.of(error), ())
        except MemoryError:
            answer(Failed(StoreError.__name__, "there is no memory for this request: ask for fewer rows at once"), ())

    def _dispatch(self, peer: bytes, message: Message, answer: Answer) -> None:
        body = message.body
        self._check_run(message)
        if isinstance(body, AskStats):
            return answer(self.stats(), ())
        if isinstance(body, AskMarks):
            return answer(self._marks(), ())
        if isinstance(body, Recover):
            return self._begin_recovery(message, body, answer)
        if not isinstance(body, Open | Read | Write | Scan | Confirm | AskWork | ORDERED):
            raise WireError(f"{type(body).__name__} is an answer: a server takes requests only")
        with self._members.gate.entered() as entered:
            if not entered:
                return answer(Waiting([], []), ())
            self._check_run(message)  # a recovery may have begun since
            work = self._serve(peer, message, answer)
        if work is not None:
            self._background(work.run)
        return None

    def _serve(self, peer: bytes, message: Message, answer: Answer) -> Work | None:
        """Answer a request, while rows stay where they are; work that it has begun is the caller's to have done."""
        body = message.body
        if isinstance(body, Open):
            answer(self._open(peer, message, body), ())
            failpoints.reach("server.opened")
            return None
        client, rows = self._members.clients.find(peer), self._held.rows
        if client is None or rows is None or message.generation > self._members.generation:
            answer(Unopened(), ())
        elif client.memory is not None and not message.buffers and not client.is_new(message.request):
            pass  # its answer would be written over what the client keeps in its memory now
        elif isinstance(body, Read):
            self._read(rows, client, message, body, answer)
        elif isinstance(body, Write):
            self._write(rows, client, message, body, answer)
        elif isinstance(body, Scan):
            answer(*rows.scan(body, None if message.buffers else client.memory))
        elif isinstance(body, Confirm):
            answer(Confirmed(), ())
        elif isinstance(body, ORDERED):
            return self._order(client, message, body, answer)
        else:
            assert isinstance(body, AskWork), "the server knows what it takes"
            answer(*self._held.answer(client.trainer, body))
        return None

    def _check_run(self, message: Message) -> None:
        if self._closed:
            raise StoreError(f"server {self.server} is closing: start another, from a checkpoint")
        if self._run is not None and message.run != self._run:
            raise WireError(
                f"a message of run {message.run.hex()[:8]}: server {self.server} serves run {self._run.hex()[:8]}; "
                "check the addresses, or start servers for this run"
            )
        self._members.check(message.generation)

    def _open(self, peer: bytes, message: Message, body: Open) -> Opened:
        """Admit a client. The first one decides about run, widths and trainers; a new generation about trainers."""
        with self._opening:
            self._check_run(message)
            self._check_open(message, body)
            self._held.prepare(body.widths)
            self._run = message.run
            self._members.admit(message.generation, body.trainers)
            client = self._members.clients.add(peer, body)
        for read in self._members.watermark.advance(body.trainer, body.passed):
            read.go_on()
        order = self._members.orders[body.trainer]
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
        widths = self._held.widths
        if widths is not None and body.widths != widths:
            raise StoreError(
                f"trainer {body.trainer} has rows of {body.widths} floats by table, others have {widths}: "
                "give all trainers the same model and row optimizer"
            )
        if message.generation == self._members.generation and self._members.trainers not in (0, body.trainers):
            raise StoreError(
                f"trainer {body.trainer} counts {body.trainers} trainers, others {self._members.trainers}: "
                "start all with the same number"
            )

    def _read(self, rows: RowAccess, client: Client, message: Message, body: Read, answer: Answer) -> None:
        memory = None if message.buffers else client.memory
        ids = rows.ids_of(body, message.buffers, memory)

        def go_on() -> None:
            self._guarded(answer, lambda: answer(*rows.read(body, ids, memory)))
            failpoints.reach("server.read.answered")

        def send_away(behind: Behind) -> None:
            answer(Waiting(list(behind), list(behind.values())), ())

        until = self._clock() + self._limits.park_s
        if self._members.watermark.admit(Parked(body.after, until, go_on, send_away)):
            go_on()
        else:
            failpoints.reach("server.read.parked")

    def _write(self, rows: RowAccess, client: Client, message: Message, body: Write, answer: Answer) -> None:
        self._check_sender("a write", body.trainer, client)
        order = self._members.orders[client.trainer]

        def apply() -> Outcome:
            parts = rows.parts_of(body, message.buffers, None if message.buffers else client.memory)
            failpoints.reach("server.write.received")
            try:
                rows.write(parts)
            except (StoreError, MemoryError) as error:
                return Failed(StoreError.__name__, str(error) or "there is no memory for these rows", decided=True)
            failpoints.reach("server.write.applied")
            return Written(body.sequence)

        with order.lock:
            if message.generation != self._members.generation:
                return answer(Unopened(), ())
            outcome, now = order.decide(body.sequence, apply)
        released = []
        if now and isinstance(outcome, Written):
            released = self._members.watermark.advance(client.trainer, body.passed)
        answer(outcome, ())
        failpoints.reach("server.write.answered")
        for read in released:
            read.go_on()
        return None

    def _order(self, client: Client, message: Message, body: OrderedBody, answer: Answer) -> Work | None:
        """Do something once, in order with the writes of its trainer, while nobody writes."""
        self._check_sender(type(body).__name__, body.trainer, client)
        begun: list[Work] = []

        def apply() -> Outcome:
            try:
                begun.extend(self._held.apply(body))
            except (BagpipeError, MemoryError) as error:
                kind = StoreError if isinstance(error, MemoryError) else type(error)
                return Failed(kind.__name__, str(error) or "there is no memory for this", decided=True)
            return Written(body.sequence)

        with self._members.writers_at_rest():
            if message.generation != self._members.generation:
                answer(Unopened(), ())
                return None
            outcome, _ = self._members.orders[client.trainer].decide(body.sequence, apply)
        answer(outcome, ())
        return begun[0] if begun else None

    @staticmethod
    def _check_sender(what: str, trainer: int, client: Client) -> None:
        if trainer != client.trainer:
            raise WireError(f"{what} of trainer {trainer} from trainer {client.trainer}: each speaks for itself")
