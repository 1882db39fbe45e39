"""The state of a trained model, compared bit for bit (I1): dense parameters, and touched rows with optimizer state.

`parameters_sha256` is one number for all of it, equal exactly when all bits are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from bagpipe.reference import Reference
from bagpipe.store import Store

Rows = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


@dataclass(frozen=True)
class State:
    """All that training changes: dense parameters by name, touched rows with their optimizer state by table."""

    dense: dict[str, Tensor]
    rows: dict[str, Rows]
    """Ids and rows of each table; a table without touched rows may be left out."""

    def sha256(self) -> str:
        """One number for all of it."""
        return parameters_sha256(self.dense, ((name, *part) for name, part in self.rows.items()))

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
    """What a model and the store of its rows hold."""
    rows = {}
    for number, name in enumerate(tables):
        parts = list(store.iterate(number))
        if parts:
            rows[name] = np.concatenate([ids for ids, _ in parts]), np.concatenate([values for _, values in parts])
    return State(dict(model.named_parameters()), rows)


def parameters_sha256(
    dense: Mapping[str, Tensor],
    tables: Iterable[tuple[str, npt.NDArray[np.int64], npt.NDArray[np.float32]]],
) -> str:
    """Digest of dense parameters by name, then of touched rows (name of table, ids, rows with state) by key."""
    digest = hashlib.sha256()
    for name in sorted(dense):
        value = dense[name].detach().cpu().contiguous().numpy()
        digest.update(f"{name} {value.dtype} {value.shape}\n".encode())
        digest.update(value.tobytes())
    for name, ids, rows in sorted(tables, key=lambda table: table[0]):
        order = np.argsort(ids, kind="stable")
        digest.update(f"{name} {rows.shape}\n".encode())
        digest.update(ids[order].astype("<i8").tobytes())
        digest.update(rows[order].astype("<f4").tobytes())
    return digest.hexdigest()


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.detach().numpy().tobytes() == other.detach().numpy().tobytes()


def _by_id(part: Rows | None) -> dict[int, bytes]:
    if part is None:
        return {}
    return {key: value.tobytes() for key, value in zip(part[0].tolist(), part[1], strict=True)}
