"""What N caches of C slots would fetch if they held N x C different rows instead of C: counted from plans alone.

Each size of the cache is planned with C slots and with 8 C. Full data shows the beginning of a run, where most rows are
fetched because they occur for the first time; smaller data, with batches in proportion, shows what comes later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from bagpipe.data.generator import generated
from bagpipe.data.presets import Preset, find_preset
from bagpipe.errors import CapacityError
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.tables import OracleTable
from benchmarks import Benchmark, Results
from benchmarks.policies import LOCALITIES, shrunk

TRAINERS = 8
CACHES = (0.001, 0.003, 0.01, 0.03, 0.1)
"""Shares of all rows."""
BEHIND = 130
"""Batches behind the last that is counted."""


@dataclass(frozen=True)
class _Data:
    """What is planned, and when it is counted."""

    preset: Preset
    batch_size: int
    first: int
    counted: int
    caches: tuple[float, ...] = CACHES


def run(quick: bool) -> Results:
    """About eight minutes."""
    return [row for data in _all(quick) for row in _count(data)]


def _all(quick: bool) -> Iterator[_Data]:
    kaggle, terabyte = find_preset("criteo-kaggle-like"), find_preset("criteo-terabyte-like")
    if quick:
        yield _Data(kaggle.scaled(0.001), 32, 10, 5, (0.01, 0.1))
        return
    yield _Data(kaggle, 16_384, 200, 20)
    yield _Data(terabyte, 16_384, 60, 10, (0.0002, *CACHES[:2]))
    yield _Data(kaggle.scaled(0.01), 164, 1_500, 200)
    for locality in LOCALITIES:
        yield _Data(shrunk(find_preset(f"scratchpipe-{locality}"), 1 / 20), 102, 600, 50, CACHES[2:])


def _count(data: _Data) -> Results:
    size = data.first + data.counted + BEHIND
    batches = generated(data.preset, data.batch_size * size, 0)
    tables = [OracleTable(table.name, table.rows, table.features) for table in batches.tables]
    names = [feature for table in tables for feature in table.features]
    ids = [
        [batch.sparse[name].values.numpy().reshape(-1) for name in names]
        for batch in islice(batches.batches(data.batch_size), size)
    ]
    num_rows = sum(table.rows or 0 for table in tables)
    results: Results = []
    for share in data.caches:
        row: dict[str, Any] = {"data": data.preset.name, "rows": num_rows, "batch_size": data.batch_size}
        row |= {"iteration": data.first, "cache_share": share}
        for times in (1, TRAINERS):
            capacity = min(num_rows, round(share * num_rows) * times)
            oracle = Oracle(tables, [capacity], "auto", rows_direct_max=200_000_000)
            try:
                plans = oracle.plans((own, None) for own in ids)
                timed = [plan for plan, _ in islice(plans, data.first, data.first + data.counted)]
            except CapacityError as error:
                row[f"reason_{times}"] = str(error)
                continue
            finally:
                oracle.close()
            row["batch_rows"] = sum(len(plan.rows) for plan in timed) / len(timed)
            row[f"fetched_{times}"] = sum(len(plan.fetch) for plan in timed) / len(timed)
            row[f"lookahead_{times}"] = max(plan.lookahead for plan in timed)
        if "fetched_1" in row:
            row["change"] = row[f"fetched_{TRAINERS}"] / row["fetched_1"] - 1
        results.append(row)
    return results


BENCHMARK = Benchmark("caches", "rows fetched if N caches held N times the rows, counted from plans", run)
