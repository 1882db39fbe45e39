"""The layers that stand in for `nn.EmbeddingBag` and `nn.Embedding`, and what they look up.

The ids of a batch have been rewritten to handles: numbers that name table and iteration in their upper half and the
row's place in the plan in their lower, so that a layer that is given ids of another feature or batch notices (I8).
Where rows lie is in a view: the cache while training, a private buffer while evaluating, the store after training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from bagpipe.errors import ModelError
from bagpipe.kernels.bag import NO_PADDING, Bags, pool
from bagpipe.kernels.parallel import Workers
from bagpipe.layers import BoundLayer
from bagpipe.layout import RowLayout

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

TABLE_SHIFT = 32
ITERATION_SHIFT = 48
ROWS_PER_BLOCK = 65_536
WEIGHT_BYTES_MAX = 2 * 10**9
"""A state_dict holds plain weights up to this size; larger tables are exported row by row."""
SPLIT_BAGS = 2048
"""Fewer bags than this are pooled by one thread: handing over costs more than it saves."""


def handle_base(table: int, iteration: int) -> int:
    """What handles of this table begin at in this iteration."""
    return ((iteration % 2**14 + 1) << ITERATION_SHIFT) | (table << TABLE_SHIFT)


@dataclass(frozen=True, slots=True)
class TableView:
    """Where the rows of one table lie: row u of the batch is rows[slots[u]]."""

    rows: Floats
    slots: npt.NDArray[np.int32]
    ids: Ids
    base: int


@dataclass(frozen=True, slots=True)
class Call:
    """One look-up of a forward pass: what the backward pass needs."""

    bags: Bags
    column: int
    output: Tensor


class RowReader(Protocol):
    """Where rows can be read that are in no view, and set."""

    def barrier(self) -> None:
        """Return when the store has every update so far."""

    def read_rows(self, table: int, ids: Ids) -> Floats:
        """Rows as the store has them: vectors and optimizer state."""

    def write_rows(self, table: int, ids: Ids, values: Floats) -> None:
        """Set rows in the store."""


@dataclass(slots=True)
class Lookups:
    """What the layers of a model look up now; all of them share it."""

    layouts: Sequence[RowLayout]
    workers: Workers
    reader: RowReader
    """Reads rows from the store."""
    view: Sequence[TableView] | None = None
    """None: ids are looked up as they are, in the store."""
    recording: bool = False
    """Whether look-ups are remembered for a row update."""
    training: bool = False
    """Between the first batch and the end: raw ids can't be looked up then."""
    calls: list[list[Call]] = field(default_factory=list)
    """The look-ups of this iteration, a list for each table, in the order of the forward pass."""

    def forget(self) -> None:
        """Drop the remembered look-ups."""
        self.calls = [[] for _ in self.layouts]


