"""All policies over a link of 100 Mbit/s in memory: on ScratchPipe's four traces and on Criteo-Kaggle-like data, at
several cache sizes, with what the papers claim beside it.

Tables and batches are a small share of the papers', and so are the laws of popularity, so that a cache of so many per
cent means what it means there. Policies take turns in one process; a turn lasts until its traffic has ended. The
servers hold every row that occurs, and each cache has seen the warm-up batches, before the link is limited. Batches do
not repeat, and behind the last that is trained come more than the longest window holds: no plan that is timed sees
their end. `hit_rate` and `fetched_rows` are those of the plans of the iterations that are timed; `python -m
benchmarks.policies` counts them without training.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np

from bagpipe.allocator import keep_freed_memory
from bagpipe.cache import VACANT
from bagpipe.data import Generated, find_preset
from bagpipe.data.popularity import PowerLaw, TopShare
from bagpipe.data.presets import Preset
from bagpipe.errors import CapacityError
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.plan import Plan
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies.lookahead import AUTO_MAX
from bagpipe.policy_options import DEFAULTS, PolicyOptions
from benchmarks import Benchmark, Results
from benchmarks.overlap import BITS_PER_SECOND, CompactWork, SimulatedLink, renumber
from benchmarks.train import Ours, Size
from benchmarks.turns import Contestant, take_turns

STRAW_MEN = {f"{name}, not pipelined": (name, PolicyOptions(pipelined=False)) for name in ("scratchpipe", "static")}
PUBLISHED_STATIC = "static, not pipelined"
"""A static cache as papers have it: what it lacks is fetched on the critical path."""
SYSTEMS: dict[str, tuple[str, PolicyOptions]] = {
    **{
        name: (name, DEFAULTS)
        for name in ("lookahead", "belady", "scratchpipe", "windowed", "frequency", "static", "lfu", "lru")
    },
    **STRAW_MEN,
    "nocache": ("nocache", DEFAULTS),
    "ideal": ("ideal", DEFAULTS),
}
UNCACHED = ("nocache", "ideal")
"""Do not depend on the size of the cache; `ideal` takes part at each size, since the others are held against it."""
LOCALITIES = ("random", "low", "medium", "high")
SKEWS = (0.9, 0.01)
"""Shares of the accesses that the top 1 % of rows take (Bagpipe, section 5.3)."""


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    model: str
    share: float
    """Of the papers' rows; of ScratchPipe's batches too."""
    criteo_batch: int
    dim: int
    warm_up: int
    """Batches that pass through the caches before the link is limited; policies that sample learn from these."""
    rounds: int
    turn: int
    scratchpipe_caches: tuple[float, ...]
    criteo_caches: tuple[float, ...]
    """The claim on the frequency-aware cache is about the last two."""
    skew_cache: float
    traces: tuple[str, ...] = LOCALITIES

    @property
    def timed(self) -> range:
        """The iterations that are timed; one is trained before them."""
        first = self.warm_up + 1
        return range(first, first + self.rounds * self.turn)


FULL = Scale("dlrm", 1 / 20, 512, 48, 48, 3, 6, (0.02, 0.10), (0.003, 0.015, 0.10), 0.03)
QUICK = Scale("wide_deep", 1 / 2000, 32, 8, 4, 1, 2, (0.10,), (0.05, 0.10), 0.10, traces=("high",))
PREFETCHED = 24
"""Batches behind the last that is trained whose rows may move: more than are planned and fetched ahead of it."""


@dataclass(frozen=True)
class Trace:
    """Data to measure on, and the cache sizes."""

    name: str
    preset: Preset
    batch_size: int
    caches: tuple[float, ...]
    systems: tuple[str, ...] = tuple(SYSTEMS)


def run(quick: bool) -> Results:
    """About twelve minutes; 6 GB."""
    keep_freed_memory()
    scale = QUICK if quick else FULL
    results = [row for trace in traces(scale) for row in measure(trace, scale)]
    return results + claims(results, scale)


def traces(scale: Scale) -> Iterator[Trace]:
    """ScratchPipe's, Criteo's, and Criteo's with more and less skew."""
    for locality in scale.traces:
        preset = find_preset(f"scratchpipe-{locality}")
        batch = max(4, round(2048 * scale.share))
        yield Trace(preset.name, shrunk(preset, scale.share), batch, scale.scratchpipe_caches)
    criteo = find_preset("criteo-kaggle-like").scaled(scale.share)
    yield Trace("criteo-kaggle-like", criteo, scale.criteo_batch, scale.criteo_caches)
    for skew in SKEWS:
        turned = criteo.reshaped(TopShare(skew))
        names = ("lookahead", PUBLISHED_STATIC, "ideal")
        yield Trace(f"criteo, skew {skew:g}", turned, scale.criteo_batch, (scale.skew_cache,), names)


