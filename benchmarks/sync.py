"""What trainers exchange in an iteration, counted from plans alone: rows and bytes for each design and assignment.

Criteo-kaggle-like data, every iteration with fresh samples; counted once the window has been full for long, because the
owners of rows that were fetched while it was short are chosen with less to go by. Nothing is trained and nothing sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import tee
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.generator import generated
from bagpipe.data.presets import find_preset
from bagpipe.oracle.assign import ASSIGNERS, Assigner
from bagpipe.oracle.division import Division
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.partition import DESIGNS, Design, Partition
from bagpipe.oracle.reader import CutIds
from bagpipe.oracle.sync_plan import Lists
from bagpipe.oracle.tables import OracleTable
from benchmarks import Benchmark, Results

PRESET = "criteo-kaggle-like"
TRAINERS = 8
VECTOR_FLOATS = 48
"""Gradients have as many, whatever the optimizer."""
VECTOR_BYTES = 4 * VECTOR_FLOATS
PAPER: dict[str, dict[str, float]] = {
    "replicated": {"paper_rows": 65_000},
    "lrpp": {"paper_rows": 48_000, "paper_rows_critical": 22_700},
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
QUICK = _Size(0.01, 1_024, 4, 100_000, (2, 8), 2)


def run(quick: bool) -> Results:
    """Every assignment and design, and every size of optimizer state where it makes a difference; three minutes."""
    size = QUICK if quick else FULL
    return [result for assign in ASSIGNERS for result in _count(assign, size)]


def _count(assign: str, size: _Size) -> Results:
    """Divide the same plans by each design."""
    preset = find_preset(PRESET).scaled(size.scale) if size.scale != 1 else find_preset(PRESET)
    iterations = size.points[-1] + size.counted
    source = generated(preset, (iterations + size.lookahead) * size.batch_size)
    tables = [OracleTable(table.name, table.rows, table.features) for table in source.tables]
    features = [feature for table in tables for feature in table.features]
    assigner = Assigner(assign, TRAINERS, tables=[table.features for table in tables])

    def batches() -> Iterator[tuple[CutIds, None]]:
        for batch in source.batches(size.batch_size, workers=2):
            assigned = assigner(batch)
            ids = [batch.sparse[feature].values.numpy().reshape(-1) for feature in features]
            if assigned.order is not None:
                ids = [own[assigned.order] for own in ids]
            yield CutIds(ids, np.tile(np.array(assigned.bounds, np.int64), (len(ids), 1))), None

    oracle = Oracle(tables, [size.capacity], size.lookahead, threads=2, trainers=TRAINERS, uses_ahead=2)
    plans = tee(oracle.plans(batches()), len(VARIANTS))
    divided = [
        Partition(TRAINERS, tables, [size.capacity], design=design, move_costs=_costs(len(tables), optimizer)).plans(
            own
        )
        for (design, optimizer), own in zip(VARIANTS, plans, strict=True)
    ]
    counts: dict[tuple[Variant, int], list[_Counts]] = {}
    for iteration, divisions in zip(range(iterations), zip(*divided, strict=True), strict=False):
        for point in size.points:
            if point <= iteration < point + size.counted:
                for variant, (division, _) in zip(VARIANTS, divisions, strict=True):
                    state = STATES.get(variant[1] or "", 0)
                    counts.setdefault((variant, point), []).append(_Counts.of(division, state))
    oracle.close()
    return [_result(assign, variant, size, counts) for variant in VARIANTS]


def _result(
    assign: str, variant: Variant, size: _Size, counts: dict[tuple[Variant, int], list[_Counts]]
) -> dict[str, Any]:
    design, optimizer = variant
    means = {point: _Counts.mean(counts[variant, point]) for point in size.points}
    last = means[size.points[-1]]
    result: dict[str, Any] = {
        "assign": assign,
        "design": design,
        "moving": optimizer is not None,
        "row_optimizer": optimizer,
        "unique_rows": last.unique_rows,
        "rows": last.rows,
        "rows_critical": last.rows_critical,
        "rows_moved": last.rows_moved,
        "bytes_a_trainer": last.sent,
        "bytes_a_trainer_critical": last.sent_critical,
        "bytes_by_iteration": {str(point): mean.sent for point, mean in means.items()},
        **PAPER.get(design, {}),
    }
    if asked := ASKED.get((assign, variant)):
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
    rows_moved: float
    """Those that change their owner."""
    sent: float
    """Bytes, by the average trainer."""
    sent_critical: float

    @classmethod
    def of(cls, division: Division, state: int) -> _Counts:
        """Count what is in the trainers' parts, where rows that change their owner have so many floats of state."""
        rows, sent, moved = [0.0, 0.0], [0.0, 0.0], 0
        for rank in range(TRAINERS):
            sync = division.part(rank, (0,) * TRAINERS).sync
            assert sync is not None
            phases = (sync.gradients, (sync.fetched, sync.values)), (sync.later_gradients, (sync.later_values,))
            for phase, (gradients, vectors) in enumerate(phases):
                others = sum(_length_of_others(values.send, rank) for values in vectors)
                sent[phase] += VECTOR_BYTES * (others + _length_of_others(gradients.send, rank)) / TRAINERS
                given = sum(len(values.give) for values in vectors)
                sent[phase] += 4 * (state + 1) * given / TRAINERS
                moved += given
                rows[phase] += _rows_of_others(gradients.add, rank, len(gradients.rows), gradients.rows.bounds)
                shared = len(gradients.shared) / TRAINERS  # each trainer lists them all
                rows[phase] += shared
                # a ring: each trainer sends a share of 1/N to its neighbour N - 1 times, to add up and to spread sums
                sent[phase] += 2 * (TRAINERS - 1) / TRAINERS * VECTOR_BYTES * shared
        return cls(len(division.plan.rows), sum(rows), rows[0], moved, sum(sent), sent[0])

    @classmethod
    def mean(cls, counts: list[_Counts]) -> _Counts:
        """Of all fields."""
        names = [field.name for field in fields(cls)]
        return cls(*(float(np.mean([getattr(each, name) for each in counts])) for name in names))


def _costs(tables: int, optimizer: str | None) -> list[float]:
    """What a row of each table sends more when it changes its owner, in vectors."""
    return [] if optimizer is None else [(STATES[optimizer] + 1) / VECTOR_FLOATS] * tables


def _length_of_others(lists: Lists, rank: int) -> int:
    return len(lists) - int(lists.bounds[rank, -1] - lists.bounds[rank, 0])


def _rows_of_others(lists: Lists, rank: int, num_rows: int, bounds: NDArray[np.int64]) -> int:
    """How many of a trainer's rows get gradients from other trainers."""
    reached = np.zeros(num_rows, np.bool_)
    for other in range(TRAINERS):
        for table, items in lists.of(other) if other != rank else ():
            reached[bounds[table] + items] = True
    return int(reached.sum())


BENCHMARK = Benchmark("sync", "rows and bytes that trainers exchange, by design and assignment, from plans alone", run)
