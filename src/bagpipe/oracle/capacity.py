"""The oracle of a run, its cache divided by what some batches need: the same wherever the oracle is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache import UNLIMITED, divide, group_by_width, num_bytes, spaces
from bagpipe.config import Share, Size
from bagpipe.embedding import check_range
from bagpipe.errors import CapacityError, ConfigError
from bagpipe.kernels.parallel import spare_threads
from bagpipe.oracle.design import RULES, Design
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.oracles import AnyOracle, Oracles
from bagpipe.oracle.places import Places, make_places
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies import make_policy
from bagpipe.policies.base import Lookahead, Policy
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
    policy: str | Policy,
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
    whole, most = make_policy(policy, options).keeps_all, [table.rows for table in tables]
    group, distinct = group_by_width(widths)
    # Copies of a row are in all caches; how many places several oracles need together, none of them sees; and where all
    # rows stay, a later batch with more guests could not have the cache divided anew.
    shared = trainers > 1 and options.oracles == 1 and not RULES[design].copies and not whole

    def share_out(needed: Sequence[int]) -> tuple[list[int], list[int]]:
        """The oracle of each table, and places."""
        oracle_of = _oracles_of(needed, options.oracles)
        return oracle_of, divide(size, widths, needed, most, oracles=oracle_of, whole=whole)

    def place(capacity: Sequence[int], used: Sequence[int]) -> Places:
        if not shared:
            return Places.alike(capacity)
        limits = _sums(group, [UNLIMITED if rows is None else rows for rows in most])
        return make_places(capacity, used, limits, trainers, moving=uses_ahead > 0)

    def divide_anew(needed: Sequence[int], used: Sequence[int]) -> Places | None:
        with suppress(CapacityError):
            return place(divide(size, widths, needed, most, bytes_max=bytes_max), used)
        return None

    (oracle_of, slots), used = share_out(needed), _rows_of_one(tables, group, first, trainers)
    if len(slots) > 1 or shared:
        for other in others:
            more = np.maximum(needed, _rows_of(tables, other)).tolist()
            used = np.maximum(used, _rows_of_one(tables, group, other, trainers)).tolist()
            with suppress(CapacityError):
                (oracle_of, slots), needed = share_out(more), more
    _, each = spaces(widths, oracle_of)
    num_rows = sum(slots)
    bytes_max = size.num_bytes if isinstance(size, Size) else num_bytes(slots, [width for width, _ in each])
    places = place(slots, used) if shared else None
    if places is not None:
        slots = list(places.slots)
    can_divide = (
        (len(distinct) > 1 or (places is not None and any(places.guests))) and options.oracles == 1 and not whole
    )
    made, groups = [], []
    for oracle in range(options.oracles):
        own = [t for t in range(len(tables)) if oracle_of[t] == oracle]
        shares = {distinct.index(width): count for (width, of), count in zip(each, slots, strict=True) if of == oracle}
        groups.append(list(shares))
        made.append(
            Oracle(
                [
                    OracleTable(
                        tables[t].name, tables[t].rows, tables[t].features, groups[-1].index(group[t]), widths[t]
                    )
                    for t in own
                ],
                list(shares.values()),
                lookahead=lookahead,
                policy=policy,
                options=options,
                threads=options.threads or spare_threads(len(own)),
                trainers=trainers,
                uses_ahead=uses_ahead,
                keep_lone=design != "lrpp",
                divide=divide_anew if can_divide else None,
                places=places,
            )
        )
        made[-1].size = num_rows, bytes_max
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


def _oracles_of(needed: Sequence[int], count: int) -> list[int]:
    """The oracle of each table: each has some that follow each other, about equally many rows of a batch."""
    if count > len(needed):
        raise ConfigError(f"policy option oracles is {count}, and there are {len(needed)} tables: give at most as many")
    done, cuts = np.cumsum(needed), [0]
    for k in range(1, count):
        end = int(np.searchsorted(done, done[-1] * k / count)) + 1
        cuts.append(min(max(end, cuts[-1] + 1), len(needed) - (count - k)))  # each has one at least
    cuts.append(len(needed))
    return [k for k, (begin, end) in enumerate(pairwise(cuts)) for _ in range(begin, end)]
