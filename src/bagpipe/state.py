"""The state of a trained model, compared bit for bit (I1): dense parameters, and touched rows with optimizer state.

`parameters_sha256` is one number for all of it, equal exactly when all bits are. Of a store it is computed block by
block: rows may be many more than fit into memory (I5).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from bagpipe.reference import Reference
from bagpipe.row_parameter import dense_parameters_of
from bagpipe.store import Store

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]

_BLOCK_BYTES = 16 << 20
"""Of rows that are read and hashed at once."""


@dataclass(frozen=True)
class State:
    """All that training changes: dense parameters by name, touched rows with their optimizer state by table."""

    dense: dict[str, Tensor]
    rows: dict[str, Rows]
    """Ids and rows of each table; a table without touched rows may be left out."""

    def sha256(self) -> str:
        """One number for all of it."""
        return _sha256(self.dense, (_held(name, *self.rows[name]) for name in sorted(self.rows)))

    def differing(self, other: State) -> list[str]:
        """What is not the same bit for bit: names of tensors, and of rows."""
        names = [
            f"dense parameter {name}"
            for name in sorted(self.dense.keys() | other.dense.keys())
            if name not in self.dense or name not in other.dense or not _same(self.dense[name], other.dense[name])
        ]
        for name in sorted(self.rows.keys() | other.rows.keys()):
            mine, theirs = _by_id(self.rows.get(name)), _by_id(other.rows.get(name))
            names += [
                f"row {key} of table {name}"
                for key in sorted(mine.keys() | theirs.keys())
                if mine.get(key) != theirs.get(key)
            ]
        return names


def of_reference(reference: Reference) -> State:
    """What the reference has trained."""
    rows = {
        part.layout.table.name: (np.fromiter(part.written, np.int64), np.stack(list(part.written.values())))
        for part in reference.tables
        if part.written
    }
    return State(dict(reference.model.named_parameters()), rows)


def of_store(model: nn.Module, tables: Sequence[str], store: Store) -> State:
    """What a model and the store of its rows hold; all rows are brought into memory."""
    rows = {}
    for number, name in enumerate(tables):
        parts = list(store.iterate(number))
        if parts:
            rows[name] = np.concatenate([ids for ids, _ in parts]), np.concatenate([values for _, values in parts])
    return State(dict(dense_parameters_of(model)), rows)


def parameters_sha256(model: nn.Module, tables: Sequence[str], store: Store) -> str:
    """The same number as `of_store(model, tables, store).sha256()`, without all rows in memory.

    Takes 8 B for each row of one table at a time, its id, and a block of rows.
    """
    by_name = sorted(enumerate(tables), key=lambda table: table[1])
    return _sha256(dict(dense_parameters_of(model)), (_stored(name, number, store) for number, name in by_name))


class _Table(NamedTuple):
    name: str
    width: int
    ids: npt.NDArray[np.int64]
    """In ascending order."""
    blocks: Iterator[npt.NDArray[np.float32]]
    """The rows of these ids."""


def _sha256(dense: Mapping[str, Tensor], tables: Iterable[_Table]) -> str:
    """Digest of dense parameters by name, then of touched rows by key: name of table, ids, rows with state.

    Tables come in order of their names; one without rows is as one that is left out.
    """
    digest = hashlib.sha256()
    for name in sorted(dense):
        value = dense[name].detach().cpu().contiguous().numpy()
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(value.tobytes())
    for table in tables:
        if len(table.ids):
            digest.update(f"{table.name} {(len(table.ids), table.width)}\n".encode())
            digest.update(np.ascontiguousarray(table.ids, "<i8").data)
            for block in table.blocks:
                digest.update(np.ascontiguousarray(block, "<f4").data)
    return digest.hexdigest()


def _held(name: str, ids: npt.NDArray[np.int64], rows: npt.NDArray[np.float32]) -> _Table:
    """A table whose rows are in memory."""
    order = np.argsort(ids, kind="stable")
    blocks = (rows[order[part]] for part in _parts(len(ids), rows.shape[1]))
    return _Table(name, rows.shape[1], ids[order], blocks)


def _stored(name: str, number: int, store: Store) -> _Table:
    """A table of a store, whose rows are read as they are hashed."""
    ids, width = store.ids(number), store.tables[number].width
    ids.sort()

    def read(part: slice) -> npt.NDArray[np.float32]:
        rows = np.empty((len(ids[part]), width), np.float32)
        store.read(number, ids[part], rows)
        return rows

    return _Table(name, width, ids, map(read, _parts(len(ids), width)))


def _parts(num_rows: int, width: int) -> Iterator[slice]:
    """Blocks of rows, of which one after the other is in memory."""
    at_once = max(_BLOCK_BYTES // (4 * width), 1)
    return (slice(start, start + at_once) for start in range(0, num_rows, at_once))


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.detach().numpy().tobytes() == other.detach().numpy().tobytes()


def _by_id(part: Rows | None) -> dict[int, bytes]:
    if part is None:
        return {}
    return {key: value.tobytes() for key, value in zip(part[0].tolist(), part[1], strict=True)}
