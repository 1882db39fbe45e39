"""How fast the oracle turns ids into plans, on criteo-kaggle-like data: finding the unique ids is part of it.

Variants of one comparison take turns in one process, a few iterations each, on the same batches; all are past the
growth of their windows. Batches are made beforehand, more of them than the longest window, and fed in a loop. With
several trainers plans are divided among them; cutting out all their parts is timed apart, each may do it for itself.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bagpipe.data.generator import generated
from bagpipe.data.presets import find_preset
from bagpipe.oracle.capacity import make_oracle
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.oracles import AnyOracle
from bagpipe.oracle.partition import Partition
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.reader import CutIds
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies.base import Lookahead
from bagpipe.policies.lookahead import AUTO_MAX
from bagpipe.policy_options import PolicyOptions
from bagpipe.types import Table
from bagpipe.wire.codec import pack
from benchmarks import Benchmark, Results

Ids = list[NDArray[np.int64]]

PRESET = "criteo-kaggle-like"
BATCH_SIZE = 16_384
LOOKAHEAD = 200
LOOKAHEADS = (5, 50, 200, 300)
BATCH_SIZES = (2_048, 8_192, 16_384, 32_768, 131_072)
NUM_FEATURES = (6, 13, 26)
NUM_BATCHES = 320
CAPACITY = 4_000_000
SMALL_CAPACITY = 400_000
"""For several oracles: each has a part of it, which costs rows that have to be fetched."""
MOVE_COST = 1 / 48
"""Of rows without optimizer state: with several trainers their owners change as often as can be."""
TURN = 5
"""Iterations of a variant before it is the next one's turn."""


def array_bytes(owner: object) -> int:
    """The bytes of all arrays that a plan or an oracle holds."""
    found: dict[int, np.ndarray[Any, Any]] = {}
    seen: set[int] = set()
    left = [owner]
    while left:
        one = left.pop()
        if isinstance(one, np.ndarray):
            while isinstance(one.base, np.ndarray):
                one = one.base
            found[id(one)] = one
        elif id(one) not in seen and (
            isinstance(one, dict | list | tuple) or type(one).__module__.startswith("bagpipe")
        ):
            seen.add(id(one))
            left += gc.get_referents(one)
    return sum(array.nbytes for array in found.values())


def sent_bytes(plan: Plan, compress: bool) -> int:
    """What a plan, or one trainer's part of it, takes on the wire, without its batches."""
    body, buffers = pack(replace(plan, sharing=None, guests=()), compress=compress)
    return len(body) + sum(buffer.nbytes for buffer in buffers)


