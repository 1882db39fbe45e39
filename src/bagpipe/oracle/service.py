"""The oracle as a service: batches in, plans out over the wire, to trainers in other processes.

A thread reads batches and plans ahead, as far as there is room; trainers ask for plans by iteration, and each is given
its own part with its own samples. It is a pure function of data order and settings, so one that is started again gives
the same plans again. What is wrong with the data is told when a trainer asks for the iteration that it would have been.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import numpy as np

from bagpipe.config import cache_size
from bagpipe.errors import BagpipeError, BatchError, ConfigError, DeadlineError, PipelineError, WireError
from bagpipe.failpoints import reach
from bagpipe.oracle.assign import ASSIGNERS, Assigner
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.design import DESIGNS, Design
from bagpipe.oracle.oracle import mask_type
from bagpipe.oracle.oracles import AnyOracle
from bagpipe.oracle.outbox import DESCRIPTION, Answer, Outbox
from bagpipe.oracle.partition import Partition, uses_ahead
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.sent_plan import pack_plan
from bagpipe.policy_options import DEFAULTS, PolicyOptions
from bagpipe.trainer.divided import Divided
from bagpipe.trainer.source import Group, Source
from bagpipe.types import Batch, Table
from bagpipe.wire.connection import Listen, Listening, Peer
from bagpipe.wire.messages import Failed, Message
from bagpipe.wire.plan_messages import (
    DescribePlans,
    DividedBy,
    NextPlan,
    NoMorePlans,
    PlannedTable,
    PlansDescribed,
)

ROOM = 8
CLOSE_S = 30.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlanSettings:
    """What an oracle plans for, in plain values."""

    tables: tuple[Table, ...]
    """Of the model's binding, in its order."""
    widths: tuple[int, ...]
    """Floats of a row of each table, optimizer state included."""
    cache: int | str
    """Of one trainer: rows, bytes such as "2GB", or a share of all rows such as "1.5%"."""
    lookahead: int | Literal["auto"] = "auto"
    policy: str = "lookahead"
    accumulate: int = 1
    """Batches an iteration."""
    data: str = ""
    """The fingerprint of data and order, if it has one."""
    trainers: int = 1
    """Who share each batch."""
    assign: str = "contiguous"
    """Which trainer gets which sample."""
    seed: int = 0
    """For `assign`."""
    design: Design = "owned"
    """Which trainer updates a row."""
    delayed: bool = True
    """Whether what the next iteration does not need is exchanged beside it."""
    options: PolicyOptions = DEFAULTS
    """Of the policy."""
    move_costs: tuple[float, ...] = ()
    """What a row of each table sends more when it changes its owner, in vectors; empty: rows keep their owners."""

    def __post_init__(self) -> None:
        cache_size(self.cache)
        if len(self.tables) != len(self.widths) or not self.tables:
            raise ConfigError(f"{len(self.tables)} tables with {len(self.widths)} widths: give one for each")
        if self.move_costs and len(self.move_costs) != len(self.tables):
            raise ConfigError(f"{len(self.tables)} tables with {len(self.move_costs)} move_costs: give one for each")
        if self.accumulate < 1:
            raise ConfigError(f"accumulate is {self.accumulate}: give at least 1")
        if self.design not in DESIGNS:
            raise ConfigError(f"sync.design is {self.design!r}: give one of {', '.join(DESIGNS)}")
        if self.assign not in ASSIGNERS:
            raise ConfigError(f"assign is {self.assign!r}: choose one of {', '.join(ASSIGNERS)}")
        mask_type(self.trainers)

    @property
    def division(self) -> DividedBy | None:
        """How plans are divided; None: they are not."""
        if self.trainers == 1:
            return None
        return DividedBy(self.trainers, self.assign, self.design, self.delayed, bool(self.move_costs))

    def partition(self, oracle: AnyOracle) -> Partition:
        """Divides plans."""
        return Partition(
            self.trainers, oracle.tables, oracle.places.capacity, oracle.places.guests, design=self.design,
            delayed=self.delayed, move_costs=self.move_costs,
        )  # fmt: skip

    @property
    def uses_ahead(self) -> int:
        """How many next uses of rows plans must tell of."""
        return uses_ahead(self.move_costs) if self.design == "owned" else 0

    def assigner(self) -> Assigner:
        """Divides samples."""
        return Assigner(self.assign, self.trainers, self.seed, [table.features for table in self.tables])

    def first_needed(self, done: int) -> int:
        """The batch that an oracle must read first to plan from the iteration after `done` others on."""
        return self.assigner().first_needed(done * self.accumulate)

    def described(self, capacity: list[int]) -> PlansDescribed:
        """What trainers are told, with the places that the first batch led to."""
        tables = [
            PlannedTable(table.name, table.rows, list(table.features), width)
            for table, width in zip(self.tables, self.widths, strict=True)
        ]
        text = json.dumps([asdict(self), capacity], sort_keys=True)
        fingerprint = hashlib.sha256(text.encode()).hexdigest()[:16]
        return PlansDescribed(
            tables, capacity, self.lookahead, self.policy, self.accumulate, fingerprint, self.division
        )


