"""Data processors that answer over the wire, and the batches of several of them in one order (I1).

Which samples a batch has is a pure function of data, batch size and seed, so a processor keeps nothing but what it has
read ahead: killed and started again it gives the same batches. Neighbouring batches are read at once, as a group;
processor k of P reads groups k, k + P, ..., though it gives any batch that it is asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

from bagpipe.data.dataset import IndexedDataset, batch_spans, group_size
from bagpipe.data.described import Description, open_described
from bagpipe.data.order import BatchOrder
from bagpipe.data.samples import Samples, SentBatch
from bagpipe.errors import ConfigError, PipelineError, WireError
from bagpipe.failpoints import reach
from bagpipe.wire.client import AHEAD, Client, Patience, Series, unexpected
from bagpipe.wire.codec import pack, unpack
from bagpipe.wire.connection import TICK_S, Listen, Listening, Network, Peer
from bagpipe.wire.messages import Message
from bagpipe.wire.plan_messages import GetBatch, GotBatch

if TYPE_CHECKING:
    from bagpipe.types import Batch

GROUPS_KEPT = 3
"""One that is given out, the next one, and one to spare for who asks again."""
READERS = 2


@dataclass(frozen=True)
class DataOrder:
    """Which batches a run has, in plain values: the same for all processors and for who asks them."""

    dataset: Description
    """As `bagpipe.data.describe` gives it."""
    batch_size: int
    num_batches: int
    """Of all epochs; batches are numbered from 0 over all of them."""
    seed: int | None = None
    """Another order each epoch, fixed by this number; None: stored order."""

    def __post_init__(self) -> None:
        for name, value in (("batch_size", self.batch_size), ("num_batches", self.num_batches)):
            if value < 1:
                raise ConfigError(f"{name} is {value}: give at least 1")

    @property
    def group_batches(self) -> int:
        """Batches of a group."""
        return group_size(self.batch_size)

    def processor(self, number: int, processors: int) -> int:
        """The processor that reads a batch ahead."""
        return number // self.group_batches % processors

    def fingerprint(self) -> str:
        """A short text that differs where a batch would."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class ProcessorStatus:
    """What a data processor has done."""

    processor: int
    processors: int
    address: str
    batches: int
    """Given, repetitions included."""
    bytes_sent: int
    groups_read: int
    last_batch: int
    """-1: none so far."""


