"""What training has changed besides the dense part, as a dict of tensors and plain values, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bagpipe.embedding import check_range
from bagpipe.errors import ModelError
from bagpipe.layout import RowLayout
from bagpipe.store import Store

STATE_BYTES_MAX = 2 * 10**9
"""Rows up to this size fit a state_dict."""


def save_rows(layouts: Sequence[RowLayout], store: Store) -> dict[str, dict[str, Tensor]]:
    """The touched rows of each table with their optimizer state, by name."""
    num_bytes = sum(store.num_rows(number) * layout.width * 4 for number, layout in enumerate(layouts))
    if num_bytes > STATE_BYTES_MAX:
        raise ModelError(
            f"the touched rows take {num_bytes / 1e9:.1f} GB, too many for a state_dict (at most "
            f"{STATE_BYTES_MAX / 1e9:.0f} GB): keep the store's files with store='a/directory', or "
            "write the weights with bagpipe.export(model, path)"
        )
    tables = {}
    for number, layout in enumerate(layouts):
        rows = torch.empty(store.num_rows(number), layout.width, dtype=torch.float32, device="cpu")
        ids = torch.from_numpy(store.ids(number).copy())
        store.read(number, ids.numpy(), rows.numpy())
        tables[layout.table.name] = {"ids": ids, "rows": rows}
    return tables


def check_rows(layouts: Sequence[RowLayout], state: Mapping[str, Any]) -> None:
    """ModelError if saved rows are not rows of these tables."""
    saved = state.get("tables")
    names = [layout.table.name for layout in layouts]
    if not isinstance(saved, Mapping) or set(saved) != set(names):
        found = sorted(saved) if isinstance(saved, Mapping) else type(saved).__name__
        raise ModelError(f"the saved state has tables {found}, the model {sorted(names)}: load it into its own model")
    for layout in layouts:
        name, part = layout.table.name, saved[layout.table.name]
        ids, rows = part["ids"], part["rows"]
        if ids.dtype != torch.int64 or rows.dtype != torch.float32 or rows.shape != (len(ids), layout.width):
            raise ModelError(
                f"rows of table {name!r} are {rows.dtype} of shape {tuple(rows.shape)} in the saved state, here they "
                f"have {layout.width} floats: build the model and row optimizer that were saved"
            )
        if len(np.unique(ids.numpy())) < len(ids):
            raise ModelError(f"the saved state names a row of table {name!r} twice: it is damaged")
        check_range(layout.table, [ids.numpy()])
