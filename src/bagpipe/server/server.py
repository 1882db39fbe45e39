"""An embedding server without a network: requests in, answers out, from a thread for each connection.

A request passes, in this order: is it of this run and generation; has its peer said who it is; a write is decided once
and in the order of its numbers (I4), a read waits until all trainers have passed the iteration that it must follow
(I3); then it is answered. What is asked wrongly is refused by name and changes nothing (I8). `recover` begins a new
generation from an earlier point (I2). Whatever a request waits for, its peer is told every few seconds (I7).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import TypeAlias

import msgspec

from bagpipe import failpoints
from bagpipe.checkpoint.point import START, ResumePoint
from bagpipe.errors import BagpipeError, DeadlineError, GenerationOverError, StoreError, WireError
from bagpipe.server.limits import ServerLimits
from bagpipe.server.rows import RowAccess
from bagpipe.server.rows_state import ORDERED, OrderedBody, Safety, ServerRows
from bagpipe.server.storage import Storage, in_memory
from bagpipe.server.work import Background, Work, in_a_thread
from bagpipe.store.watermark import Watermark
from bagpipe.waits import Waits
from bagpipe.wire.connection import Answer, Peer, wait_telling
from bagpipe.wire.messages import (
    AskStats,
    Body,
    Failed,
    Message,
    NotYet,
    Open,
    Opened,
    Read,
    Scan,
    Stats,
    Write,
    Written,
)
from bagpipe.wire.recovery_messages import AskMarks, Confirm, Confirmed, Marks, Recover, Worked
from bagpipe.wire.shared import attach

Outcome: TypeAlias = Written | Failed

RECOVERY = "they go back to a checkpoint"
"""Why rows are being replaced."""
CLEAR_S = 60.0
"""How long requests that have begun may go on when rows are to be replaced."""
REFUSALS_KEPT = 64


class Client:
    """What a connection has said of itself."""

    def __init__(
        self, opened: Open, generation: int, memory: memoryview | None, on_close: Callable[[Client], None]
    ) -> None:
        self.trainer, self.kind, self.generation = opened.trainer, opened.kind, generation
        self.store = opened.store
        self.memory = memory
        """That it shares."""
        self._on_close = on_close

    def close(self) -> None:
        """The connection has ended."""
        self._on_close(self)


class Order:
    """What has become of one trainer's writes.

    Every number has one outcome, applied or refused, and it is the answer to every copy of that write. Had a refusal no
    number, a late copy could be applied after its sender was told that nothing has changed.
    """

    def __init__(self) -> None:
        self.last = 0
        """The last number that was decided."""
        self.is_busy = False
        """The one after it is being decided."""
        self._refusals: dict[int, Failed] = {}
        self._store, self._first = b"", 1
        """Who has given the last numbers, and from which on."""

    def outcome(self, number: int, store: bytes = b"") -> Outcome:
        """That of a number that was decided, for the store that gave it."""
        if store != self._store or number < self._first:
            return Failed(
                StoreError.__name__,
                "another store of this trainer has written meanwhile: let one write, and start again from a checkpoint",
                decided=True, begun=True,
            )  # fmt: skip
        return self._refusals.get(number, Written(number))

    def decided(self, outcome: Outcome, store: bytes = b"") -> None:
        """That of the next number."""
        self.last += 1
        if store != self._store:
            self._store, self._first = store, self.last
        if isinstance(outcome, Failed):
            self._refusals[self.last] = outcome
            if len(self._refusals) > REFUSALS_KEPT:
                del self._refusals[min(self._refusals)]


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
        waits: Waits | None = None,
        background: Background = in_a_thread,
    ) -> None:
        """Without a run it serves that of the first client. What takes long is done in the `background`."""
        self.server, self.servers = server, servers
        self.birth = os.urandom(8)
        self.generation, self.trainers = generation, 0
        self._run = run
        self._limits, self._clock, self._background = limits or ServerLimits(), clock, background
        self._waits = waits or Waits(f"server {server}")
        self._held = ServerRows(
            storage or in_memory(), safety or Safety(), (server, servers), self._limits.bytes_max, self._alone
        )
        self._state, self._opening, self._recovering = Lock(), Lock(), Lock()
        """For moments; while a client is admitted; while a generation begins."""
        self._orders: dict[int, Order] = {}
        self._watermark = Watermark()
        self._resting = 0
        """While it is not zero no write may begin."""
        self._inside = 0
        """Requests that use rows now."""
        # it takes the place of a server that has died, and has no rows before it is told which
        self._replacing: set[str] = {RECOVERY} if generation else set()
        self._recovery: tuple[tuple[int, ResumePoint], Work] | None = None
        self._clients: set[Client] = set()
        self._waiting_bytes = 0
        """Of reads that wait for trainers."""
        self._requests = self._refused = self._parked = 0
        self._started = clock()
        self._closed = False

    # A request

    def handle(self, peer: Peer, message: Message) -> Answer | None:
        """Answer a request; blocks as long as it must wait."""
        with self._state:
            self._requests += 1
        try:
            answer = self._answer(peer, message)
        except BagpipeError:
            with self._state:
                self._refused += 1
            raise
        if answer is not None:
            self._count_refusal(answer[0])
        return answer

    def _count_refusal(self, body: Body) -> None:
        if isinstance(body, Failed):
            with self._state:
                self._refused += 1

    def _answer(self, peer: Peer, message: Message) -> Answer | None:
        body = message.body
        self._check_run(message)
        if self._run is not None and peer.state is None:
            peer.admit()  # it knows the run, so it belongs to it
        if isinstance(body, AskStats):
            return self.stats(), ()
        if isinstance(body, AskMarks):
            return self._marks(), ()
        if isinstance(body, Recover):
            return self._recover_by_message(peer, message, body)
        if isinstance(body, Open):
            peer.reply(self._open(peer, message, body))
            failpoints.reach("server.opened")
            return None
        if not isinstance(body, Read | Write | Scan | Confirm | ORDERED):
            raise WireError(f"{type(body).__name__} is an answer: a server takes requests only")
        client = peer.state
        if not isinstance(client, Client) or client.generation != message.generation or client not in self._clients:
            raise WireError(f"{type(body).__name__} came before Open: a client says first who it is")
        if isinstance(body, Read):
            return self._read(peer, client, message, body)
        if isinstance(body, Write):
            self._write(peer, client, message, body)
            return None
        if isinstance(body, ORDERED):
            return self._order(peer, client, message, body)
        with self._using_rows(peer, message.generation) as rows:
            return (Confirmed(), ()) if isinstance(body, Confirm) else rows.scan(body, client.memory)

    def _check_run(self, message: Message) -> None:
        if self._closed:
            raise StoreError(f"server {self.server} is closing: start another, from a checkpoint")
        if self._run is not None and message.run != self._run:
            raise WireError(
                f"a message of run {message.run.hex()[:8]}: server {self.server} serves run {self._run.hex()[:8]}; "
                "check the addresses, or start servers for this run"
            )
        self._check_generation(message.generation)

    def _check_generation(self, generation: int) -> None:
        if generation < self.generation:
            raise GenerationOverError(
                f"a message of generation {generation}: this is generation {self.generation}, "
                "in which its sender has no part",
                generation,
            )

    def _wait(
        self, peer: Peer, generation: int, what: Callable[[], str], ready: Callable[[], bool],
        progress: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        """Block until it is so; an error if the generation is over first, or the server ends."""
        wait_telling(peer, self._waits, what, lambda: self._closed or generation < self.generation or ready(), progress)
        if self._closed:
            raise StoreError(f"server {self.server} is closing: start another, from a checkpoint")
        self._check_generation(generation)

    @contextmanager
    def _using_rows(self, peer: Peer, generation: int, *, is_admitting: bool = False) -> Iterator[RowAccess]:
        """Rows stay where they are meanwhile; it waits while they are being replaced."""
        while True:
            with self._state:
                if not self._replacing and (is_admitting or generation == self.generation):
                    self._inside += 1
                    break
            self._check_generation(generation)
            self._wait(
                peer, generation, lambda: f"has its rows replaced: {', '.join(sorted(self._replacing))}",
                lambda: not self._replacing,
            )  # fmt: skip
        try:
            rows = self._held.rows
            assert rows is not None or is_admitting, "a client has said how wide rows are"
            yield rows  # type: ignore[misc]
        finally:
            with self._state:
                self._inside -= 1
            self._waits.changed()

    # Hello

    def _open(self, peer: Peer, message: Message, body: Open) -> Opened:
        """Admit a client. The first one decides about run, widths and trainers; a new generation about trainers."""
        descriptor = peer.take_descriptor()
        memory = None if descriptor is None else attach(descriptor, body.shared_bytes)
        if isinstance(peer.state, Client):  # it says anew who it is
            peer.state.close()
        # at rest: an earlier generation is over with its writes, and a copy of a write that is asked again is applied
        with (
            self._writers_at_rest(peer, None, message.generation),
            self._using_rows(peer, message.generation, is_admitting=True),
        ):
            with self._opening:
                self._check_run(message)
                self._check_open(message, body)
                self._held.prepare(body.widths)
                self._run = message.run
                if message.generation != self.generation or not self.trainers:
                    self._begin_generation(message.generation, body.trainers)
                client = Client(body, message.generation, memory, self._clients.discard)
                with self._state:
                    self._clients.add(client)
                    sequence = self._orders[body.trainer].last
            self._advance(body.trainer, body.passed)
        peer.state = client
        peer.admit(body.kind)
        return Opened(
            server=self.server,
            servers=self.servers,
            shared=memory is not None,
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
        if message.generation == self.generation and self.trainers not in (0, body.trainers):
            raise StoreError(
                f"trainer {body.trainer} counts {body.trainers} trainers, others {self.trainers}: "
                "start all with the same number"
            )

    def _begin_generation(self, generation: int, trainers: int) -> None:
        """The first of a generation has come, and says how many there are. Those who stay go on from where they are."""
        with self._state:
            self._check_generation(generation)  # a later one may just have been begun
            self.generation, self.trainers = generation, trainers
            self._clients.clear()
            self._watermark.keep_for(trainers)
            for trainer in range(trainers):
                self._orders.setdefault(trainer, Order())

    # Reads wait for the watermark

    @property
    def reached(self) -> int:
        """The iteration that all trainers have passed."""
        return self._watermark.reached

    def _advance(self, trainer: int, iteration: int) -> None:
        if self._watermark.advance(trainer, iteration):
            self._waits.changed()

    def _read(self, peer: Peer, client: Client, message: Message, body: Read) -> Answer | None:
        with self._using_rows(peer, message.generation) as rows:
            ids = rows.ids_of(body, message.buffers, None if message.buffers else client.memory)
        may_go_on = body.after <= self.reached
        if not may_go_on and not self._wait_for_trainers(peer, message.generation, body.after, ids.nbytes):
            return NotYet(self._behind(body.after), again=True), ()
        with self._using_rows(peer, message.generation) as rows:
            if body.after > self.reached:  # iterations are trained anew that trainers had passed
                return NotYet(self._behind(body.after), again=True), ()
            answer = rows.read(body, ids, None if message.buffers else client.memory)
        peer.reply(*answer)  # who takes no answer holds up no recovery
        failpoints.reach("server.read.answered")
        return None

    def _wait_for_trainers(self, peer: Peer, generation: int, after: int, num_bytes: int) -> bool:
        """Once all have passed the iteration; False if there is no room for this read to wait.

        It takes none of the memory of requests meanwhile, so that the read that one of them waits for finds room.
        """
        with self._state:
            if self._waiting_bytes + num_bytes > self._limits.waiting_bytes:
                return False
            self._waiting_bytes += num_bytes
            self._parked += 1
        peer.give_back()
        failpoints.reach("server.read.parked")
        try:
            self._wait(peer, generation, lambda: self._behind(after), lambda: self.reached >= after)
        finally:
            with self._state:
                self._waiting_bytes -= num_bytes
                self._parked -= 1
        return True

    def _behind(self, after: int) -> str:
        return f"waits for trainers {self._watermark.behind(after)}"

    # Writes are decided once and in order

    def _write(self, peer: Peer, client: Client, message: Message, body: Write) -> None:
        def apply() -> Outcome:
            with self._using_rows(peer, message.generation) as rows:
                try:
                    parts = rows.parts_of(body, message.buffers, None if message.buffers else client.memory)
                    failpoints.reach("server.write.received")
                    rows.write(parts)
                except (StoreError, MemoryError) as error:
                    return Failed(StoreError.__name__, str(error) or "there is no memory for these rows", decided=True)
                failpoints.reach("server.write.applied")
                self._advance(client.trainer, body.passed)  # before a recovery may have it begin anew
            return Written(body.sequence)

        self._check_sender("a write", body.trainer, client)
        outcome = self._once(peer, client, message.generation, body.sequence, apply)
        self._count_refusal(outcome)
        peer.reply(outcome)
        failpoints.reach("server.write.answered")

    def _order(self, peer: Peer, client: Client, message: Message, body: OrderedBody) -> Answer:
        """Do something once, in order with the writes of its trainer, while nobody writes; then wait for its end."""

        def apply() -> Outcome:
            if client.trainer:  # two of them would wait for each other's rest
                return Failed(
                    StoreError.__name__,
                    f"trainer {client.trainer} asks for {type(body).__name__}: trainer 0 does that for all",
                    decided=True,
                )
            with (
                self._writers_at_rest(peer, client.trainer, message.generation),
                self._using_rows(peer, message.generation),
            ):
                try:
                    begun.extend(self._held.apply(body))
                except BagpipeError as error:
                    return Failed.of(error, decided=True)
                except MemoryError:
                    return Failed(StoreError.__name__, "there is no memory for this", decided=True)
            return Written(body.sequence)

        begun: list[Work] = []
        self._check_sender(type(body).__name__, body.trainer, client)
        outcome = self._once(peer, client, message.generation, body.sequence, apply)
        for each in begun:
            self._background(each.run)
        work = self._held.work(body.trainer, body.sequence)
        if isinstance(outcome, Failed) or work is None:
            return outcome, ()
        self._wait(
            peer, message.generation, lambda: f"works on {work.what}", lambda: work.is_over, lambda: work.progress
        )
        if work.failed is not None:
            return msgspec.structs.replace(work.failed, decided=True, begun=True), ()
        return Worked(), (memoryview(work.result or b""),)

    def _once(self, peer: Peer, client: Client, generation: int, number: int, apply: Callable[[], Outcome]) -> Outcome:
        """The outcome of this number of the client's trainer; copies of it wait for that, and later numbers too.

        What `apply` raises decides nothing: another copy would raise it too.
        """

        def may_go_on() -> bool:
            return number == order.last + 1 and not order.is_busy and not self._resting

        if number < 1:
            raise WireError(f"write {number} of trainer {client.trainer}: they are counted from 1")
        with self._state:
            self._check_generation(generation)
            order = self._orders[client.trainer]
        while True:
            with self._state:
                if number <= order.last:
                    return order.outcome(number, client.store)
                if may_go_on():
                    order.is_busy = True
                    break
            self._wait(
                peer, generation, lambda: f"decides about write {order.last + 1} of trainer {client.trainer}",
                lambda: number <= order.last or may_go_on(),
            )  # fmt: skip
        outcome: Outcome | None = None
        try:
            outcome = apply()
        finally:
            with self._state:
                if outcome is not None:
                    order.decided(outcome, client.store)
                order.is_busy = False
            self._waits.changed()
        return outcome

    @contextmanager
    def _writers_at_rest(self, peer: Peer, trainer: int | None, generation: int) -> Iterator[None]:
        """No other trainer writes meanwhile."""
        with self._state:
            self._resting += 1
            others = [order for each, order in self._orders.items() if each != trainer]
        try:
            self._wait(
                peer,
                generation,
                lambda: "lets writes come to their end",
                lambda: not any(each.is_busy for each in others),
            )
            yield
        finally:
            with self._state:
                self._resting -= 1
            self._waits.changed()

    @staticmethod
    def _check_sender(what: str, trainer: int, client: Client) -> None:
        if trainer != client.trainer:
            raise WireError(f"{what} of trainer {trainer} from trainer {client.trainer}: each speaks for itself")
        if client.kind != "writes":
            raise WireError(f"{what} on a connection for {client.kind}: open one for writes")

    # Recovery

    def checkpoints(self) -> list[Path]:
        """Directories of checkpoints that may be complete, as far as this server knows."""
        return self._held.checkpoints()

    def abandon(self, generation: int) -> None:
        """This generation begins: earlier ones are refused from now on, it itself waits until `recover` has returned.

        Returns when nothing of an earlier generation is being worked on any more.
        """
        with self._recovering:
            self._begin_anew(generation)

    def recover(self, generation: int, point: ResumePoint = START) -> None:
        """Begin a generation with the rows of that point.

        If it fails nobody is served until it is called again, of this generation or a later one.
        """
        with self._recovering:
            self._recover(Work("recovery", lambda _: b""), generation, point)

    def _recover(self, work: Work, generation: int, point: ResumePoint) -> None:
        self._begin_anew(generation)
        failpoints.reach("server.return.begun")
        try:
            self._held.recover(point, work.report)
            failpoints.reach("server.return.done")
        finally:  # if it has failed, whoever comes is told so
            self._go_on(RECOVERY)

    def _begin_anew(self, generation: int) -> None:
        """This generation has begun, and nobody of it has come; rows are being replaced, until `_go_on`."""
        with self._state:
            if generation < self.generation:
                raise GenerationOverError(
                    f"generation {generation} can't begin: this is generation {self.generation}", generation
                )
            if generation == self.generation and self.trainers:
                raise StoreError(
                    f"generation {generation} is at work on server {self.server}: begin another, with a higher number"
                )
            self._replacing.add(RECOVERY)
            self.generation, self.trainers = generation, 0
            self._clients.clear()
        self._waits.changed()
        self._clear()
        self._held.stop()
        with self._state:
            self.trainers = 0  # one may have come while requests were waited for
            self._clients.clear()
            self._orders.clear()
            self._watermark.begin_anew()

    def _clear(self) -> None:
        """Return when no request uses rows; those that come wait."""
        try:
            self._waits.until("requests to let go of rows", lambda: not self._inside, CLEAR_S)
        except DeadlineError as error:
            raise DeadlineError(
                f"{self._inside} requests are still being worked on after {CLEAR_S:g} s: "
                "see whether the disk of the server answers"
            ) from error

    def _go_on(self, why: str) -> None:
        with self._state:
            self._replacing.discard(why)
        self._waits.changed()

    @contextmanager
    def _alone(self, why: str) -> Iterator[None]:
        """Nobody uses rows meanwhile; then iterations are trained anew that trainers had passed."""
        try:
            with self._state:
                self._replacing.add(why)
            self._clear()
            yield
            self._watermark.begin_anew()
        finally:
            self._go_on(why)

    def _recover_by_message(self, peer: Peer, message: Message, body: Recover) -> Answer:
        """Begun with the first copy; every other one waits for the same end."""
        target = message.generation, START
        if body.checkpoint is not None:
            point = ResumePoint(body.done, self._held.checked(body.checkpoint), body.checksum)
            target = message.generation, point
        begins = False
        with self._opening:
            if self._recovery is None or self._recovery[0] != target:
                if self._recovery is not None and not self._recovery[1].is_over:
                    raise StoreError(f"server {self.server} is being recovered: ask again when that is over")
                self._recovery = target, Work("its recovery", lambda work: self._recover_alone(work, *target))
                begins = True
            recovery = self._recovery[1]
        if begins:
            self._background(recovery.run)
        self._wait(
            peer, message.generation, lambda: f"works on {recovery.what}", lambda: recovery.is_over,
            lambda: recovery.progress,
        )  # fmt: skip
        return recovery.failed or self._marks(), ()

    def _recover_alone(self, work: Work, generation: int, point: ResumePoint) -> bytes:
        with self._recovering:
            self._recover(work, generation, point)
        return b""

    def _marks(self) -> Marks:
        return Marks(self.server, self.generation, self._held.marks(), list(map(str, self.checkpoints())))

    # What is held, and the end

    def stats(self) -> Stats:
        """What is held and was done, at any moment: also while rows are replaced, as far as that has come."""
        rows = self._held.rows
        held, num_rows = None, []
        for store in () if rows is None or self._closed else (rows.store, rows.store.base):
            with suppress(StoreError):  # rows are being replaced, or it was closed meanwhile, or its disk has failed
                num_rows = [store.num_rows(table) for table in range(len(store.tables))]
                held = store.stats()
                break
        with self._state:
            clients = list(self._clients)
        return Stats(
            server=self.server,
            num_rows=num_rows,
            bytes_in_memory=held.bytes_in_memory if held else 0,
            bytes_on_disk=held.bytes_on_disk if held else 0,
            rows_read=rows.rows_read if rows else 0,
            rows_written=rows.rows_written if rows else 0,
            requests=self._requests,
            refused=self._refused,
            parked=self._parked,
            clients=len(clients),
            shared=sum(client.memory is not None for client in clients),
            uptime_s=self._clock() - self._started,
        )

    def close(self) -> None:
        """Give back memory and files; who still waits is refused. A second call does nothing."""
        with self._opening:
            self._closed = True
        self._waits.changed()
        self._held.stop()
        self._held.close()