def shrunk(preset: Preset, share: float) -> Preset:
    """The preset with this share of its rows, and the top so many per cent of them as popular as before."""

    def law(feature: Any) -> Any:
        power = feature.popularity
        assert isinstance(power, PowerLaw)
        return replace(feature, popularity=replace(power, shift=power.shift * share))

    features = {name: law(feature) for name, feature in preset.features.items()}
    return replace(preset.scaled(share), features=features)


def prepare(trace: Trace, scale: Scale) -> tuple[CompactWork, int]:
    """What all systems are given, and how many rows there would be if all occurred."""
    moving = scale.timed.stop + PREFETCHED
    batches = moving + AUTO_MAX
    rounds, turn = {scale.model: scale.rounds}, {scale.model: scale.turn}
    size = Size(scale.share, scale.dim, trace.batch_size, batches, rounds, turn)
    data = Generated(trace.preset, trace.batch_size * batches, 0)
    prepared = list(data.batches(trace.batch_size))
    num_rows = sum(table.rows or 0 for table in data.tables)
    _, compact = renumber(data, prepared)
    values = {
        table.name: [
            batch.sparse[name].values.numpy().reshape(-1) for batch in prepared[:moving] for name in table.features
        ]
        for table in data.tables
    }
    moved = {name: np.unique(np.concatenate(ids)) for name, ids in values.items()}  # the servers need no others
    return CompactWork(scale.model, size, data, lambda: iter(prepared), moved, tables=compact), num_rows


def timed_plans(work: CompactWork, scale: Scale, name: str, cache_rows: int) -> list[Plan]:
    """The plans of the timed iterations."""
    policy, options = SYSTEMS[name]
    tables = [OracleTable(table.name, table.rows, table.features) for table in work.tables]
    most = sum(table.rows or 0 for table in tables)
    capacity = most if policy == "ideal" else min(cache_rows, most)
    names = [feature for table in tables for feature in table.features]
    ids = ([batch.sparse[name].values.numpy().reshape(-1) for name in names] for batch in work.loader())
    oracle = Oracle(tables, [capacity], "auto", policy, replace(options, sample=scale.warm_up))
    try:
        plans = (plan for plan, _ in oracle.plans((own, None) for own in ids))
        return list(islice(plans, scale.timed.start, scale.timed.stop))
    finally:
        oracle.close()


def count(work: CompactWork, scale: Scale, name: str, cache_rows: int) -> dict[str, Any]:
    """What the plans of the timed iterations fetch, without training."""
    try:
        timed = timed_plans(work, scale, name, cache_rows)
    except CapacityError as error:
        return {"reason": str(error)}
    fetched, unique = (
        sum(len(part) for part in parts) for parts in zip(*((p.fetch, p.rows) for p in timed), strict=True)
    )
    return {"hit_rate": sum(plan.hits for plan in timed) / unique, "fetched_rows": fetched / len(timed)}


def measure(trace: Trace, scale: Scale) -> Results:
    """All systems on one trace, cache size by cache size."""
    work, num_rows = prepare(trace, scale)
    results: Results = []
    for share in trace.caches:
        names = [name for name in trace.systems if name != "nocache" or not results]
        cache_rows = max(1, round(share * num_rows))
        counted = {name: count(work, scale, name, cache_rows) for name in names}
        entered = _take_turns(work, scale, names, cache_rows)
        for name, contestant in entered.items():
            cache = None if name == "nocache" else share
            row = {"trace": trace.name, "cache_share": cache, "policy": name, "batch_size": trace.batch_size}
            results.append(row | counted[name] | _figures(contestant, entered))
    return results


def enter(name: str, work: CompactWork, scale: Scale, cache_rows: int, link: SimulatedLink) -> Contestant:
    """A policy that is ready for its turns."""
    policy, options = SYSTEMS[name]
    served = policy != "ideal"
    ours = Ours(
        work,
        policy,
        cache_rows=cache_rows,
        store=partial(link.open_store, name) if served else "memory",
        filled=served,  # a row that was never written would not travel
        options=replace(options, sample=scale.warm_up),
    )
    ours.skip(scale.warm_up)
    ours.train(1)
    cache = ours.loop.cache
    for dirty, tenants in zip(cache.dirty, cache.tenant_table, strict=True):
        dirty[tenants != VACANT] = True  # as if the warm-up had trained them: they are written back when they leave
    return Contestant(ours, scale.turn)


