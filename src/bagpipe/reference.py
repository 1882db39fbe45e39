"""The ground truth: plain synchronous training in one process, one sample order, no cache, no threads of its own.

A dict of rows a table; read the rows of a batch, run the model, add up the gradients, update the rows. Everything else
in Bagpipe must end with exactly these bits (I1). It can play N trainers: each gets its samples of the batch, and
g = (sum over ranks of n_i * g_i) / n, in rank order, for rows and dense parameters alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bagpipe.arrays import Floats, Int64s
from bagpipe.layers import Binding, swap
from bagpipe.layout import RowLayout
from bagpipe.oracle.assign import Assigner, Assignment
from bagpipe.types import Batch


class Rows:
    """The rows of one table: what has been written, and the initial value of all others."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.written: dict[int, Floats] = {}

    def read(self, ids: Int64s) -> Floats:
        """Vector and state of each row; rows that were never written are not created."""
        values = np.empty((len(ids), self.layout.width), np.float32)
        missing = [position for position, row in enumerate(ids.tolist()) if row not in self.written]
        fresh = np.empty((len(missing), self.layout.width), np.float32)
        self.layout.define(ids[missing], fresh)
        values[missing] = fresh
        for position, row in enumerate(ids.tolist()):
            if row in self.written:
                values[position] = self.written[row]
        return values

    def write(self, ids: Int64s, values: Floats) -> None:
        """Replace rows as they are after an update."""
        self.written.update(zip(ids.tolist(), values, strict=True))


class Call(NamedTuple):
    """One look-up in a forward pass: what its backward pass needs."""

    ids: Int64s
    bags: Int64s
    """For each id the place in `output` that it was added to."""
    factors: Floats | None
    lengths: Floats | None
    output: Tensor


