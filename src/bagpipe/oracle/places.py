"""How many different rows the caches of several trainers hold, and where in each cache they are. Pure.

The oracle plans with *slots*, one for each row that is in a cache anywhere. A trainer's cache has *places*. Where a row
has one owner at a time it takes one place, at its owner; so N caches of C places hold almost N * C rows. Of the places
of a cache most are homes, of rows that its trainer owns. The others are for guests, rows that its trainer uses and
another owns: a guest is there for one plan, and all guests of plan x share places with those of plan x - TURNS.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

TURNS = 3
"""Plans whose guests are in a cache at a time. A guest of plan x comes after the update of x - 1, beside x - 1, or from
the store, before that. It waits until plan x - TURNS is copied out on its trainer: then that iteration is over there,
its delayed part too, so nobody reads what was in the guest's place. With fewer turns the exchange beside x - 1 would
wait for iteration x - 2, of which it is a part."""


@dataclass(frozen=True, slots=True)
class Places:
    """The places of each trainer's cache, and the slots that they make together; group by group."""

    slots: tuple[int, ...]
    capacity: tuple[int, ...]
    """Places of one cache."""
    guests: tuple[int, ...]
    """Rows that a trainer may use in a plan; for so many guests there are places, TURNS times. 0: places are numbered
    as the slots are, alike on all trainers, and a row has the same one wherever it is."""

    @classmethod
    def alike(cls, capacity: Sequence[int]) -> Places:
        """Places that are numbered as the slots."""
        return cls(tuple(capacity), tuple(capacity), (0,) * len(capacity))


def num_homes(places: int, guests: int) -> int:
    """How many of a cache's places are not for guests."""
    return places - TURNS * guests


def make_places(
    capacity: Sequence[int], used: Sequence[int], limits: Sequence[int], trainers: int, *, moving: bool
) -> Places:
    """The places of caches of this capacity, of which a trainer uses so many rows in a batch; `limits`: all there are.

    Where guests would take so many places that fewer rows were cached than with slots that are numbered alike, these
    are. `moving`: rows change their owners.
    """
    slots, guests = list(capacity), [0] * len(capacity)
    for group, (places, rows, limit) in enumerate(zip(capacity, used, limits, strict=True)):
        most = min(_with_headroom(rows), limit)
        # A row that moves leaves its old place free, but not at once: its new owner needs another.
        spare = most // 2 if moving else 0
        together = min(trainers * (num_homes(places, most) - spare), limit)
        if together > places:
            slots[group], guests[group] = together, most
    return Places(tuple(slots), tuple(capacity), tuple(guests))


def _with_headroom(rows: int) -> int:
    """More than some batches had. A batch that needs more yet has the cache emptied and divided anew: as each time
    makes room for an eighth more, there are few such times."""
    return rows + rows // 8 + 2