@dataclass(frozen=True)
class OracleStatus:
    """What an oracle has done."""

    address: str
    planned: int
    """Iterations that have a plan."""
    received: int
    """The last iteration whose plan all trainers have; -1: none."""
    ready: int
    """Plans that some trainer has not received."""
    lookahead: int
    """Of the last plan."""
    plans_sent: int
    """Repetitions included."""
    bytes_sent: int
    """Of plans and batches."""
    ended: str
    """Why there are no more plans; empty while there are."""


class OracleService:
    """Plans the batches of an iterable, which it closes in the end."""

    def __init__(
        self,
        listen: Listen,
        batches: Iterable[Batch],
        settings: PlanSettings,
        *,
        run: bytes,
        room: int = ROOM,
        done: int = 0,
        compress: bool = False,
    ) -> None:
        """`batches` may be `RemoteBatches`, a `Loader`, or anything that gives batches once, in order.

        Up to `room` plans are made beyond those that all trainers have asked for. The first plan is that of the
        iteration after `done` others; who divides samples may have to see earlier batches
        (`PlanSettings.first_needed`). `compress` plans where trainers are on other machines.
        """
        if room < 1:
            raise ConfigError(f"room is {room}: give at least 1")
        self._listen, self._batches, self._settings, self._run = listen, batches, settings, run
        self._first_batch, self._compress = done * settings.accumulate, compress
        self._outbox = Outbox(settings.trainers, room)
        self._listening: Listening | None = None
        self._fingerprint = ""
        self._planned = self._lookahead = 0
        self._ended = ""
        self._thread = threading.Thread(target=self._work, name="bagpipe-oracle", daemon=True)

    def start(self) -> str:
        """Listen, and begin to read and plan; the address."""
        assert self._listening is None, "a service is started once"
        self._listening = self._listen(self.handle)
        self._thread.start()
        return self._listening.address

    @property
    def address(self) -> str:
        """Where it listens."""
        assert self._listening is not None, "start it first"
        return self._listening.address

    def status(self) -> OracleStatus:
        """What it has done so far."""
        outbox = self._outbox
        return OracleStatus(
            "" if self._listening is None else self._listening.address,
            self._planned,
            min(outbox.received, self._planned - 1),
            outbox.num_ready,
            self._lookahead,
            outbox.num_sent,
            outbox.bytes_sent,
            self._ended,
        )

    def close(self) -> None:
        """Answer nobody any more and stop reading; a second call does nothing."""
        if self._listening is None:
            _close(self._batches)
            return
        self._outbox.close()
        interrupt = getattr(self._batches, "interrupt", None)
        if interrupt is not None:
            interrupt()
        self._listening.close()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            raise DeadlineError(f"the oracle's data gave no batch for {CLOSE_S:.0f} s, so it could not be closed")

    def handle(self, peer: Peer, message: Message) -> None:
        """Answer a request, once its plan is ready."""
        body = message.body
        if message.run != self._run:
            raise WireError("a message of another run: check the addresses")
        peer.admit()
        if isinstance(body, DescribePlans):
            self._outbox.answer(peer, body.trainer, DESCRIPTION, DESCRIPTION)
        elif isinstance(body, NextPlan):
            self._outbox.answer(peer, body.trainer, body.iteration, body.received)
        else:
            raise WireError(f"an oracle was sent {type(body).__name__}: it gives plans only")

    def _work(self) -> None:
        source: Divided | None = None
        oracle: AnyOracle | None = None
        end = Answer(Failed(PipelineError.__name__, "the oracle failed inside: its log says how"))
        try:
            assigner = self._settings.assigner()
            batches = _shown(self._batches, assigner, self._first_batch) if self._first_batch else self._batches
            source = Divided(iter(batches), partial(_divide, assigner), accumulate=self._settings.accumulate)
            oracle = self._make_oracle(source)
            self._plan(source, oracle)
            end = Answer(NoMorePlans(self._planned))
        except BagpipeError as error:
            end = Answer(Failed.of(error))
        except Exception:
            _log.exception("the oracle failed")
        finally:
            for part in (source, oracle, self._batches):
                _close(part)
            body = end.body
            self._ended = f"{body.error}: {body.message}" if isinstance(body, Failed) else "all data is planned"
            self._outbox.finish(end)

    def _make_oracle(self, source: Source) -> AnyOracle:
        """Look at the first batch, and tell trainers what its plans will be like."""
        settings = self._settings
        source.tables = settings.tables
        if not source.empty:
            source.adapter.require(source.features)
            first = source.first_ids()
        elif self._first_batch:  # a run that was lost after its last iteration: nothing is left to plan
            first = dict.fromkeys(source.features, np.empty(0, np.int64))
        else:
            raise BatchError("the data is empty: there is nothing to train on")
        oracle = make_oracle(
            settings.tables, settings.widths, cache_size(settings.cache), first,
            lookahead=settings.lookahead, policy=settings.policy, options=settings.options, trainers=settings.trainers,
            uses_ahead=settings.uses_ahead, design=settings.design,
        )  # fmt: skip
        described = settings.described(list(oracle.places.capacity))
        self._fingerprint = described.fingerprint
        self._outbox.describe(Answer(described))
        return oracle

    def _plan(self, source: Divided, oracle: AnyOracle) -> None:
        for parts in self._parts(source, oracle):
            plan = parts[0][0]
            answers = [
                Answer(*pack_plan(part, own.batches, source.features, self._fingerprint, compress=self._compress))
                for part, own in parts
            ]
            reach("oracle.plan.made")
            self._lookahead = plan.lookahead
            if not self._outbox.put(plan.iteration, answers):
                raise PipelineError("the oracle was closed")
            self._planned = plan.iteration + 1

    def _parts(self, source: Divided, oracle: AnyOracle) -> Iterator[Sequence[tuple[Plan, Group]]]:
        """For each iteration what each trainer gets."""
        settings = self._settings
        if settings.trainers == 1:
            yield from ([planned] for planned in source.planned(oracle))
            return
        for division, parts in source.divided(oracle, settings.partition(oracle)):
            samples = list(zip(*(part.samples for part in parts), strict=True))
            yield [(division.part(rank, *samples), part.group) for rank, part in enumerate(parts)]


def _shown(batches: Iterable[Batch], assigner: Assigner, first: int) -> Iterator[Batch]:
    """The batches from `first` on; those before it are only shown to who divides."""
    for batch in batches:
        if batch.number < first:
            assigner(batch)
        else:
            yield batch


def _divide(assigner: Assigner, batch: Batch) -> list[tuple[Batch, int]]:
    """Each trainer's part of a batch, and how many samples it has."""
    reach("oracle.batch.read")
    return [(part, len(part)) for part in assigner(batch).parts(batch)]


def _close(part: object) -> None:
    """Let go of something, where that can be done."""
    close = getattr(part, "close", None)
    if close is not None:
        close()
