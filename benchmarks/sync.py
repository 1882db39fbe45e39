"""What trainers exchange in an iteration, counted from plans alone: rows and bytes for each design and assignment.

Criteo-kaggle-like data, every iteration with fresh samples; counted once the window has been full for long, because the
owners of rows that were fetched while it was short are chosen with less to go by. Nothing is trained and nothing sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import tee
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.generator import generated
from bagpipe.data.presets import find_preset
from bagpipe.kernels.partition import FETCHED, LATER, NEXT, NOW
from bagpipe.oracle.assign import ASSIGNERS, Assigner
from bagpipe.oracle.design import DESIGNS, Design
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.partition import Division, Partition
from bagpipe.oracle.reader import CutIds
from bagpipe.oracle.sync_plan import Routes
from bagpipe.oracle.tables import OracleTable
from benchmarks import Benchmark, Results

PRESET = "criteo-kaggle-like"
TRAINERS = 8
VECTOR_FLOATS = 48
"""Gradients have as many, whatever the optimizer."""
VECTOR_BYTES = 4 * VECTOR_FLOATS
PAPER: dict[tuple[str, str], dict[str, float]] = {
    ("contiguous", "replicated"): {"paper_rows": 65_000},
    ("contiguous", "lrpp"): {"paper_rows": 48_000, "paper_rows_critical": 22_700},
    ("aware", "partitioned"): {"paper_rows": 21_000},
}
STATES: dict[str, int] = {"sgd": 0, "rowwise_adagrad": 1, "adagrad": VECTOR_FLOATS, "adam": 2 * VECTOR_FLOATS}
"""Floats of a row's state, which go with it where it changes its owner."""
Variant = tuple[Design, str | None]
"""A design, and the optimizer of rows whose owners may change; None: they don't, and all optimizers send the same."""
VARIANTS: tuple[Variant, ...] = (*((design, None) for design in DESIGNS), *(("owned", name) for name in STATES))
ASKED: dict[tuple[str, Variant], float] = {
    **{("contiguous", ("owned", name)): 4e6 for name in STATES},
    ("aware", ("owned", "sgd")): 2.5e6,
}
"""Bytes a trainer sends at most; with samples placed by their rows a goal."""


@dataclass(frozen=True)
class _Size:
    """How much is counted, and when."""

    scale: float
    batch_size: int
    lookahead: int
    capacity: int
    points: tuple[int, ...]
    """Iterations from which on is counted; the last is the result, those before show how it came to be."""
    counted: int
    """Iterations each time."""


FULL = _Size(1, 16_384, 200, 4_000_000, (25, 50, 100, 200, 300, 400), 20)
SHORT = _Size(1, 16_384, 50, 4_000_000, (60,), 4)
QUICK = _Size(0.01, 1_024, 4, 100_000, (2, 8), 2)
SEVERAL = (2, 4, 8, 16, 32)


def run(quick: bool) -> Results:
    """Every assignment and design, and every size of optimizer state where it makes a difference; three minutes.

    Then the designs for other numbers of trainers, with a shorter window.
    """
    size, short = (QUICK, QUICK) if quick else (FULL, SHORT)
    found = [result for assign in ASSIGNERS for result in count(assign, size)]
    numbers = [number for number in SEVERAL if not quick or number != TRAINERS]
    return found + [result for number in numbers for result in count("contiguous", short, number, VARIANTS[:5])]


def count(assign: str, size: _Size, trainers: int = TRAINERS, variants: Sequence[Variant] = VARIANTS) -> Results:
    """Divide the same plans by each design."""
    preset = find_preset(PRESET).scaled(size.scale) if size.scale != 1 else find_preset(PRESET)
    iterations = size.points[-1] + size.counted
    source = generated(preset, (iterations + size.lookahead) * size.batch_size)
    tables = [OracleTable(table.name, table.rows, table.features) for table in source.tables]
    features = [feature for table in tables for feature in table.features]
    assigner = Assigner(assign, trainers, tables=[table.features for table in tables])

    def batches() -> Iterator[tuple[CutIds, None]]:
        for batch in source.batches(size.batch_size, workers=2):
            assigned = assigner(batch)
            ids = [batch.sparse[feature].values.numpy().reshape(-1) for feature in features]
            if assigned.order is not None:
                ids = [own[assigned.order] for own in ids]
            yield CutIds(ids, np.tile(np.array(assigned.bounds, np.int64), (len(ids), 1))), None

    oracle = Oracle(tables, [size.capacity], size.lookahead, threads=2, trainers=trainers, uses_ahead=2)
    plans = tee(oracle.plans(batches()), len(variants))
    divided = [
        Partition(trainers, tables, [size.capacity], design=design, move_costs=_costs(len(tables), optimizer)).plans(
            own
        )
        for (design, optimizer), own in zip(variants, plans, strict=True)
    ]
    counts: dict[tuple[Variant, int], list[_Counts]] = {}
    for iteration, divisions in zip(range(iterations), zip(*divided, strict=True), strict=False):
        for point in size.points:
            if point <= iteration < point + size.counted:
                for variant, (division, _) in zip(variants, divisions, strict=True):
                    state = STATES.get(variant[1] or "", 0)
                    counts.setdefault((variant, point), []).append(_Counts.of(division, state))
    oracle.close()
    return [_result(assign, trainers, variant, size, counts) for variant in variants]