@dataclass
class _Variant:
    """One oracle with its endless data."""

    labels: dict[str, Any]
    oracle: AnyOracle
    batches: Sequence[Ids]
    batch_size: int
    trainers: int = 1
    seconds: list[float] = field(default_factory=list)
    part_seconds: list[float] = field(default_factory=list)
    """What cutting all trainers' parts out of a divided plan takes."""
    num_rows: int = 0
    num_fetched: int = 0
    plan_bytes: int = 0
    sent: Plan | None = None
    """The last plan, or the first trainer's part of it."""

    def __post_init__(self) -> None:
        plans = self.oracle.plans(self._endless())
        tables = self.oracle.tables
        costs, places = [MOVE_COST] * len(tables), self.oracle.places
        self.divisions = Partition(self.trainers, tables, places.capacity, places.guests, move_costs=costs).plans(plans)
        self.plans = plans

    def _endless(self) -> Iterator[tuple[Ids | CutIds, None]]:
        bounds = [rank * self.batch_size // self.trainers for rank in range(self.trainers + 1)]
        cuts = np.tile(np.array(bounds, np.int64), (len(self.batches[0]), 1))
        while True:
            for ids in self.batches:
                yield (CutIds(ids, cuts) if self.trainers > 1 else ids), None

    def take_turn(self, iterations: int) -> None:
        """Make some plans and keep the time."""
        start = time.perf_counter()
        if self.trainers == 1:
            plans = [next(self.plans)[0] for _ in range(iterations)]
            self.seconds.append((time.perf_counter() - start) / iterations)
            self.sent = plans[-1]
        else:
            divisions = [next(self.divisions)[0] for _ in range(iterations)]
            divided = time.perf_counter()
            self.seconds.append((divided - start) / iterations)
            for division in divisions:
                for rank in range(self.trainers):
                    division.part(rank, (0,) * self.trainers)
            self.part_seconds.append((time.perf_counter() - divided) / iterations)
            plans = [division.plan for division in divisions]
            self.sent = divisions[-1].part(0, (0,) * self.trainers)
        self.num_rows = sum(len(plan.rows) for plan in plans) // iterations
        self.num_fetched = sum(len(plan.fetch) for plan in plans) // iterations
        self.plan_bytes = sum(map(array_bytes, plans)) // iterations

    def result(self, base: _Variant) -> dict[str, Any]:
        """Median figures, and the time of a sample beside that of the base variant, turn by turn."""
        ratios = [
            (mine / self.batch_size) / (other / base.batch_size)
            for mine, other in zip(self.seconds, base.seconds, strict=True)
        ]
        parts = np.array(self.part_seconds) / np.array(base.seconds[: len(self.part_seconds)])
        return self.labels | {
            "samples_per_second": self.batch_size / float(np.median(self.seconds)),
            "samples_per_second_best": self.batch_size / min(self.seconds),
            "ids_per_second": self.batch_size * len(self.batches[0]) / float(np.median(self.seconds)),
            "time_ratio_to_first": float(np.median(ratios)),
            "ns_a_unique_row": 1e9 * float(np.median(self.seconds)) / max(1, self.num_rows),
            **({"parts_time_ratio_to_first": float(np.median(parts))} if len(parts) else {}),
            "unique_rows": self.num_rows,
            "fetched_rows": self.num_fetched,
            "plan_bytes": self.plan_bytes,
            "sent_bytes": 0 if self.sent is None else sent_bytes(self.sent, compress=False),
            "compressed_bytes": 0 if self.sent is None else sent_bytes(self.sent, compress=True),
            "memory_bytes": array_bytes(self.oracle),
        }


def run(quick: bool) -> Results:
    """Threads, trainers, lookaheads, batch sizes, features, tables without arrays, several oracles; some minutes."""
    rows, batches = _make_batches(quick)
    lookahead = 8 if quick else LOOKAHEAD
    results: Results = []
    results += _measure("threads", {n: {"threads": n} for n in (1, 2)}, rows, batches, lookahead, quick)
    results += _measure("trainers", {n: {"trainers": n} for n in (1, 8)}, rows, batches, lookahead, quick)
    lookaheads = (2, 8) if quick else LOOKAHEADS
    results += _measure("lookahead", {n: {"lookahead": n} for n in lookaheads}, rows, batches, lookahead, quick)
    maps = {"arrays": {}, "mapped": {"rows_direct_max": 0}}
    results += _measure("tables", maps, rows, batches, lookahead, quick)
    oracles = {n: {"oracles": n} for n in (1, 2, 4)}
    results += _measure("oracles", oracles, rows, batches, 8 if quick else "auto", quick)
    shapes: dict[object, dict[str, Any]] = {size: {"batch_size": size} for size in BATCH_SIZES[:: 3 if quick else 1]}
    results += _measure("batch_size", shapes, rows, batches, 8, quick)
    counts: dict[object, dict[str, Any]] = {count: {"num_features": count} for count in NUM_FEATURES}
    return results + _measure("num_features", counts, rows, batches, 8 if quick else 50, quick)


def _make_batches(quick: bool) -> tuple[list[int | None], list[Ids]]:
    preset = find_preset(PRESET).scaled(0.01) if quick else find_preset(PRESET)
    source = generated(preset, (12 if quick else NUM_BATCHES) * BATCH_SIZE)
    names = [name for table in source.tables for name in table.features]
    batches = [
        [batch.sparse[name].values.numpy().reshape(-1) for name in names]
        for batch in source.batches(BATCH_SIZE, workers=2)
    ]
    return [table.rows for table in source.tables], batches


def _measure(
    measure: str,
    variants: Mapping[Any, dict[str, Any]],
    rows: list[int | None],
    batches: list[Ids],
    lookahead: Lookahead,
    quick: bool,
) -> Results:
    made = [
        _make_variant({"measure": measure, measure: value}, dict(options), rows, batches, lookahead)
        for value, options in variants.items()
    ]
    for variant in made:
        window = variant.labels.get("lookahead", lookahead)
        variant.take_turn((AUTO_MAX if window == "auto" else window) + 5)
        variant.seconds.clear()
        variant.part_seconds.clear()
    for _ in range(2 if quick else 30):
        for variant in made:
            variant.take_turn(TURN)
    for variant in made:
        variant.oracle.close()
    return [variant.result(made[0]) for variant in made]


def _make_variant(
    labels: dict[str, Any], options: dict[str, Any], rows: list[int | None], batches: list[Ids], lookahead: Lookahead
) -> _Variant:
    batch_size, num_features = options.pop("batch_size", BATCH_SIZE), options.pop("num_features", len(rows))
    by_size = sorted(
        range(len(rows)), key=lambda t: rows[t] or 0
    )  # so that few features have their share of large tables
    chosen = sorted(by_size[(feature + 1) * len(rows) // num_features - 1] for feature in range(num_features))
    joined = max(1, batch_size // BATCH_SIZE)
    runs = [batches[first : first + joined] for first in range(0, len(batches), joined)]
    wholes = [run[0] if joined == 1 else [np.concatenate(own) for own in zip(*run, strict=True)] for run in runs]
    parts = [
        [ids[t][start : start + batch_size] for t in chosen]
        for ids in wholes
        for start in range(0, joined * BATCH_SIZE, batch_size)
    ]
    tables = [OracleTable(f"table {t}", rows[t]) for t in chosen]
    if "oracles" in options:
        oracle: AnyOracle = make_oracle(
            [Table(table.name, table.rows, table.features) for table in tables], [1] * len(tables), SMALL_CAPACITY,
            {table.name: ids for table, ids in zip(tables, parts[0], strict=True)}, lookahead=lookahead,
            policy="lookahead", options=PolicyOptions(threads=1, **options),
        )  # fmt: skip
    else:
        oracle = Oracle(tables, [CAPACITY], **{"lookahead": lookahead, "uses_ahead": 1, **options})
    return _Variant(labels, oracle, parts, batch_size, options.get("trainers", 1))


BENCHMARK = Benchmark(
    "oracle", "from ids to plans: samples a second by threads, trainers, lookahead, batch size, features", run
)