def _take_turns(work: CompactWork, scale: Scale, names: Sequence[str], cache_rows: int) -> dict[str, Contestant | str]:
    """The systems after their turns, or why one could not take any; all are closed."""
    entered: dict[str, Contestant | str] = {}
    link = SimulatedLink()
    with ExitStack() as stack:
        stack.callback(link.close)
        for name in names:
            try:
                contestant = enter(name, work, scale, cache_rows, link)
            except CapacityError as error:
                entered[name] = str(error)
                continue
            stack.callback(contestant.ours.close)
            entered[name] = contestant
        order = [contestant for contestant in entered.values() if isinstance(contestant, Contestant)]
        take_turns(order, scale.rounds, link, BITS_PER_SECOND)
    return entered


def _figures(contestant: Contestant | str, entered: dict[str, Contestant | str]) -> dict[str, Any]:
    if isinstance(contestant, str):
        return {"reason": contestant}
    others = [other for other in entered.values() if isinstance(other, Contestant)]
    losses = [zip(contestant.ours.losses, other.ours.losses, strict=True) for other in others]
    return {
        "iteration_ms": 1e3 * statistics.median(contestant.seconds),
        "written_rows": contestant.more("written_rows") / contestant.more("iterations"),
        "stall_fraction": contestant.stall_fraction,
        "cache_rows": contestant.after["cache_rows"],
        "peak_rows": contestant.after["peak_rows"],
        "time_ratio_to_ideal": _ratio(contestant, entered["ideal"]),
        "speedup_over_static": _ratio(entered[PUBLISHED_STATIC], contestant),
        "loss_difference_max": max(math.fabs(a - b) for pairs in losses for a, b in pairs),
    }


def _ratio(one: Contestant | str, other: Contestant | str) -> float | None:
    """Of their times, turn by turn; None if one could not take any."""
    if isinstance(one, str) or isinstance(other, str):
        return None
    return one.ratio_to(other)


def claims(results: Results, scale: Scale) -> Results:
    """What the papers say, and what was found here; between cache sizes and traces, times are by those of `ideal`."""
    times = {(row["trace"], row["policy"], row["cache_share"]): row.get("time_ratio_to_ideal") for row in results}
    speedups = [
        row["speedup_over_static"]
        for row in results
        if row["policy"] == "scratchpipe" and row["trace"].startswith("scratchpipe") and row.get("speedup_over_static")
    ]

    def ratio(policy: str, ours: tuple[str, float], theirs: tuple[str, float]) -> float | None:
        mine, other = (times.get((trace, policy, share)) for trace, share in (ours, theirs))
        return mine / other if mine and other else None

    skewed, flat = ((f"criteo, skew {skew:g}", scale.skew_cache) for skew in SKEWS)
    small, large = (("criteo-kaggle-like", share) for share in scale.criteo_caches[-2:])
    listed = [
        ("scratchpipe: speed over static, mean of traces and caches", 2.8, statistics.fmean(speedups or [math.nan])),
        ("scratchpipe: speed over static, at most", 4.2, max(speedups, default=None)),
        (
            f"frequency: time at {100 * small[1]:g} % of the rows to that at {100 * large[1]:g} %",
            1.0,
            ratio("frequency", small, large),
        ),
        ("lookahead: time at skew 1 % to that at 90 %", 1.13, ratio("lookahead", flat, skewed)),
        ("static: the same; the paper has FAE", 7.2, ratio(PUBLISHED_STATIC, flat, skewed)),
    ]
    return [{"claim": claim, "paper": paper, "measured": measured} for claim, paper, measured in listed]


BENCHMARK = Benchmark("policies", "all policies over a link of 100 Mbit/s, at several cache sizes and localities", run)


def _counts(scale: Scale) -> Iterator[str]:
    """Share of each batch's rows that must be fetched, as lines of a table, one for each trace and cache size."""
    cached = [name for name in SYSTEMS if name not in (*UNCACHED, *STRAW_MEN)]
    yield f"| trace | cache | {' | '.join(cached)} |"
    yield "|---" * (2 + len(cached)) + "|"
    for trace in traces(scale):
        work, num_rows = prepare(trace, scale)
        for share in trace.caches:
            found = [count(work, scale, name, max(1, round(share * num_rows))) for name in cached]
            shown = [f"{1 - each['hit_rate']:.0%}" if "hit_rate" in each else "-" for each in found]
            yield f"| {trace.name} | {share:.1%} | {' | '.join(shown)} |"


if __name__ == "__main__":
    for line in _counts(FULL):
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
