"""What a policy decides: which rows stay in the cache after an iteration, and which leave when it is full.

Everything else (unique rows, slots, fetches, write-backs and their waits) is the oracle's, the same for every policy:
a policy can cost traffic but never exactness (I1, I3). A row in the cache is *granted* a stay until its next use, or it
is *idle*, until its slot is needed: idle rows leave in the order of `keys`, or those idle for longest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from bagpipe.arrays import Int32s, Int64s
from bagpipe.errors import ConfigError
from bagpipe.kernels.oracle import KEEP
from bagpipe.oracle.row_list import RowList
from bagpipe.oracle.slots import Group
from bagpipe.policy_options import DEFAULTS, PolicyOptions

if TYPE_CHECKING:
    from bagpipe.policies.sampled import Sample
    from bagpipe.policies.windows import Times

Lookahead = int | Literal["auto"]
Wanted = Sequence[tuple[Int64s, Int64s]]
"""Of each group tables and ids of rows, in the order in which they get what room there is."""


@dataclass(slots=True, eq=False)
class Demand:
    """What one plan asks of one group."""

    iteration: int
    group: Group
    rows: RowList
    """All rows of the batch, those of other groups too."""
    missing: Int32s
    """Which of them are of this group and not in the cache."""
    new: Int32s = field(init=False)
    slot_after: Int32s = field(init=False)
    """The slots of those, once they have some, and the plans whose evictions freed them (-1: none, or victims now)."""
    lone: Int32s | None = None
    """Rows of the group that one trainer uses and that must not be idle, where there are several."""

    @property
    def slots(self) -> Int32s:
        """The slots of the group's rows; negative for those that are missing."""
        return self.group.collect(self.rows.slots, self.rows.bounds)

    @property
    def misses(self) -> tuple[Int64s, Int64s]:
        """Table and id of each row that is missing."""
        return np.searchsorted(self.rows.bounds, self.missing, "right") - 1, self.rows.ids[self.missing]


@dataclass(slots=True, eq=False, kw_only=True)
class Extra(Demand):
    """The same of rows that a plan brings along, beside those of its batch, whose slots are taken."""

    wanted: tuple[Int64s, Int64s]
    """Tables and ids."""

    @property
    def misses(self) -> tuple[Int64s, Int64s]:
        """All of them."""
        return self.wanted


class Policy:
    """Reads one batch ahead and keeps every row until its slot is needed; subclasses override what they do better."""

    name: ClassVar[str]
    """That of its class, where it says no other."""
    window: int = 2
    """How many batches must have been read, and not be planned yet, before the next plan; the second at least tells
    whether the first is the last one."""
    window_max: int = 2
    """Bound on `window`."""
    horizon: int = 64
    """Every fetch waits at least for the iteration this many before the last, so that older evictions can be forgotten:
    long enough that their write-backs were acknowledged anyway."""
    idles: bool = True
    """False: no row ever makes room, as none stays without being granted, or none has to leave."""
    early: ClassVar[bool] = False
    """Whether idle rows leave as soon as the window shows that their slots are needed, so that prefetching finds them
    free; else they leave as victims of the plan that needs the slots."""
    keeps_all: ClassVar[bool] = False
    """Whether every row that was ever used needs a place."""
    samples: ClassVar[bool] = False
    """Whether it has to `learn` how often rows are used, before the first plan."""
    exact: bool = True
    """False: fetches do not wait for write-backs, so that rows can be stale."""

    options: PolicyOptions = DEFAULTS
    groups: Sequence[Group]
    ahead: int
    """The number of plans whose rows may be on their way while an earlier one trains."""

    def __init_subclass__(cls) -> None:
        if "name" not in vars(cls):
            cls.name = cls.__name__

    @classmethod
    def is_exact(cls, options: PolicyOptions) -> bool:  # noqa: ARG003 - for subclasses
        """Whether the result is that of synchronous training, bit for bit: whatever the options, unless it says so."""
        return True

    @classmethod
    def lead(cls, lookahead: Lookahead, options: PolicyOptions) -> int:  # noqa: ARG003 - for subclasses
        """How many plans before their own rows are to be read; 0: as the executor sees fit."""
        return 0

    def bind(self, groups: Sequence[Group], lookahead: Lookahead, ahead: int) -> None:  # noqa: ARG002 - for subclasses
        """Begin a run."""
        self.groups, self.ahead = groups, ahead
        if not self.options.pipelined:
            self.horizon = 0

    def needs(self, counts: Int64s, gaps: Int64s) -> Int64s:  # noqa: ARG002
        """Of each table how many rows must have a place at once, for the batch that `grant` is about to be told of."""
        return counts

    def grant(self, iteration: int, window: int, counts: Int64s, gaps: Int64s) -> bool:  # noqa: ARG002
        """The batch of an iteration was read, behind `window` others without a plan; it has counts[t] rows of table t.

        gaps[t, g] of them were last used g iterations earlier (gaps[t, 0]: were never seen), and gaps[t, window + 1]
        are idle in the cache. Lower it to the number that is granted a stay from that use to this: not more than there
        are slots for, unless rows can be made to leave all the same. Returns whether all are granted.
        """
        gaps[:, : window + 2] = 0
        return False

    def place(self, demand: Demand) -> Int32s | None:  # noqa: ARG002
        """Slots for the rows that are missing, whoever has them now; -1: a free one. None: all take free ones."""
        return None

    def leaves(self, demand: Demand, *, ended: bool) -> bool | Int32s:  # noqa: ARG002
        """Which rows of a batch leave right after it, now that they have slots; others that are not granted a stay are
        idle. True: all those; False: none; or positions of some. `ended`: no batch will be read any more."""
        return False

    def keys(self, iteration: int, group: Group, count: int) -> Int64s:
        """The order in which tenants make room, `count` of them now, lowest first: from 0 to HELD, which must stay.

        If a policy has no keys, those leave first that are idle for longest.
        """
        raise NotImplementedError

    def learn(self, sample: Sample) -> None:
        """How often each row of each table is used."""
        raise NotImplementedError

    def along(self, iteration: int) -> Wanted | None:  # noqa: ARG002
        """Rows that the plan just made brings along for later ones: those that find a place, as `place` says; where it
        gives none, those for which there are free slots."""
        return None

    def measure(self, times: Times) -> None:
        """What the trainer measures while it runs, for a policy that goes by it."""

    def advance(self, iteration: int, window: int) -> int:  # noqa: ARG002
        """A plan was made, with `window` batches that begin with it: set `window` for the next. Returns its lookahead:
        rows used again in fewer iterations than this stay."""
        return 1


def checked(lookahead: Lookahead, auto: int) -> int:
    """A lookahead as a number of batches: `auto` stands for "auto"."""
    if lookahead != "auto" and not 1 <= lookahead < KEEP:
        raise ConfigError(f'lookahead is {lookahead}: give a number from 1 to {KEEP - 1}, or "auto"')
    return auto if lookahead == "auto" else lookahead
