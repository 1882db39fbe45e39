"""Who takes part: the generation, its trainers and their connections, what they have written, and how far they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from bagpipe.errors import WireError
from bagpipe.server.clients import Clients
from bagpipe.server.gate import Gate
from bagpipe.server.limits import ServerLimits
from bagpipe.server.watermark import Watermark
from bagpipe.server.write_order import WriteOrder
from bagpipe.wire.messages import Waiting

RECOVERY = "recovery"
"""What the gate is closed for."""


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
        """WireError for an earlier generation."""
        if generation < self.generation:
            raise WireError(
                f"a message of generation {generation}: this is generation {self.generation}, "
                "in which its sender has no part"
            )

    def admit(self, generation: int, trainers: int) -> None:
        """The first of a generation has come, and says how many there are. Those who stay go on from where they are."""
        if generation == self.generation and self.trainers:
            return
        with self.writers_at_rest():
            self.generation = generation
        self.clients.clear()
        for read in self.watermark.keep_for(trainers):
            read.send_away(Waiting([], []))
        for trainer in range(trainers):
            self.orders.setdefault(trainer, WriteOrder(trainer))
        self.trainers = trainers

    def begin_anew(self, generation: int) -> None:
        """This generation has begun, and nobody of it has come. The gate is closed, and stays so."""
        if generation < self.generation:
            raise WireError(f"generation {generation} can't begin: this is generation {self.generation}")
        self.gate.close(RECOVERY)
        self.generation = generation
        self.clients.clear()
        self.count_anew()
        self.orders.clear()
        self.trainers = 0

    def count_anew(self) -> None:
        """No trainer has passed any iteration; who waits for that is to ask again."""
        for read in self.watermark.begin_anew():
            read.send_away(Waiting([], []))

    @contextmanager
    def writers_at_rest(self) -> Iterator[None]:
        """No trainer writes meanwhile."""
        with ExitStack() as locked:
            for trainer in sorted(self.orders):
                locked.enter_context(self.orders[trainer].lock)
            yield
