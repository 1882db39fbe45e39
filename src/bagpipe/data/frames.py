"""Batches straight from a pandas, polars or pyarrow frame, for those who have no loader.

The frame's own memory is read wherever its types allow; it must not change while the data set is in use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from bagpipe.data.dataset import IndexedDataset
from bagpipe.data.frame_columns import (
    ID_MAX,
    NUM_SPECIAL,
    Category,
    Stored,
    Texts,
    category,
    column_of,
    ids_of,
    numbers,
    to_arrow,
)
from bagpipe.data.samples import Column, Samples
from bagpipe.errors import ConfigError
from bagpipe.table import Table

Array = NDArray[Any]
Tables = Mapping[str, Sequence[str]] | Sequence[Table]


class Frame(IndexedDataset):
    """The samples of a frame; made by `from_frame`."""

    def __init__(
        self,
        tables: tuple[Table, ...],
        labels: Array,
        dense: Sequence[Array],
        features: Mapping[str, Stored],
        vocabulary: Mapping[str, pa.Array],
    ) -> None:
        self.tables, self.num_dense, self.num_samples = tables, len(dense), len(labels)
        self.vocabulary = dict(vocabulary)
        """The texts of each table that has any: row 2 is the first of them, row 0 a missing one, row 1 one not seen."""
        self.origin = "a frame"
        self._labels, self._dense, self._features = labels, dense, features

    def gather(self, samples: NDArray[np.int64]) -> Samples:
        """The columns of these samples."""
        dense = np.empty((len(samples), self.num_dense), np.float32)
        for number, values in enumerate(self._dense):
            dense[:, number] = values[samples]
        columns = {name: Column(*stored.take(samples)) for name, stored in self._features.items()}
        return Samples(dense, columns, self._labels[samples].astype(np.float32))


def from_frame(
    frame: Any,
    *,
    label: str,
    numeric: Sequence[str] = (),
    categorical: Sequence[str] = (),
    tables: Tables = (),
    vocabulary: Mapping[str, Any] | None = None,
    missing: int | None = None,
) -> Frame:
    """A data set of the rows of a frame, in their order.

    Args:
        frame: A pandas or polars DataFrame, a pyarrow Table or RecordBatch, or anything that offers Arrow's C stream.
        label: The column of labels: numbers or booleans, none missing.
        numeric: Columns of numbers; a missing one is 0.
        categorical: Columns of ids. Integers are used as they are. Texts and categories are numbered by first
            appearance from row 2 on; row 0 is for missing values, row 1 for texts that a given vocabulary does not
            have. A column of lists gives bags.
        tables: Columns that share a table, as {"item": ("clicked", "bought")}, or a list of `bagpipe.Table`, which can
            also say how many rows there are. Other columns have a table of their own name. Texts of a shared table are
            numbered column after column.
        vocabulary: That of an earlier data set (`data.vocabulary`), so that new frames are encoded as the first one.
        missing: The id that stands for a missing one in columns of integers; without it they are refused.
    """
    if missing is not None and not -ID_MAX - 1 <= missing <= ID_MAX:
        raise ConfigError(f"missing is {missing}: give a 64-bit id")
    layout = _layout(label, numeric, categorical, tables)
    features = [name for table in layout for name in table.features]
    table = to_arrow(frame, [label, *numeric, *features])
    labels = numbers(label, column_of(table, label), null=None)
    dense = [numbers(name, column_of(table, name), null=0) for name in numeric]
    columns = {name: category(name, column_of(table, name)) for name in features}
    texts = _texts(layout, columns, vocabulary)
    made = [_make(each, [columns[name] for name in each.features], texts.get(each.name), missing) for each in layout]
    stored = {name: each for _, features_made in made for name, each in features_made.items()}
    kept = {name: each.values for name, each in texts.items()}
    return Frame(tuple(each for each, _ in made), labels, dense, stored, kept)


def _layout(label: str, numeric: Sequence[str], categorical: Sequence[str], tables: Tables) -> list[Table]:
    """The tables in the order in which their columns are named."""
    for what, names in (("numeric", numeric), ("categorical", categorical)):
        if isinstance(names, str):
            raise ConfigError(f"{what} is the text {names!r}: give a tuple of names, ({names!r},)")
    given = (
        [Table(name, None, tuple(features)) for name, features in tables.items()]
        if isinstance(tables, Mapping)
        else list(tables)
    )
    owner: dict[str, Table] = {}
    for table in given:
        for name in table.features:
            if name in owner:
                raise ConfigError(f"column {name!r} is in tables {owner[name].name!r} and {table.name!r}: give one")
            owner[name] = table
    names = list(dict.fromkeys([*categorical, *owner]))
    layout = list(dict.fromkeys(owner.get(name) or Table(name) for name in names))
    twice = [table.name for table in layout]
    for name in twice:
        if twice.count(name) > 1:
            raise ConfigError(f"there are two tables {name!r}: name the shared one as no column of its own is named")
    if not names:
        raise ConfigError("no column is categorical: name those that hold ids")
    if label in names or label in numeric:
        raise ConfigError(f"column {label!r} is the label and a feature too: a model would only learn to copy it")
    return layout


def _texts(
    layout: Sequence[Table], columns: Mapping[str, Category], vocabulary: Mapping[str, Any] | None
) -> dict[str, Texts]:
    """The vocabulary of each table of texts: empty yet, or as given."""
    named = []
    for table in layout:
        kinds = {columns[name].is_text for name in table.features}
        if len(kinds) > 1:
            listed = ", ".join(f"{name!r} ({columns[name].values.type})" for name in table.features)
            raise ConfigError(
                f"table {table.name!r} has columns of integers and of texts: {listed}: make them one kind"
            )
        if kinds == {True}:
            named.append(table.name)
    if vocabulary is None:
        return {name: Texts() for name in named}
    if set(vocabulary) != set(named):
        raise ConfigError(
            f"the vocabulary has tables {sorted(vocabulary)}, the frame has texts in {sorted(named)}: "
            "give the vocabulary of a data set with the same columns"
        )
    return {name: Texts(_known(name, vocabulary[name])) for name in named}


def _known(name: str, values: Any) -> pa.Array:
    try:
        known = (values if isinstance(values, pa.Array) else pa.array(values, pa.large_string())).cast(
            pa.large_string()
        )
    except (pa.ArrowException, TypeError) as error:
        raise ConfigError(f"the vocabulary of table {name!r} is not a list of texts: {error}") from error
    if known.null_count or len(known.unique()) < len(known):
        raise ConfigError(f"the vocabulary of table {name!r} has a text twice, or a missing one: give each once")
    return known


def _make(
    table: Table, columns: Sequence[Category], texts: Texts | None, missing: int | None
) -> tuple[Table, dict[str, Stored]]:
    """A table with its size, and the ids of its features."""
    if texts is None:
        return table, {c.name: Stored(ids_of(c, table.rows, missing), c.offsets) for c in columns}
    stored = {column.name: Stored(texts.encode(column), column.offsets) for column in columns}
    rows = len(texts.values) + NUM_SPECIAL
    if table.rows is not None and table.rows < rows:
        raise ConfigError(f"table {table.name!r} has {table.rows} rows, its texts need {rows}: raise its rows")
    return Table(table.name, table.rows or rows, table.features), stored
