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

from bagpipe.arrays import Int64s
from bagpipe.oracle.slots import HELD, NEVER, Group
from bagpipe.policies.base import Lookahead
from bagpipe.policies.belady import ForesightedPolicy

PAST = 3
"""Batches between planning and training."""
FUTURE = 2
"""Batches between a plan's write-back and the next read."""
HOLD = HELD - 2**31
"""More than any key of a row that is not held."""


class ScratchPipePolicy(ForesightedPolicy):
    """Keeps everything; victims are rows that no batch of the six holds."""

    name = "scratchpipe"

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:
        """Begin a run."""
        super().bind(groups, lookahead, ahead)
        self.window = self.window_max = 1 + FUTURE
        self._warned: set[int] = set()

    def keys(self, iteration: int, group: Group, count: int) -> Int64s:
        """What the replacement policy says; of held rows, which leave only if nobody else can, the last use.

        The hold mask: as the batch of an iteration is planned, the slots of the past three and the next two batches.
        """
        facts = group.facts
        if self.options.replacement == "random":
            source = np.random.Philox(key=self.options.seed, counter=[0, 0, group.number, iteration])
            values = np.random.Generator(source).integers(0, NEVER, group.capacity, np.int32)
        else:
            values = facts.uses if self.options.replacement == "lfu" else facts.last
        keys = facts.keys(values)
        if self.options.pipelined:  # else fetches wait for the iteration before, and nothing needs to be held
            held = (facts.last >= 0) & ((facts.last >= iteration - PAST) | (facts.next <= iteration + FUTURE))
            keys[held] = HOLD + facts.last[held].astype(np.int64)
            if count > np.count_nonzero(keys < HOLD) and group.number not in self._warned:
                missing = count + group.slots.num_free
                of_batch = missing + int(np.count_nonzero((facts.last >= 0) & (facts.next == iteration)))
                self._warn(iteration, group, missing + int(np.count_nonzero(held)), of_batch)
        return keys

    def _warn(self, iteration: int, group: Group, held: int, of_batch: int) -> None:
        """The first time that held rows must leave, say which cache has room."""
        self._warned.add(group.number)
        logging.getLogger("bagpipe").warning(
            "policy 'scratchpipe' holds %s rows of %s for the six batches around iteration %d, and the cache has "
            "places for %s: held rows leave, and training waits for them; raise `cache` to at least %s rows of "
            "this width; %s have room for any six batches like that one", f"{held:,}", group.label, iteration,
            f"{group.capacity:,}", f"{held:,}", f"{(PAST + 1 + FUTURE) * of_batch:,}",
        )  # fmt: skip
