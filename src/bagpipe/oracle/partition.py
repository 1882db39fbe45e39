"""Divides plans among trainers: who fetches, updates, sends and writes back each row (paper, section 3.3). Pure.

Slots are numbered alike on all trainers, but a trainer holds only the rows that it needs. A row that iterations x and
x + 1 both use is exchanged between them; one that x + 1 does not use is updated beside x + 1, and sent beside the
iteration before its next use. So every use of a row finds its newest value, and nothing is sent that nobody uses (I3).

Designs:
  owned        one trainer owns a row: the one that will use it most while it is in the cache, as far as the oracle
               sees when it is fetched; then it may go, with its state, to a user for whom its next two uses speak more;
  partitioned  the slot decides who owns a row, and the owner alone reads it from the store;
  replicated   all trainers fetch and update all rows;
  lrpp         as replicated, but a row that one trainer uses and that then leaves is that trainer's alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from bagpipe.errors import ConfigError
from bagpipe.kernels import partition as kernels
from bagpipe.kernels.partition import AFTERWARDS, FETCHED, LATER, NEXT, NOW, SHARED
from bagpipe.oracle.division import Division, Uses, no_vectors
from bagpipe.oracle.oracle import mask_type
from bagpipe.oracle.plan import Fetch, Plan, Sharing
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.tables import OracleTable

Design = Literal["owned", "partitioned", "replicated", "lrpp"]
DESIGNS: tuple[Design, ...] = ("owned", "partitioned", "replicated", "lrpp")
Int64s = NDArray[np.int64]
Masks = NDArray[Any]
Ranks = NDArray[np.int8]
Payload = TypeVar("Payload")

AHEAD = 2
"""Plans that must be known behind one before it can be divided: what it exchanges depends on who uses its rows next."""


class Partition:
    """Takes plans in order; remembers who owns what is in the cache."""

    def __init__(
        self,
        trainers: int,
        tables: Sequence[OracleTable],
        capacity: Sequence[int],
        *,
        design: Design = "owned",
        delayed: bool = True,
        move_costs: Sequence[float] = (),
    ) -> None:
        """`capacity` has the size of each slot space.

        `move_costs` tells of each table what a row sends more when it changes its owner, in vectors, for the design
        owned: that of its state, since its vector is sent anyway. None: rows keep their owners.
        """
        masks = mask_type(trainers)
        if design not in DESIGNS:
            raise ConfigError(f"sync.design is {design!r}: give one of {', '.join(DESIGNS)}")
        self.trainers, self.design, self.delayed = trainers, design, delayed
        ends = np.cumsum([0, *capacity])
        self._bases: Int64s = ends[[table.group for table in tables]].astype(np.int64)
        self._features: Int64s = np.repeat(np.arange(len(tables)), [len(table.features) for table in tables])
        self._state: Int64s = np.zeros(int(ends[-1]), np.int64)
        bits = masks(1) << np.arange(trainers, dtype=masks)
        self._bits: Masks = np.append(bits, bits.sum(dtype=masks))
        """The mask of each trainer; the last, where SHARED points, is that of all."""
        self._flows: Int64s = np.array([FETCHED if design == "partitioned" else -1, NEXT, LATER if delayed else NEXT])
        """When vectors of rows of each kind are sent: with those of which kind; -1: never."""
        assert len(move_costs) in (0, len(tables)), "of each table, or of none"
        self._costs = np.full(len(tables), kernels.NEVER)
        if design == "owned" and move_costs:
            self._costs[:] = move_costs
        self._no_vectors = no_vectors(trainers, len(tables))
        self._waiting: deque[Uses] = deque()

    def plans(self, plans: Iterable[tuple[Plan, Payload]]) -> Iterator[tuple[Division, Payload]]:
        """Each plan with what its trainers make of it, two plans behind."""
        payloads: deque[Payload] = deque()
        error: Exception | None = None
        source = iter(plans)
        while error is None:
            try:
                plan, payload = next(source)
            except StopIteration:
                break
            except Exception as failure:
                error = failure
                break
            self._follow(plan)
            payloads.append(payload)
            if len(self._waiting) > AHEAD:
                yield self._divide(), payloads.popleft()
        while self._waiting:
            yield self._divide(), payloads.popleft()
        if error is not None:
            raise error

    def _follow(self, plan: Plan) -> None:
        """Follow a plan through the slots."""
        sharing, bases, state = plan.sharing, self._bases, self._state
        assert sharing is not None, "plans for one trainer are not divided"
        rows, fetch = plan.rows, plan.fetch
        victims_by = self._writers(plan.victims)  # before others take their slots
        if self.design == "lrpp":
            kernels.mark_leaving(plan.evict.bounds, plan.evict.slots, bases, state)
        holders, owners, kinds = np.empty((3, len(rows)), np.int8)
        freed, takers = np.empty(len(rows), np.int32), np.empty(len(fetch), self._bits.dtype)
        homes = self._homes(fetch, sharing)
        last = self._waiting[-1] if self._waiting else None
        met = kernels.follow(
            rows.bounds, rows.slots, sharing.users, sharing.next_users, sharing.later_users, sharing.before,
            rows.bounds if last is None else last.plan.rows.bounds,
            fetch.bounds, fetch.slots, fetch.slot_after, homes,
            self._bits, self.design != "partitioned", self._costs, bases, state,
            holders, owners, kinds, freed, owners[:0] if last is None else last.phases, takers,
        )  # fmt: skip
        assert met == len(fetch), f"plan {plan.iteration} fetches rows that its batch does not use"
        phases = np.full(len(rows), AFTERWARDS if self.delayed else NOW, np.int8)
        notes = holders, owners, kinds, freed, phases, homes, takers, self._writers(plan.evict), victims_by
        self._waiting.append(Uses(plan, sharing, self.trainers, self._flows, *notes))

    def _homes(self, fetch: Fetch, sharing: Sharing) -> Ranks:
        if self.design == "owned":
            return sharing.homes
        if self.design == "partitioned":
            return (fetch.slots % self.trainers).astype(np.int8)
        return np.full(len(fetch), SHARED, np.int8)

    def _writers(self, rows: RowList) -> Ranks:
        return kernels.writers_of(rows.bounds, rows.slots, self._bases, self._state, self.trainers)

    def _divide(self) -> Division:
        uses, nothing = self._waiting.popleft(), self._no_vectors
        owners = self.design in ("owned", "partitioned")
        return Division(
            uses,
            self._features,
            replicas=not owners,
            read_by_users=self.design == "owned",
            fetched=uses.vectors(FETCHED) if self.design == "partitioned" else nothing,
            values=self._waiting[0].vectors(NEXT) if owners and self._waiting else nothing,
            later_values=self._waiting[1].vectors(LATER) if owners and len(self._waiting) > 1 else nothing,
        )


def uses_ahead(move_costs: Sequence[float]) -> int:
    """How many next uses of rows an oracle has to tell of, for rows whose moves cost this."""
    if not move_costs:
        return 0
    return 1 if max(move_costs) < kernels.SHORT else 2
