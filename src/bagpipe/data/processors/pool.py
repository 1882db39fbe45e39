"""The consumer's side: starts data processors, takes their batches in order, and replaces those that die.

Processor k of P makes groups k, k + P, ... of the batches, so the order is fixed whatever P and whoever is faster (I1).
A processor that is gone or silent is started again at the first group that has not arrived; after three times without
a group in between the reason is raised where that group would have been.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import bagpipe
from bagpipe.data.dataset import Dataset, cut, group_samples, group_size
from bagpipe.data.described import Description, describe
from bagpipe.data.order import BatchOrder
from bagpipe.data.processors.channel import Channel, Message
from bagpipe.data.processors.slot import Slot
from bagpipe.data.samples import Samples
from bagpipe.errors import BagpipeError, ConfigError, DeadlineError, PipelineError, named_error

if TYPE_CHECKING:
    from bagpipe.types import Batch

SLOTS = 2
"""Groups that a processor may have ready; it reads one more while it waits."""
DEADLINE_S = 120.0
ATTEMPTS = 3
EXIT_S = 5.0
"""What a process that has closed its stream may take to say how it ended."""
CHILD = "bagpipe.data.processors.child"
THREAD_SETTINGS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


def read(
    dataset: Dataset,
    batch_size: int,
    *,
    epochs: int = 1,
    seed: int | None = None,
    start: int = 0,
    processes: int = 1,
    deadline_s: float = DEADLINE_S,
) -> Generator[Batch, None, None]:
    """The batches of `dataset.batches`, read by processes of their own; closing the iterator ends them."""
    for name, value, least in (("epochs", epochs, 0), ("start", start, 0), ("processes", processes, 1)):
        if value < least:
            raise ConfigError(f"{name} is {value}: give at least {least}")
    if not deadline_s > 0:
        raise ConfigError(f"deadline_s is {deadline_s}: give a number of seconds above 0")
    order = BatchOrder(dataset.num_samples, batch_size, seed)
    numbers = range(start, epochs * order.epoch_batches)
    job = Job(describe(dataset), order, numbers, group_size(batch_size))
    return _read(job, processes, deadline_s)


@dataclass(frozen=True)
class Job:
    """What all processors work on."""

    dataset: Description
    order: BatchOrder
    numbers: range
    step: int
    """Batches of a group, which is read at once."""

    @property
    def num_groups(self) -> int:
        """How many groups there are."""
        return -(-len(self.numbers) // self.step)

    def group(self, place: int) -> range:
        """The batches of a group."""
        return self.numbers[place * self.step : (place + 1) * self.step]

    def message(self, first: int, every: int, slots: list[int]) -> Message:
        """What a processor is told."""
        return {
            "dataset": self.dataset,
            "batch_size": self.order.batch_size,
            "seed": self.order.seed,
            "start": self.numbers.start,
            "stop": self.numbers.stop,
            "step": self.step,
            "first": first,
            "every": every,
            "slots": slots,
        }


def _read(job: Job, processes: int, deadline_s: float) -> Generator[Batch, None, None]:
    with ExitStack() as stack:
        processors = []
        for place in range(min(processes, job.num_groups)):
            processor = Processor(job, place, processes, deadline_s)
            stack.callback(processor.close)
            processors.append(processor)
        for place in range(job.num_groups):
            samples = processors[place % processes].take(place)
            yield from cut(samples, job.order, job.group(place))


class Processor:
    """A process that reads groups `place`, `place + every`, ..., and whoever takes its place when it dies."""

    def __init__(self, job: Job, place: int, every: int, deadline_s: float) -> None:
        self.place = place
        self._job, self._every, self._deadline_s = job, every, deadline_s
        self._slots = [Slot.make() for _ in range(SLOTS)]
        self._process, self._channel = self._start(place)

    def take(self, group: int) -> Samples:
        """The samples of a group; groups are taken in order."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                message = self._channel.receive(self._deadline_s)
            except DeadlineError:
                reason: BagpipeError = DeadlineError(self._silent(group))
            else:
                if message is not None and "group" in message:
                    return self._copy_out(message, group)
                reason = self._explain(message, group)
            self._end()
            if attempt == ATTEMPTS:
                raise type(reason)(f"{reason}; so did {ATTEMPTS - 1} before it") from reason.__cause__
            logging.getLogger("bagpipe").warning("%s; another one takes its place", reason)
            self._process, self._channel = self._start(group)
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End the process and give its memory back."""
        self._end()
        for slot in self._slots:
            slot.close()

    def _start(self, group: int) -> tuple[subprocess.Popen[bytes], Channel]:
        ours, theirs = socket.socketpair()
        slots = [slot.descriptor for slot in self._slots]
        with theirs:
            try:
                process = subprocess.Popen(  # noqa: S603  (this interpreter, our module)
                    [sys.executable, "-m", CHILD, str(theirs.fileno())],
                    pass_fds=[theirs.fileno(), *slots],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=_environment(),
                    start_new_session=True,  # an interrupt from the terminal is for the consumer only
                )
            except OSError as error:
                ours.close()
                raise PipelineError(
                    f"data processor {self.place} can't be started ({error.strerror}): lower processes"
                ) from error
        channel = Channel(ours)
        channel.send(self._job.message(group, self._every, slots))
        return process, channel

    def _end(self) -> None:
        # Killed, not asked: it has nothing to put in order, and may be stopped or deep in a read.
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _copy_out(self, message: Message, group: int) -> Samples:
        if message["group"] != group:
            raise PipelineError(
                f"data processor {self.place} gave group {message['group']} where {group} was due: "
                "this is a defect of Bagpipe, please report it"
            )
        expected = group_samples(self._job.order, self._job.group(group))
        samples = self._slots[message["slot"]].take(message["bytes"], message["parts"], expected)
        self._channel.send({"free": message["slot"]})
        return samples

    def _explain(self, message: Message | None, group: int) -> BagpipeError:
        """Why there is no group: raises what the processor reports as an error of the data."""
        if message is not None and "error" in message:
            raise named_error(message["error"], message["message"], message["fields"])
        if message is not None:
            failure = PipelineError(f"{self._named(group)} failed: {message['failure']}")
            failure.__cause__ = RuntimeError(message["trace"])
            return failure
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_S)  # its end of the stream is gone, so it is going
        self._process.kill()
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return PipelineError(f"{self._named(group)} was killed; was there not enough memory?")
        ended = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return PipelineError(f"{self._named(group)} ended {ended}; it may have said more on standard error")

    def _silent(self, group: int) -> str:
        return (
            f"{self._named(group)} gave nothing for {self._deadline_s:g} s: is its disk very slow? "
            "raise deadline_s if so"
        )

    def _named(self, group: int) -> str:
        return f"data processor {self.place} (process {self._process.pid}, at batch {self._job.group(group).start})"


def _environment() -> dict[str, str]:
    """This process's, with one thread a library, and this Bagpipe before any other."""
    package = str(Path(bagpipe.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    single = dict.fromkeys(THREAD_SETTINGS, "1")
    return {**os.environ, **single, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
