"""Which trainer gets which sample of a batch: a function of the order of the data, the number of trainers and a seed.

Never of cache, lookahead or time: training ends with the same bits whatever those are (I1). The result is an order that
makes each trainer's samples contiguous, so that nothing after it knows how they were chosen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from bagpipe.arrays import Int64s
from bagpipe.errors import BatchError, ConfigError
from bagpipe.kernels import assign as kernels
from bagpipe.kernels.assign import HOMELESS, TRAINERS_MAX, Rows

if TYPE_CHECKING:
    from bagpipe.types import Batch


ASSIGNERS = ("contiguous", "round_robin", "aware")
PERIOD = 1000
"""All homes are forgotten at batches whose number is a multiple of this."""
ENTRIES = 2**23
"""Of the memory of homes, 8 bytes each; a power of two."""
VOTE = 16
"""The weight of a row that occurs once in the batch."""
OCCURRENCES_MAX = 4
"""A row that occurs more often than this a trainer, and more often than eight times this, does not vote."""
SLACK = 0.1
"""By how much parts may be larger while samples look where the others are; they are even in the end."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The samples of one batch, divided among trainers."""

    order: Int64s | None
    """Numbers of samples, those of trainer 0 first, each trainer's in the order of the data; None: as they are."""
    bounds: tuple[int, ...]
    """Trainer r has the samples from bounds[r] to bounds[r + 1] of that order; parts can be empty."""

    def parts(self, batch: Batch) -> list[Batch]:
        """Each trainer's samples."""
        if self.bounds[-1] != len(batch):
            raise BatchError(
                f"batch {batch.number} has {len(batch)} samples, its assignment {self.bounds[-1]}: "
                "assign the batch that is divided"
            )
        arranged = batch if self.order is None else batch.take(self.order)
        return [arranged.part(start, stop) for start, stop in pairwise(self.bounds)]


