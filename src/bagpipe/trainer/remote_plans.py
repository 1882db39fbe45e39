"""Plans that an oracle in another process makes, as the training loop takes them.

Each plan is checked as it arrives, before anything is done with it (I8); several requests are under way at once, and
are repeated until they are answered, but not for ever (I7).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bagpipe.adapt import Adapter
from bagpipe.errors import BagpipeError, ConfigError, WireError
from bagpipe.layout import RowLayout
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.plan_shape import PlanShape
from bagpipe.oracle.sent_plan import unpack_plan
from bagpipe.trainer.pipeline import Counters
from bagpipe.trainer.source import Group, Plans, planned_batches
from bagpipe.types import Batch
from bagpipe.wire.client import AHEAD, Client, Patience, Series, unexpected
from bagpipe.wire.connection import Network
from bagpipe.wire.messages import Body
from bagpipe.wire.plan_messages import (
    DescribePlans,
    DividedBy,
    NextPlan,
    NoMorePlans,
    Planned,
    PlansDescribed,
)


class RemotePlans:
    """The plans of the oracle at an address, for one trainer: a `PlanStream`."""

    goes_on = False

    def __init__(
        self,
        network: Network,
        address: str,
        *,
        run: bytes,
        trainer: int = 0,
        ahead: int = AHEAD,
        patience: Patience | None = None,
        done: int = 0,
        on_connect: Callable[[RemotePlans], None] = lambda _: None,
    ) -> None:
        """Connects, and returns once the oracle has described its plans: it has read a batch then.

        They begin after `done` iterations of the run, as the oracle was told too. `on_connect` is called before there
        is anything to wait for: from then on another thread may `abandon` them.
        """
        self._name, self._trainer, self._done = f"the oracle at {address}", trainer, done
        self._num_batches = 0
        self._adapter: Adapter | None = None
        self._client = Client(network, address, self._name, run=run, patience=patience)
        on_connect(self)
        try:
            self.described = self._describe()
            """What the plans are like: tables, row widths, slots."""
            self._shape = PlanShape.of(self.described, trainer)
        except BaseException:
            self._client.close()
            raise
        self._answers = Series([self._client], self._request, lambda iteration: f"plan {iteration}", ahead=ahead)

    def check(self, layouts: Sequence[RowLayout], division: DividedBy | None = None) -> None:
        """ConfigError if the oracle plans for another model than that of these rows, or for other trainers."""
        ours = [(layout.table.name, layout.table.rows, list(layout.table.features), layout.width) for layout in layouts]
        theirs = [(table.name, table.rows, table.features, table.width) for table in self.described.tables]
        if ours != theirs:
            differing = [pair for pair in zip(ours, theirs, strict=False) if pair[0] != pair[1]]
            raise ConfigError(
                f"{self._name} plans for {len(theirs)} tables and the model has {len(ours)}, or they differ"
                f"{f': {differing[0][1]} there, {differing[0][0]} here' if differing else ''}: "
                "start both with the same configuration"
            )
        if self.described.division != division:
            raise ConfigError(
                f"{self._name} plans for {_described(self.described.division)}, and this is trainer {self._trainer} of "
                f"{_described(division)}: start both with the same configuration"
            )

    def epoch(self, traffic: Counters) -> Plans:  # noqa: ARG002
        """All plans, as they come; the loader is read elsewhere, and no policy there goes by what is counted here."""
        iteration = 0
        while (message := self._answers.take()) is not None:
            body = message.body
            if isinstance(body, NoMorePlans) and body.iterations == iteration:
                return
            if not isinstance(body, Planned):
                raise unexpected(body, f"plan {iteration}")
            plan, group = self._read(body, message.buffers, iteration)
            self._shape = self._shape.divided_anew(plan.capacity, f"plan {iteration}")
            self._num_batches += len(group.batches)
            assert self._adapter is not None
            yield plan, planned_batches(plan, group, self._shape.tables, self._adapter)
            iteration += 1

    def position(self, iterations: int) -> dict[str, Any]:
        """Where in the data training is after so many iterations of these."""
        batches = min(iterations * self.described.accumulate, self._num_batches)
        return {"iterations": self._done + iterations, "batches": self._first_batch + batches, "loader": None}

    def resume(self, position: Mapping[str, Any]) -> None:
        """Refused, unless it is where plans begin: the oracle decides that."""
        if position.get("batches", 0) != self._first_batch:
            raise ConfigError(
                f"the saved state is {position['batches']} batches into the data, and {self._name} begins after "
                f"{self._first_batch}: let both go on from the same checkpoint"
            )

    def interrupt(self) -> None:
        """End a wait for the next plan: there will be no more."""
        self._answers.interrupt()

    def abandon(self, error: BagpipeError) -> None:
        """The same from another thread, with this error where the next plan is due."""
        self._client.interrupt(error)

    def close(self) -> None:
        """Let go of the connection; a second call does nothing."""
        self._answers.close()

    def stats(self) -> dict[str, Any]:
        """How long plans were waited for, and the bytes that have come."""
        return {"waited_s": self._answers.waited_s, "plan_bytes": self._answers.bytes_received}

    @property
    def _first_batch(self) -> int:
        return self._done * self.described.accumulate

    def _read(self, body: Planned, buffers: Sequence[memoryview], iteration: int) -> tuple[Plan, Group]:
        """The plan of an iteration and its batches."""
        plan, batches = unpack_plan(body, buffers, self._shape, iteration)
        if iteration == 0 and batches[0].number != self._first_batch:
            raise WireError(
                f"the first plan of {self._name} is for batch {batches[0].number}, and {self._first_batch} was due: "
                "start both from the same iteration"
            )
        names = [name for name, _ in self._shape.features]
        if self._adapter is None:
            self._adapter = Adapter(batches[0])
            self._adapter.require(names)
        return plan, _group(batches, names)

    def _request(self, iteration: int) -> Body:
        return NextPlan(self._trainer, iteration, self._answers.next - 1)

    def _describe(self) -> PlansDescribed:
        body = self._client.call(DescribePlans(self._trainer), what="a description of the plans").body
        if not isinstance(body, PlansDescribed):
            raise unexpected(body, "a description of plans")
        return body


def _described(division: DividedBy | None) -> str:
    if division is None:
        return "one trainer"
    return (
        f"{division.trainers} trainers with assign {division.assign!r}, sync.design {division.design!r}, sync.delayed "
        f"{division.delayed} and sync.moving {division.moving}"
    )


def _group(batches: list[Batch], names: Sequence[str]) -> Group:
    lengths = [tuple(batch.sparse[name].values.numel() for name in names) for batch in batches]
    return Group(list(batches), lengths)
