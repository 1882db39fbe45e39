"""ScratchPipe: a cache whose rows are fetched a few batches early, and a mask of rows that must not leave meanwhile.

Six batches are on their way at once (load, plan, collect, exchange, insert, train). When one is planned, the rows of
the three before it are being collected, exchanged and inserted, and those of the two behind it will be collected before
what it evicts is written back: the slots of all of them are *held* (section IV-C; its RAW hazards 2, 3 and 4). Of the
others LRU, LFU or chance picks victims. Here collect, exchange and insert are the pipeline's fetch and insert, which
keep their waits by themselves: where fewer slots are free of holds than are needed, held rows leave too, training
waits, and a warning says so once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from bagpipe.kernels.victims import HELD, NEVER, hold
from bagpipe.oracle.slots import Group
from bagpipe.policies.base import Demand, Int32s, Int64s, Lookahead, RankingPolicy, SlotFacts

PAST = 3
"""Batches between planning and training."""
FUTURE = 2
"""Batches between a plan's write-back and the next read."""
HOLD = HELD - 2**31
"""More than any key of a row that is not held."""


class ScratchPipePolicy(RankingPolicy):
    """Keeps everything; victims are rows that no batch of the six holds."""

    name = "scratchpipe"
    foresees = True

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run."""
        super().bind(groups, lookahead, ahead)
        self.target = self.target_max = 1 + FUTURE
        self._warned: set[int] = set()

    def make_room(self, demand: Demand, needed: int) -> tuple[Int32s, int]:
        """The slots with the smallest keys; the first time that held rows are among them, say which cache has room."""
        victims, evict_after = super().make_room(demand, needed)
        group = demand.group
        worth = self.facts[group.number].worth
        if group.number not in self._warned and (worth[victims] >= HOLD).any():
            self._warned.add(group.number)
            of_batch = len(demand.hits) + demand.num_misses
            held = of_batch + int(np.count_nonzero((worth >= HOLD) & (worth < HELD)))
            logging.getLogger("bagpipe").warning(
                "policy 'scratchpipe' holds %s rows of %s for the six batches around iteration %d, and the cache has "
                "places for %s: held rows leave, and training waits for them; raise `cache` to at least %s rows of "
                "this width; %s have room for any six batches like that one", f"{held:,}", group.label,
                demand.iteration, f"{group.slots.capacity:,}", f"{held:,}", f"{(PAST + 1 + FUTURE) * of_batch:,}",
            )  # fmt: skip
        return victims, evict_after

    def keys(self, iteration: int, facts: SlotFacts) -> Int64s:
        """What the replacement policy says; of held rows, which leave only if nobody else can, the last use.

        The hold mask: as the batch of an iteration is planned, the slots of the past three and the next two batches.
        """
        if self.options.replacement == "random":
            source = np.random.Philox(key=self.options.seed, counter=[0, 0, self.facts.index(facts), iteration])
            draws = np.random.Generator(source).integers(0, NEVER, len(facts.last), np.int32)
            worth = facts.keys(draws)
        else:
            worth = facts.keys(facts.uses if self.options.replacement == "lfu" else facts.last)
        if self.options.pipelined:  # else fetches wait for the iteration before, and nothing needs to be held
            hold(facts.last, facts.next, iteration - PAST, iteration + FUTURE, HOLD, worth)
        return worth