class CachedLayer(nn.Module):
    """Looks up rows in the place of an embedding layer; called exactly as the layer it replaces."""

    def __init__(self, bound: BoundLayer, lookups: Lookups) -> None:
        super().__init__()
        layer = bound.module
        self.name, self.table, self.part = bound.name, bound.table, bound.part
        self.embedding_dim, self.num_embeddings = layer.embedding_dim, layer.num_embeddings
        self.padding_idx = layer.padding_idx
        self.mode = layer.mode if isinstance(layer, nn.EmbeddingBag) else None
        self.include_last_offset = isinstance(layer, nn.EmbeddingBag) and layer.include_last_offset
        self.trainable = layer.weight.requires_grad
        self._lookups = lookups
        self.column = lookups.layouts[bound.table].columns[bound.part]

    def extra_repr(self) -> str:
        """As nn.EmbeddingBag prints itself."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode}, cached"

    def forward(
        self,
        input: Tensor,  # noqa: A002  (the name that nn.EmbeddingBag gives it)
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pool the rows of each bag, as `nn.EmbeddingBag` does, or look them up one by one, as `nn.Embedding`."""
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            raise ModelError(f"layer {self.name!r}: gradients for per_sample_weights are not computed: detach them")
        view, handles = self._view(input)
        padding = self._padding(view)
        weights = None if per_sample_weights is None else per_sample_weights.detach().cpu().numpy()
        if self.mode is None:
            bags = Bags(handles.reshape(-1, 1), view.base)
            shape = (*input.shape, self.embedding_dim)
        else:
            bags = Bags(handles, view.base, self._offsets(offsets), weights, self.mode == "mean", padding)
            shape = (len(bags), self.embedding_dim)
        output = torch.empty(len(bags), self.embedding_dim)
        self._pool(view, bags, output)
        lookups = self._lookups
        if lookups.recording and self.trainable and torch.is_grad_enabled():
            output.requires_grad_()
            if self.mode is None and padding != NO_PADDING:
                bags = Bags(handles.reshape(-1, 1), view.base, padding=padding)
            lookups.calls[self.table].append(Call(bags, self.column, output))
        return output.view(shape)

    def _view(self, given: Tensor) -> tuple[TableView, Ids]:
        """Where the rows are, and the handles of the look-up."""
        lookups = self._lookups
        values = given.detach().to("cpu", torch.int64).contiguous().numpy()
        if lookups.view is not None:
            return lookups.view[self.table], values
        if lookups.training:
            raise ModelError(
                f"layer {self.name!r} is called outside of the training loop while training goes on: "
                "use `batches.evaluate(loader)`, or end the `with` block first"
            )
        ids, inverse = np.unique(values, return_inverse=True)
        rows = lookups.reader.read_rows(self.table, ids)
        return TableView(rows, np.arange(len(ids), dtype=np.int32), ids, 0), inverse.reshape(values.shape)

    def _pool(self, view: TableView, bags: Bags, output: Tensor) -> None:
        out = output.numpy()
        workers = self._lookups.workers
        parts = workers.num_threads if len(bags) >= SPLIT_BAGS else 1
        edges = [len(bags) * part // parts for part in range(parts + 1)]
        bad = [-1] * parts

        def pool_part(part: int) -> None:
            bad[part] = pool(view.rows, view.slots, bags, self.column, out, edges[part], edges[part + 1])

        workers.run([lambda part=part: pool_part(part) for part in range(parts)])  # type: ignore[misc]
        wrong = [position for position in bad if position >= 0]
        if wrong:
            raise ModelError(self._explain(int(bags.handles.reshape(-1)[wrong[0]])))

    def _padding(self, view: TableView) -> int:
        if self.padding_idx is None:
            return NO_PADDING
        at = np.flatnonzero(view.ids == self.padding_idx)
        return view.base + int(at[0]) if len(at) else NO_PADDING

    def _offsets(self, offsets: Tensor | None) -> Ids | None:
        if offsets is None:
            return None
        kept = offsets[:-1] if self.include_last_offset else offsets
        return kept.detach().to("cpu", torch.int64).contiguous().numpy()

    def _explain(self, handle: int) -> str:
        """Whose id this is, if it is one of ours."""
        table = (handle >> TABLE_SHIFT) % 2 ** (ITERATION_SHIFT - TABLE_SHIFT)
        mine = self._lookups.layouts[self.table].table
        if handle < 2**ITERATION_SHIFT or table >= len(self._lookups.layouts):
            return (
                f"layer {self.name!r} is given {handle}, which is not an id of this batch: "
                f"pass the ids of {', '.join(mine.features)} as they come from the loop, unchanged"
            )
        if table == self.table:
            return f"layer {self.name!r} is given ids of an earlier batch: use only the batch of the current iteration"
        other = self._lookups.layouts[table].table
        return (
            f"layer {self.name!r} was mapped to {', '.join(mine.features)} and is given ids of "
            f"{', '.join(other.features)}: correct the mapping with features={{...}}"
        )

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """The plain weight, some rows at a time: (first row, vectors as trained so far)."""
        reader, columns = self._lookups.reader, slice(self.column, self.column + self.embedding_dim)
        reader.barrier()
        for start in range(0, self.num_embeddings, ROWS_PER_BLOCK):
            ids = np.arange(start, min(start + ROWS_PER_BLOCK, self.num_embeddings), dtype=np.int64)
            yield start, torch.from_numpy(reader.read_rows(self.table, ids)[:, columns])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: ARG002
        num_bytes = self.num_embeddings * self.embedding_dim * 4
        if num_bytes > WEIGHT_BYTES_MAX:
            raise ModelError(
                f"layer {self.name!r} has {num_bytes / 1e9:.1f} GB of weights, too many for a state_dict "
                f"(at most {WEIGHT_BYTES_MAX / 1e9:.0f} GB): write them with bagpipe.export(model, path)"
            )
        weight = torch.empty(self.num_embeddings, self.embedding_dim)
        for start, block in self.blocks():
            weight[start : start + len(block)] = block
        destination[prefix + "weight"] = weight

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,  # noqa: ARG002
        strict: bool,  # noqa: ARG002
        missing_keys: list[str],
        unexpected_keys: list[str],  # noqa: ARG002
        error_msgs: list[str],
    ) -> None:
        key, shape = prefix + "weight", (self.num_embeddings, self.embedding_dim)
        if key not in state_dict:
            missing_keys.append(key)
        elif tuple(state_dict[key].shape) != shape:
            error_msgs.append(f"{key} has shape {tuple(state_dict[key].shape)}, the layer {shape}")
        else:
            self._set(state_dict[key].detach().to("cpu", torch.float32))

    def _set(self, weight: Tensor) -> None:
        reader = self._lookups.reader
        for start in range(0, self.num_embeddings, ROWS_PER_BLOCK):
            block = weight[start : start + ROWS_PER_BLOCK].numpy()
            ids = np.arange(start, start + len(block), dtype=np.int64)
            rows = reader.read_rows(self.table, ids)
            rows[:, self.column : self.column + self.embedding_dim] = block
            reader.write_rows(self.table, ids, rows)
