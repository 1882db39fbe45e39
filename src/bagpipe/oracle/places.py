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
"""Plans whose guests are in a cache at a time. A guest of plan x takes the place of one of plan x - TURNS:

- Sent after the update of iteration x - 1, or beside that one as a part of x - 2, it comes when the trainer has done
  the forward and backward passes of x - 2 at least, so nobody reads what was there, with any number of turns but one.
- Read by the trainer itself from the store, it may come long before. Then it waits until plan x - TURNS is copied out
  there: that iteration is over. So the rows of two plans can be in the cache while an earlier one trains."""


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