class Lookup(nn.Module):
    """Stands in for an embedding layer: reads rows, pools them in order, and remembers the call."""

    def __init__(self, rows: Rows, layer: nn.EmbeddingBag | nn.Embedding, part: int) -> None:
        super().__init__()
        self.rows, self.padding_idx = rows, layer.padding_idx
        self.columns = slice(rows.layout.columns[part], rows.layout.columns[part] + layer.embedding_dim)
        self.mode = layer.mode if isinstance(layer, nn.EmbeddingBag) else None
        self.calls: list[Call] = []

    def forward(self, ids: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """As the layer it replaces."""
        keys = ids.numpy().reshape(-1)
        vectors = self.rows.read(keys)[:, self.columns]
        counted = np.full(len(keys), True) if self.padding_idx is None else keys != self.padding_idx
        factors = None if per_sample_weights is None else per_sample_weights.numpy().reshape(-1)
        bags = self._bags(ids, offsets)
        shape = ids.shape if self.mode is None else (len(ids if offsets is None else offsets),)
        output = torch.zeros(*shape, vectors.shape[1])
        pooled, lengths = output.numpy().reshape(-1, vectors.shape[1]), None
        if self.mode is None:
            pooled += vectors
        else:
            np.add.at(pooled, bags[counted], (vectors if factors is None else vectors * factors[:, None])[counted])
        if self.mode == "mean":
            lengths = np.maximum(np.bincount(bags[counted], minlength=len(pooled)), 1).astype(np.float32)
            pooled /= lengths[:, None]
        if torch.is_grad_enabled():
            output.requires_grad_()
            of_counted = factors if factors is None else factors[counted]
            self.calls.append(Call(keys[counted], bags[counted], of_counted, lengths, output))
        return output

    def _bags(self, ids: Tensor, offsets: Tensor | None) -> Int64s:
        """For each id the bag that it belongs to."""
        if self.mode is None:
            return np.arange(ids.numel())
        if offsets is None:
            return np.repeat(np.arange(ids.shape[0]), ids.shape[1])
        return np.repeat(np.arange(len(offsets)), np.diff(np.append(offsets.numpy(), ids.shape[0])))


class Reference:
    """A model in training, one synchronous iteration at a time."""

    def __init__(
        self,
        model: nn.Module,
        binding: Binding,
        layouts: Sequence[RowLayout],
        dense_optimizer: Any,
        trainers: int = 1,
        assign: Callable[[Batch], Assignment] | None = None,
    ) -> None:
        self.model, self.trainers, self.binding = model, trainers, binding
        self.assign = assign or Assigner("contiguous", trainers)
        self.tables = [Rows(layout) for layout in layouts]
        self.lookups = [Lookup(self.tables[layer.table], layer.module, layer.part) for layer in binding.layers]
        for layer, lookup in zip(binding.layers, self.lookups, strict=True):
            swap(model, layer.name, lookup)
        self.dense, self.iteration = list(model.parameters()), 0
        self.dense_optimizer = dense_optimizer(self.dense) if self.dense else None
        self.random_states = [torch.get_rng_state()] * trainers  # each trainer has a random generator of its own

    def step(self, batch: Batch) -> float:
        """Train on one batch; its mean loss."""
        weights, dense, rows, losses = [], [], [], []
        parts = enumerate(self.assign(batch).parts(batch))
        for rank, part in [(rank, part) for rank, part in parts if len(part)]:
            losses.append(self._backward(rank, part))
            weights.append(np.float32(len(part)))
            dense.append([parameter.grad for parameter in self.dense])
            rows.append([self._row_gradients(table, part) for table in range(len(self.tables))])
        total = np.float32(len(batch)) if self.trainers > 1 else None
        for position, parameter in enumerate(self.dense):
            parameter.grad = _mean_dense([grads[position] for grads in dense], weights, total)
        if self.dense_optimizer is not None:
            self.dense_optimizer.step()
        for table, store in enumerate(self.tables):
            if self.binding.frozen(table):
                continue
            ids, grads = _mean_rows([of_rank[table] for of_rank in rows], weights, total)
            values = store.read(ids)
            store.layout.optimizer.update(values, grads, store.layout.dims, self.iteration + 1)
            store.write(ids, values)
        self.iteration += 1
        return float(np.average(losses, weights=weights))

    @torch.no_grad()
    def predict(self, batch: Batch) -> Any:
        """Logits of a batch; changes nothing."""
        return self.model(batch.dense, batch.sparse)

    def _backward(self, rank: int, part: Batch) -> float:
        torch.set_rng_state(self.random_states[rank])
        self.model.zero_grad(set_to_none=True)
        for lookup in self.lookups:
            lookup.calls.clear()
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(part.dense, part.sparse), part.labels)
        torch.autograd.backward(loss)
        self.random_states[rank] = torch.get_rng_state()
        return float(loss.item())

    def _row_gradients(self, table: int, part: Batch) -> tuple[Int64s, Floats]:
        """The rows of the table that a trainer's part names, and the sum over their occurrences, in order."""
        named = [part.sparse[name].values.numpy().reshape(-1) for name in self.binding.tables[table].features]
        ids = np.unique(np.concatenate(named))
        grads = np.zeros((len(ids), self.tables[table].layout.dim), np.float32)
        for lookup in self.lookups:
            for call in lookup.calls if lookup.rows is self.tables[table] else ():
                if call.output.grad is None:
                    continue
                occurrences = call.output.grad.numpy().reshape(-1, call.output.shape[-1])[call.bags]
                if call.lengths is not None:
                    occurrences /= call.lengths[call.bags, None]
                if call.factors is not None:
                    occurrences *= call.factors[:, None]
                np.add.at(grads[:, lookup.columns], np.searchsorted(ids, call.ids), occurrences)
        return ids, grads


def _mean_dense(grads: Sequence[Tensor | None], weights: Sequence[Any], total: Any) -> Tensor | None:
    """g = (sum over ranks of n_i * g_i) / N; with one trainer (no total) its own gradient, untouched."""
    given = [(grad, float(weight)) for grad, weight in zip(grads, weights, strict=True) if grad is not None]
    if total is None or not given:
        return grads[0]
    result = torch.zeros_like(given[0][0])
    for grad, weight in given:
        result += grad * weight
    return result / float(total)


def _mean_rows(parts: Sequence[tuple[Int64s, Floats]], weights: Sequence[Any], total: Any) -> tuple[Int64s, Floats]:
    """The same for the union of the trainers' rows."""
    if total is None:
        return parts[0]
    ids = np.unique(np.concatenate([of_rank for of_rank, _ in parts]))
    result = np.zeros((len(ids), parts[0][1].shape[1]), np.float32)
    for (of_rank, grads), weight in zip(parts, weights, strict=True):
        result[np.searchsorted(ids, of_rank)] += grads * weight
    return ids, result / total
