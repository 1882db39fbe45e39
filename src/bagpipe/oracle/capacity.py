"""The oracle of a run, its cache divided by what the first batch needs: the same wherever the oracle is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bagpipe.cache import divide, group_by_width
from bagpipe.config import Share, Size
from bagpipe.embedding import check_range
from bagpipe.oracle.oracle import Oracle
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
) -> Oracle:
    """The oracle for a cache of this size, rows of these widths, and batches of which `first` has the ids by feature.

    Ids out of range and a cache too small for the first batch are refused.
    """
    for table in tables:
        check_range(table, [first[name] for name in table.features])
    needed = [len(np.unique(np.concatenate([first[name] for name in table.features]))) for table in tables]
    if isinstance(size, Share):
        size = size.num_rows(tables)
    capacity = divide(size, widths, needed, [table.rows for table in tables], whole=policy == "ideal")
    return Oracle(
        [
            OracleTable(table.name, table.rows, table.features, group, width)
            for table, group, width in zip(tables, group_by_width(widths)[0], widths, strict=True)
        ],
        capacity,
        lookahead=lookahead,
        policy=policy,
        options=options,
        trainers=trainers,
        uses_ahead=uses_ahead,
        keep_lone=design != "lrpp",
    )
