"""Systems that take turns on a link of limited rate, in one process, and what each took for its turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from bagpipe.layout import RowLayout
from bagpipe.store import Store
from benchmarks.idle import wait_until_idle
from benchmarks.train import Ours


class Link(Protocol):
    """The trainer's side of the link."""

    def open_store(self, name: str, layouts: Sequence[RowLayout]) -> Store:
        """The servers of a system."""

    def limit(self, bits_per_second: int | None) -> None:
        """From now on each direction carries so much."""

    def counted(self) -> tuple[int, int]:
        """Bytes sent and received so far."""


class Contestant:
    """A system that takes turns on the link, and what it took for them."""

    def __init__(self, ours: Ours, turn: int) -> None:
        """`turn` is its number of iterations in one."""
        self.ours, self.turn = ours, turn
        self.seconds: list[float] = []
        """An iteration of each turn."""
        self.moved = np.zeros(2, np.int64)
        """Bytes sent and received in all turns."""
        self.before = self.after = ours.loop.stats()

    def take_turn(self, link: Link) -> None:
        """Train some iterations, and count what they take."""
        moved, start = np.array(link.counted()), time.perf_counter()
        self.ours.train(self.turn)
        self.seconds.append((wait_until_idle(link.counted) - start) / self.turn)
        self.moved += np.array(link.counted()) - moved

    def more(self, key: str) -> float:
        """Of the turns."""
        return float(self.after[key] - self.before[key])

    @property
    def stall_fraction(self) -> float:
        """The share of the turns in which training waited for rows."""
        return self.more("stall_seconds") / (self.turn * sum(self.seconds))

    def ratio_to(self, other: Contestant) -> float:
        """Of its time to another's, median over turns."""
        return statistics.median(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))


def take_turns(contestants: Sequence[Contestant], rounds: int, link: Link, bits_per_second: int) -> None:
    """So many turns of each, another one first in each round; the link is limited while they last."""
    try:
        link.limit(bits_per_second)
        wait_until_idle(link.counted)
        for contestant in contestants:
            contestant.before = contestant.ours.loop.stats()
        order = list(contestants)
        for _ in range(rounds):
            for contestant in order:
                contestant.take_turn(link)
            order = order[1:] + order[:1]
        for contestant in contestants:  # before closing moves more
            contestant.after = contestant.ours.loop.stats()
    finally:
        link.limit(None)  # to close means to write back what is cached