def _result(
    assign: str, trainers: int, variant: Variant, size: _Size, counts: dict[tuple[Variant, int], list[_Counts]]
) -> dict[str, Any]:
    design, optimizer = variant
    means = {point: _Counts.mean(counts[variant, point]) for point in size.points}
    last = means[size.points[-1]]
    result: dict[str, Any] = {
        "assign": assign,
        "trainers": trainers,
        "design": design,
        "moving": optimizer is not None,
        "row_optimizer": optimizer,
        "unique_rows": last.unique_rows,
        "rows": last.rows,
        "rows_critical": last.rows_critical,
        "rows_elsewhere": last.rows_elsewhere,
        "vectors_elsewhere": last.vectors_elsewhere,
        "rows_moved": last.rows_moved,
        "bytes_a_trainer": last.sent,
        "bytes_a_trainer_critical": last.sent_critical,
        "bytes_a_trainer_all_reduce": 2 * (trainers - 1) / trainers * VECTOR_BYTES * last.rows,
        "bytes_by_iteration": {str(point): mean.sent for point, mean in means.items()},
    }
    if trainers == TRAINERS:
        result |= PAPER.get((assign, design), PAPER.get(("contiguous", design), {}))
    if trainers == TRAINERS and (asked := ASKED.get((assign, variant))):
        result["bytes_a_trainer_asked"] = asked
    return result


@dataclass(frozen=True)
class _Counts:
    """One iteration, or the mean of several."""

    unique_rows: float
    rows: float
    """Rows with a user that does not update them alone: their gradients are sent, or reduced over all trainers."""
    rows_critical: float
    """Those that the next iteration uses."""
    rows_elsewhere: float
    """Rows in the cache with a user that has them from another trainer: what parts of a cache read from each other."""
    vectors_elsewhere: float
    """The same, counted for each such user."""
    rows_moved: float
    """Those that change their owner."""
    sent: float
    """Bytes, by the average trainer."""
    sent_critical: float

    @classmethod
    def of(cls, division: Division, state: int) -> _Counts:
        """Count what goes from trainer to trainer, where rows that change their owner have so many floats of state."""
        uses, trainers = division.uses, division.trainers
        users, updaters = uses.sharing.users, uses.found.updaters
        several = users | updaters
        exchanged = several & (several - 1) != 0
        now = uses.found.phase == NOW
        gradients = _between(uses.gradients, trainers)
        vectors = np.zeros(3)
        moved = np.zeros(3)
        for when, later in ((FETCHED, uses), (NEXT, division.next), (LATER, division.after)):
            if later is not None:
                vectors[when] = _between(later.vectors, trainers)[when]
                found = later.found
                moves = (found.updaters != found.held) & (later.sent_at[found.arrival] == when)
                moved[when] = np.count_nonzero(moves)
        sent = VECTOR_BYTES * (gradients + np.array([vectors[FETCHED] + vectors[NEXT], vectors[LATER]]))
        sent += 4 * (state + 1) * np.array([moved[FETCHED] + moved[NEXT], moved[LATER]])
        elsewhere = np.where(uses.found.arrival == FETCHED, 0, users & ~uses.found.held)
        pairs = sum(int(np.count_nonzero(elsewhere & bit)) for bit in uses.bits[:-1])
        rows, critical, others = (int(np.count_nonzero(flags)) for flags in (exchanged, exchanged & now, elsewhere))
        moving = float(moved.sum())
        return cls(
            len(uses.plan.rows), rows, critical, others, pairs, moving, sent.sum() / trainers, sent[0] / trainers
        )

    @classmethod
    def mean(cls, counts: list[_Counts]) -> _Counts:
        """Of all fields."""
        names = [field.name for field in fields(cls)]
        return cls(*(float(np.mean([getattr(each, name) for each in counts])) for name in names))


def _costs(tables: int, optimizer: str | None) -> list[float]:
    """What a row of each table sends more when it changes its owner, in vectors."""
    return [] if optimizer is None else [(STATES[optimizer] + 1) / VECTOR_FLOATS] * tables


def _between(routes: Routes, trainers: int) -> NDArray[np.int64]:
    """How many rows go from a trainer to another, by time."""
    pairs = (routes.bounds[:, -1] - routes.bounds[:, 0]).reshape(-1, trainers, trainers)
    sent: NDArray[np.int64] = pairs.sum((1, 2)) - np.trace(pairs, axis1=1, axis2=2)
    return sent


BENCHMARK = Benchmark("sync", "rows and bytes that trainers exchange, by design and assignment, from plans alone", run)
