"""Who takes part: the generation, its trainers and their connections, what they have written, and how far they are.

Write-backs are decided once and in order whatever the network does (I4), and rows are replaced only when nobody uses
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Condition, Lock

from bagpipe.errors import DeadlineError, GenerationOverError, WireError
from bagpipe.server.clients import Clients
from bagpipe.server.limits import ServerLimits
from bagpipe.store.watermark import Watermark
from bagpipe.wire.messages import Failed, Written

RECOVERY = "recovery"
"""What the gate is closed for."""
GATE_DEADLINE_S = 60.0
REFUSALS_KEPT = 64

Outcome = Written | Failed


class Membership:
    """One generation after the other; messages of earlier ones are refused."""

    def __init__(self, generation: int, limits: ServerLimits) -> None:
        self.generation, self.trainers = generation, 0
        self.gate = Gate()
        """Through which every request goes that concerns rows."""
        if generation:  # it takes the place of a server that has died, and has no rows before it is told which
            self.gate.close(RECOVERY)
        self.clients = Clients(limits.clients_max)
        self.orders: dict[int, WriteOrder] = {}
        """By trainer."""
        self.watermark = Watermark(1, limits.parked_max)

    def check(self, generation: int) -> None:
        """GenerationOverError for an earlier generation."""
        if generation < self.generation:
            raise GenerationOverError(
                f"a message of generation {generation}: this is generation {self.generation}, "
                "in which its sender has no part",
                generation,
            )

    def admit(self, generation: int, trainers: int) -> None:
        """The first of a generation has come, and says how many there are. Those who stay go on from where they are."""
        if generation == self.generation and self.trainers:
            return
        with self.writers_at_rest():
            self.generation = generation
        self.clients.clear()
        self.watermark.keep_for(trainers)
        for trainer in range(trainers):
            self.orders.setdefault(trainer, WriteOrder(trainer))
        self.trainers = trainers

    def begin_anew(self, generation: int) -> None:
        """This generation has begun, and nobody of it has come. The gate is closed, and stays so."""
        if generation < self.generation:
            raise GenerationOverError(
                f"generation {generation} can't begin: this is generation {self.generation}", generation
            )
        self.gate.close(RECOVERY)
        self.generation = generation
        self.clients.clear()
        self.watermark.begin_anew()
        self.orders.clear()
        self.trainers = 0

    @contextmanager
    def writers_at_rest(self) -> Iterator[None]:
        """No trainer writes meanwhile."""
        with ExitStack() as locked:
            for trainer in sorted(self.orders):
                locked.enter_context(self.orders[trainer].lock)
            yield


class Gate:
    """Requests that are being worked on, of any number of threads; closed, it lets nobody in."""

    def __init__(self) -> None:
        self._inside = 0
        self._closed_for: set[str] = set()
        self._changed = Condition()

    @contextmanager
    def entered(self) -> Iterator[bool]:
        """Whether the gate is open; it isn't closed meanwhile if so."""
        with self._changed:
            enters = not self._closed_for
            self._inside += enters
        try:
            yield enters
        finally:
            if enters:
                with self._changed:
                    self._inside -= 1
                    if self._closed_for and not self._inside:
                        self._changed.notify_all()

    def close(self, why: str, deadline_s: float = GATE_DEADLINE_S) -> None:
        """Let nobody in any more, and return when nobody is inside."""
        with self._changed:
            self._closed_for.add(why)
            if not self._changed.wait_for(lambda: not self._inside, deadline_s):
                raise DeadlineError(
                    f"{self._inside} requests are still being worked on after {deadline_s:g} s: "
                    "see whether the disk of the server answers"
                )

    def open(self, why: str) -> None:
        """Let everybody in, unless it is closed for another reason too."""
        with self._changed:
            self._closed_for.discard(why)


class WriteOrder:
    """What has become of one trainer's writes.

    Every sequence number has one outcome, applied or refused, and it is the answer to every copy of that write. Had a
    refusal no number, a late copy could be applied after its sender was told that nothing has changed.
    """

    def __init__(self, trainer: int) -> None:
        self.trainer = trainer
        self.lock = Lock()
        """Held while a write is decided, so that copies of it wait for the outcome; taken by whoever calls."""
        self.last = 0
        """The last number that was decided."""
        self._refusals: dict[int, Failed] = {}

    def decide(self, number: int, apply: Callable[[], Outcome]) -> tuple[Outcome, bool]:
        """The outcome of this write, and whether it was decided now; raises if one before it is missing.

        What `apply` raises decides nothing: it must be certain that another copy would raise it too.
        """
        if number < 1:
            raise WireError(f"write {number} of trainer {self.trainer}: they are counted from 1")
        if number <= self.last:
            return self._refusals.get(number, Written(number)), False
        if number != self.last + 1:
            raise WireError(
                f"write {number} of trainer {self.trainer} came after write {self.last}: {self.last + 1} is missing"
            )
        outcome = apply()
        self.last = number
        if isinstance(outcome, Failed):
            self._refusals[number] = outcome
            if len(self._refusals) > REFUSALS_KEPT:
                del self._refusals[min(self._refusals)]
        return outcome, True