class DataProcessorService:
    """Data processor `processor` of `processors`; threads of this process."""

    def __init__(
        self, listen: Listen, order: DataOrder, *, run: bytes, processor: int = 0, processors: int = 1, start: int = 0
    ) -> None:
        """`start` is the batch that will be asked for first."""
        if not 0 <= processor < processors:
            raise ConfigError(f"data processor {processor} of {processors}: they are counted from 0")
        self._listen, self._order, self._run = listen, order, run
        self._processor, self._processors, self._start = processor, processors, start
        self._fingerprint = order.fingerprint()
        self._listening: Listening | None = None
        self._lock = Lock()
        self._groups: OrderedDict[int, Future[list[Samples]]] = OrderedDict()
        self._batches = self._bytes_sent = self._groups_read = 0
        self._last_batch = -1

    def start(self) -> str:
        """Open the data, begin to read the first group, and listen; the address."""
        assert self._listening is None, "a service is started once"
        self._dataset: IndexedDataset = open_described(self._order.dataset)
        self._batch_order = BatchOrder(self._dataset.num_samples, self._order.batch_size, self._order.seed)
        if not self._dataset.num_samples:
            raise ConfigError("the data set has no samples: there is nothing to read")
        self._pool = ThreadPoolExecutor(READERS, "bagpipe-processor")
        first = self._start // self._order.group_batches
        self._read_ahead(first + (self._processor - first) % self._processors)
        try:
            self._listening = self._listen(self.handle)
        except BaseException:
            self._pool.shutdown(cancel_futures=True)
            raise
        return self._listening.address

    @property
    def address(self) -> str:
        """Where it listens."""
        assert self._listening is not None, "start it first"
        return self._listening.address

    def status(self) -> ProcessorStatus:
        """What it has done so far."""
        with self._lock:
            return ProcessorStatus(
                self._processor,
                self._processors,
                "" if self._listening is None else self._listening.address,
                self._batches,
                self._bytes_sent,
                self._groups_read,
                self._last_batch,
            )

    def close(self) -> None:
        """Answer nobody any more and end the threads; a second call does nothing."""
        if self._listening is not None:
            self._listening.close()
            self._pool.shutdown(cancel_futures=True)
            self._groups.clear()

    def handle(self, peer: Peer, message: Message) -> None:
        """Answer a request; what is wrong with it or with the data is raised."""
        body = message.body
        if message.run != self._run:
            raise WireError("a message of another run: check the addresses")
        peer.admit()
        if not isinstance(body, GetBatch):
            raise WireError(f"a data processor was sent {type(body).__name__}: it gives batches only")
        if body.order != self._fingerprint:
            raise WireError(
                f"batch {body.number} of data and order {body.order}, where this data processor has "
                f"{self._fingerprint}: start both with the same configuration"
            )
        if body.number >= self._order.num_batches:
            raise WireError(f"batch {body.number}: there are {self._order.num_batches}, counted from 0")
        group = body.number // self._order.group_batches
        reading = self._group(group)
        self._read_ahead(group + self._processors)
        while not wait([reading], TICK_S).done:
            peer.still_waiting(f"reads the samples of batch {body.number}")
        samples = reading.result()[body.number % self._order.group_batches]
        reach("data.group.read")
        packed, arrays = pack(SentBatch(body.number, samples))
        buffers = [memoryview(packed), *arrays]
        with self._lock:
            self._batches += 1
            self._bytes_sent += sum(buffer.nbytes for buffer in buffers)
            self._last_batch = body.number
        peer.reply(GotBatch(body.number), buffers)
        reach("data.batch.sent")

    def _group(self, group: int) -> Future[list[Samples]]:
        """Samples of a group by batch, being read if not there; what was not used for longest is dropped (I5)."""
        numbers = self._numbers(group)
        with self._lock:
            reading = self._groups.get(group)
            if reading is None or (reading.done() and reading.exception() is not None):
                reading = self._pool.submit(self._read, numbers)
                self._groups[group] = reading
            self._groups.move_to_end(group)
            while len(self._groups) > GROUPS_KEPT:
                self._groups.popitem(last=False)
            return reading

    def _read_ahead(self, group: int) -> None:
        if self._numbers(group):
            self._group(group)

    def _numbers(self, group: int) -> range:
        step = self._order.group_batches
        return range(group * step, min((group + 1) * step, self._order.num_batches))

    def _read(self, numbers: range) -> list[Samples]:
        group = self._dataset.read_group(self._batch_order, numbers)
        batches = [group.part(*span) for _, span in batch_spans(self._batch_order, numbers)]
        with self._lock:
            self._groups_read += 1
        return batches


class RemoteBatches:
    """The batches of a run from data processors, in order, several requests ahead; can be iterated over once."""

    def __init__(
        self,
        network: Network,
        addresses: Sequence[str],
        order: DataOrder,
        *,
        run: bytes,
        start: int = 0,
        ahead: int = AHEAD,
        patience: Patience | None = None,
    ) -> None:
        """`addresses` are those of processors 0, 1, ... of the run; `start` is the first batch to ask for."""
        if not addresses:
            raise ConfigError("there are no data processors: give at least one address")
        self._order, self._start, self._fingerprint = order, start, order.fingerprint()
        self._answers = Series(
            [Client(network, each, f"the data processor at {each}", run=run, patience=patience) for each in addresses],
            lambda number: GetBatch(number, self._fingerprint), lambda number: f"batch {number}",
            place=lambda number: order.processor(number, len(addresses)), start=start, stop=order.num_batches,
            ahead=ahead,
        )  # fmt: skip

    def __iter__(self) -> Generator[Batch, None, None]:
        try:
            for number in range(self._start, self._order.num_batches):
                yield self._take(number)
        finally:
            self._answers.close()

    def interrupt(self) -> None:
        """End a wait of another thread for the next batch, with an error there."""
        self._answers.interrupt()

    def close(self) -> None:
        """Let go of the connections; a second call does nothing."""
        self._answers.close()

    def stats(self) -> dict[str, Any]:
        """What has come, and how long it was waited for."""
        answers = self._answers
        return {"batches": answers.next, "bytes_received": answers.bytes_received, "waited_s": answers.waited_s}

    def _take(self, number: int) -> Batch:
        message = self._answers.take()
        if message is None:
            raise PipelineError(f"reading was ended before batch {number}")
        body = message.body
        if not isinstance(body, GotBatch):
            raise unexpected(body, f"batch {number}")
        if body.number != number:
            raise WireError(f"batch {body.number} came where {number} was due: run the same release on both sides")
        if not message.buffers:
            raise WireError(f"batch {number} has no buffers: it needs at least 1")
        sent = unpack(message.buffers[0], message.buffers[1:], SentBatch, f"batch {number}")
        if sent.number != number:
            raise WireError(f"batch {sent.number} came as batch {number}")
        return sent.batch()