def contiguous(samples: int, trainers: int) -> Assignment:
    """Each trainer gets a part of the batch as it comes; the same parts as `bagpipe.types.contiguous_parts`."""
    return Assignment(None, tuple([rank * samples // trainers for rank in range(trainers + 1)]))


def round_robin(samples: int, trainers: int) -> Assignment:
    """Sample i goes to trainer i mod N."""
    turns = [np.arange(rank, samples, trainers) for rank in range(trainers)]
    bounds = np.cumsum([0] + [len(turn) for turn in turns])
    return Assignment(np.concatenate(turns), tuple(bounds.tolist()))


class Assigner:
    """Divides batch after batch among a fixed number of trainers; sizes of parts differ by at most one."""

    def __init__(self, name: str, trainers: int, seed: int = 0, tables: Sequence[Sequence[str]] = ()) -> None:
        """`tables` names the features of each table; `aware` needs it, to find rows by their ids."""
        if name not in ASSIGNERS:
            raise ConfigError(f"assign is {name!r}: choose one of {', '.join(ASSIGNERS)}")
        if trainers < 1:
            raise ConfigError(f"trainers is {trainers}: give at least 1")
        self.name, self.trainers = name, trainers
        self.features = [feature for features in tables for feature in features]
        self._aware = Aware(trainers, seed, [len(features) for features in tables]) if name == "aware" else None

    def __call__(self, batch: Batch) -> Assignment:
        """Divide a batch."""
        if self._aware is None:
            return self.assign(batch.number, len(batch))
        found = [batch.sparse[feature] for feature in self.features]
        offsets = [None if ids.offsets is None else ids.offsets.numpy() for ids in found]
        return self.assign(batch.number, len(batch), [ids.values.numpy() for ids in found], offsets)

    def assign(
        self,
        number: int,
        samples: int,
        ids: Sequence[NDArray[np.integer]] = (),
        offsets: Sequence[NDArray[np.integer] | None] = (),
    ) -> Assignment:
        """Divide batch `number`; only `aware` looks at its ids, which come feature by feature, table by table.

        Without offsets each sample has equally many ids of a feature; with them, sample i has those from offsets[i] up
        to the next offset, as in `bagpipe.Ids`.
        """
        if self._aware is not None:
            return self._aware.assign(number, samples, ids, offsets)
        return contiguous(samples, self.trainers) if self.name == "contiguous" else round_robin(samples, self.trainers)

    def first_needed(self, number: int) -> int:
        """The batch from which on a new assigner must be shown all, in order, to divide this one alike."""
        return number if self._aware is None else number - number % PERIOD


class Aware:
    """Puts samples where most of their rows are at home, so that few rows change hands between trainers.

    A row's home is where most of its samples of a batch were placed; it moves when they are elsewhere again and again.
    It is forgotten when another row needs its entry in a memory of fixed size, and with all others at batches 0, 1,000,
    2,000, ..., so that a run can be resumed anywhere. A batch is placed in two steps, each time in even parts: by the
    votes of rows for their homes; then by where more of a sample's rows are, now that all others are placed.
    """

    def __init__(self, trainers: int, seed: int, num_features: Sequence[int], entries: int = ENTRIES) -> None:
        """`num_features` is that of each table."""
        if trainers > TRAINERS_MAX:
            raise ConfigError(
                f"trainers is {trainers}: assign 'aware' is for {TRAINERS_MAX} at most, choose 'round_robin'"
            )
        if not sum(num_features):
            raise ConfigError("assign 'aware' places samples by their ids: name the features of all tables")
        self._salts = [_salt(seed, table) for table, number in enumerate(num_features) for _ in range(number)]
        self._trainers, self._next = trainers, -1
        self._memory = np.full(entries, HOMELESS, np.uint64)
        self._rows = _rows(0)
        self._users = np.empty((0, 2), np.uint64)
        self._found, self._places = np.empty((2, 0), np.int32)
        # A row that occurs n times is with a share of about 1 - (1 - 1/N)^n of the trainers anyway, so it has the less
        # say; the steeper (1 - 2/N) did better. A row that is everywhere has none.
        self._count_max = OCCURRENCES_MAX * max(8, trainers)
        shares = [Fraction(max(0, trainers - 2), trainers) ** max(0, n - 1) for n in range(self._count_max + 1)]
        self._weights = np.array([max(1, round(VOTE * share)) for share in shares], np.int32)

    def assign(
        self,
        number: int,
        samples: int,
        ids: Sequence[NDArray[np.integer]],
        offsets: Sequence[NDArray[np.integer] | None],
    ) -> Assignment:
        """Divide batch `number`, the one after the last."""
        flat, ends = self._checked(number, samples, ids, offsets)
        if number % PERIOD == 0:
            self._memory.fill(HOMELESS)
        self._next = number + 1
        if samples == 0:
            return contiguous(samples, self._trainers)
        rows, num_rows = self._find(number, flat)
        part = np.empty(samples, np.int64)
        listed = self._place(flat, ends, num_rows, part)
        kernels.settle_homes(*listed, part, rows, num_rows, self._count_max, self._memory)
        return Assignment(np.argsort(part.astype(np.uint8), kind="stable"), contiguous(samples, self._trainers).bounds)

    def _find(self, number: int, flat: list[Int64s]) -> tuple[Rows, int]:
        """Find the rows of a batch, and the place of each of its ids among them; how many there are."""
        self._reserve(sum(map(len, flat)))
        at = num_rows = 0
        for salt, ids in zip(self._salts, flat, strict=True):
            found = self._found[at : at + len(ids)]
            num_rows = kernels.find_rows(self._memory, number % PERIOD + 1, salt, ids, found, self._rows, num_rows)
            at += len(ids)
        return self._rows, num_rows

    def _place(
        self, flat: list[Int64s], ends: list[Int64s], num_rows: int, part: Int64s
    ) -> tuple[Int64s, Int64s, NDArray[np.int32]]:
        """Find the trainer of each sample; where the rows that had a say begin and end, sample by sample."""
        samples = len(part)
        starts = np.zeros(samples, np.int64)
        for until in ends:
            starts[1:] += until[:-1]
        stops, places, at = starts.copy(), self._places, 0
        votes = kernels.weigh(self._rows, num_rows, self._weights)
        scores = np.zeros((samples, self._trainers), np.int32)
        for ids, until in zip(flat, ends, strict=True):
            kernels.vote(self._found[at : at + len(ids)], until, votes, stops, places, scores)
            at += len(ids)
        sizes = np.diff(contiguous(samples, self._trainers).bounds)
        kernels.place(scores, sizes.copy(), part)
        kernels.note_users(starts, stops, places, self._rows.homes[:num_rows], part, self._users)
        load_max = int(sizes.max() * (1 + SLACK)) + 1
        kernels.look_again(starts, stops, places, self._users, part, sizes.copy(), load_max, scores)
        kernels.place(scores, sizes.copy(), part)
        return starts, stops, places

    def _reserve(self, num_ids: int) -> None:
        if num_ids > len(self._places):
            num_rows = min(num_ids, len(self._memory))
            self._found, self._places = np.empty((2, num_ids), np.int32)
            self._rows = _rows(num_rows)
            self._users = np.empty((num_rows, 2), np.uint64)

    def _checked(
        self,
        number: int,
        samples: int,
        ids: Sequence[NDArray[np.integer]],
        offsets: Sequence[NDArray[np.integer] | None],
    ) -> tuple[list[Int64s], list[Int64s]]:
        """Ids of each feature, and where those of each sample end; kernels check no bounds."""
        if number != self._next and number % PERIOD:
            raise BatchError(
                f"batch {number} comes out of turn: where its samples go depends on the batches before it, "
                f"show all from batch {number - number % PERIOD} on"
            )
        if len(ids) != len(self._salts):
            raise BatchError(f"batch {number} has ids of {len(ids)} features: give those of all {len(self._salts)}")
        flat, ends = [], []
        equal: dict[int, Int64s] = {}
        for feature, (values, begins) in enumerate(zip(ids, offsets or [None] * len(ids), strict=True)):
            if values.size and not np.can_cast(values.dtype, np.int64):
                raise BatchError(f"batch {number}: ids of feature {feature} are {values.dtype}: give 64-bit integers")
            if not _fit(samples, values.size, begins):
                raise BatchError(
                    f"batch {number}: {values.size} ids of feature {feature} can't be those of {samples} samples: "
                    "give equally many a sample, or offsets"
                )
            flat.append(np.ascontiguousarray(values, np.int64).reshape(-1))
            if begins is not None:
                ends.append(np.append(begins[1:], values.size).astype(np.int64)[:samples])
                continue
            if values.size not in equal:
                equal[values.size] = np.arange(1, samples + 1) * (values.size // max(1, samples))
            ends.append(equal[values.size])
        return flat, ends


def _fit(samples: int, num_ids: int, offsets: NDArray[np.integer] | None) -> bool:
    if offsets is None:
        return num_ids % samples == 0 if samples else num_ids == 0
    bounds = np.append(offsets, num_ids)
    return len(offsets) == samples and bool(bounds[0] == 0) and bool((np.diff(bounds) >= 0).all())


def _rows(number: int) -> Rows:
    entries, counts = np.empty(number, np.int32), np.empty(number, np.int32)
    return Rows(entries, np.empty(number, np.uint8), counts, np.empty(number, np.uint8))


def _salt(seed: int, table: int) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b(f"{seed} {table}".encode(), digest_size=8).digest(), "little"))
