"""The oracle of a run, its cache divided by what some batches need: the same wherever the oracle is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache import UNLIMITED, divide, group_by_width, num_bytes
from bagpipe.config import Share, Size
from bagpipe.embedding import check_range
from bagpipe.errors import CapacityError, ConfigError
from bagpipe.kernels.parallel import spare_threads
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.oracles import AnyOracle, Oracles
from bagpipe.oracle.partition import RULES, Design
from bagpipe.oracle.places import Places, make_places
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies.base import Lookahead
from bagpipe.policy_options import DEFAULTS, PolicyOptions
from bagpipe.types import Table


def make_oracle(
    tables: Sequence[Table],
    widths: Sequence[int],
    size: int | Size | Share,
    first: Mapping[str, NDArray[np.int64]],
    others: Iterable[Mapping[str, NDArray[np.int64]]] = (),
    *,
    lookahead: Lookahead,
    policy: str,
    options: PolicyOptions = DEFAULTS,
    trainers: int = 1,
    uses_ahead: int = 0,
    design: Design = "owned",
) -> AnyOracle:
    """The oracle for a cache of this size, rows of these widths, and batches of which `first` has the ids by feature.

    Several trainers have a cache of this size each. Where it is to be divided, `others` tell more of what a batch
    needs, as far as there is room for it. Ids out of range and a cache too small for the first batch are refused.
    """
    for table in tables:
        check_range(table, [first[name] for name in table.features])
    needed = _rows_of(tables, first)
    if isinstance(size, Share):
        size = size.num_rows(tables)
    whole, most = policy == "ideal", [table.rows for table in tables]
    group, distinct = group_by_width(widths)
    # Copies of a row are in all caches; and how many places several oracles need together, none of them sees.
    shared = trainers > 1 and options.oracles == 1 and not RULES[design].copies

    def place(capacity: Sequence[int], used: Sequence[int]) -> Places:
        if not shared:
            return Places.alike(capacity)
        limits = _sums(group, [UNLIMITED if rows is None else rows for rows in most])
        return make_places(capacity, used, limits, trainers, moving=uses_ahead > 0)

    def divide_anew(needed: Sequence[int], used: Sequence[int]) -> Places | None:
        with suppress(CapacityError):
            return place(divide(size, widths, needed, most, bytes_max=bytes_max), used)
        return None

    capacity = divide(size, widths, needed, most, whole=whole)
    used = _rows_of_one(tables, group, first, trainers)
    if len(capacity) > 1 or options.oracles > 1 or shared:
        for other in others:
            more = np.maximum(needed, _rows_of(tables, other)).tolist()
            used = np.maximum(used, _rows_of_one(tables, group, other, trainers)).tolist()
            with suppress(CapacityError):
                capacity, needed = divide(size, widths, more, most, whole=whole), more
    places, bytes_max = place(capacity, used), num_bytes(capacity, distinct)
    can_divide = (len(capacity) > 1 or any(places.guests)) and options.oracles == 1 and not whole
    planned = [
        OracleTable(table.name, table.rows, table.features, group, width)
        for table, group, width in zip(tables, group, widths, strict=True)
    ]
    made, groups = [], []
    for own, slots in _divide_tables(planned, places.slots, needed, options.oracles, whole=whole):
        groups.append(list(slots))
        made.append(
            Oracle(
                [replace(table, group=groups[-1].index(table.group)) for table in own],
                list(slots.values()),
                lookahead=lookahead,
                policy=policy,
                options=options,
                threads=options.threads or spare_threads(len(own)),
                trainers=trainers,
                uses_ahead=uses_ahead,
                keep_lone=design != "lrpp",
                divide=divide_anew if can_divide else None,
                places=places if shared else None,
            )
        )
    return made[0] if len(made) == 1 else Oracles(made, groups)


def _rows_of(tables: Sequence[Table], batch: Mapping[str, NDArray[np.int64]]) -> list[int]:
    """How many rows a batch has of each table."""
    return [len(np.unique(np.concatenate([batch[name] for name in table.features]))) for table in tables]


def _rows_of_one(
    tables: Sequence[Table], group: Sequence[int], batch: Mapping[str, NDArray[np.int64]], trainers: int
) -> list[int]:
    """How many rows of each group one trainer uses of a batch, at the most, if it is divided as it comes."""
    parts = {name: np.array_split(batch[name], trainers) for table in tables for name in table.features}
    of_each = [
        _sums(group, _rows_of(tables, {name: part[rank] for name, part in parts.items()})) for rank in range(trainers)
    ]
    return [max(rows) for rows in zip(*of_each, strict=True)]


def _sums(group: Sequence[int], numbers: Sequence[int]) -> list[int]:
    """From a number for each table to one for each group."""
    return [sum(own for own, g in zip(numbers, group, strict=True) if g == each) for each in range(max(group) + 1)]


def _divide_tables(
    tables: Sequence[OracleTable], capacity: Sequence[int], needed: Sequence[int], count: int, *, whole: bool
) -> list[tuple[Sequence[OracleTable], dict[int, int]]]:
    """The tables of each oracle, about equally many rows of a batch, and its slots of each group that these are in."""
    if count > len(tables):
        raise ConfigError(f"policy option oracles is {count}, and there are {len(tables)} tables: give at most as many")
    done, cuts = np.cumsum(needed), [0]
    for k in range(1, count):
        end = int(np.searchsorted(done, done[-1] * k / count)) + 1
        cuts.append(min(max(end, cuts[-1] + 1), len(tables) - (count - k)))  # each has one at least
    cuts.append(len(tables))
    oracle_of = [k for k, (begin, end) in enumerate(pairwise(cuts)) for _ in range(begin, end)]
    slots: list[dict[int, int]] = [{} for _ in range(count)]
    for group, size in enumerate(capacity):
        own = [t for t, table in enumerate(tables) if table.group == group]
        oracles = [oracle_of[t] for t in own]
        # Oracles take the place of widths: each gets what a batch needs of its tables, and its part of the rest.
        shares = divide(size, oracles, [needed[t] for t in own], [tables[t].rows for t in own], whole=whole)
        for oracle, share in zip(group_by_width(oracles)[1], shares, strict=True):
            slots[oracle][group] = share
    return [(tables[begin:end], slots[k]) for k, (begin, end) in enumerate(pairwise(cuts))]
