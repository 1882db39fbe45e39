"""`parameters_sha256`: one number for the whole state of a trained model, equal exactly when all bits are (I1)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt
from torch import Tensor


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
