"""The oracle of a run, its cache divided by what the first batch needs: the same wherever the oracle is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache import divide, group_by_width
from bagpipe.config import Share, Size
from bagpipe.embedding import check_range
from bagpipe.errors import ConfigError
from bagpipe.kernels.parallel import spare_threads
from bagpipe.oracle.oracle import Oracle
from bagpipe.oracle.oracles import AnyOracle, Oracles
from bagpipe.oracle.partition import Design
from bagpipe.oracle.tables import OracleTable
from bagpipe.policies.base import Lookahead
from bagpipe.policy_options import DEFAULTS, PolicyOptions
from bagpipe.types import Table


def make_oracle(
    tables: Sequence[Table],
    widths: Sequence[int],
    size: int | Size | Share,
    first: Mapping[str, NDArray[np.int64]],
    *,
    lookahead: Lookahead,
    policy: str,
    options: PolicyOptions = DEFAULTS,
    trainers: int = 1,
    uses_ahead: int = 0,
    design: Design = "owned",
) -> AnyOracle:
    """The oracle for a cache of this size, rows of these widths, and batches of which `first` has the ids by feature.

    Ids out of range and a cache too small for the first batch are refused.
    """
    for table in tables:
        check_range(table, [first[name] for name in table.features])
    needed = [len(np.unique(np.concatenate([first[name] for name in table.features]))) for table in tables]
    if isinstance(size, Share):
        size = size.num_rows(tables)
    whole = policy == "ideal"
    capacity = divide(size, widths, needed, [table.rows for table in tables], whole=whole)
    planned = [
        OracleTable(table.name, table.rows, table.features, group, width)
        for table, group, width in zip(tables, group_by_width(widths)[0], widths, strict=True)
    ]
    made, groups = [], []
    for own, slots in _divide_tables(planned, capacity, needed, options.oracles, whole=whole):
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
            )
        )
    return made[0] if len(made) == 1 else Oracles(made, groups)


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
