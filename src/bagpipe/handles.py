"""Handles: what stands for ids in the batches of the training loop.

A handle names batch, table and the row's place in the plan, so that a layer finds its row without a search and notices
ids of another feature or batch (I8). To everything but the embedding layers it is still the id: `history != 0` compares
ids, and so does any other arithmetic; only moving ids about (indexing, reshaping, joining) keeps them handles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bagpipe.errors import ModelError

RowIds = Sequence[npt.NDArray[np.int64]]
"""For each table the ids of the rows of a batch."""

TABLE_SHIFT = 32
STAMP_SHIFT = 48
STAMPS = 2**14 - 1
"""Stamps of training iterations, and again as many of evaluation batches; they repeat only after so many."""

_PLACE = 0xFFFF_FFFF
_TABLE = 0xFFFF
_MOVES = {
    "__getitem__", "broadcast_to", "cat", "chunk", "clone", "concat", "concatenate", "contiguous", "cpu", "cuda",
    "detach", "expand", "expand_as", "flatten", "flip", "gather", "hstack", "index_select", "long", "masked_select",
    "movedim", "narrow", "permute", "pin_memory", "ravel", "repeat", "repeat_interleave", "reshape", "reshape_as",
    "roll", "select", "split", "squeeze", "stack", "swapaxes", "t", "take_along_dim", "tensor_split", "tile", "to",
    "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as", "vstack",
}  # fmt: skip
_DESCRIPTIONS = {
    "__hash__", "__len__", "__get__", "_is_view", "data_ptr", "dim", "element_size", "get_device", "is_contiguous",
    "is_floating_point", "is_pinned", "ndimension", "nelement", "numel", "record_stream", "size", "storage_offset",
    "stride", "untyped_storage",
}  # fmt: skip


_BASE = cast(Any, Tensor)._base.__get__
"""Reads what a tensor is a view of; the base of handles are numbers, or its base would be asked for without end."""


def training_base(table: int, iteration: int) -> int:
    """What the handles of a table begin at in a training iteration."""
    return ((iteration % STAMPS + 1) << STAMP_SHIFT) | (table << TABLE_SHIFT)


def evaluation_base(table: int, number: int) -> int:
    """The same for an evaluation batch; never that of a training iteration."""
    return training_base(table, number) + (STAMPS << STAMP_SHIFT)


def table_of(handle: int) -> int:
    """The table that a handle belongs to."""
    return (handle >> TABLE_SHIFT) & _TABLE


class Handles(Tensor):
    """A tensor of handles, which looks like the ids that they stand for."""

    row_ids: RowIds

    @classmethod
    def wrap(cls, values: Tensor, row_ids: RowIds) -> Handles:
        """Handles of a batch whose rows are these."""
        handles = values.as_subclass(cls)
        handles.row_ids = row_ids
        return handles

    def raw(self) -> Tensor:
        """The handles themselves, as numbers."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def ids(self) -> Tensor:
        """The ids that they stand for."""
        raw = self.raw()
        handles = raw.cpu().numpy().reshape(-1)
        tables, places = (handles >> TABLE_SHIFT) & _TABLE, handles & _PLACE
        ids = np.empty(len(handles), np.int64)
        for table in np.unique(tables).tolist():
            chosen = tables == table
            ids[chosen] = self.row_ids[table][places[chosen]]
        return torch.from_numpy(ids).reshape(raw.shape).to(raw.device)

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise ModelError(
                f"ids of a batch are changed in place ({name}): change a copy, or change them in the loader"
            )
        moved: Any = args[0] if args else None
        if name in _DESCRIPTIONS and isinstance(moved, Handles):
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            return result if func == _BASE else _wrapped(result, moved)
        first = _common(moved) if name in _MOVES else None
        if first is not None:
            raw = [part.raw() for part in moved] if isinstance(moved, list | tuple) else moved.raw()
            result = func(raw, *_as_ids(args[1:]), **_as_ids(kwargs))
            if not isinstance(result, Tensor) or result.dtype == torch.int64:
                return _wrapped(result, first)
        return func(*_as_ids(args), **_as_ids(kwargs))


def _common(moved: Any) -> Handles | None:
    """One of the handles that are moved, if nothing else is."""
    parts = moved if isinstance(moved, list | tuple) else [moved]
    same = all(isinstance(part, Handles) and part.row_ids is parts[0].row_ids for part in parts)
    return parts[0] if parts and same else None


def _wrapped(result: Any, like: Handles) -> Any:
    if isinstance(result, Tensor) and result.dtype == torch.int64:
        return Handles.wrap(result, like.row_ids)
    return type(result)(_wrapped(part, like) for part in result) if type(result) in (list, tuple) else result


def _as_ids(value: Any) -> Any:
    if isinstance(value, Handles):
        return value.ids()
    if type(value) in (list, tuple):
        return type(value)(_as_ids(part) for part in value)
    return {key: _as_ids(part) for key, part in value.items()} if type(value) is dict else value
